"""Data sets of the hub, with a file system in the place of the hub's, and folders with a card."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from swarm_peer.config import DataSection
from swarm_peer.errors import HubFailed, UserError
from swarm_peer.runtime.data.corpus import check_shards, open_shards

ROWS = [{"text": f"text {i}", "other": [None, 1, "one", {"k": []}][i % 4]} for i in range(40)]
TEXTS = [row["text"] for row in ROWS]


class Hub(AbstractFileSystem):
    """Gives the files of a dictionary, as long as it is in reach."""

    protocol = "hf"
    cachable = False
    content: dict[str, bytes]
    reads_left: float
    failures: int

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        names = [name for name in self.content if name.startswith(path.rstrip("/"))]
        return [self.info(name) for name in names] if detail else names

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name not in self.content:
            raise FileNotFoundError(path)
        return {"name": name, "type": "file", "size": len(self.content[name]), "etag": name}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> AbstractBufferedFile:
        return RemoteFile(self, path, mode, block_size=1 << 10, cache_type="readahead")


class RemoteFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        Hub.reads_left -= 1
        if Hub.reads_left < 0:
            Hub.failures += 1
            raise asyncio.TimeoutError("the hub is away")
        return Hub.content[self.path][start:end]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(Hub, "content", {}, raising=False)
    monkeypatch.setattr(Hub, "reads_left", float("inf"), raising=False)
    monkeypatch.setattr(Hub, "failures", 0, raising=False)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 3)
    for name in ("STREAMING_READ_RETRY_INTERVAL", "STREAMING_OPEN_RETRY_INTERVAL"):
        monkeypatch.setattr(datasets.config, name, 0)
    builder = datasets.load_dataset_builder

    def load(path: str, name: str | None = None, cache_dir: str | None = None) -> Any:
        files = {"train": [f"hf://{file}" for file in Hub.content]}
        return builder(path.rpartition("/")[2], data_files=files, cache_dir=cache_dir)

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    monkeypatch.setitem(_registry, "hf", Hub)
    return Hub


def read(cache_dir: Path, name: str, **more: Any) -> list[str]:
    section = DataSection(dataset=name, sequence_length=8, **more)
    shards = open_shards(section, cache_dir)
    check_shards(section, shards)
    return [text for shard in shards for text in shard()]


@pytest.mark.parametrize("kind", ["json", "parquet", "csv"])
def test_a_data_set_of_the_hub(kind: str, hub: type[Hub], tmp_path: Path) -> None:
    if kind == "json":
        hub.content["a.jsonl"] = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    elif kind == "csv":
        hub.content["a.csv"] = ("n,text\n" + "".join(f"1,{text}\n" for text in TEXTS)).encode()
    else:
        for part, other in enumerate(([1] * 20, ["one"] * 20)):
            sink = pa.BufferOutputStream()
            pq.write_table(pa.table({"text": TEXTS[20 * part :][:20], "other": other}), sink)
            hub.content[f"{part}.parquet"] = sink.getvalue().to_pybytes()
    assert read(tmp_path, f"swarm/{kind}") == TEXTS
    with pytest.raises(UserError, match=r"it has no field 'body', .*, but .*text: set data\.text_field to one of them"):
        read(tmp_path, f"swarm/{kind}", text_field="body")
    with pytest.raises(HubFailed, match=r"Bad split: .?test.*check its name, subset and split"):
        read(tmp_path, f"swarm/{kind}", split="test")


def test_a_hub_out_of_reach_is_no_broken_file(hub: type[Hub], tmp_path: Path) -> None:
    """The reader of slices asks again then (test_runtime_prefetch.py)."""
    lines = "".join(json.dumps({"text": f"text {i} " + "word " * 5000}) + "\n" for i in range(99))
    hub.content["a.jsonl"] = lines.encode()
    (shard,) = open_shards(DataSection(dataset="swarm/json", sequence_length=8), tmp_path)
    documents = shard()
    first = [next(documents)]
    hub.reads_left = 0
    with pytest.raises(HubFailed, match=r"cannot read hf://a\.jsonl after line \d+: Server Disconnected; .*connection"):
        first += documents
    assert 1 <= len(first) < 99
    assert hub.failures == 3, "`datasets` has tried for a while"
    hub.reads_left = float("inf")
    assert len(list(shard())) == 99


def test_what_datasets_reads_itself_waits_for_the_hub_as_well(hub: type[Hub], tmp_path: Path) -> None:
    hub.content["a.csv"] = ("text\n" + "".join(f"text {i} {'word ' * 5000}\n" for i in range(99))).encode()
    (shard,) = open_shards(DataSection(dataset="swarm/csv", sequence_length=8), tmp_path)
    hub.reads_left = 3
    with pytest.raises(HubFailed, match=r"^cannot read data\.dataset='swarm/csv': .*connection to the hub \([^)]*\)$"):
        list(shard())


def test_a_bad_record_on_the_hub_costs_itself(hub: type[Hub], tmp_path: Path) -> None:
    hub.content["a.jsonl"] = b'{"text": "one"}\n{nope\n{"text": 5}\n{"text": "two"}\n'
    hub.content["b.jsonl"] = json.dumps(ROWS).encode()[:-1]
    assert read(tmp_path, "swarm/json") == ["one", "two", *TEXTS]


def test_a_file_elsewhere_is_not_read(hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.content["a.jsonl"] = b"{}"
    load = datasets.load_dataset_builder

    def lead_elsewhere(*args: Any, **options: Any) -> Any:
        builder = load(*args, **options)
        builder.config.data_files = {"train": ["hf://a.jsonl", str(tmp_path / "private.jsonl")]}
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", lead_elsewhere)
    with pytest.raises(UserError, match=r"leads to .*private\.jsonl, outside of that data set"):
        read(tmp_path, "swarm/json")


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", str(tmp_path / "datasets"))

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(UserError, match=r"'swarm/json': Read-only file system: .*/datasets; .*--cache-dir") as caught:
        read(tmp_path, "swarm/json")
    assert not isinstance(caught.value, HubFailed), "it is not tried again for an hour"


def test_folders_whose_card_says_which_files_they_have(tmp_path: Path) -> None:
    card = """---
