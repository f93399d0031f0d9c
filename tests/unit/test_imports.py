"""Imports point one way: policy <- wire <- runtime <- cli, and the coordinator above all of them."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "hivemind", "transformers", "datasets", "bitsandbytes", "numpy"]


def modules_under(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path):
    """Full names of all modules that a file imports, wherever in it."""
    return tuple(_imports_of(path))


def _imports_of(path):
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_in(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules_under("swarm_peer/policy"), ids=ids)
def test_policy_needs_the_standard_library_and_numpy_only(path):
    for name in imports_of(path):
        allowed = name.split(".")[0] in sys.stdlib_module_names or is_in(name, "numpy", "swarm_peer.policy")
        assert allowed, f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", modules_under("swarm_peer/protocol"), ids=ids)
def test_the_protocol_needs_the_standard_library_and_the_ledger_only(path):
    for name in imports_of(path):
        own = is_in(name, "swarm_peer.protocol", "swarm_peer.policy.data.ledger", "swarm_peer.policy.data.ranges")
        allowed = name.split(".")[0] in sys.stdlib_module_names or own
        assert allowed, f"{ids(path)} imports {name}"


# Where time and chance come from; a decision takes both as arguments.
CLOCKS = {"time", "datetime", "secrets", "uuid", "threading", "asyncio", "socket", "os"}


@pytest.mark.parametrize("path", modules_under("swarm_peer/policy", "swarm_peer/protocol"), ids=ids)
def test_policy_has_no_clock_and_no_dice(path):
    for name in imports_of(path):
        assert name.split(".")[0] not in CLOCKS, f"{ids(path)} imports {name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", f"{ids(path)}:{node.lineno} uses random.{node.attr}"


@pytest.mark.parametrize("path", modules_under("swarm_peer/wire"), ids=ids)
def test_wire_does_not_know_the_runtime_and_the_model(path):
    for name in imports_of(path):
        if is_in(name, "swarm_peer", "coordinator"):
            allowed = (
                "wire",
                "protocol",
                "policy",
                "codecs",
                "config",
                "config_errors",
                "errors",
                "settings",
                "addresses",
                "token_marks",
            )
            assert is_in(name, *(f"swarm_peer.{each}" for each in allowed)), f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", modules_under("swarm_peer/codecs"), ids=ids)
def test_codecs_know_nothing_else(path):
    for name in imports_of(path):
        assert not is_in(name, "swarm_peer") or is_in(name, "swarm_peer.codecs"), f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", modules_under("swarm_peer/model"), ids=ids)
def test_the_model_does_not_know_peers(path):
    for name in imports_of(path):
        assert not is_in(name, "swarm_peer.runtime", "swarm_peer.wire", "hivemind"), f"{ids(path)} imports {name}"


# The rooms of the runtime, from the lowest: each may import those before it.
ROOMS = [
    *("condition", "host", "context", "network", "stage", "state", "data", "base", "step"),
    *("owner", "lifecycle", "assembly", "replica", "mover", "peer", "startup", "doctor"),
]


@pytest.mark.parametrize("path", modules_under("swarm_peer/runtime"), ids=ids)
def test_rooms_of_the_runtime_import_those_below(path):
    room = path.relative_to(ROOT / "swarm_peer/runtime").with_suffix("").parts[0]
    allowed = [f"swarm_peer.runtime.{name}" for name in ROOMS[: ROOMS.index(room) + 1]] if room != "__init__" else []
    for name in imports_of(path):
        if is_in(name, "swarm_peer.runtime") and name != "swarm_peer.runtime":
            assert is_in(name, *allowed), f"{ids(path)} imports {name}, which is not below it"


# What the coordinator may know of a peer: its policies, wire, model and network, and how it reaches the machine.
COORDINATOR_KNOWS = (
    *(
        "swarm_peer.addresses",
        "swarm_peer.cli",
        "swarm_peer.codecs",
        "swarm_peer.config",
        "swarm_peer.peer_options",
        "swarm_peer.settings",
        "swarm_peer.config_errors",
        "swarm_peer.errors",
        "swarm_peer.files",
        "swarm_peer.initial_peers",
        "swarm_peer.logs",
        "swarm_peer.policy",
        "swarm_peer.protocol",
        "swarm_peer.settings",
        "swarm_peer.token_marks",
        "swarm_peer.wire",
    ),
    *("swarm_peer.model", "swarm_peer.runtime.condition", "swarm_peer.runtime.context", "swarm_peer.runtime.host"),
    *("swarm_peer.runtime.network", "swarm_peer.runtime.data", "swarm_peer.runtime.state", "swarm_peer.runtime.base"),
    "swarm_peer.runtime.stage.stage_client",  # its queries go the way of a microbatch
)


@pytest.mark.parametrize("path", modules_under("coordinator"), ids=ids)
def test_the_coordinator_knows_the_outside_of_peers(path):
    for name in imports_of(path):
        if is_in(name, "swarm_peer") and name not in ("swarm_peer", "swarm_peer.__version__", "swarm_peer.runtime"):
            assert is_in(name, *COORDINATOR_KNOWS), f"{ids(path)} imports {name}"


def test_a_peer_never_imports_the_coordinator():
    for path in modules_under("swarm_peer"):
        for name in imports_of(path):
            assert not is_in(name, "coordinator"), f"{ids(path)} imports {name}"


def test_nothing_below_imports_the_cli():
    for path in modules_under("swarm_peer"):
        if path.name != "cli.py":
            for name in imports_of(path):
                assert not is_in(name, "swarm_peer.cli"), f"{ids(path)} imports {name}"


HIVEMIND_ADAPTERS = {
    "hivemind_all_reduce.py",
    "dht.py",
    "guarded_p2p.py",
    "p2p_transport.py",
    "reachability.py",
    "record_storage.py",
    "record_validator.py",
}


def test_hivemind_stays_inside_its_adapters():
    found = {path.name for path in modules_under("swarm_peer") if any(is_in(n, "hivemind") for n in imports_of(path))}
    assert found <= HIVEMIND_ADAPTERS
    assert found, "the test finds imports"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside of functions are there for a quick `--help`, and do not hide a circle."""
    files = {module_of(path): path for path in modules_under("swarm_peer", "coordinator")}
    graph = {name: files.keys() & set(imports_of(path)) for name, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_wall_sees_a_circle_through_a_function(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for name, text in {"a": "from swarm_peer import b", "b": "def x():\n import swarm_peer.c", "c": ""}.items():
        (tmp_path / "swarm_peer").mkdir(exist_ok=True)
        (tmp_path / "swarm_peer" / f"{name}.py").write_text(text)
    test_no_modules_import_each_other_in_a_circle()
    imports_of.cache_clear()
    (tmp_path / "swarm_peer" / "c.py").write_text("from swarm_peer.a import y")
    with pytest.raises(graphlib.CycleError):
        test_no_modules_import_each_other_in_a_circle()


def test_the_wall_sees_all_kinds_of_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "package" / "sub" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("import a.b, c as d\nfrom e import f\nfrom . import g\nfrom ..h import i\ndef x():\n import j\n")
    expected = {"a.b", "c", "e", "e.f", "package.sub", "package.sub.g", "package.h", "package.h.i", "j"}
    assert set(imports_of(path)) == expected


def python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("command", ["swarm_peer", "coordinator"])
def test_help_is_quick(command):
    """Without what takes seconds to import."""
    result = python(
        f"import sys; sys.argv = ['x', '--help']\n"
        f"from {command}.cli import run\n"
        f"try:\n run()\n"
        f"finally:\n print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert result.returncode == 0, result.stderr
    assert "Usage: swarm-" in result.stdout
    assert result.stdout.splitlines()[-1] == "heavy: []"


def test_decisions_do_not_need_torch():
    modules = [module_of(path) for path in modules_under("swarm_peer/policy")]
    modules += [
        "swarm_peer.config",
        "swarm_peer.peer_options",
        "swarm_peer.settings",
        "swarm_peer.errors",
        "swarm_peer.wire.records",
        "swarm_peer.wire.messages",
    ]
    result = python(f"import sys, {', '.join(modules)}; print(sorted(set({HEAVY[:5]!r}) & set(sys.modules)))")
    assert result.stdout.strip() == "[]", result.stderr


def test_a_look_at_a_run_needs_no_models():
    result = python("import sys, coordinator.watch.observer; print('transformers' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr
