"""One of several processes, of which one has no room for its part of the second checkpoint.

``paraxis launch -n 2 -m tests.train._checkpoint_full_disk PATH WHERE NUMBER``
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paraxis.launch import initialize
from paraxis.train.checkpoints import _orbax
from paraxis.train.checkpoints._checkpoints import Checkpoints

_start_save = _orbax.start_save


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def start_save_badly(directory: Path, arrays: Any) -> Callable[[], None]:
    if sys.argv[2] == "begin":
        no_room()
    import tensorstore

    tensorstore.open = no_room
    return _start_save(directory, arrays)


def main(path: str, number: int) -> None:
    me = initialize()
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), P("rows"))
    x = jax.make_array_from_callback((8, 30), rows, lambda part: np.ones((8, 30), np.float32)[part])
    checkpoints = Checkpoints(path)
    checkpoints.save(1, {"x": x})
    checkpoints.wait()
    if me.process == number:
        _orbax.start_save = start_save_badly
    checkpoints.save(2, {"x": x})
    checkpoints.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]))
