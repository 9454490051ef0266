"""Is a training script right? A line a check, PASS, FAIL or SKIP and why; the last says all.

    python skills/validate-correctness/validate.py train_qwen3_moe.py
    python skills/validate-correctness/validate.py train_x.py --quick --set block_size=8
    python skills/validate-correctness/validate.py train_x.py --checks tape layouts --layouts cp2
    python skills/validate-correctness/validate.py train_x.py --reference tests.test_x:reference

Everything runs on a CPU, with the script's tiny model (smaller if tests/test_parallel.py has sizes
for it in SCRIPTS) and weights large enough that none of them is lost in rounding. The exit status
is 0 if nothing failed; 2 for flags that cannot be.
"""

import argparse
import ast
import dataclasses
import importlib
import math
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from common import checkpoint, config, hf  # noqa: E402
from common.data import Batch, isolate  # noqa: E402
from common.dualpipev import drive  # noqa: E402
from common.dualpipev import run as run_schedule  # noqa: E402
from common.lifecycle import load_weights, named_parameters  # noqa: E402
from common.mesh import Pipe  # noqa: E402
from common.mesh import build as build_mesh  # noqa: E402
from tests import pool  # noqa: E402
from tests import test_parallel as parallel  # noqa: E402
from tests.oracle import no_fp32, on_disk, randomise, relative  # noqa: E402

CPU = torch.device("cpu")
ALONE = "pp", "cp", "ep"  # axes that one process has not
LAYOUTS = "pp2", "ep2", "cp2", "dp2"
QUICK = "tape", "sight", "bf16", "gradients", "files", "learning", "oracle", "layouts"
Slices = dict[tuple[str, str], Tensor]  # (parameter, kind) → all of it, flattened


class Skip(Exception):
    """What is not checked, and why."""


@dataclass(frozen=True)
class Subject:
    """The script under test, and the sizes that make its tiny model the one tested."""

    name: str
    sizes: dict[str, Any]
    preset: str = "tiny"
    seq_len: int = 64  # more than the tiny window of 32
    reference: str | None = None

    @cached_property
    def script(self) -> ModuleType:
        return importlib.import_module(self.name)

    @cached_property
    def model(self) -> Any:
        return dataclasses.replace(self.script.TINY, **self.sizes)

    def run(self, **flags) -> Any:
        return parallel.config(self.name, **dict(seq_len=self.seq_len) | flags)

    def chunks(self, run: Any, n_chunks: int = 1) -> list[nn.Module]:
        """The whole model on this process, every parameter random, norms around 1."""
        chunks = self.script.build(self.model, run, build_mesh(run, CPU), n_chunks)
        for chunk in chunks:
            randomise(chunk, scale=self.model.initializer_range)
        return chunks

    def batches(self, count: int) -> list[Batch]:
        """Micro-batches of two sequences of random tokens."""
        generator = torch.Generator().manual_seed(1)
        shape = count, 2, 2, self.seq_len
        tokens = torch.randint(0, self.model.vocab_size, shape, generator=generator)
        return [Batch(x, y) for x, y in tokens]

    def views(self, chunks: list[nn.Module], take=lambda p: p.detach()) -> dict[str, Any]:
        """Name on disk → view of every parameter, or of what `take` makes of it."""
        named = named_parameters(chunks)
        return dict(view for n, p in named for view in self.script.hf_views(n, take(p), 0))

    def load(self, directory: Path, run: Any) -> list[nn.Module]:
        """The model, filled with NaN and then from a Hugging Face directory."""
        script, mesh = self.script, build_mesh(run, CPU)
        chunks = script.build(self.model, run, mesh, 1)
        for p in chunks[0].parameters():
            p.data.fill_(math.nan)
        load_weights(chunks, directory, mesh, script.hf_views, script.hf_fused, script.whole)
        return chunks


# ------------------------------------------------------------------------------------------------
# Checks: each returns its figure, and raises AssertionError (or whatever the script raises) or Skip
# ------------------------------------------------------------------------------------------------


