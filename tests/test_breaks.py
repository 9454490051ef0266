"""A suite that cannot fail shows nothing: each planted fault must turn it red.

A copy of the project gets one fault, and the tests named beside it run in a process of their own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS = {
    "dropped normaliser": (
        "train_qwen3_moe.py", "loss_grad = count.clamp(min=1).reciprocal()",
        "loss_grad = torch.ones_like(count)",
        "tests/test_training.py::test_mean_over_tokens_not_over_micro_batches",
    ),
    "top-k weights not renormalised": (
        "train_qwen3_moe.py", "logits_NE.gather(-1, ids_NK).softmax(-1)",
        "probs_NE.gather(-1, ids_NK)",
        "tests/test_qwen3_moe.py",
    ),
    "wrong rope pairing": (
        "train_qwen3_moe.py", "a, b = up(x_BTHC).chunk(2, dim=-1)",
        "a, b = up(x_BTHC)[..., ::2], up(x_BTHC)[..., 1::2]", "tests/test_qwen3_moe.py",
    ),
    "skipped norm": (
        "train_qwen3_moe.py", "self.k_norm(self.k_proj(x_BTD).view(heads))",
        "self.k_proj(x_BTD).view(heads)", "tests/test_qwen3_moe.py",
    ),
    "deferred gradient lost": (
        "common/dualpipev.py", "        if not hold:\n            tape.flush()\n        yield",
        "        if not hold:\n            tape.deferred = []\n        yield",
        "tests/test_dualpipev.py",
    ),
    "off-by-one target": (
        "common/data.py", "np.where(keep[1:], ids[1:], IGNORE)",
        "np.where(keep[1:], ids[:-1], IGNORE)", "tests/test_data.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_turns_the_suite_red(fault, tmp_path):
    file, right, wrong, tests = FAULTS[fault]
    for name in ("common", "kernels", "bench", "tests", "pytest.ini"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for script in ROOT.glob("train_*.py"):
        shutil.copy(script, tmp_path)
    source = (tmp_path / file).read_text()
    assert source.count(right) == 1, f"{file} no longer says {right!r} once"
    (tmp_path / file).write_text(source.replace(right, wrong))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]  # 1: tests failed; others: they did not run
    assert "AssertionError" in done.stdout or "assert " in done.stdout
