"""The experts of one rank: gather, grouped GEMMs, activation, routing weight and local sum.

    out_r = Σ over r's slots s of  down_e · (w_s · act(gate_up_e x_r + b_e)) + w_s · c_e,  e = e(s)

with act(g, u) = silu(g) ⊙ u, or GPT-OSS's clamped form. The weight comes before the down
projection, where rows are F wide instead of D, and so weighs its bias c too.
Saved for backward: the rows, the routing weights and the pre-activation (S, 2F); the gathered
rows and the activation are made again. Sums run in the plan's fixed order, no atomics.
In bf16 on GPUs from Hopper on, gathers, activation, weights, biases and the fp32 addition of weight
gradients are inside Triton kernels (kernels/grouped.py, kernels/grouped_wgrad.py); on other GPUs
the products are F.grouped_mm, elsewhere a loop over the experts.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import Plan, sum_rows, up


class ClampedSwiGLU(NamedTuple):
    """(u + 1) · g · sigmoid(alpha · g), g clamped above only, u on both sides (GPT-OSS)."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = Literal["swiglu"] | ClampedSwiGLU


def _activate(h_S2F: Tensor, activation: Activation) -> Tensor:
    """act of the pre-activation, gate columns first: (S, 2F) → (S, F) in fp32 or float64."""
    gate, value = up(h_S2F).chunk(2, dim=-1)
    if activation == "swiglu":
        return F.silu(gate) * value
    gate = gate.clamp(max=activation.limit)
    value = value.clamp(-activation.limit, activation.limit)
    return (value + 1) * gate * torch.sigmoid(activation.alpha * gate)


