"""The comparison with peers: real for ours and transformers, against stand-ins for the others."""

import csv
import dataclasses
import json
import os
import stat
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import train_qwen3_moe as script
from bench import overlap, throughput
from bench.peers import hf, megatron, ours, pith, titan
from bench.peers.job import MARK, Clock, Job, write
from bench.results import append
from common.graph import Replay
from common.mesh import Mesh

ROOT = Path(__file__).parents[1]
SMALL = "tiny --layers 1 --seq-len 32 --micro-batch 2 --global-batch 4 --steps 10 --warmup 1"
TWO_LAYERS = dataclasses.replace(script.TINY, num_hidden_layers=2)
QWEN = json.loads(json.dumps(script.hf_config(TWO_LAYERS, "fp32")))  # as a driver reads it
DEEPSEEK = dict(
    model_type="deepseek_v2", vocab_size=257, hidden_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, intermediate_size=96, moe_intermediate_size=48,
    n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, kv_lora_rank=32,
    q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", rms_norm_eps=1e-6,
    rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096),
)  # fmt: skip
GPT_OSS = dict(
    model_type="gpt_oss", vocab_size=257, hidden_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    num_local_experts=8, num_experts_per_tok=2, sliding_window=16, rms_norm_eps=1e-5,
    layer_types=["sliding_attention", "full_attention"], rope_theta=150000.0,
)  # fmt: skip


def job_for(model=QWEN, **change):
    values = dict(model=model, dtype="fp32", compile=False, steps=10, warmup=2) | change
    return Job("train_qwen3_moe", "tiny", 2, 32, 2, 4, **values)


def result_of(capsys):
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith(MARK)]
    assert len(lines) == 1
    return json.loads(lines[0].removeprefix(MARK))


@pytest.fixture
def driver(monkeypatch, tmp_path, capsys):
    """Runs a driver's main() here, on a checkout of stand-in files; returns its result."""

    def call(module, files, model=QWEN, **change):
        checkout = tmp_path / "checkout"
        for name, text in files.items():
            path = checkout / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        job = job_for(model, checkout=str(checkout), out=str(tmp_path / "out"), **change)
        write(job, tmp_path / "job.json")
        monkeypatch.setattr(sys, "argv", ["driver", str(tmp_path / "job.json")])
        module.main()
        return result_of(capsys)

    before, environment, path = set(sys.modules), dict(os.environ), list(sys.path)
    monkeypatch.chdir(ROOT)  # drivers change it; this restores it at the end
    yield call
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("megatron", "torchtitan", "pithtrain", *pith.UNUSED):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


# The whole path


def test_ours_and_transformers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = tmp_path / "results.csv"
    flags = f"{SMALL} --transformers --commit abc --out {tmp_path} --results {results}"
    throughput.main([*flags.split(), "--flag", "force_balance=stride"])
    with open(results) as file:
        rows = list(csv.DictReader(file))
    assert [r["contender"] for r in rows] == ["ours", "transformers"]
    for r in rows:
        assert tuple(r) == throughput.COLUMNS
        assert (r["gpu"], r["gpus"], r["mfu"], r["peak_gib"]) == ("cpu", "1", "", "")
        assert r["torch"] == torch.__version__ and r["model"] == "qwen3_moe tiny"
        shape = [int(r[k]) for k in ("layers", "seq_len", "micro_batch", "micro_batches", "steps")]
        assert shape == [1, 32, 2, 2, 10]
        assert float(r["tokens_per_s"]) == pytest.approx(128 / float(r["step_s"]), rel=0.02)
    assert rows[0]["version"] == rows[0]["commit"] == "abc"
    assert [r["routing"] for r in rows] == ["stride", "random"]
    assert rows[0]["note"] == "force_balance=stride"
    out = capsys.readouterr().out
    for name, flag in (("pith-train", "--pith"), ("torchtitan", "--torchtitan")):
        assert f"| {name} | | | | | | | not run: not asked for ({flag} DIR) |" in out
    assert (tmp_path / "transformers.log").read_text().count("step ") == 11


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--steps 9", "--steps 9: must be at least 10"),
        ("--warmup 0", "--warmup 0: must be at least 1"),
        ("--micro-batch 3", "--global-batch 16: not a multiple of --micro-batch 3"),
        ("--flag recomput=layer", "--flag recomput=layer: use KEY=VALUE, KEY a flag of the script; "
         "did you mean recompute?"),
        ("--flag layers=3", "--flag layers: it is the same for all; use its own flag"),
        ("--gpus 0", "--gpus 0: must be at least 1"),
        ("--gpus 2 --flag ep=3", "--ep 3: must divide dp * cp = 2 * 1; use 1, 2"),
        ("--gpus 2 --flag pp=2 --layers 3 --global-batch 32",
         "--pp 2 needs at least 4 layers, the model has 3"),
        ("--gpus 2 --skip-ours",
         "--skip-ours: --gpus 2 is of our script alone; leave one of them out"),
        ("--trace --skip-ours",
         "--skip-ours: --trace is of our script alone; leave one of them out"),
    ],
)  # fmt: skip
def test_mistakes(flags, said):
    with pytest.raises(SystemExit, match="error: ") as caught:
        throughput.main(["tiny", *flags.split()])
    assert caught.value.code == f"error: {said}"


