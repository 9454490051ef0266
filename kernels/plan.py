"""Dispatch planning in Triton: stable counting sorts in two launches, the bits of torch's sort.

    position of slot s = start of its expert + its expert's slots before s

Receiving side: the R·K slots are shared out over up to PROGRAMS programs, consecutive ones each.
The first launch counts each program's slots of every expert, into a table. In the second every
program sums the table again for itself (64 KiB out of L2 take less time than a third launch), so
that it knows where each expert starts and what the programs before it put there; within a tile a
slot counts the earlier ones of its expert. The sending side does the same with ranks in place of
experts, tokens in place of slots; a third launch fills ids and weights.
No atomics, and nothing here depends on values that the host would have to wait for.

kernels/dispatch.py says what the results are and has the references (`*_ref`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, TILE, LONGEST, WARPS = 128, 8192, 128, 4  # at most: programs, elements, rows of a tile


def _cut(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows of a tile, tiles of a program, programs (one at least) for a (rows, columns) matrix."""
    tile = max(min(TILE // columns, LONGEST), 1)
    tiles = max(triton.cdiv(triton.cdiv(rows, tile), PROGRAMS), 1)
    return tile, tiles, max(triton.cdiv(rows, tile * tiles), 1)


@triton.jit
def _sums(table_BC, mine, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a table with a row for each program: the sum of all rows, and of those before `mine`."""
    total = tl.zeros((COLUMNS,), tl.int32)
    before = tl.zeros((COLUMNS,), tl.int32)
    column, blocks = tl.arange(0, COLUMNS), tl.num_programs(0)
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        ptrs = table_BC + b[:, None] * COLUMNS + column[None, :]
        part = tl.load(ptrs, mask=(b < blocks)[:, None], other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((b < mine)[:, None], part, 0), 0)
    return total, before


# ------------------------------------------------------------------------------------------------
# Receiving side
# ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["slots", "tiles"])
def _count_kernel(ids_S, table_BE, slots, tiles, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    b, e = tl.program_id(0), tl.arange(0, EXPERTS)
    count = tl.zeros((BLOCK, EXPERTS), tl.int32)
    for tile in range(0, tiles):
        s = (b * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(ids_S + s, mask=s < slots, other=-1).to(tl.int32)
        count += (expert[:, None] == e[None, :]).to(tl.int32)
    tl.store(table_BE + b * EXPERTS + e, tl.sum(count, 0))


@triton.jit(do_not_specialize=["slots", "here", "tiles"])
def _place_kernel(
    ids_S, table_BE, order_S, rows_S, experts_S, positions_S, valid_S, offsets_E, slots, here,
    tiles, E: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, e, i = tl.program_id(0), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    total, before = _sums(table_BE, b, EXPERTS, BLOCK)
    end = tl.cumsum(total, 0)
    tl.store(offsets_E + e, tl.minimum(end, here), mask=(e < E) & (b == 0))
    start = end - total + before  # where this program's next slot of each expert goes
    for tile in range(0, tiles):
        s = (b * tiles + tile) * BLOCK + i
        expert = tl.load(ids_S + s, mask=s < slots, other=-1).to(tl.int32)
        # All sums run down the columns, which a thread does alone; a scan would cost shuffles.
        earlier = (expert[:, None] == expert[None, :]) & (i[:, None] < i[None, :])
        at = tl.sum(tl.where(expert[None, :] == e[:, None], start[:, None], 0), 0)
        at += tl.sum(earlier.to(tl.int32), 0)
        start += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
        placed = (expert >= 0) & (at < here)
        tl.store(order_S + at, s, mask=placed)
        tl.store(rows_S + at, s // K, mask=placed)
        tl.store(experts_S + at, expert, mask=placed)
        if valid_S is not None:
            tl.store(valid_S + s, expert >= 0, mask=s < slots)
        at = tl.where(placed, at, tl.maximum(here - 1, 0))  # elsewhere: any that exists
        tl.store(positions_S + s, at, mask=s < slots)


def sort_slots(ids_RK: Tensor, n_experts: int, slots: int | None) -> tuple[Tensor | None, ...]:
    """The fields of `dispatch.Plan`, in its order; arguments as `dispatch.dispatch_plan`'s."""
    R, K = ids_RK.shape
    ids_RK = ids_RK.contiguous()
    here, experts = R * K if slots is None else slots, triton.next_power_of_2(n_experts)
    assert R * K < 2**31
    tile, tiles, programs = _cut(R * K, experts)
    new = ids_RK.new_empty
    fill = new if slots is None else ids_RK.new_zeros  # there may be room for more than come
    order_S, rows_S = (fill(here, dtype=torch.int64) for _ in range(2))
    experts_S, offsets_E = fill(here, dtype=torch.int32), new(n_experts, dtype=torch.int32)
    positions_RK = new(R, K, dtype=torch.int64)
    valid_RK = None if slots is None else new(R, K, dtype=torch.bool)
    table_BE = new(programs, experts, dtype=torch.int32)
    _count_kernel[programs,](ids_RK, table_BE, R * K, tiles, experts, tile, num_warps=WARPS)
    _place_kernel[programs,](
        ids_RK, table_BE, order_S, rows_S, experts_S, positions_RK, valid_RK, offsets_E, R * K,
        here, tiles, n_experts, K, experts, tile, num_warps=WARPS,
    )  # fmt: skip
    return order_S, rows_S, experts_S, positions_RK, valid_RK, offsets_E


# ------------------------------------------------------------------------------------------------
# Sending side
# ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "tiles"])
def _destinations_kernel(
    ids_NK, to_NP, table_2BP, N, tiles, LOCAL: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, p = tl.program_id(0), tl.arange(0, RANKS)
    rows, slots = tl.zeros((RANKS,), tl.int32), tl.zeros((RANKS,), tl.int32)
    for tile in range(0, tiles):
        n = (b * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        choices = tl.zeros((BLOCK, RANKS), tl.int32)
        for k in tl.static_range(K):
            rank = tl.load(ids_NK + n * K + k, mask=n < N, other=0).to(tl.int32) // LOCAL
            rank = tl.where(n < N, rank, -1)
            choices += (rank[:, None] == p[None, :]).to(tl.int32)
        slots += tl.sum(choices, 0)
        rows += tl.sum((choices > 0).to(tl.int32), 0)
        mask = (n < N)[:, None] & (p < P)[None, :]
        tl.store(to_NP + n[:, None] * P + p[None, :], choices > 0, mask=mask)
    tl.store(table_2BP + b * RANKS + p, rows)
    tl.store(table_2BP + (tl.num_programs(0) + b) * RANKS + p, slots)


@triton.jit(do_not_specialize=["N", "tiles"])
def _rows_kernel(
    to_NP, table_2BP, counts_P2, token_R, rank_R, at_NP, N, tiles, P: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, p = tl.program_id(0), tl.arange(0, RANKS)
    total, before = _sums(table_2BP, b, RANKS, BLOCK)
    if b == 0:
        slots, _ = _sums(table_2BP + tl.num_programs(0) * RANKS, b, RANKS, BLOCK)
        tl.store(counts_P2 + 2 * p, total, mask=p < P)
        tl.store(counts_P2 + 2 * p + 1, slots, mask=p < P)
    start = tl.cumsum(total, 0) - total + before
    for tile in range(0, tiles):
        n = (b * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        mask = (n < N)[None, :] & (p < P)[:, None]
        ptrs = n[None, :] * P + p[:, None]
        goes = tl.load(to_NP + ptrs, mask=mask, other=0).to(tl.int32)
        at = start[:, None] - 1 + tl.cumsum(goes, 1)
        start += tl.sum(goes, 1)
        tl.store(token_R + at, tl.broadcast_to(n[None, :], at.shape), mask=goes > 0)
        tl.store(rank_R + at, tl.broadcast_to(p[:, None], at.shape), mask=goes > 0)
        tl.store(at_NP + ptrs, tl.maximum(at, 0), mask=mask)


def cross(ids_NK: Tensor, n_experts: int, ep: int) -> tuple[Tensor, ...]:
    """The fields of `dispatch.Crossing`; token_R and rank_R as long as they could be, N·min(K, P).

    Beyond the sum of counts_P2's rows they are not written.
    """
    N, K = ids_NK.shape
    ids_NK, ranks = ids_NK.contiguous(), triton.next_power_of_2(ep)
    assert N * max(K, ep) < 2**31
    tile, tiles, programs = _cut(N, ranks)
    new = ids_NK.new_empty
    to_NP, at_NP = new(N, ep, dtype=torch.bool), new(N, ep, dtype=torch.int64)
    counts_P2 = new(ep, 2, dtype=torch.int64)
    token_R, rank_R = (new(N * min(K, ep), dtype=torch.int64) for _ in range(2))
    table_2BP = new(2, programs, ranks, dtype=torch.int32)
    _destinations_kernel[programs,](
        ids_NK, to_NP, table_2BP, N, tiles, n_experts // ep, ep, K, ranks, tile, num_warps=WARPS
    )
    _rows_kernel[programs,](
        to_NP, table_2BP, counts_P2, token_R, rank_R, at_NP, N, tiles, ep, ranks, tile,
        num_warps=WARPS,
    )  # fmt: skip
    return to_NP, counts_P2, token_R, rank_R, at_NP


@triton.jit(do_not_specialize=["slots"])
def _spread_kernel(
    ids_NK, weights_NK, token_R, rank_R, local_RK, weights_RK, slots, LOCAL: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < slots
    source = tl.load(token_R + s // K, mask=inside, other=0) * K + s % K
    rank = tl.load(rank_R + s // K, mask=inside, other=0).to(tl.int32)
    local = tl.load(ids_NK + source, mask=inside, other=0).to(tl.int32) - rank * LOCAL
    here = (local >= 0) & (local < LOCAL)
    tl.store(local_RK + s, tl.where(here, local, -1), mask=inside)
    weight = tl.load(weights_NK + source, mask=inside & here, other=0.0)
    tl.store(weights_RK + s, weight, mask=inside)


@triton.jit(do_not_specialize=["choices"])
def _unspread_kernel(
    ids_NK, at_NP, dweights_RK, dweights_NK, choices, LOCAL: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < choices
    rank = tl.load(ids_NK + c, mask=inside, other=0).to(tl.int32) // LOCAL
    row = tl.load(at_NP + c // K * P + rank, mask=inside, other=0)
    weight = tl.load(dweights_RK + row * K + c % K, mask=inside, other=0.0)
    tl.store(dweights_NK + c, weight, mask=inside)


class SpreadChoices(torch.autograd.Function):
    """(ids_NK, weights_NK, token_R, rank_R, at_NP, n_local) → local ids and weights of the rows.

    Local ids (R, K) int32, −1 elsewhere; weights (R, K), 0 elsewhere. Each choice is one rank's,
    so that its weight's gradient is read from one row.
    """

    @staticmethod
    def forward(ctx, ids_NK, weights_NK, token_R, rank_R, at_NP, n_local):
        (R,), K = token_R.shape, ids_NK.shape[1]
        assert R * K < 2**31
        ids_NK, weights_NK = ids_NK.contiguous(), weights_NK.contiguous()
        local_RK = ids_NK.new_empty(R, K, dtype=torch.int32)
        weights_RK = weights_NK.new_empty(R, K)
        if R:
            _spread_kernel[triton.cdiv(R * K, 512),](
                ids_NK, weights_NK, token_R, rank_R, local_RK, weights_RK, R * K, n_local, K, 512
            )
        ctx.save_for_backward(ids_NK, at_NP)
        ctx.n_local = n_local
        ctx.mark_non_differentiable(local_RK)
        return local_RK, weights_RK

    @staticmethod
    def backward(ctx, _, dweights_RK):
        ids_NK, at_NP = ctx.saved_tensors
        dweights_NK = dweights_RK.new_empty(ids_NK.shape)
        if ids_NK.numel():
            _unspread_kernel[triton.cdiv(ids_NK.numel(), 512),](
                ids_NK, at_NP, dweights_RK.contiguous(), dweights_NK, ids_NK.numel(), ctx.n_local,
                at_NP.shape[1], ids_NK.shape[1], 512,
            )  # fmt: skip
        return None, dweights_NK, None, None, None, None
