"""Token directories: the format, how they are opened, checked and written, and their tokenizer.

A source is a directory `data/<name>/`:

    meta.json   dtype ("uint16" | "uint32"), vocab_size, tokenizer (a file beside it, "bytes" or
                null), eos_id (ends a document and belongs to it, or null), tokens, documents;
                optional: shards (the tokens of each *.bin by its name), sources and others
    *.bin       little-endian token ids; shards are concatenated in the order of their names
    *.mask      optional, beside the .bin of the same name: one byte a token, 0 = the token is no
                target of the loss (it is still read as input)

or the name "stdlib": the Python standard library's own source as bytes, real text that every
machine has. On the command line a source is `DIR` or `DIR:WEIGHT`.

`common/tokenize_corpus.py` makes such directories from text, `write_tokens` from arrays of ids.
torch is not imported here: the workers of that command start quickly.
"""

import bisect
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STDLIB = "stdlib"  # the embedded source; a directory of that name is written ./stdlib
BYTES = "bytes"  # meta["tokenizer"] of a byte vocabulary: ids 0..255 are bytes, others are not text
BYTES_EOS = 256
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
META_KEYS = ("dtype", "vocab_size", "tokenizer", "eos_id", "tokens", "documents")
STDLIB_SKIP = set("test tests site-packages dist-packages idle_test lib2to3 __pycache__".split())


class DataError(ValueError):
    """Data that turned out bad while it was read: the user's mistake, in the middle of a run."""


