"""Times of the experts, for bench.kernels: the MoE layer, its passes, its kernels alone.

`experts` rows take routing weights and plan as given; `MoE layer` rows include router and plan
(scores, softmax, top K and weights, run eagerly). Weight gradients are added to fp32 sums, those
of `n` micro-batches together, and every time is that of one micro-batch. Random routing leaves one
expert without a token; balanced is the scripts' stride: token t's j-th expert is
(t + j·E/K) mod E.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import Meter, Width, Work, host_us
from kernels import grouped, grouped_wgrad
from kernels.dispatch import Plan, dispatch_plan, dispatch_plan_ref, sum_rows
from kernels.experts import ClampedSwiGLU, _ExpertMLP, _TritonExpertMLP, add_together
from kernels.router import router_logits, router_logits_ref

TOGETHER = (1, 2, 4)  # micro-batches


@dataclass
class Case:
    """Random operands of one width; `routing` is random or balanced."""

    width: Width
    rows_RD: Tensor
    weights_RK: Tensor
    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | tuple[None, None]
    router_ED: Tensor
    ids_RK: Tensor
    dout_RD: Tensor
    plan: Plan

    @property
    def slots(self) -> int:
        return len(self.plan.rows_S)

    @property
    def activation(self):
        return ClampedSwiGLU() if self.width.gpt_oss else "swiglu"

    @property
    def parameters(self) -> tuple:
        return self.gate_up, self.down, *self.biases, self.router_ED

    def apply(self, function, defer, weights_RK=None, plan=None) -> Tensor:
        """`function` (an autograd.Function of kernels/experts.py) on these operands."""
        weights_RK = self.weights_RK if weights_RK is None else weights_RK
        args = (self.rows_RD, weights_RK, self.gate_up, self.down, *self.biases)
        return function.apply(*args, plan or self.plan, self.activation, defer)


def choices(width: Width, tokens: int, routing: str, gen: torch.Generator) -> Tensor:
    """(tokens, K) int64 expert ids."""
    E, K = width.E, width.K
    if routing == "balanced":
        first_N1 = torch.arange(tokens, device=gen.device)[:, None]
        return (first_N1 + torch.arange(K, device=gen.device) * E // K) % E
    scores = torch.rand(tokens, E, generator=gen, device=gen.device)
    scores[:, E // 2] = -1  # nobody's choice
    return scores.topk(K, dim=-1).indices


def make(
    width: Width, tokens: int, routing="random", device="cuda", parameters=None, seed=0
) -> Case:
    """Operands; `parameters` (of another case of this width) are taken over."""
    E, D, width_F, K = width[:4]
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=gen, device=device, dtype=torch.bfloat16) * scale

    if parameters is None:
        shapes = [(E, 2 * width_F, D), (E, D, width_F), (E, 2 * width_F), (E, D), (E, D)]
        shapes = shapes if width.gpt_oss else [*shapes[:2], None, None, shapes[4]]
        parameters = [s and normal(*s, scale=0.02).requires_grad_() for s in shapes]
        for p in parameters[:4]:
            if p is not None:
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    gate_up, down, *biases, router = parameters
    weights = torch.rand(tokens, K, generator=gen, device=device).requires_grad_()
    ids, rows = choices(width, tokens, routing, gen), normal(tokens, D).requires_grad_()
    plan = dispatch_plan(ids, E)
    dout = normal(tokens, D)
    return Case(width, rows, weights, gate_up, down, tuple(biases), router, ids, dout, plan)


class Path(NamedTuple):
    """Experts, router's scores and plan: our kernels, or plain torch."""

    experts: type
    logits: Callable
    plan: Callable


def paths() -> tuple[Path, Path]:
    """Ours, torch's."""
    ours = Path(_TritonExpertMLP, router_logits, dispatch_plan)
    return ours, Path(_ExpertMLP, router_logits_ref, dispatch_plan_ref)


# ------------------------------------------------------------------------------------------------
# The layer
# ------------------------------------------------------------------------------------------------


def forward(case: Case, path: Path) -> Tensor:
    with torch.no_grad():
        return case.apply(path.experts, None)


def through(case: Case, path: Path, defer) -> None:
    """Forward, and backward to rows and routing weights; weight gradients go to `defer`."""
    out = case.apply(path.experts, defer)
    torch.autograd.grad(out, [case.rows_RD, case.weights_RK], case.dout_RD)


def routed(case: Case, path: Path, defer) -> None:
    """The same with router and plan, and the router's gradient; the case's choices are kept.

    The softmax and the top K are computed and, so that routing is the case's, not used.
    """
    logits_NE = path.logits(case.rows_RD, case.router_ED)
    logits_NE.detach().softmax(-1).topk(case.width.K, dim=-1)
    weights_NK = logits_NE.gather(-1, case.ids_RK).softmax(-1)
    out = case.apply(path.experts, defer, weights_NK, path.plan(case.ids_RK, case.width.E))
    torch.autograd.grad(out, [case.rows_RD, case.router_ED], case.dout_RD)


