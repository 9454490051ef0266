"""common/checkpoint.py and rundir.py: resharding, saving in the background, kills, full disks."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from common import checkpoint, hf, rundir

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "pytest", "common.checkpoint"])


def content(step, device="cpu"):
    """A small checkpoint whose every number is its step; views and slices share memory."""
    value = torch.full((40, 3), float(step), device=device)
    return {
        "views": {"a": value, "b": value[:5], "c": value.t()},
        "hf_config": {"model_type": "x"},
        "dtype": torch.float32,
        "slices": [("a", kind, 0, value.flatten()) for kind in ("master", "exp_avg")],
        "buffers": {"load": torch.full((4,), float(step), device=device)},
        "state": {"data": [step, 0]},
    }


def save(out, step, **changes):
    """Write `content(step)`, and wait until it is there."""
    return checkpoint.save(out, step, **content(step) | changes)


def check_loadable(path):
    """Everything in the checkpoint opens and belongs to one step; the step."""
    state = checkpoint.load_state(path)
    step = state["step"]
    assert state["data"] == [step, 0]
    reader = hf.Reader(path)
    assert reader.names == {"a", "b", "c"}
    held = [reader.read(name) for name in reader.names]
    held += [*checkpoint.load_buffers(path).values()]
    for kind in ("master", "exp_avg"):
        held.append(torch.empty(120))
        checkpoint.load_slices(path, [("a", kind, 0, held[-1])])
    assert all((t == step).all() for t in held)
    return step


# ---------------------------------------------------------------- resharding


def test_slices_of_1_4_3_ranks_are_bit_identical(tmp_path):
    whole = {
        ("layers.0.q.weight", "master"): torch.randn(101),
        ("layers.0.q.weight", "exp_avg"): torch.randn(101).bfloat16(),
        ("layers.0.experts.gate_up", "master"): torch.randn(64),
        ("norm", "exp_avg_sq"): torch.randn(2).double(),
    }

    def cut(world, seed):
        """[rank][(name, kind, start, tensor)], cut at random places; some ranks get nothing."""
        rng, ranks = random.Random(seed), [[] for _ in range(world)]
        for (name, kind), t in whole.items():
            edges = sorted(rng.sample(range(1, t.numel()), min(world * 2, t.numel() - 1)))
            for start, stop in zip([0, *edges], [*edges, t.numel()]):
                ranks[rng.randrange(world)].append((name, kind, start, start, stop))
        return [[(n, k, s, whole[n, k][a:b]) for n, k, s, a, b in own] for own in ranks]

    previous = [[(n, k, 0, t) for (n, k), t in whole.items()]]
    for world in (1, 4, 3, 1):
        path = tmp_path / str(world)
        shutil.rmtree(path, ignore_errors=True)
        for rank, own in enumerate(previous):
            checkpoint.write_slices(path / "trainer", own, rank, len(previous))
        following = [
            [(n, k, s, torch.full_like(t, float("nan"))) for n, k, s, t in own]
            for own in cut(world, seed=world)
        ]
        for own in following:
            checkpoint.load_slices(path, own)
        previous = following
    for name, kind, start, t in previous[0]:
        bits = whole[name, kind][start : start + t.numel()]
        assert t.dtype == bits.dtype and torch.equal(t, bits), (name, kind, start)
    assert sum(t.numel() for *_, t in previous[0]) == sum(t.numel() for t in whole.values())


def test_a_gap_is_named(tmp_path):
    pieces = [("w", "master", 0, torch.zeros(4)), ("w", "master", 6, torch.zeros(4))]
    checkpoint.write_slices(tmp_path / "trainer", pieces, 0, 1)
    checkpoint.load_slices(tmp_path, [("w", "master", 1, torch.empty(3))])
    checkpoint.load_slices(tmp_path, [("w", "master", 5, torch.empty(0))])
    with pytest.raises(ValueError, match=r"lacks master of w from element 4 \(wanted are 2 to 7"):
        checkpoint.load_slices(tmp_path, [("w", "master", 2, torch.empty(5))])
    with pytest.raises(ValueError, match="from element 10 "):
        checkpoint.load_slices(tmp_path, [("w", "master", 8, torch.empty(5))])
    with pytest.raises(ValueError, match="lacks momentum of w .* it has master"):
        checkpoint.load_slices(tmp_path, [("w", "momentum", 0, torch.empty(1))])
    with pytest.raises(ValueError, match="lacks master of v .* it has nothing"):
        checkpoint.load_slices(tmp_path, [("v", "master", 0, torch.empty(1))])


def test_overlapping_slices_cover(tmp_path):
    t = torch.arange(10.0)
    pieces = [("w", "m", 0, t[:7]), ("w", "m", 2, t[2:4]), ("w", "m", 5, t[5:])]
    checkpoint.write_slices(tmp_path / "trainer", pieces, 0, 1)
    dest = torch.empty(8)
    checkpoint.load_slices(tmp_path, [("w", "m", 1, dest)])
    assert torch.equal(dest, t[1:9])


# ---------------------------------------------------------------- what is there afterwards


def test_save_and_load(tmp_path):
    path = save(tmp_path / "deep" / "out", 7)
    assert path.name == "step-00000007" and checkpoint.latest(path.parent) == path
    assert check_loadable(path) == 7
    state = checkpoint.load_state(path)
    assert (state["step"], state["world"], state["format"]) == (7, 1, checkpoint.FORMAT)
    assert torch.equal(hf.Reader(path).read("c"), torch.full((3, 40), 7.0))
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_state_errors(tmp_path):
    with pytest.raises(ValueError, match="no training checkpoint.*--init-from"):
        checkpoint.load_state(tmp_path)
    file = save(tmp_path, 1) / "trainer" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.load_state(checkpoint.latest(tmp_path))  # found, not silently passed over


FILES = [
    "config.json", hf.INDEX, "model-00001-of-00001.safetensors", "trainer/state.json",
    "trainer/optim-00000-of-00001.safetensors", "trainer/buffers.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", ["lost", "short", "empty"])
def test_latest_passes_over_the_incomplete(tmp_path, file, harm):
    for step in (1, 2):
        save(tmp_path, step)
    victim = tmp_path / "step-00000002" / file
    whole = victim.read_bytes()
    victim.unlink()
    if harm != "lost":  # cut in the data of a tensor, or in the middle of a JSON file
        victim.write_bytes(whole[:-3] if harm == "short" else b"")
    (tmp_path / ".tmp-step-00000003").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert check_loadable(checkpoint.latest(tmp_path)) == 1
    ((path, why),) = checkpoint.incomplete(tmp_path).items()
    assert path.name == "step-00000002" and victim.name in why and "\n" not in why
    save(tmp_path, 2)
    assert (
        checkpoint.incomplete(tmp_path) == {} and check_loadable(checkpoint.latest(tmp_path)) == 2
    )


def test_nothing_complete(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "trainer" / "state.json").write_text("[]")
    assert checkpoint.latest(tmp_path) is None
    assert [p.name[-1] for p in checkpoint.incomplete(tmp_path)] == ["2", "1"]
    assert checkpoint.incomplete(tmp_path / "nowhere") == {}


def test_keep_last_deletes_older_complete_ones_only(tmp_path):
    save(tmp_path, 90)  # newer than what follows: somebody went back to an earlier step
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / "config.json").unlink()  # not complete, so it does not count
    save(tmp_path, 5, keep_last=2)
    steps = [p.name.removeprefix("step-0000000") for p in sorted(tmp_path.glob("step-*"))]
    assert steps == ["2", "4", "5", "step-00000090"]
    save(tmp_path, 6, keep_last=0)
    assert len(list(tmp_path.glob("step-*"))) == 5
    save(tmp_path, 7, keep_last=1)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "step-00000002", "step-00000007", "step-00000090",
    ]  # fmt: skip


def test_a_replaced_step_that_cannot_be_deleted_does_not_count_twice(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    rename = os.rename

    def stuck(source, target):
        if Path(source).name.startswith(".old-"):
            raise OSError(errno.EBUSY, "busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", stuck)
    save(tmp_path, 2, keep_last=2)
    names = [".old-step-00000002", "step-00000001", "step-00000002"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_the_same_step_is_replaced_and_leftovers_go(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "step-00000003" / "stale").touch()
    (tmp_path / ".tmp-step-00000002" / "trainer").mkdir(parents=True)
    save(tmp_path, 3, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    assert not (tmp_path / "step-00000003" / "stale").exists()
    assert check_loadable(checkpoint.latest(tmp_path)) == 3


@pytest.mark.parametrize("damaged", [False, True])
def test_a_step_left_set_aside_is_put_back(tmp_path, monkeypatch, damaged):
    path = save(tmp_path, 5)
    path.rename(tmp_path / ".old-step-00000005")  # killed between the two renames of a replacement
    if damaged:
        path.mkdir()
    assert check_loadable(checkpoint.latest(tmp_path)) == 5
    monkeypatch.setattr(hf, "write_tensors", full_disk)
    with pytest.raises(checkpoint.CheckpointError):
        save(tmp_path, 6)
    assert check_loadable(checkpoint.latest(tmp_path)) == 5
    assert [p.name for p in tmp_path.glob("*step-*") if "delete" not in p.name] == [path.name]


# ---------------------------------------------------------------- failed writes and kills


def failures(monkeypatch, at, error):
    """Make the at-th of all file operations of a save raise `error`; a counter of operations."""
    calls = [0]

    def failing(original, *args, **kwargs):
        calls[0] += 1
        if calls[0] == at:
            raise error
        return original(*args, **kwargs)

    for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, partial(failing, getattr(module, name)))
    return calls


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it, so nothing is tidied up."""


