"""common/optim.py and common/muon.py in one process: arithmetic, buffers, layout and state."""

import math

import pytest
import torch
from torch import nn

import kernels.adamw
from common import muon, optim
from common.optim import ALIGN, Optimizer, build_buckets, decays, layout, uses_muon

ADAM = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

# The parameters of a small layer of each model, with this project's names.
SHAPES = {
    "model.embed_tokens.weight": (17, 12),
    "model.layers.0.input_layernorm.weight": (12,),
    "model.layers.0.self_attn.q_proj.weight": (20, 12),
    "model.layers.0.self_attn.q_proj.bias": (20,),
    "model.layers.0.self_attn.q_norm.weight": (5,),
    "model.layers.0.self_attn.o_proj.weight": (12, 20),
    "model.layers.0.self_attn.sinks": (4,),
    "model.layers.0.mlp.gate.weight": (3, 12),
    "model.layers.1.mlp.router.weight": (3, 12),
    "model.layers.1.mlp.router.bias": (3,),
    "model.layers.1.mlp.experts.gate_up_proj": (3, 14, 12),
    "model.layers.1.mlp.experts.gate_up_proj_bias": (3, 14),
    "model.layers.1.mlp.experts.down_proj": (3, 12, 7),
    "model.layers.1.mlp.experts.down_proj_bias": (3, 12),
    "model.layers.2.mlp.shared_experts.gate_proj.weight": (9, 12),
    "model.norm.weight": (12,),
    "lm_head.weight": (17, 12),
}
MATRICES = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.down_proj",
    "model.layers.2.mlp.shared_experts.gate_proj.weight",
}
VECTORS = {name for name in SHAPES if name.endswith(("bias", "norm.weight", "sinks"))}


def make_params(dtype=torch.float32):
    """[(name, parameter)], the same values at every call."""
    gen = torch.Generator().manual_seed(1)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def make(params, optimizer="adamw", moments="fp32", clip=0.0, **other):
    buckets = build_buckets(params, optimizer=optimizer, device="cpu")
    return Optimizer(buckets, moments=moments, clip=clip, **(ADAM | other))


def set_grads(params, seed):
    """Random gradients; returns them by name."""
    gen = torch.Generator().manual_seed(seed)
    for _, p in params:
        p.main_grad.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64))
    return {name: p.main_grad.clone() for name, p in params}


def snapshot(opt):
    return [(name, kind, start, x.clone()) for name, kind, start, x in opt.slices()]


