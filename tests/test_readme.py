"""Every command of the README, run as it is written.

```sh and ```python blocks run here, two at a time, each in order, in a copy of the project that
shares this environment; ```bash blocks need a GPU. `make train` gets fewer steps through ARGS, and
of `make test` only what it would run is looked at: it is what runs this.
"""

import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    copy = tmp_path_factory.mktemp("project")
    for path in ROOT.iterdir():
        if path.name in (".venv", ".git", "out", "data", "wandb") or path.name.startswith(".whl"):
            continue
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, copy / path.name)
    (copy / ".venv").symlink_to(sys.prefix)
    return copy


def shell(command, cwd, **env):
    done = subprocess.run(
        command, shell=True, cwd=cwd, capture_output=True, text=True,
        # Whatever make thinks of its stamp: this environment has what it needs.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MAKEFLAGS": "-o .venv/runtime", **env},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    return done.stdout


@pytest.mark.timeout(600)
def test_every_command(project):
    commands = [line.split("   #")[0].strip() for b in blocks("sh") for line in b.splitlines()]
    assert commands[:2] == ["make train", "make test"]
    out = shell("make train", project, ARGS="--steps 12 --eval-every 12 --save-every 12")
    assert "step 12/12 | loss" in out and "eval loss" in out and "sample after" in out
    assert "pytest" in shell("make -n test", project)
    said = {}

    def run(block):
        for line in block.splitlines():
            command = line.split("   #")[0].strip()
            said[command] = shell(command, project)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, blocks("sh")[1:]))
    assert said.keys() == set(commands[2:])
    muon = [c for c in commands if "--out out/muon" in c and "train_" in c]
    assert "step 20/20" in said[muon[0]]
    assert "resumed" in said[muon[1]] and "step 21/40" in said[muon[1]]
    four = [c for c in commands if c.endswith("--out out/four")]
    assert "step 4/4" in said[four[0]] and "resumed" in said[four[1]]
    assert list((project / "out/profiled/profile").iterdir())
    for block in blocks("python"):
        (project / "block.py").write_text(block)
        shell(".venv/bin/python block.py", project)


def test_gpu_commands_are_valid():
    """The flags of the GPU commands parse and pass the checks, on one process."""
    from bench import kernels, overlap, throughput
    from common.config import check, parse

    for line in "".join(blocks("bash")).splitlines():
        if "bench.throughput" in line:
            assert throughput.parse(line.split("bench.throughput ")[1].split())
            continue
        if "bench.overlap" in line:
            assert overlap.parse(line.split("bench.overlap ")[1].split())
            continue
        if "bench.kernels" in line:
            kernels.check(kernels.parse(line.split("bench.kernels ")[1].split()))
            continue
        name, flags = re.search(r"(train_\w+)\.py (.*)", line).groups()
        script = import_module(name)
        run = parse(script.Config, script.FLAGS, flags.split())
        numbers = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", line)
        check(run, math.prod(map(int, numbers)))
