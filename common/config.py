"""The run's flags, alike in every script, and the checks that need no model and no torch.

A script writes `@dataclass(frozen=True) class Config(Run)`, calls `run = parse(Config, PRESETS)`
and then `check(run, world)`. torch is not imported here, so that `--help` answers at once.
"""

import dataclasses
import difflib
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_type_hints

import tyro


@dataclass(frozen=True)
class Run:
    """Flags of one training run: a preset changes defaults, the command line has the last word."""

    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PRESET]")] = "tiny"
    """The model's size; comes first on the command line."""

    # Layout: dp, the number of data-parallel ranks, is what is left: world / (pp * cp).
    pp: int = 1
    """Pipeline ranks; above 1 a step needs at least 2 * pp micro-batches."""
    cp: int = 1
    """Context-parallel ranks (one sequence is spread over them)."""
    ep: int = 1
    """Expert-parallel ranks; divides dp * cp and the number of experts."""

    # Data and the size of a step.
    data: tuple[str, ...] = ("stdlib",)
    """Token directories, DIR[:WEIGHT] ...; stdlib is Python's own source, as bytes."""
    seq_len: int = 4096
    """Tokens a sequence."""
    micro_batch: int = 1
    """Sequences a micro-batch and data-parallel rank."""
    global_batch: int = 64
    """Sequences a step."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    isolate_documents: bool = False
    """A token sees its own document only; positions restart, boundary targets are ignored."""
    layers: int | None = None
    """Layers of the model; None: the preset's depth."""

    # Optimizer and learning rate.
    lr: Annotated[float, tyro.conf.arg(aliases=("--learning-rate",))] = 3e-4
    """Peak learning rate."""
    warmup: int = 0
    """Steps of linear warm-up."""
    decay: int | None = None
    """Last steps, in which lr falls; None: all after warm-up (wsd: a tenth of the steps)."""
    schedule: Literal["constant", "wsd", "cosine", "linear"] = "wsd"
    """Learning rate after warm-up; wsd holds, then falls linearly."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a share of lr."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon updates hidden matrices only; the rest stays with AdamW."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices, times the learning rate."""
    clip: float = 1.0
    """Largest global gradient norm; 0 = off."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Storage of the optimizer's moments."""
    seed: int = 0
    """Of initial weights, sample order and random routing."""

    # How it is computed.
    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Of parameters and activations; master weights have at least fp32."""
    compile: bool = True
    """torch.compile the segments between two exchanges."""
    cuda_graph: bool = True
    """Record micro-batches and their exchanges as a CUDA graph (bf16, on a GPU, no documents)."""
    recompute: Literal["none", "experts", "layer"] = "none"
    """What the backward computes again to save memory; of communication only the ring of --cp."""
    wgrad_batch: int = 1
    """Micro-batches whose expert weight gradients are one product (pp 1, ep 1); costs memory."""
    deterministic: bool = False
    """Same inputs, same bits, on a GPU too (slower attention backward)."""
    room: float = 1.25
    """Reserved for an exchange of --ep, times what an earlier step needed; 0: the host waits."""
    timeout: int = 600
    """Seconds after which a collective that waits for a lost rank fails."""

    # Routing.
    balance: Literal["micro-batch", "global-batch", "sequence", "none"] = "global-batch"
    """What the load-balancing loss is computed over."""
    balance_coef: float = 1e-3
    """Coefficient of the balance loss (of E * sum f * P, 1.0 when perfect)."""
    z_loss_coef: float = 0.0
    """Coefficient of the router's z-loss; 0 = off."""
    bias_update_rate: float = 0.0
    """Step of the auxiliary-loss-free routing bias; 0 = off."""
    force_balance: Literal["stride", "random"] | None = None
    """Ignore the router's choices, in evaluation too (for benchmarks)."""

    # Files.
    model_config: Path | None = None
    """Hugging Face config.json in place of the preset's model."""
    init_from: Path | None = None
    """Hugging Face directory with the initial weights (rounded to --dtype); a new run only."""
    out: Path | None = None
    """Holds step-*/, metrics.jsonl and config.json; None: out/<script>-<preset>."""
    save_every: int = 500
    """Steps between checkpoints, and after the last; 0 = only when stopped by a signal."""
    keep_last: int = 2
    """Checkpoints kept."""
    eval_every: int = 0
    """Steps between evaluations on held-out sequences; 0 = none."""
    eval_batches: int = 8
    """Global batches an evaluation reads."""
    eval_only: bool = False
    """Evaluate once and stop."""
    sample_tokens: int = 0
    """Tokens of the text sampled at the end; 0 = none."""
    profile: str | None = None
    """A:B traces steps A to B - 1 into <out>/profile."""
    wandb: str | None = None
    """Weights & Biases project (rank 0 only; offline where there is no key)."""


