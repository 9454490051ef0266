"""Token files, the order in which they are trained on, and the split of a batch over ranks.

A source is a directory `data/<name>/`:

    meta.json   dtype ("uint16" | "uint32"), vocab_size, tokenizer (a file beside it, "bytes" or
                null), eos_id (ends a document, or null), tokens, documents
    *.bin       little-endian token ids; shards are concatenated in the order of their names
    *.mask      optional, beside the .bin of the same name: one byte a token, 0 = the token is no
                target of the loss (it is still read as input)

or the name "stdlib": the Python standard library's own source as bytes, real text that every
machine has. On the command line a source is `DIR` or `DIR:WEIGHT`.

With T = seq_len, sample i of a source is its tokens [i*T, i*T + T + 1): the first T are inputs,
the last T targets; the token that neighbours share is a target in one, an input in the other.

Nothing here depends on the layout: every rank calls `Loader.take(global_batch)`, gets the same
list and reads the positions that `batch_map` gives it. The order within a source is a stateless
permutation of (seed, epoch), so the position in the data is one number a source.
"""

import bisect
import functools
import hashlib
import json
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

STDLIB = "stdlib"  # the embedded source; a directory of that name is written ./stdlib
BYTES = "bytes"  # meta["tokenizer"] of a byte vocabulary: ids 0..255 are bytes, others are not text
IGNORE = -100  # target of a masked token
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
META_KEYS = ("dtype", "vocab_size", "tokenizer", "eos_id", "tokens", "documents")
STDLIB_SKIP = set("test tests site-packages dist-packages idle_test lib2to3 __pycache__".split())


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

    def read(self, start: int, stop: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, stop) as int64 and, as bool, whether each may be a target.

        Raises ValueError with file and offset for an id outside the model's vocabulary.
        """
        ids, keep = np.empty(stop - start, np.int64), np.ones(stop - start, bool)
        at = start
        while at < stop:  # once, or once more for every shard border inside the sample
            k, offset = self._locate(at)
            count = min(stop, self.starts[k + 1]) - at
            here, there = slice(at - start, at - start + count), slice(offset, offset + count)
            ids[here] = (
                _mapped(self.files[k], DTYPES[self.meta["dtype"]])
                if self.memory is None
                else self.memory
            )[there]
            if self.masks[k] is not None:
                keep[here] = _mapped(self.masks[k], np.dtype("u1"))[there] != 0
            at += count
        if ids.max() >= vocab_size:
            bad = int(np.argmax(ids >= vocab_size))
            k, offset = self._locate(start + bad)
            raise ValueError(
                f"data {self.name}: token {ids[bad]} at offset {offset} (in tokens) "
                f"of {self.files[k]} is not below the vocabulary {vocab_size}"
            )
        return ids, keep

    def _locate(self, position: int) -> tuple[int, int]:
        """(shard, offset in it) of a position in the whole, in tokens."""
        k = bisect.bisect_right(self.starts, position) - 1
        return k, position - self.starts[k]


@functools.lru_cache(maxsize=256)  # a map holds a file descriptor, a corpus may have 10,000 shards
def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(file, dtype, mode="r")


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
    if not Path(folder).is_dir():
        raise ValueError(f"data {folder}: no such directory")
    try:
        meta = json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, not UTF-8 or not JSON
        raise ValueError(f"data {folder}: meta.json cannot be read ({error})") from None
    _check_meta(meta, folder)
    return meta


def _is_count(value) -> bool:
    return type(value) is int and value >= 0  # True is an int too


def _check_meta(meta, folder: str | Path) -> None:
    missing = [key for key in META_KEYS if not isinstance(meta, dict) or key not in meta]
    if missing:
        raise ValueError(f"data {folder}: meta.json lacks {', '.join(missing)}")
    eos, vocab = meta["eos_id"], meta["vocab_size"] if _is_count(meta["vocab_size"]) else 0
    checks = (
        ("vocab_size", vocab > 0, "an integer from 1"),
        *((key, _is_count(meta[key]), "an integer from 0") for key in ("tokens", "documents")),
        ("eos_id", eos is None or _is_count(eos) and eos < vocab, f"null or below {vocab}"),
        ("tokenizer", isinstance(meta["tokenizer"], str | None), 'a file name, "bytes" or null'),
        ("dtype", meta["dtype"] in list(DTYPES), "uint16 or uint32"),  # list: maybe unhashable
        ("dtype", meta["dtype"] == "uint32" or vocab <= 65536, f"uint32 for vocab_size {vocab}"),
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
    files, masks, starts = sorted(Path(name).glob("*.bin")), [], [0]
    if not files:
        raise ValueError(f"data {name}: there is no *.bin in it")
    for file in files:
        tokens, rest = divmod(file.stat().st_size, DTYPES[meta["dtype"]].itemsize)
        if rest:
            raise ValueError(
                f"data {name}: the size of {file.name}, {file.stat().st_size} bytes, "
                f"is no multiple of a {meta['dtype']}: cut off or of another dtype"
            )
        mask = file.with_suffix(".mask")
        if mask.exists() and mask.stat().st_size != tokens:
            raise ValueError(
                f"data {name}: {mask.name} must have one byte for each of the "
                f"{tokens} tokens of {file.name}, got {mask.stat().st_size}"
            )
        masks.append(mask if mask.exists() else None)
        starts.append(starts[-1] + tokens)
    if starts[-1] != meta["tokens"]:
        raise ValueError(
            f"data {name}: meta.json says {meta['tokens']} tokens, the *.bin files "
            f"hold {starts[-1]}; the directory is incomplete or has stray files"
        )
    return Source(name, weight, meta, files, masks, starts)


@functools.cache
def stdlib_tokens() -> tuple[np.ndarray, dict]:
    """The standard library's source as (uint16 ids, meta), every file followed by 256.

    It differs between Python releases, so meta has the sha256 of the ids (little-endian).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files, parts, eos = [], [], np.array([256], "<u2")
    for folder, names, here in os.walk(root):
        names[:] = [name for name in names if name not in STDLIB_SKIP]
        files += [Path(folder) / name for name in here if name.endswith(".py")]
    for file in sorted(files):
        parts += [np.frombuffer(file.read_bytes(), np.uint8).astype("<u2"), eos]
    ids = np.concatenate(parts) if parts else eos[:0]
    meta = dict(
        dtype="uint16",
        vocab_size=257,
        tokenizer=BYTES,
        eos_id=256,
        tokens=len(ids),
        documents=len(files),
        sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
    )
    return ids, meta


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
    fit = "uint16" if meta.get("vocab_size", 0) <= 65536 else "uint32"
    meta = {"dtype": fit, "documents": 0} | meta | {"tokens": 0}
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
            ids.astype(DTYPES[meta["dtype"]]).tofile(partial / f"{k:05d}.bin")
            meta["tokens"] += len(ids)
            ends += int(np.sum(ids == meta["eos_id"]))
        for k, mask in enumerate(masks or ()):
            (np.asarray(mask) != 0).astype("u1").tofile(partial / f"{k:05d}.mask")
        meta["documents"] = meta["documents"] or ends
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        open_source(f"{partial}:1")  # what a reader would refuse must not get the name
        partial.rename(path)
    except BaseException:  # an interrupt too: what stands under the final name is complete
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


