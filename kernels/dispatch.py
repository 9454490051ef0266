"""Dispatch planning: which rows go to which rank, and in which order experts compute them.

On the sending side a token goes at most once to each rank that holds any of its chosen experts,
with its local expert ids and routing weights (`Crossing`). On the receiving side the R rows'
slots (a row's routed copies, K a row, some of them elsewhere) are sorted by expert, ties in row
order, into one group of rows an expert for the grouped GEMMs (`Plan`). With ep = 1 nothing is
sent and the rows are the tokens: only the receiving side is there.

Every gather has its inverse in the plan, so that sums read in a fixed order, with no atomics: the
same choices give the same bits. Sizes that depend on the choices come from the exchange of counts;
with ep = 1 all are known on the host and nothing synchronises.
On a GPU plans are made by the kernels of kernels/plan.py: the same results, bit for bit.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from kernels import plan as triton_plan
except ImportError:  # Triton is not on every machine; without a GPU the references serve
    triton_plan = None


def _in_triton(ids: Tensor) -> bool:
    return triton_plan is not None and (ids.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def up(x: Tensor) -> Tensor:
    """`x` in the dtype that accumulations use: fp32, or float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sum_rows(rows_RD: Tensor, at_NK: Tensor, valid_NK: Tensor | None) -> Tensor:
    """out_n = Σ over k of rows[at[n, k]] where valid, k in order: (R, D), (N, K) → (N, D)."""
    if not len(rows_RD):
        return rows_RD.new_zeros(len(at_NK), rows_RD.shape[1])
    taken_NKD = up(rows_RD[at_NK])
    if valid_NK is not None:
        taken_NKD = taken_NKD.masked_fill(~valid_NK[..., None], 0)
    return taken_NKD.sum(1).to(rows_RD.dtype)


