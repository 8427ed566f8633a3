"""Everything that writes checkpoints or models, of processes that see one store and no folder."""

from __future__ import annotations

import os

from tests.checkpoints.store import find_library, list_keys
from tests.launcher.helpers import Launcher

TEXT = """
import os
import numpy as np, tensorflow as tf
tf.experimental.register_filesystem_plugin(os.environ["OBJECT_LIBRARY"])
import keras, whale as wh

wh.init({"memory.zero": 1, "memory.zero_min_bytes": 0})
RUN = "objects://bucket/run"
keras.utils.set_random_seed(1)
x, y = np.ones((16, 4), "float32"), np.ones((16, 2), "float32")

def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model

model = make()
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[
    keras.callbacks.ModelCheckpoint(RUN + "/best.keras"),
    keras.callbacks.ModelCheckpoint(RUN + "/{epoch}.weights.h5", save_weights_only=True),
    keras.callbacks.BackupAndRestore(RUN + "/backup", delete_checkpoint=False),
])
wanted = model.get_weights()
again = make()
again.load_weights(RUN + "/2.weights.h5")
whole = keras.models.load_model(RUN + "/best.keras")
model.save(RUN + "/last.keras")
last = keras.models.load_model(RUN + "/last.keras")
for other in (again, whole, last):
    assert all(map(np.array_equal, other.get_weights(), wanted))

v = tf.Variable(float(wh.rank()))
plain = tf.train.CheckpointManager(tf.train.Checkpoint(v=v), RUN + "/plain", 2)
for _ in range(3):
    plain.save()
assert plain.latest_checkpoint == tf.train.latest_checkpoint(RUN + "/plain") == RUN + "/plain/ckpt-3"
tf.train.Checkpoint(v=v).restore(plain.latest_checkpoint).assert_consumed()

tf.saved_model.save(tf.Module(), RUN + "/module")
tf.saved_model.load(RUN + "/module")
wh.export(model, RUN + "/exported")

manager = wh.CheckpointManager(tf.train.Checkpoint(model=model), RUN + "/whale", 1)
for _ in range(2):
    path = manager.save()
assert path == manager.latest_checkpoint == RUN + "/whale/ckpt-2"
model.set_weights([w * 0 for w in wanted])
assert manager.restore_or_initialize() == path
assert all(map(np.array_equal, model.get_weights(), wanted))
try:
    wh.CheckpointManager(tf.train.Checkpoint(v=v), f"objects://bucket/{wh.rank()}", 2).save()
except wh.CommError as error:
    assert "rank 0 uses objects://bucket/0, rank 1 uses objects://bucket/1" in str(error), error
else:
    raise AssertionError("ranks used other folders")
print("done")
"""


def test_everything_is_written_to_a_store(launcher: Launcher) -> None:
    objects = launcher.folder / "objects"
    objects.mkdir()
    launcher.environment |= {"OBJECT_STORE": str(objects), "OBJECT_LIBRARY": str(find_library())}
    done = launcher.run("-np", "2", launcher.script(TEXT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"[0] done", "[1] done"} <= set(done.stdout.splitlines())
    keys = list_keys(objects, "bucket")
    assert {key.split("/")[1] for key in keys if key.startswith("run/")} >= {
        "best.keras", "1.weights.h5", "last.keras", "plain", "module", "exported", "whale", "backup",
    }  # fmt: skip
    whale = [key.rpartition("/")[2] for key in keys if key.startswith("run/whale/")]
    assert whale == [
        "checkpoint",
        *(f"ckpt-2.{kind}" for kind in ("data-00000-of-00002", "data-00001-of-00002", "index")),
    ]
    assert not [
        name for name in os.listdir(launcher.folder) if name.startswith("objects:")
    ]  # nor a folder of that name
