"""Micro-batches as a CUDA graph: recorded once, then replayed by one call of the host.

At a few thousand tokens a micro-batch the host needs as long to launch the kernels as the GPU to
run them: 650 and 647 ms of a step of 706 (one H200, Qwen3 width, 6 layers, 16 micro-batches of
4,096 tokens). With exchanges it needs longer, and what it has not launched cannot hide them.

Without a pipe the graph holds --wgrad-batch micro-batches, else a whole step's schedule, with its
exchanges and the reduction of each chunk's gradients: NCCL's work is recorded like kernels, and
with room reserved (mesh.Room) sizes are known beforehand. It holds fixed addresses: of parameters
and of the flat gradients, which never move, of its own copies of the batches, and of the
activations, in a pool of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from common.config import Run
from common.data import Batch
from common.dualpipev import run as run_schedule
from common.mesh import Mesh

COPIED = "tokens", "targets", "numbers"  # what of a batch the graph reads from its own copy


@dataclass
class Replay:
    """Takes micro-batches through `chunks` and back, `count` together.

    The first `count` are run as they are, so that all is compiled; the next are recorded; from
    then on they are replayed. What is left over is run as it is, and so is what waits for its
    sizes; where more or less room is reserved than was recorded, this begins anew.
    """

    chunks: Sequence[Any]
    count: int
    pipe: Any = None  # mesh.Pipe, where there is more than one chunk
    warm: bool = False
    sizes: tuple | None = None  # the room
    graph: torch.cuda.CUDAGraph | None = None
    batches: list[Batch] = field(default_factory=list)  # the graph's own
    loss_grad: Tensor | None = None  # likewise, one for all
    losses: list[Tensor] = field(default_factory=list)
    reduced: list[Any] = field(default_factory=list)  # the buckets whose reduction it holds
    nbytes: int = 0  # of the graph's pool, which torch's count of allocated memory leaves out

    def __call__(
        self, batches: Sequence[Batch], loss_grad: Tensor, *, finished: Callable, around: Callable
    ) -> list[Tensor]:
        """As dualpipev.run, of which `finished` and `around` are: the losses (scalars)."""
        losses, room = [], batches[0].room
        sizes = None if room is None else (room.rows, room.slots)
        if sizes != self.sizes:
            self.sizes, self.warm = sizes, False
            if self.graph is not None:
                self.drop()
                torch.cuda.empty_cache()  # of the graph's pool
        how = dict(around=around)
        if self.pipe is not None:
            how["finished"] = finished
        for first in range(0, len(batches), self.count):
            part = batches[first : first + self.count]
            if self.warm and len(part) == self.count:
                losses += self.replay(part, loss_grad, how)
            else:
                losses += self.run(part, loss_grad, how)
                self.warm = sizes != (None, None)
        if self.pipe is None:  # only now
            finished(0)
        return losses

    def drop(self) -> None:
        """Let the graph go, before its process groups: NCCL does not end what a live graph has
        recorded (its commDestroySync waits)."""
        self.graph, self.losses, self.nbytes = None, [], 0

    def run(self, batches: Sequence[Batch], loss_grad: Tensor, how: dict) -> list[Tensor]:
        flags = dict(pipe=self.pipe, wgrad_batch=self.count)
        return run_schedule(self.chunks, batches, loss_grad, **flags, **how)

    def replay(self, batches: Sequence[Batch], loss_grad: Tensor, how: dict) -> list[Tensor]:
        if self.graph is None:
            self.record(batches, loss_grad, how)
        self.loss_grad.copy_(loss_grad)
        for mine, given in zip(self.batches, batches, strict=True):
            for name in COPIED:
                getattr(mine, name).copy_(getattr(given, name))
        self.graph.replay()
        for bucket in self.reduced:
            bucket.reduced = True
        return [loss.clone() for loss in self.losses]

    def record(self, batches: Sequence[Batch], loss_grad: Tensor, how: dict) -> None:
        """Raises RuntimeError if something in the model makes the host wait."""
        self.loss_grad = loss_grad.clone()
        self.batches = [
            replace(
                b, loss_grad=self.loss_grad, **{name: getattr(b, name).clone() for name in COPIED}
            )
            for b in batches
        ]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        try:  # other threads read data, write checkpoints and watch over exchanges meanwhile
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.losses = self.run(self.batches, self.loss_grad, how)
                self.reduced = [b for chunk in self.chunks for b in chunk.buckets if b.reduced]
                for bucket in self.reduced:
                    bucket.wait()  # what was recorded has to end in the graph
        except RuntimeError as error:
            hint = "could not record the micro-batches as a CUDA graph; try --no-cuda-graph"
            raise RuntimeError(hint) from error
        self.nbytes = torch.cuda.memory_reserved() - before
        torch.cuda.reset_peak_memory_stats()


def can_record(run: Run, mesh: Mesh) -> bool:
    """Whether micro-batches are all alike, with nothing that the host must know of them.

    Documents give each micro-batch sizes of its own; in fp32 experts are a loop of the host; with
    --room 0 it waits for the numbers of rows.
    """
    known = not run.isolate_documents and (mesh.ep == 1 or run.room > 0)
    return run.cuda_graph and mesh.device.type == "cuda" and run.dtype == "bf16" and known


def replay_for(run: Run, mesh: Mesh, chunks: Sequence[Any], pipe: Any) -> Replay | None:
    """Of --wgrad-batch micro-batches, with a pipe of a step; None where they cannot be recorded."""
    if not can_record(run, mesh):
        return None
    whole = run.global_batch // (run.micro_batch * mesh.dp)
    return Replay(chunks, run.wgrad_batch if pipe is None else whole, pipe)
