"""The files of a data set on this machine: which ones there are, what each holds, and which are left out and why.

A name decides what a file holds, the same on all machines: `books.txt.gz` is text. A file whose name does not tell
holds what `data.dataset` says. Everything that is named is read, in the order of the names. Of a folder, or of what a
pattern that ends in `*` finds, files are left out that describe the data or that belong to another split.

Knows nothing of what is inside, but for the list of files in a zip archive.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import NamedTuple, cast

from swarm_peer.config import DataSection, FileKind, looks_like_a_path
from swarm_peer.errors import UserError, check_letters

_KINDS: dict[str, FileKind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_ARCHIVE = ".zip"

# Files beside the data that describe it, as the hub and `datasets` write them.
_DESCRIPTIONS = {
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "dataset_card.md",
}
_DESCRIPTION = re.compile(r"(readme|licen[cs]e|copying|notice)(\..*)?", re.IGNORECASE)

# The words by which people name the files or folders of a split, and the shard's number behind such a word.
_SPLITS = {
    word: split
    for split, words in {
        "train": ("train", "training"),
        "validation": ("validation", "valid", "val", "dev"),
        "test": ("test", "testing", "eval", "evaluation"),
    }.items()
    for word in words
}
_SHARD = re.compile(r"[-_. ]?\d+([-_]of[-_]\d+(-[0-9a-f]+)?)?$")

EMPTY = "empty"
UNKNOWN = f"the name ends in none of {', '.join(_KINDS)}"

# Names of files in one message.
_MOST_NAMED = 5


class DataFile(NamedTuple):
    """A file to read.

    Attributes:
        path: where it is: on this machine, or a URL
        kind: what it holds once it is decompressed
        size: its bytes on the disk; those of the member in an archive
        member: its name in the zip archive `path`, if it is in one
    """

    path: str
    kind: FileKind
    size: int = 0
    member: str = ""

    @property
    def name(self) -> str:
        """The name that messages call it by."""
        return f"{self.path}:{self.member}" if self.member else self.path


@dataclass(frozen=True)
class Found:
    """The files of a data set, in the order in which they are read.

    Attributes:
        left_out: the files that are not read, by the reason
        hidden: hidden files and folders, which nobody expects to be read
    """

    files: list[DataFile] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a file is not read."""
        self.left_out.setdefault(reason, []).append(name)

    def why_nothing(self) -> str:
        """The reasons for which no file is read."""
        hidden = {"hidden": self.hidden} if self.hidden else {}
        return "; ".join(describe_left_out(replace(self, left_out=self.left_out | hidden)))


def local_folder(section: DataSection) -> Path | None:
    """The folder or file on this machine that `data.dataset` names, if any. Only the form of the name decides this."""
    name = section.dataset
    is_path = looks_like_a_path(name) and not name.startswith("hf://")
    return Path(os.path.expanduser(name)) if is_path else None


def kind_of(name: str) -> FileKind | None:
    """The kind of data that a file's name tells of, compressed or not; None if the name does not tell."""
    name = _uncompressed(name)
    return _KINDS.get(re.split(r"[-_]\d", os.path.splitext(name)[1])[0])  # also news.jsonl-00000-of-00002


def find_paths(patterns: Iterable[str], found: Found, what: str = "data.files") -> dict[str, tuple[str, ...]]:
    """The files that names or patterns name, with all files below a folder that is named, in their order.

    Args:
        found: takes the files that are left out
        what: how messages call the patterns

    Returns:
        for each path, the folders and the name that were found rather than named; none if the file itself is meant

    Raises:
        UserError: a pattern names no file, or a folder cannot be listed
    """
    keys: dict[str, str] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for pattern in patterns:
        path, own = os.path.expanduser(pattern), Found()
        check_letters(path)
        matches = _matches(path, own)
        if not matches:
            reasons = f" ({why})" if (why := own.why_nothing()) else ""
            raise UserError(
                f"{what}: {pattern!r} names no file that this user can see{reasons}: correct it, or put the file there"
            )
        for reason, names in own.left_out.items():
            found.left_out.setdefault(reason, []).extend(names)
        home = pattern.split("/")[0] if pattern.startswith("~") else ""
        for match, found_parts in matches.items():
            file = os.path.abspath(match)
            # Homes differ between machines, and the order of the files must not.
            keys.setdefault(file, os.path.normpath(home + match[len(os.path.expanduser(home)) :]))
            parts[file] = found_parts if parts.get(file, found_parts) else ()
    return {file: parts[file] for file in sorted(keys, key=keys.__getitem__)}


