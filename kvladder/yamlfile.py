"""YAML as files and environment variables write it, read with errors that say where."""

from __future__ import annotations

import re
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml

from kvladder.errors import ConfigError

DEPTH_MAX = 16
"""How deep settings may be nested."""
NODES_MAX = 10_000
"""How many values settings may have, each counted as often as an alias repeats it."""


class _Loader(yaml.SafeLoader):
    """YAML whose errors all say where, and in which a key that is given twice is one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._weights: dict[yaml.Node, int] = {}
        """How many values a node has, with what aliases repeat."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As ever, but not so deep that Python gives up, nor so large that a walk never ends."""
        if self._depth > DEPTH_MAX:
            mark = cast("Any", self).peek_event().start_mark
            problem = f"nested deeper than {DEPTH_MAX} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node not in self._weights:
            inner: Any = () if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                inner = chain.from_iterable(inner)
            # one that holds itself has no weight yet, and cannot be constructed
            self._weights[node] = 1 + sum(self._weights.get(part, 1) for part in inner)
            if self._weights[node] > NODES_MAX:
                problem = f"more than {NODES_MAX} values, with what aliases repeat"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """As ever, and an error where the parser takes for a number or a date what is none."""
        try:
            value: object = cast("Any", super()).construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            value = None
        else:
            if not isinstance(value, date) and not _is_huge(value):
                return value
        kind = node.tag.rpartition(":")[2]
        problem = f"read as {_KINDS.get(kind, kind)}: if text is meant, put it in quotes"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_KINDS = {"timestamp": "a date", "int": "a number", "float": "a number"}


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > 64


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem="a key is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str) -> object:
    """The plain data that ``text`` writes; raises yaml.YAMLError if it writes none."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def load_yaml(path: Path) -> object:
    """The plain data in a file; raises ConfigError, with its line, if it cannot be had."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(why, path=str(path), hint="expected a readable YAML file") from error
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", path=str(path), hint="expected a YAML file") from None
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        # Not str(error): that quotes the line, which may hold a secret. So may a quoted word.
        problem = getattr(error, "problem", None) or "not YAML"
        problem = re.sub(r"'(?!<)[^']{2,}'", "'...'", problem)
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise ConfigError(problem, path=where, hint="expected valid YAML") from None
