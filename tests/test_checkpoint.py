"""common/checkpoint.py: resharding, what survives kills and full disks, what is kept."""

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from common import checkpoint, hf

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "common.checkpoint"])


def save(out, step, **changes):
    """A small checkpoint whose every number is its step."""
    value = torch.full((40, 3), float(step))
    arguments = {
        "views": {"a": value, "b": value[:5], "c": value.t()},
        "hf_config": {"model_type": "x"},
        "dtype": torch.float32,
        "slices": [("a", kind, 0, value.flatten()) for kind in ("master", "exp_avg")],
        "buffers": {"load": torch.full((4,), float(step))},
        "state": {"data": [step, 0]},
    }
    return checkpoint.save(out, step, **arguments | changes)


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


@pytest.mark.parametrize(
    "lost",
    ["config.json", hf.INDEX, "model-00001-of-00001.safetensors", "trainer/state.json",
     "trainer/optim-00000-of-00001.safetensors", "trainer/buffers.safetensors"],
)  # fmt: skip
def test_latest_passes_over_the_incomplete(tmp_path, lost):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / lost).unlink()
    (tmp_path / ".tmp-step-00000003").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert check_loadable(checkpoint.latest(tmp_path)) == 1


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
            try:
                save(out, new, keep_last=1)
            except Killed:
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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
        with pytest.raises(checkpoint.CheckpointError, match="step 2 was not saved"):
            save(tmp_path, 2, keep_last=1, views={"a": torch.zeros(1 << 18)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert check_loadable(checkpoint.latest(tmp_path)) == 1


def test_no_directory_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(checkpoint.CheckpointError, match="was not saved in .*file"):
        save(tmp_path / "file" / "out", 1)


def save_for_ever(out, first, advanced):
    torch.set_num_threads(1)
    for i in range(10**6):
        save(out, first + i // 2, keep_last=2)  # each step twice: replacing is killed too
        if i == 2:
            advanced.set()


def test_sigkill_while_saving(tmp_path):
    rng, step = random.Random(0), 1
    for _ in range(8):
        advanced = FORKS.Event()
        process = FORKS.Process(target=save_for_ever, args=(tmp_path, step, advanced))
        process.start()
        assert advanced.wait(60)
        time.sleep(rng.uniform(0.0, 0.1))
        process.kill()
        process.join()
        newest = check_loadable(checkpoint.latest(tmp_path))
        assert newest > step
        step = newest


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
    if rank == 1:  # its next write fails, and both ranks must say so
        hf.write_tensors = broken
    try:
        save(out, 2, **arguments)
    except checkpoint.CheckpointError as e:
        (Path(out) / f"error-{rank}").write_text(str(e))
    dist.destroy_process_group()


def full_disk(*args):
    """In place of hf.write_tensors on one rank."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_two_ranks_write_one_checkpoint_and_fail_together(tmp_path):
    out, store = tmp_path / "out", tmp_path / "store"
    ranks = [
        FORKS.Process(target=save_on_rank, args=(rank, 2, store, out, full_disk))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        assert process.exitcode == 0
    path = checkpoint.latest(out)
    assert path.name == "step-00000001" and not list(out.glob(".tmp-*"))
    for rank in range(2):
        assert "No space left on device (rank 1)" in (out / f"error-{rank}").read_text()
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
