"""Where this process stands: its device and its place in the rank grid.

One process for now: `grid = arange(world).view(pp, dp, cp)` with every axis 1.
"""

import os
from dataclasses import dataclass

import torch

from common.config import Run


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis, this process's rank and device."""

    rank: int
    world: int
    dp: int
    device: torch.device


def world_size() -> int:
    """Processes that torchrun started; 1 without it. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(run: Run) -> Mesh:
    """Claim the device (CUDA where there is one) and return the mesh. `run` has been checked.

    Raises ValueError for more than one process.
    """
    world, rank = world_size(), int(os.environ.get("RANK", "0"))
    if world > 1:
        raise ValueError(f"{world} processes: only 1 is supported; use --nproc-per-node 1")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
        torch.utils.deterministic.fill_uninitialized_memory = False  # poisoning is for tests
    torch.use_deterministic_algorithms(run.deterministic)
    return Mesh(rank, world, world // (run.pp * run.cp), device)
