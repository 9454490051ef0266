"""Exchange, tape and the DualPipeV schedule: how micro-batches go through a rank's layers.

A layer is a generator that yields an `Exchange` where it has just launched a communication. This
file drives such generators:

- `drive(steps)` runs one to its end with autograd passing through the exchanges: the reference.
- `forward(steps, tape)` does the same but cuts autograd at every exchange and notes the cut on a
  `Tape`; `backward(tape, grads)` walks the tape in reverse: autograd of one segment, launch of
  the reverse exchange, the weight gradients that were put aside, and the turn handed over.
- `pair(f, b)` advances a forward and a backward in turns: while one waits for its communication
  the other computes. That is the whole overlap of DualPipe.
- `schedule(pp, rank, micro_batches)` yields the rank's actions, DualPipeV's eight phases
  (DeepSeek-AI DualPipe, dualpipe/dualpipev.py, MIT; the phases and their counts are theirs);
  `run(...)` executes them.

No context manager may span a yield: the other generator would run inside it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Steps = Generator["Exchange", Any, Any]  # a layer or a chunk under way
Deferred = list[Callable[[], None]]  # weight gradients put aside, oldest first


# ------------------------------------------------------------------------------------------------
# Exchange: launched when constructed, waited for when resumed
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """How the rows of an exchange travel: an all-to-all of `group`, or nowhere if it is None.

    `send_counts` and `recv_counts` are rows to and from each rank of the group (host integers).
    """

    group: Any = None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()

    def reverse(self) -> "Route":
        return Route(self.group, self.recv_counts, self.send_counts)


def launch(route: Route, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Start sending the rows of `tensors` (rows, ...) along `route`.

    Returns the buffers they arrive in, one a tensor and of its dtype, and the works to wait for.
    Without a group the tensors are where they should be already.
    """
    if route.group is None:
        return [t.detach() for t in tensors], []
    received, works = [], []
    for sent in tensors:
        buffer = sent.new_empty(sum(route.recv_counts), *sent.shape[1:])
        counts = list(route.recv_counts), list(route.send_counts)
        works.append(
            torch.distributed.all_to_all_single(
                buffer, sent.detach().contiguous(), *counts, group=route.group, async_op=True
            )
        )
        received.append(buffer)
    return received, works


class Exchange:
    """Rows of `tensors` on their way along `route`; `keep` are the other live tensors.

    Yielded by a layer, it resumes with the received tensors followed by the kept ones. All live
    tensors that carry a gradient must be sent or kept: the tape cuts autograd here. The gradient
    of a received tensor travels back along the reversed route in the received tensor's dtype.
    """

    def __init__(self, route: Route, tensors: Sequence[Tensor], keep: Sequence[Tensor] = ()):
        self.route, self.tensors, self.keep = route, tuple(tensors), tuple(keep)
        self.received, self.works = launch(route, self.tensors)

    def wait(self) -> list[Tensor]:
        """The received tensors, detached from what was sent."""
        for work in self.works:
            work.wait()
        return self.received

    def through(self) -> tuple[Tensor, ...]:
        """What the layer resumes with when autograd is to pass through the exchange."""
        if self.route.group is None:
            return self.tensors + self.keep
        return _Through.apply(self, *self.tensors) + self.keep