def torch_groups(params):
    groups = {True: [], False: []}
    for name, p in params:
        groups[decays(name, p.shape)].append(p)
    return [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False]}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torch(dtype, monkeypatch):
    """Ten steps with decay groups, a changing learning rate and clipping, in several chunks."""
    monkeypatch.setattr(kernels.adamw, "CHUNK", 100)
    ours, theirs = make_params(dtype), make_params(dtype)
    opt = make(ours, clip=20.0)
    oracle = torch.optim.AdamW(torch_groups(theirs), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(10):
        grads = set_grads(ours, step)
        for name, p in theirs:
            p.grad = grads[name].clone()
        lr = 1e-2 / (step + 1)
        for group in oracle.param_groups:
            group["lr"] = lr
        expected = nn.utils.clip_grad_norm_([p for _, p in theirs], 20.0)
        oracle.step()
        norm, skipped = opt.step(lr)
        assert not skipped and expected > 20.0
        assert norm == pytest.approx(expected.item(), rel=1e-6)
    rtol = 2e-6 if dtype == torch.float32 else 1e-12
    for (_, a), (_, b) in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    assert opt.t == 10 and all(b.values.dtype == dtype for b in opt.buckets)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_clipping_scales_the_gradient(optimizer):
    """A step with clipping is a step with the gradient of norm `clip`; a small norm is left."""
    clipped, scaled = make_params(torch.float64), make_params(torch.float64)
    a, b = make(clipped, optimizer, clip=2.0), make(scaled, optimizer)
    for step in range(2):
        grads = set_grads(clipped, step)
        set_grads(scaled, step)
        total = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
        norm = total if step == 0 else 1.0  # over and under the limit
        for (_, p), (_, q) in zip(clipped, scaled):
            p.main_grad.mul_(norm / total)
            q.main_grad.mul_(2.0 / (norm + 1e-6) if step == 0 else norm / total)
        assert a.step(1e-2)[0] == pytest.approx(norm)
        b.step(1e-2)
    for (*_, x), (*_, y) in zip(a.slices(), b.slices()):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_bf16_parameters_follow_fp32_masters():
    """Steps far below a bf16 ulp add up; parameters are the rounded masters."""
    low = make_params(torch.bfloat16)
    high = [(name, nn.Parameter(p.detach().float())) for name, p in low]
    a, b = make(low), make(high)
    before = {name: p.detach().clone() for name, p in low}
    for step in range(5):
        set_grads(low, step)
        set_grads(high, step)
        a.step(1e-5)
        b.step(1e-5)
    masters = {name: x for name, kind, _, x in a.slices() if kind == "master"}
    for (name, p), (_, q) in zip(low, high):
        assert p.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
        torch.testing.assert_close(masters[name].view(q.shape), q.detach(), rtol=0, atol=0)
        assert torch.equal(p, q.bfloat16())
        assert not torch.equal(masters[name], before[name].float().flatten())


def test_bf16_gradients_accumulate_in_fp32():
    """1 + 1/512 is lost in bf16; views, compiled segments and gradients put aside all add up."""
    layer = nn.Linear(4, 3, bias=False).bfloat16()
    opt = make([("l.weight", layer.weight)])
    (bucket,) = opt.buckets
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for run, size in ((layer, 1.0), (compiled, 2**-9)):
        run(torch.full((1, 4), size, dtype=torch.bfloat16)).sum().backward()
    view = layer.weight.main_grad
    assert view.dtype == torch.float32 and torch.equal(view, torch.full((3, 4), 1 + 2**-9))
    assert torch.equal(bucket.grads[:12].view(3, 4), view) and layer.weight.grad is None
    opt.zero_grad()
    assert not view.any() and layer.weight.main_grad is view


def test_gradient_put_aside():
    """A function that returns no weight gradient and adds it to main_grad later."""
    later = []

    class Deferred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            later.append(lambda: p.main_grad.addmm_(dy.t().float(), x.float()))
            return dy @ w, None

    p = nn.Parameter(torch.randn(3, 4).bfloat16())
    make([("experts.down", p)])
    x = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    Deferred.apply(x, p).sum().backward()
    assert not p.main_grad.any()
    later[0]()
    torch.testing.assert_close(p.main_grad, x.detach().float().sum(0).expand(3, 4))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_a_step_leaves_gradients_zero(optimizer, bad):
    """Also a skipped one."""
    params = make_params(torch.bfloat16)
    opt = make(params, optimizer)
    set_grads(params, 0)
    params[0][1].main_grad[0, 0] = bad
    assert opt.step(1e-2)[1] == math.isnan(bad)
    assert all(not b.grads.any() for b in opt.buckets)


def test_lost_gradients_are_noticed():
    params = make_params()
    opt = make(params)
    params[3][1].grad = torch.ones_like(params[3][1])
    with pytest.raises(AssertionError, match=r"q_proj.bias is in .grad"):
        opt.step(1e-2)
    params[3][1].grad = None
    params[3][1].data = params[3][1].data.clone()
    with pytest.raises(AssertionError, match="q_proj.bias was moved"):
        opt.step(1e-2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_non_finite_step_is_skipped(optimizer, bad):
    params = make_params(torch.bfloat16)
    opt = make(params, optimizer, clip=1.0)
    set_grads(params, 0)
    opt.step(1e-2)
    state, values = snapshot(opt), [p.detach().clone() for _, p in params]
    set_grads(params, 1)
    params[-1][1].main_grad[2, 3] = bad
    norm, skipped = opt.step(1e-2)
    assert skipped and not math.isfinite(norm) and (opt.t, opt.skipped) == (1, 1)
    assert all(torch.equal(a[3], b[3]) for a, b in zip(state, snapshot(opt), strict=True))
    assert all(torch.equal(a, p) for a, (_, p) in zip(values, params, strict=True))
    set_grads(params, 2)
    assert opt.step(1e-2)[1] is False and (opt.t, opt.skipped) == (2, 1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_of_matrices_only(optimizer):
    """Zero gradients and one step: matrices shrink by 1 - lr * wd, the rest does not move."""
    params = make_params(torch.float64)
    before = {name: p.detach().clone() for name, p in params}
    make(params, optimizer).step(0.5)
    for name, p in params:
        factor = 1.0 if name in VECTORS else 1 - 0.5 * 0.1
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-12, atol=0)
    assert len(VECTORS) == 8


def test_what_muon_updates():
    assert {name for name, shape in SHAPES.items() if uses_muon(name, shape)} == MATRICES
    opt = make(make_params(), "muon")
    kinds = {}
    for name, kind, _, _ in opt.slices():
        kinds.setdefault(name, set()).add(kind)
    for name in SHAPES:
        adam = {"master", "exp_avg", "exp_avg_sq"}
        assert kinds[name] == ({"master", "momentum"} if name in MATRICES else adam)


def looped_newton_schulz(x):
    """The same polynomial on one matrix, by its singular values."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def test_muon_updates_every_matrix_alone(monkeypatch):
    """Stacks equal a loop over their experts' gate, up and down; the others equal AdamW."""
    monkeypatch.setattr(optim, "CHUNK", 200)
    params, twins = make_params(torch.float64), make_params(torch.float64)
    opt, adam = make(params, "muon"), make(twins)
    weights = {n: p.detach().clone() for n, p in params if n in MATRICES}
    momenta = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(3):
        grads = set_grads(params, step)
        set_grads(twins, step)
        opt.step(1e-2)
        adam.step(1e-2)
        for name, w in weights.items():
            momenta[name] = 0.95 * momenta[name] + grads[name]
            update = grads[name] + 0.95 * momenta[name]
            pieces = update.chunk(2, dim=1) if "gate_up" in name else (update,)
            singles = [m for piece in pieces for m in piece.reshape(-1, *piece.shape[-2:])]
            done = [0.2 * math.sqrt(max(m.shape)) * looped_newton_schulz(m) for m in singles]
            if "gate_up" in name:
                done = [torch.cat([done[e], done[e + 3]]) for e in range(3)]
            w.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * torch.stack(done).view(w.shape))
    for (name, p), (_, twin) in zip(params, twins):
        expected = weights[name] if name in MATRICES else twin.detach()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 48, 16), (1, 32, 32)])
