"""Exchange, tape and the DualPipeV schedule: how micro-batches go through a rank's layers.

A layer is a generator that yields an `Exchange` where it has just launched a communication:

- `drive(steps)` runs one to its end with autograd passing through: the reference.
- `forward(steps, tape)` does the same but cuts autograd at every exchange and notes the cut on a
  `Tape`; `backward(tape, grads)` walks the tape in reverse: autograd of one segment, launch of
  the reverse exchange, the weight gradients that were put aside, and the turn handed over.
- `pair(f, b)` advances a forward and a backward in turns: one computes while the other waits.
- `schedule(pp, rank, micro_batches)` yields the rank's actions, DualPipeV's eight phases (their
  counts are DeepSeek-AI's, DualPipe dualpipe/dualpipev.py, MIT); `run(...)` executes them.

No context manager may span a yield: the other generator would run inside it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kernels.experts import add_together

Steps = Generator["Exchange | Counts", Any, Any]  # a layer or a chunk under way
Defer = Callable[[Callable[[], None]], None]  # takes the computation of a weight gradient
Chunk = Callable[[Tensor | None, Any, Defer | None], Steps]


# ---- Exchange: launched when constructed, waited for when resumed


@dataclass(frozen=True)
class Route:
    """How the rows of an exchange travel: an all-to-all of `group`, or nowhere if it is None."""

    group: Any = None
    send_counts: tuple[int, ...] = ()  # rows to each rank of the group, on the host
    recv_counts: tuple[int, ...] = ()

    def reverse(self) -> "Route":
        return Route(self.group, self.recv_counts, self.send_counts)


def launch(route: Route, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Start sending the rows of `tensors` (rows, ...), if there is a group: (buffers, works)."""
    if route.group is None:
        return [t.detach() for t in tensors], []
    received, works = [], []
    for sent in (t.detach().contiguous() for t in tensors):
        buffer = sent.new_empty(sum(route.recv_counts), *sent.shape[1:])
        counts = list(route.recv_counts), list(route.send_counts)
        work = dist.all_to_all_single(buffer, sent, *counts, group=route.group, async_op=True)
        works, received = [*works, work], [*received, buffer]
    return received, works


class Exchange:
    """Rows of `tensors` on their way along `route`; `keep` are the other live tensors.

    Yielded by a layer, it resumes with the received tensors, then the kept ones. All live tensors
    that carry a gradient must be sent or kept: the tape cuts autograd here. The gradient of a
    received tensor travels back along the reversed route in its dtype. `beside` is a branch of
    the layer, computed while the rows travel, its backward while their gradients do: of the last
    kept tensor, in whose place it stands.
    """

    def __init__(self, route: Route, tensors: Sequence[Tensor], keep=(), beside=None):
        self.route, self.tensors, self.keep = route, tuple(tensors), tuple(keep)
        self.received, self.works = launch(route, self.tensors)
        self.beside = beside

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()

    def through(self) -> tuple[Tensor, ...]:
        """What the layer resumes with where nothing is cut."""
        kept = self.keep
        if self.beside is not None:
            kept = (*kept[:-1], self.beside(kept[-1]))
        self.wait()
        return (self.tensors if self.route.group is None else tuple(self.received)) + kept


class Counts:
    """How many rows and slots each rank of `group` will send: counts_P2 (ranks, 2) for each.

    On a group of its own it need not queue behind the exchanges. Where no `room` (mesh.Room) is
    reserved the host waits for the numbers, in this one place of a layer.
    """

    def __init__(self, group: Any, counts_P2: Tensor, room: Any = None):
        self.room, self.both = room, torch.stack([counts_P2, torch.empty_like(counts_P2)])
        self.work = dist.all_to_all_single(self.both[1], self.both[0], group=group, async_op=True)

    def through(self) -> "Counts":
        self.work.wait()
        reserved = self.room.note(*self.both) if self.room is not None else None
        if reserved is None:
            (self.sent, _), (self.received, slots) = self.both.transpose(1, 2).tolist()
            self.received_slots = sum(slots)
        else:
            rows, self.received_slots = reserved
            self.sent = self.received = [rows] * self.both.shape[1]
        return self

    def route(self, group: Any) -> Route:
        return Route(group, tuple(self.sent), tuple(self.received))


