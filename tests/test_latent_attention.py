"""kernels/latent.py: one process against the definition, several ranks against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import kernels.attention as attention_module
import kernels.latent as latent_module
from kernels import ring
from kernels.attention import attention, attention_ref
from kernels.latent import latent_attention
from tests import pool
from tests.test_attention import Libraries, eager, error

SMALL = dict(B=2, H=3, T=32, R=10, Dn=4, Dr=2, Dv=6)  # no two widths alike: no transpose hides
DEEPSEEK = dict(B=2, H=16, T=512, R=512, Dn=128, Dr=64, Dv=128)
DOCUMENTS = [0, 3, 17, 32, 32, 40, 63, 64, 64]  # B=2, T=32: in blocks, over several, empty, padded
CASES = {"plain": dict(), "documents": dict(cu_seqlens=DOCUMENTS)}
NAMES = ["out", "lse", "dq", "dlatent", "dk_rope", "dw_kv_b"]


def build(shapes=SMALL, case="plain", dtype=torch.float64):
    """q, latent, k_rope, w_kv_b, dout and the keyword arguments; whole sequences, on a CPU."""
    B, H, T, R, Dn, Dr, Dv = shapes.values()

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64)

    w_kv_b = normal(H * (Dn + Dv), R) / R**0.5
    q, latent, k_rope = normal(B, H, T, Dn + Dr), normal(B, T, R), normal(B, 1, T, Dr)
    options = dict(CASES[case], scale=(Dn + Dr) ** -0.5)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"]).int()
    return [x.to(dtype) for x in (q, latent, k_rope, w_kv_b, normal(B, H, T, Dv))], options


def expand_by_einsum(q, latent, k_rope, w_kv_b):
    """Keys and values head by head, from the definition."""
    w_HER = w_kv_b.unflatten(0, (q.shape[1], -1))
    nope = q.shape[-1] - k_rope.shape[-1]
    k_nope = torch.einsum("btr,hdr->bhtd", latent, w_HER[:, :nope])
    v = torch.einsum("btr,hdr->bhtd", latent, w_HER[:, nope:])
    return torch.cat([k_nope, k_rope.repeat(1, q.shape[1], 1, 1)], -1), v


def definition(q, latent, k_rope, w_kv_b, inner=attention_ref, **options):
    return inner(q, *expand_by_einsum(q, latent, k_rope, w_kv_b), **options)


def results(function, tensors, options):
    """NAMES, for the given dout."""
    inputs = [x.clone().requires_grad_() for x in tensors[:4]]
    out, lse = function(*inputs, **options)
    assert not lse.requires_grad
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, tensors[4])]


def part(tensors, world, rank):
    """The rank's tokens: all tensors but the weight."""
    at = ring.zigzag(tensors[1].shape[1], world, rank)
    q, latent, k_rope, w_kv_b, dout = tensors
    return [q[:, :, at], latent[:, at], k_rope[:, :, at], w_kv_b, dout[:, :, at]]


def on_rank(rank, world, tensors, options):
    return results(
        latent_attention, part(tensors, world, rank), dict(options, ring=dist.group.WORLD)
    )


def assemble(by_rank, T):
    """Results by rank -> of whole sequences: parts put in their places, dw_kv_b summed."""
    places = torch.cat([ring.zigzag(T, len(by_rank), rank) for rank in range(len(by_rank))])
    whole = []
    for name, parts in zip(NAMES, zip(*by_rank)):
        if name == "dw_kv_b":
            whole.append(sum(parts))
            continue
        axis = 1 if name == "dlatent" else 2
        whole.append(torch.empty_like(x := torch.cat(parts, axis)).index_copy_(axis, places, x))
    return whole


