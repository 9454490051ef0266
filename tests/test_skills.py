"""The skills' scripts do what their SKILL.md says, and see faults: in this process, and in a copy.

What a SKILL.md names is held to the code by tests/test_docs.py.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels.attention
import train_gpt_oss as script
from common.dualpipev import Tape

ROOT = Path(__file__).resolve().parent.parent
SKILLS = sorted(ROOT.glob("skills/*/SKILL.md"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


validate = load(ROOT / "skills" / "validate-correctness" / "validate.py")
PLAIN = {name: getattr(script, name) for name in ("hf_views", "initialise", "rotate", "resume")}


# ------------------------------------------------------------------------------------------------
# Faults, each planted in this process, and the check that must see it
# ------------------------------------------------------------------------------------------------


def alike(name, weight, std, seed, first_expert=0):
    """Every expert starts as the first."""
    PLAIN["initialise"](name, weight, std, seed)
    if ".experts." in name:
        weight.data.copy_(weight.data[:1].expand_as(weight))


def half_lost(name, weight, first_expert=0):
    """The second half of the vocabulary is in no file."""
    views = PLAIN["hf_views"](name, weight, first_expert)
    return [(n, v[:128] if "embed" in n else v) for n, v in views]


def moments_forgotten(path, trainer, config):
    step = PLAIN["resume"](path, trainer, config)
    for _, kind, _, x in trainer.optimizer.slices():
        if kind == "exp_avg":
            x.zero_()
    return step


def unturned(x_BTHC, places):
    return PLAIN["rotate"](x_BTHC.flip(-1), places).flip(-1)


def everything(q_at, k_at, B, T, window, cu_seqlens):
    return torch.ones(len(q_at), len(k_at), dtype=torch.bool)


def by_layer(layer, h_BTD, back_ND):
    """An int that differs by layer, read in a compiled segment."""
    return h_BTD + back_ND.view_as(h_BTD) * (layer.index < 99)


FAULTS = {  # check: (where, name, what stands there instead)
    "tape": (Tape, "flush", lambda tape: tape.deferred.clear()),
    "sight": (kernels.attention, "_visible", everything),
    "bf16": (script, "router_logits", lambda x, w: x @ w.T * (1 + (x.element_size() == 2))),
    "compiled": (script.Layer, "aggregate", by_layer),
    "gradients": (script, "initialise", alike),
    "files": (script, "hf_views", half_lost),
    "learning": (script, "lr_at", lambda run, step: 1e-5),
    "oracle": (script, "rotate", unturned),
    "resume": (script, "resume", moments_forgotten),
}


@pytest.mark.parametrize("check", FAULTS)
def test_validate_sees_a_fault(check, monkeypatch, capsys):
    monkeypatch.setattr(*FAULTS[check])
    monkeypatch.setitem(script.FLAGS, "tiny", script.FLAGS["tiny"] | dict(seq_len=16))
    flags = ["train_gpt_oss.py", "--checks", check, "--seq-len", "16"]
    monkeypatch.chdir(ROOT)
    assert validate.main(flags) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"FAIL {check}: ") and "Error:" not in said[0], said
    assert said[-1].startswith("FAIL train_gpt_oss: 1 checks, 1 failed, 0 skipped")


@pytest.mark.parametrize("flags,said", [
    ("train_nothing.py", "must be a script of"), ("train_gpt_oss.py --preset huge", "use one of"),
    ("train_gpt_oss.py --set windows=3", "it has vocab_size"),
])  # fmt: skip
def test_what_cannot_be_validated_is_said(flags, said, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        validate.main(flags.split())
    assert stop.value.code == 2 and said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# A new model, in a copy of the project
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    copy = tmp_path_factory.mktemp("project")
    for name in ("common", "kernels", "tests", "skills"):
        shutil.copytree(ROOT / name, copy / name)
    for path in (ROOT / "README.md", *ROOT.glob("train_*.py")):
        shutil.copy(path, copy)
    return copy


def python(project, command):
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=project, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


START = "skills/add-new-model/start.py gpt_oss my_model"
CHECK = "skills/add-new-model/check.py train_my_model.py --seq-len 40 --set hidden_size=48"
LAYOUT = "skills/validate-correctness/validate.py train_my_model.py --checks layouts --layouts ep2"


def test_a_copied_model_passes_and_its_fault_is_seen(project):
    """start.py, then check.py (which runs validate.py --quick); then experts of the wrong rank."""
    assert python(project, START)[0] == 0
    new = project / "train_my_model.py"
    base = (ROOT / "train_gpt_oss.py").read_text()
    assert new.read_text() == base.replace("train_gpt_oss", "train_my_model")
    code, _, said = python(project, START)
    assert code == 2 and "train_my_model.py is there already" in said
    code, _, said = python(project, START.replace("gpt_oss", "gpt"))
    assert code == 2 and "use one of deepseek_v2_lite, gpt_oss, my_model, qwen3_moe" in said
    assert python(project, "-m tests.copies --readme")[0] == 0

    code, said, errors = python(project, CHECK)
    assert code == 0, "\n".join([*said, errors])
    begins = [line.split(":")[0] for line in said]
    checks = "size marks readme helps two_steps tape sight bf16 gradients files learning oracle"
    checks = [f"PASS {name}" for name in (*checks.split(), "layout pp2", "layout ep2")]
    assert begins == [*checks, "PASS train_my_model", "PASS train_my_model.py"]

    right, wrong = "seeded(weight.device, seed, name, first_expert + i if stack else 0)", "i"
    text = new.read_text()
    assert text.count(right) == 1
    new.write_text(text.replace(right, right.replace("first_expert + i if stack else 0", wrong)))
    code, said, _ = python(project, LAYOUT)
    assert code == 1 and said[0].startswith("FAIL layout ep2: ") and "off by" in said[0], said
    assert said[-1].startswith("FAIL train_my_model: 1 checks, 1 failed")


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_front_matter(path):
    """As agents read it: the folder's name, and when to use it."""
    _, front, text = path.read_text().split("---\n", 2)
    name, description = front.splitlines()
    assert name == f"name: {path.parent.name}"
    assert description.startswith("description: ") and "Use " in description
    for heading in ("## Before", "## Steps", "## What good looks like"):
        assert f"\n{heading}\n" in text, heading
    scripts = list(path.parent.glob("*.py"))
    assert scripts and all(f"{path.parent.relative_to(ROOT)}/{p.name}" in text for p in scripts)