configs:
- config_name: plain
  data_files: in/*
  OPTION
---
A folder.
"""
    options = {"json": "default: true", "nested": "field: data", "csv": 'sep: ";"'}
    for kind, option in options.items():
        (tmp_path / kind / "in").mkdir(parents=True)
        (tmp_path / kind / "README.md").write_text(card.replace("OPTION", option))
    (tmp_path / "json/in/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{nope\n")
    (tmp_path / "nested/in/a.json").write_text(json.dumps({"data": [{"text": text} for text in TEXTS]}))
    (tmp_path / "csv/in/table.csv").write_text("n;text\n" + "".join(f"1;{text}\n" for text in TEXTS))
    for kind in options:
        assert read(tmp_path, str(tmp_path / kind), subset="plain") == TEXTS
    with pytest.raises(UserError, match=r"BuilderConfig 'other' not found.*check the files"):
        read(tmp_path, str(tmp_path / "csv"), subset="other")


def test_a_card_without_configs_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "README.md").write_text("---\nlicense: mit\n---\nconfigs: none\n")
    (tmp_path / "d" / "code-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "d" / "news.txt").write_text("news")
    assert read(tmp_path, str(tmp_path / "d")) == [*TEXTS, "news"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_save_to_disk_writes(split: str, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": TEXTS}), test=datasets.Dataset.from_dict({"text": TEXTS[:3]})
    )
    both.save_to_disk(tmp_path / "both")
    assert read(tmp_path, str(tmp_path / "both"), split=split) == list(both[split]["text"])
    both["train"].save_to_disk(tmp_path / "one")
    assert read(tmp_path, str(tmp_path / "one")) == TEXTS
