"""Measures a checkout against the rules of the house: sizes, documentation, types and prose, as a table by package.

    python tools/house.py [--root DIR] [--json] [FOLDER ...]      print the table
    python tools/house.py --check [FOLDER ...]                    list what breaks a rule; exit with 1 if anything does

It reads source text alone and imports nothing of it, so it works on any checkout and any version of the code.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

FOLDERS = ("swarm_peer", "coordinator", "benchmarks")
# The folders that the totals are about, and the part of them that grows with each supported model.
TOTALLED = ("swarm_peer", "coordinator")
FAMILIES = "swarm_peer/model/families"

# Each rule, and the heading of its column.
FILE_LINES, FUNCTION_LINES, CONSTRUCTOR, PARAMETERS, FMT_SKIP, DOCSTRING, SUMMARY, ACTOR = RULES = {
    "file-lines": f"file>{MAX_FILE_LINES}",
    "function-lines": f"def>{MAX_FUNCTION_LINES}",
    "constructor": f"init>{MAX_PARAMETERS}",
    "parameters": f"params>{MAX_PARAMETERS}",
    "fmt-skip": "fmt",
    "docstring": "no doc",
    "summary": "no summary",
    "actor": "no actor",
}
# Counted in the table, and no reason for --check to fail: a program's options are the parameters of its commands.
UNCHECKED = {PARAMETERS}

# "Returns the newest step" is a summary; "Raises UserError: no such device" is not, nor is an empty line.
_NO_SUMMARY = re.compile(r"\s*(?:(?:Args|Attributes|Returns|Yields):|Raises\b|$)")

# Where a sentence begins: at the start of the text, after a sentence, a blank line or a bullet.
_START = r"(?:\A\s*|(?<=[.!?])[)\"'`]*\s+|\n\s*\n\s*|\n\s*(?:[*-]|\d+\.)\s+)"
_HEADLESS = r"(?:[Ww]ho(?:ever|m|mever|se)?|[Ww]hat(?:ever)?)\b"
_ACTORLESS = re.compile(
    # "Who has left is forgotten."  "So whoever asks is told."
    rf"{_START}(?P<opening>(?=[A-Z])(?:(?:And|But|Only|Or|So|Yet)\s+)?{_HEADLESS})"
    # "Launch nothing more; what is in flight is finished."
    rf"|;\s+(?P<clause>(?=[a-z]){_HEADLESS})"
    r"|:\s+(?P<anybody>whoever)\b"
    # "computed by who calls", "one more for who cannot wait"; not the question in "its word for who leads"
    r"|\b(?P<agent>by\s+who|(?:for|from|to)\s+who\s+(?:is|are|was|were|has|have|had|can|cannot|does|will))\b"
)
# The end of a sentence, of a bullet or of an entry in a list of arguments.
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'`]*\s|\n\s*\n|\n\s*(?:[*-]|\d+\.)\s|\n\s*\w+: ")
# Words that a text quotes are not its own.
_QUOTED = re.compile(r"`[^`]{1,100}`|\"[^\"]{1,100}\"")
# "Whatever the peer answers, the call ends" names its actor after the comma.
_CONCESSIVE = re.compile(r"(?i)(?:\w+\s+)?who(?:m)?ever\b|(?:\w+\s+)?whatever\b")


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    rule: str
    line: int
    text: str


@dataclass(frozen=True)
class Module:
    """The measures of one source file; its lines of code are those with more than a comment or a docstring."""

    path: str
    lines: int
    code_lines: int
    findings: tuple[Finding, ...]


def read_module(path: str, source: str) -> Module:
    """Measure one source file and find each place in it that breaks a rule."""
    tree = ast.parse(source)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = len(source.splitlines())
    findings = [*_findings_in_tree(tree), *_findings_in_text(tree, tokens)]
    if lines > MAX_FILE_LINES:
        findings.append(Finding(FILE_LINES, 1, f"{lines} lines in one file"))
    findings.sort(key=lambda finding: finding.line)
    return Module(path, lines, _count_code_lines(tree, tokens), tuple(findings))


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """All strings that stand alone: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _count_code_lines(tree: ast.AST, tokens: list[tokenize.TokenInfo]) -> int:
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    documented = {(node.lineno, node.end_lineno) for node in _docstrings(tree)}
    code: set[int] = set()
    for token in tokens:
        is_docstring = token.type == tokenize.STRING and any(
            first <= token.start[0] and token.end[0] <= (last or first) for first, last in documented
        )
        if token.type not in empty and not is_docstring:
            # A string of many lines may hold blank ones.
            text = token.string.split("\n")
            code.update(token.start[0] + i for i, line in enumerate(text) if line.strip())
    return len(code)