def test_missing_script(monkeypatch):
    monkeypatch.setitem(throughput.JOBS, "tiny", Job("train_none", "tiny", 1, 1, 1, 1))
    with pytest.raises(SystemExit, match="tiny: not run, train_none.py is not there"):
        throughput.main(["tiny"])


def test_absent(tmp_path, monkeypatch):
    given = dict(pith=None, megatron=tmp_path, titan=None, transformers=True)
    none, there = Namespace(**given, gpus=1), {}
    for contender in throughput.CONTENDERS:
        there[contender.name] = throughput.absent(contender, none)
    assert there["ours"] is None and there["transformers"] is None
    assert there["pith-train"] == "not asked for (--pith DIR)"
    assert there["megatron-lm"] == f"{tmp_path} has no pretrain_gpt.py"
    (tmp_path / "pretrain_gpt.py").touch()
    assert throughput.absent(throughput.CONTENDERS[2], none) is None
    two = [throughput.absent(c, Namespace(**given, gpus=2)) for c in throughput.CONTENDERS]
    assert two == [None] + ["measured on one GPU only"] * 4
    monkeypatch.setattr(throughput.importlib.util, "find_spec", lambda name: None)
    assert throughput.absent(throughput.CONTENDERS[4], none) == "transformers cannot be imported"


def test_two_processes(tmp_path, capsys, monkeypatch):
    """Through torchrun: one row, of both; rank 0's trace, which bench.overlap can read."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = tmp_path / "results.csv"
    flags = f"{SMALL} --gpus 2 --flag ep=2 --trace --out {tmp_path} --results {results}"
    monkeypatch.setattr(overlap, "summary", lambda path: f"seen in {path.name}")  # of GPUs only
    throughput.main(flags.split())
    (row,) = csv.DictReader(results.read_text().splitlines())
    assert (row["gpu"], row["gpus"], row["note"]) == ("cpu", "2", f"ep=2; seen in {ours.TRACE}")
    assert float(row["tokens_per_s"]) == pytest.approx(128 / float(row["step_s"]), rel=0.02)
    out, log = capsys.readouterr().out, (tmp_path / "ours.log").read_text()
    assert "fp32 on 2 x cpu, torch" in out
    assert "| transformers | | | | | | | not run: measured on one GPU only |" in out
    assert log.count("step ") == 11 and log.count(MARK) == 1  # rank 0's alone
    names = {event["name"] for event in overlap.read(tmp_path / ours.TRACE)}
    assert {"data", "optimizer"} <= names
    assert json.loads((tmp_path / ours.TRACE).read_text())["distributedInfo"]["rank"] == 0


PLANTED = """
import os, signal, time
if os.environ["RANK"] == "1":
    raise RuntimeError("planted on rank 1")

def gone(*args):
    raise RuntimeError("connection closed")

