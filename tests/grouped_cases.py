"""The experts' Triton kernels in the interpreter: `python -m tests.grouped_cases` prints JSON.

A process of its own, as the interpreter must be chosen before kernels are imported. Blocks are
small, so that small sizes have several tiles, and none divides a size.
"""

import json
import traceback
from functools import partial

import torch

BF16, ACCURACY = torch.bfloat16, 1e-4


def small_blocks():
    """Kernels with tiles of 16 slots and 16 to 32 columns."""
    from kernels import grouped, grouped_wgrad

    config, wide = grouped.Config(32, 32, 4, 2, group=2), grouped.Config(32, 64, 4, 2, group=3)
    grouped.cut_for = lambda *shape: grouped.Cut(32, 16, config, config, config, wide)
    grouped_wgrad.WGRAD = grouped_wgrad.WgradConfig(64, 32, 16, 4, 2, group=2)
    return grouped, grouped_wgrad


def leaves(ids, E, D, width, biased, seed=0):
    from tests.test_experts import make

    rows, weights, gate_up, down, biases = make(ids, E, BF16, "cpu", biased, D, width, seed)
    return [rows, weights, gate_up, down, *(biases or ())]


def experts(function, args, ids, E, activation, dtype, slots=None, **kwargs):
    """Output and gradients of `function` on copies of `args` in `dtype`."""
    from kernels.dispatch import dispatch_plan

    copies = [a.detach().to(torch.promote_types(a.dtype, dtype)).requires_grad_() for a in args]
    plan = dispatch_plan(ids, E, slots)
    biases = tuple(copies[4:]) or None
    out = function(*copies[:4], plan, activation=activation, biases=biases, **kwargs)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    return [out.detach(), *(c.grad for c in copies)]


def within_twice_eager(
    ids, E=6, D=40, width=24, biased=False, activation="swiglu", slots=None, twice=False
):
    """Error against float64 next to that of the same formula in eager bf16."""
    from kernels.experts import expert_mlp, expert_mlp_ref

    small_blocks()
    args = leaves(ids, E, D, width, biased)
    poison = [torch.full((len(ids) * ids.shape[1], n), float("nan"), dtype=BF16)
              for n in (D, width, 2 * width) for _ in range(4)]  # fmt: skip
    del poison
    case = (args, ids, E, activation)
    got = experts(expert_mlp, *case, BF16, slots)
    again = experts(expert_mlp, *case, BF16, slots) if twice else got
    eager = experts(expert_mlp_ref, *case, BF16, slots)
    exact = experts(expert_mlp_ref, *case, torch.float64, slots)
    names = ("out", "rows", "weights", "gate_up", "down", "b_gate_up", "b_down")
    for name, g, a, e, x in zip(names, got, again, eager, exact, strict=False):
        assert torch.equal(g, a), f"{name} differs between two runs"
        error, allowed = (g.double() - x).norm(), 2 * (e.double() - x).norm() + ACCURACY * x.norm()
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"


def clamped():
    from kernels.experts import ClampedSwiGLU

    return ClampedSwiGLU(1.702, 0.5)


MIXED = torch.tensor([[3, 0], [0, 5], [5, 3], [1, 2], [3, 5], [2, 0], [0, 1]])


def many(tokens=21, E=6, K=3):
    ids = torch.rand(tokens, E, generator=torch.Generator().manual_seed(3)).topk(K).indices
    return ids.masked_fill(ids == 4, 2)  # one expert empty, some rows twice in another


def test_plain():
    within_twice_eager(many(), twice=True)


def test_one_token():
    within_twice_eager(torch.tensor([[5, 2, 0]]))


def test_one_expert_has_all():
    within_twice_eager(torch.full((19, 1), 4), D=24, width=40)


def test_blocks_divide():
    within_twice_eager(torch.arange(32)[:, None] % 4, E=4, D=32, width=32)


def test_biases():
    within_twice_eager(many(), biased=True)


def test_clamped_with_biases():
    within_twice_eager(many(), biased=True, activation=clamped())


