"""Make a token directory (`common/tokens.py`) of text: python -m common.tokenize_corpus --help

`common/documents.py` says which files are read, and how. eos_id follows each document; one without
tokens (an empty text) is left out.

The main process reads, decompresses and cuts; workers parse and tokenise batches of documents;
these are written in the order of the input. A shard ends with the batch that fills it. So the
result depends on the input and the flags alone, not on --workers.

<out>.partial/ holds the finished shards and state.json, which says what was asked for and where in
the input the last of them ends. The same command goes on from there after an interruption. Input
files are known by name, size and sha256 (not by their times, so that a copy gives the same bytes).
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.documents import BATCH, Batch, Place, find_files, read_batches, read_texts
from common.tokens import (
    BYTES,
    BYTES_EOS,
    DTYPES,
    load_tokenizer,
    narrowest,
    shard_name,
    write_meta,
)

EOS_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[EOS]",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")  # copied along where they exist


@dataclass(frozen=True)
class Args:
    """Turn text into a token directory."""

    tokenizer: str
    """A tokenizer.json, or bytes."""
    input: tuple[Path, ...]
    """Files (.txt, .jsonl, .jsonl.gz, .jsonl.zst) and directories of them."""
    out: Path
    """The directory to make; it must not exist."""
    field: str = "text"
    """Where in an object of a .jsonl the text is."""
    eos: str | None = None
    """The token after each document; None: the usual one, if the tokenizer has only one such."""
    parse_special: bool = False
    """Special tokens written out in the text become their ids (chat formats), not plain text."""
    workers: int | None = None
    """Processes that tokenise; None: one a core."""
    shard_tokens: int = 2**27
    """Tokens after which a shard is full."""


@dataclass(frozen=True)
class Job:
    """What a worker must know besides the text. dtype: of the ids, a key of DTYPES."""

    tokenizer: str  # BYTES or a file
    dtype: str
    vocab_size: int
    eos_id: int
    field: str
    parse_special: bool


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    # A main process that is killed cannot: without this they would wait for work for ever.
    parent = multiprocessing.parent_process()
    watch = lambda: (parent.join(), os._exit(1))
    threading.Thread(target=watch, daemon=True).start()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenize(job: Job, batch: Batch) -> tuple[np.ndarray, int]:
    """(ids, 1-D of job.dtype with eos_id after each document; number of documents).

    Raises ValueError naming file and place for text that is not UTF-8, or not as it should be.
    """
    texts = list(read_texts(batch, job.field))
    try:
        encoded = [ids for ids in _encoder(job.tokenizer, job.parse_special)(texts) if len(ids)]
    except Exception as error:  # the library raises nothing narrower
        lines = f"lines {batch.start.line} to {batch.end.line - 1}"
        raise ValueError(f"{batch.path}: {lines}: the tokenizer fails ({error})") from None
    dtype, parts = DTYPES[job.dtype], []
    for ids in encoded:
        parts += [np.asarray(ids, dtype), np.array([job.eos_id], dtype)]
    return np.concatenate(parts) if parts else np.empty(0, dtype), len(encoded)


@functools.cache
def _encoder(tokenizer: str, parse_special: bool) -> Callable[[list[str]], list]:
    if tokenizer == BYTES:
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    loaded = load_tokenizer(tokenizer)
    loaded.encode_special_tokens = not parse_special
    encode = functools.partial(loaded.encode_batch_fast, add_special_tokens=False)
    return lambda texts: [encoding.ids for encoding in encode(texts)]


def _close_on_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class Partial:
    """<out>.partial: tokens/ (the later <out>) and state.json; locked as long as this is open."""

    def __init__(self, out: Path):
        """Raises ValueError if `out` exists, cannot be made or another process is making it."""
        if out.exists():
            raise ValueError(f"--out {out}: exists already; remove it or choose another name")
        self.out, self.folder = out, out.with_name(out.name + ".partial")
        self.tokens = self.folder / "tokens"
        try:
            self.tokens.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {out}: cannot be made ({error.strerror})") from None
        self.lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--out {out}: another process is making it") from None
        self.at, self.shards = Place(), []  # end of what was added; tokens of each finished shard
        self.file = None  # the shard being written

    def restore(self, wanted: dict) -> None:
        """Begin, or go on where the last finished shard ends.

        wanted: JSON of all that the result depends on: `dtype`, `shard_tokens`, `sources` (one an
        input file) and others. Raises ValueError if what is there was begun with another.
        """
        self.wanted, self.documents = wanted, [0] * len(wanted["sources"])
        state = self.folder / "state.json"
        if state.exists():
            found = json.loads(state.read_text(encoding="utf-8"))
            keys = [k for k, v in self.wanted.items() if found["wanted"].get(k) != v]
            if keys:
                raise ValueError(
                    f"{self.folder} was begun with other arguments or input (it differs in "
                    f"{', '.join(keys)}); repeat that command, or delete it to start anew"
                )
            self.at, self.shards = Place(**found["at"]), found["shards"]
            self.documents = found["documents"]
        item = DTYPES[self.wanted["dtype"]].itemsize
        sizes = {shard_name(k): tokens * item for k, tokens in enumerate(self.shards)}
        for file in self.tokens.glob("*.bin"):
            if file.name not in sizes:
                file.unlink()  # was not finished
        for name, size in sizes.items():
            file = self.tokens / name
            if not file.exists() or file.stat().st_size != size:
                raise ValueError(f"{file} is not as it was left; delete {self.folder}")

    def add(self, ids: np.ndarray, documents: int, end: Place) -> None:
        """Append a batch's ids (1-D of the dtype); `end` is where in the input it ends."""
        if self.file is None and len(ids):  # no shard for the sake of blank lines
            self.file = open(self.tokens / shard_name(len(self.shards)), "wb")
        self.documents[end.file] += documents
        self.at = end
        if self.file is None:
            return
        self.file.write(ids.tobytes())
        if self.file.tell() >= self.wanted["shard_tokens"] * ids.itemsize:
            self.finish_shard()

    def finish_shard(self) -> None:
        """Close the shard, if there is one, and note that it is complete."""
        if self.file is None:
            return
        size, done, self.file = self.file.tell(), self.file, None
        _close_on_disk(done)  # before the note that it is there
        self.shards.append(size // DTYPES[self.wanted["dtype"]].itemsize)
        state = dict(
            wanted=self.wanted, at=vars(self.at), shards=self.shards, documents=self.documents
        )
        new = open(self.folder / "state.json.new", "wb")
        new.write(json.dumps(state).encode())
        _close_on_disk(new)
        os.replace(new.name, self.folder / "state.json")

    def finish(self, meta: dict) -> None:
        """Write meta.json and give the directory its name."""
        self.finish_shard()
        write_meta(self.tokens, meta)
        self.tokens.rename(self.out)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)

    def abandon(self) -> None:
        """After an error: keep finished shards, of whatever arguments, for another attempt."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # what is buffered may not fit the disk either
                self.file.close()
        if not (self.folder / "state.json").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


# ------------------------------------------------------------------------------------------------
# The command
# ------------------------------------------------------------------------------------------------


class Progress:
    """What was read and how fast, on stderr: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int):
        """total: bytes of all input files on disk."""
        self.total, self.done, self.tokens, self.begin = total, 0, 0, time.monotonic()
        self.bar = sys.stderr.isatty()
        self.every = 0.2 if self.bar else 30.0  # seconds
        self.shown = self.begin

    def update(self, done: int, tokens: int) -> None:
        """done: bytes read of all input so far; tokens: new ones."""
        self.done, self.tokens = done, self.tokens + tokens
        if time.monotonic() - self.shown >= self.every:
            self.show()

    def show(self) -> None:
        now, done, share = time.monotonic(), self.done, self.done / self.total
        self.shown = now
        text = f"{share:4.0%} {done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        text += f" | {self.tokens / max(now - self.begin, 1e-9):,.0f} tok/s"
        if self.bar:
            width = round(30 * share)
            text = f"\r[{'#' * width}{'.' * (30 - width)}] {text}\x1b[K"  # erases the line's rest
        print(text, end="" if self.bar else "\n", file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """What is printed next, a result or an error, must not stand beside the bar."""
        if self.bar:
            print(file=sys.stderr)


def find_vocabulary(args: Args) -> Job:
    """Look the tokenizer up. Raises ValueError if it is not there or --eos does not fit it."""
    if args.tokenizer == BYTES:
        if args.eos is not None:
            raise ValueError(f"--eos {args.eos}: bytes always end a document with id {BYTES_EOS}")
        size, eos_id = BYTES_EOS + 1, BYTES_EOS
    else:
        if not Path(args.tokenizer).is_file():
            raise ValueError(
                f"--tokenizer {args.tokenizer}: no such file; a tokenizer.json or bytes"
            )
        vocabulary = load_tokenizer(args.tokenizer).get_vocab(with_added_tokens=True)
        size, eos_id = max(vocabulary.values(), default=-1) + 1, _find_eos(args, vocabulary)
    return Job(args.tokenizer, narrowest(size), size, eos_id, args.field, args.parse_special)


def _find_eos(args: Args, vocabulary: dict[str, int]) -> int:
    if args.eos is not None:
        if args.eos not in vocabulary:
            raise ValueError(f"--eos {args.eos}: {args.tokenizer} has no such token")
        return vocabulary[args.eos]
    found = [name for name in EOS_NAMES if name in vocabulary]
    if len(found) != 1:
        has = " and ".join(found) if found else f"none of {' '.join(EOS_NAMES)}"
        raise ValueError(f"--eos: {args.tokenizer} has {has}; name the token that ends a document")
    return vocabulary[found[0]]


def _results(
    pool: Executor, job: Job, batches: Iterable[Batch], ahead: int
) -> Iterator[tuple[Batch, np.ndarray, int]]:
    """(batch, ids, documents) in the order of the batches, of which `ahead` are under way."""
    queue = deque()
    for batch in batches:
        queue.append((batch, pool.submit(tokenize, job, batch)))
        if len(queue) > ahead:
            batch, future = queue.popleft()
            yield batch, *future.result()
    for batch, future in queue:
        yield batch, *future.result()


def _require_documents(files: list[Path], documents: list[int], start: int, stop: int) -> None:
    """Files start to stop - 1 were read to their end and must have had something."""
    for k in range(start, stop):
        if not documents[k]:
            raise ValueError(f"--input {files[k]}: there is no document in it")


def fill(partial: Partial, pool: Executor, job: Job, files: list[Path], ahead: int) -> None:
    """Tokenise what is left of the input into `partial`."""
    before = [0, *itertools.accumulate(path.stat().st_size for path in files)]
    progress = Progress(before[-1])
    try:
        for batch, ids, documents in _results(pool, job, read_batches(files, partial.at), ahead):
            _require_documents(files, partial.documents, partial.at.file, batch.end.file)
            partial.add(ids, documents, batch.end)
            progress.update(before[batch.end.file] + batch.done, len(ids))
        _require_documents(files, partial.documents, partial.at.file, len(files))
        progress.show()
    finally:
        progress.end_line()
    partial.finish_shard()


def _wanted(args: Args, job: Job, sources: list[dict]) -> dict:
    """All that the result depends on, as JSON."""
    wanted = vars(job) | dict(batch=BATCH, shard_tokens=args.shard_tokens, sources=sources)
    if job.tokenizer != BYTES:
        import tokenizers

        wanted |= dict(tokenizer_sha256=_sha256(job.tokenizer), tokenizers=tokenizers.__version__)
    return wanted


def run(args: Args) -> dict:
    """Make args.out; returns its meta. Raises ValueError, OSError; full shards are then kept."""
    for flag in ("workers", "shard_tokens"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be 1 or more")
    files, job = find_files(args.input), find_vocabulary(args)
    partial = Partial(args.out)
    workers = args.workers or os.cpu_count() or 1
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker)
    try:
        sources = [
            dict(file=str(path), bytes=path.stat().st_size, sha256=digest)
            for path, digest in zip(files, pool.map(_sha256, files), strict=True)
        ]
        partial.restore(_wanted(args, job, sources))
        fill(partial, pool, job, files, 2 * workers)
        meta = dict(
            dtype=job.dtype, vocab_size=job.vocab_size, tokenizer=BYTES, eos_id=job.eos_id,
            tokens=sum(partial.shards), documents=sum(partial.documents),
            shards={shard_name(k): tokens for k, tokens in enumerate(partial.shards)},
            sources=[s | dict(documents=n) for s, n in zip(sources, partial.documents)],
        )  # fmt: skip
        if job.tokenizer != BYTES:
            meta["tokenizer"] = "tokenizer.json"
            shutil.copyfile(job.tokenizer, partial.tokens / "tokenizer.json")
            for file in (Path(job.tokenizer).with_name(name) for name in BESIDE):
                if file.is_file():
                    shutil.copyfile(file, partial.tokens / file.name)
        partial.finish(meta)
        return meta
    except BaseException:
        partial.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def main(argv: list[str] | None = None) -> None:
    """Parse the flags and run. A user's mistake is one line on stderr and status 1."""
    import tyro  # here: workers do without it

    args = tyro.cli(Args, args=argv, prog="python -m common.tokenize_corpus")
    try:
        meta = run(args)
    except BrokenProcessPool:
        sys.exit("error: a worker died, perhaps for lack of memory; repeat with fewer --workers")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on after the last full shard")
    shards, kind = len(meta["shards"]), meta["dtype"]
    print(
        f"{args.out}: {meta['tokens']:,} tokens ({kind}), {meta['documents']:,} documents, "
        f"{shards:,} shard{'s' if shards > 1 else ''}"
    )


if __name__ == "__main__":
    main()