# ---- Tape: what a forward leaves for its backward


@dataclass
class Cut:
    """Where autograd was cut: gradient edges before, leaves after (None: carries no gradient)."""

    route: Route
    sent: int  # the first `sent` of edges and leaves travelled, the others were kept
    edges: list[Any]
    leaves: list[Tensor | None]
    branch: tuple[list[Any], list[Tensor]] = ((), ())  # what ran beside: its edge, leaf after it


def _edges(tensors: Sequence[Tensor]) -> list[Any]:
    """Gradient edges, not the tensors: those would stay alive until the backward."""
    return [get_gradient_edge(t) if t.requires_grad else None for t in tensors]


@dataclass
class Tape:
    """One micro-batch's passage through one chunk.

    An exchange without a group is no cut, so that with ep = 1 the chunk is one plain autograd
    graph, unless `cut_all` (so one process exercises the cuts). Layers give the computation of
    their weight gradients to `defer`: it waits for `flush` where it can hide a communication or
    fill a bubble, and runs at once where it would only keep memory.
    """

    cut_all: bool = False
    inputs: list[Tensor] = field(default_factory=list)  # leaves the chunk started from
    cuts: list[Cut] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # gradient edges of what the chunk returned
    deferred: list[Callable[[], None]] = field(default_factory=list)  # oldest first
    putting_aside: bool = False

    def defer(self, compute: Callable[[], None]) -> None:
        if self.putting_aside:
            self.deferred.append(compute)
        else:
            compute()

    def cut(self, exchange: Exchange) -> tuple[Tensor, ...]:
        """Note the cut, and return what the layer goes on with, once `wait` has returned."""
        if exchange.route.group is None and not self.cut_all:
            return exchange.through()
        before = exchange.tensors + exchange.keep
        pairs = zip((*exchange.received, *exchange.keep), before, strict=True)
        after = [new.detach().requires_grad_(old.requires_grad) for new, old in pairs]
        leaves = [t if t.requires_grad else None for t in after]
        self.cuts.append(Cut(exchange.route, len(exchange.tensors), _edges(before), leaves))
        if exchange.beside is not None:
            result = exchange.beside(after[-1])
            after[-1] = result.detach().requires_grad_(result.requires_grad)
            self.cuts[-1].branch = _edges([result]), [after[-1]]
        return tuple(after)

    @torch.no_grad()
    def flush(self) -> None:
        """Compute the weight gradients that were put aside."""
        waiting, self.deferred = self.deferred, []
        add_together(waiting)


# ---- Driving a micro-batch


def drive(steps: Steps) -> Any:
    """Run a layer or chunk to its end, autograd passing through; returns what it returns."""
    value = None
    while True:
        try:
            value = steps.send(value).through()
        except StopIteration as done:
            return done.value


def forward(steps: Steps, tape: Tape | None) -> Generator[None, None, Any]:
    """Run a chunk with its cuts on `tape`, yielding while a communication is in flight.

    Without a tape (evaluation) nothing is cut. Returns the chunk's output, detached. Counts are
    waited for with the turn kept: a forward that yields more often than a backward drifts apart.
    """
    value = None
    while True:
        try:
            request = steps.send(value)
        except StopIteration as done:
            output = done.value
            break
        if isinstance(request, Counts):
            value = request.through()
            continue
        value = request.through() if tape is None else tape.cut(request)
        yield
        request.wait()
    if tape is not None:
        tape.outputs = _edges([output])
    return output.detach()


def backward(tape: Tape, grad: Tensor, hold: bool = False) -> Generator[None, None, Any]:
    """Walk `tape` in reverse from the output's gradient; returns the gradients of its inputs.

    Weight gradients put aside are computed behind each launch, or stay on the tape if `hold`.
    """
    edges, grads, tape.outputs = tape.outputs, [grad], []  # edges and `defer` would be a cycle
    tape.putting_aside = hold or bool(tape.cuts)
    while tape.cuts:
        cut = tape.cuts.pop()
        _run_segment(edges, grads)
        travelled = [leaf for leaf in cut.leaves[: cut.sent] if leaf is not None]
        # A leaf nobody used has no gradient, but its rank's peers wait for one.
        sent = [torch.zeros_like(t) if t.grad is None else t.grad for t in travelled]
        back = Exchange(cut.route.reverse(), sent)
        _run_segment(cut.branch[0], [leaf.grad for leaf in cut.branch[1]])
        if not hold:
            tape.flush()
        yield
        back.wait()
        home = {id(t): gradient for t, gradient in zip(travelled, back.received, strict=True)}
        edges, grads = cut.edges, [t if t is None else home.get(id(t), t.grad) for t in cut.leaves]
    _run_segment(edges, grads)
    if not hold:
        tape.flush()
    return [leaf.grad for leaf in tape.inputs]