signal.signal(signal.SIGTERM, gone)
time.sleep(60)  # as a rank does that waits for the other
"""


def test_one_rank_fails(tmp_path, monkeypatch):
    """Its error is shown: not the other rank's, which comes later, and not torchrun's wrapper."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = dataclasses.replace(job_for(gpus=2, out=str(tmp_path)), script="planted")
    said = throughput.run(throughput.CONTENDERS[0], job, 100)
    assert said == f"failed: RuntimeError: planted on rank 1, see {tmp_path}/ours.log"
    log = (tmp_path / "ours.log").read_text()
    assert "ChildFailedError" in log and log.index("on rank 1") < log.index("connection closed")


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(throughput.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(throughput.torch.cuda, "device_count", lambda: 4)
    with pytest.raises(SystemExit) as caught:
        throughput.main("tiny --gpus 8".split())
    assert caught.value.code == "error: --gpus 8: this machine has 4"


def test_slowest_rank_and_largest_peak(monkeypatch):
    """What `gather` makes of this rank's figures, and of another's."""
    other = torch.tensor([7.0, 1.0, 5.0])

    def all_reduce(tensor, op):
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(tensor.maximum(other))

    monkeypatch.setattr(ours.dist, "all_reduce", all_reduce)
    mesh = Mesh(0, 2, 1, 2, 1, 1, torch.device("cpu"))
    for peak_gib, most in ((6.0, 7.0), (None, None)):  # None: on a CPU
        clock = Clock(job_for())
        clock.step_s, clock.peak_gib = [3.0, 4.0], peak_gib
        ours.gather(clock, mesh)
        assert (clock.step_s, clock.peak_gib) == ([3.0, 5.0], most)


def test_close_lets_the_graph_go_before_the_process_group(monkeypatch):
    replay = Replay([], 1, graph="a graph")
    trainer, seen = Namespace(batches=Mock(), saver=Mock(error=None), replay=replay), []
    monkeypatch.setattr(ours.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ours.dist, "destroy_process_group", lambda: seen.append(replay.graph))
    ours.close(trainer, ours.Log(None, {}))
    assert seen == [None]


# A contender's process


def run_shell(text, tmp_path, monkeypatch, timeout_s=20):
    """Run `text` as the contender's process."""
    shell = tmp_path / "python"
    shell.write_text("#!/bin/sh\n" + text)
    shell.chmod(shell.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(throughput.sys, "executable", str(shell))
    return throughput.run(throughput.CONTENDERS[2], job_for(out=str(tmp_path)), timeout_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'torch.OutOfMemoryError: CUDA out of memory'; echo 'E1 more'; exit 1",
         "torch.OutOfMemoryError: CUDA out of memory"),
        ("echo '[rank0]: ValueError: boom'; exit 1", "[rank0]: ValueError: boom"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("exit 3", "exit status 3, no output"),
        ("echo fine", "fine"),
        (f"echo '{MARK}{{}}'; exit 1", MARK + "{}"),
    ],
)  # fmt: skip
def test_process_fails(text, said, tmp_path, monkeypatch):
    out = run_shell(text, tmp_path, monkeypatch)
    assert out == f"failed: {said}, see {tmp_path}/megatron-lm.log"


SUMMARY = """
[rank0]: RuntimeError: Connection closed by peer
{before}
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  traceback : {cause}
"""


@pytest.mark.parametrize(
    ("before", "cause", "said"),
    [
        ("", "Traceback (most recent call last):\n    ValueError: boom", "ValueError: boom"),
        ("", "Signal 9 (SIGKILL) received by PID 7", "Signal 9 (SIGKILL) received by PID 7"),
        ("ModuleNotFoundError: No module named 'x'", "To enable traceback see: https://x",
         "ModuleNotFoundError: No module named 'x'"),
    ],
)  # fmt: skip
def test_error_of_several_ranks(before, cause, said):
    assert throughput.last_error(SUMMARY.format(before=before, cause=cause), 1) == said


def hangs(text, tmp_path, monkeypatch):
    """Runs `text`, which writes a child's number to $PID, until its time is over: so is both's."""
    pid = tmp_path / "pid"
    began = time.monotonic()
    out = run_shell(f"PID={pid}\n{text}", tmp_path, monkeypatch, timeout_s=1)
    assert out.startswith("failed: no end after 1 s") and time.monotonic() - began < 30
    for _ in range(100):
        status = Path(f"/proc/{pid.read_text().strip()}/stat")
        if not status.exists() or " Z " in status.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("the child lives")


def test_process_hangs(tmp_path, monkeypatch):
    """It and its children are ended, also if they will not."""
    hangs("sleep 60 & echo $! > $PID; wait", tmp_path, monkeypatch)
    monkeypatch.setattr(throughput, "GRACE_S", 0.2)
    hangs("trap '' TERM\nsleep 60 & echo $! > $PID; wait", tmp_path, monkeypatch)


def test_torchrun_can_end_its_processes(tmp_path, monkeypatch):
    """They are in sessions of their own, out of our reach: it has to be asked."""
    text = "setsid sleep 60 & echo $! > $PID; trap 'kill $(cat $PID); exit 1' TERM; wait"
    hangs(text, tmp_path, monkeypatch)


def test_others_go_on(tmp_path, monkeypatch, capsys):
    """A failure is in the table and in the exit status, and gets no row."""
    good = dict(step_s=[2.0] * 10, peak_gib=None, version="1", routing="random", note="",
                gpu="cpu", torch="2", triton=None)  # fmt: skip
    out = {"ours": "failed: ValueError: boom, see log", "transformers": good}
    monkeypatch.setattr(throughput, "run", lambda contender, job, timeout_s: out[contender.name])
    results = tmp_path / "results.csv"
    with pytest.raises(SystemExit, match="failed: ours"):
        throughput.main([*SMALL.split(), "--transformers", "--results", str(results)])
    assert "| ours | | | | | | | failed: ValueError: boom, see log |" in capsys.readouterr().out
    assert [line.split(",")[6] for line in results.read_text().splitlines()[1:]] == ["transformers"]


# Figures


def test_row():
    """Median, and MFU from our FLOPs a token and the GPU's peak."""
    result = dict(step_s=[9.0, 1.0, 2.0], peak_gib=80.123, version="", routing="random", note="",
                  gpu="NVIDIA H200", torch="2.11", triton="3.6")  # fmt: skip
    row = throughput.row("ours", job_for(dtype="bf16"), result, 1e12, "abc")
    assert (row["step_s"], row["tokens_per_s"], row["steps"]) == (2.0, 64.0, 3)
    assert row["mfu"] == pytest.approx(64e12 / 989e12)
    assert throughput.row("ours", job_for(), result, 1e12, "abc")["mfu"] is None  # fp32
    eight = throughput.row("ours", job_for(dtype="bf16", gpus=8), result, 1e12, "abc")
    assert (eight["tokens_per_s"], eight["gpus"]) == (64.0, 8)
    assert eight["mfu"] == pytest.approx(64e12 / (8 * 989e12))
    said = throughput.table({"ours": eight}, job_for(dtype="bf16", gpus=8)).splitlines()[0]
    assert said.endswith("2 micro-batches of 2, bf16 on 8 x NVIDIA H200, torch 2.11")


def test_append(tmp_path):
    path = tmp_path / "r.csv"
    row = dict.fromkeys(throughput.COLUMNS) | dict(step_s=1.23456, note="a, b")
    how = throughput.COLUMNS, throughput.FORMS
    append([row], path, *how)
    append([row, row], path, *how)
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(throughput.COLUMNS) and len(lines) == 4
    assert lines[1] == lines[3] == "," * 15 + '1.2346,,,,"a, b"'


def test_clock():
    """Warm-up is not kept, and what a step returns comes back."""
    clock = Clock(job_for(warmup=2, steps=3))
    waits = [0.2, 0.2, 0.0, 0.05, 0.0]
    clock.run(lambda step: time.sleep(waits[step - 1]))
    assert len(clock.step_s) == 3 and clock.done == 5
    assert max(clock.step_s) == clock.step_s[1] >= 0.05 and sum(clock.step_s) < 0.2
    assert clock.step(lambda x: x + 1, 1) == 2 and clock.peak_gib is None


# Drivers


def test_our_config():
    run, model = ours.config(script, job_for(flags={"recompute": "layer"}))
    assert model == TWO_LAYERS
    assert (run.force_balance, run.recompute, run.dtype) == ("random", "layer", "fp32")
    with pytest.raises(ValueError, match="--recompute all"):
        ours.config(script, job_for(flags={"recompute": "all"}))


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK, GPT_OSS], ids=lambda m: m["model_type"])
def test_transformers_model(model):
    """Grouped experts, depth, and ids that are not the router's choice."""
    m = hf.build(job_for(model), torch.device("cpu"))
    experts = [x for x in m.modules() if type(x).__name__.endswith("Experts")]
    sparse = 2 - model.get("first_k_dense_replace", 0)
    assert len(experts) == sparse and len(m.model.layers) == 2
    assert m.config._experts_implementation == "grouped_mm"
    used = []
    for x in experts:
        x.register_forward_hook(lambda module, args, out: used.append(args[1]))
    rows = torch.zeros(1, 32, dtype=torch.int64)  # equal tokens: a router would choose alike
    m(input_ids=rows).logits.sum().backward()
    assert len(used) == sparse and all(ids.unique().numel() == 8 for ids in used)
    routers = [p for n, p in m.named_parameters() if n.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == sparse and all(p.grad.abs().sum() > 0 for p in routers)


def test_transformers_compiles_its_layers():
    for flag in (True, False):
        m = hf.build(job_for(compile=flag), torch.device("cpu"))
        assert [x._compiled_call_impl is not None for x in m.model.layers] == [flag] * 2


def test_forced_ids():
    logits, weights, ids = torch.zeros(500, 8), torch.rand(500, 2), torch.zeros(500, 2).long()
    same, kept, forced = hf.force_random(None, None, (logits, weights, ids))
    assert same is logits and kept is weights and (forced[:, 0] != forced[:, 1]).all()
    assert torch.bincount(forced.flatten(), minlength=8).min() > 80  # 125 expected, 6 sigma: 62


def test_masters_are_fp32():
    """Updates too small for bf16 add up; the gradient's norm is clipped."""
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = hf.Master(model, lr=1e-3)
    for _ in range(5):
        model.weight.grad = torch.full_like(model.weight, 100.0)
        optimizer.step()
    assert model.weight.grad is None
    # AdamW's step is lr whatever the gradient's size, and decay takes lr·0.1: 1.1e-3 a step.
    torch.testing.assert_close(optimizer.masters[0], torch.full((1, 4), 1 - 5 * 1.1e-3))
    assert torch.equal(model.weight, optimizer.masters[0].bfloat16())
    moment = optimizer.adamw.state[optimizer.masters[0]]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((1, 4), 0.5 * (1 - 0.9**5)))