@dataclass(frozen=True)
class Source:
    """One opened source. `starts[k]` is the position of shard k's first token in the whole."""

    name: str  # the directory as the user wrote it: the key in a saved state
    weight: float
    meta: dict
    files: list[Path]
    masks: list[Path | None]
    starts: list[int]  # len(files) + 1, the last is the number of tokens
    memory: np.ndarray | None = None  # the embedded text, which has no file

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) as int64 and, as bool, whether each may be a target.

        Raises DataError with file and offset for an id outside the source's vocabulary, with the
        file if it has been cut off.
        """
        ids, keep = np.empty(stop - start, np.int64), np.ones(stop - start, bool)
        at = start
        while at < stop:  # once, or once more for every shard border inside the sample
            k, offset = self._locate(at)
            count = min(stop, self.starts[k + 1]) - at
            here, there = slice(at - start, at - start + count), slice(offset, offset + count)
            if self.memory is None:
                ids[here] = _cut(self.files[k], DTYPES[self.meta["dtype"]], there)
            else:
                ids[here] = self.memory[there]
            if self.masks[k] is not None:
                keep[here] = _cut(self.masks[k], np.dtype("u1"), there) != 0
            at += count
        if ids.max() >= self.meta["vocab_size"]:
            bad = int(np.argmax(ids >= self.meta["vocab_size"]))
            k, offset = self._locate(start + bad)
            raise DataError(
                f"data {self.name}: token {ids[bad]} at offset {offset} (in tokens) "
                f"of {self.files[k]} is not below the vocabulary {self.meta['vocab_size']}"
            )
        return ids, keep

    def _locate(self, position: int) -> tuple[int, int]:
        """(shard, offset in it) of a position in the whole, in tokens."""
        k = bisect.bisect_right(self.starts, position) - 1
        return k, position - self.starts[k]


@functools.lru_cache(maxsize=256)  # a map holds a file descriptor, a corpus may have 10,000 shards
def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(file, dtype, mode="r")


def _cut(file: Path, dtype: np.dtype, there: slice) -> np.ndarray:
    """Part of a file. Raises DataError where it ends before: reading the map would be SIGBUS."""
    whole = _mapped(file, dtype)
    if whole.base.size() < there.stop * dtype.itemsize:
        raise DataError(f"data: {file} was cut off while this run reads it")
    return whole[there]


def parse_spec(spec: str) -> tuple[str, float]:
    """Split "DIR[:WEIGHT]" (weight 1 if not given). Raises ValueError for a weight not above 0."""
    name, _, text = spec.rpartition(":") if ":" in spec else (spec, "", "1")
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"data {spec}: the weight must be a positive number, got {text!r}")
    return name.rstrip("/") or name, weight


def read_meta(folder: str | Path) -> dict:
    """meta.json of a token directory, checked. Raises ValueError naming directory and key."""
    file = Path(folder) / "meta.json"
    if not Path(folder).exists():
        raise ValueError(f"data {folder}: no such directory")
    if not file.exists():
        raise ValueError(
            f"data {folder}: no token directory, there is no meta.json in it; "
            f"python -m common.tokenize_corpus makes one of text"
        )
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not to be read, not UTF-8 or not JSON
        raise ValueError(f"data {folder}: meta.json cannot be read ({error})") from None
    _check_meta(meta, folder)
    return meta


def is_count(value) -> bool:
    """Whether value is an integer from 0 (True is an int too, but no count)."""
    return type(value) is int and value >= 0


def _check_meta(meta, folder: str | Path) -> None:
    missing = [key for key in META_KEYS if not isinstance(meta, dict) or key not in meta]
    if missing:
        raise ValueError(f"data {folder}: meta.json lacks {', '.join(missing)}")
    eos, vocab = meta["eos_id"], meta["vocab_size"] if is_count(meta["vocab_size"]) else 0
    shards = meta.get("shards", {})
    checks = (
        ("vocab_size", vocab > 0, "an integer from 1"),
        *((key, is_count(meta[key]), "an integer from 0") for key in ("tokens", "documents")),
        ("eos_id", eos is None or is_count(eos) and eos < vocab, f"null or below {vocab}"),
        ("tokenizer", isinstance(meta["tokenizer"], str | None), 'a file name, "bytes" or null'),
        ("dtype", meta["dtype"] in list(DTYPES), "uint16 or uint32"),  # list: maybe unhashable
        ("dtype", meta["dtype"] == "uint32" or vocab <= 65536, f"uint32 for vocab_size {vocab}"),
        (
            "shards",
            isinstance(shards, dict) and all(map(is_count, shards.values())),
            "the tokens of each *.bin by its name",
        ),
    )
    for key, good, wanted in checks:
        if not good:
            raise ValueError(f"data {folder}: meta {key} must be {wanted}, got {meta[key]!r}")


def open_source(spec: str) -> Source:
    """Open one "DIR[:WEIGHT]" or "stdlib[:WEIGHT]"; files are mapped only when they are read.

    Raises ValueError if directory, meta.json or the size of a file is not as the format says.
    """
    name, weight = parse_spec(spec)
    if name == STDLIB:
        ids, meta = stdlib_tokens()
        return Source(name, weight, meta, [Path(STDLIB)], [None], [0, len(ids)], ids)
    meta = read_meta(name)
    files = sorted(Path(name).glob("*.bin"))
    if not files:
        raise ValueError(f"data {name}: there is no *.bin in it")
    sizes = {file.name: _count_tokens(file, meta["dtype"], name) for file in files}
    _check_sizes(sizes, meta, name)
    masks = [_mask_of(file, sizes[file.name], name) for file in files]
    stray = set(Path(name).glob("*.mask")) - set(masks)
    if stray:
        mask = min(stray)
        raise ValueError(
            f"data {name}: {mask.name} has no {mask.with_suffix('.bin').name} beside it"
        )
    starts = [0, *itertools.accumulate(sizes.values())]
    return Source(name, weight, meta, files, masks, starts)


def _count_tokens(file: Path, dtype: str, name: str) -> int:
    size = file.stat().st_size
    tokens, rest = divmod(size, DTYPES[dtype].itemsize)
    if rest:
        raise ValueError(
            f"data {name}: the size of {file.name}, {size} bytes, "
            f"is no multiple of a {dtype}: cut off or of another dtype"
        )
    return tokens


def _check_sizes(sizes: dict[str, int], meta: dict, name: str) -> None:
    """Compare the tokens of each *.bin with meta.json: ValueError names the file where it can."""
    shards = meta.get("shards", sizes)
    for file in sorted(shards.keys() | sizes.keys()):
        if file not in sizes:
            raise ValueError(f"data {name}: {file} is missing, meta.json lists it")
        if file not in shards:
            raise ValueError(f"data {name}: {file} is a stray file, meta.json does not list it")
        if sizes[file] != shards[file]:
            raise ValueError(
                f"data {name}: {file} holds {sizes[file]} tokens, meta.json says {shards[file]}: "
                f"the file was cut off or replaced"
            )
    total = sum(sizes.values())
    if total != meta["tokens"]:
        raise ValueError(
            f"data {name}: meta.json says {meta['tokens']} tokens, the *.bin files "
            f"hold {total}; the directory is incomplete or has stray files"
        )
    if not total:
        raise ValueError(f"data {name}: it is empty, there is not one token in its *.bin")


def _mask_of(file: Path, tokens: int, name: str) -> Path | None:
    mask = file.with_suffix(".mask")
    if not mask.exists():
        return None
    if mask.stat().st_size != tokens:
        raise ValueError(
            f"data {name}: {mask.name} must have one byte for each of the "
            f"{tokens} tokens of {file.name}, got {mask.stat().st_size}"
        )
    return mask


@functools.cache
def stdlib_tokens() -> tuple[np.ndarray, dict]:
    """The standard library's source as (uint16 ids, meta), every file followed by BYTES_EOS.

    It differs between Python releases, so meta has the sha256 of the ids (little-endian).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files, parts, eos = [], [], np.array([BYTES_EOS], "<u2")
    for folder, names, here in os.walk(root):
        names[:] = [name for name in names if name not in STDLIB_SKIP]
        files += [Path(folder) / name for name in here if name.endswith(".py")]
    for file in sorted(files):
        parts += [np.frombuffer(file.read_bytes(), np.uint8).astype("<u2"), eos]
    ids = np.concatenate(parts) if parts else eos[:0]
    meta = dict(
        dtype="uint16",
        vocab_size=BYTES_EOS + 1,
        tokenizer=BYTES,
        eos_id=BYTES_EOS,
        tokens=len(ids),
        documents=len(files),
        sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
    )
    return ids, meta