def tape(s: Subject) -> str:
    """Cut at every exchange, in one chunk and two, recomputed or not: plain autograd's values."""
    figures, one = [], torch.ones((), dtype=torch.float64)
    for n_chunks, again in ((1, "none"), (1, "layer"), (2, "experts")):
        run = s.run(balance_coef=1.0, z_loss_coef=0.01, recompute=again)
        (plain,), cut = s.chunks(run), s.chunks(run, n_chunks)
        own = dict(plain.named_parameters())
        for name, p in named_parameters(cut):
            p.data.copy_(own[name].data)
        losses = [drive(plain(None, batch, None)) for batch in s.batches(3)]
        sum(losses).backward()
        pipe = Pipe(0, [0], {}, {}, None) if n_chunks > 1 else None
        taped = run_schedule(cut, s.batches(3), one, pipe=pipe, cut_all=True)
        got = dict(named_parameters(cut), loss=torch.stack(taped))
        want = own | dict(loss=torch.stack(losses).detach())
        grads = [{n: _grad(n, p) for n, p in named.items()} for named in (got, want)]
        figures.append(largest(*grads, 1e-12))
    return f"losses and gradients within {max(figures):.0e}"


def _grad(name: str, p: Tensor) -> Tensor:
    if not isinstance(p, nn.Parameter):
        return p
    assert p.grad is not None, f"{name} has no gradient"
    return p.grad


def sight(s: Subject) -> str:
    """A token sees itself and what came before; of isolated documents only its own."""
    run, at = s.run(), s.seq_len // 2 + 1
    (chunk,), eos = s.chunks(run), s.model.vocab_size - 1
    tokens = s.batches(1)[0].tokens % eos
    other = tokens.clone()
    other[:, at] = (other[:, at] + 1) % eos
    with torch.no_grad():
        a, b = (drive(chunk(None, Batch(x), None)) for x in (tokens, other))
        early = largest({"a later token": b[:, :at]}, {"a later token": a[:, :at]}, 1e-12)
        assert (a[:, at] - b[:, at]).abs().max() > 1e-6, "a token does not see itself"
        try:
            s.script.check_model(s.model, dataclasses.replace(run, isolate_documents=True))
        except ValueError as error:
            return f"causal within {early:.0e}; documents refused: {error}"
        tokens[:, at - 1] = eos
        _, positions, cu_seqlens = isolate(tokens, tokens, [eos] * len(tokens))
        together = drive(chunk(None, Batch(tokens, None, positions, cu_seqlens), None))
        alone = drive(chunk(None, Batch(tokens[:, at:]), None))
    late = largest({"a document": together[:, at:]}, {"a document": alone}, 1e-12)
    return f"causal within {early:.0e}, documents apart within {late:.0e}"


def bf16(s: Subject) -> str:
    """Logits and loss in bf16 near fp32's with the same (bf16) weights and choices of experts.

    Allowed is twice what ten roundings a layer, of a relative 2^-9, add up to as a random walk.
    """
    logits, losses, (batch,) = [], [], s.batches(1)
    routes: dict[int, Tensor] = {}
    for dtype in ("fp32", "bf16"):
        (chunk,) = s.chunks(s.run(dtype=dtype, balance="none", z_loss_coef=0.0))
        for p in chunk.parameters():
            p.data.copy_(p.data.bfloat16())
        with torch.no_grad():
            logits.append(drive(chunk(None, Batch(batch.tokens, routes=routes), None)))
            loss = drive(chunk(None, dataclasses.replace(batch, routes=routes), None))
        losses.append(loss.item() / batch.tokens.numel())
    error = relative(logits[1], logits[0])
    bound = 2 * 2**-9 * math.sqrt(10 * s.model.num_hidden_layers)
    assert error <= bound, f"logits off by {error:.1e}, allowed {bound:.1e}"
    return f"logits within {error:.1e}, loss {losses[1]:.4f} for {losses[0]:.4f}"


