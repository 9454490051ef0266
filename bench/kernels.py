"""Time the kernels on a GPU against torch's own, each with what belongs around it.

    python -m bench.kernels experts                 # one table a model width
    python -m bench.kernels experts --configs       # and how each kernel does when cut otherwise

Times are medians of CUDA-event timings, the L2 cache overwritten before each; routing is random,
one expert gets nothing. TFLOP/s count the routed slots, not what tiles are filled up with. The
share is of the rate of one dense 8192³ product, measured in the same run. A width runs in a
process of its own: what fails there leaves the others alone.
"""

import argparse
import os
import subprocess
import sys
import time

import torch
from torch import Tensor

from bench.experts import (
    TOKENS,
    WIDTHS,
    Operands,
    Width,
    dense_rate,
    kernels,
    make,
    micro_s,
    operands,
    speed,
    tables,
)
from kernels import grouped, grouped_wgrad

# ------------------------------------------------------------------------------------------------
# Other configs
# ------------------------------------------------------------------------------------------------


def candidates() -> dict[str, list[tuple[int, tuple]]]:
    """Kernel → [(slots of a tile, config)]; merged loops last, in case they fail."""
    two = [(128, (128, 64, 8, 4)), (128, (128, 64, 8, 3)), (128, (128, 64, 8, 4, 1)),
           (128, (128, 64, 8, 4, 16)), (128, (64, 64, 4, 3)), (64, (128, 64, 4, 3)),
           (64, (64, 64, 4, 3)), (256, (64, 64, 8, 4)), (128, (128, 128, 8, 2)),
           (128, (128, 64, 8, 4, 8, 1)), (128, (128, 64, 8, 3, 8, 1, True)),
           (128, (128, 64, 8, 4, 8, 1, True))]  # fmt: skip
    one = [(128, (256, 64, 8, 4)), (128, (256, 64, 8, 3)), (128, (256, 64, 8, 4, 1)),
           (128, (256, 64, 8, 4, 16)), (128, (128, 64, 4, 3)), (64, (256, 64, 4, 3)),
           (64, (128, 64, 4, 4)), (256, (128, 64, 8, 4)), (128, (256, 64, 8, 4, 8, 1)),
           (128, (128, 64, 4, 3, 8, 2)), (128, (256, 64, 8, 3, 8, 1, True)),
           (128, (256, 64, 8, 4, 8, 1, True))]  # fmt: skip
    back = [(128, (128, 64, 8, 4)), (128, (128, 64, 8, 3)), (128, (128, 64, 8, 4, 1)),
            (128, (256, 64, 8, 3)), (128, (64, 64, 4, 3)), (128, (128, 64, 4, 3)),
            (64, (128, 64, 4, 3)), (64, (128, 64, 4, 4)), (256, (64, 64, 8, 4)),
            (128, (128, 64, 8, 4, 8, 1)), (128, (128, 64, 8, 4, 8, 1, True))]  # fmt: skip
    first, engine = (8, 0, False, "first"), (8, 0, False, "engine")
    grad = [(128, 128, 64, 4, 5), (128, 128, 64, 4, 3), (128, 128, 64, 4, 5, *first),
            (128, 128, 64, 4, 3, *first), (128, 128, 64, 4, 5, 1), (128, 128, 32, 4, 7),
            (128, 128, 64, 8, 5), (128, 256, 64, 8, 5), (128, 256, 64, 8, 5, *first),
            (256, 128, 64, 8, 5), (256, 128, 64, 8, 5, *first), (128, 256, 64, 8, 5, 8, 1),
            (128, 128, 64, 4, 5, 8, 2), (128, 128, 64, 4, 5, *engine),
            (128, 128, 64, 4, 3, *engine), (128, 256, 64, 8, 5, *engine),
            (128, 256, 64, 8, 5, 8, 1, True),
            (128, 256, 64, 8, 5, 8, 1, True, "engine")]  # fmt: skip
    wgrads = [(0, config) for config in grad]
    return dict(up=two, down=one, down_backward=back, up_backward=one, wgrad_up=wgrads,
                wgrad_down=wgrads)  # fmt: skip


def attempts(o: Operands):
    """Every kernel with every config: (kernel, FLOPs, (block, config), function)."""

    plan, tried = o.case.plan, candidates()
    blocks = {b for name in tried for b, _ in tried[name] if b}
    tiles = {b: grouped.tiles_of(plan.offsets_E, len(plan.rows_S), b) for b in blocks}
    for name, (flops, call) in kernels(o).items():
        for block, config in tried[name]:
            if block:
                arguments = (tiles[block], grouped.Config(*config))
            else:
                arguments = (grouped_wgrad.WgradConfig(*config),)
            yield name, flops, (block, *config), lambda c=call, a=arguments: c(*a)


