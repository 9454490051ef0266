"""Causal attention with window, sinks, documents and grouped heads, and its log-sum-exp.

    p_ij = exp(scale * q_i.k_j - lse_i),   out_i = sum_j p_ij v_j,
    lse_i = log(sum_j exp(scale * q_i.k_j) [+ exp(sink)])        over the visible j <= i.

On a GPU the work is done by the library kernels that torch ships: cuDNN for plain causal
attention, flash attention where a window or document boundaries are given. Neither knows
sinks, and neither has to. A sink is one more column of scores without a value, so it only
rescales what the library returns:

    lse' = logaddexp(lse, sink),   out' = out * exp(lse - lse').

A library's backward uses nothing but P = exp(scores - lse) and D = rowsum(dout * out), so fed
with out' and lse' it returns the exact dq, dk and dv of the attention with the sink, and

    dsink = -sum exp(sink - lse') * rowsum(dout * out').

The same holds for a part of the keys: its gradients are exact if the backward is fed with the
whole attention's out and lse. So a sequence can be spread over ranks (kernels/ring.py), each
computing with the keys that visit it; sinks join once, after the parts.

Saved for the backward: q, k, v, out, lse and the library's two (unused) random-state tensors.
On a CPU, in fp32 and float64, and for shapes that the libraries refuse: `attention_ref`.

Shapes: B batch, H query heads, Hkv key/value heads (H = G * Hkv; head h reads h // G), T tokens,
Dqk and Dv head widths (they differ in multi-head latent attention).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from kernels import ring as cp_ring

_CUDNN_MAX_WIDTH = 192  # widest head of which cuDNN's backward is relied on here
_FLASH_MAX_WIDTH = 256
_ALIGNMENT = 8  # elements: both libraries read 16 bytes at a time, and check it nowhere


# ------------------------------------------------------------------ reference


def attention_ref(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None):
    """`attention` in plain torch: explicit scores, differentiable by autograd, O(T^2) memory.

    Computes in max(fp32, dtype of q); same arguments and results as `attention`.
    """
    B, H, T, _ = q.shape
    at = torch.arange(T, device=q.device)
    visible = _visible(at, at, B, T, window, cu_seqlens)
    out, lse = _part_forward_ref(q, k, v, scale, visible)
    if sink is not None:
        out, lse = add_sink(out, lse, sink.to(lse.dtype))
    return out.to(q.dtype), lse.detach()


def _scores(q, k, scale, visible):
    """Scaled scores (B, Hkv, G, Tq, Tk) in max(fp32, dtype), -inf where a key is not visible."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q_grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # (B, Hkv, G, Tq, Dqk)
    scores = torch.einsum("bngid,bnjd->bngij", q_grouped, k.to(wide)) * scale
    return scores.masked_fill(~visible, float("-inf"))


def _visible(q_at, k_at, B, T, window, cu_seqlens):
    """Which keys (Tk,) queries (Tq,) see, by their positions in B sequences of T tokens: bool."""
    age = q_at[:, None] - k_at[None, :]  # how many tokens back the key lies
    visible = age >= 0 if window is None else (age >= 0) & (age < window)
    if cu_seqlens is None:
        return visible  # (Tq, Tk)
    begin = torch.arange(B, device=q_at.device)[:, None] * T
    document_q, document_k = (
        torch.searchsorted(cu_seqlens, (begin + at).to(cu_seqlens.dtype), right=True)
        for at in (q_at, k_at)
    )
    same = document_q[:, :, None] == document_k[:, None, :]
    return (visible & same)[:, None, None]  # (B, 1, 1, Tq, Tk)


