"""Write safetensors files: a rank its own, or several ranks one file together.

Published GPT-OSS files have one tensor for all experts of a layer, and the experts are spread over
ranks. So that no rank gathers them, such a tensor is given as `Rows`; who holds what is compared
once, `create` makes the file at its full length, and every rank writes its rows where they belong.

Format: github.com/huggingface/safetensors, README. Files are written here rather than by
`safetensors.torch.save_file`, which wants all tensors of a file contiguous in host memory at once,
reports a full disk as something other than OSError, and writes no part of a file.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Rows(NamedTuple):
    """Consecutive rows (experts) of a tensor on disk whose other rows other ranks may hold.

    `tensor` (n, ...) of any strides is rows `first` to `first + n`. `shape` is one row's on disk:
    `tensor.shape[1:]`, or coarser: interleaved columns on disk (D, 2F) are a view (D, F, 2) here.
    """

    tensor: Tensor
    first: int
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """What other ranks must know of `Rows`: `count` of them from `first`, a row's shape, dtype."""

    first: int
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Shared:
    """A tensor that several ranks write: its name, whole shape and dtype; the writer of a piece."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    writers: dict[int, int]  # first row -> rank

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return math.prod(self.shape) * self.dtype.itemsize


# ---------------------------------------------------------------- one rank


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write one safetensors file and fsync it; floats as `dtype` (None: all as they are).

    Tensors may have any strides and device. The same input gives the same bytes. Raises OSError.
    """
    entries = [(name, file_dtype(t, dtype), tuple(t.shape)) for name, t in tensors.items()]
    text, starts, _ = _layout(entries)
    with writing(path) as f:
        f.write(text)
        for name in starts:
            f.write(_bytes(tensors[name], dtype))


def _layout(entries: Iterable[tuple]) -> tuple[bytes, dict[str, int], int]:
    """A file's beginning, where each (name, dtype, shape) starts, in order, and its length."""
    # Wide elements first, as the format's own writer does: every tensor is then aligned.
    order = sorted(entries, key=lambda entry: (-entry[1].itemsize, natural(entry[0])))
    header, starts, end = {"__metadata__": {"format": "pt"}}, {}, 0  # from_pretrained wants "pt"
    for name, kind, shape in order:
        starts[name], end = end, end + math.prod(shape) * kind.itemsize
        entry = {"dtype": SAFETENSORS_NAMES[kind], "shape": list(shape)}
        header[name] = entry | {"data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + start for name, start in starts.items()}
    return len(text).to_bytes(8, "little") + text, starts, begin + end


def _bytes(tensor, dtype):
    """A tensor's elements in row-major order, as what a file takes."""
    flat = tensor.detach().to(file_dtype(tensor, dtype)).reshape(-1).cpu()
    return flat.view(torch.uint8).numpy()


def file_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is written as when floats are written as `dtype` (None: as they are)."""
    return dtype if dtype and tensor.is_floating_point() else tensor.dtype


@contextmanager
def writing(path: str | Path, existing: bool = False) -> Iterator[BinaryIO]:
    """A new file to write bytes to, or one that exists as it is; on the disk when the block ends.

    Raises OSError that names the file. A new one is then gone: on a full disk, there is room again.
    """
    try:
        # Not opened for reading: a network client would then read pages and write them back whole,
        # over what another rank has meanwhile written beside its own bytes.
        with open(os.open(path, os.O_WRONLY) if existing else path, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        with suppress(OSError):
            if not existing:
                os.unlink(path)
        if e.strerror and not isinstance(e.filename, str):  # a failed write does not say of which
            e.filename = str(path)
        raise


def natural(name: str) -> list:
    """A sort key under which layer 10 comes after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


# ---------------------------------------------------------------- several ranks, one file


def piece(rows: Rows, dtype: torch.dtype) -> Piece:
    """What to tell the other ranks of `rows`, floats of which are written as `dtype`."""
    assert math.prod(rows.shape) == math.prod(rows.tensor.shape[1:]), rows.shape
    return Piece(rows.first, len(rows.tensor), tuple(rows.shape), file_dtype(rows.tensor, dtype))


def plan_shared(holders: list[dict[str, object]], limit: int) -> list[list[Shared]]:
    """Deal tensors whose rows are spread over ranks to files of at most `limit` bytes (or one).

    holders: by rank, name -> Piece (other values are passed over). Each piece is written by that
    of its holders with the fewest bytes so far; all pieces of a name make up the whole tensor.
    """
    held_by = {}  # name -> piece -> ranks
    for rank, held in enumerate(holders):
        for name, p in held.items():
            if isinstance(p, Piece):
                held_by.setdefault(name, {}).setdefault(p, []).append(rank)
    load, files, room = [0] * len(holders), [], -1
    for name in sorted(held_by, key=natural):
        end, writers = 0, {}
        for p in sorted(held_by[name], key=lambda p: p.first):
            assert p.first == end, f"{name}: rows from {end} are nobody's or not one rank's alone"
            end = p.first + p.count
            writers[p.first] = min(held_by[name][p], key=load.__getitem__)
            load[writers[p.first]] += p.count * math.prod(p.shape) * p.dtype.itemsize
        tensor = Shared(name, (end, *p.shape), p.dtype, writers)
        if room < tensor.nbytes:
            files.append([])
            room = limit
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


def create(path: str | Path, tensors: list[Shared]) -> None:
    """Make a file with its header and full length, for `write_rows`. Raises OSError.

    Its length is set before anybody writes: two network clients that both lengthen it would each
    fill what lies before their own bytes, in the page they share, with zeros.
    """
    text, _, length = _layout((t.name, t.dtype, t.shape) for t in tensors)
    with writing(path) as f:
        f.write(text)
        f.truncate(length)


def write_rows(
    path: str | Path, tensors: list[Shared], views: dict[str, Rows], dtype: torch.dtype, rank: int
) -> None:
    """Write the pieces that `rank` has been dealt into the file that `create` made, and fsync it.

    views: at least those `Rows`; floats are written as `dtype`. Raises OSError.
    """
    mine = [t for t in tensors if rank in t.writers.values()]
    if not mine:
        return
    _, starts, _ = _layout((t.name, t.dtype, t.shape) for t in tensors)
    with writing(path, existing=True) as f:
        for t in mine:
            rows = views[t.name]
            assert t.writers[rows.first] == rank, (t.name, rows.first, t.writers)
            f.seek(starts[t.name] + rows.first * (t.nbytes // t.shape[0]))
            f.write(_bytes(rows.tensor, dtype))
