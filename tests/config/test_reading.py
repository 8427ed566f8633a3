"""Configuration: sources and their order, and what is refused."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from whale.config import Config, Mesh
from whale.config.keys import KEYS, SECTIONS
from whale.config.reading import SETTINGS_VARIABLE, nearest, read_settings
from whale.errors import ConfigError

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[2]


def test_every_key_has_its_default() -> None:
    config = Config(environment={})
    assert dict(config) == {key.name: key.default for key in KEYS}
    assert {config.origin(name) for name in config} == {"default"}


def test_keys_are_in_nine_sections() -> None:
    assert list(dict.fromkeys(key.section for key in KEYS)) == list(SECTIONS) and len(SECTIONS) == 9
    assert len({key.name for key in KEYS}) == len({key.variable for key in KEYS}) == len(KEYS)


def test_code_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "whale.json"
    file.write_text(
        json.dumps({"communication.in_process_ranks": 2, "batch.shares": [1, 2], "debug.dump": "from-file"})
    )
    environment = {"WHALE_CONFIG": str(file), "WHALE_COMMUNICATION_IN_PROCESS_RANKS": "3", "WHALE_BATCH_SHARES": "3, 1"}
    config = Config({"communication.in_process_ranks": 4}, environment=environment)
    assert config["communication.in_process_ranks"] == 4 and config.origin("communication.in_process_ranks") == "code"
    assert config["batch.shares"] == (3, 1)
    assert config.origin("batch.shares") == "environment WHALE_BATCH_SHARES"
    assert config["debug.dump"] == "from-file" and config.origin("debug.dump") == f"file {file}"
    assert config["debug.check_timeout_s"] == 60.0 and config.origin("debug.check_timeout_s") == "default"


def test_the_command_line_wins_over_code() -> None:
    given = read_settings(["zero=2", "memory.zero=3", "mesh=data=2,tensor=2", "fault.elastic="])
    assert given == {"memory.zero": "3", "mesh": "data=2,tensor=2", "fault.elastic": ""}
    code = {"memory.zero": 1, "fault.elastic": "memory"}
    config = Config(code, environment={SETTINGS_VARIABLE: json.dumps(given), "WHALE_MEMORY_ZERO": "2"})
    assert (config["memory.zero"], config["fault.elastic"]) == (3, "") and config["mesh"] == Mesh(data=2, tensor=2)
    assert config.origin("memory.zero") == "command line"
    for key in KEYS:  # each by its last word: no two keys end alike
        if not key.type.startswith(("list", "mesh")) and key.name != "debug.emulate_network":
            text = str(key.default).lower() if key.type == "bool" else str(key.default)
            assert read_settings([f"{key.name.rpartition('.')[2]}={text}"]) == {key.name: text}


def test_a_file_in_yaml_has_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "whale.yaml"
    file.write_text('# ours\nmemory.zero: 2\nbatch.shares: [3, 1]\nmesh: data=2\nfault.elastic: ""\n')
    config = Config(environment={"WHALE_CONFIG": str(file)})
    assert (config["memory.zero"], config["batch.shares"], config["mesh"]) == (2, (3, 1), Mesh(data=2))
    file.write_text("# nothing but comments\n")
    assert Config(environment={"WHALE_CONFIG": str(file)}) == Config(environment={})
    for wrong in ("memory.zero: [", "- memory.zero", "memory: {zero: 2}"):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            Config(environment={"WHALE_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("communication.backend", "nccl", "nccl"),
        ("memory.zero", "3", 3),
        ("mesh", "data=2", Mesh(data=2)),
        ("kernels", "", ()),
        ("kernels", "nn, updates", ("nn", "updates")),
        ("communication.bucket_bytes", "65536", 65536),
        ("debug.check_timeout_s", "2.5", 2.5),
        ("batch.inputs", "images, labels", ("images", "labels")),
        ("batch.shares", "", ()),
        ("debug.dump", "/tmp/x,y", "/tmp/x,y"),
    ],
)
def test_the_environment_gives_values_of_the_keys_type(name: str, text: str, value: Any) -> None:
    variable = "WHALE_" + name.upper().replace(".", "_")
    found = Config(environment={variable: text})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("communication.backend", "mpi"),
        ("communication.backend", 1),
        ("memory.zero", 4),
        ("memory.zero", "3"),
        ("memory.zero", True),
        ("kernels", ["gpu"]),
        ("kernels", "nn"),
        ("fault.elastic", True),
        ("communication.bucket_bytes", "many"),
        ("communication.bucket_bytes", True),
        ("communication.bucket_bytes", 1.5),
        ("communication.bucket_bytes", -1),
        ("communication.in_process_ranks", -1),
        ("batch.shares", 3),
        ("batch.shares", [1, "2"]),
        ("batch.shares", [2, -1]),
        ("batch.inputs", "images"),
        ("debug.check_timeout_s", None),
        ("debug.check_timeout_s", float("nan")),
        ("debug.emulate_network", "latency=3"),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config({name: value}, environment={})
    text = str(caught.value)
    assert "\n  given: " in text and "\n  expected: " in text and "\n  next: " in text


def test_a_wrong_value_names_the_variable_it_came_from() -> None:
    with pytest.raises(ConfigError, match="source: environment WHALE_COMMUNICATION_IN_PROCESS_RANKS"):
        Config(environment={"WHALE_COMMUNICATION_IN_PROCESS_RANKS": "two"})


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError) as caught:
        Config({"comunication.group_byte": 1}, environment={})
    assert str(caught.value) == (
        "unknown configuration key 'comunication.group_byte'\n"
        "  source: code\n"
        "  expected: communication.bucket_bytes\n"
        "  next: write 'communication.bucket_bytes', if that is meant: size in bytes up to which small tensors travel "
        "together in one all-reduce, or all-gather of gradients; of nccl 32 MiB unless it is set"
    )
    with pytest.raises(ConfigError, match=r"expected: mesh, .*debug\.emulate_network"):
        Config(environment={})["zzz"]


def test_a_misspelt_variable_is_refused_and_others_are_left_alone() -> None:
    Config(environment={"WHALE_RANK": "1", "WHALE_RESTART": "5", "WHALE_SERVICE_HOST": "10.0.0.1", "HOME": "/"})
    for near in ("WHALE_BATCH_SHARE", "WHALE_SHARES"):
        with pytest.raises(ConfigError, match="expected: WHALE_BATCH_SHARES"):
            Config(environment={near: "1,1"})
    with pytest.raises(ConfigError, match="expected: WHALE_COMMUNICATION_BUCKET_BYTES"):
        Config(environment={"WHALE_COMMUNICATION_BUCKETBYTES": "1"})


def test_variables_that_are_no_keys_and_that_the_project_reads_are_left_alone() -> None:
    known = {key.variable for key in KEYS} | {"WHALE_CONFIG", "WHALE_LAUNCHER_SETTINGS"}
    sources = [path for top in ("whale", "whale_ops") for path in sorted((ROOT / top).rglob("*.py"))]
    named = {found for path in sources for found in re.findall(r'"(WHALE_[A-Z_]*[A-Z])"', path.read_text())}
    assert len(named - known) > 15
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config(environment=dict.fromkeys(named - known, "1"))


def test_variables_of_the_first_whale_and_of_others_warn() -> None:
    with pytest.warns(UserWarning, match="WHALE_COMMUNICATION_SPARSE_AS_DENSE=1 sets nothing"):
        Config(environment={"WHALE_COMMUNICATION_SPARSE_AS_DENSE": "1"})
    with pytest.warns(UserWarning, match="WHALE_DATA=/data sets nothing"):
        Config(environment={"WHALE_DATA": "/data"})


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"debug.dump": 3}', '{"debug.dmp": "x"}'])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "whale.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"whale\.json"):
        Config(environment={"WHALE_CONFIG": str(file)})


def test_equal_configurations_are_equal_values() -> None:
    one = Config({"batch.shares": [1, 2]}, environment={})
    other = Config(environment={"WHALE_BATCH_SHARES": "1,2"})
    assert one == other and hash(one) == hash(other)
    assert repr(one) == "Config({'batch.shares': (1, 2)})"


def test_an_old_or_unknown_name_suggests_what_does_the_same() -> None:
    for name, meant in (
        ("micro_batches", "pipeline.micro_batches"),
        ("memory.zero_level", "memory.zero"),
        ("fused.updates", "kernels"),
        ("gradient_checkpointing", "memory.recompute"),
        ("batch_norm.sync", "batch.norm_statistics"),
        ("mixed.dtype", "precision.compute_dtype"),
        ("communication.emulate", "debug.emulate_network"),
        ("embeddings", ""),
        ("", ""),
    ):
        assert nearest(name) == meant, name


def test_a_file_of_deepspeed_s_is_said_by_keys(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    for text, here in (
        ('{"zero_optimization": {"stage": 2}, "steps_per_print": 10}', "memory.zero: 2\n"),
        ('{"train_batch_size": 8, "bf16": {"enabled": true}}', 'precision.compute_dtype: "bfloat16"\n'),
        ('{"train_batch_size": "auto", "optimizer": {"type": "Adam"}}', "none of this file's fields has to be set"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"is one of DeepSpeed's(.|\n)*{here}(.|\n)*whale config --from"):
            Config(environment={"WHALE_CONFIG": str(path)})
    with pytest.raises(ConfigError, match=r"a field of DeepSpeed's(.|\n)*memory.zero for its stage(.|\n)*--from"):
        Config({"zero_optimization": {"stage": 2}}, environment={})


def test_keys_below_their_section_are_refused_with_their_names(tmp_path: Path) -> None:
    path = tmp_path / "whale.yaml"
    path.write_text("memory:\n  zero: 2\n  offload: optimizer\n")
    with pytest.raises(ConfigError, match=r"expected: memory\.zero: 2, memory\.offload: optimizer"):
        Config(environment={"WHALE_CONFIG": str(path)})
    with pytest.raises(ConfigError, match=r"expected: wh\.Mesh"):  # which is a key, too
        Config({"mesh": 3}, environment={})


def test_a_mesh_is_an_object_in_code_and_text_elsewhere(tmp_path: Path) -> None:
    mesh = Mesh(data=2, tensor=4)
    file = tmp_path / "whale.json"
    file.write_text('{"mesh": "data=2, tensor=4"}')
    assert Config({"mesh": mesh}, environment={})["mesh"] == mesh
    assert Config(environment={"WHALE_MESH": "data=2,tensor=4"})["mesh"] == mesh
    assert Config(environment={"WHALE_CONFIG": str(file)})["mesh"] == mesh
    assert not Config(environment={})["mesh"]
    with pytest.raises(ConfigError, match=r"expected: wh\.Mesh\("):
        Config({"mesh": "data=2,tensor=4"}, environment={})
    with pytest.raises(ConfigError, match=r"expected: wh\.Mesh\(data=2\)"):
        Config({"mesh": {"data": 2}}, environment={})
    with pytest.raises(ConfigError, match="correct the part 'tensor'"):
        Config(environment={"WHALE_MESH": "data=2,tensor"})
