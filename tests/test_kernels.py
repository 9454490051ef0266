"""Triton kernels without a GPU: interpreted, and compiled for Hopper and Blackwell.

Those of the loss, the embedding and AdamW; the experts' are in tests/test_experts.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels.adamw as adamw
import kernels.cross_entropy as ce
import kernels.embedding as em

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("adamw", "cross_entropy", "embedding", "plan", "bench_kernels")
FILES = [f"tests/test_{name}.py" for name in NAMES]
SHARED = 227 * 1024  # bytes that a program can have on either


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run on the GPU")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file):
    """In a process of its own: the interpreter must be chosen before kernels are imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.interpreter",
        "-m",
        "triton",
        file,
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


def softmax_job(dtype, grad):
    signature = dict(
        logits_ptr="*" + dtype, targets_ptr="*i64", losses_ptr="*fp32", V="i32",
        ignore_index="i32", z_loss="fp32",
    )  # fmt: skip
    constants = dict(R=ce.ROWS, L=ce.LANES, STAGES=ce.STAGES)
    if grad:
        signature["grad_ptr"] = "*fp32"
    else:
        constants["grad_ptr"] = None
    return ce._softmax_kernel, signature, constants, ce.WARPS


def adamw_job(moments, size):
    scalars = ("scale", "rate1", "beta2", "rate2", "keep", "step_size", "root", "eps")
    signature = dict(
        w_ptr="*fp32", g_ptr="*fp32", m_ptr="*" + moments, v_ptr="*fp32", param_ptr="*bf16",
        n=size, **dict.fromkeys(scalars, "fp32"),
    )  # fmt: skip
    return adamw._adamw_kernel, signature, dict(ZERO_GRAD=True, BLOCK=adamw.BLOCK), adamw.WARPS


def sum_job(size):
    signature = dict(x_ptr="*fp32", parts_ptr="*fp32", n=size)
    constants = dict(PARTS=adamw.PARTS, BLOCK=adamw.PART_BLOCK)
    return adamw._sum_squares_kernel, signature, constants, 8


def rows_job(wide):
    signature = dict(
        into_ptr="*" + wide, rows_ptr="*bf16", ids_ptr="*i64", order_ptr="*i64", N="i32", D="i32"
    )
    return em._add_rows_kernel, signature, dict(J=em.OCCURRENCES, C=em.COLUMNS), em.WARPS


JOBS = {
    **{f"softmax {d} {g}": softmax_job(d, g) for d in ("bf16", "fp32") for g in (True, False)},
    **{f"adamw {m} {n}": adamw_job(m, n) for m in ("fp32", "bf16") for n in ("i32", "i64")},
    "sum i32": sum_job("i32"), "sum i64": sum_job("i64"),
    "rows fp32": rows_job("fp32"), "rows fp64": rows_job("fp64"),
}  # fmt: skip


def compiled(kernel, signature, constants, warps, arch):
    """Made without a GPU; pointers, V, n and D are multiples of 16, as they are at real sizes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    places = {name: i for i, name in enumerate(kernel.arg_names)}
    even = [n for n, kind in signature.items() if kind.startswith("*") or n in ("V", "n", "D")]
    source = ASTSource(
        kernel, {name: signature.get(name, "constexpr") for name in places},
        {(places[name],): value for name, value in constants.items()},
        {(places[name],): [["tt.divisibility", 16]] for name in even},
    )  # fmt: skip
    return compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=warps))


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("job", JOBS)
def test_compiles_with_wide_accesses(job, arch):
    made = compiled(*JOBS[job], arch)
    assert made.metadata.shared <= SHARED
    ptx = made.asm["ptx"]
    assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx
    written = job.startswith(("adamw", "rows")) or job.endswith("True")
    assert not written or "st.global.v" in ptx
