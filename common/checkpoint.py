"""Training checkpoints that are Hugging Face directories, resumed on any number of ranks.

    <out>/step-00000100/
        config.json  model-*.safetensors  model.safetensors.index.json    what transformers loads
        trainer/optim-00003-of-00008.safetensors    rank 3's slices of the optimizer's state
        trainer/buffers.safetensors                 small tensors no published format has room for
        trainer/state.json                          step, data position, the run's config

Optimizer state is kept as 1-D slices "parameter|kind|start": `start` counts elements from the
beginning of the whole, unsharded parameter (all experts), in row-major order. Nothing refers to
ranks, so any layout finds what it needs in the files of any other.

A checkpoint is written beside (`.tmp-step-*`), fsynced, state.json last, and then renamed: a
directory called step-* is complete, whenever the run is killed. Every rank writes what it holds
and no rank gathers the model.

torch.distributed.checkpoint's Hugging Face storage (torch 2.13) is not used: it files one slice a
name and rank where a rank here owns several, holds every file's bytes in memory before writing
them, and to give a sharded model its published files it writes them twice (the consolidation
reads `sharded/` again and leaves it there, and its files lack the {"format": "pt"} metadata).
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from common import hf

FORMAT = 1  # of trainer/; raised when an older reader would misread it


class CheckpointError(OSError):
    """A checkpoint could not be written; the run and the older checkpoints are intact."""


# ---------------------------------------------------------------- saving


def save(
    out: str | Path,
    step: int,
    *,
    views: dict[str, Tensor],
    hf_config: dict,
    dtype,
    slices: Iterable[tuple[str, str, int, Tensor]],
    buffers: dict[str, Tensor],
    state: dict,
    keep_last: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Path:
    """Write <out>/step-<step> from all ranks (each calls it), then delete the oldest ones.

    views: this rank's Hugging Face name -> tensor, saved as `dtype`; replicas may name the same.
    hf_config: config.json's content.
    slices: (parameter, kind, start, 1-D tensor) of the optimizer state that this rank owns, in
        the tensor's own dtype; kinds are the optimizer's words, such as "master" or "exp_avg".
    buffers: name -> small tensor; different names on different ranks are joined.
    state: JSON values that rank 0 saves; `step`, `world` and `format` are added to them.
    keep_last: how many complete checkpoints up to this step stay (None or 0: all of them).
    world: above 1 the default process group is used to agree on the files and on errors.

    Returns the directory. Raises CheckpointError on every rank where any rank has an OSError.
    """
    assert keep_last is None or keep_last >= 0, keep_last
    record = {**state, "format": FORMAT, "step": step, "world": world}
    json.dumps(record)  # fails here rather than after everything else was written
    out = Path(out)
    tmp, final = out / f".tmp-step-{step:08d}", out / f"step-{step:08d}"
    inventory = hf.nbytes(views, dtype), {k: b.detach().cpu() for k, b in buffers.items()}

    def write():
        hf.save_views(tmp, views, hf_config, dtype, holders=holders, rank=rank)
        write_slices(tmp / "trainer", slices, rank, world)
        if rank == 0:
            joined = {name: b for _, part in inventories for name, b in part.items()}
            hf.write_tensors(tmp / "trainer" / "buffers.safetensors", joined)

    try:
        _together(world, lambda: _prepare(out, tmp) if rank == 0 else None)
        inventories = _together(world, lambda: inventory)
        holders = [sizes for sizes, _ in inventories]
        _together(world, write)
        _together(world, lambda: _commit(tmp, final, record, keep_last) if rank == 0 else None)
    except OSError as e:
        if rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        raise CheckpointError(f"step {step} was not saved in {out}: {e}") from e
    return final


def write_slices(trainer: Path, slices: Iterable, rank: int, world: int) -> None:
    """Write one rank's (parameter, kind, start, 1-D tensor) into its file. Raises OSError."""
    tensors = {}
    for name, kind, start, tensor in slices:
        assert tensor.dim() == 1 and f"{name}|{kind}|{start}" not in tensors, (name, kind, start)
        tensors[f"{name}|{kind}|{start}"] = tensor
    trainer.mkdir(parents=True, exist_ok=True)
    hf.write_tensors(trainer / _optim_file(rank, world), tensors)


def _optim_file(rank, world):
    return f"optim-{rank:05d}-of-{world:05d}.safetensors"


def _together(world: int, work: Callable[[], object]) -> list:
    """Run `work` on every rank; every rank's result, or an OSError on all if any rank has one.

    It is a barrier too: nobody returns before all are done, so that nobody waits in the next phase
    for a rank whose disk was full in this one.
    """
    if world == 1:
        return [work()]
    try:
        mine = work(), None
    except OSError as e:
        mine = None, str(e)
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    errors = [f"{error} (rank {r})" for r, (_, error) in enumerate(everyone) if error]
    if errors:
        raise OSError(errors[0])
    return [result for result, _ in everyone]


def _prepare(out, tmp):
    """Clear what an interrupted save left behind and make the directory to write in."""
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    for aside in out.glob(".old-step-*"):  # killed while a step was being replaced
        final = out / aside.name.removeprefix(".old-")
        if _complete(final) or not _complete(aside):
            _delete(aside)
        else:
            _delete(final)
            os.rename(aside, final)
    tmp.mkdir()


def _commit(tmp, final, record, keep_last):
    """Make a written directory a checkpoint: state.json, disk, rename; then delete old ones."""
    hf.write_json(tmp / "trainer" / "state.json", record)
    if not _complete(tmp):
        raise OSError(f"{tmp} lacks other ranks' files: it must be on a disk that all ranks share")
    _fsync_dir(tmp / "trainer")
    _fsync_dir(tmp)
    aside = final.with_name(f".old-{final.name}")
    if final.exists():
        os.rename(final, aside)  # `latest` knows this name: there is a complete one at any time
    try:
        os.rename(tmp, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    _fsync_dir(final.parent)
    if aside.exists():
        _delete(aside)
    complete = [path for step, path in _steps(final.parent) if step <= record["step"]]
    for path in complete[:-keep_last] if keep_last else []:
        _delete(path)


def _delete(path):
    # Renamed first: half a deletion must not look like a checkpoint. What is to go is no longer
    # needed, so trouble here is no reason to say that saving failed: the next save tries again.
    doomed = path.with_name(f".tmp-delete-{path.name}")
    try:
        os.rename(path, doomed)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def _fsync_dir(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- finding and loading


def latest(out: str | Path) -> Path | None:
    """The newest complete checkpoint in `out`, or None; half-written ones do not count."""
    steps = _steps(Path(out))
    return steps[-1][1] if steps else None


def _steps(out):
    """(step, path) of every complete checkpoint, oldest first."""
    found = {}
    for path in sorted(out.glob("*step-*")):  # ".old-step-7" sorts before "step-7", which wins
        match = re.fullmatch(r"(?:\.old-)?step-(\d{8,})", path.name)
        if match and _complete(path):
            found[int(match[1])] = path
    return sorted(found.items())


def _complete(path):
    try:
        world = hf.read_json(path / "trainer" / "state.json")["world"]
        shards = set(hf.read_json(path / hf.INDEX)["weight_map"].values())
    except (ValueError, KeyError):
        return False
    trainer = [_optim_file(rank, world) for rank in range(world)] + ["buffers.safetensors"]
    files = ["config.json", *shards, *(f"trainer/{file}" for file in trainer)]
    return all((path / file).is_file() for file in files)


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
