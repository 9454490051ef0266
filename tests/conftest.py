"""Shared by all tests: one thread, fixed seeds; gpu tests are deselected without a GPU."""

import os

import pytest
import torch

torch.set_num_threads(1)
pytest.register_assert_rewrite("tests.small")


def pytest_collection_modifyitems(config, items):
    """Deselect gpu-marked tests on a machine without CUDA; pytest prints how many.

    Those marked triton need the GPU or the interpreter, where tests/test_kernels.py runs them.
    """
    if torch.cuda.is_available():
        return
    absent = ["gpu"] if os.environ.get("TRITON_INTERPRET") == "1" else ["gpu", "triton"]
    out = [item for item in items if any(map(item.get_closest_marker, absent))]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
