"""Curves of runs: what is read from metrics.jsonl, what the panels show, one-line errors."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from bench.plot import draw, main, read, smoothed

ROOT = Path(__file__).parents[1]


def write_run(folder, *, steps=6, tail="", **change):
    """A run's metrics.jsonl: falling loss, two layers, an evaluation after every third step."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        record = dict(
            step=step, steps=steps, loss=6 - 0.5 * step, balance=[1.0, 1 + step / 2],
            expert_load=[[3, 5], [4, 4]], tokens=64 * step, tokens_per_s=100.0 * step, mfu=None,
        )  # fmt: skip
        lines.append(record | change)
        if step % 3 == 0:
            lines.append(dict(step=step, eval_loss=6.25 - 0.5 * step, eval_tokens=32))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def error_of(capsys, *paths, **flags):
    """The one line that `main` ends with; its exit status is not zero."""
    with pytest.raises(SystemExit) as caught:
        main(paths, **flags)
    message = caught.value.code  # a string: printed to stderr, status 1
    assert isinstance(message, str) and message.startswith("error: ") and "\n" not in message
    assert "wrote" not in capsys.readouterr().out
    return message


def no_nan(values):
    return [None if math.isnan(v) else v for v in values]


# Reading


def test_steps_and_evaluations_are_read(tmp_path):
    run = write_run(tmp_path / "a", steps=3)
    steps, evals = read(run)
    assert steps == [
        (1, 5.5, 1.0, 1.25, 1.5, 100.0),
        (2, 5.0, 1.0, 1.5, 2.0, 200.0),
        (3, 4.5, 1.0, 1.75, 2.5, 300.0),
    ]
    assert evals == [(3, 4.75)]
    assert read(run / "metrics.jsonl") == (steps, evals)


def test_tokens_can_be_the_axis(tmp_path):
    steps, evals = read(write_run(tmp_path / "a"), "tokens")
    assert [row[0] for row in steps] == [64, 128, 192, 256, 320, 384]
    assert evals == [(192, 4.75), (384, 3.25)]  # an evaluation is where its step is


def test_null_is_a_gap_and_a_cut_line_is_passed_over(tmp_path):
    run = write_run(tmp_path / "a", steps=1, tail='{"step": 2, "loss": 1.0, "bal')
    lines = [
        dict(step=2, loss=None, balance=[None, 3.0], tokens_per_s=None),
        dict(step=3, loss=4.0, balance=[None], tokens_per_s=7),
        dict(step=4, loss=3.0),
    ]
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n" + "".join(json.dumps(line) + "\n" for line in lines) + '{"step"')
    steps, evals = read(run)
    assert [no_nan(row) for row in steps[1:]] == [
        [2, None, 3.0, 3.0, 3.0, None],
        [3, 4.0, None, None, None, 7],
        [4, 3.0, None, None, None, None],
    ]
    assert evals == []


def test_smoothing_is_centred_and_keeps_gaps():
    values = [1.0, 2.0, 6.0, math.nan, 10.0, 20.0]
    assert no_nan(smoothed(values, 1)) == [1, 2, 6, None, 10, 20]
    assert no_nan(smoothed(values, 3)) == [1.5, 3, 4, None, 15, 15]
    assert no_nan(smoothed(values, 2)) == [1, 1.5, 4, None, 10, 15]


# Drawing


def test_panels_show_every_run(tmp_path):
    runs = {"one": read(write_run(tmp_path / "1")), "_two": read(write_run(tmp_path / "2"))}
    figure = draw(runs, "steps", 3)
    loss, balance, speed = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "./_two"]
    labels = [(panel.get_xlabel(), panel.get_ylabel()) for panel in figure.axes]
    units = ["nats/token", "1 = even load", "tokens/s"]
    assert labels == [("step", unit) for unit in units]
    assert all(panel.get_yscale() == "linear" == panel.get_xscale() for panel in figure.axes)
    curves = [list(line.get_ydata()) for line in loss.lines]
    assert curves[:4] == [[5.25, 5, 4.5, 4, 3.5, 3.25], [5.5, 5, 4.5, 4, 3.5, 3], [4.75], [3.25]]
    assert len(curves) == 8 and curves[4:] == curves[:4]
    assert list(balance.lines[0].get_ydata()) == [1.25, 1.5, 1.75, 2.0, 2.25, 2.5]
    band = balance.collections[0].get_datalim(balance.transData)
    assert (band.y0, band.y1, len(balance.collections)) == (1.0, 4.0, 2)
    assert list(speed.lines[0].get_ydata()) == [150, 200, 300, 400, 500, 550]
    assert speed.get_ylim()[0] == 0
    assert "mean of 3 steps" in loss.texts[0].get_text()
    assert draw(runs, "tokens", 1).axes[0].get_xlabel() == "tokens trained on"


