"""Training checkpoints that are Hugging Face directories, resumed on any number of ranks.

    <out>/step-00000100/
        config.json  model-*.safetensors  model.safetensors.index.json    what transformers loads
        tokenizer.json ...                          copied there
        trainer/optim-00003-of-00008.safetensors    rank 3's slices of the optimizer's state
        trainer/buffers.safetensors                 small tensors no published format has room for
        trainer/state.json                          step, data position, the run's config

Optimizer state is kept as 1-D slices "parameter|kind|start": `start` counts elements from the
beginning of the whole, unsharded parameter (all experts), in row-major order. Nothing refers to
ranks, so any layout finds what it needs in the files of any other.

Saving copies a rank's part to host memory and writes it in a thread while training goes on. Every
rank writes what it holds and no rank gathers the model; ranks tell rank 0 by a file that they are
done, or what went wrong, and rank 0 renames the directory to its final name (common/rundir.py).

torch.distributed.checkpoint's Hugging Face storage (torch 2.13) is not used: it files one slice a
name and rank where a rank here owns several, holds every file's bytes in memory before writing
them, and to give a sharded model its published files it writes them twice (the consolidation
reads `sharded/` again and leaves it there, and its files lack the {"format": "pt"} metadata).
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common import hf, rundir

FORMAT = 1  # of trainer/; raised when an older reader would misread it
_WRITER, _LAST_WAIT_S = "checkpoint", 10  # the threads that write; see finish_writing
_failed: list[float] = []  # when this process did (time.monotonic)


class CheckpointError(OSError):
    """A checkpoint could not be written; the run and the older checkpoints are intact."""


# ---------------------------------------------------------------- saving


class Saver:
    """Writes a run's checkpoints in the background, one at a time.

    out: the run's directory. keep_last: how many complete checkpoints up to the newest one stay
    (None or 0: all of them). world: above 1 every rank makes a Saver and calls `save`, which uses
    the default process group; rank 0 tells how it went. timeout_s: how long rank 0 waits for the
    other ranks once its own part is written.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        keep_last: int | None,
        rank: int = 0,
        world: int = 1,
        timeout_s: float = 600.0,
    ):
        assert keep_last is None or keep_last >= 0, keep_last
        self.out, self.keep_last = Path(out), keep_last
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self.error: str | None = None  # of the last save; a rank above 0 knows its own part only
        self._lines: list[str] = []
        self._thread: threading.Thread | None = None

    def save(
        self,
        step: int,
        *,
        views: dict[str, Tensor | hf.Rows],
        hf_config: dict,
        dtype: torch.dtype,
        slices: Iterable[tuple[str, str, int, Tensor]],
        buffers: dict[str, Tensor],
        state: dict,
        files: Iterable[Path] = (),
    ) -> None:
        """Copy what <out>/step-<step> will hold and start writing it; every rank calls this.

        Waits for the previous save first. What was given may be changed as soon as it returns. A
        failed write raises nothing, it is a line of `poll`, and the next save tries again.

        views: this rank's Hugging Face name -> tensor or `hf.Rows`, saved as `dtype`; of replicas
            that name the same, one copies and writes it.
        hf_config: config.json's content.
        slices: (parameter, kind, start, 1-D tensor) of the optimizer state that this rank owns, in
            the tensor's own dtype; kinds are the optimizer's words, such as "master" or "exp_avg".
        buffers: name -> small tensor; different names on different ranks are joined.
        state: JSON values that rank 0 saves; `step`, `world` and `format` are added to them.
        files: existing files that rank 0 copies beside config.json (a tokenizer's).
        """
        self.wait()
        began, slices, files = time.monotonic(), list(slices), [Path(file) for file in files]
        record = {**state, "format": FORMAT, "step": step, "world": self.world}
        record, hf_config = json.loads(json.dumps([record, hf_config]))  # fails now, and copies
        tmp = self.out / f".tmp-step-{step:08d}"
        buffers = {name: b.detach().to("cpu", copy=True) for name, b in buffers.items()}
        mine = hf.inventory(views, dtype), buffers
        try:
            _together(self.world, lambda: rundir.prepare(self.out, tmp) if self.rank == 0 else None)
            inventories = _together(self.world, lambda: _find(self.out, tmp) or mine)
            holders = [held for held, _ in inventories]
            # A barrier too: nobody writes into a file of all ranks before it is there.
            _together(
                self.world, lambda: hf.create_shared(tmp, holders) if self.rank == 0 else None
            )
        except OSError as e:
            self._finish(step, began, tmp, str(e))
            return
        buffers = {name: b for _, part in inventories for name, b in part.items()}
        views, slices = _snapshot(holders, self.rank, views, dtype, slices)

        def write():
            hf.save_views(tmp, views, hf_config, dtype, holders=holders, rank=self.rank)
            write_slices(tmp / "trainer", slices, self.rank, self.world)
            if self.rank == 0:
                hf.write_tensors(tmp / "trainer" / "buffers.safetensors", buffers)
                for file in files:
                    with hf.writing(tmp / file.name) as f:
                        f.write(file.read_bytes())

        self.error = f"the thread that writes step {step} died"  # until it says otherwise
        # Not a daemon: a run that ends meanwhile still gets its checkpoint.
        work = step, began, tmp, record, write
        self._thread = threading.Thread(target=self._run, args=work, name=_WRITER)
        self._thread.start()

    def poll(self) -> list[str]:
        """Lines about the saves that ended since the last call: where it is, or why there is none.

        They are rank 0's; another rank has one only if it could not tell rank 0 how it went.
        """
        return [self._lines.pop(0) for _ in range(len(self._lines))]

    def wait(self) -> bool:
        """Block until nothing is being written; whether the last save went well."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.error is None

    def _run(self, step, began, tmp, record, write):
        """The thread. No process group here: its calls must come in one order on all ranks."""
        error = _attempt(write)
        if self.rank > 0:
            if untold := _attempt(lambda: _mark(tmp, self.rank, error)):
                said = error or "its part is written"
                self._lines.append(f"rank {self.rank}, step {step}: {said}; {untold}")
            self.error = error
            return
        if self.world > 1:  # also after an error here: nothing is removed under one that writes
            heard = _attempt(lambda: self._hear(tmp))
            error = f"{error} (rank 0)" if error else heard
        error = error or _attempt(lambda: rundir.commit(tmp, self.out, record, self.keep_last))
        self._finish(step, began, tmp, error)

    def _hear(self, tmp):
        """Wait for every other rank's mark. Raises OSError with what went wrong there."""
        began, errors = time.monotonic(), []
        for rank in range(1, self.world):
            mark = _mark_file(tmp, rank)
            while not mark.is_file():
                since, limit_s = began, self.timeout_s
                if _failed:
                    since, limit_s = max(began, _failed[0]), _LAST_WAIT_S
                if time.monotonic() - since > limit_s:
                    errors.append(f"not done after {limit_s:g} s (rank {rank})")
                    raise OSError("; ".join(errors))
                time.sleep(0.02)
            if error := hf.read_json(mark)["error"]:
                errors.append(f"{error} (rank {rank})")
            mark.unlink()
        if errors:
            raise OSError("; ".join(errors))

    def _finish(self, step, began, tmp, error):
        """Note how the save went; rank 0 tells, and removes what there is of a failed one."""
        self.error = error
        if self.rank > 0:
            return
        if error is None:
            took_s = time.monotonic() - began
            line = f"saved step {step} in {self.out} ({took_s:.1f} s)"
        else:
            shutil.rmtree(tmp, ignore_errors=True)
            older = latest(self.out)
            left = f"{older.name} is intact" if older else "there is no earlier checkpoint"
            left = left if _failed else f"the run goes on, {left}"
            line = f"could not save step {step}: {error}; {left}"
        self._lines.append(line)
        if _failed:  # nobody will ask
            print(line, file=sys.stderr, flush=True)