def together(cases: Sequence[Case], path: Path, one=through) -> None:
    """Each case there and back, then the weight gradients of all."""
    held: list[Callable] = []
    for case in cases:
        one(case, path, held.append)
    with torch.no_grad():
        add_together(held)


def work(width: Width, tokens: int, count: int = 1) -> dict[str, Work]:
    """Of a pass, of one micro-batch where `count` share the fp32 sums of weight gradients.

    Forward: weights, rows, output, the pre-activation h that is kept. Backward: weights, gradient
    there and back, h, its gradient and the activation that are kept. Weight gradients: these, rows
    and gradient, and the sums read and written.
    """
    E, D, width_F, K = width[:4]
    slots, elements, rows = tokens * K, 3 * E * D * width_F, 2 * 2 * tokens * D
    flops, kept = 2 * slots * 3 * D * width_F, slots * width_F  # 2 bytes an element; h has 2F
    forward = Work(flops, 2 * elements + rows + 4 * kept)
    backward = Work(flops, 2 * elements + rows + (4 + 4 + 2) * kept)
    wgrad = Work(flops, 8 * elements / count + rows + (4 + 2) * kept)
    total = Work(*map(sum, zip(forward, backward, wgrad, strict=True)))
    return dict(forward=forward, backward=backward, wgrad=wgrad, all=total)


def wgrad_only(cases: Sequence[Case], path: Path) -> Callable[[], None]:
    """The weight gradients of all cases, all else done beforehand."""
    held: list[Callable] = []
    for case in cases:
        through(case, path, held.append)
    return torch.no_grad()(lambda: add_together(held))


def together_next(cases: Sequence[Case], n: int) -> None:
    """As from the second time on: it is known that n micro-batches wait for each other."""
    cases[0].gate_up.together, cases[0].gate_up.stack = n, []  # kernels/grouped_wgrad.py: reserve


def layer(meter: Meter, cases: Sequence[Case], shape: str) -> None:
    """Rows of the passes, and of the whole with weight gradients of 1, 2 and 4 together."""
    width, tokens, both = cases[0].width, len(cases[0].rows_RD), paths()
    todo = work(width, tokens)
    calls = [
        (partial(forward, cases[0], p), partial(through, cases[0], p, lambda compute: None))
        for p in both
    ]
    together_next(cases, 1)
    meter.passes("experts", shape, *calls, (todo["forward"], todo["backward"]),
                 "no router, no plan", ("forward", "backward, without weights"))  # fmt: skip
    for n in TOGETHER:
        part, todo = cases[:n], work(width, tokens, n)
        together_next(cases, n)
        name = f"{n} micro-batch{'es' if n > 1 else ''}"
        alone = [wgrad_only(part, both[0]), None]
        try:
            alone[1] = wgrad_only(part, both[1])
        except torch.OutOfMemoryError:  # what torch's keeps of several micro-batches
            print(f"experts weight gradients, {name}, {shape}, torch: out of memory")
        meter.compare(f"experts weight gradients, {name}", shape, *alone, todo["wgrad"], per=n)
        alone.clear()
        calls = [partial(together, part, path) for path in both]
        note = "no router, no plan"
        if n == 1:
            note += f", host {host_us(calls[0], 5):.0f} us"
        meter.compare(f"experts forward+backward, {name}", shape, *calls, todo["all"], note, per=n)
        calls = [partial(together, part, path, routed) for path in both]
        note = "router and plan included"
        meter.compare(
            f"MoE layer forward+backward, {name}", shape, *calls, todo["all"], note, per=n
        )


# ------------------------------------------------------------------------------------------------
# Single kernels
# ------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """What the single kernels read, made by themselves."""

    case: Case
    act: tuple[float, float] | None
    h: Tensor
    a: Tensor
    dh: Tensor
    part: tuple


def operands(case: Case) -> Operands:
    act = (1.702, 7.0) if case.width.gpt_oss else None
    plan, cut = case.plan, grouped.cut_for(case.width.E, case.slots, *case.width[1:3])
    tiles = grouped.tiles_of(plan.offsets_E, case.slots, cut.block)
    h, a = grouped.up(
        case.rows_RD, case.weights_RK, case.gate_up, case.biases[0], plan, tiles, act, cut.up
    )
    dh, a, _ = grouped.down_backward(
        case.dout_RD, case.weights_RK, case.down, h, plan, tiles, act, cut.down_backward
    )
    part = (case.rows_RD, dh, case.dout_RD, a, case.weights_RK, plan)
    return Operands(case, act, h, a, dh, part)


def step_work(case: Case) -> dict[str, Work]:
    """Of each kernel: its product, its weights (or fp32 sums, twice), its operands and results."""
    E, D, width_F = case.width[:3]
    matrix, S, R = E * D * width_F, case.slots, len(case.rows_RD)
    flops, a, h, x, y = 2 * S * D * width_F, 2 * S * width_F, 4 * S * width_F, 2 * R * D, 2 * S * D
    return {
        "up": Work(2 * flops, 4 * matrix + x + h + a),
        "down": Work(flops, 2 * matrix + a + y),
        "down_backward": Work(flops, 2 * matrix + x + h + h + a),
        "up_backward": Work(2 * flops, 4 * matrix + h + y),
        "wgrad_up": Work(2 * flops, 16 * matrix + h + x),
        "wgrad_down": Work(flops, 8 * matrix + a + x),
        "sum_slots": Work(0, y + x),
    }