def nearest(name: str, options) -> str | None:
    """The option spelt most like `name`, or None where none is at all like it."""
    return next(iter(difflib.get_close_matches(name, list(options), n=1, cutoff=0.4)), None)


def parse(Config: type, presets: dict[str, dict[str, Any]], argv: list[str] | None = None):
    """Command line → Config; the chosen preset's overrides are the defaults that `--help` shows.

    Exits with status 2 and a message on stderr (rank 0) for an unknown preset, an unknown flag
    (tyro names the nearest) or a value of the wrong type.
    """
    argv = sys.argv[1:] if argv is None else argv
    preset, named = Config().preset, bool(argv) and not argv[0].startswith("-")
    if named:
        preset, argv = argv[0], argv[1:]  # tyro's help hides a positional that it has consumed
    for word in argv:
        if word.partition("=")[0] == "--preset":
            _exit(f"--preset: no flag, its name alone stands first; use {', '.join(presets)}")
    run = _parse_with(Config, presets, preset, argv)
    if run.preset != preset and named:
        _exit(f"two presets: {preset} and {run.preset}; use one")
    if run.preset != preset:  # it stood after flags: its defaults are known only now
        run = _parse_with(Config, presets, run.preset, argv)
    return run


def _parse_with(Config: type, presets: dict[str, dict[str, Any]], preset: str, argv: list[str]):
    if preset not in presets:
        guess = nearest(preset, presets)
        hint = f"; did you mean {guess}?" if guess else ""
        if preset.lower() in ("true", "false"):
            hint = "; a switch takes no value: --compile, --no-compile"
        _exit(f"unknown preset {preset}: use {', '.join(presets)}{hint}")
    title = (sys.modules[Config.__module__].__doc__ or "").strip().split("\n")[0]
    shown = f"{title}\n\nPresets: {', '.join(presets)}. The defaults below are those of {preset}."
    default = Config(**{"preset": preset, **presets[preset]})
    try:
        return tyro.cli(
            Config, default=default, args=argv, description=shown, console_outputs=_rank0()
        )
    except BrokenPipeError:  # --help | head
        drop_stdout()
        raise SystemExit(1) from None


def _rank0() -> bool:
    return os.environ.get("RANK", "0") == "0"  # torchrun: one message, not one a process