def assert_equal(by_rank, tensors, options, tolerance):
    got = assemble(by_rank, tensors[1].shape[1])
    for name, g, e in zip(NAMES, got, results(definition, tensors, options)):
        torch.testing.assert_close(
            g, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("case", CASES)
def test_one_process_is_the_definition(case):
    tensors, options = build(case=case)
    assert_equal([results(latent_attention, tensors, options)], tensors, options, 1e-12)


def by_linear(q, latent, k_rope, w_kv_b, **options):
    """As a model without latent_attention would write it."""
    kv = (latent @ w_kv_b.T).view(*latent.shape[:2], q.shape[1], -1).transpose(1, 2)
    k_nope, v = kv.split([q.shape[-1] - k_rope.shape[-1], options.pop("Dv")], -1)
    k = torch.cat([k_nope, k_rope.expand(-1, q.shape[1], -1, -1)], -1)
    return attention(q, k, v, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_one_process_is_expansion_and_attention_bit_for_bit(case, dtype):
    tensors, options = build(case=case, dtype=dtype)
    got = results(latent_attention, tensors, options)
    expected = results(by_linear, tensors, dict(options, Dv=SMALL["Dv"]))
    assert all(torch.equal(g, e) and g.dtype == e.dtype for g, e in zip(got, expected))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(q=torch.zeros(2, 3, 6)), "4 dimensions"),
        (dict(latent=torch.zeros(1, 4, 8)), r"latent must be \(1, 5, R\)"),
        (dict(latent=torch.zeros(1, 1, 5, 8)), r"latent must be \(1, 5, R\)"),
        (dict(k_rope=torch.zeros(1, 2, 5, 2)), r"k_rope must be \(1, 1, 5, Dr\)"),
        (dict(k_rope=torch.zeros(1, 1, 5, 6)), "below q's width 6"),
        (dict(w_kv_b=torch.zeros(16, 7)), "H 2, R 8"),
        (dict(w_kv_b=torch.zeros(15, 8)), "H 2, R 8"),
        (dict(w_kv_b=torch.zeros(8, 8)), "4 rows a head, no values beyond the keys' 4"),
        (dict(latent=torch.zeros(1, 5, 8, dtype=torch.bfloat16)), "one dtype"),
        (dict(cu_seqlens=torch.tensor([0, 5])), "int32"),
    ],
)
def test_mistakes_are_named(change, words):
    good = dict(q=torch.zeros(1, 2, 5, 6), latent=torch.zeros(1, 5, 8),
                k_rope=torch.zeros(1, 1, 5, 2), w_kv_b=torch.zeros(16, 8))  # fmt: skip
    assert latent_attention(**good, scale=1.0)[0].shape == (1, 2, 5, 4)
    with pytest.raises(ValueError, match=words):
        latent_attention(**{**good, **change}, scale=1.0)


# ------------------------------------------------------------------ several ranks against one


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_one_process(world, case, dtype, tolerance):
    tensors, options = build(case=case, dtype=dtype)
    assert_equal(pool.run(world, on_rank, tensors, options), tensors, options, tolerance)


def test_blocks_of_one_token():
    tensors, options = build(dict(SMALL, B=1, T=8))
    assert_equal(pool.run(4, on_rank, tensors, options), tensors, options, 1e-12)


def test_bf16_is_joined_in_fp32():
    """A rank's results are as near to the exact ones as one process's own."""
    tensors, options = build(dtype=torch.bfloat16)
    by_rank = pool.run(4, on_rank, tensors, options)
    near = results(latent_attention, tensors, options)
    exact = results(definition, [x.double() for x in tensors], options)
    for name, g, n, e in zip(NAMES, assemble(by_rank, SMALL["T"]), near, exact):
        assert g.dtype == n.dtype, name
        assert error(g, e) <= 2 * error(n, e) + 1e-3, f"{name}: {error(g, e)} vs {error(n, e)}"


def weight_gradient(rank, world, tensors, options, of_blocks):
    """dw_kv_b where every block's dv is `of_blocks` in one place, else 0, and latents are 1."""
    blocks = iter(of_blocks)

    def backward(self, dout, q, k, v, out, lse, places):
        dv = torch.zeros_like(v)
        dv[0, 0, 0, 0] = next(blocks)
        return torch.zeros_like(q), torch.zeros_like(k), dv

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module.Block, "backward", backward)
        return on_rank(rank, world, tensors, options)[-1]


