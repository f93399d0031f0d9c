"""The YAML files that commands take: runs and descriptions of peers, the user's own or those that come with Swarm.

The latter lie in the repository's folder `configs`; the link to it beside this file has them installed with the
package.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.yaml_text import parse_yaml
from swarm_peer.config import RunManifest
from swarm_peer.config_errors import describe
from swarm_peer.errors import UserError

RUNS = Path(__file__).parent / "configs"
PEERS = RUNS / "peers"


def find_file(name: Path, shipped: Path) -> Path:
    """The file of this path, or else the one of this name in a folder that comes with Swarm.

    Args:
        name: such as `my/run.yaml` or `demo`

    Raises:
        UserError: there is neither
    """
    if name.is_file():
        return name
    known = sorted(path.stem for path in shipped.glob("*.yaml"))
    if str(name) in known:
        return shipped / f"{name}.yaml"
    if name.exists():
        kind = "a folder" if name.is_dir() else "no regular file"
        raise UserError(f"{name} is {kind}: name a YAML file, or one that comes with Swarm ({', '.join(known)})")
    near = get_close_matches(name.stem, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{name}: no such file, and none of that name comes with Swarm ({', '.join(known)}){hint}")


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        UserError: it cannot be read, is no YAML, or has a key twice
    """
    try:
        content = path.read_bytes()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"cannot read {path}: line {line} is no text in UTF-8; save it in that encoding") from error
    try:
        return parse_yaml(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def load_manifest(name: Path, overrides: tuple[str, ...] = ()) -> RunManifest:
    """Read a run's YAML file.

    Args:
        name: a file such as configs/demo.yaml, or a run that comes with Swarm, such as demo
        overrides: settings `a.b=value` that replace those of the file; each value is YAML

    Raises:
        UserError: the file is missing or no YAML, or its keys are unknown, missing or contradictory
    """
    path = find_file(name, RUNS)
    data = read_yaml(path)
    if not isinstance(data, dict):
        found = "got nothing: the file is empty" if data is None else f"got {data!r:.60}"
        raise UserError(f"{path}: expected a mapping of sections (model, stages, data, ...), {found}")
    for setting in overrides:
        _override(data, setting)
    try:
        return RunManifest.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{name}: {describe(error, RunManifest)}") from error


def check_overrides(overrides: Sequence[str]) -> None:
    """Check that no setting takes back what one before it has set.

    Raises:
        UserError: two of them name the same key, or a section and a key within it, and the first one would be lost
    """
    values: dict[str, str] = {}
    for key, value in map(_parted, overrides):
        for earlier, its_value in values.items():
            if (earlier == key and its_value != value) or earlier.startswith(f"{key}."):
                raise UserError(
                    f"--set {key}={value:.80} would replace --set {earlier}={its_value:.80} before it: leave one out"
                )
        values[key] = value


def _parted(setting: str) -> tuple[str, str]:
    """The key and the value of a setting."""
    key, separator, value = setting.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise UserError(f"--set {setting!r}: expected KEY=VALUE, such as training.steps=100")
    return key, value


def _override(data: dict[str, Any], setting: str) -> None:
    key, value = _parted(setting)
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UserError(f"--set {setting!r}: {parent!r} is no section")
    try:
        data[leaf] = parse_yaml(value)
    except UserError as error:
        raise UserError(f"--set {setting!r}: {error}") from error


def changed_settings(before: RunManifest, after: RunManifest) -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two manifests differ, with both values of each; None for one that is not there."""
    was, now = (dict(_settings(each.model_dump(mode="json"))) for each in (before, after))
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            yield key, was.get(key), now.get(key)


def _settings(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
