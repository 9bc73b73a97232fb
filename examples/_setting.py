"""What all examples share: their options, a table, a plot, and the handwritten digits with a small model for them.

Without ``--devices`` an example uses the devices there are. To simulate some on a CPU, pass ``--devices 8`` or set
``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.testing import simulate_devices


def options(description: str | None, argv: Sequence[str] | None, **numbers: tuple[int, str]) -> argparse.Namespace:
    """Parse the options and, if asked to, simulate devices. Nothing may have used JAX before.

    Args:
        description: what ``--help`` says.
        argv: what was written behind the command; ``None``: that of this process.
        **numbers: an example's own options, besides the common ones: default and help of each.
    """
    return parsed(parser(description, **numbers), argv)


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and, if asked to, simulate devices: for an example with options of other kinds."""
    chosen = parser.parse_args(argv)
    if chosen.devices is not None:
        simulate_devices(chosen.devices)
    return chosen


def parser(description: str | None, **numbers: tuple[int, str]) -> argparse.ArgumentParser:
    """What parses the options that all have, and an example's own numbers."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--devices", type=int, metavar="N", help="simulate N CPU devices (default: the machine's own)")
    found.add_argument("--quick", action="store_true", help="a few rounds only, for tests")
    found.add_argument("--plot", metavar="PATH", help="write a PNG plot")
    for name, (default, text) in numbers.items():
        found.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print right-aligned columns; floats with four significant digits."""
    cells = [list(header), *([_cell(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(x: Any) -> str:
    if isinstance(x, str):
        return x
    return f"{x:.4g}" if isinstance(x, float) else f"{x:,}"


def plot(path: str | None, curves: Mapping[str, Mapping[int, float]], x: str, y: str, *, log: bool = False) -> None:
    """Write the curves, each from numbers of steps to values, as a PNG, if a path is given."""
    if path is None:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for label, values in curves.items():
        axes.plot(list(values), list(values.values()), label=label)
    axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    print(f"plot: {path}")


class Digits(NamedTuple):
    """Training digits by client, ``x (clients, rows, 64)`` and ``y (clients, rows)``; held-out digits without it."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def digits(num_clients: int, *, by_label: bool) -> Digits:
    """The 1,797 digits of scikit-learn, 360 of them held out, the rest in equal parts (a remainder is left out).

    Args:
        num_clients: number of parts.
        by_label: each client gets two runs of the digits sorted by label, so it sees about two of the ten labels
            (McMahan et al. 2017, arXiv 1602.05629); otherwise the digits are dealt at random.
    """
    from sklearn.datasets import load_digits

    x, y = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    test, train = slice(0, 360), slice(360, None)
    rows = (len(y) - 360) // (2 * num_clients)
    runs = np.argsort(y[train], kind="stable") if by_label else np.arange(len(y) - 360)
    runs = runs[: 2 * num_clients * rows].reshape(2 * num_clients, rows)
    hands = np.random.default_rng(1).permutation(2 * num_clients).reshape(num_clients, 2)
    chosen = runs[hands].reshape(num_clients, 2 * rows)
    return Digits(x[train][chosen], y[train][chosen], x[test], y[test])


def classifier(key: jax.Array, hidden: int = 32) -> dict[str, jax.Array]:
    """Weights of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, hidden)) / 8,
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, 10)) / hidden**0.5,
        "b2": jnp.zeros(10),
    }


def logits(model: Any, x: Any) -> jax.Array:
    return jax.nn.relu(x @ model["w1"] + model["b1"]) @ model["w2"] + model["b2"]


def cross_entropy(model: Any, x: Any, y: Any) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits(model, x)), y[..., None], axis=-1)
    return -jnp.mean(picked)


def accuracy(model: Any, data: Digits) -> float:
    """Share of the held-out digits that are told right."""
    return float(jnp.mean(jnp.argmax(logits(model, data.test_x), -1) == data.test_y))
