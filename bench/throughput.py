"""Measure training throughput: our script, and on one GPU its peers on the same widths.

    python -m bench.throughput qwen3 --transformers --pith ../pith-train --megatron ../Megatron-LM
    python -m bench.throughput qwen3 --gpus 2 --layers 8 --flag ep=2 --global-batch 32
    python -m bench.throughput tiny --steps 10 --transformers       # everything runs on a CPU too

Every contender gets the same widths, layers, sequence length and micro-batches, with routing forced
(random or balanced, as it offers it), in a process of its own; bench/peers/ says how each is run
and what differs. A step is timed from outside with the device idle at both ends; the figure is the
median of the timed steps. MFU has one definition for all: our script's FLOPs a token over the GPU's
dense bf16 peak. A contender that was not asked for, is not there or fails is said to be so, with
the reason, and gets no number. What was measured is appended to bench/RESULTS.csv.

With --gpus N our script runs on N GPUs of this machine (without any: N processes), laid out by its
own flags, and tokens/s are those of all. --trace adds a step that bench.overlap can read.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from bench import overlap
from bench.peers import ours
from bench.peers.job import MARK, Job, write
from bench.results import ROOT, append, commit_of
from common.config import nearest
from common.log import peak_flops, rates

RESULTS = ROOT / "bench" / "RESULTS.csv"
COLUMNS = (
    "date", "commit", "gpu", "gpus", "torch", "triton", "contender", "version", "model", "layers",
    "seq_len", "micro_batch", "micro_batches", "routing", "steps", "step_s", "tokens_per_s", "mfu",
    "peak_gib", "note",
)  # fmt: skip
GRACE_S = 60  # between being asked to end and being killed; torchrun gives its processes half
JOBS = {
    "tiny": Job("train_qwen3_moe", "tiny", 4, 128, 8, 16),
    "qwen3": Job("train_qwen3_moe", "30b-a3b", 6, 4096, 1, 16),
    "deepseek": Job("train_deepseek_v2_lite", "v2-lite", 8, 2048, 1, 16),
    "gpt-oss": Job("train_gpt_oss", "20b", 6, 4096, 1, 16),
}


@dataclass(frozen=True)
class Contender:
    """Its name, its module in bench.peers, and the file that a checkout of it must hold."""

    name: str
    module: str
    holds: str | None = None


CONTENDERS = (
    Contender("ours", "ours"),
    Contender("pith-train", "pith", "pithtrain/tasks/pretrain_lm.py"),
    Contender("megatron-lm", "megatron", "pretrain_gpt.py"),
    Contender("torchtitan", "titan", "torchtitan/train.py"),
    Contender("transformers", "hf"),
)


# ------------------------------------------------------------------------------------------------
# One contender
# ------------------------------------------------------------------------------------------------


def absent(contender: Contender, args: argparse.Namespace) -> str | None:
    """Why a contender cannot be run, or None."""
    if contender.name == "ours":
        return None
    if args.gpus > 1:
        return "measured on one GPU only"
    if contender.name == "transformers":
        if not args.transformers:
            return "not asked for (--transformers)"
        found = importlib.util.find_spec("transformers")
        return None if found else "transformers cannot be imported"
    checkout = getattr(args, contender.module)
    if checkout is None:
        flag = {"titan": "torchtitan"}.get(contender.module, contender.module)
        return f"not asked for (--{flag} DIR)"
    return (
        None if (checkout / contender.holds).is_file() else f"{checkout} has no {contender.holds}"
    )


def run(contender: Contender, job: Job, timeout_s: float) -> dict | str:
    """Run a contender's process; its result, or one line that says why there is none.

    Its output goes to <out>/<contender>.log. After `timeout_s` all its processes are ended.
    Several processes are torchrun's.
    """
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    log, job_file = out / f"{contender.name}.log", out / f"{contender.name}.json"
    write(job, job_file)
    command = [sys.executable]
    if job.gpus > 1:  # an address that every machine has: torchrun would look its own name up
        command += "-m torch.distributed.run --standalone --local-addr 127.0.0.1".split()
        command += ["--nproc-per-node", str(job.gpus)]
    command += ["-m", f"bench.peers.{contender.module}", str(job_file.absolute())]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            status = process.wait(timeout_s)
        except BaseException as error:
            end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"failed: no end after {timeout_s:.0f} s, see {log}"
    text = log.read_text(errors="replace")
    results = [line for line in text.splitlines() if line.startswith(MARK)]
    if status or not results:
        return f"failed: {last_error(text, status)}, see {log}"
    return json.loads(results[-1].removeprefix(MARK))


def end(process: subprocess.Popen) -> None:
    """End a process and those of its session; torchrun's have their own, and it ends them."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(text: str, status: int) -> str:
    """The line of a log that says best what went wrong; of several ranks, on the first to fail."""
    before, _, cause = text.rpartition("Root Cause (first observed failure)")  # torchrun's summary
    killed = re.search(r"traceback : (Signal .*)", cause)
    if killed:
        return killed[1]
    pattern = r"\s*((?:\[rank\d+\]: *)?[\w.]*(?:Error|Exception)\b.*)"
    for part in (cause, before):  # a rank that could not even begin leaves no cause
        errors = [m[1].strip() for line in part.splitlines() if (m := re.match(pattern, line))]
        errors = [line for line in errors if "ChildFailedError" not in line]
        if errors:
            return errors[-1][:200]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return lines[-1][:200] if lines else f"exit status {status}, no output"


