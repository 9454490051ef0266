"""What the training scripts have in common, kept in common: lists, checks, propagates, tabulates.

    python -m tests.copies                              # every shared definition; 1 if one drifts
    python -m tests.copies --fix train_qwen3_moe.py     # write its text over unmarked drift
    python -m tests.copies --table                      # the differences, as the README shows them
    python -m tests.copies --readme                     # write that table into the README

Scripts are copies of train_qwen3_moe.py, the base, not users of a shared trainer. Where two have a
definition of one name, its text is the same or it says why not:

    head_dim: int = 64  # differs: 64 heads of 64

Compared are functions, module constants, and of a class its header (named like the class, with
decorators and bases), its docstring (`Layer.__doc__`), each field with the string below it and
each method: comments inside and above included, trailing blanks, imports and module docstrings not.

A mark is a comment of one line in the definition or above it, or ends one of its lines (for a
class docstring it stands above it, in the class); several add up. It is in the script that is not
the base; of two that differ in what the base lacks, in either. Also faults: a mark without reason,
or on what does not differ (stale); another order of the shared definitions and sections (three-line
`# ---` banners); a section that is missing, or added without a mark on the line below its banner.
"""

import argparse
import ast
import difflib
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "train_qwen3_moe.py"
MARK = re.compile(r"\s*#\s*differs(?::\s*(.*)|\s*)$", re.IGNORECASE)
BANNER = re.compile(r"^# -{20,}\n(# .*)\n# -{20,}\n", re.MULTILINE)
SHOWN = re.compile(r"(<!-- copies -->\n).*?(<!-- /copies -->)", re.DOTALL)  # in the README
UNMARKED = "another text, and no `# differs: why`"
IDLE = re.compile(r"\s*(#|$)")  # a line without code
DIFF_LINES = 16  # shown of each fault


@dataclass(frozen=True)
class Item:
    """A definition or a section ("# title"): lines `start` to `end`, counted from 1, their text
    without marks and trailing blanks, and what the marks say."""

    start: int
    end: int
    text: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Script:
    """`lines` keep their ends; `items` are in the order of the file."""

    name: str
    path: Path
    lines: list[str]
    items: dict[str, Item]


@dataclass(frozen=True)
class Finding:
    """`state`: same, differs or DRIFT (a fault); `said`: the reasons, or what is wrong."""

    name: str
    script: str
    state: str
    said: str = ""
    diff: tuple[str, ...] = ()


def read_scripts(root: Path) -> list[Script]:
    """train_*.py of `root`, the base first. Raises ValueError: no base, or one does not parse."""
    paths = sorted(root.glob("train_*.py"), key=lambda path: (path.name != BASE, path.name))
    if not paths or paths[0].name != BASE:
        raise ValueError(f"{root}: no {BASE} here")
    return [read_script(path, path.read_bytes().decode()) for path in paths]


def read_script(path: Path, source: str) -> Script:
    """Raises ValueError if `source` does not parse or a mark stands on no definition."""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"{path.name}:{error.lineno}: {error.msg}") from None
    lines, marks = source.splitlines(keepends=True), {}  # line → (column, reason)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        found = MARK.search(token.string) if token.type == tokenize.COMMENT else None
        if found:
            marks[token.start[0]] = token.start[1] + found.start(), (found[1] or "").strip()
    spans = []
    for banner in BANNER.finditer(source):
        first = source.count("\n", 0, banner.start()) + 1
        spans.append((first, first + (3 if first + 3 in marks else 2), banner[1]))
    spans += _spans(lines, body, [end for _, end, _ in spans], 0)
    items: dict[str, Item] = {}
    for start, end, name in sorted(spans):
        while name in items:  # a property's setter, say
            name += "'"
        items[name] = _item(lines, start, end, marks)
    for n in marks.keys() - {n for i in items.values() for n in range(i.start, i.end + 1)}:
        raise ValueError(f"{path.name}:{n}: this mark stands on no definition")
    return Script(path.name, path, lines, items)


def _item(lines: list[str], start: int, end: int, marks: dict) -> Item:
    text, reasons = [], []
    for n in range(start, end + 1):
        line = lines[n - 1].rstrip()
        if n in marks:
            line = line[: marks[n][0]].rstrip()
            reasons.append(marks[n][1])
        if line or n not in marks:
            text.append(line)
    return Item(start, end, "\n".join(text), tuple(reasons))