def compiled(s: Subject, layers: int = 8) -> str:
    """Segments are whole graphs that layers share, and give eager's values (no code generated)."""
    deep = dataclasses.replace(s, sizes=s.sizes | dict(num_hidden_layers=layers))
    results, compile_, one = [], torch.compile, torch.ones((), dtype=torch.float64)
    torch._dynamo.reset()
    counters.clear()
    torch.compile = partial(compile_, backend="aot_eager")
    try:
        for on in (False, True):
            chunks = deep.chunks(deep.run(compile=on))
            losses = run_schedule(chunks, s.batches(2), one)
            grads = {n: _grad(n, p) for n, p in named_parameters(chunks)}
            results.append(grads | dict(loss=torch.stack(losses)))
    finally:
        torch.compile = compile_
        torch._dynamo.reset()
    worst, graphs = largest(results[1], results[0], 1e-12), counters["stats"]["unique_graphs"]
    assert 0 < graphs < layers, (
        f"{graphs} graphs for {layers} layers: is an int of each layer read?"
    )
    return f"{graphs} graphs for {layers} layers, within {worst:.0e}"


def gradients(s: Subject) -> str:
    """Every parameter, and every expert, gets a gradient; no two matrices start alike."""
    run = s.run(force_balance="stride")  # an expert that nobody chose would have none
    (chunk,), (batch,) = s.chunks(run), s.batches(1)
    drive(chunk(None, batch, None)).backward()
    (fresh,) = s.script.build(s.model, run, build_mesh(run, CPU), 1)
    seen, count = {}, 0
    for name, p in chunk.named_parameters():
        for i, part in enumerate(_grad(name, p) if ".experts." in name else [_grad(name, p)]):
            assert part.isfinite().all() and part.any(), f"{name}[{i}]: gradient is 0 or not finite"
            count += 1
    for name, p in fresh.named_parameters():
        for i, part in enumerate(p.detach() if ".experts." in name else [p.detach()]):
            assert part.isfinite().all(), f"{name} is not initialised"
            if part.ndim > 1 and part.any():
                twin = seen.setdefault(part.numpy().tobytes(), f"{name}[{i}]")
                assert twin == f"{name}[{i}]", f"{name}[{i}] starts as {twin}"
    return f"{count} parameters and experts"


def files(s: Subject) -> str:
    """Views hold every element once; what one process or ep 2 saves reads back; the config too."""
    (chunk,) = s.chunks(s.run(dtype="fp32"))
    names: dict[str, str] = {}
    for name, p in chunk.named_parameters():
        numbers = torch.arange(p.numel()).view(p.shape)
        views = [(n, on_disk(view).flatten()) for n, view in s.script.hf_views(name, numbers, 0)]
        there = torch.cat([view for _, view in views]).sort().values
        assert torch.equal(there, numbers.flatten()), f"{name}: its views are not all of it, once"
        twice = [n for n, _ in views if names.setdefault(n, name) != name]
        assert not twice, f"{twice[0]} is of {name} and of {names[twice[0]]}"
    json_of = s.script.hf_config(s.model, "fp32")
    with tempfile.TemporaryDirectory() as folder:
        hf.save_views(folder, s.views([chunk]), json_of, torch.float32)
        run = s.run(dtype="fp32", model_config=Path(folder))
        assert s.script.model_of(run) == s.model, "config.json does not read back as the model"
        _same(s.load(folder, run), dict(chunk.named_parameters()))
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(dtype="fp32", ep=2, seq_len=s.seq_len)
        ranks = pool.run(2, train, s.name, s.sizes, flags, folder)
        masters = parallel.whole([r[2] for r in ranks])
        saved = {name: x for (name, kind), x in masters.items() if kind == "master"}
        _same(s.load(checkpoint.latest(folder), s.run(dtype="fp32")), saved)
    return f"{len(names)} tensors"


def _same(chunks: list[nn.Module], want: dict[str, Tensor]) -> None:
    for name, p in named_parameters(chunks):
        assert torch.equal(p.detach().flatten(), want[name].flatten()), f"{name} is not read back"


