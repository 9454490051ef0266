"""The step line, metrics.jsonl after kills and resumes, a failing wandb, rates, traces, signals."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import torch

from common.log import Log, Profiler, Stop, peak_flops, rates, repair_metrics, step_line

NAN = float("nan")
RECORD = dict(
    step=120, steps=1000, loss=7.89012, balance=[1.0, 1.024], expert_load=[[3, 5], [4, 4]],
    grad_norm=0.981, lr=3e-4, step_s=1.234, tokens_per_s=133120.4, mfu=0.4123, mem_gib=62.34,
    skipped=0, tokens=9000,
)  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(step, **change):
    return {**RECORD, "step": step, **change}


# The step line


def test_step_line_is_as_documented():
    assert step_line(RECORD) == (
        "step 120/1000 | loss 7.8901 | balance 1.012 | grad 0.98 | lr 3.0e-04 | 1.23 s | "
        "133,120 tok/s | 41.2% mfu | 62.3 GiB"
    )


def test_step_line_omits_what_is_unknown():
    line = step_line({**RECORD, "mfu": None, "mem_gib": None, "balance": []})
    assert line.endswith("| 133,120 tok/s") and "mfu" not in line and "balance" not in line
    assert "loss nan" in step_line({**RECORD, "loss": NAN})


def test_skipped_is_said_when_it_grows(tmp_path, capsys):
    log = Log(tmp_path, {})
    for step, skipped in enumerate([0, 1, 1, 3], start=1):
        log.step(record(step, skipped=skipped))
    log.close()
    ends = [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["62.3 GiB", "skipped 1", "62.3 GiB", "skipped 3"]
    log = Log(tmp_path, {}, resume_step=4)  # the count goes on; nothing new to say
    log.step(record(5, skipped=3))
    log.close()
    assert "skipped" not in capsys.readouterr().out


# Files


def test_files_hold_everything_and_are_flushed(tmp_path, capsys):
    log = Log(tmp_path / "new" / "out", {"lr": 0.1, "data": ["x"]})
    log.step(RECORD)
    log.eval(120, 3.12341, 12345)
    got = lines(tmp_path / "new/out/metrics.jsonl")  # before close
    assert got == [RECORD, {"step": 120, "eval_loss": 3.12341, "eval_tokens": 12345}]
    config = json.loads((tmp_path / "new/out/config.json").read_text())
    assert config == {"lr": 0.1, "data": ["x"]}
    assert capsys.readouterr().out.splitlines()[1] == "eval loss 3.1234 over 12,345 tokens"
    log.close()
    log.close()


def test_only_rank_0_prints_and_writes(tmp_path, capsys):
    log = Log(tmp_path / "out", {}, rank=1, wandb_project="p")
    log.step(RECORD)
    log.eval(1, 1.0, 1)
    log.say("hello")
    log.close()
    assert not (tmp_path / "out").exists() and capsys.readouterr().out == ""


def test_no_out_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    log = Log(None, {})
    log.step(RECORD)
    log.close()
    assert list(tmp_path.iterdir()) == [] and "loss 7.8901" in capsys.readouterr().out


def test_non_finite_numbers_and_tensors_become_json(tmp_path):
    log = Log(tmp_path, {})
    load = torch.tensor([[1, 2], [3, 4]])
    log.step(record(1, loss=NAN, grad_norm=float("inf"), balance=[1.0, NAN], expert_load=load))
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    (got,) = lines(tmp_path / "metrics.jsonl")
    assert got["loss"] is None and got["grad_norm"] is None and got["balance"] == [1.0, None]
    assert got["expert_load"] == [[1, 2], [3, 4]]


def test_half_a_line_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps(record(s, skipped=s)) + "\n" for s in (1, 2, 3)]
    for cut in (1, 7, len(whole[2]) - 1):  # the last is whole but for its newline
        path.write_text("".join(whole[:2]) + whole[2][:cut])
        assert repair_metrics(path, 10) == (0, 1, 2)
        assert path.read_text() == "".join(whole[:2])
    path.write_bytes(whole[0].encode() + b"\0\0\0\n[1]\n{}\n" + whole[1].encode())
    assert repair_metrics(path, 10) == (0, 3, 2) and [r["step"] for r in lines(path)] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_resume_shows_every_step_once_and_keeps_what_it_drops(tmp_path):
    log = Log(tmp_path, {})
    for step in range(1, 6):
        log.step(record(step))
    log.eval(5, 1.0, 1)
    log.close()
    log = Log(tmp_path, {}, resume_step=3)
    for step in range(4, 8):
        log.step(record(step))
    log.close()
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == list(range(1, 8))
    metrics, dropped = tmp_path / "metrics.jsonl", tmp_path / "metrics.dropped.jsonl"
    said = f"{metrics}: dropped 3 records after step 3, kept in metrics.dropped.jsonl"
    assert log.repaired == [said]
    with open(metrics, "a") as file:
        file.write('{"step": 8, "lo')
    log = Log(tmp_path, {}, resume_step=6)
    log.close()
    ends = ["1 record after step 6, kept in metrics.dropped.jsonl", "a line that is no record"]
    assert log.repaired == [f"{metrics}: dropped {end}" for end in ends]
    Log(tmp_path, {}).close()  # a fresh start in the same place
    assert lines(metrics) == []
    assert [r["step"] for r in lines(dropped)] == [4, 5, 5, 7, *range(1, 7)]


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_stdout_that_nobody_reads_does_not_end_the_run(tmp_path, kind, monkeypatch):
    theirs, ours = os.pipe() if kind == "pipe" else os.openpty()
    monkeypatch.setattr(sys, "stdout", open(ours, "w"))
    log = Log(tmp_path, {})
    log.step(record(1))
    os.close(theirs)
    for step in (2, 3):
        log.step(record(step))
    log.close()
    sys.stdout.close()  # what the interpreter does at its end
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_killed_run_resumes(tmp_path):
    """A process that is killed while it logs leaves a file that a resumed run repairs."""
    code = (
        "import pathlib, itertools; from common.log import Log\n"
        f"log = Log(pathlib.Path({str(tmp_path)!r}), {{}})\n"
        "for s in itertools.count(1): log.step({'step': s, 'steps': 9, 'x': list(range(999))})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)
    log = Log(tmp_path, {}, resume_step=10)
    log.step(record(11))
    log.close()
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == list(range(1, 12))


# wandb


class FakeWandb(types.ModuleType):
    """Stands in for the module and for its run; `fail` names the call that raises."""

    def __init__(self, fail=None):
        super().__init__("wandb")
        self.fail, self.calls = fail, []

    def _call(self, name, **kwargs):
        self.calls.append((name, kwargs))
        if name == self.fail:
            raise RuntimeError(f"{name} is\nbroken")
        return self

    def init(self, **kwargs):
        return self._call("init", **kwargs)

    def log(self, data, step):
        self._call("log", data=data, step=step)

    def finish(self):
        self._call("finish")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_scalars_by_step_and_layer_balance(fake, tmp_path):
    log = Log(tmp_path, {"a": 1}, wandb_project="mine")
    log.step(record(7, mfu=None))
    log.eval(7, 2.5, 10)
    log.close()
    (_, init), (_, step), (_, evaluation), (last, _) = fake.calls
    assert init["project"] == "mine" and init["config"] == {"a": 1} and last == "finish"
    assert step["step"] == 7 and step["data"]["loss"] == 7.89012
    assert step["data"]["balance/01"] == 1.024
    assert not {"expert_load", "mfu"} & set(step["data"])
    assert evaluation == {"step": 7, "data": {"step": 7, "eval_loss": 2.5, "eval_tokens": 10}}


def test_wandb_without_a_key_is_offline_and_says_so_once(fake, tmp_path, monkeypatch, capsys):
    Log(tmp_path, {}, wandb_project="p").close()
    assert fake.calls[0][1]["mode"] == "offline"
    assert capsys.readouterr().out.count("\n") == 1
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x")
    Log(tmp_path, {}, wandb_project="p").close()
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    Log(tmp_path, {}, wandb_project="p").close()
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")  # asked for: nothing to say
    Log(tmp_path, {}, wandb_project="p").close()
    modes = [kwargs["mode"] for name, kwargs in fake.calls if name == "init"]
    assert modes[1:] == [None, None, "offline"] and capsys.readouterr().out == ""


def test_resume_keeps_the_wandb_run(fake, tmp_path):
    for resume_step in (0, 5, 0):
        Log(tmp_path, {}, wandb_project="p", resume_step=resume_step).close()
    first, resumed, fresh = [kwargs["id"] for name, kwargs in fake.calls if name == "init"]
    assert first == resumed != fresh


@pytest.mark.parametrize("fail", ["init", "log", "finish", "import"])
def test_wandb_failing_never_stops_training(fake, fail, tmp_path, monkeypatch, capsys):
    fake.fail = fail
    if fail == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    log = Log(tmp_path, {}, wandb_project="p")
    for step in (1, 2, 3):
        log.step(record(step))
    log.close()
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step")]
    assert len(said) == 1 and "wandb failed" in said[0]
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_real_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = Log(tmp_path, {"a": 1}, wandb_project="p")
    log.step(RECORD)
    assert log._wandb is not None
    log.close()
    name = (tmp_path / "wandb-id").read_text().strip()
    assert list(tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb"))


def test_wandb_is_not_imported_unless_asked_for(tmp_path):
    code = (
        "import sys, pathlib; from common.log import Log\n"
        f"Log(pathlib.Path({str(tmp_path)!r}), {{}}).close(); sys.exit('wandb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Rates


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("cpu", None),
    ],
)
def test_peak_flops(name, peak):
    assert peak_flops(name, "bf16") == peak
    assert peak_flops(name, "fp32") is None and peak_flops(name, "fp64") is None


def test_rates_by_hand():
    assert rates(4096, 2.0, 1e9, None, 8) == (2048.0, None)
    # 8 GPUs of 1 PFLOP/s; 6 * 3.3e9 active parameters; 160,000 tokens in 1 s
    per_s, mfu = rates(160_000, 1.0, 6 * 3.3e9, 1e15, 8)
    assert per_s == 160_000 and mfu == pytest.approx(0.396)
    assert rates(4 * 4096, 1.0, 1e9, None, 1)[0] == 4 * rates(4096, 1.0, 1e9, None, 1)[0]


# Traces


def test_profiler_traces_its_window_only(tmp_path):
    profiler = Profiler("3:5", tmp_path, rank=2)
    for step in range(1, 8):
        profiler.step_begin(step)
        with profiler.range(f"step-{step}-body"):
            torch.ones(3).add_(1)
        profiler.step_end(step)
        assert (tmp_path / "profile").exists() == (step >= 4)
    trace = (tmp_path / "profile/trace-rank2.json").read_text()
    json.loads(trace)
    assert [s for s in range(1, 8) if f"step-{s}-body" in trace] == [3, 4]


def test_profiler_resumed_inside_and_ended_inside_the_window(tmp_path):
    profiler = Profiler("3:9", tmp_path)
    profiler.step_begin(5)
    profiler.step_end(5)
    assert not (tmp_path / "profile").exists()
    profiler.close()
    profiler.close()
    assert (tmp_path / "profile/trace-rank0.json").exists()


def test_profiler_without_a_window_does_nothing(tmp_path):
    profiler = Profiler(None, None)
    for step in (1, 2):
        profiler.step_begin(step)
        with profiler.range("x"):
            pass
        profiler.step_end(step)
    profiler.close()
    with pytest.raises(ValueError, match="--out"):
        Profiler("1:2", None)
    with pytest.raises(ValueError, match="2:1"):
        Profiler("2:1", tmp_path)


@pytest.mark.gpu
def test_profiler_on_a_gpu(tmp_path):
    profiler = Profiler("2:3", tmp_path)
    for step in (1, 2, 3):
        profiler.step_begin(step)
        with profiler.range("outer"), profiler.range("inner"):
            torch.ones(64, device="cuda").mul_(2)
        profiler.step_end(step)
    kernels = json.loads((tmp_path / "profile/trace-rank0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in kernels)
    assert (tmp_path / "profile/memory-rank0.pickle").stat().st_size > 0


# Signals


SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_stop_sets_a_flag_and_restores_the_handlers(name, default_sighup):
    before = [signal.getsignal(s) for s in SIGNALS]
    stop = Stop()
    try:
        assert stop.requested is None
        os.kill(os.getpid(), getattr(signal, name))
        assert stop.requested == name
        os.kill(os.getpid(), signal.SIGTERM)  # patience with schedulers that repeat themselves
        assert stop.requested == name
    finally:
        stop.close()
    assert [signal.getsignal(s) for s in SIGNALS] == before


@pytest.fixture
def default_sighup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_that_is_ignored_stays_so(default_sighup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    stop = Stop()
    os.kill(os.getpid(), signal.SIGHUP)
    stop.close()
    assert stop.requested is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_second_interrupt_is_a_keyboard_interrupt():
    stop = Stop()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        stop.close()