MEGATRON_LINE = (
    " [2026-11-30 10:00:00.000000] iteration {:8d}/      12 | consumed samples:           64 | "
    "elapsed time per iteration (ms): {:.1f} | learning rate: 1.000000E-04 | global batch size:"
    "     4 | lm loss: 5.5E+00 | loss scale: 1.0 | grad norm: 1.234 |"
)


def test_megatron(driver):
    """Its script gets the flags, and its step lines are read; warm-up lines are not."""
    text = f"import sys\nassert sys.argv[1:3] == ['--num-layers', '2']\nl = {MEGATRON_LINE!r}\n"
    text += "for i in range(1, 13):\n    print(l.format(i, 1000.0 * (i < 3) + i))"
    package = {"megatron/core/package_info.py": "__version__ = '0.20'"}
    package |= {"megatron/core/__init__.py": "", "megatron/__init__.py": ""}
    extra = ("--recompute-granularity", "full")
    result = driver(megatron, {"pretrain_gpt.py": text} | package, extra=extra)
    assert result["step_s"] == [i / 1e3 for i in range(3, 13)]
    assert (result["version"], result["routing"]) == ("0.20", "random")
    assert result["note"] == "--recompute-granularity full"


def test_megatron_missing_lines():
    lines = [MEGATRON_LINE.format(i, 5.0) for i in (1, 2, 3, 5)]
    with pytest.raises(ValueError, match=r"no step line for steps \[4\]"):
        megatron.step_times(lines, job_for(warmup=2, steps=3))
    assert megatron.step_times(lines, job_for(warmup=1, steps=2)) == [5e-3, 5e-3]


