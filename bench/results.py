"""Rows of figures in a CSV file, and which version they are of; for every bench."""

import csv
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def check_columns(path: Path, columns: tuple[str, ...]) -> None:
    """Raises ValueError unless rows of `columns` can be appended to `path`."""
    if path.exists() and path.stat().st_size:
        with open(path, newline="") as file:
            if tuple(next(csv.reader(file))) != columns:
                raise ValueError(f"--results {path}: its columns are others; use a new file")


def append(
    rows: list[dict[str, Any]], path: Path, columns: tuple[str, ...], forms: dict[str, str]
) -> None:
    """Add rows to the file, which is made, with its header, if it is not there or empty.

    forms: how the values of a column are written, where not as they are ("{:.2f}"); None is empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or path.stat().st_size == 0
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if fresh:
            writer.writeheader()
        for row in rows:
            known = {key: value for key, value in row.items() if value is not None}
            writer.writerow({k: forms.get(k, "{}").format(v) for k, v in known.items()})


def commit_of(root: Path) -> str:
    """The repository's commit, marked where files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--match", "no-tag"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
