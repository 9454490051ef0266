"""common/optim.py over replicas: every layout gives one process's weights, norm and state."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from common.muon import split_matrices
from common.optim import Optimizer, build_buckets
from tests.pool import run
from tests.test_optim import ADAM, MATRICES, SHAPES, make_params

SHARES = 4  # of which each step's gradient is the sum, dealt to the replicas
EXPERTS = 4
DENSE = {"model.norm.weight": (16,), "model.layers.0.self_attn.q_proj.weight": (24, 16)}
STACKS = {
    "model.layers.0.mlp.experts.gate_up_proj": (EXPERTS, 16, 16),
    "model.layers.0.mlp.experts.down_proj": (EXPERTS, 16, 8),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (EXPERTS, 16),
}


@dataclass
class Result:
    """What a rank has after training; tensors as float64 arrays."""

    norms: list
    weights: dict
    slices: list  # (name, kind, start, array)
    empty: list  # by bucket: the rank owns nothing of it
    even: list  # by bucket


def array(x):
    return x.detach().cpu().double().numpy().copy()


def result(norms, params, opt):
    return Result(
        norms, {name: array(p) for name, p in params},
        [(name, kind, start, array(x)) for name, kind, start, x in opt.slices()],
        [b.own.start == b.own.stop for b in opt.buckets], [b._even() for b in opt.buckets],
    )  # fmt: skip


def share(name, whole_shape, step, i):
    """Share i of the gradient of a whole parameter at a step."""
    gen = torch.Generator().manual_seed(1000 * step + 100 * i + sum(name.encode()) % 97)
    return torch.randn(whole_shape, generator=gen, dtype=torch.float64)


def train(rank, world, optimizer, dtype, *, group=None, names=None, device="cpu"):
    """Three steps with clipping on the small layers of tests/test_optim.py, as replica `rank`."""
    params = [(n, p) for n, p in make_params(dtype) if names is None or n in names]
    buckets = build_buckets(params, optimizer=optimizer, device=device, group=group)
    opt = Optimizer(buckets, clip=20.0, **(ADAM | dict(eps=1e-5)))
    norms = []
    for step in range(3):
        opt.zero_grad()
        for i in range(rank, SHARES, world):
            for name, p in params:
                p.main_grad += share(name, p.shape, step, i).to(p.main_grad)
        if step == 1:
            buckets[-1].reduce()  # while others are still computed
        norm, skipped = opt.step(1e-2)
        assert not skipped and norm > 20.0
        assert all(not b.grads.any() for b in buckets)
        norms.append(norm)
    return params, opt, norms


def train_replica(rank, world, optimizer, dtype, names=None, device="cpu"):
    group = dist.group.WORLD
    params, opt, norms = train(
        rank, world, optimizer, dtype, group=group, names=names, device=device
    )  # fmt: skip
    before = result(norms, params, opt)
    for b in opt.buckets:  # as if only the masters had been loaded
        keep = b.values[b.own].clone()
        b.values.zero_()
        b.values[b.own] = keep if b.values.dtype == b.grads.dtype else 0
    opt.refresh_params()
    assert all(np.array_equal(before.weights[name], array(p)) for name, p in params)
    return before


def alone(optimizer, dtype, names=None):
    params, opt, norms = train(0, 1, optimizer, dtype, names=names)
    return result(norms, params, opt)


def check_against(expected, results, rtol):
    """Weights, norms and joined slices equal one process's; slices hold each element once."""
    whole = {(name, kind): x for name, kind, _, x in expected.slices}
    count = {key: np.zeros(x.size) for key, x in whole.items()}
    for r in results:
        assert r.norms == results[0].norms
        np.testing.assert_allclose(r.norms, expected.norms, rtol=max(rtol, 1e-14))
        for name, kind, start, x in r.slices:
            count[name, kind][start : start + x.size] += 1
            reference = whole[name, kind][start : start + x.size]
            np.testing.assert_allclose(x, reference, rtol=rtol, atol=rtol, err_msg=name)
    assert all((n == 1).all() for n in count.values())


