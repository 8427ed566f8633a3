"""Script for `whale run`: combinations of features one after the other, of which this process is a rank.

    on_ranks.py FOLDER [--alone]

``asked.json`` in the folder lists names of features; each rank writes what came out of each to ``rank<i>.jsonl``. With
``--alone`` the ranks are threads of this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(folder: Path, alone: bool) -> None:
    """Runs all that is asked for."""
    from tests.combinations.__main__ import with_two_devices

    with_two_devices()
    import tensorflow as tf

    from tests.combinations.features import BY_NAME
    from tests.combinations.run import outcome
    from whale.distributed.device_exchange import claim_gpu
    from whale.started import process_place

    place = process_place()
    rank = place.rank
    if not alone and tf.config.list_physical_devices("GPU"):
        claim_gpu(place.local_rank)  # TensorFlow makes its devices for the run on one device, before wh.init
    with (folder / f"rank{rank}.jsonl").open("w") as out:
        for number, names in enumerate(json.loads((folder / "asked.json").read_text())):
            own = folder / str(number)
            own.mkdir(exist_ok=True)
            said = outcome([BY_NAME[name] for name in names], "" if alone else str(own))
            print(json.dumps(said), file=out, flush=True)
            if said[0] == "WRONG" and not alone:
                os._exit(1)  # the other ranks may be elsewhere by now


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(Path(sys.argv[1]), "--alone" in sys.argv)
