"""How the experts' kernels do when cut otherwise: `python -m bench.kernels experts --configs`.

python -m bench.sweep qwen3 PART OF      # compiles a share of the configs; started by the above
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from bench.experts import Operands, kernels, make, operands, step_work
from bench.measure import WIDTHS, Meter
from kernels import grouped, grouped_wgrad


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
    grad = [(128, 128, 64, 4, 5), (128, 128, 64, 4, 3), (128, 128, 64, 4, 5, 1),
            (128, 128, 64, 8, 5), (128, 256, 64, 8, 5), (256, 128, 64, 8, 5),
            (128, 256, 64, 8, 5, 8, 1), (128, 256, 64, 8, 7, 8, 1), (128, 128, 64, 4, 5, 8, 2),
            (128, 256, 64, 8, 5, 8, 1, True)]  # fmt: skip
    wgrads = [(0, config) for config in grad]
    return dict(up=two, down=one, down_backward=back, up_backward=one, wgrad_up=wgrads,
                wgrad_down=wgrads)  # fmt: skip


def attempts(o: Operands) -> Iterator[tuple]:
    """Every kernel with every config: (kernel, (block, config), function)."""
    plan, tried = o.case.plan, candidates()
    blocks = {b for name in tried for b, _ in tried[name] if b}
    tiles = {b: grouped.tiles_of(plan.offsets_E, len(plan.rows_S), b) for b in blocks}
    for name, call in kernels(o).items():
        for block, config in tried[name]:
            if block:
                arguments = (tiles[block], grouped.Config(*config))
            else:
                arguments = (grouped_wgrad.WgradConfig(*config),)
            yield name, (block, *config), lambda c=call, a=arguments: c(*a)


@torch.no_grad()
def sweep(meter: Meter, o: Operands, shape: str) -> None:
    """A row a config, its output compared with the first config's; the fastest of each kernel."""
    fastest: dict[str, tuple] = {}
    reference: dict[str, torch.Tensor] = {}
    todo = step_work(o.case)
    for name, config, function in attempts(o):
        if time.time() > meter.until:
            print(f"{shape}: stopped before {name} {config}")
            break
        try:
            weight = {"wgrad_up": o.case.gate_up, "wgrad_down": o.case.down}.get(name)
            if weight is not None:
                weight.main_grad.zero_()
            out = function()
            first = reference.setdefault(name, out.clone())
            error = float((out.float() - first.float()).norm() / first.float().norm())
        except Exception as problem:  # one config that cannot run
            print(f"{name} {config}: {type(problem).__name__} {str(problem)[:90]!r}")
            if "CUDA error" in str(problem):
                raise
            continue
        wrong = "" if error < 5e-3 else f" WRONG {error:.1e}"
        note = f"block, config {config}{wrong}"
        us = meter.compare(f"experts: {name}", shape, function, None, todo[name], note)
        if us is not None and not wrong:
            fastest[name] = min(fastest.get(name, (us, config)), (us, config))
    for name, (us, config) in fastest.items():
        print(f"fastest {name}, {shape}: {us:.0f} us {config}", flush=True)


def compile_part(width: str, part: int, of: int) -> None:
    """Compile a share of the configs, so that a later process finds them in the cache."""
    o = operands(make(WIDTHS[width]._replace(E=16), 64))
    for name, config, function in list(attempts(o))[part::of]:
        try:
            with torch.no_grad():
                function()
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"compiling {name} {config}: {type(problem).__name__} {str(problem)[:90]!r}")


def compile_all(width: str, limit_s: float = 75) -> None:
    """Compile every config in as many processes as there are cores."""
    each = max(1, min(15, os.cpu_count() or 1))
    command = [sys.executable, "-m", "bench.sweep", width]
    running = [subprocess.Popen([*command, str(i), str(each)]) for i in range(each)]
    end = time.time() + limit_s
    for process in running:
        try:
            process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    compile_part(sys.argv[1], *map(int, sys.argv[2:]))
