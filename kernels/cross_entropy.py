"""Head and cross-entropy in one: the logits of a large vocabulary are never held at once.

    loss = sum over tokens with target != ignore_index of
           lse_n - logit_n[target_n] + z_loss * lse_n^2,
    logit_n = W h_n,   lse_n = logsumexp(logit_n),
    dlogit_n = grad * ((1 + 2 * z_loss * lse_n) * softmax(logit_n) - onehot(target_n)).

The sum's gradient does not depend on what comes after it but for one factor, `grad`, so the
forward makes the gradients too: for one chunk of tokens at a time, logits -> loss -> dlogits (in
the logits' place) -> the chunk's rows of dhidden and its share of dweight. A caller that knows
`grad` beforehand has dweight added to the weight's `main_grad` at once; else a (V, D) buffer in
the wide dtype keeps it, and the backward multiplies by the factor that comes.

On CUDA the logits are in the weight's dtype, as an eager product leaves them, and one kernel takes
a row to its loss and its gradient: bytes an element of bf16 logits are 2 (product) + 2 (first
reading) + at most 2 + 2 (second, and writing), of which the second reading often finds them in
the cache. Chunks of 2,048 tokens rewrite the fp32 weight gradient seldom and fill a GPU.

Shapes: N tokens, D hidden width, V vocabulary.
"""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every machine; without a GPU the reference serves
    triton = None

CHUNK_ROWS = 2048
CHUNK_BYTES = 832 * 2**20
"""Limits of one chunk's logits: tokens, and bytes (below the rows' where a vocabulary is huge).
Larger chunks read the weights and rewrite the fp32 weight gradient fewer times; the products of
2,048 tokens are whole waves of tiles."""

ROWS, LANES, WARPS, STAGES = 2, 4096, 16, 3  # of a program: a block of logits is ROWS x LANES


def linear_cross_entropy_ref(hidden_ND, weight_VD, targets_N, *, ignore_index=-100, z_loss=0.0):
    """`linear_cross_entropy` in plain torch, on full logits, differentiable by autograd."""
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    logits = (hidden_ND.to(weight_VD.dtype) @ weight_VD.T).to(wide)
    targets = targets_N.long()
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    squares = logits.logsumexp(-1)[targets != ignore_index].square()
    return loss + z_loss * squares.sum()


# ---- One chunk: logits to losses and dlogits


def _softmax_ref(logits, targets, losses, grad, ignore_index, z_loss):
    """Losses (n,) of the rows of logits (n, V), both wide, and dlogits in the logits' place.

    losses is written. grad: () factor of dlogits; None: the losses only, logits unchanged.
    """
    valid = targets != ignore_index
    index = targets.long().masked_fill(~valid, 0).unsqueeze(1)
    lse = logits.logsumexp(-1)
    loss = lse - logits.gather(1, index).squeeze(1) + z_loss * lse.square()
    losses.copy_(loss.masked_fill(~valid, 0))
    if grad is not None:
        factor = (grad * (1 + 2 * z_loss * lse)).masked_fill(~valid, 0)
        logits.sub_(lse.unsqueeze(1)).exp_().mul_(factor.unsqueeze(1))
        logits.scatter_add_(1, index, (-grad * valid.to(logits.dtype)).unsqueeze(1))


