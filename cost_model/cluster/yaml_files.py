"""Reads YAML files written by users; every mistake raises a ClusterError with line and key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from cost_model.hardware.catalogue import LOADER, suggest_nearest
from whale.errors import ClusterError

T = TypeVar("T")
MOST_BYTES = 64 << 20  # larger files are refused
MOST_DEPTH = 64
MOST_ALIASES = 1000
MOST_SHOWN = 60  # characters of a value in a message
# Names of JSON types in messages.
KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "null": "nothing",
         "array": "a list, [...]", "object": "a mapping, {key: value}"}  # fmt: skip
# Names that other tools and people use for fields, to suggest the field.
CALLED = {
    "hosts": ("nodes", "node", "machines", "servers"), "devices": ("gpus", "gpu", "accelerators", "device"),
    "count": ("number", "num", "n", "nodes", "hosts", "gpus", "devices", "quantity"), "networks": ("network", "fabric"),
    "type": ("kind", "model", "gpu", "device"), "memory_gb": ("memory", "mem", "ram", "vram", "memory_gib"),
    "gb_per_s": ("bandwidth", "gbps", "speed"), "latency_us": ("latency",), "nics": ("adapters", "ports", "nic"),
    "layers": ("num_layers", "num_hidden_layers", "hidden_layers", "depth"), "software": ("stack",),
    "hidden": ("hidden_size", "d_model", "width", "embedding"),
    "sequence": ("sequence_length", "seq_length", "seq_len", "seq", "context_length", "max_position_embeddings"),
    "heads": ("num_heads", "num_attention_heads", "attention_heads"), "vocabulary": ("vocab", "vocab_size"),
    "feed_forward": ("ffn", "intermediate_size", "ffn_hidden_size", "d_ff"),
    "kv_heads": ("num_key_value_heads", "key_value_heads", "query_groups"), "top": ("top_k", "topk", "experts_per_tok"),
    "tensor": ("tp", "tensor_parallel"), "stages": ("pp", "pipeline", "pipeline_parallel"),
    "data": ("dp", "data_parallel"), "context": ("cp", "context_parallel"),
    "experts": ("ep", "expert_parallel", "local_experts"),
    "batch": ("global_batch", "global_batch_size", "gbs", "batch_size"), "micro_batch": ("mbs", "micro_batch_size"),
    "zero": ("zero_stage", "zero_level"), "recompute": ("checkpointing", "activation_checkpointing"),
}  # fmt: skip


def read_text(path: str | Path, what: str) -> str:
    """Reads a UTF-8 text file; ClusterError if it cannot be read or is too large.

    Args:
        what: kind of the file in errors, e.g. "cluster file".
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ClusterError(
                f"the {what} is too large",
                given=str(path),
                expected=f"at most {MOST_BYTES} bytes",
                action="check that this is the file you mean, or shorten it",
            )
        return data.decode()
    except OSError as error:
        raise ClusterError(
            f"the {what} cannot be read",
            given=f"{path}: {error.strerror}",
            expected="a readable file",
            action="correct the path, or the file's permissions",
        ) from error
    except ValueError as error:
        raise ClusterError(
            f"the {what} is not text",
            given=f"{path}: {error}",
            expected="text in UTF-8",
            action="check that this is the file you mean, or save it in UTF-8",
        ) from error


def refuse_depth(text: str, origin: str, what: str) -> None:
    """Raises if the nesting or aliases of a YAML text would crash its parser or keep it busy for ever.

    Args:
        origin, what: name and kind of the file in errors.

    Raises:
        ClusterError: it is nested too deeply or has too many aliases.
        yaml.YAMLError, ValueError: it is not YAML.
    """
    depth = aliases = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MOST_DEPTH or aliases > MOST_ALIASES:
            raise ClusterError(
                f"the {what} is nested too deeply, or has too many aliases",
                given=f"{origin}:{event.start_mark.line + 1}",
                expected=f"at most {MOST_DEPTH} levels and {MOST_ALIASES} aliases",
                action="write the file without aliases (`*name`), and with fewer levels",
            )


