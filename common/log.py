"""What a run says and leaves behind: the step line, metrics.jsonl, wandb, rates, traces, signals.

Nothing here decides anything about training; the script calls it once a step, from every rank.
"""

import contextlib
import json
import math
import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from common.config import drop_stdout, profile_window


class Log:
    """Rank 0's step lines, `<out>/config.json`, `<out>/metrics.jsonl` and, if asked for, wandb.

    The other ranks may call everything; nothing happens there. `out=None` writes no files.
    `config` is the run as JSON (common.config.to_json). `resume_step` is the step of the loaded
    checkpoint, 0 for a fresh start: records of later steps are moved aside, for they come again.
    `repaired`: lines that say so, for the caller to print.
    """

    def __init__(
        self,
        out: Path | None,
        config: dict[str, Any],
        *,
        rank: int = 0,
        wandb_project: str | None = None,
        resume_step: int = 0,
    ):
        self.rank0 = rank == 0
        self.repaired: list[str] = []
        self._metrics = self._wandb = None
        self._skipped = 0  # as last seen, so that a line tells when it grows
        if not self.rank0:
            return
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            _write_aside(out / "config.json", json.dumps(config, indent=2) + "\n")
            metrics = out / "metrics.jsonl"
            if metrics.exists():
                moved, cut, self._skipped = repair_metrics(metrics, resume_step)
                if moved:
                    records = f"{moved} record{'s' if moved > 1 else ''} after step {resume_step}"
                    self.repaired.append(f"{metrics}: dropped {records}, kept in {DROPPED}")
                if cut:
                    said = "a line that is no record" if cut == 1 else f"{cut} lines, no records"
                    self.repaired.append(f"{metrics}: dropped {said}")
            self._metrics = open(metrics, "a", encoding="utf-8")
        if wandb_project is not None:
            self._start_wandb(wandb_project, out, config, resume_step)

    def say(self, text: str) -> None:
        """Print on rank 0, at once (a pipe would otherwise hold it back).

        What nobody can read any more (a closed pipe, a terminal that is gone) is dropped, and so
        is all that follows: the training goes on.
        """
        if not self.rank0:
            return
        try:
            print(text, flush=True)
        except OSError:
            drop_stdout()

    def step(self, record: dict[str, Any]) -> None:
        """Print the step's line and append `record` to metrics.jsonl.

        Keys: step, steps (of the run), loss, balance (list by layer, 1.0 = perfect), expert_load
        (list by layer of lists by expert), grad_norm, lr, step_s (seconds), tokens_per_s, mfu
        (a fraction) and mem_gib (None where unknown), skipped and tokens (totals so far). More
        keys are kept; numbers that are not finite become null.
        """
        if not self.rank0:
            return
        skipped = record.get("skipped", 0)
        self.say(step_line(record) + (f" | skipped {skipped}" if skipped > self._skipped else ""))
        self._skipped = skipped
        self._write(record)

    def eval(self, step: int, loss: float, tokens: int) -> None:
        """Print and append an evaluation: mean `loss` over `tokens` held-out target tokens."""
        self.say(f"eval loss {loss:.4f} over {tokens:,} tokens")
        self._write({"step": step, "eval_loss": loss, "eval_tokens": tokens})

    def close(self) -> None:
        """Close the file and finish the wandb run; safe to call twice."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # said when it was written
                self._metrics.close()
            self._metrics = None
        run, self._wandb = self._wandb, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:
                self.say(f"wandb failed to finish: {_one_line(error)}")

    def _write(self, record: dict[str, Any]) -> None:
        record = _plain(record)
        if self._metrics is not None:
            try:
                self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
                self._metrics.flush()
            except OSError as error:  # a full disk must not end the training; the next call retries
                self.say(f"step {record['step']} is not in metrics.jsonl: {_one_line(error)}")
        if self._wandb is None:
            return
        try:
            self._wandb.log(_flat(record), step=record["step"])
        except Exception as error:  # somebody else's network must not end the training
            self.say(f"wandb failed, training goes on without it: {_one_line(error)}")
            self._wandb = None

    def _start_wandb(self, project: str, out: Path | None, config: dict, resume_step: int) -> None:
        """A resumed run goes on under its old id, kept in `<out>/wandb-id`."""
        try:
            import wandb

            mode = os.environ.get("WANDB_MODE")
            if mode is None and not _wandb_key():
                mode = "offline"  # asking for a key would wait for a keyboard for ever
                self.say("wandb: no key found, so offline; `wandb sync` uploads the run later")
            kept = out / "wandb-id" if out is not None else None
            resumed = resume_step > 0 and kept is not None and kept.exists()
            name = kept.read_text().strip() if resumed else secrets.token_hex(4)
            if kept is not None:
                _write_aside(kept, name + "\n")
            where = dict(project=project, dir=str(out or "."), mode=mode)
            self._wandb = wandb.init(**where, config=config, id=name, resume="allow")
        except Exception as error:
            self.say(f"wandb failed, training goes on without it: {_one_line(error)}")


def step_line(record: dict[str, Any]) -> str:
    """The line printed for a step, without what the record has not (or has as None)."""
    balance = record.get("balance")  # printed is the mean; a collapsed layer shows in the record
    mfu = record.get("mfu")
    shown = {
        "loss {:.4f}": record.get("loss"),
        "balance {:.3f}": sum(balance) / len(balance) if balance else None,
        "grad {:.2f}": record.get("grad_norm"),
        "lr {:.1e}": record.get("lr"),
        "{:.2f} s": record.get("step_s"),
        "{:,.0f} tok/s": record.get("tokens_per_s"),
        "{:.1f}% mfu": None if mfu is None else 100 * mfu,
        "{:.1f} GiB": record.get("mem_gib"),
    }
    parts = [form.format(value) for form, value in shown.items() if value is not None]
    return " | ".join([f"step {record['step']}/{record['steps']}", *parts])


DROPPED = "metrics.dropped.jsonl"  # beside metrics.jsonl


def repair_metrics(path: Path, resume_step: int) -> tuple[int, int, int]:
    """Take from a metrics file the records after `resume_step` and lines that are not records.

    The records are appended to DROPPED. A process killed in mid-write leaves half a line. The file
    is rewritten aside and renamed. Returns (records moved, other lines cut, the count of skipped
    steps in the last record kept).
    """
    moved, cut, skipped = [], 0, 0
    aside = path.with_name(path.name + ".aside")
    with open(path, "rb") as old, open(aside, "wb") as new:
        for line in old:
            record = _parse_record(line)
            if record is None:
                cut += 1
            elif record["step"] > resume_step:
                moved.append(line)
            else:
                new.write(line)
                skipped = record.get("skipped", skipped)
        new.flush()
        os.fsync(new.fileno())
    if moved:  # first: a kill in between has them twice rather than not at all
        with open(path.with_name(DROPPED), "ab") as kept:
            kept.writelines(moved)
            kept.flush()
            os.fsync(kept.fileno())
    os.replace(aside, path)
    return len(moved), cut, skipped


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    good = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if good else None


def _write_aside(path: Path, text: str) -> None:
    """Never leaves half a file, whenever the process is killed."""
    aside = path.with_name(path.name + ".aside")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def _plain(value: Any) -> Any:
    """Numbers, lists and dicts as JSON has them: NaN and infinities become None."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if hasattr(value, "tolist"):  # torch and numpy, scalars too
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """For wandb's charts: the scalars, and the balance of each layer; no expert loads."""
    flat = {key: v for key, v in record.items() if isinstance(v, (int, float, str))}
    for layer, value in enumerate(record.get("balance") or []):
        flat[f"balance/{layer:02d}"] = value
    return flat


