"""Rows of an embedding table, whose gradient is added where it belongs and nowhere else.

    out_n = weight[token_n]          main_grad[w] += Σ over n with token_n = w of dout_n

A micro-batch sees a few thousand of 150,000 words. Autograd's dense gradient (V, D) is zeroed,
written, read and added in full, 8 bytes an element; here the rows of the tokens seen are read and
written once. The token ids are sorted, ties in order, and one program adds up a run of equal ids:
no atomics, the same bits every time.

Shapes: N tokens, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not on every machine; without a GPU the reference serves
    triton = None

OCCURRENCES, COLUMNS, WARPS = 8, 1024, 4  # that a program reads at a time; its warps


def add_rows_ref_(into_VD: Tensor, ids_N: Tensor, rows_ND: Tensor) -> None:
    """`add_rows_` in plain torch; in order on a CPU."""
    into_VD.index_add_(0, ids_N, rows_ND.to(into_VD.dtype))


if triton is not None:

    @triton.jit
    def _add_rows_kernel(
        into_ptr,  # (V, D) fp32 or float64
        rows_ptr,  # (N, D) of any dtype
        ids_ptr,  # (N,) int64 or int32, ascending
        order_ptr,  # (N,) int64: the row of each
        N, D,
        J: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Program (n, c): if a run of equal ids begins at n, its sum in columns c C and further."""
        first = tl.program_id(0)
        word = tl.load(ids_ptr + first)
        before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
        if word != before:
            columns = tl.program_id(1) * C + tl.arange(0, C)
            inside = columns < D
            total = tl.zeros((C,), into_ptr.dtype.element_ty)
            start, more = first, 1
            while more > 0:
                at = start + tl.arange(0, J)
                here = tl.load(ids_ptr + at, mask=at < N, other=-1) == word
                source = tl.load(order_ptr + at, mask=here, other=0)
                address = rows_ptr + source[:, None] * D + columns[None, :]
                rows = tl.load(address, mask=here[:, None] & inside[None, :], other=0.0)
                total += tl.sum(rows.to(total.dtype), 0)
                more = tl.min(here.to(tl.int32), 0)  # all J were this word's: there may be others
                start += J
            address = into_ptr + word.to(tl.int64) * D + columns
            tl.store(address, tl.load(address, mask=inside) + total, mask=inside)


def add_rows_(into_VD: Tensor, ids_N: Tensor, rows_ND: Tensor) -> None:
    """into[ids_n] += rows_n, equal ids summed first and in a fixed order.

    into (V, D) fp32 or float64, contiguous; ids (N,) integers in [0, V), not checked on CUDA;
    rows (N, D) of any floating dtype, summed in into's.
    """
    if triton is not None and into_VD.is_cuda:
        _add_rows(into_VD, ids_N, rows_ND)
    else:
        add_rows_ref_(into_VD, ids_N, rows_ND)


def _add_rows(into, ids, rows) -> None:
    assert into.is_contiguous() and rows.shape == (len(ids), into.shape[1])
    if not len(ids):
        return
    sorted_ids, order = ids.sort(stable=True)
    columns = min(COLUMNS, triton.next_power_of_2(rows.shape[1]))
    grid = len(ids), triton.cdiv(rows.shape[1], columns)
    _add_rows_kernel[grid](
        into, rows.contiguous(), sorted_ids, order, *rows.shape, J=OCCURRENCES, C=columns,
        num_warps=WARPS,
    )  # fmt: skip


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, dout):
        (tokens,) = ctx.saved_tensors
        kept = getattr(ctx.weight, "main_grad", None)
        if kept is None:
            words = len(ctx.weight)
            return None, torch.ops.aten.embedding_dense_backward(dout, tokens, words, -1, False)
        add_rows_(kept, tokens.flatten(), dout.reshape(-1, dout.shape[-1]))
        return None, None


def embedding(tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """weight[tokens]: tokens of any shape, int64 or int32 in [0, V); returns (*tokens.shape, D).

    The weight's gradient is added in the wide dtype to its `main_grad` where the optimizer keeps
    one, else returned dense in the weight's dtype, as F.embedding's. Called eagerly, not under
    torch.compile. Raises what F.embedding raises.
    """
    return _Embedding.apply(tokens, weight_VD)