def expert_mlp_ref(
    rows_RD: Tensor,
    weights_RK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: Plan,
    *,
    activation: Activation = "swiglu",
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The formula above, an expert at a time, for autograd to differentiate."""
    y_SD, start = [], 0
    for e, end in enumerate(plan.offsets_E.tolist()):
        weights = weights_RK.flatten()[plan.order_S[start:end], None]
        h = rows_RD[plan.rows_S[start:end]] @ gate_up[e].T
        h = h if biases is None else h + biases[0][e]
        y = (_activate(h, activation) * weights).to(rows_RD.dtype) @ down[e].T
        y_SD.append(y if biases is None else y + (weights * up(biases[1][e])).to(y.dtype))
        start = end
    y_SD.append(rows_RD.new_zeros(len(plan.order_S) - start, down.shape[1]))  # room for more
    return sum_rows(torch.cat(y_SD), plan.positions_RK, plan.valid_RK)


# ------------------------------------------------------------------------------------------------
# Grouped products: each expert's group of rows with its own matrix
# ------------------------------------------------------------------------------------------------


def _grouped(x_SI: Tensor, w_EIO: Tensor, offsets_E: Tensor) -> Tensor:
    """x · w of each group: (S, I), (E, I, O) → (S, O)."""
    if x_SI.is_cuda and x_SI.dtype == torch.bfloat16 and len(x_SI):
        return F.grouped_mm(x_SI, w_EIO, offs=offsets_E)
    y_SO = x_SI.new_empty(len(x_SI), w_EIO.shape[2])
    start = 0
    for e, end in enumerate(offsets_E.tolist()):
        torch.mm(x_SI[start:end], w_EIO[e], out=y_SO[start:end])
        start = end
    return y_SO


def _grouped_wgrad(dy_SO: Tensor, x_SI: Tensor, offsets_E: Tensor) -> Tensor:
    """dyᵀ · x of each group: (S, O), (S, I) → (E, O, I), zero for an empty group."""
    if x_SI.is_cuda and x_SI.dtype == torch.bfloat16 and len(x_SI):
        return F.grouped_mm(dy_SO.T, x_SI, offs=offsets_E)
    dw = x_SI.new_empty(len(offsets_E), dy_SO.shape[1], x_SI.shape[1])
    start = 0
    for e, end in enumerate(offsets_E.tolist()):
        torch.mm(dy_SO[start:end].T, x_SI[start:end], out=dw[e])
        start = end
    return dw


def _grouped_sum(x_SO: Tensor, offsets_E: Tensor) -> Tensor:
    """Sum of each group's rows, (S, O) → (E, O): a weight gradient whose input is one."""
    ones = x_SO.new_ones(len(x_SO), 8)  # 8: grouped_mm wants rows of 16 bytes
    return _grouped_wgrad(x_SO, ones, offsets_E)[:, :, 0]


def _activate_backward(h_S2F: Tensor, da_SF: Tensor, activation: Activation) -> Tensor:
    """Gradient of the pre-activation for the activation's gradient, both fp32 or float64."""
    gate, value = up(h_S2F).chunk(2, dim=-1)
    if activation == "swiglu":
        sigmoid = torch.sigmoid(gate)
        dgate = da_SF * value * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([dgate, da_SF * gate * sigmoid], -1)
    alpha, limit = activation
    g, v = gate.clamp(max=limit), value.clamp(-limit, limit)
    sigmoid = torch.sigmoid(alpha * g)
    dgate = da_SF * (v + 1) * sigmoid * (1 + alpha * g * (1 - sigmoid)) * (gate <= limit)
    return torch.cat([dgate, da_SF * g * sigmoid * (value.abs() <= limit)], -1)


def _by_choice(x_S: Tensor, plan: Plan) -> Tensor:
    """A number of each slot (S,) at its row and choice (R, K), 0 at choices that are elsewhere."""
    if not len(x_S):
        return x_S.new_zeros(plan.positions_RK.shape)
    x_RK = x_S[plan.positions_RK]
    return x_RK if plan.valid_RK is None else x_RK.masked_fill(~plan.valid_RK, 0)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient: `main_grad`, where the optimizer keeps one, else `.grad`."""
    kept = getattr(weight, "main_grad", weight.grad)
    if kept is None:
        weight.grad = gradient
    else:
        kept.add_(gradient)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_RK, gate_up, down, b_gate_up, b_down, plan, act, defer):
        weights_S1 = weights_RK.flatten()[plan.order_S, None]
        h_S2F = _grouped(rows_RD[plan.rows_S], gate_up.transpose(1, 2), plan.offsets_E)
        if b_gate_up is not None:
            h_S2F += b_gate_up[plan.experts_S]
        a_SF = (_activate(h_S2F, act) * weights_S1).to(h_S2F.dtype)
        y_SD = _grouped(a_SF, down.transpose(1, 2), plan.offsets_E)
        if b_down is not None:
            y_SD += (weights_S1 * up(b_down[plan.experts_S])).to(y_SD.dtype)
        ctx.save_for_backward(rows_RD, weights_S1, h_S2F)
        ctx.weights = (gate_up, down, b_gate_up, b_down)
        ctx.plan, ctx.act, ctx.defer = plan, act, defer
        return sum_rows(y_SD, plan.positions_RK, plan.valid_RK)

    @staticmethod
    def backward(ctx, dout_RD):
        rows_RD, weights_S1, h_S2F = (x.detach() for x in ctx.saved_tensors)  # not the graph
        gate_up, down, b_gate_up, b_down = ctx.weights
        plan, act, offsets_E = ctx.plan, ctx.act, ctx.plan.offsets_E
        dy_SD = dout_RD[plan.rows_S]
        da_SF = up(_grouped(dy_SD, down, offsets_E))  # of the weighted activation
        dweights_S1 = (da_SF * _activate(h_S2F, act)).sum(-1, keepdim=True)
        if b_down is not None:
            dweights_S1 += (up(dy_SD) * up(b_down[plan.experts_S])).sum(-1, keepdim=True)
        dh_S2F = _activate_backward(h_S2F, da_SF * weights_S1, act).to(h_S2F.dtype)
        dx_SD = _grouped(dh_S2F, gate_up, offsets_E)
        drows_RD = sum_rows(dx_SD, plan.positions_RK, plan.valid_RK)
        dweights_RK = _by_choice(dweights_S1[:, 0], plan)
        del da_SF, dx_SD, dy_SD  # a closure that waits must not keep them

        def weight_gradients():
            dy_SD, x_SD = dout_RD[plan.rows_S], rows_RD[plan.rows_S]
            a_SF = (_activate(h_S2F, act) * weights_S1).to(h_S2F.dtype)
            yield _grouped_wgrad(dh_S2F, x_SD, offsets_E)
            yield _grouped_wgrad(dy_SD, a_SF, offsets_E)
            if b_gate_up is not None:
                yield _grouped_sum(dh_S2F, offsets_E)
                yield _grouped_sum((up(dy_SD) * weights_S1).to(dy_SD.dtype), offsets_E)

        if ctx.defer is None:
            grads = (*weight_gradients(), None, None)[:4]
            return drows_RD, dweights_RK, *grads, None, None, None

        def compute():
            for weight, gradient in zip(ctx.weights, weight_gradients(), strict=False):
                accumulate(weight, gradient)

        ctx.defer(compute)
        return drows_RD, dweights_RK, *[None] * 7


# ------------------------------------------------------------------------------------------------
# The same in Triton
# ------------------------------------------------------------------------------------------------


def _in_triton(rows_RD: Tensor, plan: Plan, width: int) -> bool:
    """Whether the kernels can run; they are imported late, as not every machine has Triton."""
    if rows_RD.dtype != torch.bfloat16 or rows_RD.shape[1] % 8 or width % 8:
        return False  # descriptors want rows of 16 bytes
    if not len(plan.order_S):
        return False
    if rows_RD.is_cuda:
        return torch.cuda.get_device_capability(rows_RD.device) >= (9, 0)
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass
class WeightGradients:
    """A micro-batch's share of the gradients of `weights`, to be added when this is called.

    part: rows (R, D), dh (S, 2F), dout (R, D), weighted activation (S, F), routing weights, plan.
    """

    weights: tuple[Tensor | None, ...]  # gate_up, down and their biases
    part: tuple[Any, ...]

    def __call__(self) -> None:
        add_together([self])


def add_together(waiting: Sequence[Callable[[], None]]) -> None:
    """Call all that `expert_mlp` gave to `defer`, in order.

    Those of the same experts make one product each, which reads and writes the sum only once:
    worth it if experts get few rows a micro-batch.
    """
    groups: dict[int, list[Callable[[], None]]] = {}
    for compute in waiting:
        fused = isinstance(compute, WeightGradients)
        groups.setdefault(id(compute.weights[0] if fused else compute), []).append(compute)
    for group in groups.values():
        if not isinstance(group[0], WeightGradients):
            group[0]()
            continue
        weights = group[0].weights
        kept = [getattr(w, "main_grad", None) for w in weights if w is not None]
        inside = [k is not None and k.dtype == torch.float32 and k.is_contiguous() for k in kept]
        sums = _weight_gradients([g.part for g in group], weights, kept if all(inside) else None)
        if not all(inside):
            for weight, total in zip(weights, sums, strict=False):
                accumulate(weight, total.to(weight.dtype))


def _weight_gradients(parts, weights, sums: list[Tensor] | None = None) -> list[Tensor]:
    """The weights' gradients, fp32, added to `sums` if they are given."""
    from kernels import grouped_wgrad as wgrad

    if sums is None:
        sums = [torch.zeros_like(w, dtype=torch.float32) for w in weights if w is not None]
    merged = wgrad.merge(parts, wgrad.WGRAD.depth)
    for i, up_projection in enumerate((True, False)):
        wgrad.add_gradient(sums[i], merged, up_projection)
        if len(sums) > 2:
            wgrad.add_bias_gradient(sums[2 + i], merged, up_projection)
    wgrad.merged(weights[0], len(parts))
    return sums


class _TritonExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_RK, gate_up, down, b_gate_up, b_down, plan, act, defer):
        from kernels import grouped

        rows_RD, weights_RK = rows_RD.contiguous(), weights_RK.float().contiguous()
        slots, (experts, hidden, width) = len(plan.order_S), down.shape
        cut = grouped.cut_for(experts, slots, hidden, width)
        tiles = grouped.tiles_of(plan.offsets_E, slots, cut.block, cut.least)
        act = None if act == "swiglu" else (act.alpha, act.limit)
        h_S2F, a_SF = grouped.up(rows_RD, weights_RK, gate_up, b_gate_up, plan, tiles, act, cut.up)
        y_SD = grouped.product(
            a_SF, down, plan, tiles, cut.down, out_first=True, weights_RK=weights_RK, bias_EO=b_down
        )
        ctx.save_for_backward(rows_RD, weights_RK, h_S2F)
        ctx.weights = (gate_up, down, b_gate_up, b_down)
        ctx.plan, ctx.tiles, ctx.cut, ctx.act, ctx.defer = plan, tiles, cut, act, defer
        return grouped.sum_slots(y_SD, plan)

    @staticmethod
    def backward(ctx, dout_RD):
        from kernels import grouped
        from kernels.grouped_wgrad import reserve

        rows_RD, weights_RK, h_S2F = (x.detach() for x in ctx.saved_tensors)  # not the graph
        gate_up, down, _, b_down = ctx.weights
        plan, tiles, cut = ctx.plan, ctx.tiles, ctx.cut
        dout_RD = dout_RD.contiguous()
        place = reserve(gate_up, len(h_S2F), down.shape[2]) if ctx.defer is not None else None
        dh_S2F, a_SF, dweights_S = grouped.down_backward(
            dout_RD, weights_RK, down, h_S2F, plan, tiles, ctx.act, cut.down_backward, place
        )
        if b_down is not None:
            of_bias_RE = up(dout_RD) @ up(b_down).T
            dweights_S += of_bias_RE[plan.rows_S, plan.experts_S.long()]
        dx_SD = grouped.product(dh_S2F, gate_up, plan, tiles, cut.up_backward, out_first=False)
        drows_RD = grouped.sum_slots(dx_SD, plan)
        dweights_RK = _by_choice(dweights_S, plan)
        part = (rows_RD, dh_S2F, dout_RD, a_SF, weights_RK, plan)
        if ctx.defer is None:
            sums = _weight_gradients([part], ctx.weights)
            grads = [total.to(w.dtype) for total, w in zip(sums, ctx.weights)] + [None, None]
            return drows_RD, dweights_RK, *grads[:4], None, None, None
        ctx.defer(WeightGradients(ctx.weights, part))
        return drows_RD, dweights_RK, *[None] * 7


