"""Text files as documents, in order, in batches that can be read again from any of their ends.

    *.txt                               the whole file is one document
    *.jsonl, *.jsonl.gz, *.jsonl.zst    an object a line; the text under a field is a document

A directory stands for all files of these kinds below it, sorted by path. Text is UTF-8, taken as
it is (no byte order mark is removed, no line end changed); blank lines of a .jsonl do not count.
Damage inside a .zst is noticed if that has checksums (the zstd command writes them), or does not
decode.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")
BATCH = 2**18  # bytes of text; a batch is whole lines, at least one, as many as stay below it


@dataclass(frozen=True)
class Place:
    """A position in the input; of a compressed file, in its decompressed text."""

    file: int = 0  # number among the input files
    offset: int = 0  # bytes
    line: int = 1


@dataclass(frozen=True)
class Batch:
    """Whole lines of a .jsonl, or a .txt as one. `done`: bytes of the file on disk used up."""

    path: Path
    start: Place
    end: Place
    lines: list[bytes]
    done: int


def find_files(inputs: Iterable[Path]) -> list[Path]:
    """The files behind --input, in order. Raises ValueError naming what is missing or unfit."""
    files = []
    for path in inputs:
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(KINDS))
            if not found:
                raise ValueError(f"--input {path}: no {', '.join(KINDS)} below it")
        elif not path.is_file():
            raise ValueError(f"--input {path}: no such file or directory")
        files += found
    if not files:
        raise ValueError("--input: name at least one file or directory")
    seen = set()
    for path in files:
        if not path.name.endswith(KINDS):
            raise ValueError(f"--input {path}: unknown kind of file; {', '.join(KINDS)} are known")
        if path.stat().st_size == 0:
            raise ValueError(f"--input {path}: the file is empty")
        if path.resolve() in seen:
            raise ValueError(f"--input {path}: given twice")
        seen.add(path.resolve())
    return files


class ZstdReader(io.RawIOBase):
    """The text of a .zst file, of any number of frames. Raises EOFError if the last is cut off."""

    def __init__(self, raw: io.BufferedIOBase):
        self.raw, self.text = raw, memoryview(b"")
        # The default refuses windows above 128 MiB, as `zstd --long` makes them.
        self.frames = zstandard.ZstdDecompressor(max_window_size=2**31)
        self.frame = None  # the one being read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.text:
            data = self.raw.read(2**16)
            if not data:
                if self.frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self.text = memoryview(self._decompress(data))
        count = min(len(buffer), len(self.text))
        buffer[:count], self.text = self.text[:count], self.text[count:]
        return count

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            self.frame = self.frame or self.frames.decompressobj()
            try:
                parts.append(self.frame.decompress(data))
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            if not self.frame.eof:
                break
            data, self.frame = self.frame.unused_data, None
        return b"".join(parts)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, io.BufferedIOBase]]:
    """(the text as bytes, the file on disk). What is raised inside names the file."""
    with open(path, "rb") as disk:
        text = disk
        if path.suffix == ".gz":
            text = gzip.GzipFile(fileobj=disk)
        elif path.suffix == ".zst":
            text = io.BufferedReader(ZstdReader(disk))
        try:
            yield text, disk
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: damaged, cut off or unreadable ({error})") from None


def read_batches(files: list[Path], at: Place) -> Iterator[Batch]:
    """The input from `at` on. Where batches end depends on where they begin, on nothing else.

    Raises ValueError naming the file for one that cannot be read to its end.
    """
    for k in range(at.file, len(files)):
        at = at if k == at.file else Place(k)
        with _opened(files[k]) as (text, disk):
            left = at.offset
            while left and (skipped := len(text.read(min(left, 2**20)))):
                left -= skipped
            while lines := _read_lines(text, files[k]):
                size = sum(map(len, lines))
                end = Place(k, at.offset + size, at.line + len(lines))
                yield Batch(files[k], at, end, lines, disk.tell())
                at = end


def _read_lines(text: io.BufferedIOBase, path: Path) -> list[bytes]:
    if path.suffix != ".txt":
        return text.readlines(BATCH)
    whole = text.read()
    return [whole] if whole else []


def read_texts(batch: Batch, field: str) -> Iterator[str]:
    """The documents of a batch; of a .jsonl what its objects have under `field`.

    Raises ValueError naming the file and the byte that is no UTF-8, or the line that is no object
    with text there.
    """
    offset = batch.start.offset
    for line, raw in enumerate(batch.lines, batch.start.line):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            where = f"{batch.path}: byte {offset + error.start}"
            raise ValueError(f"{where} is no UTF-8 ({error.reason})") from None
        offset += len(raw)
        if batch.path.suffix == ".txt":
            yield text
        elif text.strip():
            yield _document(text, field, f"{batch.path}: line {line}")


def _document(text: str, field: str, where: str) -> str:
    """The text of one line of a .jsonl."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        raise ValueError(f"{where}: broken JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not an object with {field!r} but {_kind(value)}")
    if field not in value:
        have = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"{where}: no field {field!r}; fields are: {have} (choose with --field)")
    if not isinstance(value[field], str):
        raise ValueError(f"{where}: {field!r} is {_kind(value[field])}, not text")
    try:
        value[field].encode()
    except UnicodeEncodeError:  # JSON can say "\ud800"
        raise ValueError(f"{where}: {field!r} holds half a surrogate pair, no text") from None
    return value[field]


def _kind(value) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
