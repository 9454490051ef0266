"""The experts of one rank: gather, grouped GEMMs, activation, routing weight and local sum.

    out_r = Σ over r's slots s of  down_e · (w_s · act(gate_up_e x_r + b_e)) + w_s · c_e,  e = e(s)

with act(g, u) = silu(g) ⊙ u, or GPT-OSS's clamped form. The weight comes before the down
projection, where rows are F wide instead of D, and so weighs its bias c too.
Saved for backward: the rows, the routing weights and the pre-activation (S, 2F); the gathered
rows and the activation are made again. Sums run in the plan's fixed order, no atomics.
On a GPU in bf16 the products are F.grouped_mm; elsewhere a loop over the experts.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

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
        rows_RD, weights_S1, h_S2F = ctx.saved_tensors
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
        dweights_RK = dweights_S1.new_zeros(plan.positions_RK.numel())
        dweights_RK[plan.order_S] = dweights_S1[:, 0]
        dweights_RK = dweights_RK.view_as(plan.positions_RK)
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
    return _ExpertMLP.apply(rows_RD, weights_RK, gate_up, down, *biases, plan, activation, defer)
