"""The compiled segments: one graph each for all layers, no graph break, the same numbers."""

import dataclasses
import functools

import pytest
import torch
from torch._dynamo.utils import counters

import train_qwen3_moe as script
from common.dualpipev import run
from tests.test_qwen3_moe import ODD, a_trainer, data, ours, run_config


@pytest.fixture
def aot_eager(monkeypatch):
    """torch.compile without a code generator: its tracing and its autograd, in about a second."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_layers_share_two_graphs_and_equal_eager(aot_eager, recompute):
    """fullgraph=True raises at a break; an int that differs by layer would recompile each one."""
    model = dataclasses.replace(ODD, num_hidden_layers=5, mlp_only_layers=(1, 3))
    flags = dict(dtype="fp32", balance="sequence", z_loss_coef=0.01)
    one = torch.ones(())
    results = []
    for compiled in (False, True):
        chunks = ours(model, run_config(compile=compiled, recompute=recompute, **flags))
        losses = run(chunks, [data(1), data(2)], one)
        results.append((losses, {n: p.grad for n, p in script.named_parameters(chunks)}))
    (want, want_grads), (got, got_grads) = results
    assert counters["stats"]["unique_graphs"] == 3  # attend_and_route, aggregate, dense
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_compiled_training_step_of_a_bf16_model_under_the_optimizer(aot_eager):
    """bf16 parameters with fp32 gradients beside them: compile refuses them in `.grad`."""
    chunks = ours(ODD, run_config(dtype="bf16", compile=True))
    optimizer = a_trainer(run_config(dtype="bf16"), chunks).optimizer
    run(chunks, [data(1), data(2)], torch.ones(()))
    for name, p in script.named_parameters(chunks):
        assert p.grad is None and p.main_grad.dtype == torch.float32, name
        assert p.main_grad.abs().max() > 0, name
    before = chunks[0].lm_head.weight.clone()
    norm, skipped = optimizer.step(1e-2)
    assert not skipped and norm > 0 and not torch.equal(before, chunks[0].lm_head.weight)
