"""What the examples of training share: their options, several processes, and how far apart two runs are.

All of them run as one process, or as several: ``paraxis launch -n 2 examples/mnist_cnn.py --quick``. With
``--checkpoint DIRECTORY`` a run that was stopped, by Ctrl-C or in any other way, goes on when the same command is
started again.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import _setting
import jax
import numpy as np
from jax.sharding import Mesh

import paraxis as px
from paraxis.testing import simulate_devices


def options(
    description: str | None, argv: Sequence[str] | None, *, flags: dict[str, str] | None = None, **numbers: Any
) -> argparse.Namespace:
    """Parse the options and take this process's place among the others, of which the first alone prints.

    Args:
        description: what ``--help`` says.
        argv: what was written behind the command; ``None``: that of this process.
        flags: an example's own switches: help of each.
        **numbers: its own numbers: default and help of each.
    """
    parser = _setting.parser(description, **numbers)
    parser.add_argument("--checkpoint", metavar="DIRECTORY", help="save the run there, and resume from there")
    for name, text in (flags or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    chosen = parser.parse_args(argv)
    if px.initialize().process > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the process ends
        chosen.plot = None
    if chosen.devices is not None:
        simulate_devices(chosen.devices)
    return chosen


def first_devices(number: int) -> px.Axis:
    """Batches on the first devices; of several processes each takes its own first ones, and computes by itself."""
    return px.Axis("batch", 1, mesh=Mesh(np.array(jax.local_devices()[:number]), ("batch",)))


def where() -> str:
    """For people: ``8 devices``."""
    devices, processes = jax.device_count(), jax.process_count()
    text = "1 device" if devices == 1 else f"{devices} devices"
    return text if processes == 1 else f"{text} of {processes} processes"


def difference(one: Any, other: Any) -> float:
    """The largest between two trees of arrays."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