def words(job):
    """Its command line as pairs."""
    pairs, line = {}, megatron.flags(job)
    for i, word in enumerate(line):
        if word.startswith("--"):
            value = line[i + 1] if i + 1 < len(line) else "--"
            pairs[word[2:]] = True if value.startswith("--") else value
    return pairs


def test_megatron_flags():
    q, d, g = (words(job_for(m)) for m in (QWEN, DEEPSEEK, GPT_OSS))
    for flags in (q, d, g):
        assert flags["moe-router-force-load-balancing"] is True and "bf16" not in flags
        assert (flags["train-iters"], flags["micro-batch-size"]) == ("12", "2")
        assert (flags["num-experts"], flags["vocab-size"]) == ("8", "257")
        assert flags["make-vocab-size-divisible-by"] == "1"
    assert (q["num-query-groups"], q["kv-channels"], q["moe-ffn-hidden-size"]) == ("2", "40", "96")
    assert q["qk-layernorm"] is True and q["rotary-base"] == "10000"
    assert (d["kv-lora-rank"], d["moe-layer-freq"]) == ("32", "[0]*1+[1]*1")
    assert d["moe-shared-expert-intermediate-size"] == "96" and "num-query-groups" not in d
    assert (g["window-size"], g["window-attn-skip-freq"]) == ("15,0", "[1,0]")
    assert g["quick-geglu"] is True and "swiglu" not in g and g["rotary-base"] == "150000"
    assert words(job_for(dtype="bf16"))["bf16"] is True


