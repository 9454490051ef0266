"""Begin a model: copy the nearest script under a new name, and nothing else.

    python skills/add-new-model/start.py qwen3_moe my_model     # train_my_model.py

In the copy only the script's own file name is changed where it stands (the commands of the
docstring). The exit status is 0, or 2 with one line that says what cannot be.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEXT = """{new} is a copy of {old}. Now:
  1. its docstring, Model, MODELS, FLAGS, model_of, check_model
  2. what differs in the model, then hf_views, hf_config, active_parameters, flops_per_token
  3. `# differs: why` on each definition that is no longer {base}'s
  4. python skills/add-new-model/check.py {new}   (after every change)"""


def start(source: str, name: str) -> Path:
    """Write train_<name>.py. Raises ValueError: no such source, a bad name or a taken one."""
    old, new = ROOT / f"train_{source}.py", ROOT / f"train_{name}.py"
    if not old.is_file():
        known = ", ".join(p.stem.removeprefix("train_") for p in sorted(ROOT.glob("train_*.py")))
        raise ValueError(f"{source}: no {old.name} here; use one of {known}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name}: use small letters, digits and _, for example my_model")
    if new.exists():
        raise ValueError(f"{new.name} is there already; use another name")
    text = old.read_text()
    new.write_text(re.sub(rf"\b{old.stem}\b", new.stem, text))
    return new


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", help="of train_<source>.py, the nearest model")
    parser.add_argument("name", help="of the new train_<name>.py")
    flags = parser.parse_args(argv)
    try:
        new = start(flags.source, flags.name)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    base = "train_qwen3_moe.py"
    print(NEXT.format(new=new.name, old=f"train_{flags.source}.py", base=base))
    return 0


if __name__ == "__main__":
    sys.exit(main())
