"""The pages of docs/ and the README name files, functions and pages that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]

# `runtime/peer.py: Peer.run`, perhaps over two lines; paths may be shortened by swarm_peer/.
REFERENCE = re.compile(r"`([\w/]+\.py)(?::\s+([\w.]+))?`")
# `Peer.run`, where the file has been named before
MEMBER = re.compile(r"`([A-Z]\w*\.[a-z_]\w*)`")
# | `Peer` | `runtime/peer.py` |
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)
# Of other projects.
FOREIGN = {"AutoModelForCausalLM.from_pretrained"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def find_file(name, root=ROOT):
    return next((path for path in (root / name, root / "swarm_peer" / name) if path.is_file()), None)


@cache
def names_in(path):
    """All names that a file defines: `function`, `CONSTANT`, `Class`, `Class.method`, `Class.field`."""
    return set(_defined(ast.parse(path.read_text()).body))


def _defined(body):
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in _defined(node.body))
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id


def broken_references(text, root=ROOT):
    """References of a page to files and names that are not there."""
    for file, name in REFERENCE.findall(text):
        path = find_file(file, root)
        if path is None:
            yield file
        elif name and name not in names_in(path):
            yield f"{file}: {name}"
    everywhere = set().union(*(names_in(path) for path in root.rglob("swarm_peer/**/*.py")))
    everywhere = everywhere.union(*(names_in(path) for path in root.rglob("coordinator/**/*.py")))
    yield from (name for name in MEMBER.findall(text) if name not in everywhere | FOREIGN)


def wrong_rows(text):
    """Rows of a table of classes and their files whose class is not in that file."""
    for name, file in ROW.findall(text):
        path = find_file(file)
        if path is None or name not in names_in(path):
            yield f"{name}: {file}"


def anchors_of(text):
    """What links may name behind `#`, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
                yield link


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_what_exists(page):
    assert list(broken_references((ROOT / page).read_text())) == []


def test_the_architecture_names_files_and_functions():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert sum(bool(name) for _, name in REFERENCE.findall(text)) > 50
    assert len(ROW.findall(text)) > 20
    assert list(wrong_rows(text)) == []
    assert list(wrong_rows("| `Peer` | `runtime/context.py` |")) == ["Peer: runtime/context.py"]


MEASUREMENTS = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "benchmarks").glob("*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *MEASUREMENTS, "CHANGELOG.md", "coordinator/simulator/README.md"])
def test_links_lead_somewhere(page):
    assert list(broken_links(ROOT / page)) == []


def test_a_renamed_function_and_a_dead_link_are_found(tmp_path):
    package = tmp_path / "swarm_peer"
    package.mkdir()
    (package / "peer.py").write_text("LIMIT = 1\nclass Peer:\n    stage: int = 0\n    async def run(self): ...\n")
    good = "`peer.py`, `peer.py:\n  Peer.run`, `swarm_peer/peer.py: LIMIT`, `Peer.stage`"
    assert list(broken_references(good, tmp_path)) == []
    bad = "`peers.py` `peer.py: Peer.walk` `peer.py: run` `Peer.leave`"
    assert list(broken_references(bad, tmp_path)) == ["peers.py", "peer.py: Peer.walk", "peer.py: run", "Peer.leave"]
    page = tmp_path / "page.md"
    page.write_text(
        "# A word's page\n[a](swarm_peer/peer.py) [b](#a-words-page) [c](gone.md) [d](page.md#gone) [e](x://y)"
    )
    assert list(broken_links(page)) == ["gone.md", "page.md#gone"]
