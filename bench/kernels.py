"""Time the kernels on a GPU: against the least that is possible, and against torch's own.

    python -m bench.kernels                                   # all, about ten minutes
    python -m bench.kernels experts --width qwen3             # one part, one model's sizes
    python -m bench.kernels attention plan --tokens 4096 --results out/kernels.csv
    python -m bench.kernels experts --configs                 # and cut otherwise

A row: kernel, shape, median µs of a micro-batch, TFLOP/s or TB/s, its floor in µs and how many
times that it takes, torch's µs and how many times ours that is. bench/measure.py says how times
and floors are made; each part's file says what its rows include. A part runs in a process of its
own (experts a process a width): what fails there leaves the others alone, and the exit status is 1.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench import attention, experts, parts
from bench.measure import COLUMNS, WIDTHS, Meter, Rates, measure_rates, where
from bench.results import ROOT, check_columns, commit_of

PARTS = {
    "experts": experts.rows, "loss": parts.loss, "embedding": parts.embedding,
    "adamw": parts.adamw, "plan": parts.plan, "router": parts.router, "attention": attention.rows,
}  # fmt: skip
TOKENS = (4096, 16384)
Job = tuple[str, list[str]]  # a part, widths


def parse(argv: list[str] | None) -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.kernels", description=__doc__, formatter_class=shown)
    add = parser.add_argument
    add("what", nargs="*", choices=(*PARTS, "all"), default="all", help="parts (%(default)s)")
    add("--width", nargs="+", default=list(WIDTHS), choices=list(WIDTHS),
        help="whose sizes (all); adamw has none")  # fmt: skip
    add("--tokens", nargs="+", type=int, default=list(TOKENS), help="of a micro-batch %(default)s")
    add("--configs", action="store_true", help="also other block sizes")
    add("--results", type=Path, help="CSV that rows are appended to")
    add("--commit", default=None, help="the version, where git cannot say it")
    add("--limit-s", type=float, default=300, help="seconds a process may take (%(default)s)")
    add("--rates", nargs=2, type=float, metavar=("FLOP/S", "BYTES/S"),
        help="of product and copy, for the floors; measured if not given")  # fmt: skip
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be measured."""
    for name, values in (("tokens", args.tokens), ("rates", args.rates or [1])):
        if min(values) <= 0:
            raise ValueError(f"--{name} {min(values):g}: must be above 0")
    if args.limit_s < 10:
        raise ValueError(f"--limit-s {args.limit_s:g}: must be at least 10")
    if args.results is not None:
        check_columns(args.results, COLUMNS)


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """What runs in a process each: parts in the order of PARTS."""
    chosen = PARTS if "all" in args.what else [p for p in PARTS if p in args.what]
    jobs: list[Job] = []
    for part in chosen:
        if part == "experts":
            jobs += [(part, [width]) for width in args.width]
        else:
            jobs.append((part, args.width[:1] if part == "adamw" else args.width))
    return jobs


def command_of(job: Job, args: argparse.Namespace, rates: Rates, commit: str) -> list[str]:
    """The command line of one job alone."""
    part, widths = job
    command = [part, "--width", *widths, "--tokens", *map(str, args.tokens), "--rates",
               *map(str, rates), "--commit", commit, "--limit-s", str(args.limit_s)]  # fmt: skip
    command += ["--configs"] if args.configs else []
    return command + (["--results", str(args.results)] if args.results else [])


def run(job: Job, args: argparse.Namespace, meter: Meter) -> None:
    """All rows of one job, here; a width that fails does not stop the next."""
    part, widths = job
    if part == "experts" and args.configs:
        from bench.sweep import compile_all

        compile_all(widths[0])
    for width in widths:
        try:
            PARTS[part](meter, width, WIDTHS[width], args.tokens, args.configs)
        except Exception as error:
            print(f"{part} {width}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            meter.failed.append(f"{part} {width}")
            if "CUDA error" in str(error):
                return


def measure(args: argparse.Namespace) -> list[str]:
    """Run every job; the names of those that failed."""
    begin, jobs, commit = time.time(), jobs_of(args), args.commit or commit_of(ROOT)
    rates = Rates(*args.rates) if args.rates else measure_rates()
    place = where(commit)
    if not args.rates:
        print(f"{place['gpu']}, torch {place['torch']}, triton {place['triton']}, {commit}: dense "
              f"8192³ bf16 {rates.product / 1e12:.0f} TFLOP/s, copy {rates.copy / 1e12:.2f} TB/s",
              flush=True)  # fmt: skip
    if len(jobs) == 1:
        meter = Meter(rates, args.results, place, until=begin + args.limit_s - 10)
        run(jobs[0], args, meter)
        return meter.failed
    failed = []
    for job in jobs:
        command = [sys.executable, "-u", "-m", "bench.kernels"]
        try:
            done = subprocess.run(
                command + command_of(job, args, rates, commit), timeout=args.limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            done = f"stopped after {args.limit_s:g} s"
        if done:
            failed.append(f"{job[0]} {' '.join(job[1])} ({done})")
    print(f"{time.time() - begin:.0f} s in all")
    return failed


def main(argv: list[str] | None = None) -> None:
    """A user's mistake is one line and status 1; so is a kernel that failed."""
    args = parse(argv)
    try:
        check(args)
        if not torch.cuda.is_available():
            raise ValueError("bench.kernels needs a CUDA device")
    except ValueError as error:
        sys.exit(f"error: {error}")
    failed = measure(args)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