def learning(s: Subject, steps: int = 20) -> str:
    """The preset's own run, cut to 20 steps, falls by a nat from a uniform guess (5.55 a byte)."""
    flags = dict(s.script.FLAGS[s.preset], steps=steps, out=Path("unused"), dtype="fp32")
    run, model = s.script.Config(**flags, preset=s.preset), s.script.MODELS[s.preset]
    mesh = build_mesh(run, CPU)
    chunks = s.script.build(model, run, mesh)
    loader = s.script.Loader(run.data, run.seq_len, model.vocab_size, run.seed)
    optimizer = s.script.build_optimizer(chunks, run, mesh)
    t = s.script.Trainer(model, run, mesh, chunks, optimizer, loader)
    losses = [s.script.train_step(t, step)["loss"] for step in range(1, steps + 1)]
    assert abs(losses[0] - math.log(model.vocab_size)) < 0.5, f"first loss {losses[0]:.2f}"
    assert losses[-1] < losses[0] - 1, f"loss {losses[0]:.2f} → {losses[-1]:.2f} in {steps} steps"
    return f"loss {losses[0]:.2f} → {losses[-1]:.2f} in {steps} steps"


def oracle(s: Subject) -> str:
    """Logits and every gradient in float64 against `--reference`, or else transformers."""
    if s.reference is not None:
        module, _, function = s.reference.partition(":")
        return _compare(s, s.reference, partial(_reference, module, function))
    from transformers.models.auto import modeling_auto

    kind = s.script.hf_config(s.model, "fp64")["model_type"]
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise Skip(f"not compared: transformers has no model_type {kind}; give --reference")
    return _compare(s, f"transformers' {kind}", _transformers)


def _compare(s: Subject, what: str, other: Callable) -> str:
    """`other`(s, chunks, batch) → (its logits, (our gradients, its own), by its names)."""
    run = s.run(balance="none", z_loss_coef=0.0)  # the language model alone
    chunks, (batch,) = s.chunks(run), s.batches(1)
    with torch.no_grad():
        mine = drive(chunks[0](None, Batch(batch.tokens), None))
    drive(chunks[0](None, batch, None)).backward()
    logits, grads = other(s, chunks, batch)
    error = relative(mine, logits.detach())
    assert error < 1e-9, f"logits are not {what}: off by {error:.0e}, allowed 1e-09"
    worst = largest(*grads, 1e-9, relative)
    return f"{what}: logits within {error:.0e}, gradients {worst:.0e}"


def _reference(module: str, function: str, s: Subject, chunks: list, batch: Batch) -> tuple:
    weights = {n: p.detach().clone().requires_grad_() for n, p in named_parameters(chunks)}
    logits = getattr(importlib.import_module(module), function)(s.model, weights, batch.tokens)
    _summed_loss(logits, batch).backward()
    mine = {n: _grad(n, p) for n, p in named_parameters(chunks)}
    return logits, (mine, {n: w.grad for n, w in weights.items()})


def _transformers(s: Subject, chunks: list, batch: Batch) -> tuple:
    """Weights, and then gradients, travel in our own files: no table of its names is needed."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    json_of, models = s.script.hf_config(s.model, "fp64"), []
    kind = type(transformers.AutoConfig.for_model(json_of["model_type"]))
    model_file = sys.modules[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__]
    with no_fp32(model_file, transformers.modeling_rope_utils):
        for take in (lambda p: p.detach(), lambda p: p.grad):
            with tempfile.TemporaryDirectory() as folder:
                hf.save_views(folder, s.views(chunks, take), json_of, torch.float64)
                model, said = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float64, output_loading_info=True,
                    attn_implementation="eager", experts_implementation="eager",
                )  # fmt: skip
            wrong = {k: v for k, v in said.items() if v}
            assert not wrong, f"transformers does not find its tensors in our files: {wrong}"
            models.append(model)
        logits = models[0](batch.tokens).logits
        _summed_loss(logits, batch).backward()
    theirs = {n: _grad(n, p) for n, p in models[0].named_parameters()}
    return logits, ({n: p.detach() for n, p in models[1].named_parameters()}, theirs)


def _summed_loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def layout(s: Subject, name: str) -> str:
    """Three AdamW steps on gloo processes equal one process's: losses, gradients, weights."""
    world, axes = parallel.LAYOUTS[name]
    run = s.run(**axes)
    try:
        config.check(run, world)
        s.script.check_model(s.model, run)
    except ValueError as error:
        raise Skip(f"refused: {error}") from None
    # Without clipping the first exp_avg is the gradient times 1 - beta1.
    flags = dict(dtype="fp64", clip=0.0, seq_len=s.seq_len, **axes)
    alone = {k: v for k, v in flags.items() if k not in ALONE}
    records, first, last, evaluated = train(0, 1, s.name, s.sizes, alone)
    ranks = pool.run(world, train, s.name, s.sizes, flags)
    for theirs, _, _, loss in ranks:
        for a, b in zip((*theirs, dict(eval=loss)), (*records, dict(eval=evaluated)), strict=True):
            for key in a.keys() & {"loss", "grad_norm", "balance", "expert_load", "eval"}:
                x, y = (torch.tensor(r[key], dtype=torch.float64) for r in (a, b))
                largest({key: x}, {key: y}, 1e-11)
    whole = [[parallel.whole([r[i] for r in ranks]), parallel.whole([x])]
             for i, x in ((1, first), (2, last))]  # fmt: skip
    figures = largest(*whole[0], 1e-12), largest(*whole[1], 5e-11)
    return "after a step within {:.0e}, after three {:.0e}".format(*figures)