def _part_forward_ref(q, k, v, scale, visible):
    """Attention to visible keys: out (B, H, Tq, Dv), lse (B, H, Tq), wide; of none: 0, -inf."""
    scores = _scores(q, k, scale, visible)
    lse = scores.logsumexp(-1)
    lowest = torch.finfo(lse.dtype).min  # -inf - -inf would be NaN
    probs = (scores - lse.clamp_min(lowest).unsqueeze(-1)).exp()
    out = torch.einsum("bngij,bnjd->bngid", probs, v.to(lse.dtype))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _part_backward_ref(dout, q, k, v, out, lse, scale, visible):
    """dq, dk, dv of some of the keys, given out and lse over all of them (the formula on top)."""
    grouped = (k.shape[1], -1)
    dout, out, q_grouped = (x.to(lse.dtype).unflatten(1, grouped) for x in (dout, out, q))
    probs = (_scores(q, k, scale, visible) - lse.unflatten(1, grouped).unsqueeze(-1)).exp()
    dprobs = torch.einsum("bngid,bnjd->bngij", dout, v.to(lse.dtype))
    dscores = probs * (dprobs - (dout * out).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bngij,bnjd->bngid", dscores, k.to(lse.dtype)).flatten(1, 2)
    dk = torch.einsum("bngij,bngid->bnjd", dscores, q_grouped)
    dv = torch.einsum("bngij,bngid->bnjd", probs, dout)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ------------------------------------------------------------------ the sink's algebra


def add_sink(out, lse, sink):
    """Attention without sinks -> with sinks: out' (B, H, T, Dv), lse' (B, H, T).

    sink (H,) in the dtype of lse; a sink of -inf changes nothing. out' keeps dtype and layout.
    """
    lse_sink = torch.logaddexp(lse, sink[:, None])
    return (out * (lse - lse_sink).exp().unsqueeze(-1)).to(out.dtype), lse_sink


def sink_grad(dout, out, lse, sink):
    """Gradient (H,) of the sinks in the dtype of lse, given the results *with* the sinks."""
    rowsum = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # (B, H, T)
    return -((sink[:, None] - lse).exp() * rowsum).sum((0, 2))


# ------------------------------------------------------------------ library kernels


def _cudnn_forward(q, k, v, scale, causal):
    """Attention to all keys or, causal, as many as queries: results as `_library_forward`."""
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    # A copy: torch 2.11's AOTAutograd takes a view for differentiable, whatever it is marked.
    return out, lse.squeeze(-1).clone(), seed, offset


def _cudnn_backward(dout, q, k, v, out, lse, seed, offset, scale, causal):
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, offset,
        None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _to_flash(x, packed, width):
    """(B, H, T, D) -> (B, T, H, width), packed (B * T, H, width); a copy only to widen or pack.

    Flash attention knows one head width: zero columns add nothing to scores or output.
    """
    x = x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if packed else x


def _from_flash(x, B, width):
    """The inverse of `_to_flash`."""
    return (x.unflatten(0, (B, -1)) if x.dim() == 3 else x).transpose(1, 2)[..., :width]


def _flash_arguments(q, k, v, cu_q, cu_k, window, causal):
    """How `_to_flash` is to shape tensors, and the arguments that both passes share."""
    # A document is at most T long: a tighter bound would cost a wait for the GPU.
    lengths = (cu_q, cu_k, q.shape[2], k.shape[2], 0.0, causal)
    # It counts the keys before the token, -1 for all; the last query stands at the last key.
    left = -1 if window is None else window - 1
    sides = dict(window_size_left=left, window_size_right=0 if causal else -1)
    return (cu_q is not None, max(q.shape[-1], v.shape[-1])), lengths, sides


def _flash_forward(q, k, v, cu_q, cu_k, scale, window, causal):
    B, H, T, _ = q.shape
    shape, lengths, sides = _flash_arguments(q, k, v, cu_q, cu_k, window, causal)
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        *(_to_flash(x, *shape) for x in (q, k, v)), *lengths, False, scale=scale, **sides
    )
    if cu_q is not None:
        lse = lse.view(H, B, T).transpose(0, 1).clone()  # as in _cudnn_forward
    return _from_flash(out, B, v.shape[-1]), lse, seed, offset


def _flash_backward(dout, q, k, v, out, lse, seed, offset, cu_q, cu_k, scale, window, causal):
    B, H, T, _ = q.shape
    shape, lengths, sides = _flash_arguments(q, k, v, cu_q, cu_k, window, causal)
    if cu_q is not None:
        lse = lse.transpose(0, 1).reshape(H, B * T)
    grads = torch.ops.aten._flash_attention_backward(
        *(_to_flash(x, *shape) for x in (dout, q, k, v, out)), lse.contiguous(),
        *lengths, seed, offset, scale=scale, **sides,
    )  # fmt: skip
    return tuple(_from_flash(grad, B, x.shape[-1]) for grad, x in zip(grads, (q, k, v)))


def _library_forward(q, k, v, cu_q, cu_k, scale, window, causal=True):
    """out (B, H, T, Dv) laid out like q, lse (B, H, T), random state of the library that fits."""
    if _needs_flash(q, v, cu_q, window):
        return _flash_forward(q, k, v, cu_q, cu_k, scale, window, causal)
    return _cudnn_forward(q, k, v, scale, causal)


def _library_backward(
    dout, q, k, v, out, lse, seed, offset, cu_q, cu_k, scale, window, causal=True
):
    """dq, dk, dv."""
    saved = (dout, q, k, v, out, lse, seed, offset)
    if _needs_flash(q, v, cu_q, window):
        return _flash_backward(*saved, cu_q, cu_k, scale, window, causal)
    return _cudnn_backward(*saved, scale, causal)