@pytest.mark.parametrize("new", [6, 5])  # the next step, and the same step again
def test_killed_at_every_file_operation(tmp_path, monkeypatch, new):
    for at in range(1, 99):
        out = tmp_path / str(at)
        for step in (4, 5):
            save(out, step)
        with monkeypatch.context() as patch:
            calls = failures(patch, at, Killed())
            patch.setattr(threading, "excepthook", lambda args: None)
            try:
                save(out, new, keep_last=1)
            except (Killed, checkpoint.CheckpointError):  # in this thread, in the one that writes
                pass
        assert check_loadable(checkpoint.latest(out)) in (5, new), at
        save(out, 5, keep_last=1)  # and the next save copes with what was left
        assert check_loadable(checkpoint.latest(out)) in (5, new)
        assert not [p for p in out.iterdir() if p.name.startswith(".")], at
        if calls[0] < at:
            break
    assert 10 < at < 98  # the last round went through undisturbed


@pytest.mark.parametrize("new", [6, 5])
def test_an_oserror_at_every_file_operation(tmp_path, monkeypatch, new):
    failed = 0
    for at in range(1, 99):
        out = tmp_path / str(at)
        for step in (4, 5):
            save(out, step)
        with monkeypatch.context() as patch:
            calls = failures(patch, at, OSError(errno.ENOSPC, "No space left on device"))
            try:
                save(out, new, keep_last=1)
            except checkpoint.CheckpointError as e:
                failed += 1
                assert f"step {new} was not saved" in str(e) and "No space" in str(e)
                assert "\n" not in str(e)
        assert check_loadable(checkpoint.latest(out)) in (5, new), at
        assert new == 6 or (out / "step-00000005").is_dir()  # under its own name, not set aside
        assert not list(out.glob(".tmp-step-*")), at
        if calls[0] < at:
            break
    assert failed >= 8 and at < 98


