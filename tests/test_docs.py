"""What the documents name in code is there: paths, symbols, modules and flags.

Read are AGENTS.md, README.md and the skills' SKILL.md: code spans, and blocks for flags and files.
A span is held to be
    a path             ends with / or a file's suffix; * matches at least one
    file.py::Name      also Class.member: defined in that file, as is `Name` in `file.py`
    a module           common.x, kernels.x, bench.x, tests.x, skills.x, also after -m
    a name             or Class.member, with or without (): defined somewhere in the project
    flags              any --word in it: of a script, of a module's command, or in FOREIGN
and otherwise text that is not checked.
"""

import ast
import builtins
import keyword
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "AGENTS.md", ROOT / "README.md", *sorted(ROOT.glob("skills/*/SKILL.md"))]
FOLDERS = ("common", "kernels", "bench", "tests", "skills")
SOURCES = sorted([*ROOT.glob("*.py"), *(p for f in FOLDERS for p in ROOT.glob(f"{f}/**/*.py"))])
# Flags of torchrun, pytest, ruff and tyro.
FOREIGN = "nproc-per-node nnodes node-rank rdzv-backend rdzv-endpoint durations check help".split()
# Made by a run, given by its user or made by make: these need not be here.
MADE = re.compile(
    r"(out|data|\.venv)/|/|step-|.*metrics(\.dropped)?\.jsonl|.*(config|meta|tokenizer)\.json"
)
PATH = r"[\w.*?/-]+(\.(py|md|txt|ini|toml|json|jsonl|csv|png|sh|yml)|/)"
MODULE = rf"(?:{'|'.join(FOLDERS)})(?:\.\w+)+"


@cache
def members(path):
    """Names that a file defines: {"f", "Class", "Class.method", "Class.field", "CONSTANT"}."""
    found = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                found.update(prefix + n.id for n in names if isinstance(n.ctx, ast.Store))

    visit(ast.parse(path.read_text()).body, "")
    return frozenset(found)


@cache
def words():
    """Python's own names, modules, and what code assigns, takes or gives as an argument."""
    found = {*dir(builtins), *keyword.kwlist}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
            elif isinstance(node, (ast.arg, ast.keyword)):
                found.add(node.arg)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@cache
def flags():
    """Every flag of ours: fields that tyro shows, parameters of a tyro main, argparse's."""
    found = set(FOREIGN)
    for path in SOURCES:
        source = path.read_text()
        found.update(re.findall(r'(?:\badd(?:_argument)?\(|aliases=\()\s*"--([a-z0-9-]+)"', source))
        if "tyro" not in source and path.parent != ROOT:
            continue
        shown = ("Run.", "Config.", "Args.")
        names = [name.split(".")[1] for name in members(path) if name.startswith(shown)]
        names += [f"no_{name}" for name in re.findall(r"^    (\w+): bool\b", source, re.M)]
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                names += [arg.arg for arg in node.args.args]
        found.update(name.replace("_", "-") for name in names)
    return found


def wrong(span):
    """What of a span is not there, or None."""
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", span):
        if flag not in flags():
            return f"--{flag}: no such flag"
    module = re.search(rf"(?:^|-m )({MODULE})(?: |$)", span)
    file, _, name = span.partition("::")
    paths = [w for w in (file if name else span).split() if re.fullmatch(PATH, w)]
    for path in paths:
        if not MADE.match(path) and not any(ROOT.glob(path.rstrip("/"))):
            return f"{path}: no such path"
    if module and not paths:
        path = ROOT / module[1].replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            return f"{module[1]}: no such module"
    if name and name not in members(ROOT / file):
        return f"{name}: not defined in {file}"
    bare = span.removesuffix("()").removesuffix(".__doc__")
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", bare) and not module and not paths:
        defined = {name for path in SOURCES for name in members(path)}
        if bare not in defined | words() and bare.split(".")[0] not in words():
            return f"{bare}: defined nowhere"
    return None


def named(text):
    """Code spans, and lines of code blocks as far as they hold commands."""
    fenced = r"^ *```(\w*)\n(.*?)^ *```$"
    blocks = [block for kind, block in re.findall(fenced, text, re.M | re.S) if kind != "python"]
    prose = re.sub(fenced, "", text, flags=re.M | re.S)
    for name, file in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", prose):
        yield f"{file}::{name}"
    yield from re.findall(r"`([^`\n]+)`", prose)
    yield from (line.split(" # ")[0].strip() for line in "".join(blocks).splitlines())


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_documents_name_exists(path):
    spans = list(named(path.read_text()))
    assert spans and not [said for said in map(wrong, spans) if said]


def test_every_file_is_on_the_map():
    """AGENTS.md has a line for each file of common/, kernels/ and bench/."""
    text = (ROOT / "AGENTS.md").read_text()
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        if name.startswith(("common/", "kernels/", "bench/")) and path.name != "__init__.py":
            assert f"`{name}`" in text, f"AGENTS.md has no line on {name}"


@pytest.mark.parametrize("span", [
    "common/nothing.py", "nothing_*.py", "train_qwen3_moe.py::Nothing", "Layer.nothing",
    "train_qwen3_moe.py::Layer.nothing", "common.nothing", "python -m tests.nothing", "no_such()",
    "python train_qwen3_moe.py --ppp 2", "--no-lr", "python nothing.py --pp 2", "nothing/",
])  # fmt: skip
def test_wrong_names_are_found(span):
    assert wrong(span)


def test_right_names_pass():
    right = ["train_qwen3_moe.py --pp 2 --no-compile", "Layer.__doc__", "common.tokens", "common/"]
    assert [wrong(span) for span in right] == [None] * len(right)
    text = "`A` in `b.py`\n```python\nx\n```\n1. y\n\n   ```sh\n   c --d  # e\n   ```\n"
    assert list(named(text)) == ["b.py::A", "A", "b.py", "c --d"]
