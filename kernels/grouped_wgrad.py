"""Weight gradients of the experts in Triton, of several micro-batches in one go.

    add_gradient        dW_e += Σ over e's slots of dyᵀ x
    add_bias_gradient   db_e += Σ over e's slots of dy [· w]

Sums are added in fp32 to what is there (an optimizer's flat gradient), so that reading and writing
it, 8 bytes an element, costs as much as the products of about 500 slots an expert. `merge`
therefore makes one list out of the slots of several micro-batches; the rows stay where they are.
The matrix of an expert without slots is not touched. No atomics, a fixed order of sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.grouped import grid, halves, launch


class WgradConfig(NamedTuple):
    """The same for a weight gradient's tile; `add`: load the sum first, last, or let the copy
    engine add ("first", "last", "engine")."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    resident: int = 0
    flatten: bool = False
    add: str = "last"


WGRAD = WgradConfig(128, 256, 64, 8, 5, resident=1)
ENGINE_ROWS = 1536  # slots an expert from which the copy engine adds faster (5-10 % on an H200)


def config_for(experts: int, slots: int) -> WgradConfig:
    """What was fastest; a function of sizes alone, so that bits are repeatable.

    Either way an element is added to once a launch: no order is left to chance.
    """
    return WGRAD._replace(add="engine") if slots >= ENGINE_ROWS * experts else WGRAD


class Rows(NamedTuple):
    """Rows that lie anywhere: row s begins at_S[s] elements after `base` (multiples of 8)."""

    base: Tensor
    at_S: Tensor
    width: int


class Merged(NamedTuple):
    """Several micro-batches' slots as one list, sorted by expert, then by micro-batch."""

    offsets_E: Tensor
    x: Rows
    dh: Rows
    dy: Rows
    a: Rows
    weights_S: Tensor


@triton.jit
def _distance(tensor, base):
    """From `base` to `tensor` in elements of 2 bytes."""
    return (tensor.to(tl.int64) - base.to(tl.int64)) // 2


