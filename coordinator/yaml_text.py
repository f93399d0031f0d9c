"""YAML as people write it: numbers are those of YAML 1.2, and a key that stands twice is a mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from swarm_peer.errors import UserError

# PyYAML knows YAML 1.1, for which 1e-06 and 1e6 are texts, `yes` is true, 017 is 15 and 1:30 is 90. These are the
# scalars of YAML 1.2. With a longer exponent it is no number that a computer has, but rather a hash, such as 12e4567.
_SCALARS = {
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "float": re.compile(
        r"(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_TAG = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_TAG}merge"


class _Loader(yaml.SafeLoader):
    """Reads plain values only, by YAML 1.2."""

    def construct_yaml_int(self, node: Any) -> int:
        """A whole number; 017 is 17."""
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.removeprefix(_TAG) not in _SCALARS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for kind, pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{kind}", pattern, list("-+.0123456789tTfF"))
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


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
    # Besides its own, PyYAML raises what Python does of values that are none: of the date 2026-13-45, of !!bool maybe.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        remedy = "; indent with spaces, not with tabs" if r"character '\t'" in str(error) else ""
        raise UserError(f"this is no valid YAML: {' '.join(str(error).split())}{remedy}") from error


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
