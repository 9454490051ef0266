"""Grouped products of the experts in Triton: bf16 operands, fp32 sums, Hopper and Blackwell.

Slots are sorted by expert; expert e owns the slots from offsets[e - 1] to offsets[e].

    up              h_s = gate_up_e · x_row(s) + b_e        a_s = w_s · act(h_s)
    product         y_s = W_e · a_s [+ w_s · c_e]           or a_s · W_e, in the backward
    down_backward   g_s = dout_row(s) · down_e              dh_s = act'(h_s) ⊙ w_s g_s,  dw_s, a_s
    sum_slots       out_r = Σ over k of y at r's k-th slot

Rows are gathered where they are read. A tile is up to `block` slots of one expert; a table that
the device builds says which, so the host never waits for the sizes of the groups. Sums run in a
fixed order: no atomics, the same inputs give the same bits. Weights come through tensor
descriptors (16-byte rows: D and F must be multiples of 8), gathered rows through cp.async.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Config(NamedTuple):
    """How a kernel is cut: a tile's columns, the slice of the sum in a step, warps, slices in
    flight, row tiles that go over the columns together, programs a multiprocessor that go from
    tile to tile (0: each computes one), and whether their loops are merged into one."""

    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    resident: int = 0
    flatten: bool = False


class Cut(NamedTuple):
    """The slots of a tile, those of an expert's last one if they suffice, and each kernel's cut."""

    block: int = 128
    least: int = 64
    up: Config = Config(128, 64, 8, 4)
    down: Config = Config(256, 64, 8, 4)
    down_backward: Config = Config(256, 64, 8, 3)
    up_backward: Config = Config(256, 64, 8, 4)


def cut_for(experts: int, slots: int, hidden: int, width: int) -> Cut:
    """What was fastest at such shapes; a function of them alone, so that bits are repeatable."""
    return Cut()


# ------------------------------------------------------------------------------------------------
# Tiles
# ------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Row tiles of a plan: table (T, 2) int32 (expert, first slot), T the most there can be;
    count (1,): how many there are; offsets_E of the plan; block: slots of a tile; least: of one
    that has no more than these, the last of an expert, so that less of it is computed in vain."""

    table_T2: Tensor
    count: Tensor
    offsets_E: Tensor
    block: int
    least: int