# --- definitions: sizes, parameters, docstrings


def _findings_in_tree(tree: ast.Module) -> Iterator[Finding]:
    dataclass_fields: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _findings_in_function(node)
        elif isinstance(node, ast.ClassDef):
            yield from _findings_in_dataclass(node, dataclass_fields)
    for name, definition in _public(tree, ""):
        if ast.get_docstring(definition) is None:
            yield Finding(DOCSTRING, definition.lineno, f"{name} has no docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None and _NO_SUMMARY.match(docstring.split("\n")[0]):
                yield Finding(SUMMARY, node.body[0].lineno, "docstring without a summary line")


def _findings_in_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MAX_FUNCTION_LINES:
        yield Finding(FUNCTION_LINES, node.lineno, f"{node.name} has {length} lines")
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    first = 1 if names[:1] in (["self"], ["cls"]) else 0
    variable = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    number = len(names) - first + len(arguments.kwonlyargs) + len(variable)
    if number > MAX_PARAMETERS:
        rule = CONSTRUCTOR if node.name == "__init__" else PARAMETERS
        yield Finding(rule, node.lineno, f"{node.name} has {number} parameters")


def _findings_in_dataclass(node: ast.ClassDef, known: dict[str, set[str]]) -> Iterator[Finding]:
    """The constructor that a dataclass generates; `known` are the fields of this file's dataclasses so far, by name.

    A frozen dataclass that takes keyword arguments alone is a value, and may have any number of fields.
    """
    decorators = [d for d in node.decorator_list if _last_name(d) == "dataclass"]
    if not decorators:
        return
    fields = {name for base in node.bases for name in known.get(_last_name(base), set())}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(statement.annotation)
            if not re.search(r"\b(ClassVar|KW_ONLY)\b", kind) and not _has_argument(statement.value, "init", "False"):
                fields.add(statement.target.id)
    known[node.name] = fields
    is_written = any(isinstance(s, ast.FunctionDef) and s.name == "__init__" for s in node.body)
    is_value = _has_argument(decorators[0], "frozen", "True") and _has_argument(decorators[0], "kw_only", "True")
    is_generated = not is_written and not _has_argument(decorators[0], "init", "False")
    if len(fields) > MAX_PARAMETERS and is_generated and not is_value:
        yield Finding(CONSTRUCTOR, node.lineno, f"dataclass {node.name} has {len(fields)} fields")


def _has_argument(node: ast.expr | None, name: str, value: str) -> bool:
    """Whether a call has the keyword argument `name=value`."""
    return isinstance(node, ast.Call) and any(k.arg == name and ast.unparse(k.value) == value for k in node.keywords)


def _last_name(node: ast.expr) -> str:
    """The name itself in `name`, `module.name` and `module.name(...)`."""
    return re.sub(r"[(\[].*", "", ast.unparse(node), flags=re.DOTALL).split(".")[-1]


def _public(
    parent: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public classes and functions with their qualified names, but for overrides: their bases document those."""
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        if not {_last_name(d) for d in node.decorator_list} & {"override", "overload", "setter", "deleter"}:
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, f"{prefix}{node.name}.")


# --- text: comments and docstrings


def _findings_in_text(tree: ast.AST, tokens: list[tokenize.TokenInfo]) -> Iterator[Finding]:
    for token in tokens:
        if token.type == tokenize.COMMENT and re.match(r"#\s*fmt:\s*(skip|off)", token.string):
            yield Finding(FMT_SKIP, token.start[0], token.string)
    texts = [(node.lineno, str(node.value)) for node in _docstrings(tree)]
    for first_line, text in (*texts, *_comments(tokens)):
        for offset, sentence in actorless(text):
            yield Finding(ACTOR, first_line + offset, f"sentence without an actor: {sentence}")


def _comments(tokens: list[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """First line and text of each comment; lines of comment below each other are one text."""
    block: list[str] = []
    start = 0
    for token in tokens:
        if token.type == tokenize.COMMENT:
            is_alone = not token.line[: token.start[1]].strip()
            if block and (not is_alone or token.start[0] != start + len(block)):
                yield start, "\n".join(block)
                block = []
            start = start if block else token.start[0]
            block.append(token.string.lstrip("#").strip())
            if not is_alone:
                yield start, "\n".join(block)
                block = []
    if block:
        yield start, "\n".join(block)


def actorless(text: str) -> Iterator[tuple[int, str]]:
    """Find the sentences and clauses whose subject is a "who" or "what" without a noun.

    Questions are left alone, and so is "Whatever it answers, the call ends", which names its actor after the comma.

    Args:
        text: a docstring or a comment

    Returns:
        for each such sentence its line within the text, from 0, and its words from the headless one on
    """
    end = 0
    unquoted = _QUOTED.sub(lambda quoted: re.sub(r"\w", "x", quoted.group()), text)
    for match in _ACTORLESS.finditer(unquoted):
        start = match.start(match.lastgroup or 0)
        rest = _SENTENCE_END.split(text[start:], maxsplit=1)[0]
        is_concessive = _CONCESSIVE.match(rest) and "," in rest.split(";")[0]
        if start >= end and not rest.endswith("?") and not is_concessive:
            yield text.count("\n", 0, start), " ".join(rest.split())
            end = start + len(rest)


# --- types


def is_strict(path: str, mypy: dict[str, Any]) -> bool:
    """Whether mypy, with these settings of a pyproject.toml, checks the file at `path` below the root strictly."""
    files = mypy.get("files", [])
    listed = [name.strip().rstrip("/") for name in (files.split(",") if isinstance(files, str) else files)]
    if not mypy.get("strict") or not any(name == "." or f"{path}/".startswith(f"{name}/") for name in listed):
        return False
    exclude = mypy.get("exclude", [])
    if any(re.search(pattern, path) for pattern in ([exclude] if isinstance(exclude, str) else exclude)):
        return False
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for override in mypy.get("overrides", []):
        names = override["module"] if isinstance(override["module"], list) else [override["module"]]
        relaxes = any(value is False for value in override.values()) or override.get("ignore_errors")
        if relaxes and any(fnmatch(module, name) or f"{module}.*" == name for name in names):
            return False
    return True


# --- the table and the list


def read_checkout(root: Path, folders: Iterable[str]) -> list[Module]:
    """Measure all Python files in these folders of a checkout; a folder that it does not have holds none."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [read_module(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def row(name: str, modules: list[Module], mypy: dict[str, Any]) -> dict[str, str | int]:
    """One row of the table: the measures of some files together."""
    longest = max(modules, key=lambda module: module.lines)
    rules = Counter(finding.rule for module in modules for finding in module.findings)
    return {
        "package": name,
        "files": len(modules),
        "code": sum(module.code_lines for module in modules),
        "untyped": sum(module.code_lines for module in modules if not is_strict(module.path, mypy)),
        **{rule: rules[rule] for rule in RULES},
        "longest": longest.lines,
        "longest file": longest.path.removeprefix(f"{name}/"),
    }


def table(modules: list[Module], mypy: dict[str, Any]) -> list[dict[str, str | int]]:
    """One row for each package, which counts its own files and not those of packages in it, and the totals."""
    packages = groupby(sorted(modules, key=_package), key=_package)
    rows = [row(name, list(own), mypy) for name, own in packages]
    total = [module for module in modules if module.path.split("/")[0] in TOTALLED]
    others = [module for module in total if not module.path.startswith(FAMILIES)]
    name = " + ".join(TOTALLED)
    if total:
        rows.append(row(name, total, mypy))
    if others:
        rows.append(row(f"{name} - families", others, mypy))
    return rows


def _package(module: Module) -> str:
    return module.path.rpartition("/")[0]


def print_table(rows: list[dict[str, str | int]]) -> None:
    """Print rows in columns, texts to the left and numbers to the right."""
    headings = [RULES.get(key, key) for key in rows[0]]
    cells = [headings, *([f"{value:,}" if isinstance(value, int) else value for value in r.values()] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        aligned = zip(line, widths, rows[0].values(), strict=True)
        print("  ".join(f"{text:>{width}}" if isinstance(v, int) else f"{text:{width}}" for text, width, v in aligned))


def check(modules: list[Module]) -> int:
    """Print each place that breaks a rule, and return the exit status: 1 if there is any."""
    broken = [(m.path, f) for m in modules for f in m.findings if f.rule not in UNCHECKED]
    for path, finding in broken:
        print(f"{path}:{finding.line}: {finding.text} [{finding.rule}]")
    rules = Counter(finding.rule for _, finding in broken)
    print(", ".join(f"{number} {rule}" for rule, number in sorted(rules.items())) or "No rule of the house is broken.")
    return 1 if broken else 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER", help="all of the code if not given")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to measure")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--check", action="store_true", help="list what breaks a rule; exit with 1 if anything does")
    options = parser.parse_args(arguments)
    modules = read_checkout(options.root, options.folders)
    if not modules:
        parser.error(f"no Python files in {', '.join(options.folders)} of {options.root}")
    if options.check:
        return check(modules)
    import tomllib  # since Python 3.11; only the table needs it

    pyproject = options.root / "pyproject.toml"
    settings = tomllib.loads(pyproject.read_text(encoding="utf-8")) if pyproject.exists() else {}
    rows = table(modules, settings.get("tool", {}).get("mypy", {}))
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
