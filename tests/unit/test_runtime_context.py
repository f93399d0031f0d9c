"""Time, chance, threads and files reach the runtime through its context alone; the machine's own are as promised."""

import ast
import asyncio
import threading
from pathlib import Path

import anyio
import pytest

from swarm_peer.runtime.host.machine import FolderStorage, SystemRandom, SystemThreads

RUNTIME = Path(__file__).parents[2] / "swarm_peer" / "runtime"
# The machine's own side: these make what a context holds, run before there is one, or keep files for all runs.
EDGES = ("host/", "startup.py", "doctor.py", "base/base_cache.py")
# Where else the machine is touched, and why.
EXCEPTIONS = {
    "base/base_index.py": {"read_bytes"},  # published weights, like the tokenizers below
    "data/corpus.py": {"read_text", "walk"},  # the run's corpus, like the next two
    "data/files.py": {"walk", "access", "R_OK", "X_OK"},
    "data/opening.py": {"open"},
    "data/tokenizers.py": {"listdir", "read_bytes", "read_text"},  # but for what transformers reads
    "network/bootstrap.py": {"read_text"},  # a file of addresses, which is read before there is a context
}
MODULES = {"time", "datetime", "secrets", "uuid", "tempfile", "shutil", "subprocess"}
PARTS = {
    "os": {"path"},
    "random": {"Random"},  # with a seed
    "threading": {"Condition", "Event", "Lock"},  # which guard what two threads share, and start none
}
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "rename", "to_thread"}


def violations(source):
    """Names of what reaches around the context, with the line of each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module in MODULES or node.module in PARTS):
            yield node.lineno, node.module
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) else None
            if node.attr in METHODS or (base in PARTS and node.attr not in PARTS[base]):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "open" or (name == "random.Random" and not node.args):
                yield node.lineno, name


def cases():
    for path in sorted(RUNTIME.rglob("*.py")):
        name = path.relative_to(RUNTIME).as_posix()
        if not name.startswith(EDGES):
            yield pytest.param(path, EXCEPTIONS.get(name, set()), id=name)


@pytest.mark.parametrize(("path", "allowed"), list(cases()))
def test_the_machine_is_reached_through_the_context(path, allowed):
    found = {name: line for line, name in violations(path.read_text()) if name not in allowed}
    assert not found, f"{path.name} has these lines that ask the machine itself: {found}; take PeerContext's"


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import os\nos.urandom(8)",
        "import random\nrandom.shuffle(x)",
        "import random\nrandom.Random()",
        "from random import shuffle",
        "import threading\nthreading.Thread(target=f)",
        "import anyio\nanyio.to_thread.run_sync(f)",
        "asyncio.to_thread(f)",
        "with open(path) as file: pass",
        "path.write_bytes(b'')",
    ],
)
def test_the_rule_finds(source):
    assert list(violations(source))


def test_the_rule_leaves_alone():
    allowed = (
        "import os, random, threading\nos.path.join(a, b)\nrandom.Random(seed)\nthreading.Lock()\nstorage.read(name)"
    )
    assert not list(violations(allowed))


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_exceptions_are_needed(name):
    found = {what for _, what in violations((RUNTIME / name).read_text())}
    assert found == EXCEPTIONS[name]


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_stream_follows_from_the_seed_and_its_purpose():
    numbers = [SystemRandom(seed).stream(purpose).random() for seed in "ab" for purpose in ("x", "y", "x")]
    assert numbers[0] == numbers[2]
    assert len(set(numbers)) == 4
    assert SystemRandom("a").token(16) != SystemRandom("a").token(16)


async def test_work_runs_in_a_thread_and_its_errors_come_back():
    threads, here = SystemThreads(), threading.get_ident()
    assert await threads.run(lambda number: (number, threading.get_ident() != here), 7) == (7, True)

    def fail():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await threads.run(fail)


async def test_a_function_that_hangs_is_abandoned_if_its_caller_says_so():
    release, daemons = threading.Event(), []

    def hang():
        daemons.append(threading.current_thread().daemon)
        release.wait()

    with anyio.move_on_after(0.01) as scope:
        await SystemThreads().run(hang, abandon_on_cancel=True)
    assert scope.cancelled_caught
    release.set()
    assert daemons == [True], "the end of the process would wait for another thread"


async def test_a_function_that_may_be_abandoned_is_run_like_any_other():
    threads, here = SystemThreads(), threading.get_ident()

    def work(number):
        return number, threading.get_ident() != here

    assert await threads.run(work, 7, abandon_on_cancel=True) == (7, True)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0, abandon_on_cancel=True)


async def test_other_tasks_have_a_turn_while_functions_are_run_that_end_at_once(monkeypatch):
    threads, others = SystemThreads(), []
    monkeypatch.setattr(threads, "start", lambda work, name: work())  # it has ended before anybody waits
    asyncio.get_running_loop().call_soon(others.append, "had its turn")
    assert await threads.run(lambda: list(others), abandon_on_cancel=True) == ["had its turn"]


def test_a_thread_for_good_can_be_joined():
    release, done = threading.Event(), threading.Event()
    join = SystemThreads().start(lambda: (release.wait(), done.set()), "worker")
    assert any(thread.name == "worker" and thread.daemon for thread in threading.enumerate())
    release.set()
    join(5.0)
    assert done.is_set()


def test_files_are_written_whole_read_mapped_and_removed(tmp_path):
    storage = FolderStorage(tmp_path / "new")
    storage.write("a", [b"in", memoryview(b"dex")])
    storage.write("b", [b"123"])
    assert bytes(storage.map("a")) == b"index"
    storage.write("b", [b"45"])
    assert bytes(storage.map("b")) == b"45"
    storage.remove("b")
    storage.remove("b")
    assert [path.name for path in storage.folder.iterdir()] == ["a"]


def test_a_write_that_breaks_off_leaves_the_file_of_before(tmp_path):
    def parts():
        yield b"half"
        raise OSError("disk full")

    storage = FolderStorage(tmp_path)
    storage.write("a", [b"whole"])
    with pytest.raises(OSError, match="disk full"):
        storage.write("a", parts())
    assert bytes(storage.map("a")) == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
