"""The directory of a run, <out>: which checkpoints in it are complete, and whose it is.

    <out>/step-00000100/        a checkpoint (common/checkpoint.py says what is in it)
    <out>/.tmp-step-00000200/   one that is being written; rubbish after a kill
    <out>/.old-step-00000100/   one that is being replaced by another of the same step
    <out>/.lock                 names the process that uses the directory

A checkpoint is written in .tmp-*, fsynced, its state.json last, and then renamed, so that at any
time, whenever the run is killed or the disk full, what is called step-* is whole: all files are
there, each as long as its header says. There are no checksums: bytes that change later on the disk
are not noticed.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist

from common import hf
from common.mesh import from_rank_0


def step_dir(out: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return out / f"step-{step:08d}"


def optim_file(rank: int, world: int) -> str:
    """The file of a rank's optimizer slices, in trainer/."""
    return f"optim-{rank:05d}-of-{world:05d}.safetensors"


# ---------------------------------------------------------------- what is there


def candidates(out: Path) -> list[tuple[int, Path]]:
    """(step, path) of all that may be a checkpoint, newest first, step-* before .old-step-*."""
    found = []
    for path in out.glob("*step-*"):
        if match := re.fullmatch(r"(\.old-)?step-(\d{8,})", path.name):
            found.append((int(match[2]), not match[1], path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def complete_steps(out: Path) -> Iterator[tuple[int, Path]]:
    """(step, path) of every complete checkpoint, newest first; looks no further than asked."""
    previous = None
    for step, path in candidates(out):
        if step != previous and flaw(path) is None:
            previous = step
            yield step, path


def flaw(path: Path) -> str | None:
    """What keeps a directory from being a complete checkpoint, or None.

    Every file must be there and each safetensors file as long as its header says; what is in it is
    not looked at.
    """
    try:
        world = hf.read_json(path / "trainer" / "state.json").get("world")
        hf.read_json(path / "config.json")
        hf.read_json(path / hf.INDEX)  # without it, the reader would take what files there are
        hf.Reader(path)
        if not isinstance(world, int):
            return f"{path / 'trainer' / 'state.json'} has no world"
        for file in [*(optim_file(rank, world) for rank in range(world)), "buffers.safetensors"]:
            hf.Reader(path / "trainer" / file)
    except ValueError as e:
        return str(e)
    return None


# ---------------------------------------------------------------- making one


def prepare(out: Path, tmp: Path) -> None:
    """Clear what an interrupted save left behind and make the directory to write in.

    Raises OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    for aside in out.glob(".old-step-*"):  # killed while a step was being replaced
        final = out / aside.name.removeprefix(".old-")
        if flaw(final) is None or flaw(aside) is not None:
            _delete(aside)
        else:
            _delete(final)
            os.rename(aside, final)
    (tmp / "trainer").mkdir(parents=True)


def commit(tmp: Path, out: Path, record: dict, keep_last: int | None) -> None:
    """Make a written directory a checkpoint: state.json, disk, rename; then delete old ones.

    record: state.json's content, with `step`. keep_last: how many complete checkpoints up to that
    step stay (None or 0: all of them). Raises OSError, with the older ones as they were.
    """
    hf.write_json(tmp / "trainer" / "state.json", record)
    if wrong := flaw(tmp):
        raise OSError(f"it would not be complete: {wrong}")
    _fsync_dir(tmp / "trainer")
    _fsync_dir(tmp)
    final = step_dir(out, record["step"])
    aside = final.with_name(f".old-{final.name}")
    if final.exists():
        os.rename(final, aside)  # `latest` knows this name: there is a complete one at any time
    try:
        os.rename(tmp, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    _fsync_dir(out)
    if aside.exists():
        _delete(aside)
    complete = [path for step, path in complete_steps(out) if step <= record["step"]]
    for path in complete[keep_last:] if keep_last else []:
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


# ---------------------------------------------------------------- one run at a time


def lock(out: str | Path) -> BinaryIO | None:
    """Claim <out> for this job as long as the file is open that rank 0 gets; makes the directory.

    Every rank calls this. The lock is advisory (flock on <out>/.lock) and ends with rank 0's
    process, however that ends. Where the file system has no locks, nothing is claimed.

    Raises ValueError, on all ranks, that names the process that has it, or if <out> cannot be made
    or written.
    """
    file, error = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            file = _claim(Path(out))
        except ValueError as e:
            error = str(e)
    error = from_rank_0(error)
    if error is not None:
        raise ValueError(error)
    return file


def _claim(out: Path) -> BinaryIO:
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "ab+", buffering=0)
    except OSError as e:
        raise ValueError(f"--out {out}: no directory to write in ({e.strerror})") from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        file.seek(0)
        holder = file.readline(200).decode(errors="replace").strip() or "another run"
        file.close()
        raise ValueError(
            f"--out {out} is in use by {holder}: use another --out or stop that run"
        ) from e
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return file
    file.truncate(0)  # it may name a process of the past
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return file