def _needs_flash(q, v, cu_seqlens, window):
    wide = max(q.shape[-1], v.shape[-1]) > _CUDNN_MAX_WIDTH
    # cuDNN's backward only warns under deterministic algorithms; flash attention's obeys.
    repeatable = torch.are_deterministic_algorithms_enabled()
    return window is not None or cu_seqlens is not None or wide or repeatable


def _aligned(x):
    """x itself where the libraries can read it in place, else a contiguous copy.

    They need unit stride in the last axis and 16-byte alignment of every row; a broadcast
    (stride 0) or misaligned tensor is not refused but read wrongly, or faults.
    """
    strides = [x.stride(d) for d in range(x.dim() - 1) if x.shape[d] > 1]
    ok = x.stride(-1) == 1 and all(s > 0 and s % _ALIGNMENT == 0 for s in strides)
    if not torch.compiler.is_compiling():  # Dynamo cannot trace storage_offset
        ok = ok and x.storage_offset() % _ALIGNMENT == 0
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def _can_fuse(q, k, v):
    """Whether the libraries take these tensors (cuDNN refuses a single token)."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    widths_ok = all(x.shape[-1] % 8 == 0 and x.shape[-1] <= _FLASH_MAX_WIDTH for x in (q, v))
    return q.is_cuda and half and widths_ok and q.shape[2] > 1 and k.shape[2] > 1


# ------------------------------------------------------------------ one process


class _FusedAttention(torch.autograd.Function):
    """Library attention with sinks. lse is a result, but carries no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, sink, cu_seqlens, scale, window):
        ctx.scale, ctx.window = scale, window
        out, lse, seed, offset = _library_forward(q, k, v, cu_seqlens, cu_seqlens, scale, window)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, cu_seqlens, out, lse, seed, offset)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _dlse):
        q, k, v, sink, cu_seqlens, out, lse, seed, offset = ctx.saved_tensors
        saved = (_aligned(dout), q, k, v, out, lse, seed, offset)
        grads = _library_backward(*saved, cu_seqlens, cu_seqlens, ctx.scale, ctx.window)
        dsink = None if sink is None else sink_grad(dout, out, lse, sink)
        return *grads, dsink, None, None, None


def _fused(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None):
    """`attention` by the library kernels."""
    return _FusedAttention.apply(*map(_aligned, (q, k, v)), sink, cu_seqlens, scale, window)


# ------------------------------------------------------------------ several ranks


@dataclass(frozen=True)
class Block:
    """What kernels/ring.py computes with: attention between spans of sequences of T tokens."""

    T: int
    scale: float
    window: int | None
    cu_seqlens: Tensor | None

    def forward(self, q, k, v, places):
        if not _can_fuse(q, k, v):
            return _part_forward_ref(q, k, v, self.scale, self._mask(q, places))
        out, lse, _, _ = _library_forward(*map(_aligned, (q, k, v)), *self._how(places))
        # Flash attention says +inf of a query whose document has no key here.
        return out, lse.masked_fill(lse == float("inf"), -float("inf"))

    def backward(self, dout, q, k, v, out, lse, places):
        tensors = dout, q, k, v, out
        if not _can_fuse(q, k, v):
            return _part_backward_ref(*tensors, lse, self.scale, self._mask(q, places))
        unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # random state, no dropout
        return _library_backward(*map(_aligned, tensors), lse, unused, unused, *self._how(places))

    def _mask(self, q, places):
        at = (cp_ring.positions(spans, q.device) for spans in places)
        return _visible(*at, q.shape[0], self.T, self.window, self.cu_seqlens)

    def _how(self, places):
        cu = self.cu_seqlens
        lengths = [None if cu is None else cp_ring.lengths(cu, self.T, s) for s in places]
        return *lengths, self.scale, self.window, places.causal


def token_major(x):
    """The same (B, H, T, D) tensor as a view of a contiguous (B, T, H, D), as projections are."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("pithtrain::ring_attention", mutates_args=())
def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, window: int | None, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over the ranks of a process group, by its name: opaque to torch.compile."""
    ranks = _resolve_process_group(group)
    block = Block(q.shape[2] * ranks.size(), scale, window, cu_seqlens)
    out, lse = cp_ring.forward(block, q, k, v, window, ranks)
    if sink is not None:
        out, lse = add_sink(out, lse, sink)
    return token_major(out.to(q.dtype)), lse.contiguous()


@_ring_attention.register_fake
def _(q, k, v, sink, cu_seqlens, scale, window, group):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return token_major(q.new_empty(*q.shape[:3], v.shape[-1])), lse


