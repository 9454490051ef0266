"""kernels/ring.py under kernels/attention.py: several ranks against one process.

Also the pool of processes (tests/pool.py) that these and other tests run in.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import kernels.attention as attention_module
from kernels import ring
from kernels.attention import attention, attention_ref
from tests import pool
from tests.test_attention import GPU_CASES, Libraries, eager, error, make

DOCUMENTS = [0, 3, 17, 32, 32, 40, 63, 64, 64]  # B=2, T=32: in blocks, over several, empty, padded
GQA = dict(B=2, H=4, Hkv=2, T=32, Dqk=4, Dv=4)
MLA = dict(B=2, H=2, Hkv=2, T=32, Dqk=6, Dv=4)
CASES = {
    "plain": (GQA, dict()),
    "sink": (MLA, dict(sink=True)),
    "documents": (GQA, dict(cu_seqlens=DOCUMENTS, sink=True)),
    "documents, other widths": (MLA, dict(cu_seqlens=DOCUMENTS)),
    "window of one": (GQA, dict(window=1, sink=True)),
    "window within a block": (MLA, dict(window=4, sink=True)),
    "window beyond a block": (GQA, dict(window=11)),
    "window beyond several": (GQA, dict(window=23, sink=True)),
    "window and documents": (GQA, dict(window=6, cu_seqlens=DOCUMENTS, sink=True)),
    "wide window and documents": (MLA, dict(window=14, cu_seqlens=DOCUMENTS, sink=True)),
    "window beyond T": (GQA, dict(window=32)),
}
ONE_TOKEN = {"plain": dict(), "window": dict(window=3), "documents": dict(cu_seqlens=[0, 1, 5, 8])}


def build(shapes, options, dtype=torch.float64):
    """q, k, v, dout and the keyword arguments; whole sequences, on a CPU."""
    q, k, v, sink = (x.detach() for x in make(**shapes, dtype=dtype, transposed=False))
    options = dict(options, scale=0.4, sink=sink if options.get("sink") else None)
    if options.get("cu_seqlens"):
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"]).int()
    dout = torch.randn(*q.shape[:3], v.shape[-1], dtype=torch.float64).to(dtype)
    return (q, k, v, dout), options


def run_attention(function, tensors, options):
    """out, lse, dq, dk, dv and, with sinks, dsink."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    sink = options["sink"]
    sink = None if sink is None else sink.clone().requires_grad_()
    out, lse = function(q, k, v, **{**options, "sink": sink})
    assert not lse.requires_grad
    inputs = [q, k, v] if sink is None else [q, k, v, sink]
    return [out.detach(), lse, *torch.autograd.grad(out, inputs, tensors[3])]


def on_rank(rank, world, tensors, options, group=None):
    """`run_attention` on this rank's part of the sequences."""
    group = group or dist.group.WORLD
    at = ring.zigzag(tensors[0].shape[2], group.size(), group.rank())
    parts = [x[:, :, at] for x in tensors]
    return run_attention(attention, parts, dict(options, ring=group))


def assemble(results, T):
    """Results by rank -> of whole sequences: parts put in their places, dsink summed."""
    places = torch.cat([ring.zigzag(T, len(results), rank) for rank in range(len(results))])
    whole = []
    for parts in zip(*results):
        if parts[0].dim() == 1:
            whole.append(sum(parts))
        else:
            whole.append(torch.empty_like(x := torch.cat(parts, 2)).index_copy_(2, places, x))
    return whole


def assert_equal(results, tensors, options, tolerance):
    expected = run_attention(attention_ref, tensors, options)
    got = assemble(results, tensors[0].shape[2])
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ who holds what


