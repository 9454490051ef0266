"""Small models of any script, in one process: what the tests of all three make and check alike."""

import json
from pathlib import Path

import torch

from common.data import Batch, Loader
from common.mesh import build as build_mesh
from tests.oracle import randomise

CPU = torch.device("cpu")


def run_config(script, **flags):
    """A run in float64 of one micro-batch of two sequences; `seq_len` is to be given."""
    defaults = dict(
        dtype="fp64", compile=False, micro_batch=2, global_batch=2, balance="none",
        out=Path("unused"),
    )  # fmt: skip
    return script.Config(**{**defaults, **flags})


def ours(script, model, run, n_chunks=1, seed=0):
    """All chunks of the model on this process, every parameter random."""
    chunks = script.build(model, run, build_mesh(run, CPU), n_chunks)
    for chunk in chunks:
        randomise(chunk, seed)
    return chunks


def a_trainer(script, run, chunks, loader=None):
    """As main builds it, but for what a test needs not."""
    mesh = build_mesh(run, chunks[0].rope.cos.device)
    optimizer = script.build_optimizer(chunks, run, mesh)
    return script.Trainer(chunks[0].arch, run, mesh, chunks, optimizer, loader)


def trainer(script, run, model, device=CPU):
    """Of a model as it is initialised, on Python's own source."""
    loader = Loader(("stdlib",), run.seq_len, model.vocab_size, run.seed)
    return a_trainer(script, run, script.build(model, run, build_mesh(run, device)), loader)


def data(seed=1, shape=(2, 24), vocab=71):
    """A micro-batch of random tokens and targets."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(*torch.randint(0, vocab, (2, *shape), generator=generator))


def shrink(monkeypatch, script, model, **flags):
    """The tiny preset, smaller still: a step takes some 20 ms."""
    monkeypatch.setitem(script.MODELS, "tiny", model)
    less = dict(
        seq_len=32, micro_batch=2, global_batch=4, steps=6, lr=3e-3, dtype="fp32", compile=False,
    )  # fmt: skip
    monkeypatch.setitem(script.FLAGS, "tiny", less | flags)


def steps(out, but=("step_s", "tokens_per_s", "mfu", "mem_gib")):
    """Step records without their times and memory."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in but} for r in records if "loss" in r]


def gradients_are_within_twice_the_eager_error(script, model, device="cuda"):
    """The whole model, compiled, library kernels: against float64 and next to eager bf16."""
    batch, results = data(shape=(2, 128)), {}
    where = {"exact": ("fp64", "cpu"), "eager": ("bf16", "cpu"), "gpu": ("bf16", device)}
    for key, (dtype, place) in where.items():
        flags = dict(dtype=dtype, compile=place == "cuda", force_balance="stride", seq_len=128)
        run = run_config(script, **flags)
        chunks = script.build(model, run, build_mesh(run, torch.device(place)))
        for chunk in chunks:
            randomise(chunk, scale=0.1)
        here = Batch(batch.tokens.to(place), batch.targets.to(place))
        loss = script.gradients(a_trainer(script, run, chunks), [here], 256)
        grads = {n: p.main_grad.double().cpu() for n, p in script.named_parameters(chunks)}
        results[key] = {"loss": loss.double().cpu(), **grads}
    for name, exact in results["exact"].items():
        error = {k: (results[k][name] - exact).norm() / exact.norm() for k in ("eager", "gpu")}
        assert error["gpu"] <= 2 * error["eager"] + 2e-3, (name, error)


def trains_down(script, trainer):
    """20 steps; returns the first step's loss."""
    losses = [script.train_step(trainer, step)["loss"] for step in range(1, 21)]
    assert losses[-1] < losses[0] - 1
    return losses[0]


def nothing_waits_between_first_forward_and_last_backward(script, trainer):
    """Compiled bf16 on the GPU; torch raises at any synchronising call inside the step's passes."""
    first = trains_down(script, trainer)
    batches, valid = trainer.batches.take(8)
    batches = script.to_device(batches, trainer.mesh)
    trainer.optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = script.gradients(trainer, batches, valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < loss.item() < first