def finish_writing() -> None:
    """For a process that has failed: complete what is being written, and say on stderr how it went.

    From now on parts of other ranks, which may have failed too, are waited for 10 s.
    """
    _failed.append(time.monotonic())
    for thread in threading.enumerate():
        if thread.name == _WRITER:
            thread.join()


def save(
    out: str | Path,
    step: int,
    *,
    keep_last: int | None = None,
    rank: int = 0,
    world: int = 1,
    **content,
) -> Path:
    """Write <out>/step-<step> and return it when it is complete; arguments as for Saver.

    Raises CheckpointError on every rank where any rank has an OSError.
    """
    saver = Saver(out, keep_last=keep_last, rank=rank, world=world)
    saver.save(step, **content)
    saver.wait()
    error = _gather(world, saver.error)[0]  # rank 0 has heard everybody's
    if error:
        raise CheckpointError(f"step {step} was not saved in {out}: {error}")
    return rundir.step_dir(Path(out), step)


def write_slices(trainer: Path, slices: Iterable, rank: int, world: int) -> None:
    """Write one rank's (parameter, kind, start, 1-D tensor) into its file. Raises OSError."""
    tensors = {}
    for name, kind, start, tensor in slices:
        assert tensor.dim() == 1 and f"{name}|{kind}|{start}" not in tensors, (name, kind, start)
        tensors[f"{name}|{kind}|{start}"] = tensor
    trainer.mkdir(parents=True, exist_ok=True)
    hf.write_tensors(trainer / rundir.optim_file(rank, world), tensors)


def _snapshot(holders, rank, views, dtype, slices):
    """Host copies of the views that this rank will write, in the file's dtype, and of its slices.

    A GPU is waited for once, at the end. Pinned memory goes back to torch's cache, for the next
    save, when it has been written.
    """

    def copy(tensor, kind):
        source = tensor.detach()
        if source.is_cuda:  # cast there: only between equal types is the copy asynchronous
            source = source.to(kind).contiguous()
        host = torch.empty(source.shape, dtype=kind, device="cpu", pin_memory=source.is_cuda)
        return host.copy_(source, non_blocking=True)

    host_views = {}
    for name in hf.written_by(rank, holders):
        view = views[name]
        rows = isinstance(view, hf.Rows)
        tensor = view.tensor if rows else view
        host = copy(tensor, hf.file_dtype(tensor, dtype))
        host_views[name] = view._replace(tensor=host) if rows else host
    host_slices = [(*key, copy(tensor, tensor.dtype)) for *key, tensor in slices]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return host_views, host_slices