# ------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------


def row(name: str, job: Job, result: dict, flops_per_token: float, commit: str) -> dict:
    """One line of RESULTS.csv; None where a figure has no meaning (on a CPU) or is not known."""
    step_s = statistics.median(result["step_s"])
    peak = peak_flops(result["gpu"], job.dtype)
    per_s, mfu = rates(job.tokens, step_s, flops_per_token, peak, job.gpus)
    model = f"{job.script.removeprefix('train_')} {job.preset}"
    known = {key: result[key] for key in ("gpu", "torch", "triton", "routing", "note", "peak_gib")}
    return dict(
        date=datetime.date.today().isoformat(), commit=commit, contender=name, gpus=job.gpus,
        version=result["version"] or commit, model=model, layers=job.layers, seq_len=job.seq_len,
        micro_batch=job.micro_batch, micro_batches=job.micro_batches, steps=len(result["step_s"]),
        step_s=step_s, tokens_per_s=per_s, mfu=mfu, **known,
    )  # fmt: skip


FORMS = {"step_s": "{:.4f}", "tokens_per_s": "{:.0f}", "mfu": "{:.4f}", "peak_gib": "{:.2f}"}


def table(outcomes: dict[str, dict | str], job: Job) -> str:
    """Markdown: a line a contender, the reason where there is no figure."""
    first = next((r for r in outcomes.values() if isinstance(r, dict)), None)
    where = f" on {job.gpus} x {first['gpu']}, torch {first['torch']}" if first else ""
    lines = [
        f"{job.script} {job.preset}, {job.layers} layers, sequence {job.seq_len:,}, "
        f"{job.micro_batches} micro-batches of {job.micro_batch}, {job.dtype}{where}", "",
        "| contender | version | routing | step, s | tokens/s | MFU | peak GiB | note |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, r in outcomes.items():
        if isinstance(r, str):
            lines.append(f"| {name} | | | | | | | {r} |")
            continue
        mfu = "" if r["mfu"] is None else f"{100 * r['mfu']:.1f} %"
        peak = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
        figures = f"{r['step_s']:.3f} | {r['tokens_per_s']:,.0f} | {mfu} | {peak}"
        lines.append(f"| {name} | {r['version']} | {r['routing']} | {figures} | {r['note']} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.throughput", description=__doc__, formatter_class=shown)
    add = parser.add_argument
    add("job", choices=JOBS, help="which model, at which depth and sequence length")
    for name in ("layers", "seq-len", "micro-batch", "global-batch"):
        add(f"--{name}", type=int, help="in place of the job's")
    add("--gpus", type=int, default=1, help="that our script runs on (%(default)s)")
    add("--steps", type=int, default=12, help="timed steps, at least 10 (%(default)s)")
    add("--warmup", type=int, default=3, help="steps before them (%(default)s)")
    add(
        "--flag", action="append", default=[], metavar="KEY=VALUE", help="of our script, repeatable"
    )
    add("--trace", action="store_true", help=f"trace one step more of ours: <out>/{ours.TRACE}")
    add("--pith", type=Path, metavar="DIR", help="checkout of mlc-ai/pith-train")
    add("--megatron", type=Path, metavar="DIR", help="checkout of NVIDIA/Megatron-LM")
    add("--megatron-args", default="", help="appended to its flags")
    add(
        "--torchtitan",
        type=Path,
        metavar="DIR",
        dest="titan",
        help="checkout of pytorch/torchtitan",
    )
    add("--transformers", action="store_true", help="run transformers too")
    add("--skip-ours", action="store_true", help="peers only")
    add("--timeout", type=float, default=1800, help="seconds a contender may take (%(default)s)")
    add("--out", type=Path, default=Path("out/throughput"), help="logs (%(default)s)")
    add("--results", type=Path, default=RESULTS, help="CSV that rows are appended to (%(default)s)")
    add("--commit", default=None, help="our version, where git cannot say it")
    return parser.parse_args(argv)


def our_flags(pairs: list[str], script: ModuleType) -> dict:
    """KEY=VALUE pairs as values of the script's Config. Raises ValueError for an unknown key."""
    values, known = {}, {f.name: f.type for f in dataclasses.fields(script.Config)}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in known:
            guess = nearest(key, known)
            hint = f"; did you mean {guess}?" if guess else ""
            raise ValueError(f"--flag {pair}: use KEY=VALUE, KEY a flag of the script{hint}")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = {"True": True, "False": False}.get(text, text)
    return values


def job_of(args: argparse.Namespace) -> tuple[Job, float]:
    """The job that the command line asks for, and its FLOPs a token. Raises ValueError."""
    job = JOBS[args.job]
    if not (ROOT / f"{job.script}.py").is_file():
        raise ValueError(f"{args.job}: not run, {job.script}.py is not there")
    script = importlib.import_module(job.script)
    names = ("layers", "seq_len", "micro_batch", "global_batch", "steps", "warmup", "gpus", "trace")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    own = {k: v for k, v in script.FLAGS[job.preset].items() if k in ("dtype", "compile")}
    job = dataclasses.replace(
        job, **own | given, flags=our_flags(args.flag, script), out=str(args.out.absolute())
    )
    for name, least in (("steps", 10), ("warmup", 1), ("layers", 1), ("seq_len", 1),
                        ("micro_batch", 1), ("global_batch", 1), ("gpus", 1)):  # fmt: skip
        if getattr(job, name) < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(job, name)}: must be at least {least}")
    if job.global_batch % job.micro_batch:
        raise ValueError(
            f"--global-batch {job.global_batch}: not a multiple of --micro-batch {job.micro_batch}"
        )
    fixed = {"preset", "layers", "seq_len", "micro_batch", "global_batch"} & job.flags.keys()
    if fixed:
        raise ValueError(f"--flag {sorted(fixed)[0]}: it is the same for all; use its own flag")
    if args.skip_ours and (job.gpus > 1 or job.trace):
        flag = "--trace" if job.trace else f"--gpus {job.gpus}"
        raise ValueError(f"--skip-ours: {flag} is of our script alone; leave one of them out")
    if torch.cuda.is_available() and job.gpus > torch.cuda.device_count():
        raise ValueError(f"--gpus {job.gpus}: this machine has {torch.cuda.device_count()}")
    _, model = ours.config(script, job)  # refused here, a layout that does not fit is one line
    job = dataclasses.replace(job, model=script.hf_config(model, job.dtype))
    return job, script.flops_per_token(model, job.seq_len)


