"""Multi-head latent attention: all heads' keys and values are expanded from one latent a token.

    [k_nope, v]_h = W_h c,   k_h = [k_nope_h, k_rope],   out, lse = attention(q, k, v)

c is the (normalised) latent and k_rope the rotated part of the keys, one for all heads. In one
process this is just that: the expansion, then kernels/attention.py.

Over the ranks of a ring what travels is c and k_rope, R + Dr numbers a token where expanded keys
and values have H * (Dn + Dr + Dv): 576 instead of 5,120 in DeepSeek-V2-Lite. A rank expands what
has come, computes with it, and drops it. To kernels/ring.py k_rope is a key and c a value of a
single head, which its `block` expands; so who meets whom, what is under way meanwhile, and the
joining of the parts are the same as for expanded keys. In the backward a block expands again and
    dc = W^T [dk_nope, dv],   dk_rope = sum_h dk_h[Dn:]        go home, R + Dr numbers a token,
    dW = sum [dk_nope, dv] c^T                                 stays, over all that came here.
The ranks' dW add up to the whole one, as those of their other weights do.

Saved for the backward: q, c, k_rope, W, out and lse, all local; nothing expanded.

Shapes: B batch, H heads, T tokens, R width of the latent, Dn and Dr widths of the expanded and of
the rotated part of queries and keys, Dv width of values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from kernels import ring as cp_ring
from kernels.attention import Block, attention, check, token_major
from kernels.dispatch import up


def _expand(latent, k_rope, w_kv_b, heads, nope):
    """k (B, H, T, Dn + Dr) and v (B, H, T, Dv), views of (B, T, H, ·); `nope` is Dn."""
    kv_BTHE = F.linear(latent, w_kv_b).unflatten(-1, (heads, -1))
    shared_BTHD = k_rope.transpose(1, 2).expand(-1, -1, heads, -1)
    k_BTHD = torch.cat([kv_BTHE[..., :nope], shared_BTHD], -1)
    return k_BTHD.transpose(1, 2), kv_BTHE[..., nope:].transpose(1, 2)


# ------------------------------------------------------------------ several ranks


@dataclass
class _LatentBlock:
    """What kernels/ring.py computes with: `block` on expanded keys and values.

    k_rope (B, 1, T, Dr) and latent (B, 1, T, R) stand for the keys and values that travel.
    dw: where the backward adds the gradient of w_kv_b, in max(fp32, dtype).
    """

    block: Block
    w_kv_b: Tensor
    dw: Tensor | None = None

    def forward(self, q, k_rope, latent, places):
        return self.block.forward(q, *self._expand(q, k_rope, latent), places)

    def backward(self, dout, q, k_rope, latent, out, lse, places):
        nope = q.shape[-1] - k_rope.shape[-1]
        k, v = self._expand(q, k_rope, latent)
        dq, dk, dv = self.block.backward(dout, q, k, v, out, lse, places)
        dk_BTHD, dv_BTHD = dk.transpose(1, 2), dv.transpose(1, 2)
        dkv_BTM = torch.cat([dk_BTHD[..., :nope], dv_BTHD], -1).flatten(2)  # M = H * (Dn + Dv)
        self.dw += dkv_BTM.flatten(0, 1).T @ latent.flatten(0, 2)
        return dq, dk[..., nope:].sum(1, keepdim=True), (dkv_BTM @ self.w_kv_b).unsqueeze(1)

    def _expand(self, q, k_rope, latent):
        heads, nope = q.shape[1], q.shape[-1] - k_rope.shape[-1]
        return _expand(latent.squeeze(1), k_rope, self.w_kv_b, heads, nope)


@torch.library.custom_op("pithtrain::latent_ring", mutates_args=())
def _latent_ring(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_kv_b: Tensor, cu_seqlens: Tensor | None,
    scale: float, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`latent_attention` over the ranks of a process group, by its name: opaque to compile."""
    ranks = _resolve_process_group(group)
    block = _LatentBlock(Block(q.shape[2] * ranks.size(), scale, None, cu_seqlens), w_kv_b)
    out, lse = cp_ring.forward(block, q, k_rope, latent.unsqueeze(1), None, ranks)
    return token_major(out.to(q.dtype)), lse.contiguous()


@_latent_ring.register_fake
def _(q, latent, k_rope, w_kv_b, cu_seqlens, scale, group):
    value_width = w_kv_b.shape[0] // q.shape[1] - (q.shape[-1] - k_rope.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return token_major(q.new_empty(*q.shape[:3], value_width)), lse