def kernels(o: Operands) -> dict[str, Callable]:
    """Name → function of (tiles, config), or of config alone for weight gradients."""
    c = o.case
    weighted = dict(weights_RK=c.weights_RK, bias_EO=c.biases[1])
    up = (c.rows_RD, c.weights_RK, c.gate_up, c.biases[0], c.plan)
    back = (c.dout_RD, c.weights_RK, c.down, o.h, c.plan)
    merged = cache(lambda depth: grouped_wgrad.merge([o.part], depth))  # timed apart

    def wgrad(weight, is_up, config):
        of = merged((config or grouped_wgrad.WGRAD).depth)
        grouped_wgrad.add_gradient(weight.main_grad, of, is_up, config)
        return weight.main_grad

    return {
        "up": lambda t, k: grouped.up(*up, t, o.act, k)[1],
        "down": lambda t, k: grouped.product(
            o.a, c.down, c.plan, t, k, out_first=True, **weighted),
        "down_backward": lambda t, k: grouped.down_backward(*back, t, o.act, k)[0],
        "up_backward": lambda t, k: grouped.product(
            o.dh, c.gate_up, c.plan, t, k, out_first=False),
        "wgrad_up": partial(wgrad, c.gate_up, True),
        "wgrad_down": partial(wgrad, c.down, False),
    }  # fmt: skip


def torch_steps(o: Operands) -> dict[str, Callable]:
    """The bare grouped_mm of each product, its operands gathered beforehand; the slots' sum."""
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
        "sum_slots": lambda: sum_rows(dy, c.plan.positions_RK, None),
    }


@torch.no_grad()
def steps(meter: Meter, case: Case, shape: str) -> None:
    """Each kernel alone as it is cut by default, against a bare grouped_mm."""
    o, plan, S = operands(case), case.plan, case.slots
    cut = grouped.cut_for(case.width.E, S, *case.width[1:3])
    tiles = grouped.tiles_of(plan.offsets_E, S, cut.block)
    calls: dict[str, Callable] = {}
    for name, call in kernels(o).items():
        config = (None,) if name.startswith("wgrad") else (tiles, getattr(cut, name))
        calls[name] = partial(call, *config)
    y = torch.randn(S, case.width.D, device=meter.device, dtype=torch.bfloat16)
    calls["sum_slots"] = partial(grouped.sum_slots, y, plan)
    todo, theirs = step_work(case), torch_steps(o)
    for name, call in calls.items():
        note = "" if name == "sum_slots" else "torch: bare grouped_mm"
        meter.compare(f"experts: {name}", shape, call, theirs[name], todo[name], note)
    merge = partial(grouped_wgrad.merge, [o.part], grouped_wgrad.WGRAD.depth)
    meter.compare("experts: merge", shape, merge)
    meter.compare("experts: tiles", shape, lambda: grouped.tiles_of(plan.offsets_E, S, cut.block))


# ------------------------------------------------------------------------------------------------
# All of a width
# ------------------------------------------------------------------------------------------------


def check(case: Case) -> str:
    """Largest relative difference of outputs and gradients to torch's, and repeatability."""
    parameters = [p for p in case.parameters[:4] if p is not None]

    def run(function):
        held = []
        for p in parameters:
            p.main_grad.zero_()
        out = case.apply(function, held.append)
        grads = torch.autograd.grad(out, [case.rows_RD, case.weights_RK], case.dout_RD)
        with torch.no_grad():
            held[0]()
        return [out.detach(), *grads, *(p.main_grad.clone() for p in parameters)]

    our, torchs = (path.experts for path in paths())
    ours, again, theirs = run(our), run(our), run(torchs)
    same = all(torch.equal(a, b) for a, b in zip(ours, again))
    gaps = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs)]
    return f"differences {' '.join(f'{g:.1e}' for g in gaps)}, {'same' if same else 'OTHER'} bits"


def rows(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """Layer and kernels for random and balanced routing; with `configs` other block sizes too."""
    parameters = None
    for N in tokens:
        for routing in ("random", "balanced"):
            cases = []
            for seed in range(max(TOGETHER)):
                cases.append(make(width, N, routing, meter.device, parameters, seed))
                parameters = cases[0].parameters
            shape = f"{name} {N} {routing}"
            print(f"--- {shape}: {check(cases[0])}", flush=True)
            layer(meter, cases, shape)
            steps(meter, cases[0], shape)
    if configs:
        from bench.sweep import sweep

        for N in tokens:
            case = make(width, N, "random", meter.device, parameters)
            sweep(meter, operands(case), f"{name} {N} random")
