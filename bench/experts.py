"""Operands and timings of the experts, for bench.kernels: a layer, its kernels, torch's own."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import grouped, grouped_wgrad
from kernels.dispatch import Plan, dispatch_plan, sum_rows
from kernels.experts import (
    ClampedSwiGLU,
    WeightGradients,
    _ExpertMLP,
    _TritonExpertMLP,
    add_together,
)

DEVICE = "cuda"


class Width(NamedTuple):
    """E experts, D hidden, F expert width, K a token, GPT-OSS's biases and activation or not."""

    E: int
    D: int
    F: int
    K: int
    gpt_oss: bool = False


WIDTHS = {
    "qwen3": Width(128, 2048, 768, 8),
    "deepseek": Width(64, 2048, 1408, 6),
    "gpt-oss": Width(32, 2880, 2880, 4, True),
}
TOKENS = (4096, 16384)


@dataclass
class Case:
    """Random operands of one width."""

    width: Width
    rows_RD: Tensor
    weights_RK: Tensor
    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | tuple[None, None]
    dout_RD: Tensor
    plan: Plan

    @property
    def flops(self) -> int:
        """Of the product of all slots with one matrix of D·F elements."""
        return 2 * len(self.plan.rows_S) * self.width.D * self.width.F

    @property
    def activation(self):
        return ClampedSwiGLU() if self.width.gpt_oss else "swiglu"

    def apply(self, function, defer) -> Tensor:
        args = (self.rows_RD, self.weights_RK, self.gate_up, self.down, *self.biases)
        return function.apply(*args, self.plan, self.activation, defer)


def make(width: Width, tokens: int, parameters: tuple | None = None, seed: int = 0) -> Case:
    """Operands on the GPU; `parameters` (of another case of this width) are taken over."""
    E, D, width_F, K, gpt_oss = width
    g = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, device=DEVICE, dtype=torch.bfloat16) * scale

    scores = torch.rand(tokens, E, generator=g, device=DEVICE)
    scores[:, 3] = -1  # nobody's choice
    if parameters is None:
        shapes = [(E, 2 * width_F, D), (E, D, width_F)]
        shapes += [(E, 2 * width_F), (E, D)] if gpt_oss else []
        parameters = [normal(*s, scale=0.02).requires_grad_() for s in shapes]
        for p in parameters:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        parameters = (*parameters, None, None)[:4]
    gate_up, down, *biases = parameters
    weights = torch.rand(tokens, K, generator=g, device=DEVICE).requires_grad_()
    plan = dispatch_plan(scores.topk(K, dim=-1).indices, E)
    rows = normal(tokens, D).requires_grad_()
    return Case(width, rows, weights, gate_up, down, tuple(biases), normal(tokens, D), plan)


def micro_s(function: Callable[[], object], rep_ms: int = 40) -> float:
    """Median time in µs."""
    from triton.testing import do_bench

    return 1e3 * do_bench(function, warmup=10, rep=rep_ms, return_mode="median")


def dense_rate() -> float:
    """FLOP/s of a dense product."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / micro_s(lambda: a @ b, 100) * 1e6


# ------------------------------------------------------------------------------------------------
# The layer, and its steps
# ------------------------------------------------------------------------------------------------


def layer_times(case: Case, function) -> dict[str, float]:
    """µs of forward, of the backward without and of the weights' gradients alone, and of all."""
    held: list = []

    def defer(compute):
        held[:] = [compute]

    leaves = [case.rows_RD, case.weights_RK]
    with torch.no_grad():
        times = {"forward": micro_s(lambda: case.apply(function, None))}
    out = case.apply(function, defer)

    def backward():
        return torch.autograd.grad(out, leaves, case.dout_RD, retain_graph=True)

    times["dgrad"] = micro_s(backward)
    with torch.no_grad():
        times["wgrad"] = micro_s(lambda: held[0]())

    def everything():
        torch.autograd.grad(case.apply(function, defer), leaves, case.dout_RD)
        with torch.no_grad():
            held[0]()

    times["all"] = micro_s(everything)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        everything()
    times["host"] = (time.perf_counter() - begin) / 5 * 1e6
    torch.cuda.synchronize()
    return times


