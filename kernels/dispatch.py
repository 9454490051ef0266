"""Dispatch planning: from the experts each token chose to the order in which they compute.

Slots are a row's routed copies, S = R·K of them in row-major order of the choices. Sorted by
expert, ties in row order, they form one group of rows an expert for the grouped GEMMs. The plan
holds that sort and its inverse, so that gathering (rows → sorted slots) and the local sum (sorted
slots → rows) both read, in a fixed order and with no atomics: the same choices give the same bits.

With ep = 1 all sizes are known on the host: nothing synchronises.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """How R rows meet E experts (integers on the rows' device).

    weights_S: routing weight of each slot (the only one that carries a gradient); order_S: slot
    at each sorted position; rows_S: its row; experts_S: its expert; positions_RK: sorted position
    of each of a row's slots; offsets_E: end of each expert's group among the sorted slots.
    """

    weights_S: Tensor
    order_S: Tensor
    rows_S: Tensor
    experts_S: Tensor
    positions_RK: Tensor
    offsets_E: Tensor

    def load(self) -> Tensor:
        """Slots an expert received, (E,) int32."""
        return self.offsets_E.diff(prepend=self.offsets_E.new_zeros(1))


def dispatch_plan(
    topk_ids_NK: Tensor, topk_weights_NK: Tensor, n_experts: int, ep: int = 1
) -> Plan:
    """Sort the N·K chosen slots by expert; an expert nobody chose has an empty group.

    topk_ids_NK (N, K) integers; topk_weights_NK (N, K). Raises ValueError unless ep = 1: with
    more expert ranks the plan needs the exchange of counts.
    """
    if ep != 1:
        raise ValueError(f"dispatch_plan: ep {ep} is not supported, only 1")
    N, K = topk_ids_NK.shape
    device = topk_ids_NK.device
    experts_S, order_S = topk_ids_NK.flatten().to(torch.int32).sort(stable=True)
    experts = torch.arange(n_experts, dtype=torch.int32, device=device)
    offsets_E = torch.searchsorted(experts_S, experts, right=True, out_int32=True)
    positions_S = torch.empty_like(order_S)
    positions_S[order_S] = torch.arange(N * K, device=device)
    positions_NK = positions_S.view(N, K)
    return Plan(
        topk_weights_NK.flatten(), order_S, order_S // K, experts_S, positions_NK, offsets_E
    )
