"""Our script, run as it is: its own build, loader and train_step, routing forced.

One process a GPU: alone, or as torchrun starts them. `--flag KEY=VALUE` of bench.throughput changes
the script's flags, `force_balance` too; learning rate and data do not matter for the time of a
step. With several GPUs a step's time is the slowest rank's, and the peak of memory the largest.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench.peers.job import Clock, Job, read, report
from common.config import check
from common.lifecycle import close, launch
from common.log import Log
from common.mesh import Mesh, start

TRACE = "trace-rank0.json"  # in the job's out


def config(script: ModuleType, job: Job) -> tuple[Any, Any]:
    """The script's Config and Model for the job. Raises ValueError for what the script refuses."""
    own = dict(
        preset=job.preset, layers=job.layers, seq_len=job.seq_len, micro_batch=job.micro_batch,
        global_batch=job.global_batch, dtype=job.dtype, compile=job.compile, lr=1e-4,
        force_balance="random", out=Path(job.out) / "ours",
    )  # fmt: skip
    run = script.Config(**own | job.flags)
    check(run, job.gpus)
    model = dataclasses.replace(script.MODELS[job.preset], num_hidden_layers=job.layers)
    script.check_model(model, run)
    return run, model


def trainer(script: ModuleType, job: Job) -> Any:
    """The script's Trainer on this process's device, from initial weights."""
    run, model = config(script, job)
    mesh = start(run)
    chunks = script.build(model, run, mesh)
    optimizer = script.build_optimizer(chunks, run, mesh)
    loader = script.Loader(("stdlib",), job.seq_len, model.vocab_size, run.seed)
    return script.Trainer(model, run, mesh, chunks, optimizer, loader)


def gather(clock: Clock, mesh: Mesh) -> None:
    """Make the clock's figures the largest over the ranks."""
    if mesh.world == 1:
        return
    values = [clock.peak_gib or 0.0, *clock.step_s]
    most = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    peak_gib, *clock.step_s = most.tolist()
    clock.peak_gib = None if clock.peak_gib is None else peak_gib


def trace(step: Callable[[Callable], Any], mesh: Mesh, path: Path) -> None:
    """Run one step more and write what rank 0 did in it to `path`, for chrome://tracing.

    `step` is given what names its parts, torch.profiler.record_function.
    """
    named = torch.profiler.record_function
    if mesh.rank:
        step(named)
        return
    with torch.profiler.profile() as profile:  # of all that is there: CPU, and CUDA
        step(named)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def main() -> None:
    job = read()
    script = importlib.import_module(job.script)
    t, clock = trainer(script, job), Clock(job)
    clock.run(lambda step: script.train_step(t, step))
    if clock.peak_gib is not None and t.replay is not None:
        clock.peak_gib += t.replay.nbytes / 2**30  # a CUDA graph's, which torch does not count
    gather(clock, t.mesh)
    if job.trace:
        after = clock.done + 1
        trace(lambda named: script.train_step(t, after, named), t.mesh, Path(job.out) / TRACE)
    if t.mesh.rank == 0:
        flags = " ".join(f"{key}={value}" for key, value in job.flags.items())
        report(clock, version="", routing=t.run.force_balance or "learned", note=flags)
    close(t, Log(None, {}))


if __name__ == "__main__":
    launch(main)