if triton is not None:

    @triton.jit
    def _softmax_kernel(
        logits_ptr,  # (n, V); the dlogits take their place
        targets_ptr,  # (n,) int64 or int32
        losses_ptr,  # (n,) fp32
        grad_ptr,  # () fp32, or None: no dlogits
        V, ignore_index, z_loss,
        R: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """One program, one row, R x L logits at a time: once for lse, once more for dlogits."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * V
        target = tl.load(targets_ptr + row)
        valid = target != ignore_index
        exists = (target >= 0) & (target < V)
        # Read before it is overwritten; a target that is no word makes the loss NaN.
        at_target = tl.load(logits_ptr + target, mask=exists, other=float("nan")).to(tl.float32)

        # Each lane keeps its own maximum and sum, so that a block of R rows rescales the sum once.
        offsets = tl.arange(0, R)[:, None] * L + tl.arange(0, L)[None, :]
        top = tl.full((L,), -1e30, tl.float32)  # finite: a lane may see only -inf
        total = tl.zeros((L,), tl.float32)
        for start in tl.range(0, V, R * L, num_stages=STAGES):
            at = start + offsets
            x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[None, :]), 0)
            top = higher
        peak = tl.max(top, 0)
        lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
        tl.store(losses_ptr + row, tl.where(valid, lse - at_target + z_loss * lse * lse, 0.0))

        if grad_ptr is not None:
            grad = tl.load(grad_ptr)
            factor = tl.where(valid, grad * (1 + 2 * z_loss * lse), 0.0)
            column = tl.where(valid, target, -1).to(tl.int32)
            # Backwards: the end of the row is what the cache still has.
            blocks = tl.cdiv(V, R * L)
            for i in tl.range(0, blocks, num_stages=STAGES):
                at = (blocks - 1 - i) * (R * L) + offsets
                x = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
                dlogits = tl.exp(x - lse) * factor
                dlogits = tl.where(at == column, dlogits - grad, dlogits)  # p - 1 before rounding
                tl.store(logits_ptr + at, dlogits.to(logits_ptr.dtype.element_ty), mask=at < V)


def _softmax(logits, targets, losses, grad, ignore_index, z_loss):
    """`_softmax_ref` by the kernel: losses and grad fp32, logits of any narrower dtype too."""
    assert logits.is_contiguous() and losses.dtype == torch.float32
    assert grad is None or grad.dtype == torch.float32
    _softmax_kernel[(len(logits),)](
        logits, targets.contiguous(), losses, grad, logits.shape[1], ignore_index, float(z_loss),
        R=ROWS, L=LANES, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


# ---- All chunks


def _use_kernel(weight):
    return triton is not None and weight.is_cuda and weight.dtype != torch.float64


def _chunk_rows(N, V, dtype):
    """Rows a chunk: as many as both limits allow (at least one), dealt evenly over the chunks."""
    fit = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (V * dtype.itemsize)))
    chunks = max(1, -(-N // fit))
    return max(1, -(-N // chunks))


def _accumulate(dweight, dlogits, x):
    """dweight += dlogits^T x, with dweight in the wide dtype."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(dweight, dlogits.t(), x, out_dtype=dweight.dtype, out=dweight)
    else:
        dweight += dlogits.t() @ x


def _loss_and_grads(hidden, weight, targets, ignore_index, z_loss, grad, dhidden, dweight):
    """The summed loss. Writes dhidden (N, D) and adds to dweight (V, D, wide), where not None.

    grad: () factor of both, in the wide dtype; None: only the loss.
    """
    N, V = len(hidden), len(weight)
    wide = torch.promote_types(weight.dtype, torch.float32)
    fused = _use_kernel(weight)
    rows = _chunk_rows(N, V, weight.dtype if fused else wide)
    losses = torch.empty(N, dtype=wide, device=hidden.device)
    # One buffer for all chunks: the next one's would be made beside this one's.
    buffer = torch.empty(rows, V, dtype=weight.dtype if fused else wide, device=hidden.device)
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        x = hidden[chunk].to(weight.dtype)
        logits = buffer[: len(x)]
        if fused:
            torch.mm(x, weight.t(), out=logits)
        else:
            logits.copy_(x @ weight.t())
        softmax = _softmax if fused else _softmax_ref
        softmax(logits, targets[chunk], losses[chunk], grad, ignore_index, z_loss)
        if grad is None:
            continue
        dlogits = logits.to(weight.dtype)
        if dhidden is not None:
            dhidden[chunk] = dlogits @ weight
        if dweight is not None:
            _accumulate(dweight, dlogits, x)
    return losses.sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, ignore_index, z_loss, grad):
        wide = torch.promote_types(weight.dtype, torch.float32)
        want_dhidden, want_dweight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if want_dhidden else None
        kept = getattr(weight, "main_grad", None)
        ctx.added = want_dweight and grad is not None and kept is not None
        dweight = None
        if want_dweight:
            dweight = kept if ctx.added else torch.zeros_like(weight, dtype=wide)
        factor = torch.ones((), dtype=wide, device=weight.device) if grad is None else grad.to(wide)
        loss = _loss_and_grads(
            hidden, weight, targets, ignore_index, z_loss, factor, dhidden, dweight
        )
        ctx.save_for_backward(dhidden, None if ctx.added else dweight, grad)
        ctx.weight, ctx.done = weight, False
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dhidden, dweight, grad = ctx.saved_tensors
        kept = getattr(ctx.weight, "main_grad", None)
        if grad is not None:
            assert not ctx.done, "linear_cross_entropy: a second backward of one call"
            ctx.done = True
            said = "linear_cross_entropy: the loss's gradient is not the `grad` that was announced"
            torch._assert_async(dloss == grad, said)  # checked on the device, without waiting
            dweight = None if dweight is None else dweight.to(ctx.weight.dtype)
            return dhidden, dweight, None, None, None, None
        # In place: a second copy of dweight would be the largest tensor of the step. Autograd
        # notices, and refuses, a second backward over the same graph.
        if dhidden is not None:
            dhidden.mul_(dloss)
        if dweight is not None and kept is None:
            dweight = dweight.mul_(dloss).to(ctx.weight.dtype)
        elif dweight is not None:
            kept.addcmul_(dweight, dloss)
            dweight = None
        return dhidden, dweight, None, None, None, None


