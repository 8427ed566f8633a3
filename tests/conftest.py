"""For all tests."""

from __future__ import annotations

import gc
import importlib.abc
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forkserver
from tests.times import Times, starts_processes, uses_tensorflow

_TIMES = pytest.StashKey[Times]()
# No test runs under a plan that another one, or the user, has kept; those of the keeping name a folder of their own.
os.environ["WHALE_MESH_PLAN_CACHE"] = ""
# After each pass the program is verified, here and in the ranks that tests start.
os.environ.setdefault("WHALE_VERIFY_PASSES", "1")
# TensorFlow's allocator tells what it gives out where oneDNN is on; its default is off on processors without AVX-512.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# How long a drawn example takes says how busy the machine is, not whether the test is right.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def level_of_lines() -> Iterator[None]:
    """What one test wants to hear (`-v` of a command that it calls) is not said in the others."""
    level = logging.getLogger("whale").level
    yield
    logging.getLogger("whale").setLevel(level)


@pytest.fixture(autouse=True)
def no_traces_of_tensorflow() -> Iterator[None]:
    """Takes back what one test leaves in TensorFlow: a seed, and gradients of functions that it traced.

    TensorFlow never forgets `tf.custom_gradient` of a trace, and with it the graph: 50,000 objects a network that each
    later garbage collection looks through.
    """
    before = set(_gradients())
    yield
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)
    gradients = _gradients()
    for name in [name for name in gradients if name.startswith("CustomGradient-") and name not in before]:
        del gradients[name]


@pytest.fixture
def ranks() -> Iterator[Callable[..., None]]:
    """``ranks(3, **{"batch.shares": [5, 3, 0]})`` starts that many ranks in the test's process."""
    import whale as wh

    def start(count: int, **config: Any) -> None:
        wh.init({"communication.in_process_ranks": count, **config})

    yield start
    wh.shutdown()


def _gradients() -> dict[str, Any]:
    """Returns TensorFlow's gradient functions by the names that graphs have for them; none before it is imported."""
    ops = sys.modules.get("tensorflow.python.framework.ops")
    return ops.gradient_registry._registry if ops else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this suite."""
    parser.addoption(
        "--without-tensorflow", action="store_true", help="skip tests that import TensorFlow or start processes"
    )


class _Refusal(importlib.abc.MetaPathFinder):
    """Skips the test, or the file, that imports TensorFlow or Keras."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in ("tensorflow", "keras", "tf_keras"):
            pytest.skip("needs TensorFlow", allow_module_level=True)


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """Skips the test that starts a process; what asks git is let through."""
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ and arguments[1][:1] != ["git"]:
        pytest.skip("starts processes")


def pytest_configure(config: pytest.Config) -> None:
    """Opens the folder of the fork server, once for all processes of the session."""
    config.stash[_TIMES] = Times()
    if config.option.without_tensorflow:
        sys.meta_path.insert(0, _Refusal())
        sys.addaudithook(_refuse_processes)
    if not hasattr(config, "workerinput"):
        forkserver.open_folder()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Forgets a module that was skipped half-way, so that the next one that imports it is skipped too."""
    report = yield
    if report.skipped and isinstance(collector, pytest.Module):
        sys.modules.pop(collector.nodeid.removesuffix(".py").replace("/", "."), None)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders files so that both cores are busy until the end: files that start processes, which mostly wait, alternate
    with those that compute, and those without TensorFlow, which are short, come last.
    """
    files = list(dict.fromkeys(getattr(item, "module", None) for item in items))
    waiting = [one for one in files if starts_processes(one)]
    computing = [one for one in files if one not in waiting and uses_tensorflow(one)]
    turns = dict.fromkeys(files, 1.0)  # later than any place below
    for kind in (waiting, computing):
        turns |= {one: place / len(kind) for place, one in enumerate(kind)}
    items.sort(key=lambda item: turns[getattr(item, "module", None)])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Takes the objects that imports made, 300,000 and more, out of what each later garbage collection looks through.

    `keras.utils.clear_session` collects, 0.5 s each time otherwise, and so do tests of what is freed.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the fork server."""
    if not hasattr(config, "workerinput"):
        forkserver.close_folder()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Begins to measure what a test takes."""
    item.config.stash[_TIMES].begin()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Writes what a test took into its report."""
    result = yield
    measured = item.config.stash[_TIMES].end(item.nodeid, getattr(item, "module", None))
    item.user_properties += measured.items()
    return result
