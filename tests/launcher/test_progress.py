"""`whale run --logdir` and `--metrics-port`: what ranks tell of their steps, in TensorBoard's files and over HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.helpers import MEET, Launcher
from whale.errors import ClusterError
from whale.launcher.job import metrics
from whale.launcher.job.metrics import parse_address, serve_metrics
from whale.launcher.job.progress import RunProgress
from whale.launcher.job.tensorboard import EventFiles, write_profile
from whale.launcher.protocol import Progress

STEP = """
import tensorflow as tf
import whale as wh

wh.init()
weight = tf.Variable(tf.ones((4, 2)))

@wh.function
def train_step(x):
    weight.assign_sub(1e-2 * tf.matmul(x, tf.matmul(x, weight), transpose_a=True))

for _ in range(5):
    train_step(tf.ones((2, 4)))
"""
# What a step does for the progress, without TensorFlow.
COUNTED = (
    MEET
    + """
import urllib.request
from whale.config import Config
from whale.distributed.watch import LauncherWatch
from whale.started import restarts
watch = LauncherWatch(Config())
watch.look_after(None)
for _ in range(3):
    watch.progress.count_steps(lambda: time.sleep(0.01), "step")()
watch.tell_counters()
"""
)


def told(calls: int, seconds: float, sent: int = 0, begun_ns: int = 1) -> Progress:
    return Progress(
        begun_ns=begun_ns,
        programs={"step": (calls, seconds)},
        logical_bytes=sent,
        sent_bytes=sent,
        waiting_s=seconds / 2,
        memory_bytes=3 << 20,
        peak_bytes=4 << 20,
        doing=None,
        wait=None,
    )


def events(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """What TensorFlow reads of a folder's files: tag -> (step, value); it compares the records' checksums."""
    import tensorflow as tf

    found: dict[str, list[tuple[int, Any]]] = {}
    for path in folder.glob("events.out.tfevents.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                is_text = value.metadata.plugin_data.plugin_name == "text"
                content = tf.make_ndarray(value.tensor).item().decode() if is_text else value.simple_value
                found.setdefault(value.tag, []).append((event.step, content))
    return found


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_scalars_are_of_the_steps_between_two_messages_and_go_on_after_a_restart(tmp_path: Path) -> None:
    with contextlib.closing(EventFiles(str(tmp_path / "new" / "folder"))) as files:
        progress = RunProgress(files)
        progress.begin(1, 0)
        progress.take(0, told(2, 0.25, 2048))
        progress.take(0, told(6, 0.75, 10240))
        progress.begin(1, 1)
        progress.take(0, told(6, 1.5, begun_ns=2))  # of a new process
        progress.take_plan(0, "step", "Plan\n  é")
    found = events(tmp_path / "new" / "folder" / "rank0")
    assert found["step_ms/step"] == [(2, 125.0), (6, 125.0), (12, 250.0)]
    assert found["waiting_ms_per_step"] == [(2, 62.5), (6, 62.5), (12, 125.0)]
    assert found["sent_KiB_per_step"] == [(2, 1.0), (6, 2.0), (12, 0.0)]
    assert found["memory_MiB"] == [(2, 3.0), (6, 3.0), (12, 3.0)]
    assert found["plan/step"] == [(0, "    Plan\n      é")]
    assert 'whale_steps_total{rank="0",program="step"} 6\n' in progress.format_metrics()
    assert "whale_restarts_total 1\n" in progress.format_metrics()


def test_the_port_answers_and_holds_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(socket, "getfqdn", None)  # a name service may take its time
    progress = RunProgress(None)
    progress.begin(1, 0)
    with serve_metrics(parse_address("0"), progress) as url:
        assert url.startswith("http://127.0.0.1:")
        place, health = ("127.0.0.1", int(url.split(":")[2].split("/")[0])), url.replace("metrics", "healthz")
        assert [get(health)[0], get(url + "x")[0]] == [503, 404]
        progress.note_up(0)
        progress.take(0, told(3, 0.5) | {"programs": {'a "b"\\': (3, 0.5)}})
        assert get(health) == (200, "ok\n")
        assert 'whale_step_seconds_total{rank="0",program="a \\"b\\"\\\\"} 0.5\n' in get(url)[1]
        with socket.create_connection(place, 30), socket.create_connection(place, 30):  # which never ask for anything
            with socket.create_connection(place, 4) as third:  # less than a silent one that was taken is held
                assert third.recv(1) == b""
        with pytest.raises(ClusterError, match=r"cannot be opened\n.*127.0.0.1"), serve_metrics(place, progress):
            pass


@pytest.mark.parametrize("text", ["", "http", "1.2.3.4:", "70000", "a b:1", "::1:9400"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="a port for metrics cannot be read"):
        parse_address(text)


def test_metrics_of_two_ranks_over_a_restart(launcher: Launcher) -> None:
    script = launcher.script(
        COUNTED
        + """