def refuse_duplicate_keys(tree: Any, origin: str, what: str) -> None:
    """Raises ClusterError if a mapping has a key twice; YAML's parser would silently keep only the last one.

    Args:
        tree: root node, as `yaml.compose` returns it.
        origin, what: name and kind of the file in errors.
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
    """Holds the content of a YAML file with the line of each of its keys, for errors.

    Args:
        text: content of the file.
        origin: name of the file in errors.
        what: kind of the file in errors, e.g. "cluster file".
    """

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
            raise ClusterError(
                f"the {what} is not YAML",
                given=problem,
                expected="YAML, or JSON",
                action="correct that line: check its indentation, quotes and brackets",
            ) from None
        except (ValueError, TypeError) as error:  # an invalid date or number, a key of a type that no key can have
            raise ClusterError(
                f"the {what} cannot be read",
                given=f"{origin}: {error}",
                expected="YAML of text, numbers, lists and mappings",
                action="correct the value or key that the error names; text in quotes is never read as a date",
            ) from None

    def decode(self, kind: type[T]) -> T:
        """Converts the file's content to a msgspec struct of type `kind`; ClusterError with line and key if it does not
        fit.
        """
        try:
            return msgspec.convert(self.data, kind)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `")
            keys = _parse_keys(path.rstrip("`"))
            if unknown := re.search(r"unknown field `([^`]+)`", message):
                facts = _suggest_field(unknown[1], kind, keys)
            elif missing := re.search(r"missing required field `([^`]+)`", message):
                facts = {"action": f"add `{missing[1]}: ...`"}
            elif "enum" in message:
                facts = {
                    "expected": ", ".join(map(str, _find_schema(kind, keys)[0].get("enum", ()))),
                    "action": "write one of these",
                }
            else:
                message, facts = self._describe_value(message, keys)
            raise self.make_error(keys, message, **facts) from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ClusterError(
                f"the {self.what} cannot be read",
                given=f"{self.origin}: {error}",
                action="correct the value that the error names",
            ) from None

    def _describe_value(self, message: str, keys: list[str | int]) -> tuple[str, dict[str, str]]:
        """Rewords msgspec's error about a value of the wrong type; returns (message, facts such as the value given)."""
        wrong = re.fullmatch(r"Expected `([^`]+)`(.*?)(?:, got `\w+`)?", message)
        if wrong is None:
            return message, {}
        value, there = self.data, True
        for key in keys:
            there = there and (key in value if isinstance(value, dict) else isinstance(key, int))
            value = value[key] if there else None
        names = wrong[1].split(" | ")
        facts = {"given": str(value)[:MOST_SHOWN]} if there else {}
        if isinstance(value, str) and value[:1].isdigit() and {"int", "float"} & {*names}:
            unit = re.search(r"_((?:gb|tflops|us|ms|hours|bytes|gb_per_s|per_hour|s))$", str(keys[-1]) if keys else "")
            facts["action"] = f"write the number alone{f', in {unit[1]}' if unit else ', in digits'}"
        elif isinstance(value, dict) and "array" in names:
            facts["action"] = "put it in brackets, as [{...}], or a dash before it"
        return f"this has to be {' or '.join(KINDS.get(name, name) for name in names)}{wrong[2]}", facts

    def make_error(self, keys: list[str | int], message: str, action: str | None = None, **facts: str) -> ClusterError:
        """Creates an error about the value at a path of keys, or about the nearest enclosing value that the file has.

        Args:
            keys: mapping keys and list indices from the root to the value.
            message: what is wrong, to follow the file's name, line and key.
            action: next action for the user; facts: further facts of the error (`given`, `expected`).
        """
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
            f"the {self.what} is wrong at {where}: {message[:1].lower()}{message[1:]}",
            action=action or "correct that line of the file",
            **facts,
        )


def make_schema(kind: type) -> dict[str, Any]:
    """Returns the JSON schema of a record's file; descriptions are the docstrings, without their indentation.

    Some versions of msgspec leave the indentation in, so that equal records would have unequal schemas.
    """
    schema = msgspec.json.schema(kind)
    for part in schema["$defs"].values():
        if "description" in part:
            part["description"] = inspect.cleandoc(part["description"])
    return schema


def _find_schema(kind: Any, keys: Sequence[str | int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (JSON schema of the value at a path of keys of a struct, all definitions of the struct's schema).

    The first is empty if the struct has nothing at that path.
    """
    schema = msgspec.json.schema(kind)

    def resolve(node: Any) -> Any:
        for one in (node, *node.get("anyOf", ())):
            if "$ref" in one:
                return schema["$defs"][one["$ref"].rsplit("/", 1)[1]]
        return node

    node = resolve(schema)
    for key in keys:
        below = node.get("properties", {}).get(key) or node.get("items") or node.get("additionalProperties") or {}
        node = resolve(below) if isinstance(below, dict) else {}
    return node, schema["$defs"]


def _suggest_field(name: str, kind: Any, keys: Sequence[str | int]) -> dict[str, str]:
    """Returns facts for an error about an unknown field: the field that other tools call by this name, or spelt most
    like it.
    """
    node, parts = _find_schema(kind, keys)
    fields = dict.fromkeys(node.get("properties", ()))
    word = name.lower().removeprefix("num_").removeprefix("n_")
    if same := next((field for field, words in CALLED.items() if field in fields and word in words), ""):
        return {"expected": same, "action": f"write {same} if that is what you mean"}
    every = {field: None for part in parts.values() for field in part.get("properties", ())}
    return suggest_nearest(name, fields or every)


def _parse_keys(path: str) -> list[str | int]:
    """Parses a path of msgspec's errors, e.g. `$.hosts[0].count` -> ["hosts", 0, "count"]; keys of free mappings read
    `[...]`.
    """
    keys: list[str | int] = []
    for name, index in re.findall(r"\.([A-Za-z_]\w*)|\[([^\]]*)\]", path):
        keys.append(name or (int(index) if index.isdigit() else index))
    return keys
