"""A sweep in which every fit stops when it gets no better, each after as many steps as it needs.

A linear model with more columns than its rows can tell; Adam at learning rates over three decades. A fit is one
``while_loop``, which ends ten steps after the last improvement on rows held out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import _setting
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

COLUMNS, PATIENCE = 40, 10


class Fit(NamedTuple):
    """A fit on its way: ``best_w`` has the least held-out loss so far, ``waited`` counts the steps since."""

    w: jax.Array
    moments: Any
    best_w: jax.Array
    best: jax.Array | float
    step: jax.Array | int
    waited: jax.Array | int


def rows(seed: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, COLUMNS)).astype("float32")
    return x, (x[:, :5].sum(1) + rng.normal(size=num)).astype("float32")


def loss(w: jax.Array, data: Any) -> jax.Array:
    return jnp.mean((data[0] @ w - data[1]) ** 2)


def fit(rate: jax.Array, train: Any, held_out: Any, most: int = 5000) -> Fit:
    """Adam at one learning rate, until ``PATIENCE`` steps in turn have not improved the held-out loss."""
    optimizer = optax.adam(rate)
    w = jnp.zeros(COLUMNS)

    def going(now: Fit) -> Any:
        return (now.waited < PATIENCE) & (now.step < most)

    def step(now: Fit) -> Fit:
        updates, moments = optimizer.update(jax.grad(loss)(now.w, train), now.moments)
        w: Any = optax.apply_updates(now.w, updates)
        found = loss(w, held_out)
        better = found < now.best
        waited = jnp.where(better, 0, now.waited + 1)
        best_w = jnp.where(better, w, now.best_w)
        return Fit(w, moments, best_w, jnp.minimum(found, now.best), now.step + 1, waited)

    return jax.lax.while_loop(going, step, Fit(w, optimizer.init(w), w, jnp.inf, 0, 0))


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, fits=(100, "number of learning rates"))
    size = 12 if chosen.quick else chosen.fits
    rates, axis = jnp.logspace(-3, 0, size), px.Axis("fits", size)
    train, held_out = rows(0, 60), rows(1, 1000)

    @jax.jit
    def sweep(rates: jax.Array) -> Fit:
        return px.map_fn(lambda rate: fit(rate, train, held_out), rates, axis)

    fits = jax.device_get(sweep(rates))
    print(
        f"{size} fits on {jax.device_count()} devices: {fits.step.sum()} steps, {size * fits.step.max()} if all waited"
    )
    shown = range(0, size, max(size // 8, 1))
    table = [(float(rates[i]), int(fits.step[i]), float(fits.best[i])) for i in shown]
    _setting.table(["learning rate", "steps until it stopped", "held-out loss"], table)
    curve = dict(zip(rates.tolist(), fits.best.tolist(), strict=True))
    _setting.plot(chosen.plot, {"held-out loss": curve}, "learning rate", "held-out loss")


if __name__ == "__main__":
    main()
