"""Shared by all tests: one thread, fixed seeds; gpu tests are deselected without a GPU."""

import pytest
import torch

torch.set_num_threads(1)


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
