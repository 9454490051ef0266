"""Simulate DualPipeV in unit costs and draw every rank's schedule.

    python -m bench.schedule --pp 4 --micro-batches 10

F is a forward, B a backward with its weight gradients, W these alone, of one chunk; an overlapped
pair takes F&B. The drawing has one line a rank and a column a unit of time: digits are micro-
batches, in lower case letters past 9; below each a mark for f, b, w or o (overlapped).
"""

import sys
from functools import partial

import tyro

from common import mesh
from common.dualpipev import Action
from common.mesh import Span


def cost(action: Action, F: float = 1, B: float = 2, W: float = 1, FB: float = 3) -> float:
    """What an action takes; a backward that holds its weight gradients back is W shorter."""
    if action.w:
        return W
    if action.f and action.b:
        return FB
    return F if action.f else B - W * action.hold


def simulate(pp: int, micro_batches: int, **costs: float) -> list[Span]:
    """When each rank runs each of its actions, transfers taking no time.

    Raises ValueError for sizes that no schedule has, and if the ranks wait for each other for ever.
    """
    for name, value in (("pp", pp), ("micro-batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
    return mesh.simulate(pp, micro_batches, partial(cost, **costs))


def draw(spans: list[Span]) -> str:
    """Two lines a rank: micro-batch numbers, and what is done with them."""
    width = int(max(span.end for span in spans))
    lines = []
    for rank in sorted({span.rank for span in spans}):
        numbers, marks = [" "] * width, [" "] * width
        for span in (s for s in spans if s.rank == rank):
            a = span.action
            m = (a.f or a.b or a.w)[1]
            mark = "o" if a.f and a.b else "f" if a.f else "b" if a.b else "w"
            for t in range(int(span.start), int(span.end)):
                numbers[t] = "0123456789abcdefghijklmnopqrstuvwxyz"[m % 36]
                marks[t] = mark
        lines += [f"rank {rank:2d} |{''.join(numbers)}|", f"        |{''.join(marks)}|"]
    return "\n".join(lines)


def main(pp: int = 4, micro_batches: int = 10) -> None:
    """Draw the schedule and say how much of each rank's time is idle."""
    try:
        spans = simulate(pp, micro_batches)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("f forward, b backward, w weight gradients, o overlapped f and b; digits: micro-batches")
    print(draw(spans))
    makespan = max(span.end for span in spans)
    busy = sum(span.end - span.start for span in spans) / pp
    print(f"{makespan:g} units, of which idle {makespan - busy:g} ({1 - busy / makespan:.1%})")


if __name__ == "__main__":
    tyro.cli(main)
