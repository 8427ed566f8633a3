"""Configuration: sources and their order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whale.config import Config, Link, parse_link
from whale.config_keys import KEYS
from whale.errors import ConfigError

pytestmark = pytest.mark.core
GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "configuration.md"


def test_every_key_has_its_default() -> None:
    config = Config(environment={})
    assert dict(config) == {key.name: key.default for key in KEYS}
    assert {config.origin(name) for name in config} == {"default"}


def test_code_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "whale.json"
    file.write_text(json.dumps({"cluster.ranks": 2, "replica.shares": [1, 2], "dump": "from-file"}))
    environment = {"WHALE_CONFIG": str(file), "WHALE_CLUSTER_RANKS": "3", "WHALE_REPLICA_SHARES": "3, 1"}
    config = Config({"cluster.ranks": 4}, environment=environment)
    assert config["cluster.ranks"] == 4 and config.origin("cluster.ranks") == "code"
    assert config["replica.shares"] == (3, 1)
    assert config.origin("replica.shares") == "environment WHALE_REPLICA_SHARES"
    assert config["dump"] == "from-file" and config.origin("dump") == f"file {file}"
    assert config["check.timeout_s"] == 60.0 and config.origin("check.timeout_s") == "default"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("communication.transport", "in-process", "in-process"),
        ("communication.group_bytes", "65536", 65536),
        ("check.timeout_s", "2.5", 2.5),
        ("batch.inputs", "images, labels", ("images", "labels")),
        ("replica.shares", "", ()),
        ("dump", "/tmp/x,y", "/tmp/x,y"),
    ],
)
def test_the_environment_gives_values_of_the_keys_type(name: str, text: str, value: Any) -> None:
    variable = "WHALE_" + name.upper().replace(".", "_")
    found = Config(environment={variable: text})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("communication.transport", "nccl"),
        ("communication.transport", 1),
        ("communication.group_bytes", "many"),
        ("communication.group_bytes", True),
        ("communication.group_bytes", 1.5),
        ("communication.group_bytes", -1),
        ("cluster.ranks", 0),
        ("replica.shares", 3),
        ("replica.shares", [1, "2"]),
        ("replica.shares", [2, -1]),
        ("batch.inputs", "images"),
        ("check.timeout_s", None),
        ("check.timeout_s", float("nan")),
        ("communication.emulate_link", "latency=3"),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config({name: value}, environment={})
    text = str(caught.value)
    assert "\n  given: " in text and "\n  expected: " in text and "\n  next: " in text


def test_a_wrong_value_names_the_variable_it_came_from() -> None:
    with pytest.raises(ConfigError, match="source: environment WHALE_CLUSTER_RANKS"):
        Config(environment={"WHALE_CLUSTER_RANKS": "two"})


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError) as caught:
        Config({"comunication.group_byte": 1}, environment={})
    assert str(caught.value) == (
        "unknown configuration key 'comunication.group_byte'\n"
        "  source: code\n"
        "  expected: communication.group_bytes\n"
        "  next: write 'communication.group_bytes'"
    )
    with pytest.raises(ConfigError, match=r"expected: communication\.transport, .*check\.timeout_s"):
        Config(environment={})["zzz"]


def test_a_misspelt_variable_is_refused_and_others_are_left_alone() -> None:
    Config(environment={"WHALE_RANK": "1", "WHALE_RESTART": "5", "HOME": "/"})
    with pytest.raises(ConfigError, match="expected: WHALE_REPLICA_SHARES"):
        Config(environment={"WHALE_REPLICA_SHARE": "1,1"})
    with pytest.raises(ConfigError, match="expected: WHALE_COMMUNICATION_GROUP_BYTES"):
        Config(environment={"WHALE_COMMUNICATION_GROUPBYTES": "1"})


def test_variables_of_the_first_whale_warn() -> None:
    with pytest.warns(UserWarning, match="WHALE_COMMUNICATION_SPARSE_AS_DENSE=1 sets nothing"):
        Config(environment={"WHALE_COMMUNICATION_SPARSE_AS_DENSE": "1"})


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"dump": 3}', '{"dmp": "x"}'])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "whale.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"whale\.json"):
        Config(environment={"WHALE_CONFIG": str(file)})


def test_equal_configurations_are_equal_values() -> None:
    one = Config({"replica.shares": [1, 2]}, environment={})
    other = Config(environment={"WHALE_REPLICA_SHARES": "1,2"})
    assert one == other and hash(one) == hash(other)
    assert repr(one) == "Config({'replica.shares': (1, 2)})"


def test_an_emulated_link() -> None:
    assert parse_link("latency_us=50,bandwidth_MBps=200") == Link(50 * 1e-6, 200e6)
    assert parse_link("bandwidth_MBps=1") == Link(0.0, 1e6)
    assert parse_link("latency_us=0") == Link(0.0, float("inf"))
    assert Config(environment={}).link is None
    for text in (
        "latency_us",
        "latency_us=-1",
        "bandwidth_MBps=0",
        "latency_us=1,latency_us=2",
        "mtu=9000",
        "latency_us=nan",
    ):
        with pytest.raises(ConfigError):
            parse_link(text)


def test_the_guide_lists_every_key() -> None:
    rows = [f"| `{key.name}` | {key.type} | {_shown(key.default)} | {key.help} |" for key in KEYS]
    table = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    assert table == rows


def _shown(default: Any) -> str:
    return json.dumps(default) if default not in ((), "") else "empty"
