"""The command line: presets, refusals before any model is built, and the learning-rate schedule."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.config import Run, check, fail, lr_at, nearest, parse, profile_window, to_json


@dataclass(frozen=True)
class Config(Run):
    pass


PRESETS = {
    "tiny": dict(seq_len=256, global_batch=8, steps=20, warmup=2, dtype="fp32", compile=False),
    "30b-a3b": dict(global_batch=256, steps=77),
}
GOOD = Run(seq_len=256, micro_batch=1, global_batch=16, steps=20)


def test_no_argument_gives_the_default_preset():
    run = parse(Config, PRESETS, [])
    assert (run.preset, run.seq_len, run.dtype, run.compile) == ("tiny", 256, "fp32", False)
    assert isinstance(run, Config)
    check(run, 1)


@pytest.mark.parametrize("argv", [["30b-a3b", "--pp", "2"], ["--pp", "2", "30b-a3b"]])
def test_preset_sets_defaults_and_flags_have_the_last_word(argv):
    run = parse(Config, PRESETS, argv)
    assert (run.preset, run.steps, run.global_batch, run.seq_len) == ("30b-a3b", 77, 256, 4096)
    assert run.pp == 2 and parse(Config, PRESETS, argv + ["--steps", "5"]).steps == 5


def test_every_kind_of_flag():
    text = (
        "tiny --data a:0.7 b:0.3 --no-compile --layers 3 --out x/y --optimizer muon --lr 1e-2 "
        "--micro-batch 2 --eval-only --force-balance stride --profile 2:4 --wandb mine"
    )
    run = parse(Config, PRESETS, text.split())
    assert run.data == ("a:0.7", "b:0.3") and not run.compile and run.layers == 3
    assert run.out == Path("x/y") and run.optimizer == "muon" and run.lr == 1e-2
    assert run.micro_batch == 2 and run.eval_only and run.force_balance == "stride"
    assert run.profile == "2:4" and run.wandb == "mine"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--micro-bath", "3"], ["--micro-bath", "--micro-batch"]),
        (["--lerning-rate", "3"], ["--lerning-rate", "--lr"]),
        (["tiny", "--seqlen", "3"], ["--seqlen", "--seq-len"]),
        (["30b"], ["unknown preset 30b", "tiny", "did you mean 30b-a3b"]),
        (["--steps", "5", "30b"], ["unknown preset 30b", "tiny"]),
        (["tiny", "30b-a3b"], ["two presets", "tiny", "30b-a3b"]),
        (["--preset", "30b-a3b"], ["--preset: no flag", "stands first", "30b-a3b"]),
        (["--deterministic", "True"], ["unknown preset True", "--no-compile"]),
        (["--optimizer", "sgd"], ["sgd", "adamw", "muon"]),
        (["--steps", "1.5"], ["--steps", "1.5"]),
    ],
)
def test_bad_command_line_exits_2_and_says_what_would_work(argv, says, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(Config, PRESETS, argv)
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert all(word in err for word in says), err


def test_only_rank_0_complains(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    for argv in (["30b"], ["--micro-bath", "3"]):
        with pytest.raises(SystemExit) as exit_:
            parse(Config, PRESETS, argv)
        assert exit_.value.code == 2
    assert capsys.readouterr() == ("", "")


def test_a_failure_is_one_write_and_rank_0_comes_first(monkeypatch):
    slept, written = [], []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("sys.stderr.write", written.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        for rank, wait in ((None, []), ("0", []), ("3", [2])):
            monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
            with pytest.raises(SystemExit, match="^error: no such data$") as exit_:
                fail(ValueError("no such data"))
            assert exit_.value.code == 1 and slept == wait
    finally:
        signal.signal(signal.SIGTERM, before)
    assert written == ["error: no such data\n"] * 3


def help_text(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(Config, PRESETS, argv)
    assert exit_.value.code == 0
    return re.sub(r"[│|]( |\n|$)", r"\1", capsys.readouterr().out)  # without the frame


def test_help_shows_the_presets_defaults(capsys):
    out = " ".join(help_text(["30b-a3b", "--help"], capsys).split())
    assert "those of 30b-a3b" in out and "(default: 77)" in out and "[PRESET]" in out
    assert "Sequences a micro-batch and data-parallel rank." in out


def test_every_flag_has_a_help_text(capsys):
    flags = re.split(r"\n[│|]? +--(?=[a-z])", help_text(["--help"], capsys))[1:]
    assert len(flags) == len(Run.__dataclass_fields__) - 1  # all but the positional preset
    for flag in flags:  # the flag, its value, then a sentence of two words or more
        assert re.search(r" [^ ]+ [^ ]+\. \(default: ", " ".join(flag.split())), flag


def test_config_does_not_import_torch():
    code = "import sys, common.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("change", "world", "says"),
    [
        (dict(pp=2, cp=2), 6, ["--pp 2 --cp 2", "= 4", "6 ranks", "1, 2, 3, 6"]),
        (dict(ep=3), 4, ["--ep 3", "4 * 1", "1, 2, 4"]),
        (dict(ep=4, pp=2), 4, ["--ep 4", "2 * 1", "1, 2"]),
        (dict(global_batch=10), 4, ["--global-batch 10", "8 or 12"]),
        (dict(global_batch=3), 4, ["--global-batch 3", "use 4"]),
        (dict(global_batch=10, micro_batch=4), 1, ["-batch 10", "--micro-batch 4", "8 or 12"]),
        (dict(pp=4, global_batch=7), 4, ["-batch 7", "7 micro-batches", "at least 8", "use 8"]),
        (dict(pp=2, global_batch=6, micro_batch=2), 2, ["3 micro-batches", "at least 4", "use 8"]),
        (dict(cp=4, seq_len=20), 4, ["--seq-len 20", "2 * cp = 8", "16 or 24"]),
        (dict(cp=4, seq_len=4), 4, ["--seq-len 4", "use 8"]),
        (dict(pp=0), 1, ["--pp 0", "at least 1"]),
        (dict(cp=-1), 1, ["--cp -1", "at least 1"]),
        (dict(micro_batch=0), 1, ["--micro-batch 0", "at least 1"]),
        (dict(steps=0), 1, ["--steps 0", "at least 1"]),
        (dict(layers=0), 1, ["--layers 0", "at least 1"]),
        (dict(keep_last=0), 1, ["--keep-last 0", "at least 1"]),
        (dict(lr=0.0), 1, ["--lr 0.0", "above 0"]),
        (dict(lr=float("nan")), 1, ["--lr nan", "finite"]),
        (dict(eps=0.0), 1, ["--eps 0.0", "above 0"]),
        (dict(profile="21:22"), 1, ["--profile 21:22", "--steps 20"]),
        (dict(warmup=5, decay=16), 1, ["--decay 16", "leave 15"]),
        (dict(decay=0), 1, ["--decay 0", "at least 1"]),
        (dict(schedule="constant", decay=4), 1, ["--decay 4", "wsd, cosine or linear"]),
        (dict(min_lr_ratio=1.5), 1, ["--min-lr-ratio 1.5", "between 0 and 1"]),
        (dict(beta1=1.0), 1, ["--beta1 1.0", "below 1"]),
        (dict(beta2=-0.1), 1, ["--beta2 -0.1"]),
        (dict(clip=-1.0), 1, ["--clip -1.0", "at least 0"]),
        (dict(weight_decay=-1.0), 1, ["--weight-decay -1.0", "at least 0"]),
        (dict(seed=-1), 1, ["--seed -1", "at least 0"]),
        (dict(dtype="fp16"), 1, ["--dtype fp16", "bf16, fp32, fp64"]),
        (dict(force_balance="even"), 1, ["--force-balance even", "stride, random"]),
        (dict(profile="5:5"), 1, ["--profile 5:5", "A < B"]),
        (dict(profile="0:5"), 1, ["--profile 0:5"]),
        (dict(profile="5"), 1, ["--profile 5", "A:B"]),
        (dict(eval_every=5, eval_batches=0), 1, ["--eval-batches 0", "at least 1"]),
        (dict(eval_only=True, eval_batches=0), 1, ["--eval-batches 0", "at least 1"]),
        (dict(data=()), 1, ["--data", "at least one"]),
        (dict(data=("a", "")), 1, ["--data", "at least one"]),
    ],
)
def test_refused(change, world, says):
    check(GOOD, 1)
    with pytest.raises(ValueError) as error:
        check(replace(GOOD, **change), world)
    text = str(error.value)
    assert all(word in text for word in says) and "\n" not in text, text


@pytest.mark.parametrize(
    ("change", "world"),
    [
        (dict(pp=2, cp=2, ep=4, global_batch=8), 8),  # ep spans dp and cp
        (dict(pp=4, global_batch=8), 4),
        (dict(pp=1, global_batch=1), 1),
        (dict(cp=4, seq_len=24), 4),
        (dict(ep=8), 8),
        (dict(warmup=21), 1),  # a short trial of a longer run ends in its warm-up
        (dict(warmup=5, decay=15), 1),
        (dict(clip=0.0, weight_decay=0.0, eval_batches=0, profile="1:2"), 1),
        (dict(beta1=0.0, min_lr_ratio=0.0), 1),
    ],
)
def test_accepted(change, world):
    check(replace(GOOD, **change), world)


def test_more_processes_are_started_with_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for change, count in ((dict(pp=2), 2), (dict(ep=4), 4), (dict(pp=2, cp=2, ep=4), 8)):
        with pytest.raises(ValueError, match=f", or start {count} with torchrun .*-node {count}$"):
            check(replace(GOOD, **change), 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="it can be 1$"):
        check(replace(GOOD, pp=2), 1)


def test_lr_constant_and_warmup():
    run = Run(lr=1.0, warmup=4, steps=10, schedule="constant")
    assert [lr_at(run, s) for s in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert lr_at(replace(run, warmup=0), 1) == 1


@pytest.mark.parametrize("schedule", ["wsd", "linear", "cosine"])
def test_lr_decay(schedule):
    run = Run(lr=2.0, warmup=2, steps=12, decay=4, min_lr_ratio=0.1, schedule=schedule)
    assert [lr_at(run, s) for s in range(2, 9)] == [2.0] * 7
    assert lr_at(run, 10) == pytest.approx(1.1)  # half way: the mean of 2 and 0.2
    assert lr_at(run, 12) == lr_at(run, 99) == pytest.approx(0.2)
    quarter = 2 - 1.8 * (0.25 if schedule != "cosine" else 0.146446609)
    assert lr_at(run, 9) == pytest.approx(quarter)


def test_lr_default_lengths():
    run = Run(lr=1.0, warmup=20, steps=100, min_lr_ratio=0.0, schedule="linear")
    assert lr_at(run, 20) == 1 and lr_at(run, 60) == pytest.approx(0.5)  # all after warm-up
    wsd = replace(run, schedule="wsd")
    assert lr_at(wsd, 90) == 1 and lr_at(wsd, 95) == pytest.approx(0.5)  # the last tenth
    for schedule in ("wsd", "cosine", "linear"):
        assert lr_at(Run(lr=1.0, steps=3, warmup=3, schedule=schedule), 3) == 1  # nothing left
        assert lr_at(Run(lr=1.0, steps=1, min_lr_ratio=0.5, schedule=schedule), 1) == 0.5
        assert lr_at(Run(lr=1.0, steps=3, warmup=6, schedule=schedule), 3) == 0.5


def test_to_json_is_json_and_complete():
    run = Run(out=Path("a/b"), data=("x:0.5", "y"))
    record = to_json(run)
    assert json.loads(json.dumps(record)) == record
    assert record["out"] == "a/b" and record["data"] == ["x:0.5", "y"]
    assert record["layers"] is None and set(record) == set(Run.__dataclass_fields__)


def test_nearest_and_profile_window():
    assert nearest("adam", ["muon", "adamw"]) == "adamw" and nearest("zzz", ["muon"]) is None
    assert profile_window("10:12") == (10, 12)
