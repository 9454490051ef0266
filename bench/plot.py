"""Draw runs' curves into one PNG: loss, balance of the experts' load, throughput.

    python -m bench.plot out/adamw out/muon --out curves.png --smooth 20

A RUN is a run's --out directory, or its metrics.jsonl (common/log.py says what is in it). Lines
are training, points held-out evaluations. Needs matplotlib, which only development requires.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe-Ito
GREY, NAN = "#666666", math.nan


def read(path: Path, x: str = "steps") -> tuple[list[tuple], list[tuple]]:
    """Two tables of the run at `path`, with NaN where a number is missing or was not finite.

    Steps: (x, loss in nats a token, balance's min, mean and max over layers, tokens a second).
    Evaluations: (x, held-out loss). x is "steps" or "tokens" so far. Raises ValueError if there
    is no run, or no finite loss in it at a known x.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file}: no such file; a RUN is a run's --out directory")
    steps, evals, at = [], [], {0: 0.0}  # at: the x of a step; an evaluation has no token count
    for record in records(file):
        step = record["step"]
        if "loss" in record:
            at[step] = step if x == "steps" else number(record.get("tokens"))
            balance, rate = spread(record.get("balance") or []), record.get("tokens_per_s")
            steps.append((at[step], number(record["loss"]), *balance, number(rate)))
        elif "eval_loss" in record:
            place = step if x == "steps" else at.get(step, NAN)
            evals.append((place, number(record["eval_loss"])))
    if not any(math.isfinite(row[0] + row[1]) for row in steps + evals):
        raise ValueError(f"{file}: no finite loss by {x} in its {len(steps + evals)} records")
    return steps, evals


def records(file: Path) -> Iterator[dict[str, Any]]:
    """One at a time, as they hold every expert's load; passes over a line that a kill cut short."""
    with open(file, "rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def number(value: Any) -> float:
    """A finite float, else NaN, where the curve gets a gap."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else NAN


def spread(values: list) -> tuple[float, float, float]:
    """(min, mean, max) of the finite values, NaNs if there are none."""
    finite = [v for v in map(number, values) if not math.isnan(v)]
    return (min(finite), sum(finite) / len(finite), max(finite)) if finite else (NAN,) * 3


def smoothed(values: list[float], n: int) -> list[float]:
    """Mean of the `n` values around each, fewer at the ends: centred, not to lag; gaps stay."""
    windows = [values[max(0, i - n // 2) : i + (n + 1) // 2] for i in range(len(values))]
    return [v if math.isnan(v) else spread(window)[1] for v, window in zip(values, windows)]


def draw(runs: dict[str, tuple[list[tuple], list[tuple]]], x: str = "steps", smooth: int = 1):
    """A matplotlib Figure 12 inches wide: a legend of the runs by name above three panels."""
    from matplotlib.figure import Figure  # not pyplot: always Agg, no window, no global state
    from matplotlib.ticker import EngFormatter, MaxNLocator

    columns = min(len(runs), 140 // (max(map(len, runs)) + 8) or 1)
    height = 3.9 + 0.22 * math.ceil(len(runs) / columns)
    figure = Figure(figsize=(12, height), dpi=200, layout="constrained")
    figure.get_layout_engine().set(wspace=0.04)
    loss, balance, speed = figure.subplots(1, 3)
    for i, (name, (steps, evals)) in enumerate(runs.items()):
        label = ("./" * name.startswith("_") + name).replace("$", r"\$")  # else hidden, or TeX
        line = dict(color=COLOURS[i % 7], ls="-:"[i // 7 % 2], marker="o" * (len(steps) == 1))
        at, losses, low, mean, high, rate = zip(*steps) if steps else [()] * 6
        for panel, values in ((loss, losses), (speed, rate)):
            panel.plot(at, smoothed(values, smooth), **line)
            panel.plot(at, values, color=line["color"], lw=0.8, alpha=0.25, zorder=1.5)
        balance.plot(at, mean, label=label, **line)
        balance.fill_between(at, low, high, color=line["color"], alpha=0.15, lw=0)
        for point in evals:
            loss.plot(*point, "o", color=line["color"], ms=6, mec="white", zorder=3)
    balance.axhline(1, color=GREY, lw=1, ls="--", zorder=1)
    mean_of = f"mean of {smooth} steps" if smooth > 1 else "each step"
    for panel, title, note, unit in (
        (loss, "Loss", f"line: training, {mean_of}; points: held-out", "nats/token"),
        (balance, "Balance of experts", "line: mean of layers; band: min to max", "1 = even load"),
        (speed, "Throughput", f"whole run, {mean_of}, optimizer included", "tokens/s"),
    ):
        panel.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
        panel.text(0, 1.02, note, transform=panel.transAxes, fontsize=9, color=GREY)
        panel.set(xlabel="step" if x == "steps" else "tokens trained on", ylabel=unit)
        panel.ticklabel_format(useOffset=False, style="plain")
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=11)
    return figure


def main(
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")],
    out: Path = Path("curves.png"),
    x: Literal["steps", "tokens"] = "steps",
    smooth: int = 1,
) -> None:
    """Draw loss, balance and throughput of one or several runs.

    Args:
        paths: Runs' --out directories, or their metrics.jsonl.
        out: The PNG to write.
        x: What the horizontal axis counts.
        smooth: Loss and throughput are means of so many steps.
    """
    try:
        if not paths or smooth < 1 or out.suffix != ".png":
            raise ValueError("needs a RUN or more, --smooth of 1 or more, --out NAME.png")
        short = [(p if p.is_dir() else p.parent).resolve().name for p in paths]
        names = [s if short.count(s) == 1 else str(p) for s, p in zip(short, paths)]
        figure = draw(dict(zip(names, [read(path, x) for path in paths])), x, smooth)
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = out.with_suffix(".png.aside")  # never half a picture, whenever it is stopped
        figure.savefig(aside, format="png")
        aside.replace(out)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: pip install matplotlib")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main)
