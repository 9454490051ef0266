"""MXFP4, the 4-bit format in which GPT-OSS publishes its expert matrices, to and from plain floats.

32 consecutive numbers along the reduction dimension share a power of two; each is a sign and one
of 0, ½, 1, 1½, 2, 3, 4, 6:

    value = ±magnitude · 2^(scale - 127)

OCP Microscaling Formats (MX) Specification v1.0: elements e2m1 (5.3.3), scale e8m0 (5.4.1), and
conversion (6.3). Two elements a byte, the first in the low half.

On disk a matrix X of all experts is `X_blocks` (E, R, C/32, 16) and `X_scales` (E, R, C/32), uint8,
with R outputs and C inputs, where the BF16 files have X as (E, C, R): transposed, which the square
down projection of GPT-OSS does not show.
"""

import torch
from torch import Tensor

from common.tensorfile import Rows, natural
from kernels.dispatch import up

BLOCK = 32  # numbers that share a scale
BIAS, NAN = 127, 255  # of scales
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by the low three bits; the fourth is a sign
PARTS = "_blocks", "_scales"

# What openai/gpt-oss-20b and -120b have in config.json; transformers' Mxfp4Config.
QUANTIZATION_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


# ---------------------------------------------------------------- arithmetic


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (..., C) as `dtype` from blocks (..., C/32, 16) and scales (..., C/32), uint8.

    Exact in bf16, fp32 and float64 where 6 · 2^(scale - 127) is in their range; a scale of 255 is
    NaN.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(256, dtype=torch.float64) - BIAS
    powers = torch.exp2(exponents).to(wide)  # from float64: 2^-127 is subnormal in fp32
    powers[NAN] = torch.nan
    values = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], dtype=wide, device=blocks.device)
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # (..., C/32, 32)
    numbers = values[nibbles.int()] * powers.to(blocks.device)[scales.int()].unsqueeze(-1)
    return numbers.flatten(-2).to(dtype)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks (..., C/32, 16) and scales (..., C/32), uint8, from floats (..., C).

    scale - 127 = floor(log2(largest magnitude of the block)) - 2, as e2m1's largest power of two
    is 4, clamped to ±127; elements are rounded to nearest, ties to even, and saturate at 6. A block
    that is not finite gets the scale NaN. What `dequantize` gave comes back as the same numbers.
    """
    blocked = up(values).contiguous().unflatten(-1, (-1, BLOCK))
    largest = blocked.abs().amax(-1)
    _, exponent = torch.frexp(largest)  # largest = m · 2^exponent with ½ ≤ m < 1
    exponent = torch.where(largest > 0, exponent - 3, -BIAS).clamp(-BIAS, BIAS)
    scaled = torch.ldexp(blocked.abs(), -exponent.unsqueeze(-1))
    code = torch.bucketize(scaled, _thresholds(scaled), right=True, out_int32=True)
    code = (code + 8 * blocked.signbit()).to(torch.uint8)
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    scales = torch.where(largest.isfinite(), exponent + BIAS, NAN).to(torch.uint8)
    return low | high << 4, scales


def _thresholds(like):
    """The least number that rounds to each magnitude but 0: midpoints, or just beyond.

    A tie goes to the even code, so a midpoint below an odd one rounds down.
    """
    m = torch.tensor(MAGNITUDES, dtype=like.dtype, device=like.device)
    middle = (m[1:] + m[:-1]) / 2
    odd = torch.arange(1, len(MAGNITUDES), device=like.device) % 2 == 1
    return torch.where(odd, middle.nextafter(m[1:]), middle)


# ---------------------------------------------------------------- files


class Unpacked:
    """A view of an `hf.Reader` in which `X_blocks` and `X_scales` are one bf16 tensor X (E, C, R).

    wanted: the X to look for; other tensors of the file are as the reader has them.

    Raises ValueError: one of the two is missing, X is there besides, shapes that do not belong
    together.
    """

    def __init__(self, reader, wanted: set[str]):
        self.path, self._reader, held = reader.path, reader, reader.names
        self._packed = {x for x in wanted if any(x + part in held for part in PARTS)}
        for x in sorted(self._packed, key=natural):
            if wrong := _flaw(reader, x):
                raise ValueError(f"{reader.path}: {wrong}")
        parts = {x + part for x in self._packed for part in PARTS}
        self.names: set[str] = (held - parts) | self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; of an MXFP4 one, that of the BF16 files."""
        if name not in self._packed:
            return self._reader.shape(name)
        E, R, groups, _ = self._reader.shape(name + PARTS[0])
        return E, groups * BLOCK, R

    def dtype(self, name: str) -> str:
        """The element type of what `read` returns, as safetensors spells it."""
        return "BF16" if name in self._packed else self._reader.dtype(name)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor, or only `rows` of its first dimension: nothing else is read or unpacked."""
        if name not in self._packed:
            return self._reader.read(name, rows)
        blocks, scales = (self._reader.read(name + part, rows) for part in PARTS)
        return dequantize(blocks, scales, torch.bfloat16).transpose(1, 2)


def _flaw(reader, x):
    """What is wrong with the tensors of the MXFP4 matrix `x` in a file, or None."""
    names = [x + part for part in PARTS]
    if missing := [name for name in names if name not in reader.names]:
        return f"{missing[0]} is missing (MXFP4 is {x} in blocks and scales)"
    if x in reader.names:
        return f"{x} and {names[0]} are both there: keep BF16 or MXFP4"
    for name in names:
        if reader.dtype(name) != "U8":
            return f"{name} is {reader.dtype(name)}, MXFP4 has U8"
    blocks, scales = map(reader.shape, names)
    if len(blocks) != 4 or blocks[-1] != BLOCK // 2 or blocks[:-1] != scales:
        return f"{names[0]} {blocks} and {names[1]} {scales}, not (E, R, G, 16) and (E, R, G)"
    return None


def packed(views: dict[str, Tensor | Rows]) -> dict[str, Tensor | Rows]:
    """The views with every `Rows` of matrices (C, R) quantised, by expert, into two on the CPU.

    They are new tensors, 17/32 of a byte for each number. Raises ValueError: C is no multiple of
    32.
    """
    out = {}
    for name, rows in views.items():
        if not isinstance(rows, Rows) or len(rows.shape) != 2:
            out[name] = rows
            continue
        C, R = rows.shape
        if C % BLOCK:
            raise ValueError(f"{name} ({C}, {R}): MXFP4 needs a multiple of {BLOCK} where {C} is")
        pairs = []
        for expert in rows.tensor.detach():  # (C, R), R perhaps in two
            pairs.append([t.cpu() for t in quantize(expert.movedim(0, -1).reshape(R, C))])
        for part, matrices in zip(PARTS, zip(*pairs), strict=True):
            tensor = torch.stack(matrices)
            out[name + part] = Rows(tensor, rows.first, tuple(tensor.shape[1:]))
    return out
