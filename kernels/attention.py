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

Saved for the backward: q, k, v, out, lse and the library's two (unused) random-state tensors.
On a CPU, in fp32 and float64, and for shapes that the libraries refuse: `attention_ref`.

Shapes: B batch, H query heads, Hkv key/value heads (H = G * Hkv; head h reads h // G), T tokens,
Dqk and Dv head widths (they differ in multi-head latent attention).
"""

import torch
import torch.nn.functional as F

_CUDNN_MAX_WIDTH = 192  # widest head of which cuDNN's backward is relied on here
_FLASH_MAX_WIDTH = 256
_ALIGNMENT = 8  # elements: both libraries read 16 bytes at a time, and check it nowhere


# ------------------------------------------------------------------ reference


def attention_ref(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None):
    """`attention` in plain torch: explicit scores, differentiable by autograd, O(T^2) memory.

    Computes in max(fp32, dtype of q); same arguments and results as `attention`.
    """
    B, H, T, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q_grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # (B, Hkv, G, T, Dqk)
    scores = torch.einsum("bngid,bnjd->bngij", q_grouped, k.to(wide)) * scale
    visible = _visible(B, T, window, cu_seqlens, q.device)  # (T, T) or (B, 1, 1, T, T)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)  # (B, Hkv, G, T)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(wide).view(k.shape[1], -1, 1))
    probs = (scores - lse.unsqueeze(-1)).exp()
    out = torch.einsum("bngij,bnjd->bngid", probs, v.to(wide)).flatten(1, 2)
    return out.to(q.dtype), lse.detach().flatten(1, 2)


def _visible(B, T, window, cu_seqlens, device):
    """Which keys (last axis) a query sees: bool (T, T), with documents (B, 1, 1, T, T)."""
    position = torch.arange(T, device=device)
    age = position[:, None] - position[None, :]  # how many tokens back the key lies
    visible = age >= 0 if window is None else (age >= 0) & (age < window)
    if cu_seqlens is None:
        return visible
    token = torch.arange(B * T, device=device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, token, right=True).view(B, T)
    same = document[:, :, None] == document[:, None, :]
    return (visible & same)[:, None, None]


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


def _cudnn_forward(q, k, v, scale):
    """Plain causal attention: out (B, H, T, Dv) laid out like q, lse (B, H, T), random state."""
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    # A copy: torch 2.11's AOTAutograd takes a view for differentiable, whatever it is marked.
    return out, lse.squeeze(-1).clone(), seed, offset


def _cudnn_backward(dout, q, k, v, out, lse, seed, offset, scale):
    T = q.shape[2]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, offset,
        None, None, None, T, T, 0.0, True, scale=scale,
    )  # fmt: skip


def _to_flash(x, packed):
    """(B, H, T, D) -> (B, T, H, D), packed (B * T, H, D); no copy of a transposed view."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if packed else x


def _from_flash(x, B):
    """The inverse of `_to_flash`."""
    return (x.unflatten(0, (B, -1)) if x.dim() == 3 else x).transpose(1, 2)


def _flash_forward(q, k, v, cu_seqlens, scale, window):
    """Causal attention within a window and/or documents; results as `_cudnn_forward`."""
    B, H, T, _ = q.shape
    packed = cu_seqlens is not None
    # A document is at most T long: the bound costs a few idle blocks, a tighter one would
    # cost a wait for the GPU.
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        _to_flash(q, packed), _to_flash(k, packed), _to_flash(v, packed),
        cu_seqlens, cu_seqlens, T, T, 0.0, True, False,
        scale=scale, window_size_left=_left(window), window_size_right=0,
    )  # fmt: skip
    if packed:
        lse = lse.view(H, B, T).transpose(0, 1)
    return _from_flash(out, B), lse, seed, offset


def _flash_backward(dout, q, k, v, out, lse, seed, offset, cu_seqlens, scale, window):
    B, H, T, _ = q.shape
    packed = cu_seqlens is not None
    if packed:
        lse = lse.transpose(0, 1).reshape(H, B * T)
    grads = torch.ops.aten._flash_attention_backward(
        *(_to_flash(x, packed) for x in (dout, q, k, v, out)), lse.contiguous(),
        cu_seqlens, cu_seqlens, T, T, 0.0, True, seed, offset,
        scale=scale, window_size_left=_left(window), window_size_right=0,
    )  # fmt: skip
    return tuple(_from_flash(grad, B) for grad in grads)


def _left(window):
    """Flash attention counts the keys before the token; -1 is all of them."""
    return -1 if window is None else window - 1


