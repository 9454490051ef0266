"""Micro-batches as a CUDA graph: recorded once, then replayed by one call of the host.

Where no rank waits for another inside a micro-batch (pp = cp = ep = 1), every size is known
beforehand and nothing synchronises. At a few thousand tokens a micro-batch the host then takes
longer to launch the kernels than the GPU to run them: 650 ms of a step of 706 (one H200, Qwen3
width, 6 layers, 16 micro-batches of 4,096 tokens), while the GPU computed for 647.

The graph holds fixed addresses: of the parameters and of the flat gradients, which never move, of
its own copies of the batches, and of the activations, in a pool of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.config import Run
from common.data import Batch
from common.dualpipev import run as run_schedule
from common.mesh import Mesh


def can_replay(run: Run, mesh: Mesh) -> bool:
    """Whether micro-batches can be recorded: all alike, with nothing the host must know.

    Documents give each micro-batch sizes of its own; in fp32 experts are a loop of the host.
    """
    alone = mesh.pp * mesh.cp * mesh.ep == 1 and mesh.device.type == "cuda"
    return run.cuda_graph and alone and run.dtype == "bf16" and not run.isolate_documents


COPIED = "tokens", "targets", "numbers"  # what of a batch the graph reads from its own copy


@dataclass
class Replay:
    """Takes micro-batches through `chunks` and back, `count` together (--wgrad-batch).

    The first `count` are run as they are, so that all is compiled; the next are recorded; from
    then on they are replayed. What is left over is run as it is.
    """

    chunks: Sequence[Any]
    count: int
    warm: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    batches: list[Batch] = field(default_factory=list)  # the graph's own
    loss_grad: Tensor | None = None  # likewise, one for all
    losses: list[Tensor] = field(default_factory=list)
    nbytes: int = 0  # of the graph's pool, which torch's count of allocated memory leaves out

    def __call__(self, batches: Sequence[Batch], loss_grad: Tensor) -> list[Tensor]:
        """The losses (scalars), as dualpipev.run returns them; gradients are added to main_grad."""
        losses = []
        for first in range(0, len(batches), self.count):
            part = batches[first : first + self.count]
            if self.warm and len(part) == self.count:
                losses += self.replay(part, loss_grad)
            else:
                losses += run_schedule(self.chunks, part, loss_grad, wgrad_batch=self.count)
                self.warm = True
        return losses

    def replay(self, batches: Sequence[Batch], loss_grad: Tensor) -> list[Tensor]:
        if self.graph is None:
            self.record(batches, loss_grad)
        self.loss_grad.copy_(loss_grad)
        for mine, given in zip(self.batches, batches, strict=True):
            for name in COPIED:
                getattr(mine, name).copy_(getattr(given, name))
        self.graph.replay()
        return [loss.clone() for loss in self.losses]

    def record(self, batches: Sequence[Batch], loss_grad: Tensor) -> None:
        """Raises RuntimeError if something in the model makes the host wait."""
        self.loss_grad = loss_grad.clone()
        self.batches = [
            Batch(**{name: getattr(b, name).clone() for name in COPIED}, loss_grad=self.loss_grad)
            for b in batches
        ]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        try:  # other threads read data and write checkpoints meanwhile
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.losses = run_schedule(
                    self.chunks, self.batches, self.loss_grad, wgrad_batch=self.count
                )
        except RuntimeError as error:
            hint = "could not record the micro-batches as a CUDA graph; try --no-cuda-graph"
            raise RuntimeError(hint) from error
        self.nbytes = torch.cuda.memory_reserved() - before
        torch.cuda.reset_peak_memory_stats()
