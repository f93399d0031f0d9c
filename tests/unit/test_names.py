"""One name, one thing: a reader who looks for a class or a module by its name finds the one that was meant."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm_peer", "coordinator")
# Every package and every program has one.
USUAL = {"__init__"}


def same_names(root):
    """The public classes of one name, and the modules of which three or more have one name, with their places."""
    classes, modules = defaultdict(list), defaultdict(list)
    for path in (path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))):
        place = path.relative_to(root).as_posix()
        modules[path.stem].append(place)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(place)
    found = {name: places for name, places in classes.items() if len(places) > 1}
    return found | {name: places for name, places in modules.items() if len(places) > 2 and name not in USUAL}


def test_no_two_classes_and_no_three_modules_have_one_name():
    assert same_names(ROOT) == {}


def test_the_check_sees_them(tmp_path):
    sources = {
        "swarm_peer/__init__.py": "",
        "swarm_peer/a/__init__.py": "",
        "coordinator/__init__.py": "",
        "swarm_peer/watch.py": "class Watch: pass\nclass _Own: pass",
        "coordinator/watch.py": "class _Own: pass",
        "swarm_peer/a/run.py": "if True:\n class Watch: pass",
    }
    for place, source in sources.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(source)
    twice = {"Watch": ["swarm_peer/a/run.py", "swarm_peer/watch.py"]}
    assert same_names(tmp_path) == twice
    (tmp_path / "swarm_peer/a/watch.py").touch()
    thrice = {"watch": ["swarm_peer/a/watch.py", "swarm_peer/watch.py", "coordinator/watch.py"]}
    assert same_names(tmp_path) == twice | thrice