def _wandb_key() -> bool:
    """Whether wandb would find an API key: in the environment, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and str(host) in netrc.read_text(errors="replace")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# Dense bf16 FLOP/s of one GPU (the makers' data sheets, without sparsity); the first that matches.
PEAK_BF16 = {
    r"MIG": None,  # a slice of a GPU: its share of the peak is not in its name
    r"GB[23]00": 2500e12,
    r"B[23]00": 2250e12,
    r"H[12]00 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"(H100|H200|H800|GH200)": 989e12,
    r"H20": 148e12,
    r"A[18]00": 312e12,
    r"L40S": 362e12,
    r"L40": 181e12,
    r"L4": 121e12,
    r"A10": 125e12,
    r"RTX 4090$": 165e12,
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of one GPU by torch.cuda.get_device_name(); None where it is unknown.

    Only "bf16" has a peak: what fp32 reaches depends on TF32, and FP8 runs are rated against
    bf16 so that MFU stays comparable.
    """
    if dtype != "bf16":
        return None
    names = (name for name in PEAK_BF16 if re.search(rf"\b{name}\b", device_name))
    return PEAK_BF16.get(next(names, ""))


def rates(
    tokens: int, step_s: float, flops_per_token: float, peak: float | None, world: int
) -> tuple[float, float | None]:
    """(tokens per second, model FLOPs utilisation as a fraction, or None without a peak).

    `tokens` are those of the whole global batch, each counted once whatever cp or the number of
    micro-batches; `flops_per_token` are forward + backward FLOPs of the active parameters;
    `peak` is that of one of the `world` GPUs.
    """
    per_s = tokens / step_s
    return per_s, None if peak is None else per_s * flops_per_token / (peak * world)


