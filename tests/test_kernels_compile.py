"""The kernels compile for Hopper and Blackwell without a GPU, and read 16 bytes at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kernels.adamw as adamw
import kernels.cross_entropy as ce
import kernels.embedding as em

ROOT = Path(__file__).resolve().parent.parent
SHARED = 227 * 1024  # bytes that a program can have on either


def softmax_job(dtype, grad):
    signature = dict(
        logits_ptr="*" + dtype, targets_ptr="*i64", losses_ptr="*fp32", V="i32",
        ignore_index="i32", z_loss="fp32",
    ) | (dict(grad_ptr="*fp32") if grad else {})  # fmt: skip
    constants = dict(R=ce.ROWS, L=ce.LANES, STAGES=ce.STAGES)
    constants |= {} if grad else dict(grad_ptr=None)
    return ["kernels.cross_entropy", "_softmax_kernel", signature, constants, ce.WARPS]


def adamw_job(moments, size):
    scalars = ("scale", "rate1", "beta2", "rate2", "keep", "step_size", "root", "eps")
    signature = dict(
        w_ptr="*fp32", g_ptr="*fp32", m_ptr="*" + moments, v_ptr="*fp32", param_ptr="*bf16",
        n=size, **dict.fromkeys(scalars, "fp32"),
    )  # fmt: skip
    constants = dict(ZERO_GRAD=True, BLOCK=adamw.BLOCK)
    return ["kernels.adamw", "_adamw_kernel", signature, constants, adamw.WARPS]


def sum_job(size):
    signature = dict(x_ptr="*fp32", parts_ptr="*fp32", n=size)
    constants = dict(PARTS=adamw.PARTS, BLOCK=adamw.PART_BLOCK)
    return ["kernels.adamw", "_sum_squares_kernel", signature, constants, 8]


def rows_job(wide):
    signature = dict(
        into_ptr="*" + wide, rows_ptr="*bf16", ids_ptr="*i64", order_ptr="*i64", N="i32", D="i32"
    )
    constants = dict(J=em.OCCURRENCES, C=em.COLUMNS)
    return ["kernels.embedding", "_add_rows_kernel", signature, constants, em.WARPS]


JOBS = [
    *(softmax_job(dtype, grad) for dtype in ("bf16", "fp32") for grad in (True, False)),
    *(adamw_job(moments, size) for moments in ("fp32", "bf16") for size in ("i32", "i64")),
    sum_job("i32"), sum_job("i64"), rows_job("fp32"), rows_job("fp64"),
]  # fmt: skip


def test_kernels_compile_without_spills_and_with_wide_accesses(tmp_path):
    jobs = [[*job, capability] for job in JOBS for capability in (90, 100)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.compile_kernels", str(tmp_path / "jobs.json")]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for job, made in zip(jobs, json.loads(done.stdout), strict=True):
        assert made["shared"] <= SHARED and made["spills"] == 0, job
        assert "ld.global.v4" in made["ptx"] or ".v4.b32" in made["ptx"], job