def _mark_file(tmp, rank):
    return tmp / "trainer" / f"rank-{rank:05d}.json"


def _mark(tmp, rank, error):
    """Tell rank 0 that this rank's part is written, or why not."""
    mark = _mark_file(tmp, rank)
    hf.write_json(mark.with_suffix(".new"), {"error": error})
    os.rename(mark.with_suffix(".new"), mark)


def _attempt(work: Callable[[], object]) -> str | None:
    """Do it; None, or why it could not be done: trouble with files must not end the run."""
    try:
        work()
    except Exception as e:
        return _reason(e)
    return None


def _reason(error):
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        said = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())  # one line


def _gather(world, value):
    """Every rank's value, in rank order."""
    everyone = [value] * world
    if world > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def _together(world: int, work: Callable[[], object]) -> list:
    """Run `work` on every rank; every rank's result, or an OSError on all if any rank has one.

    It is a barrier too: nobody returns before all are done.
    """
    try:
        mine = work(), None
    except OSError as e:
        mine = None, _reason(e)
    everyone = _gather(world, mine)
    where = [f" (rank {r})" if world > 1 else "" for r in range(world)]
    errors = [error + where[r] for r, (_, error) in enumerate(everyone) if error]
    if errors:
        raise OSError(errors[0])
    return [result for result, _ in everyone]


def _find(out, tmp):
    """Every rank must see what rank 0 has made. The listing asks a file server, not a cache."""
    if not out.is_dir() or tmp.name not in os.listdir(out):
        raise OSError(f"{tmp} of rank 0 is not seen here: --out must be on a disk that all share")


# ---------------------------------------------------------------- finding and loading


def latest(out: str | Path) -> Path | None:
    """The newest complete checkpoint in `out`, or None; half-written or damaged ones do not count.

    Complete: every file is there and each safetensors file as long as its header says.
    """
    return next((path for _, path in rundir.complete_steps(Path(out))), None)


def incomplete(out: str | Path) -> dict[Path, str]:
    """The step-* directories in `out` that `latest` passes over, newest first, and why."""
    paths = [path for _, path in rundir.candidates(Path(out)) if not path.name.startswith(".")]
    return {path: flaw for path in paths if (flaw := rundir.flaw(path))}


def load_state(path: str | Path) -> dict:
    """What `save` got as `state`, with `step`, `world` (ranks that wrote it) and `format`.

    Raises ValueError: no trainer/state.json there, or one of another format.
    """
    file = Path(path) / "trainer" / "state.json"
    if not file.is_file():
        raise ValueError(
            f"{path} is no training checkpoint (it has no trainer/state.json); --init-from starts "
            "from a plain model directory"
        )
    state = hf.read_json(file)
    if state.get("format") != FORMAT:
        raise ValueError(f"{file} has format {state.get('format')}, this code reads {FORMAT}")
    return state


def load_buffers(path: str | Path) -> dict[str, Tensor]:
    """The small named tensors of every rank, on the CPU. Raises ValueError: file missing."""
    reader = hf.Reader(Path(path) / "trainer" / "buffers.safetensors")
    return {name: reader.read(name).clone() for name in reader.names}


def load_slices(path: str | Path, wanted: Iterable[tuple[str, str, int, Tensor]]) -> None:
    """Fill each (parameter, kind, start, 1-D destination) from the slices of all ranks that wrote.

    Only the overlapping ranges are read; they are cast to the destination's dtype.

    Raises ValueError naming the parameter, the kind and the elements that no file holds.
    """
    files = sorted((Path(path) / "trainer").glob("optim-*.safetensors"))
    on_disk = {}  # (parameter, kind) -> [(start, stop, reader, key)]
    for reader in map(hf.Reader, files):
        for key in reader.names:
            name, kind, start = key.rsplit("|", 2)
            piece = int(start), int(start) + reader.shape(key)[0], reader, key
            on_disk.setdefault((name, kind), []).append(piece)
    for name, kind, start, dest in wanted:
        pieces = sorted(on_disk.get((name, kind), []), key=lambda piece: piece[:2])
        covered = _fill(dest.detach(), start, pieces)
        if covered < start + dest.numel():
            kinds = sorted({k for n, k in on_disk if n == name})
            raise ValueError(
                f"{path} lacks {kind} of {name} from element {covered} (wanted are {start} to "
                f"{start + dest.numel()}); of that parameter it has {', '.join(kinds) or 'nothing'}"
            )


def _fill(dest, start, pieces):
    """Copy what sorted pieces hold of [start, start + len(dest)); the first element not covered."""
    at, stop = start, start + dest.numel()
    for first, last, reader, key in pieces:
        if first > at or at == stop:
            break
        upto = min(last, stop)
        if upto > at:
            dest[at - start : upto - start].copy_(reader.read(key, slice(at - first, upto - first)))
            at = upto
    return at