def test_a_disk_limit_reached_in_the_middle_of_a_file(tmp_path):
    save(tmp_path, 1)
    saver = checkpoint.Saver(tmp_path, keep_last=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
        saver.save(2, **content(2) | {"views": {"a": torch.zeros(1 << 18)}})
        assert not saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (line,) = saver.poll()
    assert re.fullmatch(
        r"could not save step 2: File too large: \S+/model-00001-of-00001.safetensors; "
        "the run goes on, step-00000001 is intact",
        line,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert check_loadable(checkpoint.latest(tmp_path)) == 1


def test_no_directory_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(checkpoint.CheckpointError, match="was not saved in .*file"):
        save(out, 1)
    saver = checkpoint.Saver(out, keep_last=3)
    saver.save(1, **content(1))
    (line,) = saver.poll()
    assert line.endswith("the run goes on, there is no earlier checkpoint"), line


def train_for_ever(out, first, begun):
    """Steps that are saved, and their tensors overwritten by the next step at once."""
    torch.set_num_threads(1)
    saver, live = checkpoint.Saver(out, keep_last=2), content(0)
    for i in range(10**6):
        step = first + i // 2  # each step twice: replacing is killed too
        live["views"]["a"].fill_(step)
        live["buffers"]["load"].fill_(step)
        saver.save(step, **live | {"state": {"data": [step, 0]}})
        if saver.poll() and i >= 3:
            begun.set()


def test_sigkill_at_random_points_of_20_saves(tmp_path):
    rng, step = random.Random(0), 1
    for _ in range(20):
        begun = FORKS.Event()
        process = FORKS.Process(target=train_for_ever, args=(tmp_path, step, begun), daemon=True)
        process.start()
        assert begun.wait(60)
        time.sleep(rng.uniform(0.0, 0.04))
        process.kill()
        process.join()
        newest = check_loadable(checkpoint.latest(tmp_path))
        assert newest > step
        step = newest


# ---------------------------------------------------------------- in the background


class Gate:
    """A disk that takes nothing until it is opened, in place of hf.write_tensors."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Event()
        self.written, self.dtypes, write = [], set(), hf.write_tensors

        def wait(path, tensors, *args):
            self.reached.set()
            assert self.open.wait(60)
            self.written += map(weakref.ref, tensors.values())
            if path.name.startswith("model-"):
                self.dtypes |= {tensor.dtype for tensor in tensors.values()}
            write(path, tensors, *args)

        monkeypatch.setattr(hf, "write_tensors", wait)


def digests(path):
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_overwritten_after_save_returns_is_not_seen(tmp_path, monkeypatch, device, dtype):
    noise = torch.randn(40, 3, device=device)
    live = content(1, device) | {"dtype": dtype}
    live["views"]["a"].copy_(noise)
    live["buffers"]["count"] = torch.arange(3, device=device)
    expected = save(tmp_path / "sync", 1, **live)
    gate = Gate(monkeypatch)
    saver = checkpoint.Saver(tmp_path / "async", keep_last=None)
    saver.save(1, **live)
    assert gate.reached.wait(60) and saver.poll() == []
    for tensor in [live["views"]["a"], *live["buffers"].values()]:
        tensor.fill_(99)
    live["state"]["data"][0] = live["hf_config"]["model_type"] = 99
    live["slices"].clear()
    live["views"].clear()
    assert checkpoint.latest(tmp_path / "async") is None
    gate.open.set()
    assert saver.wait() and gate.dtypes == {dtype}  # bf16 takes half the host memory
    (line,) = saver.poll()
    assert re.fullmatch(r"saved step 1 in \S+/async \(\d+\.\d s\)", line) and saver.poll() == []
    assert digests(tmp_path / "async" / "step-00000001") == digests(expected)
    assert torch.equal(hf.Reader(expected).read("a"), noise.to("cpu", dtype))


def test_the_copies_are_freed(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.open.set()
    saver = checkpoint.Saver(tmp_path, keep_last=None)
    saver.save(1, **content(1))
    assert saver.wait() and len(gate.written) == 6 and saver.poll()
    assert all(copy() is None for copy in gate.written)
    monkeypatch.setattr(os, "rename", full_disk)
    saver.save(2, **content(2))
    assert not saver.wait() and all(copy() is None for copy in gate.written)


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    gate, saver = Gate(monkeypatch), checkpoint.Saver(tmp_path, keep_last=None)
    saver.save(1, **content(1))
    second = threading.Thread(target=lambda: saver.save(2, **content(2)))
    second.start()
    second.join(0.1)
    assert second.is_alive() and not (tmp_path / ".tmp-step-00000002").exists()
    gate.open.set()
    second.join(60)
    assert saver.wait()
    assert [line.split(" in ")[0] for line in saver.poll()] == ["saved step 1", "saved step 2"]
    assert check_loadable(checkpoint.latest(tmp_path)) == 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("a\nb")])
def test_a_failed_save_is_a_line_and_deletes_nothing(tmp_path, monkeypatch, error):
    saver = checkpoint.Saver(tmp_path, keep_last=1)
    saver.save(1, **content(1))
    saver.wait()
    saver.poll()
    for step in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(hf, "write_tensors", lambda *args: (_ for _ in ()).throw(error))
            saver.save(step, **content(step))
            assert not saver.wait()
        (line,) = saver.poll()
        said = "No space left" if isinstance(error, OSError) else "RuntimeError: a b"
        said += "; the run goes on, step-00000001 is intact"
        assert line == f"could not save step {step}: {said}"
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    saver.save(4, **content(4))
    assert saver.wait() and saver.error is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_what_was_not_written_is_no_checkpoint(tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path, keep_last=1)
    saver.save(1, **content(1))
    saver.wait()
    monkeypatch.setattr(checkpoint, "write_slices", lambda *args: None)
    saver.save(2, **content(2))
    assert not saver.wait() and "would not be complete: " in saver.poll()[1]
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(rundir, "commit", lambda *args: (_ for _ in ()).throw(Killed()))
    saver.save(3, **content(3))
    assert not saver.wait() and "step 3 died" in saver.error
    assert check_loadable(checkpoint.latest(tmp_path)) == 1


def test_files_are_copied(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokenizer.json").write_bytes(b"{}\n")
    (data / "merges.txt").write_bytes(b"a b\n")
    path = save(tmp_path / "out", 1, files=hf.tokenizer_files(data))
    assert (path / "tokenizer.json").read_bytes() == b"{}\n"
    assert (path / "merges.txt").read_bytes() == b"a b\n"
    with pytest.raises(checkpoint.CheckpointError, match="No such file.*data/vocab.json"):
        save(tmp_path / "out", 2, files=[data / "vocab.json"])


def save_and_end(out, fail):
    torch.set_num_threads(1)
    checkpoint.Saver(out, keep_last=None).save(1, **content(1))
    if fail:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback
        raise RuntimeError


@pytest.mark.parametrize("fail", [False, True])
def test_a_process_that_ends_finishes_its_save(tmp_path, fail):
    process = FORKS.Process(target=save_and_end, args=(tmp_path, fail))
    process.start()
    process.join(60)
    assert process.exitcode == int(fail)
    assert check_loadable(checkpoint.latest(tmp_path)) == 1


# ---------------------------------------------------------------- one run at a time


def hold(out, ready):
    handle = rundir.lock(out)
    ready.set()
    time.sleep(600)
    handle.close()


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path):
    ready, out = FORKS.Event(), tmp_path / "deep" / "out"
    process = FORKS.Process(target=hold, args=(out, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    with pytest.raises(ValueError) as e:
        rundir.lock(out)
    assert re.fullmatch(
        rf"--out \S+/out is in use by process {process.pid} on \S+ since [-0-9]+ [:0-9]+: "
        "use another --out or stop that run",
        str(e.value),
    )
    process.kill()
    process.join()
    handle = rundir.lock(out)  # the file is still there and names the dead one
    assert f"process {os.getpid()} on" in (out / ".lock").read_text()
    assert "\n" not in (out / ".lock").read_text().strip()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
        rundir.lock(out)
    handle.close()
    rundir.lock(out).close()
    save(out, 1)
    for path, why in ((out / ".lock", "File exists"), (out / ".lock" / "x", "Not a directory")):
        with pytest.raises(ValueError, match=rf"--out {path}: no directory to write in \({why}"):
            rundir.lock(path)
    assert sorted(p.name for p in out.iterdir()) == [".lock", "step-00000001"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, number):
    def flock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    rundir.lock(tmp_path).close()
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        rundir.lock(tmp_path)


# ---------------------------------------------------------------- many ranks


def save_on_rank(rank, world, store, out, broken):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    value = torch.arange(120.0).view(40, 3)
    arguments = {
        "views": {"a": value, "b": value[:5], f"experts.{rank}": value + rank},
        "slices": [("a", "master", 60 * rank, value.flatten()[60 * rank :][:60])],
        "buffers": {f"load.{rank}": torch.full((4,), float(rank))},
        "rank": rank,
        "world": world,
    }
    save(out, 1, **arguments)
    saver = checkpoint.Saver(
        out, keep_last=1, rank=rank, world=world, timeout_s=0.5 if broken == "mark" else 60
    )
    victim = (hf, "write_tensors") if broken == "write" else (checkpoint, "_mark")
    works = getattr(*victim)
    if rank == 1:  # its next write fails, or it cannot say that it is done
        setattr(*victim, full_disk)
    arguments = content(2) | {k: v for k, v in arguments.items() if k not in ("rank", "world")}
    saver.save(2, **arguments)
    value.fill_(99)  # what was saved is older than this
    saver.wait()
    said = [saver.poll()]
    dist.barrier()
    said.append([path.name for path in sorted(Path(out).iterdir())])
    dist.barrier()
    value.copy_(torch.arange(120.0).view(40, 3))
    setattr(*victim, works)
    saver.save(3, **arguments)
    saver.wait()
    said.append(saver.poll())
    try:
        if rank == 1:
            setattr(*victim, full_disk)
        if broken == "write":
            save(out, 4, **arguments, rank=rank, world=world)
    except checkpoint.CheckpointError as e:
        said.append(str(e))
    (Path(store).parent / f"said-{rank}").write_text(json.dumps(said))
    dist.destroy_process_group()


def full_disk(*args):
    """In place of hf.write_tensors on one rank."""
    raise OSError(errno.ENOSPC, "No space left on device")


def on_two_ranks(tmp_path, broken):
    """What each rank of `save_on_rank` said, and the run's directory."""
    out, store = tmp_path / "out", tmp_path / "store"
    ranks = [
        FORKS.Process(target=save_on_rank, args=(rank, 2, store, out, broken)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        assert process.exitcode == 0
    return *(json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)), out


def test_a_process_that_has_failed_waits_for_other_ranks_but_a_moment(
    tmp_path, monkeypatch, capsys
):
    """Rank 0's thread, while rank 1's part never comes; and it is said, as nobody will poll."""
    monkeypatch.setattr(checkpoint, "_LAST_WAIT_S", 0.3)
    monkeypatch.setattr(checkpoint, "_failed", [])
    saver = checkpoint.Saver(tmp_path, keep_last=None, world=2, timeout_s=600)
    args = 2, time.monotonic(), tmp_path / ".tmp-step-00000002", {}, lambda: None
    saver._thread = threading.Thread(target=saver._run, args=args, name=checkpoint._WRITER)
    saver._thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    checkpoint.finish_writing()
    assert not saver._thread.is_alive() and 0.3 < time.monotonic() - began < 20
    said = "could not save step 2: not done after 0.3 s (rank 1); there is no earlier checkpoint\n"
    assert capsys.readouterr().err == said


def test_a_rank_that_cannot_say_it_is_done(tmp_path):
    rank0, rank1, out = on_two_ranks(tmp_path, "mark")
    assert rank0[0] == [
        "could not save step 2: not done after 0.5 s (rank 1); the run goes on, "
        "step-00000001 is intact"
    ]
    assert rank1[0] == ["rank 1, step 2: its part is written; No space left on device"]
    assert rank0[2][0].startswith("saved step 3") and rank1[2] == []
    assert checkpoint.latest(out).name == "step-00000003"


def test_two_ranks_write_one_checkpoint_and_fail_together(tmp_path):
    rank0, rank1, out = on_two_ranks(tmp_path, "write")
    assert rank0[0] == [
        "could not save step 2: No space left on device (rank 1); the run goes on, "
        "step-00000001 is intact"
    ]
    assert rank0[1] == rank1[1] == ["step-00000001"] and rank1[0] == rank1[2] == []
    for said in (rank0, rank1):
        assert "step 4 was not saved" in said[3] and "on device (rank 1)" in said[3]
    path = checkpoint.latest(out)
    assert path.name == "step-00000003" and [p.name for p in out.iterdir()] == [path.name]
    assert not list(path.glob("trainer/rank-*"))
    value = torch.arange(120.0).view(40, 3)
    reader = hf.Reader(path)
    assert reader.names == {"a", "b", "experts.0", "experts.1"}
    assert torch.equal(reader.read("a"), value)
    assert torch.equal(reader.read("experts.1"), value + 1)
    index = hf.read_json(path / hf.INDEX)
    assert index["metadata"]["total_size"] == sum(reader.read(n).nbytes for n in reader.names)
    assert len(set(index["weight_map"].values())) == 2  # each rank wrote what it holds
    assert set(checkpoint.load_buffers(path)) == {"load.0", "load.1"}
    dest = torch.empty(100)
    checkpoint.load_slices(path, [("a", "master", 10, dest)])
    assert torch.equal(dest, value.flatten()[10:110])