def permute(index: int, n: int, seed: int, epoch: int) -> int:
    """The index-th element of a permutation of range(n) that is a function of (seed, epoch).

    A Feistel network on Z_a x Z_b, a*b just above n, repeated while the image is outside range(n).
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002).
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    while True:
        left, right = divmod(index, b)
        for key in _round_keys(seed, epoch):  # each line can be undone, whatever _mix is
            left = (left + _mix(key ^ right)) % a
            right = (right + _mix(key ^ left)) % b
        index = left * b + right
        if index < n:
            return index


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=24).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in (0, 8, 16))


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014): every input bit reaches every output."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def batch_map(global_batch: int, micro_batch: int, dp: int) -> list[list[slice]]:
    """`batch_map(...)[m][r]` is the slice of a step's sequences that is micro-batch m of dp rank r.

    Micro-batch-major: sequence j of it is number (m*dp + r)*micro_batch + j of the global batch.
    Raises ValueError if they do not divide, with the nearest global batches that do.
    """
    assert min(global_batch, micro_batch, dp) >= 1, (global_batch, micro_batch, dp)
    step = micro_batch * dp
    below, rest = divmod(global_batch, step)
    if rest:
        near = " or ".join(str(k * step) for k in (below, below + 1) if k)
        raise ValueError(
            f"global-batch {global_batch} is no multiple of micro-batch {micro_batch} "
            f"x dp {dp} = {step}; {near} would work"
        )
    return [
        [slice((m * dp + r) * micro_batch, (m * dp + r + 1) * micro_batch) for r in range(dp)]
        for m in range(below)
    ]


class Loader:
    """The samples of a weighted mixture of sources, in an order that any layout can resume.

    A sample is (source index, sample index). The k-th sample ever taken of a source is number
    `permute(k % n, n, seed, k // n)` of its n training samples; k // n is the epoch.

    Which source is next: with w_s its share of the weights and c_s the samples taken of it since
    the present mixture began, t in all, those with c_s < w_s*(t+1) are due, and the one with the
    earliest deadline (c_s+1)/w_s is taken; then |c_s - w_s*t| < 1 always (Baruah et al.,
    Proportionate Progress, 1996). If sources or weights change on resume, c_s begins anew: the
    new shares hold for new samples, and history is not caught up with.

    Held out are the last max(1, round(eval_fraction*n)) samples of a source with n >= 2, none if
    eval_fraction is 0. `read` touches no state: another thread may call it.
    """

    def __init__(
        self,
        specs: Sequence[str],
        seq_len: int,
        vocab_size: int,
        seed: int,
        eval_fraction: float = 0.01,
    ):
        """specs: "DIR[:WEIGHT]" each; seq_len: T, in tokens; vocab_size: the model's.

        Raises ValueError for what `open_source` refuses, a repeated source, one shorter than a
        sequence and a vocabulary larger than the model's.
        """
        assert specs and not isinstance(specs, str) and seq_len >= 1 and 0 <= eval_fraction < 1
        self.seq_len, self.vocab_size, self.seed = seq_len, vocab_size, seed
        self.sources, self.n_train, self.n_held = [], [], []  # held-out samples come last
        for spec in specs:
            self._add(open_source(spec), eval_fraction)
        total = sum(source.weight for source in self.sources)
        self.shares = [source.weight / total for source in self.sources]
        self.eos_ids = [source.meta["eos_id"] for source in self.sources]  # None: it has none
        self.fingerprint = {
            source.name: {
                "tokens": source.meta["tokens"],  # for logs
                "sha256": source.meta.get("sha256"),
            }
            for source in self.sources
        }
        self.consumed = [0] * len(specs)  # samples ever taken
        self.since = [0] * len(specs)  # its value when the present mixture began
        self.unused = {}  # consumed, by name, of sources that are not in this mixture

    def _add(self, source: Source, eval_fraction: float) -> None:
        if source.name in [other.name for other in self.sources]:
            raise ValueError(f"data {source.name}: given twice; give it once with a larger weight")
        if source.meta["vocab_size"] > self.vocab_size:
            raise ValueError(
                f"data {source.name}: its vocabulary is {source.meta['vocab_size']}, "
                f"the model's only {self.vocab_size}"
            )
        n = (source.starts[-1] - 1) // self.seq_len
        if n < 1:
            raise ValueError(
                f"data {source.name}: {source.starts[-1]} tokens are fewer than one "
                f"sequence and its last target, seq-len {self.seq_len} + 1"
            )
        held = min(n - 1, max(1, round(eval_fraction * n))) if eval_fraction else 0
        self.sources.append(source)
        self.n_train.append(n - held)
        self.n_held.append(held)

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next `count` samples of the whole run, the same on every rank; advances the state."""
        return [self._next() for _ in range(count)]

    def _next(self) -> tuple[int, int]:
        taken = [now - then for now, then in zip(self.consumed, self.since, strict=True)]
        slot = sum(taken) + 1
        due = [s for s, share in enumerate(self.shares) if taken[s] < share * slot]
        s = min(due, key=lambda s: ((taken[s] + 1) / self.shares[s], self.sources[s].name))
        epoch, index = divmod(self.consumed[s], self.n_train[s])
        self.consumed[s] += 1
        return s, permute(index, self.n_train[s], self.seed, epoch)

    def read(self, samples: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) of `samples`, both (len(samples), T) int64 on the CPU.

        targets[:, j] is the token after tokens[:, j], or -100 where its mask is 0.
        Raises ValueError naming file and offset for an id outside the model's vocabulary.
        """
        T = self.seq_len
        tokens_NT, targets_NT = np.empty((2, len(samples), T), np.int64)
        for row, (s, i) in enumerate(samples):
            assert 0 <= i < self.n_train[s] + self.n_held[s], (s, i)
            ids, keep = self.sources[s].read(i * T, i * T + T + 1, self.vocab_size)
            tokens_NT[row] = ids[:-1]
            targets_NT[row] = np.where(keep[1:], ids[1:], IGNORE)
        return torch.from_numpy(tokens_NT), torch.from_numpy(targets_NT)

    def heldout(self, count: int) -> list[tuple[int, int]]:
        """At most `count` held-out samples, the same ones always: fewer if fewer exist, by weight
        (Webster's method) as far as a source has any, spread evenly over each tail.
        """
        counts = [0] * len(self.sources)
        for _ in range(min(count, sum(self.n_held))):
            left = [s for s, held in enumerate(self.n_held) if counts[s] < held]
            counts[min(left, key=lambda s: (2 * counts[s] + 1) / self.sources[s].weight)] += 1
        return [
            (s, self.n_train[s] + j * self.n_held[s] // k)
            for s, k in enumerate(counts)
            for j in range(k)
        ]

    def state_dict(self) -> dict:
        """The position in the data: {"consumed", "since", "shares"}, each a dict by source."""
        return {
            "consumed": self.unused | self._by_name(self.consumed),
            "since": self._by_name(self.since),
            "shares": self._by_name(self.shares),
        }

    def _by_name(self, values: list) -> dict:
        return {source.name: value for source, value in zip(self.sources, values, strict=True)}

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state` was taken; a source that it does not know starts at 0.

        Sources that are not used now are kept and saved again: they can return. {"consumed": ...}
        alone will do; the mixture then begins here.
        Raises ValueError if the state has another shape; the loader is then unchanged.
        """
        keys = set(state) if isinstance(state, dict) else set()
        if not (
            keys in ({"consumed"}, {"consumed", "since", "shares"})
            and all(isinstance(part, dict) for part in state.values())
            and all(map(_is_count, state["consumed"].values()))
            and state.get("since", {}).keys() == state.get("shares", {}).keys()
        ):
            raise ValueError(
                "data state: expected {'consumed': {source: samples}, 'since': ..., "
                f"'shares': ...}}, got {str(state)[:200]}"
            )
        consumed = self._by_name([0] * len(self.sources)) | state["consumed"]
        self.consumed = [consumed.pop(source.name) for source in self.sources]
        self.unused = consumed
        same = state.get("shares") == self._by_name(self.shares)
        self.since = [
            state["since"][source.name] if same else done
            for source, done in zip(self.sources, self.consumed, strict=True)
        ]


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
    from tokenizers import Tokenizer  # only here: byte vocabularies do without the library

    tokenizer = Tokenizer.from_file(str(files[0]))
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids)),
    )