def find_data(section: DataSection) -> Found:
    """Find the files on this machine that a data section names, in `data.files` or as `data.dataset`.

    Raises:
        UserError: there are none, they cannot be listed, or a folder has a link that leads out of it
    """
    found, folder = Found(), local_folder(section)
    default = cast("FileKind", section.dataset) if section.files else None
    what = f"data.files={list(section.files)}" if section.files else f"data.dataset={section.dataset!r}"
    if not section.files and folder is None:
        return found
    if folder is not None and not os.path.exists(folder):
        raise UserError(f"cannot read {what}: there is no such folder or file that this user can see; check the path")
    if folder is None:
        paths = find_paths(section.files, found)
    else:
        paths = find_paths([str(folder)], found, "data.dataset")
        _check_links(folder, paths)
    paths = _of_split(paths, section.split, found)
    for path, parts in paths.items():
        _add(found, path, section.split, default, is_meant=not parts)
    if default and not found.files and (unnamed := [path for path in paths if path in found.left_out.get(UNKNOWN, ())]):
        del found.left_out[UNKNOWN]  # no name tells, so all of them hold what data.dataset says
        for path in unnamed:
            _add(found, path, section.split, default, is_meant=True)
    if not found.files and found.left_out.keys() == {EMPTY}:
        raise UserError(f"{what}: all of its files are empty: add text")
    if not found.files:
        reasons = found.why_nothing() or "there are no files"
        raise UserError(f"cannot read {what}: it has nothing to read ({reasons}); check the files")
    return found


def describe_left_out(found: Found) -> list[str]:
    """For each reason for which files are not read, how many there are, and some of their names."""
    lines = []
    for reason, names in found.left_out.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        lines.append(f"count={len(names)} reason={reason} files={', '.join(names[:_MOST_NAMED])}{more}")
    return lines


def _matches(path: str, found: Found) -> dict[str, tuple[str, ...]]:
    """The files that a path or pattern names, each with what was found of it, as `find_paths` says."""
    if os.path.isdir(path):
        return {str(each): each.relative_to(path).parts for each in _walk(Path(path), found)}
    if os.path.isfile(path):
        return {path: ()}
    matches = _found_by(path, found)
    if not matches and "[" in path:  # brackets may belong to the name of a file or folder
        path = path.replace("[", "[[]")
        matches = _found_by(path, found)
    if "**" not in path:
        for folder in filter(os.path.isdir, sorted(matches)):
            found.leave_out(folder, "a folder (/** behind its name reads it)")
    files = filter(os.path.isfile, matches)
    if os.path.basename(path).strip("*."):
        return dict.fromkeys(files, ())
    num_named = len(list(itertools.takewhile(lambda part: not glob.has_magic(part), PurePath(path).parts)))
    parts = {file: PurePath(file).parts[num_named:] for file in files}
    return {file: found_parts for file, found_parts in parts.items() if not _is_hidden(found_parts)}


def _found_by(pattern: str, found: Found) -> list[str]:
    """The files and folders that a pattern finds; ** leads to files, through no links, which may lead in circles."""
    head, stars, tail = pattern.partition("**")
    names = tail.strip("/").split("/") if tail.strip("/") else ["*"]
    if not stars or "**" in tail or (head and not head.endswith("/")) or (tail and not tail.startswith("/")):
        _note_unlisted(pattern, found)
        return glob.glob(pattern, recursive=True)
    _note_unlisted(head, found)
    paths = []
    for folder in filter(os.path.isdir, glob.glob(head or ".")):
        for path in _walk(Path(folder), found):
            parts = path.relative_to(folder).parts  # the folder's own name is no part of what the stars find
            if len(parts) >= len(names) and all(map(fnmatch.fnmatchcase, parts[-len(names) :], names)):
                paths.append(str(path))
    return paths


def _note_unlisted(pattern: str, found: Found) -> None:
    """Note the folders that a pattern leads through and this user may not list: `glob` passes over them in silence."""
    parts = PurePath(pattern).parts
    for depth in range(1, len(parts)):
        if glob.has_magic(os.path.join(*parts[: depth + 1])):
            for folder in filter(os.path.isdir, glob.glob(os.path.join(*parts[:depth]))):
                if not os.access(folder, os.R_OK | os.X_OK):
                    found.leave_out(folder, "a folder that this user may not list")