def batched_wgrad(case: Case, count: int, tokens: int) -> float:
    """µs a micro-batch of the weights' gradients of `count` together."""
    held: list[WeightGradients] = []
    parameters = (case.gate_up, case.down, *case.biases)
    for seed in range(count):
        other = make(case.width, tokens, parameters, seed)
        out = other.apply(_TritonExpertMLP, held.append)
        torch.autograd.grad(out, [other.rows_RD], other.dout_RD)
    with torch.no_grad():
        return micro_s(lambda: add_together(held)) / count


class Operands(NamedTuple):
    """What the single kernels read, made by themselves."""

    case: Case
    act: tuple[float, float] | None
    h: Tensor
    a: Tensor
    dh: Tensor
    merged: tuple


def operands(case: Case) -> Operands:

    act = (1.702, 7.0) if case.width.gpt_oss else None
    plan, cut = case.plan, grouped.cut_for(case.width.E, len(case.plan.rows_S), *case.width[1:3])
    tiles = grouped.tiles_of(plan.offsets_E, len(plan.rows_S), cut.block)
    h, a = grouped.up(
        case.rows_RD, case.weights_RK, case.gate_up, case.biases[0], plan, tiles, act, cut.up
    )
    dh, a, _ = grouped.down_backward(
        case.dout_RD, case.weights_RK, case.down, h, plan, tiles, act, cut.down_backward
    )
    part = (case.rows_RD, dh, case.dout_RD, a, case.weights_RK, plan)
    return Operands(case, act, h, a, dh, grouped_wgrad.merge([part]))


def kernels(o: Operands) -> dict[str, tuple[int, Callable]]:
    """Name → (FLOPs, function of (tiles, config) or of config for weight gradients)."""
    c, m = o.case, o.merged
    weighted = dict(weights_RK=c.weights_RK, bias_EO=c.biases[1])
    up = (c.rows_RD, c.weights_RK, c.gate_up, c.biases[0], c.plan)
    back = (c.dout_RD, c.weights_RK, c.down, o.h, c.plan)

    def wgrad(weight, dy, x):
        def add(config):
            grouped_wgrad.add_gradient(weight.main_grad, dy, x, m.offsets_E, config)
            return weight.main_grad

        return add

    return {
        "up": (2 * c.flops, lambda t, k: grouped.up(*up, t, o.act, k)[1]),
        "down": (c.flops, lambda t, k: grouped.product(
            o.a, c.down, c.plan, t, k, out_first=True, **weighted)),
        "down_backward": (c.flops, lambda t, k: grouped.down_backward(*back, t, o.act, k)[0]),
        "up_backward": (2 * c.flops, lambda t, k: grouped.product(
            o.dh, c.gate_up, c.plan, t, k, out_first=False)),
        "wgrad_up": (2 * c.flops, wgrad(c.gate_up, m.dh, m.x)),
        "wgrad_down": (c.flops, wgrad(c.down, m.dy, m.a)),
    }  # fmt: skip