def linear_cross_entropy(
    hidden_ND, weight_VD, targets_N, *, ignore_index=-100, z_loss=0.0, grad=None
):
    """Sum over tokens of the cross-entropy (nats) of softmax(W h), plus z_loss * lse^2.

    hidden (N, D) and weight (V, D), floating; targets (N,) int64 or int32 in [0, V) or equal to
    ignore_index, which counts for nothing (all ignored: loss 0, gradients 0). Returns a scalar
    in fp32, float64 for a float64 weight. Products run in the dtype of the weight, softmax and
    sums in max(fp32, that dtype).

    grad: () tensor on the device, the gradient that the returned loss will receive, if that is
    known before. Then **this call adds the weight's gradient to its `main_grad`**, where the
    optimizer keeps one (only if gradients are enabled and the weight wants one): no (V, D) buffer
    and no later pass. The backward, which must receive that very value (checked on the device),
    only returns dhidden. Without it dweight is kept until the backward.

    dhidden comes in hidden's dtype. dweight is summed over the chunks in the wide dtype; it is
    added unrounded to the weight's `main_grad` where the optimizer keeps one, else returned in
    the weight's dtype. Without gradients (no_grad, or neither input wants one) only the loss is
    computed.
    To be called eagerly, not under torch.compile; one backward per call (no retain_graph).

    Raises ValueError for shapes and dtypes that do not fit together. A target outside [0, V)
    raises on a CPU and makes the loss NaN on CUDA.
    z-loss: PaLM (arXiv 2204.02311), sec. 5.
    """
    _check(hidden_ND, weight_VD, targets_N, grad)
    args = hidden_ND, weight_VD, targets_N, ignore_index, z_loss
    if not (torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)):
        return _loss_and_grads(*args, None, None, None)
    return _LinearCrossEntropy.apply(*args, grad)


def _check(hidden, weight, targets, grad):
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden must be (N, D) and weight (V, D), "
            f"got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: targets must be ({len(hidden)},), one a row of hidden, "
            f"got {tuple(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"linear_cross_entropy: targets must be int64 or int32, got {targets.dtype}"
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"linear_cross_entropy: hidden and weight must be floating, got {hidden.dtype} "
            f"and {weight.dtype}"
        )
    if grad is not None and (grad.shape != () or weight.dtype == torch.float16):
        raise ValueError(
            f"linear_cross_entropy: grad must be a scalar tensor, and the weight not float16 (its "
            f"small gradients would be lost), got {tuple(grad.shape)} and {weight.dtype}"
        )
