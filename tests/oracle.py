"""transformers as the oracle: every parameter random, also in float64."""

import contextlib
import types

import torch

from common.hf import Rows


class _Wide(types.ModuleType):
    """torch, except that what a model file calls float32 is float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def no_fp32(*modules):
    """Model files that upcast to fp32 by name upcast to float64 instead (norms, softmax, rope)."""
    saved = [m.torch for m in modules]
    tensor_float = torch.Tensor.float
    try:
        for m in modules:
            m.torch = _Wide("torch")
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = tensor_float
        for m, old in zip(modules, saved, strict=True):
            m.torch = old


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Every parameter random and of a size that matters; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if "norm" in name else scale * noise)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a − b‖ / ‖b‖ (the norm itself where b is zero)."""
    norm = b.double().norm()
    return ((a.double() - b.double()).norm() / (norm if norm > 0 else 1)).item()


def on_disk(view: torch.Tensor | Rows) -> torch.Tensor:
    """A view as it stands in a file of one rank."""
    return view.tensor.reshape(-1, *view.shape) if isinstance(view, Rows) else view
