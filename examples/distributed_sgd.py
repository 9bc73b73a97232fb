"""Distributed gradient descent: differentiate a mean over hospitals as if it were any other loss.

442 diabetes patients (scikit-learn) are spread over 17 hospitals, each on some device. The loss is a program; its
gradient, taken by ``jax.grad``, averages the hospitals' gradients in one all-reduce. 17 hospitals need not divide
evenly among the devices, and the fit is the same on any number of them.
"""

from collections.abc import Sequence

import _setting
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

import paraxis as px
from paraxis.testing import communication

HOSPITALS = 17


def squared_error(model: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean over one hospital's patients: ``x (26, 11)``, ``y (26,)``."""
    return jnp.mean((x @ model - y) ** 2)


@px.program(hospitals=HOSPITALS)
def loss(model: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The shared model goes to every hospital; one number comes back from each."""
    return px.reduce_mean(px.map_fn(squared_error, (px.broadcast(model), x, y)))


@jax.jit
def step(model: jax.Array, x: jax.Array, y: jax.Array, learning_rate: float) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(model, x, y)
    return model - learning_rate * gradient, value


def patients() -> tuple[np.ndarray, np.ndarray]:
    """``x (17, 26, 11)``: ten standardised measurements and a one; ``y (17, 26)``: progress in units of 100."""
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    x = np.concatenate([x / x.std(0), np.ones((len(x), 1))], axis=1)
    return x.reshape(HOSPITALS, 26, 11).astype(np.float32), (y / 100).reshape(HOSPITALS, 26).astype(np.float32)


def train(num_steps: int, learning_rate: float = 0.2) -> tuple[jax.Array, list[float]]:
    """The model after so many steps, and the loss before each."""
    x, y = patients()
    model, losses = jnp.zeros(x.shape[-1]), []
    for _ in range(num_steps):
        model, value = step(model, x, y, learning_rate)
        losses.append(float(value))
    return model, losses


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv)
    num_steps = 20 if chosen.quick else 400
    x, y = patients()
    model, losses = train(num_steps)

    flat_x, flat_y = x.reshape(-1, x.shape[-1]).astype(np.float64), y.reshape(-1).astype(np.float64)
    best = np.linalg.lstsq(flat_x, flat_y, rcond=None)[0]
    least = float(np.mean((flat_x @ best - flat_y) ** 2))
    print(loss)
    shown = sorted({0, num_steps // 20, num_steps // 4, num_steps - 1})
    _setting.table(["step", "loss", "above least squares"], [(i, losses[i], losses[i] - least) for i in shown])
    print(f"communicated per step: {communication(step, model, x, y, 0.2)}")
    gap = {i: value - least for i, value in enumerate(losses)}
    _setting.plot(chosen.plot, {"gradient descent": gap}, "step", "loss above least squares", log=True)


if __name__ == "__main__":
    main()
