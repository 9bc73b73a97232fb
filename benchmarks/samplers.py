"""Samplers whose chains take different times for a draw."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

_DRAWS, _DIM = 200, 10


def funnel(x):
    return -((x[0] / 3) ** 2) / 2 - jnp.sum(x[1:] ** 2 * jnp.exp(-x[0])) / 2 - x[0] * (x.shape[0] - 1) / 2


def gaussian(x):
    return -jnp.sum((x / jnp.geomspace(0.05, 1.0, x.shape[0])) ** 2) / 2


def nuts(density, dim, step_size, key):
    """200 draws of BlackJAX's NUTS."""
    kernel: Any = importlib.import_module("blackjax").nuts(density, step_size, jnp.ones(dim))  # it starts JAX
    draw = lambda state, key: (kernel.step(key, state)[0], state.position)  # noqa: E731
    return jax.lax.scan(draw, kernel.init(jnp.full(dim, 0.1)), jax.random.split(key, _DRAWS))[1]


def slices(key):
    """200 draws by elliptical slice sampling (Murray, Adams and MacKay 2010): a loop of draws of loops of trials."""

    def draw(carry, _):
        trial = jax.lax.while_loop(lambda trial: ~_is_accepted(trial), _narrowed, _begun(*carry))
        return (trial[0], _point(trial)), _point(trial)

    return jax.lax.scan(draw, (key, jnp.zeros(_DIM)), length=_DRAWS)[1]


def slices_in_one_loop(key):
    """The same draws, as a state machine: a turn of one loop is a trial, which ends a draw or not."""

    def turn(carry):
        number, trial, draws = carry
        ends, draws = _is_accepted(trial), draws.at[number].set(_point(trial))
        following = _begun(trial[0], _point(trial)), _narrowed(trial)
        return number + ends, jax.tree.map(lambda new, same: jnp.where(ends, new, same), *following), draws

    first = 0, _begun(key, jnp.zeros(_DIM)), jnp.zeros((_DRAWS, _DIM))
    return jax.lax.while_loop(lambda carry: carry[0] < _DRAWS, turn, first)[2]


def _log_likelihood(x):
    return -8 * jnp.sum((x - 1.0) ** 2)


def _begun(key, x):
    """A key, the ellipse's two points, the height of the slice, an angle and its bracket."""
    key, *keys = jax.random.split(key, 4)
    height, angle = (
        _log_likelihood(x) + jnp.log(jax.random.uniform(keys[1])),
        jax.random.uniform(keys[2], maxval=6.2832),
    )
    return key, x, jax.random.normal(keys[0], x.shape), height, angle, angle - 6.2832, angle


def _point(trial):
    _, x, other, _, angle, *_ = trial
    return x * jnp.cos(angle) + other * jnp.sin(angle)


def _is_accepted(trial):
    return _log_likelihood(_point(trial)) > trial[3]


def _narrowed(trial):
    key, x, other, height, angle, low, high = trial
    key, draw = jax.random.split(key)
    low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
    return key, x, other, height, jax.random.uniform(draw, minval=low, maxval=high), low, high
