"""The scripts' shared definitions agree or say why not; and the tool that holds them to it."""

import ast
import re

import pytest

from tests import copies

BANNER = "# " + "-" * 96
BASE = f'''"""A model."""

import os

{BANNER}
# Config
{BANNER}

LIMIT = 3
TABLE = {{
    "a": 1,
}}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The base's."""

    width: int = 4  # of a row
    depth: int = 2
    """Layers."""
    heads: int = 1

    @property
    def size(self):
        return self.width

    def area(self):
        return self.width * self.depth


class Bare:
    @staticmethod
    def make():
        return 0


{BANNER}
# Main
{BANNER}


# Why it is so.
def run(model):
    """Run it."""
    return model.size


@cached
def main():
    run(Model())


if __name__ == "__main__":
    main()
'''


def project(tmp_path, **scripts):
    """A directory with the base and train_<name>.py for each given text."""
    for name, text in dict({"qwen3_moe": BASE}, **scripts).items():
        (tmp_path / f"train_{name}.py").write_bytes(text.encode())
    return tmp_path


def faults(tmp_path, **scripts):
    read = copies.read_scripts(project(tmp_path, **scripts))
    found = copies.compare(read)
    return [(f.name, f.said) for f in found if f.state == "DRIFT"]


def changed(*pairs):
    text = BASE
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_projects_scripts():
    """No drift in the scripts that are here, and every line of code but imports was looked at."""
    scripts = copies.read_scripts(copies.ROOT)
    found = copies.compare(scripts)
    assert not [f for f in found if f.state == "DRIFT"], copies.show(scripts, found)
    for script in scripts:
        body = ast.parse("".join(script.lines)).body
        covered = {n for i in script.items.values() for n in range(i.start, i.end + 1)}
        for node in body[1:]:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                idle = [n for n in range(node.lineno, node.end_lineno + 1) if n not in covered]
                assert not "".join(script.lines[n - 1] for n in idle).strip(), script.name


def test_the_readmes_table():
    """README shows what --table prints, which with one script is nothing."""
    scripts = copies.read_scripts(copies.ROOT)
    table = copies.table(scripts, copies.compare(scripts))
    assert bool(table) == (len(scripts) > 1)
    (shown,) = copies.SHOWN.finditer((copies.ROOT / "README.md").read_text())
    assert shown[0] == f"{shown[1]}{table}\n{shown[2]}"


def test_scripts_stand_alone():
    """Of ours, scripts and common/ import common/ and kernels/; kernels/ only itself."""
    ours = {"common", "kernels", "bench", "tests", "skills"}
    for folder, allowed in ("", {"common", "kernels"}), ("common", {"common", "kernels"}), (
        "kernels", {"kernels"},
    ):  # fmt: skip
        paths = list((copies.ROOT / folder).glob("*.py" if folder else "train_*.py"))
        assert paths
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    assert not node.level, path
                    names = [node.module]
                roots = {name.split(".")[0] for name in names}
                wrong = {r for r in roots if r in ours - allowed or r.startswith("train_")}
                assert not wrong, f"{path}: imports {wrong}"


def test_identical_passes(tmp_path, capsys):
    root = project(tmp_path, b=BASE.replace('"""A model."""', '"""Another."""\n\nimport re'))
    assert copies.main([], root) == 0
    out = capsys.readouterr().out
    assert "Model.size" in out and "DRIFT 0" in out and "differs 0" in out
    assert copies.main(["--table"], root) == 0
    assert capsys.readouterr().out == "\n"


