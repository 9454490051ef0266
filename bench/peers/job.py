"""What is measured, and how a contender says what it measured; shared by all of them.

A contender is `python -m bench.peers.<name> JOB.json`. It prints one line that begins with RESULT;
whatever else it prints is its log.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MARK = "RESULT "


@dataclass(frozen=True)
class Job:
    """One comparison: a model's widths and layers, the size of a step, how many steps are timed.

    `model` is the Hugging Face config of the widths, layers included; `script` and `preset` name
    ours. `flags` change our script's flags, `extra` are one peer's own arguments, appended to its
    command line where it has one. `checkout` is the peer's source. `trace`: one step more, traced.
    """

    script: str
    preset: str
    layers: int
    seq_len: int
    micro_batch: int  # sequences
    global_batch: int  # sequences, of all GPUs
    gpus: int = 1  # processes
    steps: int = 12  # timed
    warmup: int = 3  # not timed
    dtype: str = "bf16"
    compile: bool = True
    model: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    checkout: str | None = None
    trace: bool = False
    out: str = "out/throughput"

    @property
    def micro_batches(self) -> int:
        """Of one step, over all GPUs."""
        return self.global_batch // self.micro_batch

    @property
    def tokens(self) -> int:
        """Of one step, over all GPUs."""
        return self.global_batch * self.seq_len


def write(job: Job, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job), indent=1))


def read() -> Job:
    """The job whose file the command line names."""
    values = json.loads(Path(sys.argv[1]).read_text())
    return Job(**values | {"extra": tuple(values["extra"])})


def one_rank() -> None:
    """What torchrun would set for the only process of a job."""
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    alone |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=29531, TORCHELASTIC_RUN_ID="bench")
    os.environ.update({name: str(value) for name, value in alone.items()})


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Clock:
    """Times steps from outside, the device idle at both ends; warm-up steps are not kept.

    The peak of memory is the largest over the timed steps, also if a step resets the allocator's.
    Of several ranks, which end a step together, only the first prints.
    """

    def __init__(self, job: Job):
        self.job, self.done = job, 0
        self.step_s: list[float] = []
        self.peak_gib: float | None = None
        self.rank0 = os.environ.get("RANK", "0") == "0"

    def step(self, function: Callable, *args) -> Any:
        """Call `function`, one step."""
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
            if self.done == self.job.warmup:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = function(*args)
        if cuda:
            torch.cuda.synchronize()
        self.done += 1
        if self.done > self.job.warmup:
            self.step_s.append(time.perf_counter() - begin)
            if cuda:
                peak = torch.cuda.max_memory_allocated() / 2**30
                self.peak_gib = max(peak, self.peak_gib or 0)
        if self.rank0:
            print(f"step {self.done}: {time.perf_counter() - begin:.3f} s", flush=True)
        return result

    def run(self, function: Callable[[int], Any]) -> None:
        """All steps of the job; `function` is given their numbers, from 1."""
        for step in range(1, self.job.warmup + self.job.steps + 1):
            self.step(function, step)


def report(clock: Clock, *, version: str, routing: str, note: str = "") -> None:
    """Print the RESULT line: seconds of the timed steps, GiB, versions, what to know about them."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = dict(
        step_s=clock.step_s, peak_gib=clock.peak_gib, version=version, routing=routing, note=note,
        gpu=gpu, torch=torch.__version__, triton=triton,
    )  # fmt: skip
    # With its line's end in one write: another rank's may come in between.
    print(f"\n{MARK}{json.dumps(result)}\n", end="", flush=True)


def rope_theta(model: dict[str, Any]) -> float:
    """The rope base of a Hugging Face config, wherever it stands."""
    inside = model.get("rope_parameters") or model.get("rope_scaling") or {}
    return float(model.get("rope_theta") or inside.get("rope_theta") or 10000.0)


def source_version(checkout: str, version: str) -> str:
    """`version`, with the commit where the checkout is a git repository."""
    head = Path(checkout, ".git", "HEAD")
    if not head.is_file():
        return version
    ref = head.read_text().strip()
    if ref.startswith("ref: "):
        loose = head.parent / ref[5:]
        ref = loose.read_text().strip() if loose.is_file() else ""
    return f"{version} {ref[:8]}".strip()