def bits(s: Subject) -> str:
    """The same run twice, on two processes in fp32: the same losses and weights, bit for bit."""
    flags = dict(dtype="fp32", ep=2, seq_len=s.seq_len)
    runs = [pool.run(2, train, s.name, s.sizes, flags) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert [r["loss"] for r in a[0]] == [r["loss"] for r in b[0]], "losses differ"
        for (name, kind, _, x), (*_, y) in zip(a[2], b[2], strict=True):
            assert torch.equal(x, y), f"{name} ({kind}) differs"
    return "3 steps, twice"


def resume(s: Subject) -> str:
    """Saved after step 2 and gone on: bit-equal alone, the same state and losses 1e-5 at ep 2."""
    flags = dict(dtype="fp32", seq_len=s.seq_len)
    with tempfile.TemporaryDirectory() as folder:
        straight, _, _ = train_from(0, 1, s.name, s.sizes, flags, Path(folder), (1, 2, 3, 4), 2)
        job = train_from, s.name, s.sizes
        losses, slices, _ = job[0](0, 1, *job[1:], flags, Path(folder), (3, 4))
        assert losses == straight[2:], f"losses {losses}, without the stop {straight[2:]}"
        ranks = pool.run(2, *job, dict(flags, ep=2), Path(folder), (3, 4))
    want, got = parallel.whole([slices]), parallel.whole([r[1] for r in ranks])
    assert got.keys() == want.keys(), f"not the same parameters: {got.keys() ^ want.keys()}"
    for key, x in want.items():
        assert torch.equal(got[key], x), f"{key} is read otherwise at ep 2"
    pairs = zip(ranks[0][0], straight[2:], strict=True)
    error = max(abs(a / b - 1) for a, b in pairs)
    assert error < 1e-5, f"losses at ep 2 off by {error:.0e}"
    return f"bit-equal; at ep 2 losses within {error:.0e}"


# ------------------------------------------------------------------------------------------------
# What they use
# ------------------------------------------------------------------------------------------------


def train(rank: int, world: int, name: str, sizes: dict, flags: dict, out=None) -> tuple:
    """tests/test_parallel.py's three steps, on any rank, of a script that its table may lack."""
    parallel.SCRIPTS[name] = sizes
    return parallel.train(rank, world, dict(flags, script=name), out and Path(out))


def train_from(
    rank: int, world: int, name: str, sizes: dict, flags: dict, out: Path, steps: tuple,
    saved_at: int | None = None,
) -> tuple:  # fmt: skip
    """Likewise, from the checkpoint in `out` if there is one."""
    parallel.SCRIPTS[name] = sizes
    return parallel.train_from(rank, world, dict(flags, script=name), out, steps, saved_at)


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a share of b's largest value (of 1e-3 where that is less)."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()


def largest(got: dict, want: dict, bound: float, distance: Callable = apart) -> float:
    """Largest distance of two tensors of one name; AssertionError naming what is beyond `bound`."""
    assert got.keys() == want.keys(), f"not the same parameters: {got.keys() ^ want.keys()}"
    errors = {key: distance(got[key], x) for key, x in want.items()}
    beyond = [key for key, error in errors.items() if not error <= bound]
    if beyond:
        worst = max(beyond, key=lambda key: errors[key])
        more = f" and {len(beyond) - 1} others" if len(beyond) > 1 else ""
        raise AssertionError(f"{worst} off by {errors[worst]:.0e}{more}, allowed {bound:.0e}")
    return max(errors.values())


def reason(error: Exception) -> str:
    """One line: what, and where unless it is a check's own finding."""
    what = (str(error).splitlines() or ["no message"])[0]
    if isinstance(error, AssertionError) and str(error):
        return what
    frame = traceback.extract_tb(error.__traceback__)[-1]
    remote = re.findall(r'File "(.*?)", line (\d+)', "".join(getattr(error, "__notes__", [])))
    file, line = remote[-1] if remote else (frame.filename, frame.lineno)
    return f"{type(error).__name__}: {what} ({Path(file).name}:{line})"


CHECKS = {
    "tape": tape, "sight": sight, "bf16": bf16, "compiled": compiled, "gradients": gradients,
    "files": files, "learning": learning, "oracle": oracle, "layouts": layout, "bits": bits,
    "resume": resume,
}  # fmt: skip


def subject(flags: argparse.Namespace) -> Subject:
    """Raises ValueError for a script, a preset or a size that is not there."""
    path = Path(flags.script).resolve()
    if not path.is_file() or path.parent != ROOT:
        raise ValueError(f"{flags.script}: must be a script of {ROOT}, for example train_x.py")
    script = importlib.import_module(path.stem)
    if flags.preset not in script.MODELS:
        raise ValueError(f"--preset {flags.preset}: use one of {', '.join(script.MODELS)}")
    model = script.MODELS[flags.preset]
    sizes = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    sizes["initializer_range"] = None
    if flags.preset == "tiny":
        sizes |= parallel.SCRIPTS.get(path.stem, {})
    for pair in flags.set:
        key, _, value = pair.partition("=")
        if key not in sizes:
            raise ValueError(f"--set {pair}: the model has no {key}; it has {', '.join(sizes)}")
        try:
            sizes[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            sizes[key] = value
    if sizes["initializer_range"] is None:  # a matrix then keeps the size of what it multiplies
        sizes["initializer_range"] = sizes["hidden_size"] ** -0.5
    return Subject(path.stem, sizes, flags.preset, flags.seq_len, flags.reference)


def chosen(s: Subject, flags: argparse.Namespace) -> list[tuple[str, Callable[[], str]]]:
    """The checks to run, cheapest first; a line for each layout."""
    names = flags.checks or (QUICK if flags.quick else CHECKS)
    layouts = flags.layouts or (("pp2", "ep2") if flags.quick else LAYOUTS)
    out = []
    for name, check in CHECKS.items():
        if name in names and name == "layouts":
            out += [(f"layout {x}", partial(layout, s, x)) for x in layouts]
        elif name in names:
            out.append((name, partial(check, s)))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script", help="train_<name>.py of this project")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="of the model")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a part of the checks, for CI")
    parser.add_argument("--checks", nargs="+", choices=CHECKS)
    parser.add_argument("--layouts", nargs="+", choices=parallel.LAYOUTS)
    parser.add_argument(
        "--reference", metavar="MODULE:FUNCTION",
        help="(model, weights by name, tokens (B, T)) → logits (B, T, V), differentiable, float64",
    )  # fmt: skip
    flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        s = subject(flags)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    begin, states = time.monotonic(), []
    for name, check in chosen(s, flags):
        torch.manual_seed(0)
        try:
            state, said = "PASS", check()
        except Skip as why:
            state, said = "SKIP", str(why)
        except Exception as error:  # whatever the script raises is a finding
            state, said = "FAIL", reason(error)
        states.append(state)
        print(f"{state} {name}: {said}", flush=True)
    failed, skipped = states.count("FAIL"), states.count("SKIP")
    seconds = time.monotonic() - begin
    print(
        f"{'FAIL' if failed else 'PASS'} {s.name}: {len(states)} checks, {failed} failed, "
        f"{skipped} skipped, {seconds:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
