"""Saves checkpoints until it kills itself at a given point; or one, "once", and ends: ``python -m … PATH POINT``."""

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
    def bits(each: dict[str, Any]) -> tuple[bytes, bytes, int]:
        return np.asarray(each["w"]).tobytes(), np.asarray(jax.random.key_data(each["key"])).tobytes(), each["step"]

    return bits(tree) == bits(state(step))


def dying(original: Callable[..., Any], is_it: Callable[..., bool]) -> Callable[..., Any]:
    """The same function, but the process dies when it is called with the arguments in question."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_it(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    return call


POINTS: dict[str, Any] = {
    "the arrays are written": (tensorstore, "open", lambda *_: True),
    "the manifest is written": (Path, "replace", lambda path, target: Path(target).name.endswith("crc32.json")),
    "the files of another are removed": (shutil, "rmtree", lambda path, *_: Path(path).name.isdecimal()),
}


def main(path: str, point: str) -> None:
    checkpoints = px.Checkpoints(path, keep=NUM_SAVED)
    for step in range(1, 2 if point == "once" else 10):
        if step == NUM_SAVED + 1:
            module, name, is_it = POINTS[point]
            setattr(module, name, dying(getattr(module, name), is_it))
        checkpoints.save(step, state(step))
        if point != "once":
            checkpoints.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