# ------------------------------------------------------------------------------------------------
# Receiving side
# ------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How R rows meet E local experts through S slots (integers on the rows' device).

    order_S: slot (row·K + choice) at each sorted position; rows_S: its row; experts_S: its expert;
    positions_RK: sorted position of each of a row's slots (any, where it is not here);
    valid_RK: which are here, None if all; offsets_E (int32): end of each expert's group.
    """

    order_S: Tensor
    rows_S: Tensor
    experts_S: Tensor
    positions_RK: Tensor
    valid_RK: Tensor | None
    offsets_E: Tensor


def dispatch_plan_ref(ids_RK: Tensor, n_experts: int, slots: int | None = None) -> Plan:
    """`dispatch_plan` in plain torch."""
    R, K = ids_RK.shape
    device = ids_RK.device
    valid_RK = None if slots is None else ids_RK >= 0
    keys = ids_RK if valid_RK is None else ids_RK.masked_fill(~valid_RK, n_experts)
    sorted_S, order_S = keys.flatten().to(torch.int32).sort(stable=True)
    experts = torch.arange(n_experts, dtype=torch.int32, device=device)
    offsets_E = torch.searchsorted(sorted_S, experts, right=True, out_int32=True)
    positions_S = torch.empty_like(order_S)
    positions_S[order_S] = torch.arange(R * K, device=device)
    if slots is not None:  # those elsewhere were sorted to the end
        free = max(slots - R * K, 0)
        sorted_S = F.pad(sorted_S.clamp(max=n_experts - 1), (0, free))[:slots]
        order_S, offsets_E = F.pad(order_S, (0, free))[:slots], offsets_E.clamp(max=slots)
        positions_S = positions_S.clamp(max=max(slots - 1, 0))
    return Plan(order_S, order_S // K, sorted_S, positions_S.view(R, K), valid_RK, offsets_E)


def dispatch_plan(ids_RK: Tensor, n_experts: int, slots: int | None = None) -> Plan:
    """Sort the slots by expert; an expert nobody chose has an empty group.

    ids_RK (R, K) integers, local expert ids. `slots`: how many are not −1 (a choice that lives on
    another rank), or room for more; None if all are experts. The plan has S = slots entries; those
    from offsets_E[-1] on belong to nobody, and what finds no room is left out.
    """
    if _in_triton(ids_RK):
        return Plan(*triton_plan.sort_slots(ids_RK, n_experts, slots))
    return dispatch_plan_ref(ids_RK, n_experts, slots)


# ------------------------------------------------------------------------------------------------
# Sending side
# ------------------------------------------------------------------------------------------------


class Crossing(NamedTuple):
    """N tokens' way to `ep` ranks and back; before `lay_out` only the first two are to be read.

    to_NP: which ranks a token goes to; counts_P2: rows and slots for each of them. token_R,
    rank_R: token and destination of each row sent, rank by rank, tokens in order; at_NP: row that
    carries a token to a rank (any, where none does).
    """

    to_NP: Tensor
    counts_P2: Tensor
    token_R: Tensor | None = None
    rank_R: Tensor | None = None
    at_NP: Tensor | None = None


def crossing_ref(ids_NK: Tensor, n_experts: int, ep: int) -> Crossing:
    """`crossing` in plain torch."""
    rank_NK = ids_NK.long() // (n_experts // ep)
    slots_NP = F.one_hot(rank_NK, ep).sum(1)
    to_NP = slots_NP > 0
    return Crossing(to_NP, torch.stack([to_NP.sum(0), slots_NP.sum(0)], 1))


def crossing(ids_NK: Tensor, n_experts: int, ep: int) -> Crossing:
    """Where tokens must go; `n_experts` in all, consecutive ones on a rank. Does not wait."""
    if _in_triton(ids_NK):
        return Crossing(*triton_plan.cross(ids_NK, n_experts, ep))
    return crossing_ref(ids_NK, n_experts, ep)


def lay_out(cross: Crossing, rows_P: Sequence[int]) -> Crossing:
    """The crossing's rows in the order they are sent, rows_P[p] of them to rank p.

    They are the row counts, or room for as many to every rank: then what is over is filled up with
    rows of nobody (rank P, no choices), and tokens beyond it are left out.
    """
    N, P = cross.to_NP.shape
    if cross.at_NP is None:
        to_PN = cross.to_NP.T.flatten()
        order = (~to_PN).to(torch.uint8).argsort(stable=True)
        at_NP = (to_PN.cumsum(0) - 1).clamp(min=0).view_as(cross.to_NP.T).T
        cross = cross._replace(token_R=order % N, rank_R=order // N, at_NP=at_NP)
    if len(set(rows_P)) > 1:  # counts: the kernels wrote the rows before their number was known
        rows = sum(rows_P)
        return cross._replace(token_R=cross.token_R[:rows], rank_R=cross.rank_R[:rows])
    room, ranks_P = rows_P[0], torch.arange(P, device=cross.to_NP.device)
    count_P1 = cross.counts_P2[:, :1]
    start_P1 = count_P1.cumsum(0) - count_P1
    place_R = torch.arange(room, device=ranks_P.device)
    filled_PR = place_R < count_P1
    source_PR = (start_P1 + place_R).where(filled_PR, 0)
    token_R = cross.token_R[source_PR].where(filled_PR, 0).flatten()
    rank_R = ranks_P[:, None].where(filled_PR, P).flatten()
    place_NP = cross.at_NP - start_P1.T
    to_NP = cross.to_NP & (place_NP < room)
    at_NP = place_NP.clamp(0, max(room - 1, 0)) + ranks_P * room
    return Crossing(to_NP, cross.counts_P2, token_R, rank_R, at_NP)


class _Spread(torch.autograd.Function):
    """Rows to send, (N, D) → (R, D); backward sums a token's rows in rank order."""

    @staticmethod
    def forward(ctx, tokens_ND, cross):
        ctx.cross = cross
        return tokens_ND[cross.token_R]

    @staticmethod
    def backward(ctx, grad_RD):
        return sum_rows(grad_RD, ctx.cross.at_NP, ctx.cross.to_NP), None


class _Collect(torch.autograd.Function):
    """The inverse way, (R, D) → (N, D): a token's rows summed in rank order."""

    @staticmethod
    def forward(ctx, rows_RD, cross):
        ctx.cross = cross
        return sum_rows(rows_RD, cross.at_NP, cross.to_NP)

    @staticmethod
    def backward(ctx, grad_ND):
        return grad_ND[ctx.cross.token_R], None


def spread_choices_ref(
    ids_NK: Tensor, weights_NK: Tensor, cross: Crossing, n_local: int
) -> tuple[Tensor, Tensor]:
    """Local expert ids and weights of the rows in plain torch."""
    ids_RK = ids_NK[cross.token_R] - cross.rank_R[:, None] * n_local
    here_RK = (ids_RK >= 0) & (ids_RK < n_local)
    weights_RK = weights_NK[cross.token_R].masked_fill(~here_RK, 0)
    return ids_RK.masked_fill(~here_RK, -1).to(torch.int32), weights_RK


def spread(
    tokens_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, cross: Crossing, n_local: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What travels: rows (R, D), local expert ids (R, K) int32, −1 elsewhere, weights (R, K)."""
    if _in_triton(ids_NK):
        way = cross.token_R, cross.rank_R, cross.at_NP
        choices = triton_plan.SpreadChoices.apply(ids_NK, weights_NK, *way, n_local)
    else:
        choices = spread_choices_ref(ids_NK, weights_NK, cross, n_local)
    return _Spread.apply(tokens_ND, cross), *choices


def collect(rows_RD: Tensor, cross: Crossing) -> Tensor:
    """Each token's sum over the ranks that computed for it, (R, D) → (N, D)."""
    return _Collect.apply(rows_RD, cross)
