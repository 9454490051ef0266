"""How much of the exchanges between GPUs a trace shows hidden behind computation.

    python -m bench.throughput qwen3 --gpus 2 --flag ep=2 --trace
    python -m bench.overlap out/throughput/trace-rank0.json

Reads a trace of one rank, of --profile or of bench.throughput's --trace. Its span goes from the
first kernel's begin to the last one's end, and is made of three: a compute kernel runs; only
exchanges (NCCL kernels) run; none runs. An exchange is hidden while a compute kernel runs too. Its
time includes waiting for the other ranks, and how fast the host can launch is another under a
profiler: times are to be taken from a run without one.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

Spans = list[tuple[float, float]]  # (begin, end) in microseconds; in order and apart, from `union`
WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize")


@dataclass
class Exchange:
    """All kernels of one kind: how many, and their time together, in microseconds."""

    number: int
    us: float
    hidden_us: float

    @property
    def hidden(self) -> float:
        """Share of its time."""
        return self.hidden_us / self.us if self.us else 0.0


@dataclass
class Overlap:
    """What a trace shows; times in microseconds.

    span_us = compute_us + alone_us + idle_us: of exchanges only what runs alone. waits: by name,
    the host's calls that wait for the device, and copies to the host; (number, time).
    """

    span_us: float
    compute_us: float
    alone_us: float
    idle_us: float
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    waits: dict[str, tuple[int, float]] = field(default_factory=dict)


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The times that any of the spans covers."""
    out: Spans = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def shared(a: Spans, b: Spans) -> float:
    """For how long both are covered."""
    return length(a) + length(b) - length(union(a + b))


def kind(name: str) -> str:
    """An NCCL kernel's operation: ncclDevKernel_AllReduce_Sum_f32_RING_LL(...) is AllReduce."""
    found = re.search(r"nccl\w*kernel_([a-z]+)", name, re.IGNORECASE)
    return found[1] if found else name.partition("(")[0]


def read(path: Path) -> list[dict]:
    """A chrome trace's complete events. Raises ValueError if the file is not one."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        return [event for event in events if event.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: not a chrome trace, which is JSON with traceEvents") from None


def span_of(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def analyse(events: list[dict]) -> Overlap:
    """Raises ValueError where no kernel was traced.

    Host calls count if they begin within the span: the profiler itself waits after it.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise ValueError("no GPU kernel in it; trace on a GPU")
    kinds: dict[str, Spans] = {}
    for event in kernels:
        name = kind(event["name"]) if "nccl" in event["name"].lower() else ""
        kinds.setdefault(name, []).append(span_of(event))
    compute, busy = union(kinds.pop("", [])), union(map(span_of, kernels))
    begin, end = busy[0][0], busy[-1][1]
    compute_us, busy_us = length(compute), length(busy)
    out = Overlap(end - begin, compute_us, busy_us - compute_us, end - begin - busy_us)
    for name, spans in sorted(kinds.items()):
        covered = union(spans)
        out.exchanges[name] = Exchange(len(spans), length(covered), shared(covered, compute))
    for event in events:
        name, cat = event["name"], event.get("cat")
        call = cat in ("cuda_runtime", "cuda_driver") and WAITS.match(name)
        copy = cat == "gpu_memcpy" and "DtoH" in name
        if (call or copy) and begin <= event["ts"] < end:
            number, us = out.waits.get(name, (0, 0.0))
            out.waits[name] = number + 1, us + event["dur"]
    return out


def table(o: Overlap) -> str:
    """Markdown."""
    lines = [
        f"{o.span_us / 1e3:.3f} ms: compute {o.compute_us / 1e3:.3f}, "
        f"exchanges alone {o.alone_us / 1e3:.3f}, idle {o.idle_us / 1e3:.3f}",
        *("", "| exchange | kernels | ms | hidden |", "|---|---|---|---|"),
    ]
    for name, x in o.exchanges.items():
        lines.append(f"| {name} | {x.number} | {x.us / 1e3:.3f} | {100 * x.hidden:.1f} % |")
    lines += ["", "| the host waits | number | ms |", "|---|---|---|"]
    lines += [f"| {name} | {n} | {us / 1e3:.3f} |" for name, (n, us) in sorted(o.waits.items())]
    return "\n".join(lines)


def summary(path: Path) -> str:
    """One line on a trace, for a row of figures: "hidden: SendRecv 87 %; host waits: 2"; "" where
    no kernel was traced. Host waits are calls that wait, not the copies they wait for."""
    try:
        o = analyse(read(path))
    except ValueError:
        return ""
    shares = [f"{name} {100 * x.hidden:.0f} %" for name, x in o.exchanges.items()]
    waits = sum(number for name, (number, _) in o.waits.items() if WAITS.match(name))
    return f"hidden: {', '.join(shares) or 'no exchanges'}; host waits: {waits}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.overlap", description=__doc__, formatter_class=shown)
    parser.add_argument("trace", type=Path, help="trace-rank<R>.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """A file that is no trace, or has no kernel in it, is one line and status 1."""
    path = parse(argv).trace
    try:
        events = read(path)
    except OSError as error:
        sys.exit(f"error: {path}: cannot be read ({error.strerror})")
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        print(table(analyse(events)))
    except ValueError as error:
        sys.exit(f"error: {path}: {error}")


if __name__ == "__main__":
    main()
