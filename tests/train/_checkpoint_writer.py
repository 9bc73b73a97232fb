"""Saves checkpoints until it is killed: by itself at a given point, or by whom it tells how far it is.

``python -m tests.train._checkpoint_writer PATH POINT``
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

import paraxis as px

NUM_SAVED = 3


def state(step: int) -> dict[str, Any]:
    values = np.random.default_rng(step).normal(size=(256, 256))
    return {"w": jnp.asarray(values, jnp.float32), "key": jax.random.key(step), "step": step}


def same(tree: dict[str, Any], step: int) -> bool:
    expected = state(step)
    keys = [np.asarray(jax.random.key_data(each["key"])).tobytes() for each in (tree, expected)]
    arrays = [np.asarray(each["w"]).tobytes() for each in (tree, expected)]
    return keys[0] == keys[1] and arrays[0] == arrays[1] and tree["step"] == step


def tell(step: int) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


def dying(is_it: Callable[..., bool], original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but the process dies when it is called with the arguments in question."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_it(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    return call


def arm(point: str) -> None:
    """Have the process die in the next save."""
    if point == "while the arrays are written":
        tensorstore.open = dying(lambda *_: True, tensorstore.open)
    elif point == "before the manifest is written":
        Path.replace = dying(lambda path, target: Path(target).name.endswith("crc32.json"), Path.replace)
    elif point == "while the files of another are removed":
        shutil.rmtree = dying(lambda path, *_: Path(path).name.isdecimal(), shutil.rmtree)


def main(path: str, point: str) -> None:
    with px.Checkpoints(path, keep=NUM_SAVED) as checkpoints:
        for step in range(1, 10_000):
            if step == NUM_SAVED + 1:
                arm(point)
            checkpoints.save(step, state(step))
            checkpoints.wait()
            tell(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
