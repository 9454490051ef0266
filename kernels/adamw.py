"""AdamW over a flat range, and the sum of squares for the gradient norm.

    g' = scale · g                    m = m + (1 - beta1)(g' - m)      v = beta2 v + (1 - beta2) g'²
    w = (1 - lr · weight_decay) w - lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps)
    param = w, rounded to its dtype   g = 0

On CUDA one kernel reads g, w, m, v and writes w, m, v, the bf16 parameter and the zeroed gradient:
34 bytes an element with fp32 moments, 30 with a bf16 first moment, where an update, a copy to the
parameter and a fill take 42. Both are bound by memory.

Shapes: n elements of a flat buffer, which may be more than 2^31.
Loshchilov and Hutter, arXiv 1711.05101, as in torch.optim.AdamW.
"""

import math

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every machine; without a GPU the reference serves
    triton = None

CHUNK = 1 << 24  # elements that the reference handles at a time, which bounds its temporaries
BLOCK, WARPS = 1024, 8  # of the update: elements and warps of a program
PARTS, PART_BLOCK = 2048, 4096  # of the sum: programs, whatever the device has; elements a turn


# ---- References


def adamw_ref_(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, t: int, scale: float, param: Tensor | None = None,
    zero_grad: bool = False,
) -> None:  # fmt: skip
    """`adamw_` in plain torch, of any dtype and on any device."""
    step_size, root = lr / (1 - beta1**t), math.sqrt(1 - beta2**t)
    for i, pieces in enumerate(zip(*(x.split(CHUNK) for x in (w, g, m, v)), strict=True)):
        w_n, g_n, m_n, v_n = pieces
        scaled = g_n * scale
        first = m_n.to(w_n.dtype)  # m_n itself, unless that is bf16
        first.lerp_(scaled, 1 - beta1)
        m_n.copy_(first)
        v_n.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        denom = v_n.sqrt().div_(root).add_(eps)
        w_n.mul_(1 - lr * weight_decay).addcdiv_(first, denom, value=-step_size)
        if param is not None:
            param[i * CHUNK :][: len(w_n)].copy_(w_n)
        if zero_grad:
            g_n.zero_()


def sum_squares_ref(x: Tensor) -> Tensor:
    """`sum_squares` in plain torch."""
    return torch.linalg.vector_norm(x).double().square()


# ---- Kernels


if triton is not None:

    @triton.jit
    def _adamw_kernel(
        w_ptr,  # (n,) fp32
        g_ptr,  # (n,) fp32
        m_ptr,  # (n,) fp32 or bf16
        v_ptr,  # (n,) fp32
        param_ptr,  # (n,) of any dtype, or None
        n,
        scale, rate1, beta2, rate2, keep, step_size, root, eps,
        ZERO_GRAD: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program, BLOCK elements; rate1 = 1 - beta1, rate2 = 1 - beta2, keep = 1 - lr · wd."""
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(g_ptr + at, mask=inside, other=0.0) * scale
        w = tl.load(w_ptr + at, mask=inside, other=0.0)
        m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        m += rate1 * (g - m)
        v = beta2 * v + rate2 * g * g
        # Rounded root and quotient: the approximate ones flush a denormal v, and memory is slower.
        denom = tl.div_rn(tl.sqrt_rn(v), root + tl.zeros_like(v)) + eps
        w = keep * w - step_size * tl.div_rn(m, denom)
        tl.store(w_ptr + at, w, mask=inside)
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
        tl.store(v_ptr + at, v, mask=inside)
        if param_ptr is not None:
            tl.store(param_ptr + at, w.to(param_ptr.dtype.element_ty), mask=inside)
        if ZERO_GRAD:
            tl.store(g_ptr + at, tl.zeros_like(g), mask=inside)

    @triton.jit
    def _sum_squares_kernel(
        x_ptr,  # (n,) fp32
        parts_ptr,  # (PARTS,) fp32
        n,
        PARTS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Program p sums blocks p, p + PARTS, ... lane by lane, then over the lanes."""
        part = tl.program_id(0)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(part.to(tl.int64) * BLOCK, n, PARTS * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n, other=0.0)
            total += x * x
        tl.store(parts_ptr + part, tl.sum(total, 0))


# ---- Public


def adamw_(w: Tensor, g: Tensor, m: Tensor, v: Tensor, **options) -> None:
    """One AdamW update of w in place, update number t (from 1), with gradient g · scale.

    w, g, v: (n,) of one dtype, fp32 or float64; m: (n,) of that dtype or bf16 (rounded to nearest;
    the update uses it unrounded). Options: those of `adamw_ref_`, floats but for t; weight decay
    is decoupled. param: (n,), gets the new w in its own dtype. zero_grad: g is zero afterwards,
    else unchanged. On CUDA fp32 takes one kernel, contiguous tensors only; equal to rounding.
    """
    if triton is not None and w.is_cuda and w.dtype == torch.float32:
        _adamw(w, g, m, v, **options)
    else:
        adamw_ref_(w, g, m, v, **options)


def _adamw(
    w, g, m, v, *, lr, beta1, beta2, eps, weight_decay, t, scale, param=None, zero_grad=False
) -> None:
    assert all(x.is_contiguous() and len(x) == len(w) for x in (w, g, m, v))
    assert g.dtype == v.dtype == torch.float32 and (param is None or len(param) == len(w))
    numbers = [
        scale, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay, lr / (1 - beta1**t),
        math.sqrt(1 - beta2**t), eps,
    ]  # fmt: skip
    grid = (triton.cdiv(len(w), BLOCK),)
    _adamw_kernel[grid](
        w, g, m, v, param, len(w), *map(float, numbers), ZERO_GRAD=zero_grad, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip


def sum_squares(x: Tensor) -> Tensor:
    """Σ x², a float64 scalar on x's device, of x (n,) in fp32 or float64, n ≥ 0; no waiting.

    Always in the same order: the same bits for the same n and x on every GPU of a kind. NaN and
    infinities stay; fp32 squares beyond 3e38 become infinite.
    """
    if triton is not None and x.is_cuda and x.dtype == torch.float32:
        return _sum_squares(x)
    return sum_squares_ref(x)


def _sum_squares(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    parts = torch.empty(PARTS, dtype=torch.float32, device=x.device)
    _sum_squares_kernel[(PARTS,)](x, parts, len(x), PARTS=PARTS, BLOCK=PART_BLOCK, num_warps=8)
    return parts.double().sum()
