"""How bench.kernels measures: one timer, the device's two rates, rows with their floor, a CSV.

    floor = max(FLOPs / rate of one dense 8192³ bf16 product, bytes / rate of one 4 GiB copy)

FLOPs are those that the formula asks for, not what tiles are filled up with; bytes are the large
operands and results, each moved once. So a ratio of 1 is as fast as the device's best product or
copy, measured in the same run, and what a kernel can reach lies above it.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.results import append

Call = Callable[[], object]


class Width(NamedTuple):
    """E experts, D hidden, F expert width, K a token, V words; heads of queries, of keys; widths
    of keys and values; GPT-OSS's biases, activation, sinks and window, or not."""

    E: int
    D: int
    F: int
    K: int
    V: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    gpt_oss: bool = False


WIDTHS = {
    "qwen3": Width(128, 2048, 768, 8, 151936, (32, 4), (128, 128)),
    "deepseek": Width(64, 2048, 1408, 6, 102400, (16, 16), (192, 128)),
    "gpt-oss": Width(32, 2880, 2880, 4, 201088, (64, 8), (64, 64), True),
}

# ------------------------------------------------------------------------------------------------
# Time
# ------------------------------------------------------------------------------------------------

SHORT_US = 50  # below it a call is recorded REPEATS times in a row: launching a graph takes some µs
REPEATS = 20


class Timed(NamedTuple):
    us: float
    note: str = ""


def device_us(call: Call, rep_ms: float = 40) -> Timed:
    """Median time of `call` on the GPU in µs: a CUDA graph of it, replayed, L2 overwritten before.

    As in training, where the host's launches are recorded too. Calls of under 50 µs are recorded
    20 times in a row; L2 then holds what fits. What cannot be recorded is timed as the host
    launches it, which is said.
    """
    from triton.testing import do_bench

    def median_us(function: Call) -> float:
        return 1e3 * do_bench(function, warmup=10, rep=rep_ms, return_mode="median")

    call()  # compiles, chooses
    call()
    torch.cuda.synchronize()
    try:
        us = median_us(record(call).replay)
        return Timed(us if us > SHORT_US else median_us(record(call, REPEATS).replay) / REPEATS)
    except RuntimeError as error:
        if "CUDA error" in str(error) and "captur" not in str(error):
            raise
    torch.cuda.synchronize()
    return Timed(median_us(call), "launched by the host")


def record(call: Call, times: int = 1) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def host_us(call: Call, calls: int = 20) -> float:
    """µs that the host needs to launch `call`, in the median."""
    call()
    taken = []
    for _ in range(calls):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # an idle device: its queue never fills
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


class Rates(NamedTuple):
    """Of a dense bf16 product in FLOP/s, of a copy in bytes/s (read and written)."""

    product: float
    copy: float


