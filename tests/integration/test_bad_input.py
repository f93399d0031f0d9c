"""What a user can get wrong: one line that says what, which value and what to do; exit code 2; no traceback."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from swarm import GPT2, tiny_manifest

import coordinator.cli
import swarm_peer.cli
from swarm_peer.wire.identity import Identity

UNUSED_ID = Identity.generate().peer_id
ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{UNUSED_ID}"


def one_line_of(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """Run a command that must fail; returns what it says."""
    entry = {"swarm-peer": swarm_peer.cli.run, "swarm-coordinator": coordinator.cli.run}[command]
    monkeypatch.setattr(sys, "argv", [command, *options])
    with pytest.raises(SystemExit) as ended:
        entry()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith(command)]
    assert ended.value.code == 2
    assert len(said) == 1, said
    return said[0]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration with some sections changed and returns its path."""

    def write(**sections: Any) -> str:
        data = tiny_manifest().model_dump(mode="json")
        for name, section in sections.items():
            data[name] = data.get(name, {}) | section if isinstance(section, dict) else section
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


BAD_CONFIGURATIONS = [
    ({"data": {"sequence_lenght": 8}}, ["data.sequence_lenght", "unknown key"]),
    ({"training": {"microbatch_size": 3}}, ["global_batch_size=16", "microbatch_size=3", "change"]),
    ({"data": {"dataset": "text", "files": ["/nowhere/*.txt"]}}, ["/nowhere/*.txt"]),
    ({"data": {"dataset": "text", "files": []}}, ["dataset='text'", "files"]),
    ({"data": {"tokenizer": "/nowhere/tokenizer"}}, ["/nowhere/tokenizer"]),
    ({"model": {"config": GPT2 | {"vocab_size": 100}}}, ["100", "256"]),
    ({"model": {"config": GPT2 | {"tie_word_embeddings": True}}}, ["tie_word_embeddings: false"]),
    ({"model": {"config": "/nowhere/model"}}, ["/nowhere/model"]),
    ({"stages": {"count": 9}}, ["9", "3"]),
    ({"stages": {"count": 2, "layers": [1, 1]}}, ["[1, 1]", "3"]),
]


@pytest.mark.parametrize(("sections", "words"), BAD_CONFIGURATIONS)
def test_configurations_that_cannot_work(sections, words, config, tmp_path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    options = ("local", config(**sections), "--peers", "1,1", "--output", str(tmp_path / "out"))
    said = one_line_of("swarm-coordinator", monkeypatch, capfd, *options)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["local", "/nowhere.yaml", "--peers", "1,1", "--output", "x"], ["/nowhere.yaml", "no such file"]),
        (["local", "CONFIG", "--peers", "1", "--output", "OUT"], ["--peers 1", "2 stages"]),
        (["local", "CONFIG", "--peers", "one", "--output", "OUT"], ["--peers one", "2,2"]),
        (["baseline", "CONFIG", "--device", "cuda:7", "--output", "OUT"], ["cuda:7", "cpu"]),
        (["baseline", "CONFIG", "--set", "training.stepz=3", "--output", "OUT"], ["training.stepz"]),
        (["serve", "CONFIG", "--host-maddrs", "localhost", "--output", "OUT"], ["'localhost'", "/ip4/"]),
        (["serve", "CONFIG", "--sped", "3"], ["--sped"]),
    ],
)
def test_options_of_the_coordinator(options, words, config, tmp_path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    known = {"CONFIG": config(), "OUT": str(tmp_path / "out")}
    said = one_line_of("swarm-coordinator", monkeypatch, capfd, *(known.get(option, option) for option in options))
    assert all(word in said for word in words), said


@pytest.mark.parametrize("known", [(), (ADDRESS,)], ids=["none", "gone"])
def test_a_run_that_has_begun_is_not_begun_anew(known, config, tmp_path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    output = tmp_path / "out"
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"optimizer_step": 1}\n')
    (output / "peers").write_text("\n".join(known))
    said = one_line_of("swarm-coordinator", monkeypatch, capfd, "serve", config(), "--output", str(output))
    assert all(word in said for word in ("metrics.jsonl", "--initial-peers", "--resume", "--output")), said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--initial-peers", "1.2.3.4:5"], ["'1.2.3.4:5'", "/ip4/"]),
        (["--initial-peers", "/ip4/127.0.0.1/tcp/1"], ["/p2p/", "copy"]),
        (["--stage", "first", "--initial-peers", "x"], ["'first'"]),
        (["--device", "tpu", "--initial-peers", ADDRESS], ["tpu", "cpu"]),
        (["--device", "cuda:9", "--initial-peers", ADDRESS], ["cuda:9", "cpu"]),
        (["--max-memory", "lots", "--initial-peers", "x"], ["--max-memory", "lots", "8GiB"]),
        ([], ["--initial-peers"]),
    ],
)
def test_options_of_a_peer(options, words, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    said = one_line_of("swarm-peer", monkeypatch, capfd, *options)
    assert all(word in said for word in words), said


def test_an_initial_peer_that_does_not_answer(monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    begin = time.monotonic()
    said = one_line_of("swarm-peer", monkeypatch, capfd, "--initial-peers", ADDRESS)
    assert ADDRESS in said
    assert "firewall" in said
    assert time.monotonic() - begin < 20


def test_ports_in_use(taken_port, config, tmp_path, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    serve = ("serve", config(), "--output", str(tmp_path / "out"))
    listening = ("--host-maddrs", f"/ip4/127.0.0.1/tcp/{taken_port}")
    said = one_line_of("swarm-coordinator", monkeypatch, capfd, *serve, *listening)
    assert str(taken_port) in said
    assert "--host-maddrs" in said
    options = ("--metrics-port", str(taken_port), "--initial-peers", ADDRESS)
    said = one_line_of("swarm-peer", monkeypatch, capfd, *options)
    assert str(taken_port) in said
    assert "--metrics-port" in said
