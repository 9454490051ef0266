"""kernels/plan.py against the references in kernels/dispatch.py: every field, bit for bit.

On a CPU the kernels run in Triton's interpreter (tests/test_kernels.py starts it).
"""

import pytest
import torch

from kernels import dispatch as d

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choices(rows, K, E, elsewhere=0.0, dtype=torch.int64, device=DEVICE):
    """(rows, K) distinct experts of E, repeated where K > E; a part of them −1; expert 1 unused."""
    scores = torch.rand(rows, max(K, E), device=device)
    ids = scores.topk(K, dim=-1).indices % E
    ids = ids.masked_fill(ids == 1, 0)
    return ids.masked_fill(torch.rand(rows, K, device=device) < elsewhere, -1).to(dtype)


def same(got, want):
    """Two tuples of tensors: shapes, dtypes and values."""
    for name, g, w in zip(want._fields, got, want, strict=True):
        if w is None:
            assert g is None, name
            continue
        assert g.shape == w.shape and g.dtype == w.dtype and g.device == w.device, name
        assert torch.equal(g, w), name


def equal_plans(ids, E, slots=None):
    """Also with room for more slots than there are, and for fewer: what has no slot may differ."""
    same(d.dispatch_plan(ids, E, slots), d.dispatch_plan_ref(ids, E, slots))
    for room in () if slots is None else (slots + 7, slots // 2):
        got, want = (make(ids, E, room) for make in (d.dispatch_plan, d.dispatch_plan_ref))
        here = min(slots, room)
        inside = want.valid_RK & (want.positions_RK < max(here, room - 1))  # and not left out
        for name in ("order_S", "rows_S", "experts_S"):
            a, b = getattr(got, name), getattr(want, name)
            assert a.shape == b.shape == (room,) and torch.equal(a[:here], b[:here]), name
        assert torch.equal(got.positions_RK[inside], want.positions_RK[inside])
        assert torch.equal(got.offsets_E, want.offsets_E)
        assert got.experts_S.numel() == 0 or 0 <= got.experts_S.min() <= got.experts_S.max() < E


def way(make, ids, E, ep, room=None):
    """The crossing `make` plans, its rows laid out, or with the same `room` to every rank."""
    cross = make(ids, E, ep)
    rows = cross.counts_P2[:, 0].tolist()
    return d.lay_out(cross, rows if room is None else [max(max(rows) + room, 0)] * ep)


def equal_crossings(ids, E, ep, dtype=torch.float32):
    for room in (
        (-1, 2) if len(ids) else ()
    ):  # where it is short the row of a token that is left out may be any
        got, want = way(d.crossing, ids, E, ep, room), way(d.crossing_ref, ids, E, ep, room)
        for name in ("to_NP", "token_R", "rank_R"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert torch.equal(got.at_NP[got.to_NP], want.at_NP[want.to_NP])
    cross, want = way(d.crossing, ids, E, ep), way(d.crossing_ref, ids, E, ep)
    same(cross, want)
    weights = torch.rand(ids.T.shape, device=ids.device).to(dtype).T.requires_grad_()
    _, got_ids, got = d.spread(weights[:, :1].detach(), ids, weights, cross, E // ep)
    want_ids, want = d.spread_choices_ref(ids, weights, want, E // ep)
    assert torch.equal(got_ids, want_ids) and got_ids.dtype == want_ids.dtype
    assert torch.equal(got, want) and got.dtype == want.dtype
    dout = torch.rand_like(want).t().contiguous().t()  # gradients may come with any strides
    grads = [torch.autograd.grad(out, weights, dout)[0] for out in (got, want)]
    assert torch.equal(*grads) and grads[0].dtype == dtype


@pytest.fixture
def kernels():
    """The module, and the certainty that it is what runs."""
    from kernels import plan

    assert d._in_triton(torch.zeros(1, device=DEVICE))
    return plan


@pytest.fixture
def small(kernels, monkeypatch):
    """Several programs of several tiles even at small sizes."""
    for name, value in dict(PROGRAMS=3, TILE=256, LONGEST=8).items():
        monkeypatch.setattr(kernels, name, value)


SIZES = [(0, 2, 3), (1, 1, 1), (1, 16, 4), (37, 3, 6), (64, 2, 8), (9, 5, 33), (101, 1, 5)]


@pytest.mark.triton
@pytest.mark.parametrize("elsewhere", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("rows, K, E", SIZES)
def test_plan(small, rows, K, E, elsewhere):
    ids = choices(rows, K, E, elsewhere or 0.0)
    equal_plans(ids, E, None if elsewhere is None else int((ids >= 0).sum()))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plan_with_its_own_tiles(kernels, dtype):
    """As on a GPU; also choices that are not contiguous, and all of one expert."""
    ids = choices(150, 4, 48, 0.3, dtype)
    equal_plans(ids, 48, int((ids >= 0).sum()))
    equal_plans(choices(4, 130, 512, dtype=dtype).T, 512)
    equal_plans(torch.full((70, 2), 2, dtype=dtype, device=DEVICE), 3)


@pytest.mark.triton
@pytest.mark.parametrize("ep", [1, 2, 3, 6])
@pytest.mark.parametrize("rows, K", [(0, 2), (1, 1), (1, 5), (41, 3), (72, 2)])
def test_crossing_and_what_travels(small, rows, K, ep):
    equal_crossings(choices(rows, K, 6), 6, ep)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_crossing_with_its_own_tiles(kernels, dtype):
    """Two kinds of ids, 64 ranks, more choices than ranks, ranks that nothing goes to."""
    equal_crossings(choices(140, 4, 128, dtype=torch.int32), 128, 64, dtype)
    equal_crossings(choices(3, 16, 32), 32, 2, dtype)
    equal_crossings(choices(9, 2, 32).T.contiguous().T, 32, 8, dtype)
    equal_crossings(torch.full((20, 2), 5, device=DEVICE), 8, 4, dtype)


@pytest.mark.triton
@pytest.mark.parametrize("rows, columns", [(0, 1), (1, 512), (32768, 128), (131072, 128), (7, 2)])
def test_every_row_is_someones(kernels, rows, columns):
    tile, tiles, programs = kernels._cut(rows, columns)
    assert 1 <= programs <= kernels.PROGRAMS and tile & (tile - 1) == 0
    assert programs * tiles * tile >= rows
    assert (programs - 1) * tiles * tile < max(rows, 1)  # and no program is without one


def test_on_a_cpu_it_is_the_reference(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not d._in_triton(torch.zeros(1))


# ------------------------------------------------------------------------------------------------
# Compiled
# ------------------------------------------------------------------------------------------------

POINTERS = {
    "*i32": "table_BE experts_S offsets_E table_2BP local_RK", "i32": "slots here tiles N choices",
    "*i64": "ids_S order_S rows_S positions_S ids_NK counts_P2 token_R rank_R at_NP",
    "*i1": "valid_S to_NP", "*fp32": "weights_NK weights_RK dweights_RK dweights_NK",
}  # fmt: skip
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
JOBS = [("_count_kernel", 1), ("_count_kernel", 128), ("_place_kernel", 1), ("_place_kernel", 16),
        ("_place_kernel", 128), ("_place_kernel", 512), ("_destinations_kernel", 1),
        ("_destinations_kernel", 8), ("_destinations_kernel", 64), ("_rows_kernel", 1),
        ("_rows_kernel", 8), ("_rows_kernel", 64), ("_spread_kernel", 8), ("_unspread_kernel", 8),
]  # fmt: skip


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name, columns", JOBS)
def test_compiles(name, columns, arch):
    """Without a GPU; no atomics in it, whose order could differ, and all of it in registers."""
    from kernels import plan
    from tests.test_experts import compiled

    kernel = getattr(plan, name)
    constants = dict.fromkeys(("E", "P", "EXPERTS", "RANKS"), columns) | dict(LOCAL=2, K=8)
    constants["BLOCK"] = 512 if "spread" in name else plan._cut(32768, columns)[0]
    constants |= {"valid_S": None} if columns == 512 else {}
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    made = compiled(kernel, arch, TYPES, 4 if "spread" in name else plan.WARPS, 3, **constants)
    assert made.metadata.shared <= 227 * 1024
    ptx = made.asm["ptx"]
    assert not any(word in ptx for word in ("atom.", "red.global", "st.local"))


# ------------------------------------------------------------------------------------------------
# On a GPU
# ------------------------------------------------------------------------------------------------

NATURAL = [(4096, 8, 128), (16384, 8, 128), (4096, 4, 32), (4096, 6, 64), (1, 8, 128), (5, 8, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, K, E", NATURAL)
def test_gpu_natural_sizes(tokens, K, E):
    ids = choices(tokens, K, E)
    equal_plans(ids, E)
    equal_plans(ids[:, :2].contiguous().clamp(max=3), E)  # nearly all experts empty
    some = choices(tokens, K, E, 0.4, torch.int32)
    equal_plans(some, E, int((some >= 0).sum()))
    for ep in (2, 8, 32):
        equal_crossings(ids, E, ep)


@pytest.mark.gpu
def test_gpu_in_a_graph_and_without_waiting():
    """Replayed with other choices, it plans those."""
    ids = choices(1024, 8, 128)
    d.dispatch_plan(ids, 128), d.crossing(ids, 128, 8)  # compiled before the capture
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan, cross = d.dispatch_plan(ids, 128), d.crossing(ids, 128, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        ids.copy_(choices(1024, 8, 128))
        graph.replay()
        same(plan, d.dispatch_plan_ref(ids, 128))
        rows = cross.counts_P2[:, 0].tolist()
        same(d.lay_out(cross, rows), way(d.crossing_ref, ids, 128, 8))
