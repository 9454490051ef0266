"""Head and cross-entropy in one: the logits of a large vocabulary are never held at once.

    loss = sum over tokens with target != ignore_index of
           lse_n - logit_n[target_n] + z_loss * lse_n^2,
    logit_n = W h_n,   lse_n = logsumexp(logit_n),
    dlogit_n = (1 + 2 * z_loss * lse_n) * softmax(logit_n) - onehot(target_n).

The sum's gradient does not depend on what comes after it but for one factor, so the forward
makes the gradients too: for one chunk of tokens at a time, logits -> loss -> dlogits -> the
chunk's rows of dhidden and its share of dweight, and then the chunk's logits are dropped. The
backward multiplies both by the incoming factor. Kept between the two: dhidden (N, D) and dweight
(V, D) in fp32; not the (N, V) logits, which at 150,000 words are 600 KB a token.

Shapes: N tokens, D hidden width, V vocabulary.
"""

import torch
import torch.nn.functional as F

CHUNK_BYTES = 512 * 2**20
"""Size of one chunk's logits (fp32, or float64 for float64); two or three such buffers live at
once. Larger chunks read the weights and rewrite the fp32 weight gradient fewer times."""


def linear_cross_entropy_ref(hidden_ND, weight_VD, targets_N, *, ignore_index=-100, z_loss=0.0):
    """`linear_cross_entropy` in plain torch, on full logits, differentiable by autograd."""
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    logits = (hidden_ND.to(weight_VD.dtype) @ weight_VD.T).to(wide)
    targets = targets_N.long()
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    squares = logits.logsumexp(-1)[targets != ignore_index].square()
    return loss + z_loss * squares.sum()


def _chunk_rows(N, V, dtype):
    """Rows a chunk: as many as fit CHUNK_BYTES (at least one), dealt evenly over the chunks."""
    fit = max(1, CHUNK_BYTES // (V * dtype.itemsize))
    chunks = max(1, -(-N // fit))
    return max(1, -(-N // chunks))


def _logits(x, weight, wide):
    """x W^T in the wide dtype; the product itself runs in the dtype of the weight."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=wide)  # no rounding, and one pass less
    return (x @ weight.t()).to(wide)


def _accumulate(dweight, dlogits, x):
    """dweight += dlogits^T x, with dweight in the wide dtype."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(dweight, dlogits.t(), x, out_dtype=dweight.dtype, out=dweight)
    else:
        dweight += dlogits.t() @ x


def _chunk_loss(logits, targets, ignore_index, z_loss):
    """Summed loss of one chunk, and what its gradient needs: log-probabilities and row factors.

    Returns loss (), log_probs (n, V), index (n, 1) a target that is safe to gather by,
    factor (n, 1) of the softmax in dlogits (0 in ignored rows), valid (n, 1) as numbers.
    """
    valid = (targets != ignore_index).unsqueeze(1)
    index = targets.unsqueeze(1).masked_fill(~valid, 0)
    log_probs = logits.log_softmax(-1)
    target_log_prob = log_probs.gather(1, index)
    lse = logits.gather(1, index) - target_log_prob
    loss = (z_loss * lse.square() - target_log_prob).masked_fill(~valid, 0).sum()
    factor = (1 + 2 * z_loss * lse).masked_fill(~valid, 0)
    return loss, log_probs, index, factor, valid.to(logits.dtype)


def _chunk_dlogits(log_probs, index, factor, valid, dtype):
    """Gradient of the chunk's logits in `dtype`; overwrites log_probs."""
    probs = log_probs.exp_()
    # The target's column is finished in the wide dtype: p - 1 in bf16 would be rounded twice.
    at_target = probs.gather(1, index) * factor - valid
    dlogits = torch.mul(probs, factor, out=torch.empty_like(probs, dtype=dtype))
    return dlogits.scatter_(1, index, at_target.to(dtype))


def _loss_and_grads(hidden, weight, targets, ignore_index, z_loss, want_dhidden, want_dweight):
    """Summed loss, dhidden (N, D) in hidden's dtype, dweight (V, D) wide; None where unwanted."""
    N, V = len(hidden), len(weight)
    wide = torch.promote_types(weight.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    dhidden = torch.empty_like(hidden) if want_dhidden else None
    dweight = torch.zeros_like(weight, dtype=wide) if want_dweight else None
    rows = _chunk_rows(N, V, wide)
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        x = hidden[chunk].to(weight.dtype)
        part, *for_grad = _chunk_loss(
            _logits(x, weight, wide), targets[chunk].long(), ignore_index, z_loss
        )
        loss += part
        if not (want_dhidden or want_dweight):
            continue
        dlogits = _chunk_dlogits(*for_grad, weight.dtype)
        del for_grad  # or the next chunk's logits would be made beside this one's
        if want_dhidden:
            dhidden[chunk] = dlogits @ weight
        if want_dweight:
            _accumulate(dweight, dlogits, x)
    return loss, dhidden, dweight


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, ignore_index, z_loss):
        loss, dhidden, dweight = _loss_and_grads(
            hidden, weight, targets, ignore_index, z_loss, *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight = weight
        return loss

    @staticmethod
    def backward(ctx, dloss):
        # In place: a second copy of dweight would be the largest tensor of the step. Autograd
        # notices, and refuses, a second backward over the same graph.
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden.mul_(dloss)
        if dweight is None:
            return dhidden, None, None, None, None
        kept = getattr(ctx.weight, "main_grad", None)
        if kept is None:
            return dhidden, dweight.mul_(dloss).to(ctx.weight.dtype), None, None, None
        kept.addcmul_(dweight, dloss)
        return dhidden, None, None, None, None


def linear_cross_entropy(hidden_ND, weight_VD, targets_N, *, ignore_index=-100, z_loss=0.0):
    """Sum over tokens of the cross-entropy (nats) of softmax(W h), plus z_loss * lse^2.

    hidden (N, D) and weight (V, D), floating; targets (N,) int64 or int32 in [0, V) or equal to
    ignore_index, which counts for nothing (all ignored: loss 0, gradients 0). Returns a scalar
    in fp32, float64 for a float64 weight. Products run in the dtype of the weight, softmax and
    sums in max(fp32, that dtype).

    dhidden comes in hidden's dtype. dweight is summed over the chunks in the wide dtype; it is
    added unrounded to the weight's `main_grad` where the optimizer keeps one, else returned in
    the weight's dtype. Without gradients (no_grad, or neither input wants one) only the loss is
    computed.
    To be called eagerly, not under torch.compile; one backward per call (no retain_graph).

    Raises ValueError for shapes and dtypes that do not fit together.
    z-loss: PaLM (arXiv 2204.02311), sec. 5.
    """
    _check(hidden_ND, weight_VD, targets_N)
    if not (torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)):
        return _loss_and_grads(hidden_ND, weight_VD, targets_N, ignore_index, z_loss, False, False)[
            0
        ]
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, targets_N, ignore_index, z_loss)


def _check(hidden, weight, targets):
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
