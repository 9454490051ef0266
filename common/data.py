"""The order in which samples are trained on, their batches and the split of these over ranks.

With T = seq_len, sample i of a source (a token directory, `common/tokens.py`) is its tokens
[i*T, i*T + T + 1): the first T are inputs, the last T targets; the token that neighbours share is
a target in one, an input in the other.

Nothing here depends on the layout: every rank calls `Loader.take(global_batch)`, gets the same
list and reads the positions that `batch_map` gives it. The order within a source is a stateless
permutation of (seed, epoch), so the position in the data is one number a source.
`read_batches` makes a rank's micro-batches of them, `to_device` brings them to it.
"""

import copy
import functools
import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.config import Run
from common.mesh import Mesh, Room
from common.tokens import (
    Source,
    is_count,
    open_source,
    tokenizer_digest,
)
from kernels.ring import zigzag

IGNORE = -100  # target of a token that has none: masked, or the first of another document


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
        sequence, a vocabulary larger than the model's and sources of different tokenizers.
        """
        assert specs and not isinstance(specs, str) and seq_len >= 1 and 0 <= eval_fraction < 1
        self.seq_len, self.vocab_size, self.seed = seq_len, vocab_size, seed
        self.sources, self.n_train, self.n_held = [], [], []  # held-out samples come last
        self.tokenizers = {}  # digest: name of the first source that has it
        for spec in specs:
            self._add(open_source(spec), eval_fraction)
        total = sum(source.weight for source in self.sources)
        self.shares = [source.weight / total for source in self.sources]
        self.eos_ids = [source.meta["eos_id"] for source in self.sources]  # None: it has none
        self.fingerprint = {
            source.name: {
                "tokens": source.meta["tokens"],  # for logs
                "sha256": source.meta.get("sha256") or _digest(source.meta),
            }
            for source in self.sources
        }
        self.seen = {}  # the fingerprints that a resumed run had, also of sources not in use now
        self.consumed = [0] * len(specs)  # samples ever taken
        self.since = [0] * len(specs)  # its value when the present mixture began
        self.unused = {}  # consumed, by name, of sources that are not in this mixture

    def _add(self, source: Source, eval_fraction: float) -> None:
        if source.name in [other.name for other in self.sources]:
            raise ValueError(f"data {source.name}: given twice; give it once with a larger weight")
        if source.meta["vocab_size"] > self.vocab_size:
            raise ValueError(
                f"data {source.name}: its vocabulary is {source.meta['vocab_size']}, the model's "
                f"only {self.vocab_size}; use a config.json with vocab_size "
                f"{source.meta['vocab_size']} (--model-config)"
            )
        digest = tokenizer_digest(source)
        if digest is not None:
            self.tokenizers.setdefault(digest, source.name)
        if len(self.tokenizers) > 1:
            first = next(iter(self.tokenizers.values()))
            raise ValueError(
                f"data {source.name}: its tokenizer ({source.meta['tokenizer']}) is not that of "
                f"data {first}: the same id means different text; tokenise both with one"
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
        Raises ValueError naming file and offset for an id outside the source's vocabulary.
        """
        T = self.seq_len
        tokens_NT, targets_NT = np.empty((2, len(samples), T), np.int64)
        for row, (s, i) in enumerate(samples):
            assert 0 <= i < self.n_train[s] + self.n_held[s], (s, i)
            ids, keep = self.sources[s].read(i * T, i * T + T + 1)
            tokens_NT[row] = ids[:-1]
            targets_NT[row] = np.where(keep[1:], ids[1:], IGNORE)
        return torch.from_numpy(tokens_NT), torch.from_numpy(targets_NT)

    def eos(self, samples: Sequence[tuple[int, int]]) -> list[int | None]:
        """The id that ends a document, for each sample; None where its source has none."""
        return [self.eos_ids[s] for s, _ in samples]

    def peek(self, count: int) -> list[tuple[int, int]]:
        """What `take(count)` would return now; the state stays."""
        ahead = copy.copy(self)
        ahead.consumed = list(self.consumed)  # all that `take` changes
        return ahead.take(count)

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
            and all(map(is_count, state["consumed"].values()))
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