def test_eight_runs_differ_in_colour_or_style(tmp_path):
    table = read(write_run(tmp_path / "a"))
    lines = draw({f"run{i}": table for i in range(8)}).axes[1].lines[:8]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 8


@pytest.mark.parametrize("change", [dict(steps=1), dict(balance=[]), dict(tokens_per_s=None)])
def test_a_short_or_poor_run_can_be_drawn(tmp_path, change):
    run = write_run(tmp_path / "a", **change)
    main((run,), out=tmp_path / "new" / "curves.png", smooth=5)
    assert imread(tmp_path / "new" / "curves.png").shape[1] >= 1200


def test_command_writes_one_png(tmp_path, capsys):
    for name in ("x/run", "y/run", "other"):
        write_run(tmp_path / name)
    (tmp_path / "only-eval").mkdir()
    line = json.dumps(dict(step=4, eval_loss=2.0, eval_tokens=9)) + "\n"
    (tmp_path / "only-eval/metrics.jsonl").write_text(line)
    runs = tmp_path / "x/run", tmp_path / "y/run/metrics.jsonl", tmp_path / "other"
    drawn = []
    keep = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda f, *a, **k: drawn.append(f) or keep(f, *a, **k))
        main((*runs, tmp_path / "only-eval"), out=tmp_path / "c.png")
    texts = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert texts == [str(runs[0]), str(runs[1]), "other", "only-eval"]  # ambiguous names: paths
    assert capsys.readouterr().out == f"wrote {tmp_path / 'c.png'}\n"
    assert imread(tmp_path / "c.png").shape[1] >= 1200
    assert not list(tmp_path.glob("*.aside"))


# Errors


def test_errors_name_the_run_and_write_nothing(tmp_path, capsys):
    good, out = write_run(tmp_path / "good"), tmp_path / "c.png"
    (tmp_path / "bare").mkdir()
    empty = write_run(tmp_path / "empty", steps=0)
    nan = write_run(tmp_path / "nan", steps=2, loss=None)
    uncounted = write_run(tmp_path / "uncounted", tokens=None)
    for bad in (tmp_path / "missing", tmp_path / "bare", empty, nan):
        assert str(bad) in error_of(capsys, good, bad, out=out)
    assert "no finite loss by steps in its 2 records" in error_of(capsys, nan, out=out)
    assert "by tokens" in error_of(capsys, uncounted, out=out, x="tokens")
    assert "--smooth" in error_of(capsys, good, out=out, smooth=0)
    assert "RUN" in error_of(capsys, out=out)
    assert ".png" in error_of(capsys, good, out=tmp_path / "c.pdf")
    assert not list(tmp_path.glob("c.*"))


def test_a_failed_write_leaves_the_old_picture(tmp_path, capsys, monkeypatch):
    run, out = write_run(tmp_path / "a"), tmp_path / "c.png"
    out.write_bytes(b"old")

    def half(figure, path, **_):
        Path(path).write_bytes(b"\x89PNG")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    assert "No space left" in error_of(capsys, run, out=out)
    assert out.read_bytes() == b"old"


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "a")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in error_of(capsys, run, out=tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_help_is_quick_and_a_mistake_exits_1():
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('bench.plot', run_name='__main__')\n"
        "finally: print({'torch', 'matplotlib', 'numpy'} & set(sys.modules))\n"
    )
    ran = lambda *args: subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True
    )
    shown = ran("--help")
    assert shown.returncode == 0 and shown.stdout.endswith("set()\n") and "RUN" in shown.stdout
    failed = ran("nowhere")
    assert failed.returncode == 1
    assert failed.stderr == "error: nowhere: no such file; a RUN is a run's --out directory\n"