@torch.no_grad()
def sweep(o: Operands, title: str, rate: float, wanted, until: float) -> None:
    """Time all configs, compare each's output with the first's; print them, fastest first."""
    found: dict[str, list] = {}
    reference: dict[str, Tensor] = {}
    for name, flops, config, function in attempts(o):
        if wanted and name not in wanted or time.time() > until:
            continue
        try:
            weight = {"wgrad_up": o.case.gate_up, "wgrad_down": o.case.down}.get(name)
            if weight is not None:
                weight.main_grad.zero_()
            out = function()
            first = reference.setdefault(name, out.clone())
            error = float((out.float() - first.float()).norm() / first.float().norm())
            found.setdefault(name, []).append((micro_s(function, 20), config, error, flops))
        except Exception as problem:  # one config that cannot run
            print(f"{title} {name} {config}: {type(problem).__name__} {str(problem)[:90]!r}")
            if "CUDA error" in str(problem):
                raise
    for name, results in found.items():
        print(f"{title} {name}:")
        for us, config, error, flops in sorted(results, key=lambda result: result[0]):
            wrong = "" if error < 5e-3 else f"  WRONG {error:.1e}"
            print(f"  {speed(flops, us, rate)} {config}{wrong}")
    sys.stdout.flush()


def compile_part(width: Width, wanted, part: int, of: int) -> None:
    """Compile a share of the configs, so that a later process finds them in the cache."""
    o = operands(make(width._replace(E=16), 64))
    tried = [a for a in attempts(o) if not wanted or a[0] in wanted]
    for name, _, config, function in tried[part::of]:
        try:
            with torch.no_grad():
                function()
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"compiling {name} {config}: {type(problem).__name__} {str(problem)[:90]!r}")


# ------------------------------------------------------------------------------------------------
# Command
# ------------------------------------------------------------------------------------------------


def child(arguments: list[str], limit_s: float) -> None:
    try:
        subprocess.run([sys.executable, "-u", "-m", "bench.kernels", *arguments], timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit_s:.0f} s: {' '.join(arguments)}")


def compile_all(widths: list[str], chosen: list[str], limit_s: float = 75) -> None:
    """Compile every config in as many processes as there are cores."""
    each = max(1, min(15, os.cpu_count() or 1) // len(widths))
    command = [sys.executable, "-m", "bench.kernels", "compile", *chosen, "--of", str(each)]
    running = [
        subprocess.Popen([*command, "--widths", w, "--part", str(i)])
        for w in widths for i in range(each)
    ]  # fmt: skip
    end = time.time() + limit_s
    for process in running:
        try:
            process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()


def experts(widths: list[str], configs: bool, only: list[str], budget_s: float) -> None:
    """All widths, one after the other, within `budget_s`."""
    begin, rate = time.time(), dense_rate()
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, torch {torch.__version__}: dense 8192³ bf16 {rate / 1e12:.0f} TFLOP/s",
          flush=True)  # fmt: skip
    torch.cuda.empty_cache()
    chosen = ["--only", *only] if only else []
    if configs:
        compile_all(widths, chosen)
        print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    for kind in ("tables", "sweep") if configs else ("tables",):
        for i, width in enumerate(widths):
            left = begin + budget_s - time.time()
            share = left / (len(widths) - i) / (2 if configs and kind == "tables" else 1)
            limits = ["--rate", str(rate), "--budget-s", str(share)]
            child([kind, "--widths", width, *limits, *chosen], share + 15)
    print(f"{time.time() - begin:.0f} s in all")


def main() -> None:
    """Parse the command line, and do what it says (compile, tables, sweep: parts of experts)."""
    parser = argparse.ArgumentParser(description="Time kernels on a GPU.")
    parser.add_argument("what", nargs="?", default="experts",
                        choices=("experts", "compile", "tables", "sweep"))  # fmt: skip
    parser.add_argument("--widths", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--configs", action="store_true", help="also every other block size")
    parser.add_argument("--only", nargs="+", default=[], choices=list(candidates()),
                        help="kernels to try other block sizes of")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=165, help="stop after about that")
    parser.add_argument("--rate", type=float, help="dense FLOP/s, measured if not given")
    parser.add_argument("--part", type=int, default=0, help="share to compile")
    parser.add_argument("--of", type=int, default=1, help="number of shares")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: bench.kernels needs a GPU")
    if args.what == "experts":
        experts(args.widths, args.configs, args.only, args.budget_s)
        return
    until = time.time() + args.budget_s
    for name in args.widths:
        if args.what == "compile":
            compile_part(WIDTHS[name], args.only, args.part, args.of)
        elif args.what == "tables":
            tables(name, args.rate or dense_rate())
        else:
            for tokens in TOKENS:
                o = operands(make(WIDTHS[name], tokens))
                sweep(o, f"{name} {tokens}", args.rate or dense_rate(), args.only, until)


if __name__ == "__main__":
    main()
