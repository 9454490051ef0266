"""Times of attention, for bench.kernels: one sequence, forward and backward.

FLOPs are those of the visible pairs of a query and a key: two products forward, five backward.
Torch's alternative is scaled_dot_product_attention with whatever it chooses, or flex_attention,
compiled, where there is a window; neither has sinks.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure import Meter, Width, Work
from kernels.attention import attention

WINDOW = 128  # GPT-OSS's


def pairs(T: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, itself included, in one sequence of T tokens."""
    W = T if window is None else min(window, T)
    return W * (W + 1) // 2 + (T - W) * W


def work(width: Width, T: int, window: int | None) -> tuple[Work, Work]:
    """Of the forward and of the backward, of one sequence in bf16.

    Forward q k v → out and lse; backward these and dout → dq dk dv.
    """
    (H, G), (Dk, Dv) = width.heads, width.head_dims
    seen, qkv, out = pairs(T, window), 2 * T * (H * Dk + G * (Dk + Dv)), 2 * T * H * Dv
    lse = 4 * T * H
    forward = Work(2 * H * seen * (Dk + Dv), qkv + out + lse)
    return forward, Work(2 * H * seen * (3 * Dk + 2 * Dv), 2 * qkv + 2 * out + lse)


def inputs(width: Width, T: int, device: str) -> list[Tensor]:
    """q, k, v and the output's gradient (1, heads, T, ·), laid out as projections give them."""
    (H, G), (Dk, Dv) = width.heads, width.head_dims
    gen = torch.Generator(device).manual_seed(0)
    shapes = [(1, T, H, Dk), (1, T, G, Dk), (1, T, G, Dv), (1, T, H, Dv)]
    return [
        torch.randn(s, generator=gen, device=device, dtype=torch.bfloat16)
        .transpose(1, 2).requires_grad_(i < 3)
        for i, s in enumerate(shapes)
    ]  # fmt: skip


def torch_alternative(T: int, window: int | None, scale: float, device: str):
    """(function of q, k, v; its name)."""
    if window is None:
        sdpa = F.scaled_dot_product_attention
        return partial(sdpa, is_causal=True, enable_gqa=True, scale=scale), "torch: sdpa"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b, h, q, k):
        return (q >= k) & (q - k < window)

    mask = create_block_mask(visible, None, None, T, T, device=device)
    flex = torch.compile(flex_attention, dynamic=False)
    return partial(flex, block_mask=mask, enable_gqa=True, scale=scale), "torch: flex_attention"


def rows(meter: Meter, name: str, width: Width, tokens: Sequence[int], configs: bool) -> None:
    """Forward and backward of every layer kind of a width."""
    scale = width.head_dims[0] ** -0.5
    for T in tokens:
        *qkv, dout = inputs(width, T, meter.device)
        sink = torch.zeros(width.heads[0], device=meter.device) if width.gpt_oss else None
        for window in (None, WINDOW) if width.gpt_oss else (None,):
            ours = partial(attention, scale=scale, window=window, sink=sink)
            theirs, note = torch_alternative(T, window, scale, meter.device)
            both = (passes(lambda *x, f=ours: f(*x)[0], qkv, dout), passes(theirs, qkv, dout))
            note += ", no sinks" if width.gpt_oss else ""
            kind = f"attention, window {window}," if window else "attention"
            meter.passes(kind, f"{name} T {T}", *both, work(width, T, window), note)


def passes(function, qkv, dout):
    """(forward without a graph, forward and backward)."""

    @torch.no_grad()
    def forward():
        return function(*qkv)

    return forward, lambda: torch.autograd.grad(function(*qkv), qkv, dout)