def measure_rates(device: str = "cuda") -> Rates:
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / device_us(partial(torch.mm, a, b), 100).us * 1e6
    source = torch.ones(2**30, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / device_us(partial(target.copy_, source), 100).us * 1e6
    del a, b, source, target
    torch.cuda.empty_cache()
    return Rates(product, copy)


# ------------------------------------------------------------------------------------------------
# Rows
# ------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What must be done: floating-point operations, and bytes read and written."""

    flops: float = 0
    nbytes: float = 0

    def floor_us(self, rates: Rates) -> float | None:
        """The least µs at these rates; None where nothing is to be done."""
        return 1e6 * max(self.flops / rates.product, self.nbytes / rates.copy) or None

    def speed(self, us: float, rates: Rates) -> str:
        """TFLOP/s or TB/s, of the two the one that bounds the floor."""
        if not self.flops and not self.nbytes:
            return ""
        if self.flops / rates.product >= self.nbytes / rates.copy:
            return f"{self.flops / us / 1e6:.0f} TFLOP/s"
        return f"{self.nbytes / us / 1e6:.2f} TB/s"


NOTHING = Work()
COLUMNS = (
    "date", "commit", "gpu", "torch", "triton", "kernel", "shape", "us", "floor_us", "ratio",
    "torch_us", "note",
)  # fmt: skip
FORMS = {"us": "{:.2f}", "floor_us": "{:.2f}", "torch_us": "{:.2f}", "ratio": "{:.4g}"}


@dataclass
class Meter:
    """Takes the times, prints the rows and appends them to `results`; `where`: a row's first
    columns. Where a call fails the others go on; `failed` has the names of ours that did."""

    rates: Rates
    results: Path | None = None
    where: dict[str, str] = field(default_factory=dict)
    device: str = "cuda"
    timer: Callable[[Call], Timed] = device_us
    until: float = float("inf")  # in time.time()'s seconds; no other block size is tried after it
    failed: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def time(self, call: Call | None, what: str, ours: bool = True) -> Timed | None:
        """None if there is no call, or if it failed, which is printed."""
        if call is None:
            return None
        try:
            return self.timer(call)
        except Exception as error:
            print(f"{what}: FAILED {type(error).__name__}: {str(error)[:200]!r}", flush=True)
            if ours:
                self.failed.append(what)
            if "CUDA error" in str(error):
                raise  # nothing more can be done in this process
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return None

    def add(self, kernel, shape, us, work=NOTHING, torch_us=None, note="") -> None:
        """Print and append one row."""
        floor = work.floor_us(self.rates)
        ratio = us / floor if floor else None
        self.rows.append(dict(
            self.where, kernel=kernel, shape=shape, us=us, floor_us=floor, ratio=ratio,
            torch_us=torch_us, note=note,
        ))  # fmt: skip
        text = f"{kernel:<44} {shape:<26} {us:9.1f} us {work.speed(us, self.rates):>12}"
        text += f"  floor {floor:8.1f} x{ratio:5.2f}" if floor else " " * 23
        text += f"  torch {torch_us:9.1f} x{torch_us / us:5.2f}" if torch_us else " " * 24
        print(f"{text}  {note}".rstrip(), flush=True)
        if self.results is not None:
            append([self.rows[-1]], self.results, COLUMNS, FORMS)

    def compare(
        self, kernel, shape, ours, theirs=None, work=NOTHING, note="", per=1
    ) -> float | None:
        """A row of `ours` beside torch's; `per`: micro-batches of a call, whose time is divided."""
        mine = self.time(ours, f"{kernel} {shape}")
        other = self.time(theirs, f"{kernel} {shape}, torch", ours=False)
        if mine is None:
            return None
        torch_us = other.us / per if other else None
        self.add(kernel, shape, mine.us / per, work, torch_us, notes(note, mine, other))
        return mine.us / per

    def passes(self, kernel, shape, ours, theirs, work, note="", names=("forward", "backward")):
        """Two rows: of the first pass, and of the second as what both take over the first.

        `ours`, `theirs`: (first pass, both passes); `work`: of the first and of the second.
        """
        mine = [self.time(call, f"{kernel} {shape}") for call in ours]
        other = [self.time(call, f"{kernel} {shape}, torch", ours=False) for call in theirs]
        for i, name in enumerate(names):
            us, torch_us = (difference(times[: i + 1]) for times in (mine, other))
            if us is not None:
                said = notes(note, mine[i], other[i])
                self.add(f"{kernel} {name}", shape, us, work[i], torch_us, said)

    def variants(self, kernel, shape, module, names, cuts, call, work=NOTHING) -> None:
        """A row for each of `cuts`, values of the constants `names` of `module`."""
        for cut in cuts:
            if time.time() > self.until:
                return
            values = dict(zip(names, cut, strict=True))
            with setting(module, **values):
                said = " ".join(f"{k} {v}" for k, v in values.items())
                self.compare(kernel, shape, call, None, work, note=said)

    def extra_mib(self, call: Call) -> str:
        """Peak memory of `call` beyond what was there, as a note; empty on a CPU."""
        if self.device != "cuda":
            return ""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            call()
        except torch.OutOfMemoryError:
            return ""
        torch.cuda.synchronize()
        return f"extra {(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"


def difference(times: list[Timed | None]) -> float | None:
    """The last's µs over those before; None if one is missing."""
    if None in times:
        return None
    return times[-1].us - sum(t.us for t in times[:-1])


def notes(note: str, mine: Timed, other: Timed | None) -> str:
    said = [note, mine.note, f"torch {other.note}" if other and other.note else ""]
    return "; ".join(filter(None, said))


@contextmanager
def setting(module, **values) -> Iterator[None]:
    """Module constants changed for a while."""
    kept = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def where(commit: str) -> dict[str, str]:
    """The first columns of a row, on this machine."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return dict(date=datetime.date.today().isoformat(), commit=commit, gpu=gpu,
                torch=torch.__version__, triton=triton.__version__)  # fmt: skip