class _Through(torch.autograd.Function):
    """An exchange as a differentiable function: backward sends the gradients back, and waits."""

    @staticmethod
    def forward(ctx, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = exchange.route
        received = exchange.wait()
        ctx.mark_non_differentiable(*(r for r in received if not r.is_floating_point()))
        return tuple(received)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        back, works = launch(ctx.route.reverse(), grads)
        for work in works:
            work.wait()
        return None, *(g if g.is_floating_point() else None for g in back)


# ------------------------------------------------------------------------------------------------
# Tape: what a forward leaves for its backward
# ------------------------------------------------------------------------------------------------


@dataclass
class Cut:
    """Where autograd was cut: gradient edges before, leaves after (None: carries no gradient)."""

    route: Route
    sent: int  # the first `sent` of edges and leaves travelled, the others were kept
    edges: list[Any]
    leaves: list[Tensor | None]


def _edges(tensors: Sequence[Tensor]) -> list[Any]:
    """Gradient edges, not the tensors: those would stay alive until the backward."""
    return [get_gradient_edge(t) if t.requires_grad else None for t in tensors]


@dataclass
class Tape:
    """One micro-batch's passage through one chunk.

    `cut_all` cuts at exchanges without a group too, which lets one process exercise the cuts; by
    itself such an exchange is no cut, so that with ep = 1 the chunk is one plain autograd graph.
    `deferred` is the queue that the layers are given for their weight gradients.
    """

    cut_all: bool = False
    inputs: list[Tensor] = field(default_factory=list)  # leaves the chunk started from
    cuts: list[Cut] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # gradient edges of what the chunk returned
    deferred: Deferred = field(default_factory=list)

    def cut(self, exchange: Exchange) -> tuple[Tensor, ...]:
        """Wait for `exchange`, note the cut, and return what the layer goes on with."""
        if exchange.route.group is None and not self.cut_all:
            return exchange.through()
        before = exchange.tensors + exchange.keep
        after = [t.detach() for t in (*exchange.wait(), *exchange.keep)]
        for new, old in zip(after, before, strict=True):
            new.requires_grad_(old.requires_grad)
        leaves = [t if t.requires_grad else None for t in after]
        self.cuts.append(Cut(exchange.route, len(exchange.tensors), _edges(before), leaves))
        return tuple(after)

    @torch.no_grad()
    def flush(self) -> None:
        """Compute the weight gradients that were put aside."""
        for compute in self.deferred:
            compute()
        self.deferred.clear()


# ------------------------------------------------------------------------------------------------
# Driving a micro-batch
# ------------------------------------------------------------------------------------------------


def drive(steps: Steps) -> Any:
    """Run a layer or chunk to its end with autograd passing through; returns what it returns."""
    value = None
    while True:
        try:
            value = steps.send(value).through()
        except StopIteration as done:
            return done.value


def forward(steps: Steps, tape: Tape | None) -> Generator[None, None, Any]:
    """Run a chunk with its cuts on `tape`, yielding while a communication is in flight.

    Without a tape (evaluation) nothing is cut. Returns the chunk's output, detached: its gradient
    goes through the tape.
    """
    value = None
    while True:
        try:
            exchange = steps.send(value)
        except StopIteration as done:
            output = done.value
            break
        yield
        value = exchange.through() if tape is None else tape.cut(exchange)
    if tape is not None:
        tape.outputs = _edges([output])
    return output.detach()


def backward(tape: Tape, grad: Tensor, hold: bool = False) -> Generator[None, None, Any]:
    """Walk `tape` in reverse from the output's gradient; returns the gradients of its inputs.

    The weight gradients that layers put aside are computed behind each launch, or stay on the
    tape for a later `flush` if `hold`.
    """
    edges, grads = tape.outputs, [grad]
    while tape.cuts:
        cut = tape.cuts.pop()
        _run_segment(edges, grads)
        gradients = [None if leaf is None else _grad_of(leaf) for leaf in cut.leaves]
        travel = [i for i in range(cut.sent) if gradients[i] is not None]
        received, works = launch(cut.route.reverse(), [gradients[i] for i in travel])
        if not hold:
            tape.flush()
        yield
        for work in works:
            work.wait()
        for i, gradient in zip(travel, received, strict=True):
            gradients[i] = gradient
        edges, grads = cut.edges, gradients
    _run_segment(edges, grads)
    if not hold:
        tape.flush()
    return [leaf.grad for leaf in tape.inputs]


def _grad_of(leaf: Tensor) -> Tensor:
    """A leaf nobody used has no gradient, but its rank's peers wait for one."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _run_segment(edges: list[Any], grads: list[Tensor | None]) -> None:
    live = [(e, g) for e, g in zip(edges, grads, strict=True) if e is not None]
    if live:
        torch.autograd.backward(*map(list, zip(*live, strict=True)))


def pair(first: Generator | None, second: Generator | None) -> tuple[Any, Any]:
    """Advance two generators in turns until both end; returns what they return."""
    results = [None, None]
    running = deque((i, g) for i, g in enumerate((first, second)) if g is not None)
    while running:
        i, generator = running.popleft()
        try:
            next(generator)
            running.append((i, generator))
        except StopIteration as done:
            results[i] = done.value
    return results[0], results[1]


# ------------------------------------------------------------------------------------------------
# Schedule: a rank's actions, in order
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Action:
    """Forward `f`, backward `b` (both: overlapped) or weight gradients `w` of (chunk, micro-batch).

    `hold` leaves the weight gradients of `b` to a later `w`.
    """

    f: tuple[int, int] | None = None
    b: tuple[int, int] | None = None
    w: tuple[int, int] | None = None
    hold: bool = False
    phase: int = 0

    def __str__(self) -> str:
        named = {"forward": self.f, "backward": self.b, "weights": self.w}
        return " + ".join(f"{kind} {x[0]}.{x[1]}" for kind, x in named.items() if x)


def plain(micro_batches: int) -> Iterator[Action]:
    """One chunk and nothing to overlap: each micro-batch forward, then backward."""
    for m in range(micro_batches):
        yield Action(f=(0, m))
        yield Action(b=(0, m))


def schedule(pp: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """DualPipeV on rank `rank` of `pp`, which holds chunks `rank` (0) and `2·pp-1-rank` (1).

    Raises ValueError if a pipeline of pp > 1 gets fewer than 2·pp micro-batches.
    """
    if pp > 1 and micro_batches < 2 * pp:
        raise ValueError(
            f"pp {pp} needs at least {2 * pp} micro-batches, there are {micro_batches}: "
            f"raise --global-batch or lower --micro-batch"
        )
    forwards, backwards, held = [0, 0], [0, 0], deque()

    def f(chunk: int) -> tuple[int, int]:
        forwards[chunk] += 1
        return chunk, forwards[chunk] - 1

    def b(chunk: int, hold: bool = False) -> tuple[int, int]:
        backwards[chunk] += 1
        if hold:
            held.append((chunk, backwards[chunk] - 1))
        return chunk, backwards[chunk] - 1

    for _ in range(2 * (pp - rank - 1)):  # 1: fill the way down
        yield Action(f=f(0), phase=1)
    for _ in range(rank + 1):  # 2: both ways fill
        yield Action(f=f(0), phase=2)
        yield Action(f=f(1), phase=2)
    for _ in range(pp - rank - 1):  # 3: first backwards; weight gradients fill the wait
        yield Action(b=b(1, hold=True), hold=True, phase=3)
        yield Action(w=held.popleft(), phase=3)
        yield Action(f=f(1), phase=3)
    for i in range(micro_batches - 2 * pp + rank + 1):  # 4: steady, every pair overlapped
        if i == 0 and rank == pp - 1:  # the turn of the V: the first pair would wait for itself
            yield Action(f=f(0), phase=4)
            yield Action(b=b(1), phase=4)
        else:
            yield Action(f=f(0), b=b(1), phase=4)
        yield Action(f=f(1), b=b(0), phase=4)
    for _ in range(pp - rank - 1):  # 5: the way down is empty
        yield Action(b=b(1), phase=5)
        yield Action(f=f(1), b=b(0), phase=5)
    hold = False
    for i in range(rank + 1):  # 6: both drain; from the middle on, weight gradients are held back
        hold = hold or (i == (rank + 1) // 2 and rank % 2 == 1)
        yield Action(b=b(1, hold), hold=hold, phase=6)
        hold = hold or (i == (rank + 1) // 2 and rank % 2 == 0)
        yield Action(b=b(0, hold), hold=hold, phase=6)
    for _ in range(pp - rank - 1):  # 7: a weight gradient between two backwards
        yield Action(w=held.popleft(), phase=7)
        yield Action(b=b(0, hold=True), hold=True, phase=7)
    while held:  # 8: what is left of them
        yield Action(w=held.popleft(), phase=8)


# ------------------------------------------------------------------------------------------------
# Executor (one pipeline rank: both ends of every transfer are here)
# ------------------------------------------------------------------------------------------------

Chunk = Callable[[Tensor | None, Any, Deferred | None], Steps]


def run(
    chunks: Sequence[Chunk],
    batches: Sequence[Any],
    loss_grad: Tensor | None = None,
    cut_all: bool = False,
    around: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
) -> list[Tensor]:
    """Take every micro-batch through `chunks`, and back if `loss_grad` is given.

    A chunk is called as `chunk(x, batch, deferred)` and returns its steps; the first gets x =
    None, the last returns the micro-batch's loss (summed; a scalar). `loss_grad` is the gradient
    of each of these losses (scalar). Parameter gradients accumulate. One chunk goes micro-batch by
    micro-batch; two follow DualPipeV. `around` names each action for a profiler. Returns the
    losses, detached.
    """
    train, last = loss_grad is not None, len(chunks) - 1
    actions = plain(len(batches)) if last == 0 else schedule(1, 0, len(batches))
    outputs: dict[tuple[int, int], Tensor] = {}
    tapes: dict[tuple[int, int], Tape] = {}
    grads: dict[tuple[int, int], Tensor] = {}

    def start_forward(chunk: int, m: int) -> Generator:
        x = outputs.pop((chunk - 1, m)) if chunk else None
        if not train:
            return forward(chunks[chunk](x, batches[m], None), None)
        tape = tapes[chunk, m] = Tape(cut_all)
        if x is not None:
            tape.inputs = [x.requires_grad_()]
        return forward(chunks[chunk](x, batches[m], tape.deferred), tape)

    def start_backward(chunk: int, m: int, hold: bool) -> Generator:
        grad = loss_grad if chunk == last else grads.pop((chunk, m))
        return backward(tapes[chunk, m], grad, hold)

    for action in actions:
        f = start_forward(*action.f) if action.f else None
        b = start_backward(*action.b, action.hold) if action.b and train else None
        with around(str(action)):
            output, input_grads = pair(f, b)
            if action.w and train:
                tapes.pop(action.w).flush()
        if f is not None:
            outputs[action.f] = output
        if b is not None:
            chunk, m = action.b
            if chunk:
                grads[chunk - 1, m] = input_grads[0]
            if not action.hold:
                del tapes[action.b]
    return [outputs[last, m] for m in range(len(batches))]