def test_slots_elsewhere():
    ids = many()
    ids = ids.masked_fill(
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < 0.4, -1
    )
    within_twice_eager(ids, slots=int((ids >= 0).sum()))
    within_twice_eager(ids, slots=int((ids >= 0).sum()) + 21, twice=True)  # room for more


def test_default_blocks():
    """As on a GPU: every tile is mostly mask."""
    from kernels import grouped

    before = grouped.cut_for
    small_blocks()
    blocks, grouped.cut_for = grouped.cut_for, before
    try:
        args = leaves(MIXED, 6, 24, 40, False)
        from kernels.dispatch import dispatch_plan
        from kernels.experts import expert_mlp, expert_mlp_ref

        plan = dispatch_plan(MIXED, 6)
        with torch.no_grad():
            got, want = expert_mlp(*args, plan), expert_mlp_ref(*args, plan)
        assert (got.double() - want.double()).norm() < 1e-2 * want.double().norm()
    finally:
        grouped.cut_for = blocks


def test_tiles():
    grouped, _ = small_blocks()
    for counts in ([0, 5, 0, 3], [0, 127, 129, 0], [16, 32, 1, 0, 0], [0, 0, 0], [70] * 5):
        offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
        tiles = grouped.tiles_of(offsets, sum(counts), 16)
        want = [(e, int(offsets[e]) - n + i) for e, n in enumerate(counts) for i in range(0, n, 16)]
        assert tiles.count.item() == len(want) <= len(tiles.table_T2)
        assert [tuple(t) for t in tiles.table_T2[: len(want)].tolist()] == want


def several(biased, activation, fp32_kept=True):
    """Three micro-batches together equal each alone and the exact sum; empty groups untouched."""
    from kernels.dispatch import dispatch_plan
    from kernels.experts import add_together, expert_mlp, expert_mlp_ref

    small_blocks()
    batches = [many(), torch.tensor([[5, 2, 0]]), many(9)[:, :2].contiguous()]
    args = leaves(batches[0], 6, 40, 24, biased)
    weights = args[2:]
    gains = []
    for together in (True, False):
        waiting = []
        for w in weights:
            w.grad, w.main_grad = None, torch.full(w.shape, 0.25)
            if not fp32_kept:
                del w.main_grad
        for i, ids in enumerate(batches):
            rows, scores = leaves(ids, 6, 40, 24, biased, seed=i + 1)[:2]
            out = expert_mlp(
                rows, scores, *weights[:2], dispatch_plan(ids, 6), activation=activation,
                biases=tuple(weights[2:]) or None, defer=waiting.append,
            )  # fmt: skip
            out.backward(torch.ones_like(out))
        with torch.no_grad():
            called: list[int] = []
            add_together([*waiting, partial(called.append, 1)]) if together else [
                w() for w in waiting
            ]
        assert not together or called == [1]
        gains.append([w.main_grad - 0.25 if fp32_kept else w.grad.float() for w in weights])
    exact = [w.detach().double().requires_grad_() for w in weights]
    for i, ids in enumerate(batches):
        rows, scores = (a.detach().double() for a in leaves(ids, 6, 40, 24, biased, seed=i + 1)[:2])
        expert_mlp_ref(
            rows, scores, *exact[:2], dispatch_plan(ids, 6), activation=activation,
            biases=tuple(exact[2:]) or None,
        ).sum().backward()  # fmt: skip
    for one, other, x in zip(*gains, exact, strict=True):
        # Where an activation is clamped, its rounded argument may lie on the other side.
        assert (one.double() - x.grad).norm() < (3e-2 if biased else 1e-2) * x.grad.norm()
        assert (one - other).norm() < (1e-5 if fp32_kept else 1e-2) * x.grad.norm()
        assert not one[4].any()


def test_several_micro_batches():
    several(False, "swiglu")


