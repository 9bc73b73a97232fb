"""One of several processes, of which one has no room for its part of the second checkpoint.

``paraxis launch -n 2 -m tests.train._checkpoint_full_disk PATH WHERE NUMBER``
"""

import sys
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import paraxis as px


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def main(path: str, where: str, number: int) -> None:
    me = px.initialize()
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P("rows"))
    x = jax.make_array_from_callback((8, 30), rows, lambda part: np.ones((8, 30), np.float32)[part])
    checkpoints = px.Checkpoints(path)
    checkpoints.save(1, {"x": x})
    checkpoints.wait()
    if me.process == number and where == "begin":
        ocp.save_checkpointables_async = no_room
    elif me.process == number:
        tensorstore.open = no_room
    checkpoints.save(2, {"x": x})
    checkpoints.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