def expert_mlp(
    rows_RD: Tensor,
    weights_RK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: Plan,
    *,
    activation: Activation = "swiglu",
    biases: tuple[Tensor, Tensor] | None = None,
    defer: Callable[[Callable[[], None]], None] | None = None,
) -> Tensor:
    """Each row through its experts, weighted and summed: (R, D), in the rows' dtype.

    rows_RD (R, D); weights_RK (R, K) routing weights of the rows' choices, fp32 or float64 (those
    that the plan has elsewhere are not read and get no gradient); gate_up (E, 2F, D), gate rows
    first; down (E, D, F); biases ((E, 2F), (E, D)). With `defer`, the weights' gradients are not
    returned to autograd: a function that adds them to `main_grad` or `.grad` is given to it, to
    be called now or later. Raises ValueError if shapes disagree.
    """
    experts, width, hidden = gate_up.shape
    if down.shape != (experts, hidden, width // 2) or rows_RD.shape[1] != hidden:
        raise ValueError(
            f"expert_mlp: rows {tuple(rows_RD.shape)}, gate_up {tuple(gate_up.shape)} and down "
            f"{tuple(down.shape)} must be (R, D), (E, 2F, D) and (E, D, F)"
        )
    if weights_RK.shape != plan.positions_RK.shape or plan.offsets_E.shape != (experts,):
        raise ValueError(
            f"expert_mlp: weights {tuple(weights_RK.shape)} must be "
            f"{tuple(plan.positions_RK.shape)} and the plan is for {len(plan.offsets_E)} experts, "
            f"the weights for {experts}"
        )
    biases = biases or (None, None)
    fused = _in_triton(rows_RD, plan, width // 2)
    function = _TritonExpertMLP if fused else _ExpertMLP
    return function.apply(rows_RD, weights_RK, gate_up, down, *biases, plan, activation, defer)
