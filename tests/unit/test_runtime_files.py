"""Which files a data section names, in which order, and which are left out. With real tiny files."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from swarm_peer.config import DataSection
from swarm_peer.errors import UserError
from swarm_peer.runtime.data.corpus import check_shards, open_shards, total_bytes
from swarm_peer.runtime.data.files import find_data, kind_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(*names: str) -> None:
    """Files whose document is their name."""
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) if kind_of(name) == "json" else name)


def section(dataset: str, *files: str, **more: Any) -> DataSection:
    return DataSection(dataset=dataset, files=files, sequence_length=8, **more)


def read(*args: str, **more: Any) -> list[str]:
    shards = open_shards(section(*args, **more), None)
    check_shards(section(*args, **more), shards)
    return [text for shard in shards for text in shard()]


def left_out(*args: str, **more: Any) -> dict[str, list[str]]:
    found = find_data(section(*args, **more))
    return {reason: [os.path.relpath(name) for name in names] for reason, names in found.left_out.items()}


def test_a_folder_a_pattern_and_its_files_give_the_same_documents_in_the_same_order() -> None:
    names = ["d/a-b.txt", "d/a.txt", "d/b.jsonl", "d/sub-a/c.txt", "d/sub/d.json", "d/z.md", "d/__y.txt"]
    names.sort()
    put(*names, "d/README.md", "d/LICENSE", "d/dataset_info.json", "d/photo.png", "d/.hidden.txt", "d/__x/e.txt")
    Path("d/empty.txt").touch()
    by_folder = read("./d")
    assert by_folder == names
    for other in (("text", "d/**"), ("text", "d"), ("text", "d/sub*/**", "d/*"), (os.path.abspath("d"),)):
        assert read(*other) == [name for name in names if name in by_folder], other
    assert read("text", *reversed(names)) == names
    assert read("text", "./d/a.txt", "d/a.txt", "d/a*.txt") == ["d/a-b.txt", "d/a.txt"], "a file is read once"
    assert read("./d/a.txt") == ["d/a.txt"]


def test_files_left_out_are_named_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    put("d/a.txt", "d/README.md", "d/license.txt", "d/state.json", *(f"d/{n}.png" for n in range(7)))
    put("d/test/b.txt", "d/dev.txt", "other/c.txt")
    Path("d/empty.json").touch()
    os.symlink("../other", "d/link")
    os.symlink("nowhere", "d/broken.txt")
    unknown = "the name ends in none of .txt, .text, .md, .json, .jsonl, .ndjson, .csv, .tsv, .parquet, .arrow"
    assert left_out("./d") == {
        "a link to a folder": ["d/link"],
        "no file, or a broken link": ["d/broken.txt"],
        "belongs to split validation by its name": ["d/dev.txt"],
        "belongs to split test by its name": ["d/test/b.txt"],
        "describes the data": ["d/README.md", "d/license.txt", "d/state.json"],
        unknown: [f"d/{n}.png" for n in range(7)],
        "empty": ["d/empty.json"],
    }
    with caplog.at_level(logging.WARNING):
        assert read("./d") == ["d/a.txt"]
    assert f"files_left_out count=7 reason={unknown} files={os.path.abspath('d/0.png')}, " in caplog.text
    assert "d/4.png and 2 more\n" in caplog.text
    assert left_out("text", "d/*")["a folder (/** behind its name reads it)"] == ["d/link", "d/test"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["news.jsonl", "code-train.jsonl"], ["code-train.jsonl", "news.jsonl"]),
        (["wiki.jsonl", "books-dev-2024.jsonl"], ["books-dev-2024.jsonl", "wiki.jsonl"]),
        (["latest.txt", "test drive.txt", "evaluation-report.txt"], None),
        (["a.txt", "b.jsonl", "c.jsonl"], None),
        (["train.jsonl", "test.jsonl", "more.jsonl"], ["more.jsonl", "train.jsonl"]),
        (["train-00000-of-00002.json", "train-00001-of-00002.json", "val-00000-of-00001.json"], 2),
        (["train/a.txt", "validation/a.txt", "eval/b/c.txt"], ["train/a.txt"]),
        (["Training/a.txt", "TEST_1.txt"], ["Training/a.txt"]),
        (["x.txt", "news.jsonl-00000-of-00002", "news.jsonl-00001-of-00002"], 3),
    ],
)
def test_names_that_are_those_of_a_split_alone_are_left_out(names: list[str], expected: list[str] | int | None) -> None:
    put(*(f"d/{name}" for name in names))
    documents = [name.removeprefix("d/") for name in read("./d")]
    assert documents == expected or documents == sorted(names)[: expected if isinstance(expected, int) else None]
    assert read("text", "d/**") == read("./d")


def test_another_split() -> None:
    put("d/train.txt", "d/test/a.txt", "d/more.txt", "d/data/train_sft-00000-of-00001.txt")
    assert read("./d", split="test") == ["d/test/a.txt"]
    assert read("./d", split="train_sft") == ["d/data/train_sft-00000-of-00001.txt"]
    with pytest.raises(UserError, match=r"data\.split='val': by their names, all files belong to test, train; set"):
        read("./d", split="val")
    put("only/test.txt")
    with pytest.raises(UserError, match=r"data\.split='train': by their names, all files belong to test"):
        read("./only")
    for meant in (
        ("text", "only/test.txt"),
        ("text", "only/test.txt", "only/*"),
        ("text", "only/*.txt"),
        ("./only/test.txt",),
    ):
        assert read(*meant) == ["only/test.txt"], "it is named"


def test_brackets_and_stars_may_be_part_of_a_name() -> None:
    put("d [en]/a.jsonl", "d/x*y.txt", "d/xzy.txt", "d/[ab].txt")
    assert read("./d [en]") == read("json", "d [en]/*.jsonl") == read("json", "d [en]/a.jsonl") == ["d [en]/a.jsonl"]
    assert read("text", "d/x*y.txt") == ["d/x*y.txt"]
    assert read("text", "d/[ab].txt") == ["d/[ab].txt"]
    assert read("text", "d/[xz]z*.txt") == ["d/xzy.txt"]


def test_the_order_does_not_depend_on_where_a_home_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("m/b.txt", "a/home/x.txt", "z/home/x.txt")
    orders = []
    for place in ("a", "z"):
        monkeypatch.setenv("HOME", str(tmp_path / place / "home"))
        orders.append([Path(text).name for text in read("text", "~/x.txt", str(tmp_path / "m/*.txt"))])
    assert orders == [["b.txt", "x.txt"]] * 2


def test_a_name_says_what_a_file_holds_and_the_manifest_where_it_does_not() -> None:
    put("a.log", "b.jsonl", "part-0", "part-1")
    Path("c.txt").write_text('{"text": "a line"}')
    assert read("text", "a.log", "b.jsonl") == ["a.log", "b.jsonl"]
    assert read("text", "part-*") == read("text", "./part*") == ["part-0", "part-1"]
    assert read("json", "c.txt") == ["a line"]
    assert read("text", "c.txt") == ['{"text": "a line"}']
    put("n/part-0", "n/part-1")
    assert read("text", "n/*") == ["n/part-0", "n/part-1"], "no name there tells"
    put("n/a.txt")
    assert read("text", "n/*") == ["n/a.txt"]


def test_files_in_a_zip_archive() -> None:
    put("d/a.txt")
    with zipfile.ZipFile("d/more.zip", "w") as archive:
        for name in ("in/b.txt", "a.jsonl", "photo.png", "__MACOSX/x.txt", "README.md"):
            archive.writestr(name, '{"text": "zipped"}' if name == "a.jsonl" else name)
    assert read("./d") == read("text", "d/*") == ["d/a.txt", "zipped", "in/b.txt"]
    assert left_out("./d")["describes the data"] == ["d/more.zip:README.md"]
    assert total_bytes(section("./d")) == len("d/a.txt") + len('{"text": "zipped"}') + len("in/b.txt")
    Path("bad.zip").write_text("no zip")
    with pytest.raises(UserError, match=r"cannot read .*bad\.zip: File is not a zip file; mend the archive"):
        read("text", "bad.zip")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("./void",), r"data\.dataset: 'void' names no file that this user can see"),
        (("./nothing",), r"data\.dataset='\./nothing': there is no such folder or file that this user can see"),
        (("./empty",), r"data\.dataset='\./empty': all of its files are empty: add text"),
        (("./pictures",), r"'\./pictures': it has nothing to read \(count=1 reason=the name ends in none of \.txt, "),
        (("./out",), r"data\.dataset='out' leads to .*out/link\.txt, outside of that data set"),
        (("text", "fifo"), r"data\.files: 'fifo' names no file"),
        (("text", "links"), r"'links' names .* \(count=1 reason=a link to a folder files=links/data\): correct it"),
        (("text", "links/**"), r"'links/\*\*' names .* \(count=1 reason=a link to a folder files=links/data\)"),
        (
            ("./hid",),
            r"data\.dataset: 'hid' names .* \(count=2 reason=hidden files=hid/__x, hid/\.a\.txt\): correct it",
        ),
        (("./empty", "subset"), r"data\.subset='en' is one of the configs .* and \./empty has no README\.md with"),
    ],
)
def test_a_folder_without_data_is_one_line_that_says_so(args: tuple[str, ...], message: str) -> None:
    put("pictures/a.png", "private.txt", "empty/a.txt", "out/a.txt", "hid/.a.txt", "hid/__x/b.txt", "links/data")
    Path("links/data").unlink()
    os.symlink("../out", "links/data")
    more = {"subset": "en"} if args[-1] == "subset" else {}
    Path("empty/a.txt").write_text("")
    Path("void").mkdir()
    os.symlink("../private.txt", "out/link.txt")
    os.mkfifo("fifo")
    with pytest.raises(UserError, match=message) as caught:
        read(*(arg for arg in args if arg != "subset"), **more)
    assert "\n" not in str(caught.value)


def test_a_path_that_the_shell_cannot_spell_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fsencode(path: str) -> bytes:
        return path.encode("ascii")

    monkeypatch.setattr(os, "fsencode", fsencode)
    with pytest.raises(UserError, match=r"this shell's encoding \(.*\) has no '\\xfc': take a UTF-8 locale"):
        find_data(section("text", "\u00fc/a.txt"))


def test_a_folder_that_cannot_be_listed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    put("d/a.txt", "d/sub/b.txt")
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"cannot list the folder d/sub: Permission denied; let this user read it"):
        read("./d")


def test_a_file_of_a_folder_without_documents_is_named_where_others_have_some(caplog: pytest.LogCaptureFixture) -> None:
    put("d/news.jsonl")
    Path("d/metadata.json").write_text('{"license": "CC0", "authors": ["a", "b"]}')
    assert read("./d") == ["d/news.jsonl"]
    assert "file_without_documents reason=cannot read" in caplog.text
    assert "d/metadata.json" in caplog.text
    with pytest.raises(UserError, match=r"d/metadata\.json: .*mend the file, or leave it out"):
        read("json", "d/news.jsonl", "d/metadata.json")
    Path("d/news.jsonl").write_text('{"words": "x"}')
    with pytest.raises(UserError, match="mend the file, or leave it out"):
        read("./d")


def test_an_archive_is_read_like_the_folder_in_it() -> None:
    names = ["test.txt", "train.txt", "val/a.txt"]
    put(*(f"d/{name}" for name in names))
    with zipfile.ZipFile("d.zip", "w") as archive:
        for name in names:
            archive.writestr(name, f"d/{name}")
    zipfile.ZipFile("void.zip", "w").close()
    for split in ("train", "test", "validation"):
        assert read("./d.zip", split=split) == read("./d", split=split)
        assert len(read("./d.zip", split=split)) == 1
    assert left_out("text", "d.zip", "void.zip") == {
        "belongs to split test by its name": ["d.zip:test.txt"],
        "belongs to split validation by its name": ["d.zip:val/a.txt"],
        "empty": ["void.zip"],
    }


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_an_archive_has_twice_is_the_later_one() -> None:
    with zipfile.ZipFile("d.zip", "w") as archive:
        archive.writestr("a.txt", "first")
        archive.writestr("a.txt", "second")
    assert read("./d.zip") == ["second"]


def test_two_stars_find_nothing_by_the_name_of_their_own_folder() -> None:
    put("d/top.txt", "d/sub/d/in.txt")
    assert read("text", "d/**/d/*.txt") == ["d/sub/d/in.txt"]


def test_a_folder_that_a_pattern_may_not_list_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    put("d/a/x.txt", "d/b/y.txt")

    def access(path: str, mode: int) -> bool:
        return not str(path).endswith("a")

    monkeypatch.setattr(os, "access", access)
    assert left_out("text", "d/*/*.txt") == {"a folder that this user may not list": ["d/a"]}
    assert left_out("text", "d/*/y.txt") == {"a folder that this user may not list": ["d/a"]}


def test_two_stars_lead_through_no_links(tmp_path: Path) -> None:
    put("d/a.txt", "d/sub/b.txt", "d/sub/deep/c.txt", "d/sub/deep/c.md", "other/e.txt")
    for name in ("up", "again"):
        Path("d/sub", name).symlink_to(Path("d").resolve())
    assert read("text", "d/**") == ["d/a.txt", "d/sub/b.txt", "d/sub/deep/c.md", "d/sub/deep/c.txt"]
    assert read("text", "d/**/*.txt") == ["d/a.txt", "d/sub/b.txt", "d/sub/deep/c.txt"]
    assert read("text", "*/**/*.txt") == ["d/a.txt", "d/sub/b.txt", "d/sub/deep/c.txt", "other/e.txt"]
    assert read("text", "**/deep/*.md") == ["d/sub/deep/c.md"]
    assert left_out("text", "d/**")["a link to a folder"] == ["d/sub/again", "d/sub/up"]