def shard_name(k: int) -> str:
    """File name of shard k. Raises ValueError where names would no longer sort like numbers."""
    if k > 99_999:
        raise ValueError("more than 100,000 shards: make them larger")
    return f"{k:05d}.bin"


def write_meta(folder: Path, meta: dict) -> None:
    """Write meta.json; raises ValueError if a reader would refuse the directory as it now is."""
    _check_meta(meta, folder)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    open_source(f"{folder}:1")


def write_tokens(
    path: str | Path,
    tokens: np.ndarray | Iterable[np.ndarray],
    meta: dict,
    masks: Iterable[np.ndarray] | None = None,
) -> dict:
    """Write a token directory completely or not at all; returns the meta that was written.

    path: must not exist; written beside under a temporary name and renamed when complete.
    tokens: a 1-D integer array, or an iterable of them, one a shard, taken one by one.
    meta: vocab_size, tokenizer, eos_id; the rest is found (dtype: the narrowest) if not given.
    masks: one array a shard, 0 = the token is no target.
    Raises ValueError for an existing path, an id outside vocab_size or unfit meta.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"data {path}: exists already; remove it or choose another name")
    fit = narrowest(meta.get("vocab_size", 0))
    meta = {"dtype": fit, "documents": 0} | meta | {"tokens": 0, "shards": {}}
    _check_meta(meta, path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    ends = 0
    try:
        for k, ids in enumerate([tokens] if isinstance(tokens, np.ndarray) else tokens):
            assert ids.ndim == 1 and ids.dtype.kind in "iu", (ids.shape, ids.dtype)
            bad = ids[(ids < 0) | (ids >= meta["vocab_size"])]  # the cast would wrap silently
            if len(bad):
                raise ValueError(
                    f"data {path}: token {bad[0]} of shard {k} is not in "
                    f"[0, vocab_size {meta['vocab_size']})"
                )
            ids.astype(DTYPES[meta["dtype"]]).tofile(partial / shard_name(k))
            meta["shards"][shard_name(k)] = len(ids)
            ends += int(np.sum(ids == meta["eos_id"]))
        for k, mask in enumerate(masks or ()):
            file = (partial / shard_name(k)).with_suffix(".mask")
            (np.asarray(mask) != 0).astype("u1").tofile(file)
        meta["tokens"] = sum(meta["shards"].values())
        meta["documents"] = meta["documents"] or ends
        write_meta(partial, meta)
        partial.rename(path)
    except BaseException:  # an interrupt too: what stands under the final name is complete
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


def narrowest(vocab_size: int) -> str:
    """The narrowest of DTYPES that holds every id below vocab_size."""
    return "uint16" if vocab_size <= 65536 else "uint32"


def load_tokenizer(file: str | Path):
    """The tokenizers.Tokenizer of a tokenizer.json, which never cuts text off or pads it.

    Raises ValueError naming the file if the library cannot read it.
    """
    from tokenizers import Tokenizer  # only here: byte vocabularies do without the library

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file}: not a readable tokenizer.json ({error})") from None
    tokenizer.no_truncation()  # files may ask for both
    tokenizer.no_padding()
    return tokenizer


def tokenizer_digest(source: Source) -> str | None:
    """What tells the tokenizers of two sources apart: BYTES, or the sha256 of the file's content.

    None if meta.json names none, or a file that is not there.
    """
    if source.meta["tokenizer"] in (BYTES, None):
        return source.meta["tokenizer"]
    file = Path(source.name, source.meta["tokenizer"])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def decoder(specs: Sequence[str]) -> Callable[[list[int]], str] | None:
    """A function from ids to text, or None if the sources name no (or not the same) tokenizer."""
    return _codec(specs)[1]


def encoder(specs: Sequence[str]) -> Callable[[str], list[int]] | None:
    """A function from text to ids, with no special tokens added; None as for `decoder`."""
    return _codec(specs)[0]


def _codec(specs: Sequence[str]) -> tuple[Callable | None, Callable | None]:
    folders = [parse_spec(spec)[0] for spec in specs]
    names = {BYTES if folder == STDLIB else read_meta(folder)["tokenizer"] for folder in folders}
    if names == {BYTES}:
        return (
            lambda text: list(text.encode()),
            lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
        )
    files = [Path(folder, name) for name in names if name for folder in folders]
    files = [file for file in files if file.is_file()]
    if len(names) > 1 or not files:
        return None, None
    tokenizer = load_tokenizer(files[0])
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids)),
    )
