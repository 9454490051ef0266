"""What every script must be, checked after each change of a new one: PASS or FAIL a line.

    python skills/add-new-model/check.py train_my_model.py
    python skills/add-new-model/check.py train_my_model.py --set block_size=8

Size, marks (tests/copies.py), README's table, --help, two steps, and validate.py --quick, which
gets all flags that follow the script. The exit status is 0 if nothing failed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import copies  # noqa: E402

LINES, WIDTH = 1050, 100
VALIDATE = ROOT / "skills" / "validate-correctness" / "validate.py"


def size(script: Path) -> str:
    lines = script.read_text().splitlines()
    long = [i for i, line in enumerate(lines, 1) if len(line) > WIDTH]
    assert len(lines) <= LINES, f"{len(lines)} lines, {LINES} are allowed"
    assert not long, f"lines {long} are longer than {WIDTH} characters"
    return f"{len(lines)} lines"


def marks(script: Path) -> str:
    """Shared definitions are the base's text or say why not."""
    scripts = copies.read_scripts(ROOT)
    found = [f for f in copies.compare(scripts) if f.script == script.name]
    drift = [f"{f.name}: {f.said}" for f in found if f.state == "DRIFT"]
    assert not drift, f"{len(drift)} without: " + "; ".join(drift)
    same, differs = (sum(f.state == state for f in found) for state in ("same", "differs"))
    return f"{same} definitions as in {copies.BASE}, {differs} say why not"


def readme(script: Path) -> str:
    """The README shows what differs, in a column of the script's."""
    scripts = copies.read_scripts(ROOT)
    shown = copies.SHOWN.search((ROOT / "README.md").read_text())
    table = copies.table(scripts, copies.compare(scripts))
    right = shown is not None and shown[0] == f"{shown[1]}{table}\n{shown[2]}"
    assert right, "its table is older than the scripts: python -m tests.copies --readme"
    return "its table is up to date"


def helps(script: Path) -> str:
    return f"{len(_output([script.name, '--help']).splitlines())} lines"


def two_steps(script: Path) -> str:
    with tempfile.TemporaryDirectory() as out:
        flags = ["--steps", "2", "--sample-tokens", "0", "--eval-batches", "1"]
        said = _output([script.name, *flags, "--out", out])
    lines = [line for line in said.splitlines() if line.startswith("step 2/2 ")]
    assert lines, "no second step"
    return lines[0]


def _output(command: list[str]) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    assert done.returncode == 0, f"exit status {done.returncode}: {last}"
    return done.stdout


def main(argv: list[str]) -> int:
    if not argv or not (ROOT / argv[0]).is_file():
        print(__doc__ if not argv else f"error: {argv[0]}: no such script here", file=sys.stderr)
        return 2
    script, failed = ROOT / argv[0], False
    for check in (size, marks, readme, helps, two_steps):
        try:
            state, said = "PASS", check(script)
        except (AssertionError, ValueError) as error:
            state, said, failed = "FAIL", str(error), True
        print(f"{state} {check.__name__}: {said}", flush=True)
    done = subprocess.run([sys.executable, VALIDATE, script.name, "--quick", *argv[1:]], cwd=ROOT)
    failed = failed or done.returncode != 0
    print(f"{'FAIL' if failed else 'PASS'} {script.name}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