class _FusedAttention(torch.autograd.Function):
    """Library attention with sinks. lse is a result, but carries no gradient."""

    @staticmethod
    def forward(ctx, q, k, v, sink, cu_seqlens, scale, window):
        ctx.scale, ctx.window = scale, window
        ctx.flash = _needs_flash(q, v, cu_seqlens, window)
        if ctx.flash:
            out, lse, seed, offset = _flash_forward(q, k, v, cu_seqlens, scale, window)
        else:
            out, lse, seed, offset = _cudnn_forward(q, k, v, scale)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, cu_seqlens, out, lse, seed, offset)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _dlse):
        q, k, v, sink, cu_seqlens, out, lse, seed, offset = ctx.saved_tensors
        saved = (_aligned(dout), q, k, v, out, lse, seed, offset)
        if ctx.flash:
            dq, dk, dv = _flash_backward(*saved, cu_seqlens, ctx.scale, ctx.window)
        else:
            dq, dk, dv = _cudnn_backward(*saved, ctx.scale)
        dsink = None if sink is None else sink_grad(dout, out, lse, sink)
        return dq, dk, dv, dsink, None, None, None


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


def _fused(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None):
    """`attention` by the library kernels."""
    if window is not None and window >= q.shape[2]:
        window = None  # sees everything, and plain attention is faster
    width_v = v.shape[-1]
    if _needs_flash(q, v, cu_seqlens, window):
        # Flash attention knows one head width: zero columns add nothing to scores or output.
        width = max(q.shape[-1], width_v)
        q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
                   for x in (q, k, v))  # fmt: skip
    if sink is not None:
        sink = sink.to(torch.promote_types(q.dtype, torch.float32))  # the dtype of lse
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    out, lse = _FusedAttention.apply(q, k, v, sink, cu_seqlens, scale, window)
    return out[..., :width_v], lse


def _can_fuse(q, v):
    """Whether the libraries take these tensors (cuDNN refuses a single token)."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    widths_ok = all(x.shape[-1] % 8 == 0 and x.shape[-1] <= _FLASH_MAX_WIDTH for x in (q, v))
    return q.is_cuda and half and widths_ok and q.shape[2] > 1


# ------------------------------------------------------------------ public


def attention(q, k, v, *, scale, window=None, sink=None, cu_seqlens=None):
    """Causal attention; returns out (B, H, T, Dv) in q's dtype and its log-sum-exp (B, H, T).

    q (B, H, T, Dqk), k (B, Hkv, T, Dqk), v (B, Hkv, T, Dv): one dtype, any strides; fastest as
    transposed views of (B, T, H, D), which is also how out comes back then. H % Hkv == 0.
    scale: factor on the scores. window: keys that a token sees, itself included (None: all).
    sink (H,): a learned logit a head that takes part in the softmax and carries no value.
    cu_seqlens int32 (n + 1,): where documents begin among the B * T tokens, then B * T; every
    multiple of T must be among them, and an empty document (a repeated entry) is allowed.
    A token sees only its own document. The values are not checked: that would stall the GPU.

    lse is natural, of the scaled, masked scores, sink included; fp32 (float64 for float64), and
    not differentiable. Gradients flow to q, k, v and sink. Compiles with fullgraph=True.
    Bitwise repeatable gradients on a GPU need torch.use_deterministic_algorithms(True).

    Raises ValueError for shapes and dtypes that do not fit together.
    Sinks: gpt-oss (arXiv 2508.10925), sec. 2.1.
    """
    _check(q, k, v, window, sink, cu_seqlens)
    run = _fused if _can_fuse(q, v) else attention_ref
    return run(q, k, v, scale=scale, window=window, sink=sink, cu_seqlens=cu_seqlens)


def _check(q, k, v, window, sink, cu_seqlens):
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"attention: q, k, v must be (B, heads, T, D), got {q.dim()}, {k.dim()} and "
            f"{v.dim()} dimensions"
        )
    B, H, T, width = q.shape
    heads = k.shape[1]
    if k.shape != (B, heads, T, width) or v.shape[:3] != k.shape[:3] or H % heads:
        raise ValueError(
            f"attention: q {tuple(q.shape)} needs k ({B}, Hkv, {T}, {width}) and "
            f"v ({B}, Hkv, {T}, Dv) with Hkv dividing {H}, got k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"attention: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window {window} must be None or >= 1 (the token itself)")
    if sink is not None and sink.shape != (H,):
        raise ValueError(f"attention: sink must be ({H},), one a head, got {tuple(sink.shape)}")
    if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1):
        raise ValueError(
            f"attention: cu_seqlens must be int32 and 1-D, got {cu_seqlens.dtype}, "
            f"{cu_seqlens.dim()}-D"
        )