@torch.library.custom_op("pithtrain::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, out: Tensor,
    lse: Tensor, scale: float, window: int | None, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of the local parts."""
    ranks = _resolve_process_group(group)
    block = Block(q.shape[2] * ranks.size(), scale, window, cu_seqlens)
    grads = cp_ring.backward(block, dout, q, k, v, out, lse, window, ranks)
    return tuple(token_major(grad.to(q.dtype)) for grad in grads)


@_ring_attention_backward.register_fake
def _(dout, q, k, v, cu_seqlens, out, lse, scale, window, group):
    return tuple(token_major(torch.empty_like(x)) for x in (q, k, v))


def _ring_setup(ctx, inputs, output):
    q, k, v, sink, cu_seqlens, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, sink, cu_seqlens, *output)
    ctx.mark_non_differentiable(output[1])


def _ring_gradients(ctx, dout, _dlse):
    q, k, v, sink, cu_seqlens, out, lse = ctx.saved_tensors
    grads = _ring_attention_backward(dout, q, k, v, cu_seqlens, out, lse, *ctx.how)
    dsink = None if sink is None else sink_grad(dout, out, lse, sink)
    return *grads, dsink, None, None, None, None


_ring_attention.register_autograd(_ring_gradients, setup_context=_ring_setup)


# ------------------------------------------------------------------ public


def attention(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None, ring=None):
    """Causal attention; returns out (B, H, T, Dv) in q's dtype and its log-sum-exp (B, H, T).

    q (B, H, T, Dqk), k (B, Hkv, T, Dqk), v (B, Hkv, T, Dv): one dtype, any strides; fastest as
    transposed views of (B, T, H, D), which is also how out comes back then. H % Hkv == 0.
    scale: factor on the scores. window: keys that a token sees, itself included (None: all).
    sink (H,): a learned logit a head that takes part in the softmax and carries no value.
    cu_seqlens int32 (n + 1,): where documents begin among the B * T tokens, then B * T; every
    multiple of T must be among them, and an empty document (a repeated entry) is allowed.
    A token sees only its own document. The values are not checked: that would stall the GPU.

    ring: the process group of the cp ranks that share the sequences (None: whole ones are here).
    Then T stands for this rank's tokens, those of `kernels.ring.zigzag`; cu_seqlens and window
    count in the whole sequences and are the same on every rank, as are all shapes. Every rank
    must call, in the same order, and run the backward. Sinks get this rank's share of their
    gradient. Keys travel while others are computed with, forward and backward.

    lse is natural, of the scaled, masked scores, sink included; fp32 (float64 for float64), and
    not differentiable. Gradients flow to q, k, v and sink. Compiles with fullgraph=True.
    Bitwise repeatable gradients on a GPU need torch.use_deterministic_algorithms(True).

    Raises ValueError for shapes and dtypes that do not fit together.
    Sinks: gpt-oss (arXiv 2508.10925), sec. 2.1. Ring: arXiv 2310.01889.
    """
    cp = 1 if ring is None else ring.size()
    check(q, k, v, window, sink, cu_seqlens, cp)
    if window is not None and window >= q.shape[2] * cp:
        window = None  # sees everything, and plain attention is faster
    if sink is not None:
        sink = sink.to(torch.promote_types(q.dtype, torch.float32))  # the dtype of lse
    if cp > 1:
        return _ring_attention(q, k, v, sink, cu_seqlens, scale, window, ring.group_name)
    run = _fused if _can_fuse(q, k, v) else attention_ref
    return run(q, k, v, scale=scale, window=window, sink=sink, cu_seqlens=cu_seqlens)


def check(q, k, v, window, sink, cu_seqlens, cp):
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention: q, k, v need 4 dimensions: {q.dim()}, {k.dim()}, {v.dim()}")
    B, H, T, width = q.shape
    heads = k.shape[1]
    if k.shape != (B, heads, T, width) or v.shape[:3] != k.shape[:3] or H % heads:
        raise ValueError(
            f"attention: q {tuple(q.shape)} needs k ({B}, Hkv, {T}, {width}), v ({B}, Hkv, {T}, Dv)"
            f" with Hkv dividing {H}, got k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if cp > 1 and T % 2:
        raise ValueError(f"attention: T {T} must be even, two blocks on each of the {cp} ranks")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q, k, v share no dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window {window} must be None or >= 1 (the token itself)")
    if sink is not None and sink.shape != (H,):
        raise ValueError(f"attention: sink must be ({H},), one a head, got {tuple(sink.shape)}")
    if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1):
        raise ValueError(
            f"attention: cu_seqlens must be 1-D int32, got {cu_seqlens.dim()}-D {cu_seqlens.dtype}"
        )
