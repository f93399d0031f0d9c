"""YAML as people write it: numbers are those of YAML 1.2, and a key that stands twice is a mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from swarm_peer.errors import UserError

# PyYAML knows YAML 1.1, for which 1e-06, 1e6 and 1.0e6 are texts: there, a float has a point and a signed exponent.
# With a longer exponent it is no number that a computer has, but rather a hash, such as 12e4567.
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]{1,3}$")
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Reads plain values only, and takes what looks like a number of YAML 1.2 for one."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """The one value that a YAML text holds; None for an empty text.

    Raises:
        UserError: it is no YAML, or a key stands twice in one of its mappings
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        for path, first, second in _repeated(root, (), set()):
            where = f"in lines {first} and {second}" if first != second else f"in line {first}"
            raise UserError(f"{'.'.join(path)} stands twice, {where}: remove one of them")
        return loader.construct_document(root)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2026-13-45
        raise UserError(f"this is no valid YAML: {' '.join(str(error).split())}") from error


def _repeated(node: Node, path: tuple[str, ...], seen: set[Node]) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """The keys that stand twice in a mapping, below a node: where, and in which lines."""
    if node in seen:  # of which an alias is another name
        return
    seen.add(node)
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated(item, (*path, str(index)), seen)
    if isinstance(node, MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if key.tag != _MERGE_TAG and isinstance(key, yaml.ScalarNode):
                if (key.tag, name) in lines:
                    yield (*path, name), lines[key.tag, name], line
                lines[key.tag, name] = line
            yield from _repeated(value, (*path, name), seen)
