"""Shared by all tests: one thread, fixed seeds; gpu tests are deselected without a GPU.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are
imported; what compiles them (tests/test_kernels_compile.py) does so in a process of its own.
"""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.interpreter  # noqa: F401


def pytest_collection_modifyitems(config, items):
    """Deselect gpu-marked tests on a machine without CUDA; pytest prints how many."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