def test_weight_gradients_of_blocks_are_summed_in_fp32():
    """256 + 1 is 256 in bf16, and 256 + 1 + 1 is not."""
    tensors, options = build(dtype=torch.bfloat16)
    tensors[1] = torch.ones_like(tensors[1])
    for dw in pool.run(4, weight_gradient, tensors, options, [256, 1, 1, 0]):
        assert (dw[SMALL["Dn"]] == 258).all() and dw.sum() == 258 * SMALL["R"]


def test_one_rank_is_no_ring():
    tensors, options = build()
    (got,) = pool.run(1, on_rank, tensors, options)
    expected = results(latent_attention, tensors, options)
    assert all(torch.equal(g, e) for g, e in zip(got, expected))


def test_two_runs_are_bit_equal():
    job = build(case="documents")
    first, second = pool.run(4, on_rank, *job), pool.run(4, on_rank, *job)
    assert all(torch.equal(a, b) for a, b in zip(sum(first, []), sum(second, [])))


def test_odd_length_is_refused():
    tensors, options = build(dict(SMALL, T=6))
    with pytest.raises(ValueError, match="T 3 must be even"):
        pool.run(2, odd, tensors, options)


def odd(rank, world, tensors, options):
    q, latent, k_rope, w_kv_b, _ = tensors
    parts = q[:, :, :3], latent[:, :3], k_rope[:, :, :3], w_kv_b
    latent_attention(*parts, ring=dist.group.WORLD, **options)


# ------------------------------------------------------------------ what travels, and when


def traffic(rank, world, tensors, options):
    """Bytes that this rank sent and received: [forward, forward and backward] of each."""
    posted, hops = {"isend": 0, "irecv": 0}, dist.batch_isend_irecv

    def count(ops):
        for op in ops:
            posted[op.op.__name__] += op.tensor.numel() * op.tensor.itemsize
        return hops(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", count)
        inputs = [x.clone().requires_grad_() for x in part(tensors, world, rank)]
        out, _ = latent_attention(*inputs[:4], ring=dist.group.WORLD, **options)
        forward = dict(posted)
        out.backward(inputs[4])
    return [(forward[way], posted[way]) for way in ("isend", "irecv")]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_only_latents_and_rotated_keys_travel(world, dtype):
    """R + Dr numbers a token and hop, and their gradients back in the same dtype."""
    L = SMALL["T"] // (2 * world)
    token = SMALL["B"] * (SMALL["R"] + SMALL["Dr"]) * dtype.itemsize
    jobs = pool.run(world, traffic, *build(dtype=dtype))
    for rank, (sent, received) in enumerate(jobs):
        earlier, later = rank, world - 1 - rank  # to the former all 2 L tokens, else the half
        own, others = (2 * earlier + later) * L * token, (earlier + 2 * later) * L * token
        # The backward gets the latents again; gradients go the other way.
        assert sent == (own, 2 * own + others)
        assert received == (others, 2 * others + own)


def events(rank, world, tensors, options):
    """The order of posting, waiting, expanding and computing, forward and backward."""
    log = []

    def logged(patch, owner, name, word):
        function = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: (log.append(word), function(*args))[1])

    with pytest.MonkeyPatch.context() as patch:
        logged(patch, ring, "_swap", "post")
        logged(patch, ring.Arrival, "wait", "wait")
        logged(patch, latent_module, "_expand", "expand")
        logged(patch, attention_module.Block, "forward", "compute")
        logged(patch, attention_module.Block, "backward", "compute")
        inputs = [x.clone().requires_grad_() for x in part(tensors, world, rank)]
        out, _ = latent_attention(*inputs[:4], ring=dist.group.WORLD, **options)
        log.append("|")
        out.backward(inputs[4])
    return " ".join(log)