@pytest.mark.parametrize("cp", [1, 2, 4, 5])
def test_zigzag(cp):
    L = 3
    parts = [ring.zigzag(2 * cp * L, cp, rank) for rank in range(cp)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(2 * cp * L))
    for rank, at in enumerate(parts):
        assert torch.equal(at, at.sort().values)
        assert (at.view(2, L)[:, 0] // L).tolist() == [rank, 2 * cp - 1 - rank]
    with pytest.raises(ValueError, match=f"{2 * cp * L + 1} tokens"):
        ring.zigzag(2 * cp * L + 1, cp, 0)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_wanted_is_what_the_window_sees_and_the_rank_lacks(cp):
    for L in (1, 2, 5):
        for window in range(1, 2 * cp * L):
            for rank in range(cp):
                held = set(ring.zigzag(2 * cp * L, cp, rank).tolist())
                seen = {j for i in held for j in range(max(0, i - window + 1), i + 1)}
                spans = ring.wanted(L, cp, rank, window)
                wanted = [j for start, end in spans for j in range(start, end)]
                assert wanted == sorted(seen - held)


def test_documents_keep_their_place_on_a_rank():
    """Of T = 8, rank 0 of 2 holds 0, 1, 6, 7; the second sequence starts at 8."""
    cu = torch.tensor([0, 1, 6, 8, 15, 16, 16]).int()
    local = ring.lengths(cu, 8, ring.held(2, 2, 0))
    assert local.tolist() == [0, 1, 2, 4, 7, 8, 8] and local.dtype == torch.int32


# ------------------------------------------------------------------ against one process


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(world, case):
    tensors, options = build(*CASES[case])
    assert_equal(pool.run(world, on_rank, tensors, options), tensors, options, 1e-12)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["sink", "documents", "wide window and documents"])
def test_fp32(world, case):
    tensors, options = build(*CASES[case], dtype=torch.float32)
    assert_equal(pool.run(world, on_rank, tensors, options), tensors, options, 1e-5)


def test_bf16_is_joined_in_fp32():
    """A rank's out and gradients are as near to the exact ones as one process's own."""
    tensors, options = build(*CASES["sink"], dtype=torch.bfloat16)
    got = assemble(pool.run(4, on_rank, tensors, options), 32)
    near = run_attention(attention_ref, tensors, options)
    wide = dict(options, sink=options["sink"].double())
    exact = run_attention(attention_ref, [x.double() for x in tensors], wide)
    for g, n, e in zip(got, near, exact):
        assert g.dtype == n.dtype and error(g, e) <= 2 * error(n, e) + 1e-3


@pytest.mark.parametrize("case", ONE_TOKEN)
def test_blocks_of_one_token(case):
    tensors, options = build(dict(B=1, H=2, Hkv=1, T=8, Dqk=4, Dv=4), ONE_TOKEN[case])
    assert_equal(pool.run(4, on_rank, tensors, options), tensors, options, 1e-12)