@torch.library.custom_op("pithtrain::latent_ring_backward", mutates_args=())
def _latent_ring_backward(
    dout: Tensor, q: Tensor, latent: Tensor, k_rope: Tensor, w_kv_b: Tensor,
    cu_seqlens: Tensor | None, out: Tensor, lse: Tensor, scale: float, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dlatent, dk_rope of the local parts; this rank's share of dw_kv_b."""
    ranks = _resolve_process_group(group)
    block = Block(q.shape[2] * ranks.size(), scale, None, cu_seqlens)
    block = _LatentBlock(block, w_kv_b, dw=up(torch.zeros_like(w_kv_b)))
    tensors = dout, q, k_rope, latent.unsqueeze(1), out, lse
    dq, dk_rope, dlatent = cp_ring.backward(block, *tensors, None, ranks)
    # Both are parts of one buffer, and an operator's results must not be.
    own = dict(dtype=q.dtype, memory_format=torch.contiguous_format, copy=True)
    dlatent, dk_rope = dlatent.squeeze(1).to(**own), dk_rope.to(**own)
    return token_major(dq.to(q.dtype)), dlatent, dk_rope, block.dw.to(w_kv_b.dtype)


@_latent_ring_backward.register_fake
def _(dout, q, latent, k_rope, w_kv_b, cu_seqlens, out, lse, scale, group):
    contiguous = (x.new_empty(x.shape) for x in (latent, k_rope, w_kv_b))
    return token_major(torch.empty_like(q)), *contiguous


def _ring_setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _ring_gradients(ctx, dout, _dlse):
    grads = _latent_ring_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.group)
    return *grads, None, None, None


_latent_ring.register_autograd(_ring_gradients, setup_context=_ring_setup)


# ------------------------------------------------------------------ public


def latent_attention(q, latent, k_rope, w_kv_b, *, scale, cu_seqlens=None, ring=None):
    """Causal multi-head latent attention; returns out (B, H, T, Dv) and lse (B, H, T).

    q (B, H, T, Dn + Dr): the part without positions first, the rest rotated. latent (B, T, R).
    k_rope (B, 1, T, Dr), rotated. w_kv_b (H * (Dn + Dv), R): of each head the rows of the keys,
    then those of the values, as in the published weight `kv_b_proj`. One dtype, any strides.
    scale, cu_seqlens, ring, and what is returned: see `kernels.attention.attention`; with a ring
    T stands for this rank's tokens, and w_kv_b, the same on all ranks, gets a rank's share of its
    gradient, to be summed over them.

    Raises ValueError for shapes and dtypes that do not fit together.
    DeepSeek-V2 (arXiv 2405.04434), sec. 2.1.
    """
    cp = 1 if ring is None else ring.size()
    check(q, q, q, None, None, cu_seqlens, cp)  # all that does not depend on keys and values
    _check(q, latent, k_rope, w_kv_b)
    if cp > 1:
        return _latent_ring(q, latent, k_rope, w_kv_b, cu_seqlens, scale, ring.group_name)
    k, v = _expand(latent, k_rope, w_kv_b, q.shape[1], q.shape[-1] - k_rope.shape[-1])
    return attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens)


def _check(q, latent, k_rope, w_kv_b):
    B, H, T, width = q.shape
    if latent.dim() != 3 or latent.shape[:2] != (B, T):
        raise ValueError(f"latent_attention: latent must be ({B}, {T}, R): {tuple(latent.shape)}")
    if k_rope.dim() != 4 or k_rope.shape[:3] != (B, 1, T) or k_rope.shape[-1] >= width:
        raise ValueError(
            f"latent_attention: k_rope must be ({B}, 1, {T}, Dr) with Dr below q's width {width},"
            f" got {tuple(k_rope.shape)}"
        )
    R, nope = latent.shape[-1], width - k_rope.shape[-1]
    if w_kv_b.dim() != 2 or w_kv_b.shape[1] != R or w_kv_b.shape[0] % H:
        raise ValueError(
            f"latent_attention: w_kv_b must be (H * (Dn + Dv), R) with H {H}, R {R},"
            f" got {tuple(w_kv_b.shape)}"
        )
    if w_kv_b.shape[0] // H <= nope:
        raise ValueError(
            f"latent_attention: w_kv_b has {w_kv_b.shape[0] // H} rows a head, no values beyond"
            f" the keys' {nope}"
        )
    if len({x.dtype for x in (q, latent, k_rope, w_kv_b)}) > 1:
        raise ValueError(
            f"latent_attention: q {q.dtype}, latent {latent.dtype}, k_rope {k_rope.dtype}, w_kv_b"
            f" {w_kv_b.dtype} must share one dtype"
        )