def _walk(folder: Path, found: Found) -> list[Path]:
    """All files below a folder in their order, but for hidden ones."""

    def complain(error: OSError) -> None:
        raise UserError(f"cannot list the folder {error.filename}: {error.strerror}; let this user read it")

    paths: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=complain):
        found.hidden.extend(os.path.join(place, name) for name in folders if _is_hidden((name, "")))
        found.hidden.extend(os.path.join(place, name) for name in names if _is_hidden((name,)))
        folders[:] = sorted(name for name in folders if not _is_hidden((name, "")))
        for link in (path for path in (Path(place, name) for name in folders) if path.is_symlink()):
            found.leave_out(str(link), "a link to a folder")
        for path in (Path(place, name) for name in sorted(names) if not _is_hidden((name,))):
            if path.is_file():
                paths.append(path)
            else:
                found.leave_out(str(path), "no file, or a broken link")
    return paths


def _check_links(folder: Path, paths: Iterable[str]) -> None:
    for path in filter(os.path.islink, paths):
        if not Path(path).resolve().is_relative_to(folder.resolve()) and path != os.path.abspath(folder):
            raise UserError(
                f"data.dataset={str(folder)!r} leads to {path}, outside of that data set: choose another one, or name "
                f"its files in data.files"
            )


def _of_split(paths: Mapping[str, tuple[str, ...]], split: str, found: Found) -> dict[str, tuple[str, ...]]:
    """The files of a split among those of `find_paths`; a file that itself is meant belongs to every split."""
    wanted = _SPLITS.get(split, split)
    splits = {path: _split_of(parts, wanted) if parts else wanted for path, parts in paths.items()}
    if wanted not in splits.values():
        others = ", ".join(sorted(set(splits.values())))
        raise UserError(
            f"data.split={split!r}: by their names, all files belong to {others}; set data.split to that, or name the "
            f"files in data.files"
        )
    for path in paths:
        if splits[path] != wanted:
            found.leave_out(path, f"belongs to split {splits[path]} by its name")
    return {path: parts for path, parts in paths.items() if splits[path] == wanted}


def _split_of(parts: Sequence[str], wanted: str) -> str:
    """The split that a file belongs to: `train` unless the whole name of a folder or of the file says otherwise."""
    stem = os.path.splitext(_uncompressed(parts[-1]))[0]
    for part in (*parts[:-1], _SHARD.sub("", stem)):
        if part == wanted or part.lower() in _SPLITS:
            return _SPLITS.get(part.lower(), wanted)
    return "train"


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith((".", "__")) for part in parts[:-1]) or parts[-1].startswith(".")


def _uncompressed(name: str) -> str:
    base, suffix = os.path.splitext(name.lower())
    return base if suffix in _COMPRESSED else name.lower()


def _add(found: Found, path: str, split: str, default: FileKind | None, is_meant: bool) -> None:
    """Add a file, or the files in a zip archive, or note why they are left out."""
    if not path.lower().endswith(_ARCHIVE):
        _add_one(found, DataFile(path, default or "text", os.path.getsize(path)), default, is_meant)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            # Where a name stands twice, the later file has replaced the earlier one.
            members = {each.filename: each for each in archive.infolist() if not each.is_dir()}
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"cannot read {path}: {error}; mend the archive, or leave it out") from error
    if not members:
        found.leave_out(path, EMPTY)
    wanted = _SPLITS.get(split, split)
    for name, member in sorted(members.items()):
        file = DataFile(path, default or "text", member.file_size, name)
        if _is_hidden(parts := PurePath(name).parts):
            found.hidden.append(file.name)
        elif (own := _split_of(parts, wanted)) != wanted:
            found.leave_out(file.name, f"belongs to split {own} by its name")
        else:
            _add_one(found, file, default, is_meant=False)


def _add_one(found: Found, file: DataFile, default: FileKind | None, is_meant: bool) -> None:
    """Add a file, or note why it is left out.

    Args:
        default: what a file holds whose name does not tell, if that is known
        is_meant: whether it is read whatever its name is
    """
    name = PurePath(file.member or file.path).name
    kind = kind_of(name)
    is_description = name.lower() in _DESCRIPTIONS or (kind in (None, "text") and _DESCRIPTION.fullmatch(name))
    if is_description and not is_meant:
        found.leave_out(file.name, "describes the data")
    elif not file.size:
        found.leave_out(file.name, EMPTY)
    elif kind is None and not (default and is_meant):
        found.leave_out(file.name, UNKNOWN)
    elif kind is None or kind == "text":
        # Everything is text in a way, so the name of a text file says less than data.dataset does.
        found.files.append(file._replace(kind=default or "text"))
    else:
        found.files.append(file._replace(kind=kind))