def _spans(
    lines: list[str], body: list[ast.stmt], banners: list[int], after: int, prefix: str = ""
) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, name) of what `body` defines, comments above it included.

    `banners`: the banners' last lines; `after`: the last line before the body.
    """
    for node, following in zip(body, [*body[1:], None], strict=True):
        start = 1 + max([after, *(b for b in banners if b < node.lineno)])
        while not lines[start - 1].strip():
            start += 1
        name = _name(node, first=node is body[0])
        documented = isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_string(following)
        after = _last_line(lines, following if documented else node)
        if isinstance(node, ast.ClassDef) and not prefix and node.body[0].lineno > node.lineno:
            decorators = getattr(node.body[0], "decorator_list", [])
            inner = min(n.lineno for n in [node.body[0], *decorators])
            head = max(n for n in range(node.lineno, inner) if not IDLE.match(lines[n - 1]))
            yield start, head, name
            yield from _spans(lines, node.body, banners, head, f"{name}.")
        elif name and (prefix or name != "__doc__"):
            yield start, after, prefix + name


def _name(node: ast.stmt, first: bool) -> str | None:
    """What `node` defines; `first`: of its body, where a string is the docstring."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign):
        return ", ".join(map(ast.unparse, node.targets))
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    return "__doc__" if first and _is_string(node) else None


