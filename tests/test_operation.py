"""Runs as users start them: torchrun, signals, dead ranks, full disks, bad command lines, wandb.

Processes are started where the process is the point; what only follows up (resuming what one of
them left, say) calls `main` here.
"""

import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train_qwen3_moe as script
from common import checkpoint
from common.mesh import build as build_mesh
from common.tokens import write_tokens
from tests import pool, test_parallel

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_qwen3_moe.py"
# A step takes a tenth of a second; its learning rate does not depend on --steps.
SMALL = (
    "--seq-len 16 --micro-batch 1 --global-batch 8 --layers 4 --schedule constant --warmup 0 "
    "--eval-every 0 --sample-tokens 0 --keep-last 9"
).split()


class Job:
    """A run in processes of its own, started like a user's; `world` 0: without torchrun."""

    def __init__(self, folder, world, *flags, program=SCRIPT, node=(), env=(), **popen):
        # Jobs run side by side: without `node` each finds a port of its own.
        node = node or "--standalone --local-addr 127.0.0.1".split()
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", world, *node]
        folder.mkdir(exist_ok=True)
        self.files = [folder / "stdout", folder / "stderr"]
        command = [sys.executable, *(launcher if world else []), program, *SMALL, *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}
        with open(self.files[0], "w") as out, open(self.files[1], "w") as err:
            self.process = subprocess.Popen(
                [str(part) for part in command], cwd=ROOT, env=env, stdout=out, stderr=err, **popen
            )

    @property
    def out(self):
        return self.files[0].read_text()

    @property
    def err(self):
        return self.files[1].read_text()

    def wait_for(self, text, seconds=120):
        """Until it prints `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.out:
            assert self.process.poll() is None, f"ended without {text!r}: {self.out}{self.err}"
            assert time.monotonic() < deadline, f"no {text!r} in {seconds} s: {self.out}{self.err}"
            time.sleep(0.02)

    def ends(self, seconds=120):
        """Its exit status, within `seconds`."""
        return self.process.wait(seconds)

    def kill(self):
        """Whatever is left of it; workers of torchrun have sessions of their own."""
        if self.process.poll() is None:
            for pid in children(self.process.pid):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def start(tmp_path):
    """start(world, *flags, ...) → Job. Nothing of it outlives the test."""
    jobs = []

    def begin(world, *flags, **more):
        jobs.append(Job(tmp_path / f"job{len(jobs)}", world, *flags, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def main(*flags):
    script.main([*SMALL, *map(str, flags)])


def losses(out):
    """Losses by step. A step that stands in the file twice, or a gap, is an error."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in records if "loss" in r]
    assert steps == list(range(1, len(steps) + 1)), steps
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def saved_steps(out):
    return sorted(int(path.name[5:]) for path in out.glob("step-*"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of one process: 8 steps, a checkpoint every two, evaluated after 2 and 4."""
    out = tmp_path_factory.mktemp("one")
    main("--out", out, "--steps", 4, "--save-every", 2, "--eval-every", 2, "--eval-batches", 1)
    main("--out", out, "--steps", 8, "--save-every", 2)
    assert saved_steps(out) == [2, 4, 6, 8]
    return out


def begin_from(one, step, out):
    """As if that run had been stopped after `step`."""
    shutil.copytree(one / f"step-{step:08d}", out / f"step-{step:08d}")
    shutil.copy(one / "metrics.jsonl", out)


def same_losses(out, one, upto):
    got, want = losses(out), losses(one)
    assert len(got) >= upto
    for step in range(1, upto + 1):
        assert got[step] == pytest.approx(want[step], abs=1e-4), step


# ------------------------------------------------------------------------------------------------
# Several processes
# ------------------------------------------------------------------------------------------------


def test_four_processes_train_like_one_and_one_goes_on(start, one, tmp_path):
    out = tmp_path / "run"
    evaluate = ("--eval-every", 2, "--eval-batches", 1)
    job = start(
        4, *"--pp 2 --ep 2 --steps 4 --save-every 2 --sample-tokens 3".split(), *evaluate,
        "--out", out,
    )  # fmt: skip
    assert job.ends() == 0, job.err
    lines = job.out.splitlines()
    assert len(lines) == len(set(lines)) == 10, job.out  # each by rank 0 only
    for begin in ("train_qwen3_moe tiny:", *(f"step {n}/4 |" for n in (1, 2, 3, 4)),
                  "saved step 2", "saved step 4", "no sample"):  # fmt: skip
        assert sum(line.startswith(begin) for line in lines) == 1, (begin, job.out)
    assert sum(line.startswith("eval loss") for line in lines) == 2 and "4 x cpu" in lines[0]
    evaluated = [
        [r["eval_loss"] for r in map(json.loads, open(d / "metrics.jsonl")) if "eval_loss" in r]
        for d in (out, one)
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-4) and len(evaluated[0]) == 2
    main("--out", out, "--steps", 6, "--save-every", 0)
    same_losses(out, one, 6)


def test_two_processes_go_on_from_one_hold_the_directory_and_stop_on_sigterm(
    start, one, tmp_path, capsys
):
    out = tmp_path / "run"
    begin_from(one, 2, out)
    job = start(2, *"--pp 2 --steps 1000 --save-every 0".split(), "--out", out)
    job.wait_for("step 7/1000")
    with pytest.raises(SystemExit) as refused:  # case 4: the directory is in use
        main("--out", out, "--steps", 3)
    (pid,) = re.findall(r"in use by process (\d+) on ", str(refused.value))
    assert int(pid) in children(job.process.pid) and "\n" not in str(refused.value)
    second = start(2, "--pp", 2, "--out", out)
    assert second.ends() == 1 and second.err.count(f"error: --out {out} is in use by") == 1
    assert "[rank" not in second.err  # no traceback of a rank

    job.process.send_signal(signal.SIGTERM)  # torchrun passes it on to both
    assert job.ends() != 0  # torchrun's own status
    lines = job.out.splitlines()
    last = max(losses(out))
    assert sum("resumed" in line for line in lines) == 1 and saved_steps(out) == [2, last]
    for begin in (f"stopped by SIGTERM after step {last}", f"saved step {last} "):
        assert sum(line.startswith(begin) for line in lines) == 1, job.out
    assert [line.split("/")[0] for line in lines if line.startswith("step ")] == [
        f"step {n}" for n in range(3, last + 1)
    ]
    same_losses(out, one, 7)
    capsys.readouterr()
    main("--out", out, "--steps", last + 1)
    assert f"step {last + 1}/{last + 1} |" in capsys.readouterr().out
    assert len(losses(out)) == last + 1


# A program that plants a fault and then is the script, on every rank.
PLANTED = """
import atexit, os, runpy, sys, time
sys.path.insert(0, {root!r})
from common import checkpoint
from common.optim import Optimizer
from common.tokens import DataError

def slowly(*args, plain=checkpoint.write_slices):
    time.sleep(2.5)
    plain(*args)

checkpoint.write_slices = slowly
atexit.register(time.sleep, 1000)  # as NCCL may wait at the interpreter's end

def broken(self, lr, plain=Optimizer.step, calls=[]):
    calls.append(lr)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        {fault}
    return plain(self, lr)

Optimizer.step = broken
runpy.run_path({script!r}, run_name="__main__")
"""


def plant(folder, program, fault):
    """The program's file, with the fault in it."""
    path = folder / "planted.py"
    path.write_text(program.format(root=str(ROOT), script=str(SCRIPT), fault=fault))
    return path


def end_badly(*jobs):
    """Seconds until all have ended, none of them well."""
    began = time.monotonic()
    assert all(job.ends(60) not in (0, None) for job in jobs)
    return time.monotonic() - began


@pytest.fixture
def broken_job(start, tmp_path):
    """broken_job(fault, *flags) → (Job, seconds until it ended): rank 1 of 2 fails in step 2."""

    def run(fault, *flags):
        flags = (*"--pp 2 --steps 1000".split(), *flags, "--out", tmp_path / "run")
        job = start(2, *flags, program=plant(tmp_path, PLANTED, fault))
        job.wait_for("step 1/1000")
        return job, end_badly(job)

    return run


@pytest.mark.parametrize("error", ["RuntimeError", "DataError"])
def test_an_exception_on_one_rank_ends_the_job_and_is_shown(broken_job, tmp_path, error):
    """Case 30. What the data is to blame for is one line, without a traceback."""
    fault = f"raise {error}('planted on rank 1 at step 2')"
    job, seconds = broken_job(fault, "--save-every", 1)
    assert seconds < 60 and "step 2/1000" not in job.out
    if error == "RuntimeError":
        assert "RuntimeError: planted on rank 1 at step 2" in job.err and "in broken" in job.err
        root_cause = job.err.split("Root Cause")[1]  # torchrun's summary
        assert "rank      : 1 " in root_cause and "planted on rank 1 at step 2" in root_cause
    else:
        assert "error: planted on rank 1 at step 2\n" in job.err and "[rank1]" not in job.err
    assert saved_steps(tmp_path / "run") == [1]  # which was being written


def test_a_rank_that_hangs_ends_the_job_after_the_timeout(broken_job):
    fault = "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(1000)"
    job, seconds = broken_job(fault, "--save-every", 0, "--timeout", 4)
    assert seconds < 20
    assert "timed out" in job.err.lower(), job.err


def test_help_of_which_the_head_is_read():
    command = f"{sys.executable} {SCRIPT} --help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: ") and done.stderr == ""


def test_eight_processes_train_like_one(start, one, tmp_path):
    out = tmp_path / "run"
    job = start(8, *"--pp 2 --cp 2 --ep 4 --steps 2 --save-every 0".split(), "--out", out)
    assert job.ends() == 0, job.err
    same_losses(out, one, 2)


def test_a_killed_rank_ends_the_job_and_the_run_goes_on_from_its_checkpoint(start, one, tmp_path):
    """Cases 25 and 30; half a line in metrics.jsonl, as a kill in mid-write leaves it."""
    out = tmp_path / "run"
    job = start(2, *"--ep 2 --steps 1000 --save-every 3".split(), "--out", out)
    job.wait_for("saved step 3 ")
    job.wait_for("step 5/1000")
    (pid,) = re.findall(r"process (\d+) on", (out / ".lock").read_text())  # rank 0
    assert int(pid) in children(job.process.pid)
    os.kill(int(pid), signal.SIGKILL)
    assert job.ends(60) not in (0, None) and "SIGKILL" in job.err

    with open(out / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 99, "lo')
    step = int(checkpoint.latest(out).name[5:])
    assert step >= 3 and step % 3 == 0
    main("--out", out, "--steps", step + 4, "--save-every", 0)
    assert len(losses(out)) == step + 4
    same_losses(out, one, 7)


# A program that is the script, on GPUs that ranks may share. Rank 1 fails in the third step
# that a CUDA graph replays.
PLANTED_ON_GPUS = """
import os, runpy, signal, sys, torch
sys.path.insert(0, {root!r})
from tests.pool import gpu_of

rank, replay = int(os.environ["RANK"]), torch.cuda.CUDAGraph.replay
os.environ["LOCAL_RANK"] = str(gpu_of(rank))

def broken(self, calls=[]):
    calls.append(self)
    if len(calls) == 3 and rank == 1:
        {fault}
    replay(self)

torch.cuda.CUDAGraph.replay = broken
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "fault, shown",
    [
        ("raise RuntimeError('planted')", "RuntimeError: planted"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
def test_a_recorded_job_ends_on_all_nodes_when_a_rank_fails(start, tmp_path, nodes, fault, shown):
    """Case 30, with exchanges that wait in a CUDA graph for ever."""
    program = plant(tmp_path, PLANTED_ON_GPUS, fault)
    flags = "--ep 2 --dtype bf16 --seq-len 128 --steps 1000 --save-every 0 --out".split()
    port = 29500 + os.getpid() % 1000
    meet = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {port} --node-rank".split()
    places = [()] if nodes == 1 else [(*meet, 0), (*meet, 1)]
    jobs = [
        start(2 // nodes, *flags, tmp_path / "run", program=program, node=node) for node in places
    ]
    jobs[0].wait_for("step 2/1000")
    assert end_badly(*jobs) < 60
    assert shown in jobs[-1].err


# ------------------------------------------------------------------------------------------------
# One process
# ------------------------------------------------------------------------------------------------


def test_signals_end_a_run_after_a_saved_step_and_it_goes_on_at_the_next(start, tmp_path):
    """SIGTERM, then Ctrl-C in the run that resumes. Meanwhile the directory is taken; wandb runs
    along without a network, and the second run is the first one's continuation there.
    """
    out = tmp_path / "run"
    flags = (*"--steps 1000 --save-every 0 --wandb tests".split(), "--out", out)
    env = dict(WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    first = 1
    for name in ("SIGTERM", "SIGINT"):
        job = start(0, *flags, env=env)
        job.wait_for(f"step {first + 1}/1000")
        if name == "SIGTERM":
            second = start(0, "--steps", 2, "--out", out)
            assert second.ends() == 1 and second.out == ""
            said = f"error: --out {out} is in use by process {job.process.pid} on "
            assert second.err.startswith(said) and second.err.count("\n") == 1, second.err
        job.process.send_signal(signal.Signals[name])
        assert job.ends() == 0 and job.err == "", job.err
        last = max(losses(out))
        assert f"stopped by {name} after step {last}\n" in job.out
        assert f"saved step {last} " in job.out and last in saved_steps(out)
        assert re.findall(r"^step (\d+)/", job.out, re.M)[0] == str(first)
        assert "wandb" not in job.out  # it says so where it fails
        first = last + 1
    files = sorted(tmp_path.rglob("run-*.wandb"))
    name = (out / "wandb-id").read_text().strip()
    assert len(files) == 2 and {file.name for file in files} == {f"run-{name}.wandb"}
    assert all(file.stat().st_size > 0 for file in files)


def test_a_full_disk_costs_the_checkpoint_not_the_run(start, one, tmp_path):
    """A limit on the size of files stands for the disk: what would go beyond it fails.

    metrics.jsonl begins just below the limit, so that it cannot grow either.
    """
    out = tmp_path / "run"
    begin_from(one, 2, out)
    pad = 199_900 - len(json.dumps({"step": 0, "pad": ""}) + "\n")
    (out / "metrics.jsonl").write_text(json.dumps({"step": 0, "pad": "x" * pad}) + "\n")
    older = {p: p.read_bytes() for p in (out / "step-00000002").rglob("*") if p.is_file()}
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    flags = "--steps 5 --save-every 1 --keep-last 1 --out".split()
    job = start(0, *flags, out, preexec_fn=limit)
    assert job.ends() == 1
    assert job.err == "error: the last checkpoint could not be written\n"
    for step in (3, 4, 5):
        (line,) = re.findall(f"^could not save step {step}: .*", job.out, re.M)
        assert "File too large" in line and "step-00000002 is intact" in line
        assert f"step {step}/5 |" in job.out
    assert "metrics.jsonl" in job.out
    assert saved_steps(out) == [2] and checkpoint.latest(out).name == "step-00000002"
    assert all(path.read_bytes() == content for path, content in older.items())
    assert not list(out.glob(".tmp*"))


# ------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------


def damaged(folder):
    """A token directory whose tenth sample, so one of step 2's, has an id it must not have."""
    ids = np.arange(16 * 21 + 1) % 250
    write_tokens(folder, ids, dict(vocab_size=256, tokenizer=None, eos_id=None))
    _, sample = script.Loader((str(folder),), 16, 257, 0).take(10)[9]
    ids[16 * sample + 5] = 256
    ids.astype("<u2").tofile(folder / "00000.bin")
    return 16 * sample + 5


def test_bad_command_lines_end_at_once_without_a_traceback(start, tmp_path):
    """Case 27. The world is torchrun's variable alone: no process group could be made."""
    data = tmp_path / "data"
    offset = damaged(data)
    lines = {
        "--stesp 3": (1, 2, "--stesp"),
        "--pp 3": (2, 1, "--pp 3 --cp 1: pp * cp = 3 does not divide the 2 ranks; it can be 1, 2"),
        "--micro-batch 3": (1, 1, "--global-batch 8: not a multiple of --micro-batch 3 "),
        "--global-batch 9 --ep 3": (3, 1, "--ep 3 does not divide num_experts 8; use one of [1, 2"),
        f"--data {data}": (1, 1, f"token 256 at offset {offset} (in tokens) of {data}/00000.bin"),
    }
    jobs = []
    for i, (flags, (world, _, _)) in enumerate(lines.items()):
        env = dict(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0")
        jobs.append(start(0, *flags.split(), "--out", tmp_path / f"out{i}", env=env))
    for job, (flags, (_, status, said)) in zip(jobs, lines.items()):
        assert job.ends() == status and said in job.err, (flags, job.err)
        assert "Traceback" not in job.err
        if flags != "--stesp 3":  # tyro frames its message
            assert job.err.startswith("error: ") and job.err.count("\n") == 1, job.err
    assert "step 1/" in jobs[-1].out and "step 2/" not in jobs[-1].out
    assert not any((tmp_path / f"out{i}").exists() for i in range(4))  # refused before that


# ------------------------------------------------------------------------------------------------
# Ranks of the pool
# ------------------------------------------------------------------------------------------------


def memory(rank, world, axes, counted):
    """(tensors alive, resident bytes) after each of the counted steps of a very small model."""
    run = test_parallel.config(dtype="fp32", seq_len=8, **axes)
    t = test_parallel.trainer(run, build_mesh(run, torch.device("cpu")))
    found = []
    for step in range(1, counted[-1] + 1):
        script.train_step(t, step)
        if step in counted:
            script.evaluate(t)
            t.batches.close()
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
            found.append((tensors, pages * os.sysconf("SC_PAGE_SIZE")))
    return found


@pytest.mark.parametrize("world,axes,counted", [
    (1, dict(layers=1, global_batch=1), (50, 200)),
    (1, dict(recompute="layer", global_batch=2), (5, 15)),
    (1, dict(wgrad_batch=2, global_batch=4), (5, 15)),
    (2, dict(pp=2, global_batch=4), (5, 15)),
    (2, dict(ep=2, recompute="experts", global_batch=4), (5, 15)),
])  # fmt: skip
def test_memory_does_not_grow_with_the_steps(world, axes, counted):
    """Tapes, held weight gradients, transfers and batches are gone when a step ends."""
    for (tensors, resident), (later_tensors, later_resident) in pool.run(
        world, memory, axes, counted
    ):
        assert later_tensors == tensors
        assert later_resident - resident < max(0.02 * resident, 4 * 2**20)


def stops(rank, world):
    run = test_parallel.config(pp=2)
    t = test_parallel.trainer(run, build_mesh(run, torch.device("cpu")))

    def asked():  # on one rank, in the second step
        return rank == 1 and t.optimizer.t == 2

    return [script.train_step(t, step, stop=asked)["stop"] for step in (1, 2)]


def test_a_signal_to_one_rank_stops_all_of_them():
    assert pool.run(2, stops) == [[False, True]] * 2