@triton.jit
def _tiles_kernel(offsets_E, table_T2, count, E: tl.constexpr, EXPERTS: tl.constexpr,
                  BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    e = tl.arange(0, EXPERTS)
    end = tl.load(offsets_E + e, mask=e < E, other=0)
    begin = tl.load(offsets_E + e - 1, mask=(e > 0) & (e < E), other=0)
    number = tl.where(e < E, (end - begin + BLOCK - 1) // BLOCK, 0)
    after = tl.cumsum(number, 0)
    expert = tl.sum(((after[None, :] <= t[:, None]) & (e < E)[None, :]).to(tl.int32), 1)
    first = begin[None, :] + (t[:, None] - (after - number)[None, :]) * BLOCK
    first = tl.sum(tl.where(e[None, :] == expert[:, None], first, 0), 1)
    total = tl.sum(number, 0)
    tl.store(table_T2 + 2 * t, expert, mask=t < total)
    tl.store(table_T2 + 2 * t + 1, first, mask=t < total)
    tl.store(count, total)


def tiles_of(offsets_E: Tensor, slots: int, block: int, least: int | None = None) -> Tiles:
    """Cut each expert's slots into tiles, on the device; `least` is `block` if not given."""
    E = len(offsets_E)
    most = triton.cdiv(slots, block) + E
    table = offsets_E.new_empty(most, 2)
    count = offsets_E.new_empty(1)
    _tiles_kernel[triton.cdiv(most, 64),](
        offsets_E, table, count, E, triton.next_power_of_2(E), block, 64
    )
    return Tiles(table, count, offsets_E, block, least or block)


@triton.jit
def _place(tile, count, table_T2, offsets_E, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first slot, last slot + 1, column block): GROUP row tiles share a pass over W."""
    group = tile // (GROUP * COLUMNS)
    size = min(count - group * GROUP, GROUP)
    inside = tile - group * (GROUP * COLUMNS)
    t = group * GROUP + inside % size
    e = tl.load(table_T2 + 2 * t)
    return e, tl.load(table_T2 + 2 * t + 1), tl.load(offsets_E + e), inside // size


def grid(device: torch.device, tiles: int, resident: int) -> tuple[int]:
    if not resident or INTERPRETED:
        return (tiles,)
    return (min(tiles, resident * torch.cuda.get_device_properties(device).multi_processor_count),)


def launch(config) -> dict[str, int]:
    return dict(num_warps=config.warps, num_stages=config.stages)


def _weights(w: Tensor, config: Config, out_first: bool = True) -> TensorDescriptor:
    """Blocks of one expert's matrix, (outputs, inputs) or (inputs, outputs)."""
    block = (config.columns, config.depth)[:: 1 if out_first else -1]
    return TensorDescriptor(w, list(w.shape), list(w.stride()), [1, *block])


# ------------------------------------------------------------------------------------------------
# Forward
# ------------------------------------------------------------------------------------------------


@triton.jit
def _activate(gate, value, alpha, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        value = tl.minimum(tl.maximum(value, -limit), limit) + 1
    return gate * tl.sigmoid(alpha * gate) * value


@triton.jit
def _up_tile(
    x_RD, rows_S, order_S, weights_RK, gate_up, bias_E2F, h_S2F, a_SF, e, first, end, column,
    alpha, limit, CLAMPED: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, BM)
    row = tl.load(rows_S + tl.minimum(at, end - 1))  # beyond the end: read, never stored
    k = tl.arange(0, BK)
    x_ptrs = x_RD + row[:, None] * D + k[None, :]
    gate = tl.zeros((BM, BN), tl.float32)
    value = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, D, BK):
        if D % BK == 0:
            x = tl.load(x_ptrs + k0)
        else:
            x = tl.load(x_ptrs + k0, mask=(k0 + k < D)[None, :], other=0.0)
        w = gate_up.load([e, column * BN, k0]).reshape(BN, BK)
        gate = tl.dot(x, w.T, gate)
        w = gate_up.load([e, F + column * BN, k0]).reshape(BN, BK)
        value = tl.dot(x, w.T, value)
    n = column * BN + tl.arange(0, BN)
    if BIASED:
        bias = bias_E2F + e * (2 * F) + n
        gate += tl.load(bias, mask=n < F, other=0.0).to(tl.float32)[None, :]
        value += tl.load(bias + F, mask=n < F, other=0.0).to(tl.float32)[None, :]
    gate, value = gate.to(h_S2F.dtype.element_ty), value.to(h_S2F.dtype.element_ty)
    mask = (at < end)[:, None] & (n < F)[None, :]
    here = tl.arange(0, BM)[:, None]
    h_ptrs = h_S2F + first.to(tl.int64) * (2 * F) + (here * (2 * F) + n[None, :])
    tl.store(h_ptrs, gate, mask=mask)
    tl.store(h_ptrs + F, value, mask=mask)
    weight = tl.load(weights_RK + tl.load(order_S + at, mask=at < end, other=0))
    a = _activate(gate.to(tl.float32), value.to(tl.float32), alpha, limit, CLAMPED)
    a_ptrs = a_SF + first.to(tl.int64) * F + (here * F + n[None, :])
    tl.store(a_ptrs, (a * weight[:, None]).to(a_SF.dtype.element_ty), mask=mask)


@triton.jit
def _up_kernel(
    x_RD, rows_S, order_S, weights_RK, gate_up, bias_E2F, h_S2F, a_SF, table_T2, count, offsets_E,
    alpha, limit, CLAMPED: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (F + BN - 1) // BN
    n_tiles = tl.load(count)
    for tile in tl.range(tl.program_id(0), n_tiles * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        e, first, end, column = _place(tile, n_tiles, table_T2, offsets_E, COLUMNS, GROUP)
        if LEAST == BM or end - first > LEAST:
            _up_tile(x_RD, rows_S, order_S, weights_RK, gate_up, bias_E2F, h_S2F, a_SF, e, first,
                     end, column, alpha, limit, CLAMPED, BIASED, D, F, BM, BN, BK)  # fmt: skip
        else:
            _up_tile(x_RD, rows_S, order_S, weights_RK, gate_up, bias_E2F, h_S2F, a_SF, e, first,
                     end, column, alpha, limit, CLAMPED, BIASED, D, F, LEAST, BN, BK)  # fmt: skip


def up(x_RD, weights_RK, gate_up, bias_E2F, plan, tiles, activation, config):
    """Pre-activation (S, 2F) and weighted activation (S, F). activation: None or (alpha, limit)."""
    E, width, D = gate_up.shape
    F, S = width // 2, len(plan.rows_S)
    h_S2F, a_SF = x_RD.new_empty(S, width), x_RD.new_empty(S, F)
    alpha, limit = activation or (1.0, 0.0)
    n_tiles = len(tiles.table_T2) * triton.cdiv(F, config.columns)
    _up_kernel[grid(x_RD.device, n_tiles, config.resident)](
        x_RD, plan.rows_S, plan.order_S, weights_RK, _weights(gate_up, config),
        bias_E2F, h_S2F, a_SF, tiles.table_T2, tiles.count, tiles.offsets_E, alpha, limit,
        activation is not None, bias_E2F is not None, D, F, tiles.block, config.columns,
        config.depth, config.group, config.flatten, tiles.least, **launch(config),
    )  # fmt: skip
    return h_S2F, a_SF


@triton.jit
def _product_tile(
    a_SI, w, y_SO, order_S, weights_RK, bias_EO, e, first, end, column, OUT_FIRST: tl.constexpr,
    BIASED: tl.constexpr, I: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, I, BK):
        a = a_SI.load([first, k0])  # rows beyond the end: another expert's, never stored
        if OUT_FIRST:
            acc = tl.dot(a, w.load([e, column * BN, k0]).reshape(BN, BK).T, acc)
        else:
            acc = tl.dot(a, w.load([e, k0, column * BN]).reshape(BK, BN), acc)
    at, n = first + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    if BIASED:
        weight = tl.load(weights_RK + tl.load(order_S + at, mask=at < end, other=0))
        bias = tl.load(bias_EO + e * O + n, mask=n < O, other=0.0).to(tl.float32)
        acc += weight[:, None] * bias[None, :]
    y_ptrs = y_SO + first.to(tl.int64) * O + (tl.arange(0, BM)[:, None] * O + n[None, :])
    mask = (at < end)[:, None] & (n < O)[None, :]
    tl.store(y_ptrs, acc.to(y_SO.dtype.element_ty), mask=mask)


@triton.jit
def _product_kernel(
    a_SI, a_few_SI, w, y_SO, order_S, weights_RK, bias_EO, table_T2, count, offsets_E,
    OUT_FIRST: tl.constexpr, BIASED: tl.constexpr, I: tl.constexpr, O: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (O + BN - 1) // BN
    n_tiles = tl.load(count)
    for tile in tl.range(tl.program_id(0), n_tiles * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        e, first, end, column = _place(tile, n_tiles, table_T2, offsets_E, COLUMNS, GROUP)
        if LEAST == BM or end - first > LEAST:
            _product_tile(a_SI, w, y_SO, order_S, weights_RK, bias_EO, e, first, end, column,
                          OUT_FIRST, BIASED, I, O, BM, BN, BK)  # fmt: skip
        else:
            _product_tile(a_few_SI, w, y_SO, order_S, weights_RK, bias_EO, e, first, end, column,
                          OUT_FIRST, BIASED, I, O, LEAST, BN, BK)  # fmt: skip


def product(a_SI, w, plan, tiles, config, *, out_first, weights_RK=None, bias_EO=None):
    """(S, O) of each group: w (E, O, I) if `out_first`, else (E, I, O); bias (E, O) is weighted."""
    O, S = w.shape[1 if out_first else 2], len(a_SI)
    I, y_SO = a_SI.shape[1], a_SI.new_empty(S, O)
    a, a_few = (TensorDescriptor(a_SI, [S, I], [I, 1], [block, config.depth])
                for block in (tiles.block, tiles.least))  # fmt: skip
    n_tiles = len(tiles.table_T2) * triton.cdiv(O, config.columns)
    _product_kernel[grid(a_SI.device, n_tiles, config.resident)](
        a, a_few, _weights(w, config, out_first), y_SO, plan.order_S, weights_RK, bias_EO,
        tiles.table_T2, tiles.count, tiles.offsets_E, out_first, bias_EO is not None, I, O,
        tiles.block, config.columns, config.depth, config.group, config.flatten, tiles.least,
        **launch(config),
    )  # fmt: skip
    return y_SO


@triton.jit
def _sum_kernel(y_SD, positions_RK, valid_RK, out_RD, D: tl.constexpr, K: tl.constexpr,
                ALL_VALID: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    r, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(K):
        s = tl.load(positions_RK + r * K + k)
        here = d < D if ALL_VALID else (d < D) & (tl.load(valid_RK + r * K + k) != 0)
        acc += tl.load(y_SD + s * D + d, mask=here, other=0.0).to(tl.float32)
    tl.store(out_RD + r * D + d, acc.to(out_RD.dtype.element_ty), mask=d < D)


def sum_slots(y_SD, plan, block=1024, warps=4):
    """Each row's sum over its slots here, k in order: (S, D) → (R, D)."""
    (R, K), D = plan.positions_RK.shape, y_SD.shape[1]
    out_RD = y_SD.new_empty(R, D)
    _sum_kernel[R, triton.cdiv(D, block)](
        y_SD, plan.positions_RK, plan.valid_RK, out_RD, D, K, plan.valid_RK is None, block,
        num_warps=warps,
    )  # fmt: skip
    return out_RD


# ------------------------------------------------------------------------------------------------
# Backward
# ------------------------------------------------------------------------------------------------


@triton.jit
def _through_activation(
    da, left, h_SF, dh_SF, a_SF, weight, rows, alpha, limit, CLAMPED: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """Columns from `left` on of a tile whose first slot the pointers are at; returns Σ da · a."""
    at, n = tl.arange(0, da.shape[0])[:, None], (left + tl.arange(0, da.shape[1]))[None, :]
    mask = (at < rows) & (n < F)
    gate = tl.load(h_SF + (at * (2 * F) + n), mask=mask, other=0.0).to(tl.float32)
    value = tl.load(h_SF + (at * (2 * F) + n + F), mask=mask, other=0.0).to(tl.float32)
    g, v = gate, value
    if CLAMPED:
        g = tl.minimum(gate, limit)
        v = tl.minimum(tl.maximum(value, -limit), limit) + 1
    sigmoid = tl.sigmoid(alpha * g)
    a = g * sigmoid * v
    kind = a_SF.dtype.element_ty
    tl.store(a_SF + (at * F + n), (a * weight[:, None]).to(kind), mask=mask)
    dweight = tl.sum(da * a, 1)
    da *= weight[:, None]
    dgate = da * v * sigmoid * (1 + alpha * g * (1 - sigmoid))
    dvalue = da * g * sigmoid
    if CLAMPED:
        dgate = tl.where(gate <= limit, dgate, 0.0)
        dvalue = tl.where(tl.abs(value) <= limit, dvalue, 0.0)
    tl.store(dh_SF + (at * (2 * F) + n), dgate.to(kind), mask=mask)
    tl.store(dh_SF + (at * (2 * F) + n + F), dvalue.to(kind), mask=mask)
    return dweight


@triton.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _through_halves(da, left, args, CLAMPED: tl.constexpr, F: tl.constexpr):
    """The same in two parts, for the sake of registers."""
    h_SF, dh_SF, a_SF, weight, rows, alpha, limit = args
    one, two = halves(da)
    middle = left + da.shape[1] // 2
    dw = _through_activation(one, left, h_SF, dh_SF, a_SF, weight, rows, alpha, limit, CLAMPED, F)
    return dw + _through_activation(
        two, middle, h_SF, dh_SF, a_SF, weight, rows, alpha, limit, CLAMPED, F
    )


@triton.jit
def _down_backward_tile(
    dout_RD, rows_S, order_S, weights_RK, down, h_S2F, dh_S2F, a_SF, dw_SC, e, first, end, column,
    alpha, limit, CLAMPED: tl.constexpr, D: tl.constexpr, F: tl.constexpr, COLUMNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, BM)
    row = tl.load(rows_S + tl.minimum(at, end - 1))
    k = tl.arange(0, BK)
    dy_ptrs = dout_RD + row[:, None] * D + k[None, :]
    da = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, D, BK):
        if D % BK == 0:
            dy = tl.load(dy_ptrs + k0)
        else:
            dy = tl.load(dy_ptrs + k0, mask=(k0 + k < D)[None, :], other=0.0)
        da = tl.dot(dy, down.load([e, k0, column * BN]).reshape(BK, BN), da)
    weight = tl.load(weights_RK + tl.load(order_S + at, mask=at < end, other=0))
    start, rows = first.to(tl.int64), end - first
    h_SF, dh_SF, tile_SF = h_S2F + start * (2 * F), dh_S2F + start * (2 * F), a_SF + start * F
    args = (h_SF, dh_SF, tile_SF, weight, rows, alpha, limit)
    if BN > 128:
        left, right = halves(da)
        dweight = _through_halves(left, column * BN, args, CLAMPED, F)
        dweight += _through_halves(right, column * BN + BN // 2, args, CLAMPED, F)
    else:
        dweight = _through_halves(da, column * BN, args, CLAMPED, F)
    tl.store(dw_SC + at * COLUMNS + column, dweight, mask=at < end)


@triton.jit
def _down_backward_kernel(
    dout_RD, rows_S, order_S, weights_RK, down, h_S2F, dh_S2F, a_SF, dw_SC, table_T2, count,
    offsets_E, alpha, limit, CLAMPED: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (F + BN - 1) // BN
    n_tiles = tl.load(count)
    for tile in tl.range(tl.program_id(0), n_tiles * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        e, first, end, column = _place(tile, n_tiles, table_T2, offsets_E, COLUMNS, GROUP)
        if LEAST == BM or end - first > LEAST:
            _down_backward_tile(
                dout_RD, rows_S, order_S, weights_RK, down, h_S2F, dh_S2F, a_SF, dw_SC, e, first,
                end, column, alpha, limit, CLAMPED, D, F, COLUMNS, BM, BN, BK)  # fmt: skip
        else:
            _down_backward_tile(
                dout_RD, rows_S, order_S, weights_RK, down, h_S2F, dh_S2F, a_SF, dw_SC, e, first,
                end, column, alpha, limit, CLAMPED, D, F, COLUMNS, LEAST, BN, BK)  # fmt: skip


def down_backward(dout_RD, weights_RK, down, h_S2F, plan, tiles, activation, config, place=None):
    """dh (S, 2F), the weighted activation (S, F) again, routing weights' gradients (S,) fp32.

    `place`: where to write the first two."""
    E, D, F = down.shape
    S, columns = len(plan.rows_S), triton.cdiv(F, config.columns)
    dh_S2F, a_SF = place or (h_S2F.new_empty(S, 2 * F), h_S2F.new_empty(S, F))
    # Filled: a launch gives autograd's thread the context that a descriptor needs.
    dw_SC = h_S2F.new_zeros(S, columns, dtype=torch.float32)
    alpha, limit = activation or (1.0, 0.0)
    _down_backward_kernel[grid(down.device, len(tiles.table_T2) * columns, config.resident)](
        dout_RD, plan.rows_S, plan.order_S, weights_RK, _weights(down, config, False),
        h_S2F, dh_S2F, a_SF, dw_SC, tiles.table_T2, tiles.count, tiles.offsets_E, alpha, limit,
        activation is not None, D, F, tiles.block, config.columns, config.depth, config.group,
        config.flatten, tiles.least, **launch(config),
    )  # fmt: skip
    return dh_S2F, a_SF, dw_SC.sum(1)