def test_room_for_more_in_several():
    """The rows of nobody behind a micro-batch's slots hold anything."""
    from kernels.dispatch import dispatch_plan

    _, wgrad = small_blocks()
    torch.manual_seed(0)
    parts, exact = [], [torch.zeros(6, 48, 40).double(), torch.zeros(6, 40, 24).double()]
    for tokens in (21, 9):
        ids = many(tokens)
        plan = dispatch_plan(ids, 6, ids.numel() + 5)
        x, dy = (torch.randn(tokens, 40).to(BF16) for _ in range(2))
        dh, a = (torch.randn(len(plan.rows_S), n).to(BF16) for n in (48, 24))
        dh[-5:], a[-5:] = float("nan"), float("nan")
        parts.append((x, dh, dy, a, torch.ones(ids.shape), plan))
        start = 0
        for e, end in enumerate(plan.offsets_E.tolist()):
            rows = plan.rows_S[start:end]
            exact[0][e] += dh[start:end].double().T @ x[rows].double()
            exact[1][e] += dy[rows].double().T @ a[start:end].double()
            start = end
    merged = wgrad.merge(parts, 16)
    for up, want in zip((True, False), exact, strict=True):
        dw = torch.zeros(want.shape)
        wgrad.add_gradient(dw, merged, up)
        torch.testing.assert_close(dw.double(), want, rtol=1e-5, atol=1e-4)


def test_several_with_biases():
    several(True, clamped())


def test_without_main_grad():
    several(True, "swiglu", fp32_kept=False)


def test_empty_groups_are_not_written():
    """Also NaN stays where no row came, and rows beyond a group's end do not come in."""
    from kernels.dispatch import dispatch_plan

    _, wgrad = small_blocks()
    E, D, width = 4, 40, 24
    ids = torch.tensor([[1], [3], [1], [1], [3], [1], [3], [1]])
    plan = dispatch_plan(ids, E)
    x, dy = (torch.randn(8, D).to(BF16) for _ in range(2))
    dh, a = torch.randn(8, 2 * width).to(BF16), torch.randn(8, width).to(BF16)
    merged = wgrad.merge([(x, dh, dy, a, torch.ones(8, 1), plan)], 16)
    for up, shape, mine, other in ((True, (2 * width, D), dh, x), (False, (D, width), a, dy)):
        for config in ((32, 16, 16, 4, 2), (16, 32, 16, 4, 2)):
            dw = torch.full((E, *shape), 0.5)
            dw[0] = float("nan")
            wgrad.add_gradient(dw, merged, up, wgrad.WgradConfig(*config))
            assert dw[0].isnan().all() and (dw[2] == 0.5).all()
            there = mine[:5].double(), other[ids[:, 0] == 1].double()
            want = 0.5 + (there[0].T @ there[1] if up else there[1].T @ there[0])
            torch.testing.assert_close(dw[1].double(), want, rtol=1e-5, atol=1e-5)


def test_micro_batches_that_wait_lie_behind_one_another():
    """From the second time on nothing is copied; sizes that differ are."""
    _, wgrad = small_blocks()
    weight = torch.nn.Parameter(torch.empty(1, dtype=BF16))
    assert wgrad.reserve(weight, 6, 16) is None
    wgrad.merged(weight, 3)
    places = [wgrad.reserve(weight, 6, 16) for _ in range(3)]
    for i, columns in ((0, 32), (1, 16)):
        rows = [place[i] for place in places]
        joined = wgrad._joined(rows)
        assert joined.shape == (18, columns) and joined.data_ptr() == rows[0].data_ptr()
        assert wgrad._joined([rows[0], rows[2]]).data_ptr() != rows[0].data_ptr()
    other = wgrad.reserve(weight, 5, 16)[0]
    assert other.shape == (5, 32) and len(wgrad._joined([places[0][0], other])) == 11


CASES = [name for name in list(globals()) if name.startswith("test_")]


if __name__ == "__main__":
    import tests.interpreter  # noqa: F401

    torch.set_num_threads(1)
    results = {}
    for name in CASES:
        torch.manual_seed(0)
        try:
            globals()[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))