def check_muon(results):
    """Whole matrices of the right parameters only."""
    for r in results:
        for name, kind, start, x in r.slices:
            if name in MATRICES:
                size = math.prod(split_matrices(name, SHAPES[name])[1:])
                assert kind in ("master", "momentum") and start % size == x.size % size == 0
            else:
                assert kind in ("master", "exp_avg", "exp_avg_sq")


def same_weights(a, b, rtol):
    for name, x in a.weights.items():
        np.testing.assert_allclose(x, b.weights[name], rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_replicas_equal_one_process(optimizer, dtype, world):
    """Muon's sums of five products a step amplify rounding; bf16 weights are rounded masters."""
    wide = 1e-13 if dtype == torch.float64 else 1e-6
    wide *= 10 if optimizer == "muon" else 1
    results = run(world, train_replica, optimizer, dtype)
    expected = alone(optimizer, dtype)
    check_against(expected, results, wide)
    if optimizer == "muon":
        check_muon(results)
    for r in results:
        same_weights(r, expected, 2**-7 if dtype == torch.bfloat16 else wide)
        same_weights(r, results[0], 0)  # replicas never differ


def test_the_same_run_twice_gives_the_same_bits():
    a, b = (run(4, train_replica, "muon", torch.float32) for _ in range(2))
    for x, y in zip(a, b, strict=True):
        assert x.norms == y.norms
        assert all(np.array_equal(p[3], q[3]) for p, q in zip(x.slices, y.slices, strict=True))


def test_an_owner_with_nothing():
    """Three matrices for four owners: one gets none of Muon's; AdamW's are dealt by elements."""
    names = {n for n in MATRICES if "self_attn" in n or "shared" in n} | {"model.norm.weight"}
    results = run(4, train_replica, "muon", torch.float64, names)
    check_against(alone("muon", torch.float64, names), results, 1e-12)
    check_muon(results)
    assert [r.empty[0] for r in results].count(True) == 1
    assert results[0].even == [False, True]


def train_experts(rank, world, optimizer, ep):
    """Expert parallelism: dense parameters on all ranks, every ep-th rank has the same experts."""
    copies, ep_rank = world // ep, rank % ep
    local = slice(ep_rank * EXPERTS // ep, (ep_rank + 1) * EXPERTS // ep)
    dense, stacks, replicas = [], [], None
    for name, shape in (DENSE | STACKS).items():
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        mine = whole[local].clone() if name in STACKS else whole
        (stacks if name in STACKS else dense).append((name, nn.Parameter(mine)))
    for r in range(ep if copies > 1 else 0):
        made = dist.new_group(list(range(r, world, ep)))
        replicas = made if r == ep_rank else replicas
    kind = dict(optimizer=optimizer, device="cpu")
    buckets = build_buckets(dense, group=dist.group.WORLD if world > 1 else None, **kind)
    buckets += build_buckets(stacks, group=replicas, first_expert=local.start, **kind)
    opt = Optimizer(buckets, clip=20.0, **(ADAM | dict(eps=1e-5)))
    norms = []
    for step in range(3):
        opt.zero_grad()
        for i in range(SHARES):
            if i % world == rank:
                for name, p in dense:
                    p.main_grad += share(name, DENSE[name], step, i)
            if i % copies == rank // ep:
                for name, p in stacks:
                    p.main_grad += share(name, STACKS[name], step, i)[local]
        buckets[-1].reduce()
        norms.append(opt.step(1e-2)[0])
    return result(norms, dense + stacks, opt)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("world, ep", [(4, 2), (2, 2), (4, 4)])
def test_expert_parallel_equals_one_process(optimizer, world, ep):
    """Norm and clipping over both kinds of groups; slices count elements from expert 0."""
    results, expected = run(world, train_experts, optimizer, ep), train_experts(0, 1, optimizer, 1)
    assert min(expected.norms) > 20.0
    check_against(expected, results, 1e-12)
    # Four experts' equal matrices divide evenly: one collective also under Muon.
    assert all(all(r.even[-2:]) for r in results)


def plant_norms(rank, world, optimizer):
    """Dense gradients 0, expert gradients of norm 3 on rank 0 and 4 on rank 1."""
    name, shape = "model.layers.0.mlp.experts.down_proj", (2, 16, 8)
    dense = [(n, nn.Parameter(torch.randn(s))) for n, s in DENSE.items()]
    stack = [(name, nn.Parameter(torch.randn(shape)))]
    kind = dict(optimizer=optimizer, device="cpu")
    buckets = build_buckets(dense, group=dist.group.WORLD, **kind)
    buckets += build_buckets(stack, first_expert=2 * rank, **kind)
    opt = Optimizer(buckets, clip=1.0, **ADAM)
    stack[0][1].main_grad[1, 2] = (3.0, 4.0)[rank] / math.sqrt(8)
    norm, _ = opt.step(1e-2)
    first = {"adamw": "exp_avg", "muon": "momentum"}[optimizer]
    moments = [x.norm().item() for n, kind, _, x in opt.slices() if kind == first and n == name]
    return norm, moments[0]


@pytest.mark.parametrize("optimizer, share_kept", [("adamw", 1 - ADAM["beta1"]), ("muon", 1.0)])
def test_norm_counts_every_ranks_experts(optimizer, share_kept):
    results = run(2, plant_norms, optimizer)
    assert [norm for norm, _ in results] == [pytest.approx(5.0, rel=1e-6)] * 2
    kept = [moment / share_kept for _, moment in results]
    assert kept == pytest.approx([3.0 * 0.2, 4.0 * 0.2], rel=1e-5)


def step_with_nan(rank, world, optimizer):
    params = make_params()
    buckets = build_buckets(params, optimizer=optimizer, device="cpu", group=dist.group.WORLD)
    opt = Optimizer(buckets, clip=1.0, **ADAM)

    def step(bad):
        opt.zero_grad()
        for i, (name, p) in enumerate(params):
            p.main_grad += share(name, p.shape, i, rank)
        if bad:
            params[0][1].main_grad[0, 0] = math.nan
        return opt.step(1e-2)

    assert not step(False)[1]
    before = result([], params, opt)
    norm, skipped = step(rank == 1)
    after = result([], params, opt)
    assert skipped and math.isnan(norm) and (opt.t, opt.skipped) == (1, 1)
    assert all(np.array_equal(before.weights[n], after.weights[n]) for n in before.weights)
    assert all(np.array_equal(x[3], y[3]) for x, y in zip(before.slices, after.slices, strict=True))
    assert not step(False)[1] and (opt.t, opt.skipped) == (2, 1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_ranks_nan_skips_everyones_step(optimizer):
    """In the embedding's first element, which another rank owns."""
    run(2, step_with_nan, optimizer)


class Largest(TorchFunctionMode):
    """Bytes of the largest storage that a call returned, but for those that exist already."""

    def __init__(self, existing):
        super().__init__()
        self.existing, self.nbytes = {x.untyped_storage().data_ptr() for x in existing}, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.existing:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


def measure_memory(rank, world, optimizer):
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(9)]
    params = [(name, nn.Parameter(torch.randn(64, 64).bfloat16())) for name in names]
    buckets = build_buckets(params, optimizer=optimizer, device="cpu", group=dist.group.WORLD)
    opt = Optimizer(buckets, clip=1.0, **ADAM)
    (b,) = buckets
    with Largest([b.values, b.grads, *b.state.values()]) as largest:
        opt.step(1e-2)
    kept = sum(x.untyped_storage().nbytes() for x in b.state.values())
    return kept, largest.nbytes, b.grads.nbytes


@pytest.mark.parametrize("optimizer, kinds", [("adamw", 3), ("muon", 2)])
def test_no_full_copy_of_gradients_or_state(optimizer, kinds):
    """Nine matrices over four ranks: nobody keeps, or makes in a step, more than three of them."""
    states, made, (grads, *_) = zip(*run(4, measure_memory, optimizer), strict=True)
    assert sum(states) == kinds * grads and max(states) <= 0.34 * kinds * grads
    assert 0.1 * grads < max(made) <= 0.34 * grads


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer, rtol", [("adamw", 1e-5), ("muon", 1e-2)])
def test_nccl_equals_one_process(optimizer, rtol):
    """Muon's products are in bf16 there."""
    results = run(SHARES, train_replica, optimizer, torch.bfloat16, None, "cuda", backend="nccl")
    check_against(alone(optimizer, torch.bfloat16), results, rtol)
    for r in results:
        same_weights(r, results[0], 0)