def torch_steps(o: Operands) -> dict[str, Callable]:
    """The bare grouped_mm of each product, its operands gathered beforehand."""
    c, offs = o.case, o.case.plan.offsets_E
    x, dy = c.rows_RD.detach()[c.plan.rows_S], c.dout_RD[c.plan.rows_S]
    gate_up, down = c.gate_up.detach(), c.down.detach()
    return {
        "up": lambda: F.grouped_mm(x, gate_up.transpose(1, 2), offs=offs),
        "down": lambda: F.grouped_mm(o.a, down.transpose(1, 2), offs=offs),
        "down_backward": lambda: F.grouped_mm(dy, down, offs=offs),
        "up_backward": lambda: F.grouped_mm(o.dh, gate_up, offs=offs),
        "wgrad_up": lambda: F.grouped_mm(o.dh.T, x, offs=offs),
        "wgrad_down": lambda: F.grouped_mm(dy.T, o.a, offs=offs),
    }


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def check(case: Case) -> str:
    """Largest relative difference of outputs and gradients to torch's, and repeatability."""

    def run(function):
        held = []
        for p in (case.gate_up, case.down, *case.biases):
            if p is not None:
                p.main_grad.zero_()
        out = case.apply(function, held.append)
        grads = torch.autograd.grad(out, [case.rows_RD, case.weights_RK], case.dout_RD)
        with torch.no_grad():
            held[0]()
        kept = [
            p.main_grad.clone() for p in (case.gate_up, case.down, *case.biases) if p is not None
        ]
        return [out.detach(), *grads, *kept]

    ours, again, theirs = run(_TritonExpertMLP), run(_TritonExpertMLP), run(_ExpertMLP)
    same = all(torch.equal(a, b) for a, b in zip(ours, again))
    gaps = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs)]
    return f"differences {' '.join(f'{g:.1e}' for g in gaps)}, {'same' if same else 'OTHER'} bits"


def speed(flops: float, us: float, rate: float) -> str:
    """Time, TFLOP/s, and their share of the rate of a dense product."""
    return f"{us:7.0f} us {flops / us / 1e6:5.0f} TF/s {flops / us * 1e6 / rate:4.0%}"


def tables(name: str, rate: float) -> None:
    """The layer and its kernels at one width."""
    width = WIDTHS[name]
    for tokens in TOKENS:
        case = make(width, tokens)
        S = len(case.plan.rows_S)
        print(f"--- {name} {tuple(width)}, {tokens} tokens, {S} slots: {check(case)}")
        ours, theirs = layer_times(case, _TritonExpertMLP), layer_times(case, _ExpertMLP)
        work = {"forward": 3, "dgrad": 3, "wgrad": 3, "all": 9, "host": 0}
        for step, us in ours.items():
            flops = work[step] * case.flops
            print(f"{step:14s} {speed(flops, us, rate)}"
                  f" | torch {theirs[step]:7.0f} us, x {theirs[step] / us:.2f}")  # fmt: skip
        step_table(case, rate)
        if tokens == TOKENS[0]:
            for count in (2, 4):
                us = batched_wgrad(case, count, tokens)
                print(f"wgrad of {count} micro-batches together: {us:.0f} us each")


@torch.no_grad()
def step_table(case: Case, rate: float) -> None:
    """Each kernel alone as it is cut by default, against a bare grouped_mm."""

    o, S = operands(case), len(case.plan.rows_S)
    cut = grouped.cut_for(case.width.E, S, case.width.D, case.width.F)
    tiles, bare = grouped.tiles_of(case.plan.offsets_E, S, cut.block), torch_steps(o)
    for name, (flops, call) in kernels(o).items():
        arguments = (None,) if name.startswith("wgrad") else (tiles, getattr(cut, name))
        us, theirs = micro_s(lambda c=call, a=arguments: c(*a)), micro_s(bare[name])
        print(f"  {name:14s} {speed(flops, us, rate)} | bare grouped_mm "
              f"{speed(flops, theirs, rate)}")  # fmt: skip
    y = case.rows_RD.new_empty(S, case.width.D).normal_()
    plan, part = case.plan, (case.rows_RD, o.dh, case.dout_RD, o.a, case.weights_RK, case.plan)
    moved = y.numel() * 2 + case.rows_RD.numel() * 2
    us = micro_s(lambda: grouped.sum_slots(y, plan))
    theirs = micro_s(lambda: sum_rows(y, plan.positions_RK, None))
    print(f"  sum_slots {us:.0f} us {moved / us / 1e6:.2f} TB/s | torch {theirs:.0f} us;  tiles "
          f"{micro_s(lambda: grouped.tiles_of(plan.offsets_E, S, cut.block)):.0f} us;  merge "
          f"{micro_s(lambda: grouped_wgrad.merge([part])):.0f} us")  # fmt: skip