@triton.jit
def _merge_kernel(
    experts_S, rows_S, order_S, weights_RK, end, shift_E, x, dh, dy, a, x_0, dh_0, dy_0, a_0,
    at_4T, weights_T, T, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = s < tl.load(end)  # the plan may have room for more slots
    to = s + tl.load(shift_E + tl.load(experts_S + s, mask=mask, other=0))
    row = tl.load(rows_S + s, mask=mask, other=0)
    wide = s.to(tl.int64)
    tl.store(at_4T + to, _distance(x, x_0) + row * D, mask=mask)
    tl.store(at_4T + T + to, _distance(dh, dh_0) + wide * (2 * F), mask=mask)
    tl.store(at_4T + 2 * T + to, _distance(dy, dy_0) + row * D, mask=mask)
    tl.store(at_4T + 3 * T + to, _distance(a, a_0) + wide * F, mask=mask)
    slot = tl.load(order_S + s, mask=mask, other=0)
    tl.store(weights_T + to, tl.load(weights_RK + slot, mask=mask, other=0.0), mask=mask)


def merge(parts) -> Merged:
    """One list of slots out of several micro-batches' (x, dh, dy, a, weights, plan).

    x, dy (R, D); dh (S, 2F); a (S, F), all bf16 and contiguous; nothing is copied, only 36 bytes
    a slot are written.
    """
    plans = [part[-1] for part in parts]
    ends_ME = torch.stack([plan.offsets_E for plan in plans])
    counts_ME = ends_ME.diff(dim=1, prepend=ends_ME.new_zeros(len(plans), 1))
    offsets_E = counts_ME.sum(0).cumsum(0)
    # Slot s of micro-batch m moves up by what earlier experts and micro-batches put before it.
    before_ME = counts_ME.cumsum(0) - ends_ME
    shift_ME = (before_ME + (offsets_E - counts_ME.sum(0))).to(torch.int32)
    total = sum(len(plan.rows_S) for plan in plans)
    at_4T = plans[0].order_S.new_empty(4, total + total % 2)  # each of the four aligned
    weights_T = parts[0][4].new_empty(total)
    first, D, F = parts[0], parts[0][0].shape[1], parts[0][3].shape[1]
    for (*tensors, weights, plan), shift_E in zip(parts, shift_ME):
        S = len(plan.rows_S)
        assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
        _merge_kernel[triton.cdiv(S, 256),](
            plan.experts_S, plan.rows_S, plan.order_S, weights, plan.offsets_E[-1:], shift_E,
            *tensors, *first[:4], at_4T, weights_T, at_4T.shape[1], D, F, 256,
        )  # fmt: skip
    rows = [Rows(*item) for item in zip(first[:4], at_4T, (D, 2 * F, D, F))]
    return Merged(offsets_E.to(torch.int32), *rows, weights_T)


@triton.jit
def _add(dw_OI, part, top, left, O: tl.constexpr, I: tl.constexpr):
    o, i = top + tl.arange(0, part.shape[0])[:, None], left + tl.arange(0, part.shape[1])[None, :]
    ptrs, mask = dw_OI + (o * I + i), (o < O) & (i < I)
    there = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    tl.store(ptrs, there + part, mask=mask, eviction_policy="evict_first")


@triton.jit
def _wgrad_kernel(
    dy_base, dy_at_S, x_base, x_at_S, dw_EOI, offsets_E, E, O: tl.constexpr, I: tl.constexpr,
    BO: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    HIGH: tl.constexpr = (O + BO - 1) // BO
    WIDE: tl.constexpr = (I + BI - 1) // BI
    for tile in tl.range(tl.program_id(0), E * (HIGH * WIDE), tl.num_programs(0), flatten=FLATTEN):
        e = tile // (HIGH * WIDE)
        inside = tile - e * (HIGH * WIDE)
        group = inside // (GROUP * WIDE)
        size = min(HIGH - group * GROUP, GROUP)
        inside -= group * (GROUP * WIDE)
        o0, i0 = (group * GROUP + inside % size) * BO, inside // size * BI
        start = tl.load(offsets_E + e - 1, mask=e > 0, other=0)
        end = tl.load(offsets_E + e)
        o, i = o0 + tl.arange(0, BO), i0 + tl.arange(0, BI)
        if ADD == "first":
            dw_ptrs = dw_EOI + e.to(tl.int64) * (O * I) + (o[:, None] * I + i[None, :])
            mask = (o < O)[:, None] & (i < I)[None, :] & (start < end)
            acc = tl.load(dw_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
        else:
            acc = tl.zeros((BO, BI), tl.float32)
        for s in range(start, end, BK):
            at = s + tl.arange(0, BK)
            here = (at < end)[:, None]
            dy_at = tl.multiple_of(tl.load(dy_at_S + at, mask=at < end, other=0), 8)
            x_at = tl.multiple_of(tl.load(x_at_S + at, mask=at < end, other=0), 8)
            dy_mask = here if O % BO == 0 else here & (o < O)[None, :]
            x_mask = here if I % BI == 0 else here & (i < I)[None, :]
            dy = tl.load(dy_base + dy_at[:, None] + o[None, :], mask=dy_mask, other=0.0)
            x = tl.load(x_base + x_at[:, None] + i[None, :], mask=x_mask, other=0.0)
            acc = tl.dot(dy.T, x, acc)
        if ADD == "engine":
            if start < end:
                left, right = halves(acc)
                dw_EOI.atomic_add([e, o0, i0], left.reshape(1, BO, BI // 2))
                dw_EOI.atomic_add([e, o0, i0 + BI // 2], right.reshape(1, BO, BI // 2))
        elif ADD == "first":
            tl.store(dw_ptrs, acc, mask=mask, eviction_policy="evict_first")
        elif start < end:
            left, right = halves(acc)
            _add(dw_EOI + e.to(tl.int64) * (O * I), left, o0, i0, O, I)
            _add(dw_EOI + e.to(tl.int64) * (O * I), right, o0, i0 + BI // 2, O, I)


def add_gradient(dw_EOI, dy: Rows, x: Rows, offsets_E: Tensor, config: WgradConfig | None = None):
    """dw_e += Σ over e's slots of dyᵀ x, in fp32; the matrix of an empty group is not touched."""
    E, O, I = dw_EOI.shape
    config = config or config_for(E, len(x.at_S))
    assert dw_EOI.is_contiguous() and dw_EOI.dtype == torch.float32
    tiles = E * triton.cdiv(O, config.rows) * triton.cdiv(I, config.columns)
    block = [1, config.rows, config.columns // 2]
    engine = config.add == "engine"
    dw = TensorDescriptor(dw_EOI, [E, O, I], [O * I, I, 1], block) if engine else dw_EOI
    _wgrad_kernel[grid(dw_EOI.device, tiles, config.resident)](
        dy.base, dy.at_S, x.base, x.at_S, dw, offsets_E, E, O, I, config.rows, config.columns,
        config.depth, config.group, config.add, config.flatten, **launch(config),
    )  # fmt: skip


@triton.jit
def _bias_kernel(base, at_S, weights_S, db_EO, offsets_E, O: tl.constexpr, WEIGHTED: tl.constexpr,
                 BO: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    e, o = tl.program_id(0), tl.program_id(1) * BO + tl.arange(0, BO)
    start = tl.load(offsets_E + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets_E + e)
    acc = tl.zeros((BS, BO), tl.float32)
    for s in range(start, end, BS):
        at = s + tl.arange(0, BS)
        row = tl.multiple_of(tl.load(at_S + at, mask=at < end, other=0), 8)
        mask = (at < end)[:, None] & (o < O)[None, :]
        dy = tl.load(base + row[:, None] + o[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            dy *= tl.load(weights_S + at, mask=at < end, other=0.0)[:, None]
        acc += dy
    db_ptrs, mask = db_EO + e * O + o, (o < O) & (start < end)
    tl.store(db_ptrs, tl.load(db_ptrs, mask=mask) + tl.sum(acc, 0), mask=mask)


def add_bias_gradient(db_EO, dy: Rows, weights_S: Tensor | None, offsets_E: Tensor):
    """db_e += Σ over e's slots of dy, each times its weight if given; fp32."""
    E, O = db_EO.shape
    assert db_EO.is_contiguous() and db_EO.dtype == torch.float32
    _bias_kernel[E, triton.cdiv(O, 128)](
        dy.base, dy.at_S, weights_S, db_EO, offsets_E, O, weights_S is not None, 128, 32
    )