def _run_segment(edges: list[Any], grads: list[Tensor | None]) -> None:
    live = [(e, g) for e, g in zip(edges, grads, strict=True) if e is not None and g is not None]
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
    return tuple(results)


# ---- Schedule: a rank's actions, in order


@dataclass(frozen=True)
class Action:
    """Forward `f`, backward `b` (or both), weight gradients `w`, each of (chunk, micro-batch)."""

    f: tuple[int, int] | None = None
    b: tuple[int, int] | None = None
    w: tuple[int, int] | None = None
    hold: bool = False  # the weight gradients of `b` are left to a later `w`
    phase: int = 0

    def __str__(self) -> str:
        parts = zip("fbw", (self.f, self.b, self.w))
        return " + ".join(f"{k} {x[0]}.{x[1]}" for k, x in parts if x)


def plain(micro_batches: int, wgrad_batch: int = 1) -> Iterator[Action]:
    """One chunk: each micro-batch forward, then backward; weight gradients of several together."""
    for m in range(micro_batches):
        yield Action(f=(0, m))
        yield Action(b=(0, m), hold=wgrad_batch > 1)
        if wgrad_batch > 1 and ((m + 1) % wgrad_batch == 0 or m + 1 == micro_batches):
            yield Action(w=(0, m))


def schedule(pp: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """DualPipeV on rank `rank` of `pp`, which holds chunks `rank` (0) and `2·pp-1-rank` (1).

    Raises ValueError if pp > 1 gets fewer than 2·pp micro-batches.
    """
    if pp > 1 and micro_batches < 2 * pp:
        least = f"pp {pp} needs at least {2 * pp} micro-batches, there are {micro_batches}"
        raise ValueError(f"{least}: raise --global-batch or lower --micro-batch")
    forwards, backwards, held = [0, 0], [0, 0], deque()

    def act(phase: int, f: int | None = None, b: int | None = None, hold: bool = False) -> Action:
        """The next micro-batch of chunk `f` forward, of chunk `b` backward."""
        pairs = []
        for done, chunk in ((forwards, f), (backwards, b)):
            pairs.append(None if chunk is None else (chunk, done[chunk]))
            if chunk is not None:
                done[chunk] += 1
        held.extend(pairs[1:] if hold else [])
        return Action(*pairs, hold=hold, phase=phase)

    for _ in range(2 * (pp - rank - 1)):  # 1: fill the way down
        yield act(1, f=0)
    for _ in range(rank + 1):  # 2: both ways fill
        yield act(2, f=0)
        yield act(2, f=1)
    for _ in range(pp - rank - 1):  # 3: first backwards; weight gradients fill the wait
        yield act(3, b=1, hold=True)
        yield Action(w=held.popleft(), phase=3)
        yield act(3, f=1)
    for i in range(micro_batches - 2 * pp + rank + 1):  # 4: steady, every pair overlapped
        if i == 0 and rank == pp - 1:  # the turn of the V: the first pair would wait for itself
            yield act(4, f=0)
            yield act(4, b=1)
        else:
            yield act(4, f=0, b=1)
        yield act(4, f=1, b=0)
    for _ in range(pp - rank - 1):  # 5: the way down is empty
        yield act(5, b=1)
        yield act(5, f=1, b=0)
    middle, even = (rank + 1) // 2, rank % 2 == 0
    for i in range(rank + 1):  # 6: both drain; from the middle on, weight gradients are held back
        yield act(6, b=1, hold=i >= middle + even)
        yield act(6, b=0, hold=i >= middle)
    for _ in range(pp - rank - 1):  # 7: a weight gradient between two backwards
        yield Action(w=held.popleft(), phase=7)
        yield act(7, b=0, hold=True)
    while held:  # 8: what is left of them
        yield Action(w=held.popleft(), phase=8)


# ---- Executor


class _Run:
    """The micro-batches under way; `pipe` brings and takes what crosses chunks."""

    def __init__(self, chunks, batches, loss_grad, pipe, cut_all):
        self.chunks, self.batches, self.loss_grad = chunks, batches, loss_grad
        self.pipe, self.cut_all, self.losses = pipe, cut_all, []
        self.tapes: dict[tuple[int, int], Tape] = {}
        here = pipe is None or pipe.rank == 0  # where the model begins and ends
        self.first, self.last = (0, len(chunks) - 1) if here else (None, None)

    def forward(self, chunk: int, m: int) -> Generator:
        x = None if chunk == self.first else self.pipe.receive("f", chunk, m)
        if self.loss_grad is None:
            return forward(self.chunks[chunk](x, self.batches[m], None), None)
        tape = self.tapes[chunk, m] = Tape(self.cut_all)
        if x is not None:
            tape.inputs = [x.requires_grad_()]
        return forward(self.chunks[chunk](x, self.batches[m], tape.defer), tape)

    def backward(self, chunk: int, m: int, hold: bool) -> Generator:
        grad = self.loss_grad if chunk == self.last else self.pipe.receive("b", chunk, m)
        return backward(self.tapes[chunk, m] if hold else self.tapes.pop((chunk, m)), grad, hold)

    def flush(self, w: tuple[int, int]) -> None:
        """Weight gradients of one micro-batch, or without a pipe of all that wait."""
        whole = Tape()
        for key in [w] if self.pipe is not None else list(self.tapes):
            tape = self.tapes.pop(key)  # emptied: what waits holds a graph that holds the tape
            whole.deferred, tape.deferred = whole.deferred + tape.deferred, []
        whole.flush()

    def pass_on(self, action: Action, output: Tensor | None, input_grads: list[Tensor]) -> None:
        """Send a chunk's output, and the gradient of its input, to where they are needed."""
        if action.f and action.f[0] == self.last:
            self.losses.append(output)
        elif action.f:
            self.pipe.send("f", *action.f, output)
        if input_grads and action.b[0] != self.first:
            self.pipe.send("b", *action.b, input_grads[0])


def run(
    chunks: Sequence[Chunk], batches: Sequence[Any], loss_grad: Tensor | None = None, *,
    pipe: Any = None, wgrad_batch: int = 1, cut_all: bool = False,
    finished: Callable[[int], None] = lambda chunk: None,
    around: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
) -> list[Tensor]:  # fmt: skip
    """Take every micro-batch through this rank's chunks, and back if `loss_grad` is given.

    A chunk is called as `chunk(x, batch, defer)` and returns its steps; the model's first gets
    x = None, its last returns the micro-batch's loss (summed; a scalar). `loss_grad` is the
    gradient of each of these losses (scalar). Without a `pipe` the one chunk follows `plain`; with
    a mesh.Pipe two follow `schedule`. `finished(chunk)`: its gradients are complete; `around`
    names actions for a profiler. Returns the losses, detached, on pipeline rank 0, else none.
    """
    train, state = loss_grad is not None, _Run(chunks, batches, loss_grad, pipe, cut_all)
    if pipe is None:
        actions = list(plain(len(batches), wgrad_batch))
    else:
        actions = list(schedule(pipe.pp, pipe.rank, len(batches)))
        pipe.start(len(batches), train)
    ends = {x[0]: i for i, a in enumerate(actions) for x in (a.b, a.w) if x}
    for i, action in enumerate(actions):
        f = state.forward(*action.f) if action.f else None
        b = state.backward(*action.b, action.hold) if action.b and train else None
        with around(str(action)):
            output, input_grads = pair(f, b)
            if action.w and train:
                state.flush(action.w)
        state.pass_on(action, output, input_grads)
        for chunk in [chunk for chunk, end in ends.items() if end == i and train]:
            finished(chunk)
    if pipe is not None:
        pipe.finish()
    return state.losses
