"""Our script, run as it is: its own build, loader and train_step, routing forced.

One process. `--flag KEY=VALUE` of bench.throughput changes the script's flags, `force_balance`
too; learning rate and data do not matter for the time of a step.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from bench.peers.job import Clock, Job, device, read, report
from common.config import check
from common.mesh import build as build_mesh


def config(script, job: Job):
    """The script's Config for the job. Raises ValueError for what it refuses."""
    own = dict(
        preset=job.preset, layers=job.layers, seq_len=job.seq_len, micro_batch=job.micro_batch,
        global_batch=job.global_batch, dtype=job.dtype, compile=job.compile, lr=1e-4,
        force_balance="random", out=Path(job.out) / "ours",
    )  # fmt: skip
    run = script.Config(**own | job.flags)
    check(run, 1)
    return run


def trainer(script, job: Job) -> Any:
    """The script's Trainer on this machine's device, from initial weights."""
    run, model = config(script, job), script.MODELS[job.preset]
    model = dataclasses.replace(model, num_hidden_layers=job.layers)
    script.check_model(model, run)
    mesh = build_mesh(run, device())
    chunks = script.build(model, run, mesh)
    optimizer = script.build_optimizer(chunks, run, mesh)
    loader = script.Loader(("stdlib",), job.seq_len, model.vocab_size, run.seed)
    return script.Trainer(model, run, mesh, chunks, optimizer, loader)


def main() -> None:
    job = read()
    script = importlib.import_module(job.script)
    t, clock = trainer(script, job), Clock(job)
    clock.run(lambda step: script.train_step(t, step))
    flags = " ".join(f"{key}={value}" for key, value in job.flags.items())
    report(clock, version="", routing=t.run.force_balance or "learned", note=flags)


if __name__ == "__main__":
    main()