DRIFTS = {  # item: (text of the base, text of the copy)
    "LIMIT": ("LIMIT = 3", "LIMIT = 4"),
    "TABLE": ('"a": 1,', '"a": 2,'),
    "Model": ("(frozen=True)", "(frozen=False)"),
    "Model.__doc__": ("The base's.", "The copy's."),
    "Model.width": ("# of a row", "# of a column"),
    "Model.depth": ('"""Layers."""', '"""Blocks."""'),
    "Model.size": ("    @property", "    @cached_property"),
    "Model.area": ("self.width * self.depth", "self.depth * self.width"),
    "Bare.make": ("    @staticmethod", "    @classmethod"),
    "run": ("# Why it is so.", "# Why it was so."),
    "main": ("@cached", "@lru_cache"),
    "if __name__ == '__main__'": ("    main()\n", "    main(1)\n"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_drift_is_red_by_field_and_method(name, tmp_path, capsys):
    other = changed(DRIFTS[name])
    assert [f[0] for f in faults(tmp_path, b=other)] == [name]
    assert copies.main([], tmp_path) == 1
    said = capsys.readouterr().out
    assert "+++ train_b.py" in said and re.search(r"^ +-\s*\S", said, re.M)
    assert copies.main(["--fix", "train_qwen3_moe.py"], tmp_path) == 0
    assert (tmp_path / "train_b.py").read_bytes() == BASE.encode()


def test_trailing_blanks_are_no_drift(tmp_path):
    assert not faults(tmp_path, b=changed(("LIMIT = 3", "LIMIT = 3  ")))


MARKED = changed(
    ("LIMIT = 3", "LIMIT = 4  # differs: four of them"),
    ("# of a row", "# differs: eight | nine"),
    ('    """The base\'s."""', '    # differs: another model\n    """The copy\'s."""'),
    ("@dataclass(frozen=True)", "# differs: is filled in later\n@dataclass"),
    ("    return model.size\n", "    return 2  # differs: always two\n    # differs: really\n"),
    ("@cached", "# differs: not cached"),
    ('"a": 1,\n}  # fmt: skip', '"a": 2,\n}  # fmt: skip  # differs: two'),
)


def test_marks_pass_and_make_the_table(tmp_path, capsys):
    root = project(tmp_path, b=MARKED, c=BASE.replace("LIMIT = 3\n", ""))
    assert copies.main([], root) == 0
    assert "differs train_b.py                  LIMIT: four of them" in capsys.readouterr().out
    assert copies.main(["--table"], root) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| differs from `train_qwen3_moe.py` | `train_b.py` | `train_c.py` |",
        "|---|---|---|",
        "| `LIMIT` | four of them | – |",
        "| `TABLE` | two |  |",
        "| `Model` | is filled in later |  |",
        "| `Model.__doc__` | another model |  |",
        "| `Model.width` | eight \\| nine |  |",
        "| `run` | always two; really |  |",
        "| `main` | not cached |  |",
    ]


def test_the_table_is_written_between_the_readmes_marks(tmp_path):
    root = project(tmp_path, b=MARKED)
    (root / "README.md").write_text("a\n<!-- copies -->\nold\n<!-- /copies -->\nb\n")
    assert copies.main(["--readme"], root) == 0
    text = (root / "README.md").read_text()
    assert re.fullmatch(r"a\n<!-- copies -->\n\|[^<]*\| not cached \|\n<!-- /copies -->\nb\n", text)
    (root / "README.md").write_text("a\n")
    with pytest.raises(SystemExit):
        copies.main(["--readme"], root)


@pytest.mark.parametrize("old, new, said", [
    ("LIMIT = 3", "LIMIT = 3  # differs: it does not", "stale"),
    ("    return model.size", "    # differs: no\n    return model.size", "stale"),
    ("LIMIT = 3", "LIMIT = 4  # differs:", "without a reason"),
    ("LIMIT = 3", "LIMIT = 4  # differs", "without a reason"),
    ("LIMIT = 3", "LIMIT = 3\nMORE = 1  # differs: alone", "no other script"),
    ("# Main\n", "# Start\n", "missing"),
    ("LIMIT = 3", f"{BANNER}\n# More\n{BANNER}\n\nLIMIT = 3", "no such section"),
    (f"# Main\n{BANNER}\n", f"# Main\n{BANNER}\n# differs: no\n", "stale"),
    ("LIMIT = 3\nTABLE = {\n    \"a\": 1,\n}", "TABLE = {\n    \"a\": 1,\n}", ""),
    ("    heads: int = 1\n", "", ""),
])  # fmt: skip
def test_marks_and_sections_are_checked(old, new, said, tmp_path):
    found = faults(tmp_path, b=changed((old, new)))
    assert bool(found) == bool(said) and (not said or said in found[0][1]), found


def test_a_new_section_with_a_reason_passes(tmp_path):
    more = f"{BANNER}\n# More\n{BANNER}\n# differs: it has more\n\nLIMIT = 3"
    assert not faults(tmp_path, b=changed(("LIMIT = 3", more)))


def test_a_mark_in_the_base_or_on_nothing(tmp_path):
    marked = changed(("LIMIT = 3", "LIMIT = 3  # differs: from the copy"))
    found = faults(tmp_path, qwen3_moe=marked, b=BASE)
    assert found == [("LIMIT", "marked, but it is the others that differ from this script")]
    stray = changed(("import os", "import os  # differs: an import"))
    with pytest.raises(ValueError, match=r"train_b.py:3: this mark stands on no definition"):
        faults(tmp_path, b=stray)


def test_order(tmp_path):
    area = "    def area(self):\n        return self.width * self.depth\n\n"
    moved = changed(("\n" + area, ""), ("    @property", area + "    @property"))
    assert faults(tmp_path, b=moved)[0] == (
        "Model.area", "stands where train_qwen3_moe.py has Model.size",
    )  # fmt: skip


def test_what_the_base_lacks_is_compared_among_the_others(tmp_path):
    one, two = BASE + "\n\nEXTRA = 1\n", BASE + "\n\nEXTRA = 2\n"
    assert not faults(tmp_path, b=one, c=one)
    assert [f[0] for f in faults(tmp_path, b=one, c=two)] == ["EXTRA"]
    marked = two.replace("EXTRA = 2", "EXTRA = 2  # differs: two")
    assert not faults(tmp_path, b=one, c=marked)
    assert not faults(tmp_path, b=marked, c=one)
    stale = one.replace("EXTRA = 1", "EXTRA = 1  # differs: one")
    assert "stale" in faults(tmp_path, b=stale, c=one)[0][1]


def test_fix_touches_unmarked_drift_only(tmp_path, capsys):
    new = changed(
        ("self.width * self.depth", "self.depth * 2\n        # after it"),
        ("LIMIT = 3", "LIMIT = 5"),
        ("# Why it is so.\n", "# Because.\n# And so.\n"),
    )
    own = "\n\ndef own():\n    return  1   \n"  # not even its blanks change
    root = project(tmp_path, b=MARKED + own, c=BASE + own, new=new)
    (root / "train_c.py").chmod(0o754)
    assert copies.main([], root) == 1
    assert copies.main(["--fix", str(root / "train_new.py")], root) == 0
    out = capsys.readouterr().out
    assert "train_c.py: LIMIT as in train_new.py" in out and "train_b.py: LIMIT" not in out
    assert (root / "train_qwen3_moe.py").read_text() == new
    assert (root / "train_c.py").read_bytes() == (new + own).encode()
    expected = MARKED.replace("self.width * self.depth", "self.depth * 2\n        # after it")
    assert (root / "train_b.py").read_bytes() == (expected + own).encode()
    assert (root / "train_c.py").stat().st_mode & 0o777 == 0o754
    assert len(list(root.iterdir())) == 4  # nothing is left beside them


@pytest.mark.parametrize("b, source, said", [
    ("def broken(:\n", "train_qwen3_moe.py", "train_b.py:1"),
    (BASE.replace("LIMIT = 3", "LIMIT = 4"), "train_x.py", "use one of train_qwen3_moe.py, "),
    (changed(("@cached\ndef main():\n    run(Model())", "class main:\n    def a(self):\n        1"),
             ("LIMIT = 3", "LIMIT = 4")), "train_qwen3_moe.py", "does not fit"),
])  # fmt: skip
def test_fix_refuses_and_writes_nothing(b, source, said, tmp_path, capsys):
    root = project(tmp_path, a=changed(("LIMIT = 3", "LIMIT = 9")), b=b)
    before = {path: path.read_bytes() for path in root.iterdir()}
    with pytest.raises(SystemExit) as stop:
        copies.main(["--fix", source], root)
    assert stop.value.code == 2 and said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in root.iterdir()} == before


def test_a_base_is_needed(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        copies.main([], tmp_path)
    assert stop.value.code == 2 and "no train_qwen3_moe.py" in capsys.readouterr().err