def in_groups(rank, world, jobs):
    """Two rings, of the even and of the odd ranks, each with a job of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return on_rank(rank, world, *jobs[rank % 2], groups[rank % 2])


@pytest.mark.parametrize("case", ["plain", "window beyond a block"])
def test_two_rings_side_by_side(case):
    jobs = [build(*CASES[case]) for _ in range(2)]
    results = pool.run(4, in_groups, jobs)
    for ring_index, job in enumerate(jobs):
        assert_equal(results[ring_index::2], *job, 1e-12)


@pytest.mark.parametrize("case", ["documents", "wide window and documents"])
def test_two_runs_are_bit_equal(case):
    job = build(*CASES[case])
    first, second = pool.run(4, on_rank, *job), pool.run(4, on_rank, *job)
    assert all(torch.equal(a, b) for a, b in zip(sum(first, []), sum(second, [])))


def test_one_rank_is_no_ring():
    tensors, options = build(*CASES["sink"])
    (result,) = pool.run(1, on_rank, tensors, options)
    expected = run_attention(attention, tensors, options)
    assert all(torch.equal(a, b) for a, b in zip(result, expected))


def test_odd_length_is_refused():
    tensors, options = build(dict(GQA, T=6), dict())
    with pytest.raises(ValueError, match="T 3 must be even"):
        pool.run(2, odd, tensors, options)


def odd(rank, world, tensors, options):
    return attention(*(x[:, :, :3] for x in tensors[:3]), ring=dist.group.WORLD, **options)


# ------------------------------------------------------------------ what travels, and when


def traffic(rank, world, tensors, options):
    """Elements that this rank sent to others in a forward: (hops, all-to-all), and in both."""
    sent = [0, 0]
    hops, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def count_hops(ops):
        sent[0] += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return hops(ops)

    def count_all_to_all(output, input, output_splits, input_splits, group):
        assert input_splits[rank] == 0
        sent[1] += input.numel()
        return all_to_all(output, input, output_splits, input_splits, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", count_hops)
        patch.setattr(dist, "all_to_all_single", count_all_to_all)
        at = ring.zigzag(tensors[0].shape[2], world, rank)
        q, k, v, dout = (x[:, :, at].clone().requires_grad_() for x in tensors)
        out, _ = attention(q, k, v, ring=dist.group.WORLD, **options)
        forward = list(sent)
        out.backward(dout)
    return forward, sent


@pytest.mark.parametrize("world", [2, 4])
def test_a_window_moves_only_its_halo(world):
    window, row = 4, GQA["B"] * GQA["Hkv"] * (GQA["Dqk"] + GQA["Dv"])
    results = pool.run(world, traffic, *build(GQA, dict(window=window)))
    for rank, (forward, both) in enumerate(results):
        # The tail of each block goes to the rank of the next; two neighbours are on the last.
        blocks = [rank, 2 * world - 1 - rank]
        away = [b for b in blocks if b + 1 < 2 * world and b + 1 not in blocks]
        halo = len(away) * (window - 1) * row
        assert forward == [0, halo]
        # The backward fetches it again and gives its own halo's gradients back.
        lack = sum(end - start for start, end in ring.wanted(16 // world, world, rank, window))
        assert both == [0, 2 * halo + lack * row]


@pytest.mark.parametrize("world", [2, 4])
def test_a_hop_moves_only_what_is_seen(world):
    L, row = 16 // world, GQA["B"] * GQA["Hkv"] * (GQA["Dqk"] + GQA["Dv"])
    for rank, (forward, both) in enumerate(pool.run(world, traffic, *build(GQA, dict()))):
        keys = (rank * 2 + (world - 1 - rank)) * L * row  # whole to earlier ranks, else a half
        grads = (rank + (world - 1 - rank) * 2) * L * row
        assert forward == [keys, 0] and both == [2 * keys + grads, 0]


def events(rank, world):
    """The order of posting, computing and waiting, forward and backward."""
    log, swap, wait = [], ring._swap, ring.Arrival.wait

    class Block:
        def forward(self, q, k, v, places):
            log.append("compute")
            return torch.zeros_like(q), q.new_zeros(q.shape[:3])

        def backward(self, dout, q, k, v, out, lse, places):
            log.append("compute")
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_swap", lambda *a: (log.append("post"), swap(*a))[1])
        patch.setattr(ring.Arrival, "wait", lambda self: (log.append("wait"), wait(self))[1])
        x = torch.zeros(1, 1, 4, 2)
        out, lse = ring.forward(Block(), x, x, x, None, dist.group.WORLD)
        log.append("|")
        ring.backward(Block(), x, x, x, x, out, lse, None, dist.group.WORLD)
    return " ".join(log)


def test_the_next_hop_is_under_way_while_this_one_computes():
    forward = "post compute wait post compute wait compute"
    # Gradients of a hop are posted after it and awaited after the next one.
    backward = "post compute wait post compute post wait compute wait post wait"
    assert pool.run(3, events) == [f"{forward} | {backward}"] * 3


# ------------------------------------------------------------------ compiled, recomputed


def compiled(rank, world, jobs):
    """Eager, compiled whole, and compiled and recomputed, of each job."""
    results = []
    for tensors, options in jobs:
        at = ring.zigzag(tensors[0].shape[2], world, rank)
        parts, options = [x[:, :, at] for x in tensors], dict(options, ring=dist.group.WORLD)

        def layer(q, k, v, **options):
            out, lse = attention(q * 1.5, k, v, **options)
            return out.transpose(1, 2).flatten(2) * 2, lse

        whole = torch.compile(layer, fullgraph=True, backend="aot_eager")

        def again(*args, run=whole, **options):
            return checkpoint(run, *args, use_reentrant=False, **options)

        parts[3] = parts[3].transpose(1, 2).flatten(2)
        results.append([run_attention(f, parts, options) for f in (layer, whole, again)])
    return results


def test_compiles_whole_and_recomputes():
    jobs = [build(*CASES[case]) for case in ("sink", "wide window and documents")]
    for results in pool.run(2, compiled, jobs):
        for eagerly, whole, again in results:
            torch.testing.assert_close(whole, eagerly, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(again, eagerly, rtol=1e-13, atol=1e-13)


def opcheck(rank, world, tensors, options):
    at = ring.zigzag(tensors[0].shape[2], world, rank)
    q, k, v, dout = (x[:, :, at] for x in tensors)
    how = options["scale"], options.get("window"), dist.group.WORLD.group_name
    sink, cu = options["sink"], options.get("cu_seqlens")
    forward, backward = attention_module._ring_attention, attention_module._ring_attention_backward
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward, (*inputs, sink, cu, *how), test_utils=tests)
    out, lse = forward(q, k, v, sink, cu, *how)
    arguments = dout.contiguous(), q, k, v, cu, out, lse, *how
    torch.library.opcheck(backward, arguments, test_utils=tests[:2])


@pytest.mark.parametrize("case", ["sink", "wide window and documents"])
def test_operators_are_as_declared(case):
    """Nothing is mutated or aliased, and shapes, strides and dtypes are the fake ones."""
    pool.run(2, opcheck, *build(*CASES[case]))


# ------------------------------------------------------------------ the library path


def over_stand_ins(rank, world, jobs, deterministic):
    """`on_rank` of each job, computed by stand-ins of the libraries; and which were called."""
    libraries, results = Libraries(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_can_fuse", lambda q, k, v: True)
        libraries.replace(patch)
        torch.use_deterministic_algorithms(deterministic)
        for job in jobs:
            libraries.calls.clear()
            results.append((on_rank(rank, world, *job), set(libraries.calls)))
        torch.use_deterministic_algorithms(False)
    return results


@pytest.mark.parametrize("world, deterministic", [(2, False), (4, False), (2, True)])
def test_library_path_over_stand_ins(world, deterministic):
    jobs = [build(*CASES[case]) for case in CASES]
    results = pool.run(world, over_stand_ins, jobs, deterministic)
    for case, (tensors, options), ranks in zip(CASES, jobs, zip(*results)):
        assert_equal([result for result, _ in ranks], tensors, options, 1e-10)
        plain = case in ("plain", "sink", "window beyond T") and not deterministic
        assert all(calls == {"cudnn" if plain else "flash"} for _, calls in ranks)


PLACES = {  # of T = 256: the last two of four blocks' queries, keys before them, or both
    "all of it": ring.Places(((128, 256),), ((0, 128),)),
    "more queries": ring.Places(((64, 128), (128, 192)), ((0, 64),)),
    "own": ring.Places(((0, 64), (192, 256)), ((0, 64), (192, 256))),
    "halo": ring.Places(((128, 192),), ((77, 192),)),
}
GPU_OPTIONS = {
    "all of it": [dict(), dict(cu_seqlens=[0, 30, 140, 256, 300, 512, 512])],
    "more queries": [dict(), dict(cu_seqlens=[0, 64, 150, 256, 512])],
    "own": [dict(), dict(cu_seqlens=[0, 30, 200, 256, 320, 512])],
    "halo": [dict(window=52), dict(window=52, cu_seqlens=[0, 100, 150, 256, 512])],
}


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("width_v", [128, 64])
def test_gpu_blocks(place, width_v):
    """The library calls of one block: fewer, more or no keys, against the reference block."""
    places = PLACES[place]
    for options in GPU_OPTIONS[place]:
        shapes = dict(B=2, H=8, Hkv=2, T=256, Dqk=128, Dv=width_v)
        (q, k, v, dout), options = build(shapes, options, torch.bfloat16)
        cu = options.get("cu_seqlens")
        options["cu_seqlens"] = None if cu is None else cu.cuda()
        q, k, v, dout = (x.cuda() for x in (q, k, v, dout))
        out, lse = attention_ref(q, k, v, **options)
        queries, keys = (ring.positions(spans, "cuda") for spans in places)
        q, dout, out, lse = (x[:, :, queries] for x in (q, dout, out, lse))
        k, v = k[:, :, keys], v[:, :, keys]
        block = attention_module.Block(256, 0.4, options.get("window"), options["cu_seqlens"])
        exact_in = [x.double() for x in (q, k, v)]
        assert attention_module._can_fuse(q, k, v)
        got, exact = block.forward(q, k, v, places), block.forward(*exact_in, places)
        assert torch.equal(got[1].isinf(), exact[1].isinf())
        assert error(got[1].exp(), exact[1].exp()) < 1e-2 and error(got[0], exact[0]) < 1e-2
        got = block.backward(dout, q, k, v, out, lse, places)
        exact = block.backward(dout.double(), *exact_in, out.double(), lse.double(), places)
        for name, g, e in zip(["dq", "dk", "dv"], got, exact):
            assert error(g, e) < 1e-2, (name, error(g, e))


def on_gpu(rank, world, tensors, options):
    options = {n: x.cuda() if torch.is_tensor(x) else x for n, x in options.items()}
    return [x.cpu() for x in on_rank(rank, world, [x.cuda() for x in tensors], options)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3", "deepseek", "gpt-oss", "gpt-oss window", "4 documents"])
def test_two_gpus(case):
    """err(ring, exact) <= 2 * err(eager bf16 in one process, exact) + floor."""
    shapes, options = GPU_CASES[case]
    tensors, options = build(shapes, options, torch.bfloat16)
    options["scale"] = shapes["Dqk"] ** -0.5
    got = assemble(pool.run(2, on_gpu, tensors, options, backend="nccl"), shapes["T"])
    near = run_attention(eager, tensors, options)
    sink = options["sink"]
    wide = dict(options, sink=None if sink is None else sink.double())
    exact = run_attention(attention_ref, [x.double() for x in tensors], wide)
    for name, g, n, e in zip(["out", "lse", "dq", "dk", "dv", "dsink"], got, near, exact):
        assert error(g, e) <= 2 * error(n, e) + 1e-3, f"{name}: {error(g, e)} vs {error(n, e)}"


# ------------------------------------------------------------------ the pool


def fail(rank, world, how):
    if rank == 1 and how == "raise":
        raise KeyError("the key")
    if rank == 1 and how == "die":
        os._exit(3)
    if rank == 1 and how == "odd exception":
        raise type("Local", (Exception,), {})("cannot be pickled")
    dist.barrier()  # the others wait for it
    return torch.full((2,), rank)


@pytest.mark.parametrize(
    "how, kind, words",
    [
        ("raise", KeyError, "on rank 1 of 2"),
        ("die", RuntimeError, "rank 1 of 2 died"),
        ("odd exception", RuntimeError, "cannot be pickled"),
    ],
)
def test_a_failing_rank_fails_the_test_and_not_the_next_one(how, kind, words):
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        pool.run(2, fail, how)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert words in told and (how == "die" or "in fail" in told)
    assert time.monotonic() - begin < 30  # not the time that a collective may take
    assert [x.tolist() for x in pool.run(2, fail, "not")] == [[0, 0], [1, 1]]
