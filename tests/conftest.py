import gc
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from programs import Processes

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported, so not from a fixture
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests share the cores, and threads that wait for each other spin: a third of the time of those that compute.
os.environ["OMP_NUM_THREADS"] = "1"
# Two hundred libp2p daemons live for seconds: a third of what each costs would be collecting garbage as it starts.
os.environ |= {"GOGC": "off", "GOMEMLIMIT": "128MiB"}

# A busy machine is no failure, and what fails once must fail again.
settings.register_profile("swarm", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("swarm")


# Folders of tests that start no swarm.
UNIT_TESTS = frozenset({"unit", "simulation"})


@pytest.fixture(autouse=True, scope="session")
def state_of_no_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Peers that tests start keep nothing in the home of whoever runs the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real swarms get longer before they count as hung: machines differ by four in how fast they are."""
    for item in items:
        if item.path.parent.name not in UNIT_TESTS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


def pytest_collection_finish() -> None:
    """The garbage collector passes by what has been imported: a twentieth of the time of the unit tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What a test has left behind would be waited for."""
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.stop()
