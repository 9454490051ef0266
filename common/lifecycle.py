"""What surrounds the steps: weights in, checkpoints out and in again, the first lines, the sample.

The same for every model. What a model's files are called is told by its script: `views`
(name, parameter, first expert) → [(file's name, view)], as the published files have it; `fused`,
the other spelling that may be read; `whole`, the model without memory, for its names.
A trainer is the script's Trainer: model, run, mesh, chunks, optimizer, loader, saver.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from common import checkpoint, hf
from common.config import fail, to_json
from common.data import Batch, Loader
from common.dualpipev import run as run_schedule
from common.log import Log
from common.mesh import Mesh, seeded
from common.tokens import decoder, encoder, parse_spec

Views = Callable[[str, Tensor, int], list[tuple[str, Any]]]


def named_parameters(chunks: list[Any]) -> list[tuple[str, nn.Parameter]]:
    """All parameters of this rank under their whole-model names, a tied one once."""
    return [item for chunk in chunks for item in chunk.named_parameters()]


def load_weights(
    chunks: list[Any], directory: Path, mesh: Mesh, views: Views, fused: Views,
    whole: Callable[[Any], nn.Module],
) -> None:  # fmt: skip
    """Fill the parameters from a Hugging Face directory; layers beyond the model's are left out.

    Raises ValueError naming what is missing, surplus or of another shape.
    """
    model, mine, stacked = chunks[0].arch, {}, {}
    depth = hf.read_config(directory)["num_hidden_layers"]
    deep = dataclasses.replace(model, num_hidden_layers=max(depth, model.num_hidden_layers))
    first = mesh.first_expert(model.num_experts)
    for name, weight in named_parameters(chunks):
        mine.update(views(name, weight.detach(), first))
        stacked.update(fused(name, weight.detach(), first))
    pairs = list(whole(deep).named_parameters())
    known = {n for name, p in pairs for n, _ in views(name, p, 0) + fused(name, p, 0)}
    ignore = ("*.inv_freq", *(["lm_head.weight"] if model.tie_word_embeddings else []))
    hf.load_views(
        hf.Reader(directory), mine, stacked, ignore=ignore, known=known,
        n_experts=model.num_experts,
    )  # fmt: skip


def router_buffers(chunks: list[Any]) -> dict[str, Tensor]:
    """What the routers remember between steps, by layer: no published format has a place for it."""
    return {
        f"model.layers.{i}.mlp.gate.state": chunk.state[j]
        for chunk in chunks
        for j, i in enumerate(chunk.model.layers)
    }


def save(trainer: Any, step: int, views: Views, config: dict[str, Any]) -> None:
    """Start writing <out>/step-<step>: a Hugging Face directory, with `config` as its config.json,
    and trainer/. The step goes on."""
    t = trainer
    first = t.mesh.first_expert(t.model.num_experts)
    named = named_parameters(t.chunks)
    state = dict(
        tokens=t.tokens, micro_batches=t.micro_batches, data=t.loader.state_dict(),
        updates=t.optimizer.t, skipped=t.optimizer.skipped, run=to_json(t.run),
        model=dataclasses.asdict(t.model), room=t.room and (t.room.rows, t.room.slots),
        sources=t.loader.seen | t.loader.fingerprint,
    )  # fmt: skip
    t.saver.save(
        step, views=dict(view for n, p in named for view in views(n, p.detach(), first)),
        hf_config=config, dtype=named[0][1].dtype, slices=t.optimizer.slices(),
        buffers=router_buffers(t.chunks), state=state,
        files=hf.tokenizer_files(parse_spec(t.run.data[0])[0]),
    )  # fmt: skip


def resume(path: Path, trainer: Any, config: dict[str, Any]) -> int:
    """Go on from a checkpoint of this model; returns its step. Raises ValueError if it differs.

    `config`: this model's config.json. The model, the optimizer and what the sample order depends
    on must be the run's; for --eval-only the model alone. All other flags are taken as they are
    given now: so --steps N, say, means the schedule of N steps. Data may have changed: `announce`
    says so.
    """
    t, state = trainer, checkpoint.load_state(path)
    kind = hf.read_json(path / "config.json").get("model_type")
    if kind != config["model_type"]:
        raise ValueError(
            f"{path} is of a run of {kind}, this script trains {config['model_type']}: use another "
            f"--out, or the script of that run"
        )
    fixed = () if t.run.eval_only else ("seed", "seq_len", "optimizer")
    mine = dataclasses.asdict(t.model) | {key: getattr(t.run, key) for key in fixed}
    theirs = state["model"] | {key: state["run"][key] for key in fixed}
    for key, value in json.loads(json.dumps(mine)).items():  # tuples are lists there
        if theirs.get(key) != value:
            raise ValueError(
                f"{path}: {key} is {theirs.get(key)} there and {value} here: use another --out, or "
                f"the flags of that run"
            )
    slices = [s for s in t.optimizer.slices() if s[1] == "master" or not t.run.eval_only]
    checkpoint.load_slices(path, slices)
    t.optimizer.refresh_params()
    saved = checkpoint.load_buffers(path)
    for name, buffer in router_buffers(t.chunks).items():
        buffer.copy_(saved[name])
    t.optimizer.t, t.optimizer.skipped = state["updates"], state["skipped"]
    t.tokens, t.micro_batches = state["tokens"], state["micro_batches"]
    t.loader.load_state_dict(state["data"])
    t.loader.seen = state.get("sources", {})  # none in checkpoints of old
    alike = ("room", "micro_batch", "cp", "ep")  # what reserved room depends on
    same = all(state["run"].get(key) == getattr(t.run, key) for key in alike)
    if t.room is not None and same and state.get("room"):  # else the first step rounds otherwise
        t.room.rows, t.room.slots = state["room"]
    return state["step"]


def announce(trainer: Any, log: Log, what: str, found: Path | None, step: int) -> None:
    """Say what runs, where and on which data, and what a user may not expect."""
    run, mesh = trainer.run, trainer.mesh
    data = ", ".join(
        f"{name} {source['tokens']:,} tokens ({source['sha256'][:8]})"
        for name, source in trainer.loader.fingerprint.items()
    )
    log.say(f"{what}, {mesh.world} x {mesh.device.type}; data {data}")
    for passed in checkpoint.incomplete(run.out).items():
        log.say("passed over {}: {}".format(*passed))
    bias = "the routing bias is kept in trainer/ only: Hugging Face's format has no place for it"
    for true, said in (
        (found, f"resumed {found}" + (", --init-from is not read" if run.init_from else "")),
        (step >= run.steps, f"nothing to train: {step} of --steps {run.steps} are done"),
        (not run.save_every, "--save-every 0: a checkpoint only when stopped by a signal"),
        (run.bias_update_rate, bias),
    ):
        if true and not run.eval_only:
            log.say(said)
    for said in log.repaired + changed_data(trainer.loader):
        log.say(said)


def changed_data(loader: Loader) -> list[str]:
    """A line for each source that is no longer what the run has read."""
    lines = []
    for name, now in loader.fingerprint.items():
        then = loader.seen.get(name, now)
        if then != now:
            other = " of another sha256" if then["tokens"] == now["tokens"] else ""
            lines.append(
                f"data {name}: {now['tokens']:,} tokens, {then['tokens']:,}{other} when this run "
                f"read it before; samples are drawn anew from it, held-out ones too"
            )
    return lines


@torch.no_grad()
def sample(trainer: Any, prompt: list[int], count: int, temperature: float = 0.8) -> list[int]:
    """`count` tokens that continue `prompt`, drawn from the model; always the same for a seed.

    Every window is filled up to one length, of which causal attention sees nothing: compiled code
    would be made anew for each.
    """
    t, ids, T = trainer, list(prompt), trainer.run.seq_len
    generator = seeded(torch.device("cpu"), t.run.seed, "sample")
    for _ in range(count):
        seen = ids[-T:]
        window = torch.tensor([seen + [0] * (T - len(seen))], device=t.mesh.device)
        (logits,) = run_schedule(t.chunks, [Batch(window)], pipe=t.pipe)
        probs = (logits[0, len(seen) - 1].float().cpu() / temperature).softmax(-1)
        ids.append(int(torch.multinomial(probs, 1, generator=generator)))
    return ids[len(prompt) :]


def show_sample(trainer: Any, log: Log) -> None:
    """Print a continuation of a line of Python, if the data's tokenizer is at hand."""
    encode, decode = encoder(trainer.run.data), decoder(trainer.run.data)
    if trainer.mesh.pp * trainer.mesh.cp > 1 or encode is None or decode is None:
        log.say("no sample: it needs --pp 1, --cp 1 and data with a tokenizer")
        return
    text = decode(sample(trainer, encode("def "), trainer.run.sample_tokens))
    log.say(f"--- sample after 'def ' ---\ndef {text}\n---")


def close(trainer: Any, log: Log) -> None:
    """Close what threads and other processes work on; exits with status 1 if a save failed.

    A process group that is left to the interpreter's end may abort it. What was recorded goes first
    (Replay.drop).
    """
    trainer.batches.close()
    log.close()
    if trainer.replay is not None:
        trainer.replay.drop()
    if dist.is_initialized():
        dist.destroy_process_group()
    if trainer.saver.error:
        fail("the last checkpoint could not be written")


def launch(main: Callable[[], None]) -> None:
    """Call `main` as this process's program; torchrun then shows the first traceback of all ranks.

    Where it fails, a checkpoint that a thread is writing is still completed. One process of several
    then leaves out the interpreter's end: NCCL may wait there for ever, for ranks that do not come
    and for what a CUDA graph has recorded.
    """
    try:
        record(main)()
    except BaseException as error:
        alone = not dist.is_initialized()
        if not alone and not isinstance(error, SystemExit):  # which has said why
            sys.excepthook(*sys.exc_info())
        checkpoint.finish_writing()
        if alone:
            raise
        time.sleep(1.1)  # others fail as soon as this one is gone, and torchrun counts in seconds
        os._exit(1)