def test_newton_schulz_singular_values(shape):
    x = torch.randn(shape) * torch.tensor(1e-6)
    y = muon.newton_schulz(x)
    values = torch.linalg.svdvals(y)
    assert y.shape == x.shape and values.max() < 1.3 and values.median() > 0.65
    assert torch.equal(muon.newton_schulz(torch.zeros(shape)), torch.zeros(shape))
    # The same directions as x's.
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    diagonal = (u.mT @ y @ vh.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal.sort().values, values.sort().values, rtol=0, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bf16_first_moment(optimizer):
    a_params, b_params = make_params(), make_params()
    a, b = make(a_params, optimizer, moments="bf16"), make(b_params, optimizer)
    for step in range(10):
        set_grads(a_params, step)
        set_grads(b_params, step)
        a.step(1e-3)
        b.step(1e-3)
    dtypes = {kind: x.dtype for _, kind, _, x in a.slices()}
    first = "exp_avg" if optimizer == "adamw" else "momentum"
    assert dtypes[first] == torch.bfloat16 and dtypes["exp_avg_sq"] == torch.float32
    start = dict(make_params())
    for (name, x), (_, y) in zip(a_params, b_params):
        moved = (y - start[name]).norm()
        assert 0 < (x - y).norm() < 0.02 * moved, name


def test_bad_choices():
    with pytest.raises(ValueError, match="moments = 'fp16' is unknown; use 'fp32' or 'bf16'"):
        make(make_params(), moments="fp16")
    with pytest.raises(ValueError, match="optimizer = 'sgd' is unknown; use 'adamw' or 'muon'"):
        make(make_params(), "sgd")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bucket_layout(optimizer):
    """Aligned views of zeros-padded buffers that keep their values; decayed first."""
    params, original = make_params(torch.bfloat16), dict(make_params(torch.bfloat16))
    opt = make(params, optimizer)
    seen = 0
    for b in opt.buckets:
        assert b.bounds[-1] == b.values.numel() == b.grads.numel()
        for (name, p), start in zip(b.named_params, b.starts, strict=True):
            assert start % ALIGN == 0 and torch.equal(p, original[name])
            assert p.data_ptr() == b.values[start:].data_ptr()
            assert p.main_grad.data_ptr() == b.grads[start:].data_ptr()
            assert decays(name, p.shape) == (start < b.decay_end)
            seen += p.numel()
        total = sum(p.float().sum().item() for _, p in b.named_params)
        assert b.values.float().sum().item() == pytest.approx(total, rel=1e-4)
    assert seen == sum(math.prod(shape) for shape in SHAPES.values())


def expert_shapes(layers):
    return [shape for _ in range(layers) for shape in ((128, 1536, 2048), (128, 2048, 768))]


def dense_shapes(layers):
    q, kv, o = (4096, 2048), (512, 2048), (2048, 4096)
    layer = [q, kv, kv, o, (128, 2048), (2048,), (2048,), (128,), (128,)]
    return [(151936, 2048), *(s for _ in range(layers) for s in layer), (2048,)]


@pytest.mark.parametrize("shapes", [expert_shapes(24), dense_shapes(24)])
@pytest.mark.parametrize("owners", [1, 3, 8, 64])
def test_layout_for_adamw(shapes, owners):
    sizes = [math.prod(s) for s in shapes]
    starts, bounds = layout(sizes, owners)
    assert len({b - a for a, b in zip(bounds, bounds[1:])}) == 1 and len(bounds) == owners + 1
    assert all(x % ALIGN == 0 for x in starts + bounds)
    assert all(a + n <= b for a, n, b in zip(starts, sizes, [*starts[1:], bounds[-1]]))
    assert bounds[-1] < 1.01 * sum(sizes)


@pytest.mark.parametrize("owners", [1, 3, 8, 64])
def test_layout_for_muon(owners):
    """Whole matrices; experts within 1 % of even, dense ones as even as their size allows."""
    experts = expert_shapes(24)
    dense = sorted((s for s in dense_shapes(24)[1:] if min(s) > 128 and len(s) == 2), reverse=True)
    dense.sort(key=math.prod, reverse=True)
    for shapes, counts, slack in (
        (experts, [256, 128] * 24, 1.01),
        (dense, [1] * len(dense), 1.1),
    ):
        sizes = [math.prod(s) for s in shapes]
        starts, bounds = layout(sizes, owners, counts)
        marks = {s + n // c * i for s, n, c in zip(starts, sizes, counts) for i in range(c)}
        assert set(bounds[:-1]) <= marks | {bounds[-1]} and bounds == sorted(bounds)
        assert bounds[0] == 0 and bounds[-1] == sum(sizes)  # no padding at these sizes
        largest = max(n // c for n, c in zip(sizes, counts))
        longest = max(b - a for a, b in zip(bounds, bounds[1:]))
        assert longest <= slack * max(largest, sum(sizes) / owners)


def test_more_owners_than_matrices():
    starts, bounds = layout([100, 300], 5, [1, 2])
    assert starts == [0, 128] and bounds == [0, 128, 278, 512, 512, 512]


def test_a_bucket_is_reduced_once_a_step():
    opt = make(make_params())
    first = opt.buckets[0]
    first.reduce()
    with pytest.raises(AssertionError, match="reduced twice"):
        first.reduce()
    opt.zero_grad()
    first.reduce()
    opt.step(1e-2)
    first.reduce()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_round_trip(optimizer, dtype):
    """Saved slices, loaded into a fresh optimizer, continue bit for bit."""
    params, fresh = make_params(dtype), make_params(dtype)
    a = make(params, optimizer, moments="bf16")
    for _, p in fresh:
        p.data.zero_()
    b = make(fresh, optimizer, moments="bf16")
    for step in range(2):
        set_grads(params, step)
        a.step(1e-2)
    saved = {(name, kind): (start, x.clone()) for name, kind, start, x in a.slices()}
    for name, kind, start, x in b.slices():
        assert start == 0 and x.shape == saved[name, kind][1].shape
        x.copy_(saved[name, kind][1])
    b.t = a.t
    b.refresh_params()
    for opt, ps in ((a, params), (b, fresh)):
        set_grads(ps, 7)
        opt.step(1e-2)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, fresh, strict=True))
    for x, y in zip(a.slices(), b.slices(), strict=True):
        assert x[:3] == y[:3] and torch.equal(x[3], y[3])


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gpu_equals_cpu(optimizer):
    """bf16 parameters; Muon's products are in bf16 on a GPU and fp32 on a CPU."""
    cpu, gpu = make_params(torch.bfloat16), make_params(torch.bfloat16)
    a = make(cpu, optimizer, clip=1.0)
    buckets = build_buckets(gpu, optimizer=optimizer, device="cuda")
    b = Optimizer(buckets, moments="fp32", clip=1.0, **ADAM)
    for step in range(3):
        set_grads(cpu, step)
        set_grads(gpu, step)
        norm = a.step(1e-2)[0]
        assert b.step(1e-2)[0] == pytest.approx(norm, rel=1e-5)
    for x, y in zip(a.slices(), b.slices(), strict=True):
        limit = 2e-2 if x[0] in MATRICES and optimizer == "muon" else 1e-5
        assert (x[3] - y[3].cpu()).norm() <= limit * x[3].norm(), x[:2]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_one_host_synchronisation_a_step(optimizer, moments):
    params = make_params(torch.bfloat16)
    buckets = build_buckets(params, optimizer=optimizer, device="cuda")
    opt = Optimizer(buckets, moments=moments, clip=1.0, **ADAM)
    set_grads(params, 0)
    opt.step(1e-2)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as seen:
            opt.step(1e-2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(w.message) for w in seen) == 1