def compare(args: argparse.Namespace) -> dict[str, dict | str]:
    """Run all that can be run, print the table, append the rows; outcomes by contender."""
    job, flops = job_of(args)
    commit = args.commit or commit_of(ROOT)
    outcomes = {}
    for contender in CONTENDERS[args.skip_ours :]:
        why = absent(contender, args)
        if why:
            outcomes[contender.name] = f"not run: {why}"
            continue
        print(f"{contender.name} ...", flush=True)
        checkout = getattr(args, contender.module, None)
        own = dataclasses.replace(
            job, checkout=str(checkout.absolute()) if checkout else None,
            extra=tuple(args.megatron_args.split()) if contender.module == "megatron" else (),
        )  # fmt: skip
        result = run(contender, own, args.timeout)
        if isinstance(result, dict):
            if contender.name == "ours" and job.trace:
                seen = overlap.summary(Path(job.out) / ours.TRACE)
                result["note"] = "; ".join(filter(None, [result["note"], seen]))
            result = row(contender.name, own, result, flops, commit)
        outcomes[contender.name] = result
        print(f"{contender.name}: {result if isinstance(result, str) else 'done'}", flush=True)
    measured = [r for r in outcomes.values() if isinstance(r, dict)]
    append(measured, args.results, COLUMNS, FORMS)
    print("\n" + table(outcomes, job))
    return outcomes


def main(argv: list[str] | None = None) -> None:
    """A user's mistake is one line and status 1; so is a contender that was run and failed."""
    try:
        outcomes = compare(parse(argv))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    failed = [name for name, r in outcomes.items() if str(r).startswith("failed")]
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