meet(f"told{restarts()}")
if restarts() == 0:
    sys.exit(7)
if rank == 0:
    url = next(w for w in open("said").read().split() if w.startswith("http"))
    text = ""
    while "whale_restarts_total 1" not in text or text.count(" 3\\n") < 2:
        text = urllib.request.urlopen(url).read().decode()
    print(text)
meet("asked")
watch.stop()
"""
    )
    command = [*launcher.command("-np", "2", "--max-restarts", "1", "--logdir", "tb", "--metrics-port", "0", script)]
    with open(launcher.folder / "said", "w") as said:
        done = subprocess.run(
            command, env=launcher.environment, cwd=launcher.folder, stdout=subprocess.PIPE, stderr=said, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    stderr = (launcher.folder / "said").read_text()
    assert done.returncode == 0, stderr
    for rank in range(2):
        assert f'[0] whale_steps_total{{rank="{rank}",program="step"}} 3\n' in done.stdout
        found = events(launcher.folder / "tb" / f"rank{rank}")
        assert [step for step, _ in found["step_ms/step"]] == [3, 6] and found["step_ms/step"][0][1] >= 10
    assert "scalars and plans are in tb: tensorboard --logdir tb" in stderr


def test_a_script_s_steps_and_its_plan_are_told(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", "--logdir", "tb", "--trace", "t.json", launcher.script(STEP))
    assert done.returncode == 0, done.stderr
    found = events(launcher.folder / "tb" / "rank0")
    assert found["step_ms/train_step"][-1][0] == 5
    assert "Plan for train_step" in found["plan/train_step"][0][1]
    (profile,) = (launcher.folder / "tb").glob("plugins/profile/*/rank0.xplane.pb")
    assert b"train_step 4" in profile.read_bytes()


def test_a_trace_becomes_a_profile_that_tensorflow_reads(tmp_path: Path) -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    lines = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "steps"}},
        {"name": "step 0", "ph": "B", "pid": 1, "tid": 1, "ts": 10.0, "args": {"number": 0}},
        {"name": "AllReduce", "ph": "X", "pid": 1, "tid": 100, "ts": 11.5, "dur": 2.25, "args": {"key": "g"}},
        {"name": "step 0", "ph": "E", "pid": 1, "tid": 1, "ts": 14.0},
        {"name": "step 1", "ph": "B", "pid": 1, "tid": 1, "ts": 20.0},
        {"name": "rank 0 was killed by SIGKILL", "ph": "i", "pid": 1, "tid": 1, "ts": 26.0},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")
    assert write_profile(str(trace), str(tmp_path)) == ""
    (path,) = tmp_path.glob("plugins/profile/*/rank1.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    (plane,) = space.planes
    assert (plane.name, list(space.hostnames)) == ("/host:CPU", ["rank1"])
    found = {
        (line.name, plane.event_metadata[event.metadata_id].name): (event.offset_ps, event.duration_ps)
        for line in plane.lines
        for event in line.events
    }
    assert found == {
        ("steps", "step 0"): (10_000_000, 4_000_000),
        ("steps", "step 1"): (20_000_000, 6_000_000),  # it was under way at the end
        ("steps", "rank 0 was killed by SIGKILL"): (26_000_000, 0),
        ("track 100", "AllReduce"): (11_500_000, 2_250_000),
    }
    stats = [(plane.stat_metadata[s.metadata_id].name, s.str_value) for s in plane.lines[1].events[0].stats]
    assert stats == [("key", "g")]
    assert "could not be made a profile" in write_profile(str(tmp_path / "none.json"), str(tmp_path))


def test_a_folder_that_cannot_be_made_is_said_first(launcher: Launcher) -> None:
    script = launcher.script("print('ran')")
    done = launcher.run("-np", "1", "--logdir", f"{script}/tb", script)
    assert done.returncode == 2 and "ran" not in done.stdout
    assert "TensorBoard's files cannot be written" in done.stderr and f"--logdir {script}/tb" in done.stderr
