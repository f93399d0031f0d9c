"""What a run's manifest may read on a peer's machine: what lies below --data-dir, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm_peer.config import DataSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.allowed_files import ANYWHERE, check_data_files, check_tokenizer


def manifest_of(dataset: str, *files: str, tokenizer: str = "bytes") -> RunManifest:
    section = DataSection(dataset=dataset, files=files, sequence_length=8, tokenizer=tokenizer)
    return RunManifest.model_construct(data=section)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with private texts, and public ones beside, in which the peer works."""
    for name in ("private", "home/public"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("some text")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home" / "public")
    (tmp_path / "home" / "public" / "link").symlink_to(tmp_path / "private")
    return tmp_path / "home"


@pytest.mark.parametrize(
    "data",
    [
        ("text", "a.txt"),
        ("text", "~/public/*.txt"),
        ("text", "**/a.txt"),  # two stars follow no links
        *((".",), ("./",), ("HOME/public",), ("~/public",)),
    ],
)
def test_what_lies_below_the_data_dir_may_be_read(home: Path, data: Any) -> None:
    manifest = manifest_of(*(part.replace("HOME", str(home)) for part in data))
    for data_dir in (home / "public", home, Path()):
        check_data_files(manifest, data_dir)
    for other in (None, home / "pub", home / "public" / "sub"):
        with pytest.raises(UserError, match=r"the run wants to read .* on this machine: allow it with --data-dir"):
            check_data_files(manifest, other)


@pytest.mark.parametrize(
    "data",
    [
        ("text", "/etc/passwd"),
        ("text", "~/secrets"),
        ("text", "../../private/a.txt"),
        ("text", "*/../../../private/a.txt"),
        ("text", "link/a.txt"),
        ("text", "*/a.txt"),
        ("/etc",),
        ("~",),
        ("../../private",),
        ("./link",),
        ("some/where/else",),
    ],
)
def test_no_way_leads_out_of_the_data_dir(home: Path, data: Any) -> None:
    with pytest.raises(UserError, match="--data-dir") as caught:
        check_data_files(manifest_of(*data), home / "public" if data[0] != "some/where/else" else home / "other")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [("embedded",), ("wikitext",), ("someone/texts",), ("hf://datasets/someone/texts",)])
def test_what_is_not_on_this_machine_needs_no_data_dir(data: Any) -> None:
    check_data_files(manifest_of(*data), None)


@pytest.mark.parametrize("tokenizer", [".", "./", "HOME/public", "~/public", "../public"])
def test_a_tokenizer_is_held_to_the_data_dir_as_well(home: Path, tokenizer: str) -> None:
    manifest = manifest_of("embedded", tokenizer=tokenizer.replace("HOME", str(home)))
    for data_dir in (home / "public", home, ANYWHERE):
        check_data_files(manifest, data_dir)
        check_tokenizer(manifest.data, data_dir)
    for other in (None, home / "pub", home / "public" / "sub"):
        for check in (check_data_files, lambda it, path: check_tokenizer(it.data, path)):
            with pytest.raises(UserError, match=r"the run wants to read .* on this machine: .* FOLDER, which is"):
                check(manifest, other)


@pytest.mark.parametrize("tokenizer", ["/etc", "~", "../../private", "./link", "link", "some/where/else", "a.txt"])
def test_no_tokenizer_leads_out_of_the_data_dir(home: Path, tokenizer: str) -> None:
    """`link` and `a.txt` look like names on the hub, and are here: transformers would take them from here."""
    with pytest.raises(UserError, match="--data-dir"):
        check_data_files(manifest_of("embedded", tokenizer=tokenizer), home / "other")


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "someone/tokenizer"])
def test_tokenizers_of_the_hub_need_no_data_dir(home: Path, tokenizer: str) -> None:
    (home / "public" / "bytes").mkdir()
    check_data_files(manifest_of("embedded", tokenizer=tokenizer), None)