def _digest(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


class Prefetch:
    """Prepares a loader's next samples in a background thread while the present ones are used.

    prepare: called with a list of samples; never by two threads at once. It must change nothing
    that the other thread uses; a new thread's CUDA device is 0 until it is set there.

    The loader's state is always that of what was taken. What was prepared is used only if it is
    of the samples that are now due: another count or a loaded state makes it be read afresh.
    """

    def __init__(self, loader: Loader, prepare: Callable[[list[tuple[int, int]]], Any]):
        self.loader, self.prepare = loader, prepare
        self._samples, self._future = None, None

    def take(self, count: int) -> Any:
        """`prepare(loader.take(count))`; begins to prepare the `count` samples after them.

        Raises what `prepare` raised for these samples; the loader has then advanced.
        """
        samples = self.loader.take(count)
        future = self._future if self._samples == samples else None
        self.close()
        result = self.prepare(samples) if future is None else future.result()
        self._samples, self._future = self.loader.peek(count), Future()
        work = (self.prepare, self._samples, self._future)
        threading.Thread(target=_fulfil, args=work, name="prefetch", daemon=True).start()
        return result

    def close(self) -> None:
        """Wait for the preparation under way, if any, and forget it. May be called again."""
        if self._future is not None:
            wait([self._future])
        self._samples, self._future = None, None


def _fulfil(prepare: Callable, samples: list[tuple[int, int]], future: Future) -> None:
    try:
        future.set_result(prepare(samples))
    except BaseException as error:  # raised again by the take that needs it
        future.set_exception(error)


def isolate(
    tokens_BT: torch.Tensor, targets_BT: torch.Tensor, eos_B: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut rows into documents: (targets_BT, positions_BT, cu_seqlens).

    tokens_BT, targets_BT: (B, T) int64 on the CPU; eos_B: a row's end of document, None = it is
    one document. A document ends at its eos, which belongs to it, and at the end of the row.

    targets_BT: the target at an eos, the next document's first token, is IGNORE; a copy.
    positions_BT: (B, T) int64, from 0 in every document.
    cu_seqlens: int32, the first token of every document among the B*T, then B*T, repeated up to a
    length of 1 + 16, 64, 256, ...: compiled code sees few shapes, and the surplus documents have
    no tokens.
    """
    B, T = tokens_BT.shape
    eos_B1 = torch.tensor([-1 if eos is None else eos for eos in eos_B]).view(B, 1)
    ends_BT = tokens_BT == eos_B1  # no id is -1
    starts_BT = torch.ones_like(ends_BT)
    starts_BT[:, 1:] = ends_BT[:, :-1]
    at_T = torch.arange(T)
    positions_BT = at_T - torch.where(starts_BT, at_T, 0).cummax(dim=1).values
    starts_N = starts_BT.flatten().nonzero().flatten()
    length = 16
    while length < len(starts_N):
        length *= 4
    cu_seqlens = torch.full((length + 1,), B * T, dtype=torch.int32)
    cu_seqlens[: len(starts_N)] = starts_N
    return targets_BT.masked_fill(ends_BT, IGNORE), positions_BT, cu_seqlens


@dataclass
class Batch:
    """One micro-batch: tokens (B, T) and targets (B, T, IGNORE where none), int64.

    Without targets the model returns logits. With isolated documents `positions` (B, T) restart
    in each and `cu_seqlens` (int32) are their starts among the B·T tokens; else both are None.
    `numbers` (B, T) count tokens over the whole run, the same in every layout: forced routing
    goes by them.
    `routes`: layer → chosen experts (N, K): a layer found there uses them (router replay),
    another notes its own. `loss_grad`: the gradient that the loss will receive, where known.
    `room` (mesh.Room): what is reserved for exchanges; without, the host waits for their sizes.
    """

    tokens: torch.Tensor
    targets: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    routes: dict[int, torch.Tensor] | None = None
    loss_grad: torch.Tensor | None = None
    room: Room | None = None


def read_batches(
    loader: Loader, run: Run, mesh: Mesh, samples: list, real: int | None = None
) -> tuple[list[Batch], int]:
    """This rank's micro-batches of a step's sequences, on the CPU, and their valid targets.

    Sequences from number `real` on only fill up the last micro-batches: no target counts. With
    context parallelism a rank has two pieces of each sequence. Runs ahead of the step, in a thread.
    """
    here = zigzag(run.seq_len, mesh.cp, mesh.cp_rank)
    batches, valid = [], 0
    for ranks in batch_map(len(samples), run.micro_batch, mesh.dp):
        rows, positions, cu_seqlens = ranks[mesh.dp_rank], None, None
        tokens, targets = loader.read(samples[rows])
        if real is not None:
            targets[max(0, real - rows.start) :] = IGNORE
        if run.isolate_documents:
            eos = loader.eos(samples[rows])
            targets, positions, cu_seqlens = isolate(tokens, targets, eos)
            positions = positions[:, here]
        numbers = torch.arange(rows.start * run.seq_len, rows.stop * run.seq_len).view_as(tokens)
        mine = tokens[:, here], targets[:, here], positions, cu_seqlens, numbers[:, here]
        batches.append(Batch(*mine))
        valid += int((batches[-1].targets != IGNORE).sum())
    return batches, valid


def to_device(batches: list[Batch], mesh: Mesh, first: int = 0) -> list[Batch]:
    """Copy without waiting, and number on: `first` micro-batches were before these in the run."""
    moved = []
    for b in batches:
        before = first * b.tokens.numel() * mesh.dp * mesh.cp
        tensors = [b.tokens, b.targets, b.positions, b.cu_seqlens, b.numbers + before]
        if mesh.device.type == "cuda":
            pinned = [x if x is None else x.pin_memory() for x in tensors]
            tensors = [x if x is None else x.to(mesh.device, non_blocking=True) for x in pinned]
        moved.append(Batch(*tensors))
    return moved