def drop_stdout() -> None:
    """Drop what is still written to stdout, and what is buffered: nobody can read it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _exit(message: str):
    if _rank0():
        print(message, file=sys.stderr)
    raise SystemExit(2)


def fail(error: Exception | str) -> NoReturn:
    """End this process with status 1 and `error: ...`, one line on stderr, once a job.

    What all ranks have found, rank 0 says. The others wait, and torchrun ends them meanwhile; a
    fault that rank 0 has not is still shown.
    """
    message = f"error: {error}"
    if not _rank0():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training run finishes its step first
        time.sleep(2)
    sys.stderr.write(f"{message}\n")  # with its end of line: ranks share stderr
    sys.stderr.flush()
    exit_ = SystemExit(message)
    exit_.code = 1  # instead of a text that the interpreter would print once more
    raise exit_ from None


AT_LEAST_1 = (
    "pp cp ep seq_len micro_batch global_batch steps layers decay keep_last timeout wgrad_batch"
)
AT_LEAST_0 = (
    "warmup seed weight_decay clip balance_coef z_loss_coef bias_update_rate "
    "save_every eval_every eval_batches sample_tokens"
)


def check(run: Run, world: int) -> None:
    """Refuse, before anything is built, flags that cannot work on `world` ranks.

    Raises ValueError, one line: the flag, its value and values that would work. What depends on
    the model (ep divides the experts, layers against pp) is for the script to check.
    """
    _check_values(run)
    _check_schedule(run)
    _check_layout(run, world)
    if not run.data or not all(run.data):
        raise ValueError("--data: name at least one directory, or stdlib")
    if (run.eval_every or run.eval_only) and run.eval_batches < 1:
        _refuse(run, "eval_batches", "an evaluation needs at least 1")
    if run.profile is not None and profile_window(run.profile)[0] > run.steps:
        _refuse(run, "profile", f"begins after the last of --steps {run.steps}")


def _refuse(run: Run, name: str, why: str):
    raise ValueError(f"--{name.replace('_', '-')} {getattr(run, name)}: {why}")


def _check_values(run: Run) -> None:
    """Each flag by itself: choices, bounds and finiteness."""
    for name, hint in get_type_hints(Run).items():
        value = getattr(run, name)
        # Literal["a", "b"] has the choices as arguments, Literal[...] | None one level deeper.
        choices = [c for a in get_args(hint) for c in (get_args(a) or (a,)) if isinstance(c, str)]
        if choices and value is not None and value not in choices:
            _refuse(run, name, f"use {', '.join(choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(run, name, "must be finite")
    for name in AT_LEAST_1.split():
        if getattr(run, name) is not None and getattr(run, name) < 1:
            _refuse(run, name, "must be at least 1")
    for name in AT_LEAST_0.split():
        if getattr(run, name) < 0:
            _refuse(run, name, "must be at least 0")
    if not (run.room == 0 or run.room >= 1):
        _refuse(run, "room", "must be 0, or at least 1")
    for name in ("lr", "eps"):
        if getattr(run, name) <= 0:
            _refuse(run, name, "must be above 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(run, name) < 1:
            _refuse(run, name, "must be at least 0 and below 1")
    if not 0 <= run.min_lr_ratio <= 1:
        _refuse(run, "min_lr_ratio", "must lie between 0 and 1")


def _check_schedule(run: Run) -> None:
    if run.decay is None:
        return
    if run.schedule == "constant":
        _refuse(run, "decay", "--schedule constant has none; use wsd, cosine or linear")
    if run.warmup + run.decay > run.steps:
        left = run.steps - run.warmup
        _refuse(run, "decay", f"--steps {run.steps} less --warmup {run.warmup} leave {left}")


def _check_layout(run: Run, world: int) -> None:
    """Ranks, micro-batches and sequence halves come out even (dp = world / (pp * cp))."""
    pp, cp, ep = run.pp, run.cp, run.ep
    more, need = "", pp * math.lcm(cp, ep)
    if world == 1 and "WORLD_SIZE" not in os.environ:
        more = f", or start {need} with torchrun --nproc-per-node {need}"
    if world % (pp * cp):
        good = ", ".join(map(str, _divisors(world)))
        raise ValueError(
            f"--pp {pp} --cp {cp}: pp * cp = {pp * cp} does not divide the {world} "
            f"ranks; it can be {good}{more}"
        )
    dp = world // (pp * cp)
    if (dp * cp) % ep:
        good = ", ".join(map(str, _divisors(dp * cp)))
        _refuse(run, "ep", f"must divide dp * cp = {dp} * {cp}; use {good}{more}")
    each = run.micro_batch * dp
    if run.global_batch % each:
        below = run.global_batch // each * each
        good = f"{below} or {below + each}" if below else f"{each}"
        _refuse(
            run,
            "global_batch",
            f"not a multiple of --micro-batch {run.micro_batch} times "
            f"{dp} data-parallel ranks; use {good}",
        )
    if run.wgrad_batch > 1 and pp * ep > 1:
        _refuse(run, "wgrad_batch", "is for --pp 1 and --ep 1; there weight gradients fill waits")
    count = run.global_batch // each
    if pp > 1 and count < 2 * pp:
        _refuse(
            run,
            "global_batch",
            f"makes {count} micro-batches, --pp {pp} needs at least "
            f"{2 * pp}; use {2 * pp * each} or more, or a smaller --micro-batch or --pp",
        )
    half = 2 * cp  # zigzag: a rank holds two pieces of each sequence
    if cp > 1 and run.seq_len % half:
        below = run.seq_len // half * half
        good = f"{below} or {below + half}" if below else f"{half}"
        _refuse(run, "seq_len", f"must be a multiple of 2 * cp = {half}; use {good}")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def profile_window(text: str) -> tuple[int, int]:
    """'A:B' → (A, B), steps A to B - 1, counted from 1. Raises ValueError."""
    a, colon, b = text.partition(":")
    if not (colon and a.isdecimal() and b.isdecimal() and 1 <= int(a) < int(b)):
        raise ValueError(f"--profile {text}: use A:B with 1 <= A < B, for example 10:12")
    return int(a), int(b)


def lr_at(run: Run, step: int) -> float:
    """Learning rate of `step`, counted from 1 to run.steps.

    lr * step / warmup in warm-up; then lr until the last `decay` steps, in which it falls so that
    the last step has min_lr_ratio * lr.
    """
    if step < run.warmup:
        return run.lr * step / run.warmup
    after = max(0, run.steps - run.warmup)
    length = run.decay
    if length is None:
        length = min(after, max(1, run.steps // 10)) if run.schedule == "wsd" else after
    if run.schedule == "constant" or length == 0:
        return run.lr
    done = min(1.0, max(0.0, (step - (run.steps - length)) / length))  # share of the fall
    fall = (1 - math.cos(math.pi * done)) / 2 if run.schedule == "cosine" else done
    return run.lr * (1 - (1 - run.min_lr_ratio) * fall)


def to_json(run: Run) -> dict[str, Any]:
    """The run as JSON can hold it: paths as text, tuples as lists."""
    out = dataclasses.asdict(run)
    for name, value in out.items():
        if isinstance(value, (Path, tuple)):
            out[name] = str(value) if isinstance(value, Path) else list(value)
    return out
