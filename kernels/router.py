"""The router's scores: tokens times the experts' directions, in fp32 from bf16 operands.

    logits_NE = x_ND · W_EDᵀ        dx = g W        dW = gᵀ x

A product of two bf16 numbers is exact in fp32, so the matrix units give the fp32 result at bf16's
speed. The gradient g is fp32: it goes through them as two bf16 numbers, g = high + low up to
2^-17 of it, stacked along the axis that is summed (dx) or kept (dW).
On one H200, 4,096 tokens, 2,048 wide, 128 experts: see LOG.md. On a CPU, and in fp32 and float64,
`router_logits_ref`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import up


def router_logits_ref(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """The formula, for autograd to differentiate."""
    return F.linear(up(x_ND), up(weight_ED))


def split(g: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as the sum of two bf16 ones, up to 2^-17 of each element."""
    high = g.bfloat16()
    return high, (g - high.float()).bfloat16()


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, weight_ED):
        ctx.save_for_backward(x_ND, weight_ED)
        return torch.mm(x_ND, weight_ED.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_NE):
        x_ND, weight_ED = ctx.saved_tensors
        both_NE = torch.cat(split(grad_NE), 1)  # (N, 2E)
        dx_ND = both_NE @ torch.cat([weight_ED, weight_ED])
        high_ED, low_ED = torch.mm(both_NE.T, x_ND, out_dtype=torch.float32).chunk(2)
        return dx_ND, (high_ED + low_ED).to(weight_ED.dtype)


def router_logits(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """(N, D) and (E, D) → (N, E) in fp32, or float64 if the operands are."""
    if x_ND.is_cuda and x_ND.dtype == weight_ED.dtype == torch.bfloat16:
        return _RouterLogits.apply(x_ND, weight_ED)
    return router_logits_ref(x_ND, weight_ED)
