"""Reads YAML files written by users: every mistake raises a ClusterError with line and key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from cost_model.hardware.catalogue import LOADER, suggest_nearest
from whale.errors import ClusterError

T = TypeVar("T")
MOST_BYTES = 64 << 20  # of a file that a person writes, or a tool for one
MOST_DEPTH = 64
MOST_ALIASES = 1000


def read_text(path: str | Path, what: str) -> str:
    """Returns the text of a file; `what` names its kind in errors."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ClusterError(f"the {what} is too large", given=str(path), expected=f"at most {MOST_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise ClusterError(f"the {what} cannot be read", given=f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ClusterError(f"the {what} is no text", given=f"{path}: {error}", expected="UTF-8") from error


def refuse_depth(text: str, origin: str, what: str) -> None:
    """Refuses YAML whose nesting or aliases would crash a parser or keep it busy for ever.

    Raises:
        ClusterError: it is nested too deeply or expands too far.
        yaml.YAMLError, ValueError: it is not YAML.
    """
    depth = aliases = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MOST_DEPTH or aliases > MOST_ALIASES:
            raise ClusterError(
                f"the {what} is nested too deeply",
                given=f"{origin}:{event.start_mark.line + 1}",
                expected=f"at most {MOST_DEPTH} levels and {MOST_ALIASES} aliases",
            )


def refuse_duplicate_keys(tree: Any, origin: str, what: str) -> None:
    """Refuses a mapping that has a key twice, of which YAML's parser would keep the last and drop the other unseen.

    Raises:
        ClusterError: one has.
    """
    left, seen = [tree], set()
    while left:
        node = left.pop()
        if id(node) in seen:  # an alias leads to it as well
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], Any] = {}
            for key, value in node.value:
                left.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if (known := first.setdefault((key.tag, key.value), key)) is not key:
                    line, before = key.start_mark.line + 1, known.start_mark.line + 1
                    raise ClusterError(
                        f"the {what} has a key twice",
                        given=f"{origin}:{line}, key {key.value}, which line {before} has already",
                        action="remove or rename one of them",
                    )


class YamlFile:
    """The text of a YAML file, with the position of each of its keys."""

    def __init__(self, text: str, origin: str, what: str) -> None:
        self.origin, self.what = origin, what
        try:
            refuse_depth(text, origin, what)
            self.tree: Any = yaml.compose(text, Loader=LOADER)
            refuse_duplicate_keys(self.tree, origin, what)
            self.data: Any = yaml.load(text, Loader=LOADER)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{origin}:{mark.line + 1}" if mark else origin
            problem = f"{where}: {getattr(error, 'problem', error)}"
            raise ClusterError(f"the {what} is not YAML", given=problem) from None
        except (ValueError, TypeError) as error:  # a date or number that is none, a key that cannot be one
            raise ClusterError(f"the {what} cannot be read", given=f"{origin}: {error}") from None

    def decode(self, kind: type[T]) -> T:
        """Decodes the file's content as a struct."""
        try:
            return msgspec.convert(self.data, kind)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `")
            unknown = re.search(r"unknown field `([^`]+)`", message)
            facts = suggest_nearest(unknown[1], _list_fields(kind)) if unknown else {}
            raise self.make_error(_parse_keys(path.rstrip("`")), message, **facts) from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ClusterError(f"the {self.what} cannot be read", given=f"{self.origin}: {error}") from None

    def make_error(self, keys: list[str | int], message: str, action: str | None = None, **facts: str) -> ClusterError:
        """Creates an error about the value at `keys`, or about the nearest enclosing value in the file."""
        node: Any = self.tree
        known: list[str | int] = []
        for key in keys:
            found = None
            if isinstance(node, yaml.MappingNode):
                found = next((v for k, v in node.value if k.value == key), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
                found = node.value[key]
            if found is None:
                break
            node, known = found, [*known, key]
        unknown = re.search(r"unknown field `([^`]+)`", message)
        if unknown and isinstance(node, yaml.MappingNode):
            key_node = next((k for k, _ in node.value if k.value == unknown[1]), None)
            node, known = (key_node or node), [*known, unknown[1]]
        line = node.start_mark.line + 1 if node is not None else 1
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in known).lstrip(".")
        where = f"{self.origin}:{line}" + (f", key {name}" if name else "")
        return ClusterError(
            f"the {self.what} is wrong at {where}: {message[:1].lower()}{message[1:]}", action=action, **facts
        )


def _list_fields(kind: Any) -> dict[str, Any]:
    """Returns the names of all fields of a struct and of nested structs."""
    parts = msgspec.json.schema(kind)["$defs"].values()
    return {name: None for part in parts for name in part.get("properties", ())}


def _parse_keys(path: str) -> list[str | int]:
    """Returns `$.hosts[0].devices[1]` as a list of keys; a key of a free mapping reads `[...]` there."""
    keys: list[str | int] = []
    for name, index in re.findall(r"\.([A-Za-z_]\w*)|\[([^\]]*)\]", path):
        keys.append(name or (int(index) if index.isdigit() else index))
    return keys