def figures(
    device: torch.device, dtype: str, tokens: int, step_s: float, flops_per_token: float,
    world: int, nbytes: int = 0,
) -> dict[str, float | None]:  # fmt: skip
    """A step's speed and memory for its record: step_s, tokens_per_s, mfu, mem_gib (CUDA peak,
    and the `nbytes` that a CUDA graph holds)."""
    peak = mem_gib = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), dtype)
        mem_gib = (torch.cuda.max_memory_allocated(device) + nbytes) / 2**30
    per_s, mfu = rates(tokens, step_s, flops_per_token, peak, world)
    return {"step_s": step_s, "tokens_per_s": per_s, "mfu": mfu, "mem_gib": mem_gib}


class Profiler:
    """Traces a window of steps into `<out>/profile/`; does nothing at all without a window.

    `window` is "A:B": steps A to B - 1, counted from 1. Every rank writes trace-rank<R>.json
    (chrome://tracing, Perfetto) and, on CUDA, memory-rank<R>.pickle (pytorch.org/memory_viz).
    Under `nsys profile --capture-range=cudaProfilerApi` the same window is captured.
    """

    def __init__(self, window: str | None, out: Path | None, rank: int = 0):
        if window is not None and out is None:
            raise ValueError(f"--profile {window}: the trace needs a place; give --out DIR")
        self.window = None if window is None else profile_window(window)
        self.out, self.rank = out, rank
        self._trace = None

    def step_begin(self, step: int) -> None:
        """Start tracing when `step` lies in the window (also when a run resumes inside it)."""
        if self.window is None or self._trace or not self.window[0] <= step < self.window[1]:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
            torch.cuda.profiler.start()
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()

    def step_end(self, step: int) -> None:
        """Stop and write after the window's last step."""
        if self._trace and step >= self.window[1] - 1:
            self.close()

    def close(self) -> None:
        """Write what was traced, also when the run ends inside the window."""
        if not self._trace:
            return
        folder = self.out / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels still running would be cut off
            torch.cuda.profiler.stop()
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank{self.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._trace.stop()
        self._trace.export_chrome_trace(str(folder / f"trace-rank{self.rank}.json"))
        self._trace = None

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Name what runs inside, in the trace and (on CUDA) as an NVTX range for nsys.

        May enclose generators that take turns, but never stand inside one across a yield.
        """
        if not self._trace:
            yield
            return
        handle = torch.cuda.nvtx.range_start(name) if torch.cuda.is_available() else None
        with torch.profiler.record_function(name):
            yield
        if handle is not None:
            torch.cuda.nvtx.range_end(handle)


class Stop:
    """Turns SIGTERM, SIGINT and SIGHUP into a flag that the loop reads between two steps.

    `requested` is None or the signal's name. A second SIGINT raises KeyboardInterrupt: whoever
    presses Ctrl-C twice does not want to wait. A SIGHUP that is ignored stays so (nohup). Must be
    made in the main thread.
    """

    def __init__(self):
        self.requested: str | None = None
        self._interrupted = False
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signals.append(signal.SIGHUP)
        self._old = {s: signal.signal(s, self._handle) for s in signals}

    def _handle(self, number, frame) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.requested = self.requested or signal.Signals(number).name

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old = {}
