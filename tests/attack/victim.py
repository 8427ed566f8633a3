"""The script of the ranks in a run with a fault: a small model is trained, saved and ended; or sums without TensorFlow.

    victim.py <JSON of a tests.attack.faults.Fault> <folder>

In the folder it notes when the fault was, which errors the ranks had, and with which weights they ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

STEPS, FAULT_STEP, SAVE_EVERY = 60, 30, 15
SUMS = 2000
ATTEMPT, RANK = int(os.environ["WHALE_RESTART"]), int(os.environ["WHALE_RANK"])
asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])


def note(what: str, **facts: object) -> None:
    part = folder / f"{what}.{ATTEMPT}.{RANK}.part"
    part.write_text(json.dumps(facts | {"time_s": time.monotonic()}))
    part.rename(part.with_suffix(""))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Who is killed or stopped, by the first word of the kind.
WORKER = os.getppid()
MPIRUN = parent(WORKER)
OF = {"rank": os.getpid(), "worker": WORKER, "mpirun": MPIRUN, "launcher": parent(MPIRUN)}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "crashes": signal.SIGSEGV}


def act() -> None:
    who, how = asked["kind"].split()
    note("fault")
    if how in SIGNALS:
        os.kill(OF[who], SIGNALS[how])
    elif how == "exits":
        os._exit(3)
    elif how == "leaves":
        os._exit(0)
    elif how == "closes":
        os.closerange(3, 4096)
    elif how == "raises":
        raise ValueError("this batch is bad")
    else:
        sys.exit(3)


def reached(phase: str) -> None:
    """Makes the fault if it belongs here: at once if it is an exception, else a moment later, in a thread."""
    if phase != asked["phase"] or asked["victim"] != RANK or ATTEMPT:
        return
    if asked["kind"] in ("rank raises", "rank ends"):
        act()
    timer = threading.Timer(asked["after_s"], act)
    timer.daemon = True
    timer.start()


def exchange() -> None:
    """All-reduces of the core: ranks that start in a second."""
    import numpy as np

    import whale_ops
    from whale.config import Config
    from whale.distributed.watch import LauncherWatch
    from whale_ops import _native

    reached("start")
    watch = LauncherWatch(Config())
    comm = whale_ops.connect_mpi("faults")
    watch.look_after(comm)
    value = np.arange(1000.0) + RANK
    for number in range(SUMS):
        if number == SUMS // 2:
            reached("training")
        sent, value = value / comm.size, np.empty_like(value)
        _native.HostOperation(
            comm.handle,
            "AllReduce",
            "value",
            dtype="float64",
            element_bytes=8,
            text="",
            input_address=sent.ctypes.data,
            output_address=value.ctypes.data,
            counts=[len(sent)],
            buffers=(sent, value),
        ).wait(3600)
    hold(value)
    reached("shutdown")
    comm.leave()


def hold(*values: object) -> None:
    import numpy as np

    with open(folder / f"weights.{ATTEMPT}.{RANK}.npz", "wb") as file:
        np.savez(file, *values)


def main() -> None:
    note("up", segments=os.environ["OMPI_MCA_btl_sm_backing_directory"])
    if asked["plan"] == "exchange":
        exchange()
        return
    sys.modules["keras"] = None  # type: ignore[assignment]  # not used here; ranks start in three quarters of the time
    import numpy as np
    import tensorflow as tf

    import whale as wh

    here = tf.autograph.experimental.do_not_convert(reached)  # else AutoGraph rewrites it, between note and fault
    here("start")
    wh.init({"memory.zero": 3, "memory.zero_min_bytes": 0} if asked["plan"] == "zero" else {})
    scope = wh.stage if asked["plan"] == "stages" else wh.replica
    draw = np.random.default_rng(1).normal
    with scope():
        first = tf.Variable(draw(size=(16, 16)), name="first")
        first_speed = tf.Variable(np.zeros((16, 16)), trainable=False, name="first_speed")
    with scope():
        last = tf.Variable(draw(size=(16, 8)), name="last")
        last_speed = tf.Variable(np.zeros((16, 8)), trainable=False, name="last_speed")
    done = tf.Variable(0, dtype=tf.int64, trainable=False, name="done")

    @wh.function
    def step(x, y):
        here("capture")
        with tf.GradientTape() as tape:
            with scope():
                hidden = tf.tanh(x @ first)
            with scope():
                loss = tf.reduce_mean((hidden @ last - y) ** 2)
        for weight, speed, slope in zip((first, last), (first_speed, last_speed), tape.gradient(loss, (first, last))):
            speed.assign(0.9 * speed + slope)
            weight.assign_sub(0.01 * speed)
        here("first step")
        return loss

    parts = {"first": first, "first_speed": first_speed, "last": last, "last_speed": last_speed, "done": done}
    manager = wh.CheckpointManager(tf.train.Checkpoint(**parts), str(folder / "saved"), 2)
    if asked["saves"]:
        manager.restore_or_initialize()
    while (number := int(done)) < STEPS:
        if number == FAULT_STEP:
            here("training")
        generator = np.random.default_rng([2, number])
        step(generator.normal(size=(16, 16)), generator.normal(size=(16, 8)))
        done.assign_add(1)
        if asked["saves"] and (number + 1) % SAVE_EVERY == 0:
            if number >= FAULT_STEP:
                here("save")
            manager.save(checkpoint_number=number + 1)
    hold(*[variable.numpy() for variable in parts.values()])
    here("shutdown")
    wh.shutdown()


def told() -> None:
    try:
        main()
    except Exception as error:
        from whale.errors import WhaleError

        note("error" if isinstance(error, WhaleError) else "other", text=f"{type(error).__name__}: {error}")
        raise


told()