TITAN = {
    "torchtitan/__init__.py": "",
    "torchtitan/models/__init__.py": "",
    "torchtitan/models/qwen3/__init__.py": """
from dataclasses import dataclass, field

@dataclass
class MoE:
    num_experts: int = 8
    top_k: int = 2
    _debug_force_load_balance: bool = False

@dataclass
class Args:
    dim: int = 128
    vocab_size: int = 257
    n_heads: int = 4
    n_layers: int = 48
    moe_inter_dim: int = 96
    moe_args: MoE = field(default_factory=MoE)

qwen3_args = {"30B-A3B": Args()}
""",
    "torchtitan/train.py": """
import sys
from torchtitan.models.qwen3 import qwen3_args

class Trainer:
    def train_step(self, iterator):
        next(iterator)

def main(trainer_class):
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    args = qwen3_args[flags["--model.flavor"]]
    assert args.n_layers == 2 and args.moe_args._debug_force_load_balance, args
    assert qwen3_args["30B-A3B"].n_layers == 48
    trainer, data = trainer_class(), iter(range(99))
    for _ in range(int(flags["--training.steps"])):
        trainer.train_step(data)
    assert next(data) == 12
""",
    "assets/version.txt": "0.2.2\n",
}


def test_torchtitan(driver):
    result = driver(titan, TITAN)
    assert len(result["step_s"]) == 10
    assert (result["version"], result["routing"]) == ("0.2.2", "balanced")


def test_torchtitan_other_widths(driver):
    with pytest.raises(ValueError, match="torchtitan: top_k is 2, not 4"):
        driver(titan, TITAN, QWEN | {"num_experts_per_tok": 4})


PITH = {
    "pyproject.toml": '[project]\nname = "pithtrain"\nversion = "0.1.3"\n',
    ".git/HEAD": "0123456789abcdef\n",
    "pithtrain/__init__.py": "import deep_gemm\n"
    "import importlib.util\nassert importlib.util.find_spec('fla')\n"
    "from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd\n"
    "import fla.ops.common.chunk_o\n",
    "pithtrain/modules/__init__.py": "",
    "pithtrain/modules/logging.py": "def setup_logging(cfg): cfg.order = ['logging']",
    "pithtrain/modules/distributed.py": "import os\ndef setup_distributed(cfg):\n"
    "    assert os.environ['TORCHELASTIC_RUN_ID'] and os.environ['WORLD_SIZE'] == '1'\n"
    "    cfg.order.append('distributed')",
    "pithtrain/modules/training.py": "make_adamw_optimizer = make_constant_scheduler = print\n"
    "def setup_training(cfg): cfg.order.append('training')",
    "pithtrain/tasks/__init__.py": "",
    "pithtrain/tasks/pretrain_lm.py": """
from types import SimpleNamespace

class PretrainLMCfg:
    def __init__(self):
        self.training, self.steps = SimpleNamespace(), 0

def train_step(cfg):
    cfg.steps += 1
    assert cfg.steps <= cfg.training.max_steps == 12 and cfg.training.benchmark
    assert cfg.order == ["logging", "distributed", "training"]
""",
}


def test_pith_train(driver, tmp_path):
    result = driver(pith, PITH, DEEPSEEK)
    assert len(result["step_s"]) == 10
    assert (result["version"], result["routing"]) == ("0.1.3 01234567", "balanced")
    assert "deep_gemm" in result["note"] and "wandb" not in result["note"]
    tokens = np.load(tmp_path / "out/pith-train/tokens/random.bin")
    assert tokens.dtype == np.int32 and len(tokens) == 12 * 4 * 32 + 1
    assert tokens.min() == 0 and tokens.max() == 256
    model = json.loads((tmp_path / "out/pith-train/model.json").read_text())
    assert model["rope_scaling"]["rope_type"] == "yarn" and model["rope_scaling"]["factor"] == 40
    assert model["rope_scaling"]["rope_theta"] == 10000 and "type" not in model["rope_scaling"]