def _is_string(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _last_line(lines: list[str], node: ast.stmt) -> int:
    """With the comments that end the body of `node`: they are indented more than it is."""
    end = node.end_lineno
    while re.match(rf"\s{{{node.col_offset + 1},}}#", "".join(lines[end : end + 1])):
        end += 1
    return end


def compare(scripts: list[Script]) -> list[Finding]:
    """What holds of every shared definition, in each script but the one it is compared with."""
    names = dict.fromkeys(name for script in scripts for name in script.items)
    found = [finding for name in names for finding in _compare(name, scripts)]
    for script in scripts[1:]:
        found += _compare_order(scripts[0], script)
    return found


def _compare(name: str, scripts: list[Script]) -> Iterator[Finding]:
    base, having = scripts[0], [script for script in scripts if name in script.items]
    unmarked = [script for script in having if not script.items[name].reasons]
    against = base if base in having else (unmarked or having)[0]
    if name.startswith("# ") and against is base:
        missing = [script for script in scripts if script not in having]
        yield from (Finding(name, s.name, "DRIFT", "this section is missing") for s in missing)
    for script in having:
        state, said = _judge(name, script, against, base, alone=len(having) == 1)
        texts = (s.items[name].text.splitlines() for s in (against, script))
        diff = difflib.unified_diff(*texts, against.name, script.name, lineterm="", n=1)
        if state:
            yield Finding(name, script.name, state, said, tuple(diff) if said == UNMARKED else ())


def _judge(name: str, script: Script, against: Script, base: Script, alone: bool):
    """(state, what to say) of one definition; ("", "") is that of `against`, unmarked."""
    item, marked = script.items[name], "; ".join(script.items[name].reasons)
    if not all(item.reasons):
        return "DRIFT", "a mark without a reason: # differs: why"
    if marked and script is base:
        return "DRIFT", "marked, but it is the others that differ from this script"
    if name.startswith("# ") and against is not base:
        return ("differs", marked) if marked else ("DRIFT", f"{base.name} has no such section")
    if marked and alone:
        return "DRIFT", "marked, but no other script has it"
    if script is not against and item.text == against.items[name].text:
        return ("DRIFT", f"a stale mark: as in {against.name}") if marked else ("same", "")
    if marked:
        return "differs", marked
    return ("", "") if script is against else ("DRIFT", UNMARKED)


def _compare_order(base: Script, script: Script) -> list[Finding]:
    right = [name for name in base.items if name in script.items]
    order = [name for name in script.items if name in base.items]
    said = f"stands where {base.name} has {{}}".format
    moved = [(name, said(there)) for name, there in zip(order, right, strict=True) if name != there]
    return [Finding(name, script.name, "DRIFT", said) for name, said in moved[:1]]


def show(scripts: list[Script], found: list[Finding]) -> str:
    """A line a shared definition and script; faults come last, with a diff."""
    lines, counts = [], Counter(f.state for f in found)
    for f in sorted(found, key=lambda f: f.state == "DRIFT"):
        lines.append(f"{f.state:8}{f.script:28}{f.name}{': ' * bool(f.said)}{f.said}")
        lines += [f"    {line}" for line in f.diff[:DIFF_LINES]]
        lines += ["    ..."] * (len(f.diff) > DIFF_LINES)
    many = ", ".join(f"{state} {counts[state]}" for state in ("same", "differs", "DRIFT"))
    return "\n".join([*lines, f"{len(scripts)} scripts: {many}"])


def table(scripts: list[Script], found: list[Finding]) -> str:
    """Markdown: definitions that differ, scripts as columns, reasons in the cells; "" if none do.

    Definitions with the same cells share a row; – stands for no such definition.
    """
    reasons = {(f.name, f.script): f.said for f in found if f.state == "differs"}
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for name, _ in reasons):
        cells = (reasons.get((name, s.name), "" if name in s.items else "–") for s in scripts[1:])
        rows.setdefault(tuple(c.replace("|", "\\|") for c in cells), []).append(f"`{name}`")
    if not rows:
        return ""
    columns = " | ".join(f"`{script.name}`" for script in scripts[1:])
    lines = [f"| differs from `{scripts[0].name}` | {columns} |", "|---" * len(scripts) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def show_in_readme(root: Path, text: str) -> None:
    """Write `text` between the README's two marks. Raises ValueError if they are not there once."""
    path = root / "README.md"
    new, count = SHOWN.subn(lambda marks: f"{marks[1]}{text}\n{marks[2]}", path.read_text())
    if count != 1:
        raise ValueError(f"{path}: needs <!-- copies --> and <!-- /copies --> once each")
    path.write_text(new)


def fix(scripts: list[Script], source: str) -> list[str]:
    """Write `source`'s unmarked definitions over the unmarked ones that drift; says what changed.

    Raises ValueError, with nothing written, if `source` is no script or its text does not fit.
    """
    given = next((script for script in scripts if script.name == Path(source).name), None)
    if given is None:
        raise ValueError(f"--fix {source}: use one of {', '.join(s.name for s in scripts)}")
    said, texts = [], {}
    for script in scripts:
        lines, wanted = list(script.lines), {}
        for name, item in reversed(script.items.items()):  # upwards: line numbers hold
            right = given.items.get(name, item)
            wanted[name] = item.text
            if right.text != item.text and not right.reasons and not item.reasons:
                lines[item.start - 1 : item.end] = given.lines[right.start - 1 : right.end]
                wanted[name] = right.text
                said.append(f"{script.name}: {name} as in {given.name}")
        texts[script] = "".join(lines)
        after = {k: v.text for k, v in read_script(script.path, texts[script]).items.items()}
        if wanted != after:  # a class for a function of the same name, say
            raise ValueError(f"{script.name}: --fix does not fit; see {'; '.join(said)}")
    for script, text in texts.items():
        if text != "".join(script.lines):
            beside = script.path.with_name(f".{script.name}.new")
            beside.write_bytes(text.encode())
            beside.chmod(script.path.stat().st_mode)
            beside.replace(script.path)
    return said


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Exit status: 0, 1 with drift, 2 for what cannot be read or done."""
    parser = argparse.ArgumentParser("python -m tests.copies", description=__doc__.split("\n")[0])
    parser.add_argument("--fix", metavar="FROM", help="script whose text replaces unmarked drift")
    parser.add_argument("--table", action="store_true", help="print the differences as Markdown")
    parser.add_argument("--readme", action="store_true", help="write that table into README.md")
    flags = parser.parse_args(argv)
    try:
        scripts = read_scripts(root)
        if flags.fix:
            print("\n".join(fix(scripts, flags.fix)) or "nothing to write")
            scripts = read_scripts(root)
        found = compare(scripts)
        if flags.readme:
            show_in_readme(root, table(scripts, found))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(table(scripts, found) if flags.table else show(scripts, found))
    return int(any(f.state == "DRIFT" for f in found))


if __name__ == "__main__":
    sys.exit(main())