def test_the_next_hop_is_under_way_while_this_one_expands_and_computes():
    work = "expand compute"
    forward = f"post {work} wait post {work} wait {work}"
    backward = f"post {work} wait post {work} post wait {work} wait post wait"
    tensors, options = build(dict(SMALL, T=12))
    assert pool.run(3, events, tensors, options) == [f"{forward} | {backward}"] * 3


# ------------------------------------------------------------------ compiled, recomputed


def compiled(rank, world, tensors, options):
    """Eager, compiled whole, and compiled and recomputed."""
    *parts, dout = part(tensors, world, rank)
    options = dict(options, ring=dist.group.WORLD)

    def layer(q, latent, k_rope, w_kv_b, **options):
        out, lse = latent_attention(q * 1.5, latent.tanh(), k_rope, w_kv_b, **options)
        return out.transpose(1, 2).flatten(2) * 2, lse

    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def again(*args, run=whole, **options):
        return checkpoint(run, *args, use_reentrant=False, **options)

    parts.append(dout.transpose(1, 2).flatten(2))
    return [results(function, parts, options) for function in (layer, whole, again)]


@pytest.mark.parametrize("case", CASES)
def test_compiles_whole_and_recomputes(case):
    for eagerly, whole, again in pool.run(2, compiled, *build(case=case)):
        torch.testing.assert_close(whole, eagerly, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(again, eagerly, rtol=1e-13, atol=1e-13)


def test_one_process_compiles_whole():
    torch._dynamo.reset()
    tensors, options = build(case="documents")
    whole = torch.compile(latent_attention, fullgraph=True, backend="aot_eager")
    expected = results(latent_attention, tensors, options)
    torch.testing.assert_close(results(whole, tensors, options), expected, rtol=1e-13, atol=1e-13)


def opcheck(rank, world, tensors, options):
    q, latent, k_rope, w_kv_b, dout = part(tensors, world, rank)
    how = options.get("cu_seqlens"), options["scale"], dist.group.WORLD.group_name
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    inputs = [x.clone().requires_grad_() for x in (q, latent, k_rope, w_kv_b)]
    torch.library.opcheck(latent_module._latent_ring, (*inputs, *how), test_utils=tests)
    inputs = [x.detach() for x in inputs]
    out, lse = latent_module._latent_ring(*inputs, *how)
    arguments = dout.contiguous(), *inputs, how[0], out, lse, *how[1:]
    backward = latent_module._latent_ring_backward
    torch.library.opcheck(backward, arguments, test_utils=tests[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operators_are_as_declared(dtype):
    """Nothing is mutated or aliased, and shapes, strides and dtypes are the fake ones."""
    pool.run(2, opcheck, *build(case="documents", dtype=dtype))


# ------------------------------------------------------------------ the library path


def over_stand_ins(rank, world, jobs):
    """`on_rank` of each job, computed by stand-ins of the libraries; and which were called."""
    libraries, answers = Libraries(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_can_fuse", lambda q, k, v: True)
        libraries.replace(patch)
        for job in jobs:
            libraries.calls.clear()
            answers.append((on_rank(rank, world, *job), set(libraries.calls)))
    return answers


@pytest.mark.parametrize("world", [1, 2, 4])
def test_library_path_over_stand_ins(world):
    jobs = [build(case=case) for case in CASES]
    answers = pool.run(world, over_stand_ins, jobs)
    for library, (tensors, options), ranks in zip(["cudnn", "flash"], jobs, zip(*answers)):
        assert_equal([answer for answer, _ in ranks], tensors, options, 1e-10)
        assert all(calls == {library} for _, calls in ranks)


def test_expanded_tensors_are_read_in_place():
    """The libraries need no copy of what was expanded, which is laid out token by token."""
    (q, latent, k_rope, w_kv_b, _), _ = build(dict(DEEPSEEK, T=8, R=16), dtype=torch.bfloat16)
    rows = ring.pack(k_rope, latent.unsqueeze(1))
    k_rope, latent = ring.unpack(rows, k_rope.shape[-1])
    block = latent_module._LatentBlock(None, w_kv_b)
    for x in block._expand(q, k_rope, latent):
        assert attention_module._aligned(x) is x and x.stride(1) < x.stride(2)


# ------------------------------------------------------------------ on a GPU


GPU_DOCUMENTS = [0, 30, 140, 512, 600, 1024, 1024]  # B=2, T=512
PLACES = {  # of T = 512
    "all of it": ring.Places(((256, 512),), ((0, 256),)),
    "more queries": ring.Places(((128, 256), (256, 384)), ((0, 128),)),
    "own": ring.Places(((0, 128), (384, 512)), ((0, 128), (384, 512))),
}


def gpu_job(documents):
    tensors, options = build(DEEPSEEK, dtype=torch.bfloat16)
    if documents:
        options["cu_seqlens"] = torch.tensor(GPU_DOCUMENTS).int()
    return tensors, options


def to_gpu(tensors, options):
    options = {n: x.cuda() if torch.is_tensor(x) else x for n, x in options.items()}
    return [x.cuda() for x in tensors], options


def by_eager(*tensors, **options):
    """The unfused attention on the expanded keys and values, in the inputs' dtype."""
    return definition(*tensors, inner=eager, **options)


def assert_no_worse_than_eager(got, tensors, options):
    """err(got, exact) <= 2 * err(eager bf16 in one process, exact) + floor."""
    near = results(by_eager, tensors, options)
    exact = results(definition, [x.double() for x in tensors], options)
    for name, g, n, e in zip(NAMES, got, near, exact):
        assert error(g, e) <= 2 * error(n, e) + 1e-3, f"{name}: {error(g, e)} vs {error(n, e)}"


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_gpu(documents, whole):
    torch._dynamo.reset()
    tensors, options = to_gpu(*gpu_job(documents))
    run = torch.compile(latent_attention, fullgraph=True) if whole else latent_attention
    assert_no_worse_than_eager(results(run, tensors, options), tensors, options)


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("documents", [False, True])
def test_gpu_blocks(place, documents, monkeypatch):
    """One block by the libraries, from rows that travelled, against the reference in float64."""
    places = PLACES[place]
    (q, latent, k_rope, w_kv_b, dout), options = to_gpu(*gpu_job(documents))
    out, lse = definition(q, latent, k_rope, w_kv_b, **options)
    queries, keys = (ring.positions(spans, "cuda") for spans in places)
    q, dout, out, lse = (x[:, :, queries] for x in (q, dout, out, lse))
    k_rope, latent = ring.unpack(
        ring.pack(k_rope[:, :, keys], latent[:, None, keys]), k_rope.shape[-1]
    )
    called, fits = [], attention_module._can_fuse
    monkeypatch.setattr(
        attention_module, "_can_fuse", lambda *a: called.append(fits(*a)) or called[-1]
    )
    answers = []
    for to in (torch.bfloat16, torch.float64):
        w, *local = (x.to(to) for x in (w_kv_b, dout, q, k_rope, latent, out))
        inner = attention_module.Block(512, options["scale"], None, options.get("cu_seqlens"))
        wide = torch.promote_types(to, torch.float32)
        block = latent_module._LatentBlock(inner, w, torch.zeros_like(w, dtype=wide))
        forward = block.forward(*local[1:4], places)
        grads = block.backward(*local, lse.to(wide), places)
        answers.append([forward[0], forward[1].exp(), *grads, block.dw])
    assert called == [True, True, False, False]
    names = ["out", "exp(lse)", "dq", "dk_rope", "dlatent", "dw_kv_b"]
    # Rounding what is expanded and returned costs 4e-3; the libraries also round probabilities.
    for name, g, e in zip(names, *answers):
        assert error(g, e) < 1e-2, (name, error(g, e))


def on_gpu(rank, world, tensors, options):
    return [x.cpu() for x in on_rank(rank, world, *to_gpu(tensors, options))]


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_two_gpus(documents):
    job = gpu_job(documents)
    got = assemble(pool.run(2, on_gpu, *job, backend="nccl"), DEEPSEEK["T"])
    assert_no_worse_than_eager([x.cuda() for x in got], *to_gpu(*job))
