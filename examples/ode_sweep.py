"""A sweep over a stiff chemical reaction with diffrax, by an implicit solver, on all devices.

Robertson's reaction, from 1 s to 40 s, for a range of one of its three rates. Each solve takes its own steps. The
gradient of what is left of the first substance, with respect to the rate that all solves share, flows through the map
and through diffrax's adjoint; the table compares it with a difference.
"""

from collections.abc import Sequence
from typing import Any

import _setting
import diffrax
import jax
import jax.numpy as jnp

import paraxis as px


def solve(fast: jax.Array, slow: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is left of the first substance after 40 s, and the number of steps."""

    def reaction(t: Any, y: jax.Array, rates: Any) -> jax.Array:
        fast, slow = rates
        first = -slow * y[0] + 1e4 * y[1] * y[2]
        third = fast * y[1] ** 2
        return jnp.stack([first, -first - third, third])

    control = diffrax.PIDController(rtol=1e-3, atol=1e-7)
    start = jnp.array([1.0, 0.0, 0.0])
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(reaction), diffrax.Kvaerno5(), 0.0, 40.0, 1e-4, start, (fast, slow), stepsize_controller=control
    )
    assert found.ys is not None
    return found.ys[-1, 0], found.stats["num_steps"]


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, solves=(100, "number of rates"))
    size = 12 if chosen.quick else chosen.solves
    axis = px.Axis("solves", size)
    fast, slow = jnp.logspace(6.5, 8.5, size), jnp.float32(0.04)

    @jax.jit
    def sweep(slow: jax.Array) -> tuple[jax.Array, jax.Array]:
        return px.map_fn(solve, (fast, px.broadcast(slow, axis)), axis)

    @jax.jit
    def mean_left(slow: jax.Array) -> jax.Array:
        return px.reduce_mean(sweep(slow)[0], axis)

    left, steps = sweep(slow)
    print(f"{axis} on {jax.device_count()} devices")
    shown = range(0, size, max(size // 8, 1))
    _setting.table(
        ["rate", "left of the first", "steps"], [(float(fast[i]), float(left[i]), int(steps[i])) for i in shown]
    )
    difference = float(mean_left(slow + 1e-3) - mean_left(slow - 1e-3)) / 2e-3
    print(f"slope of the mean: {float(jax.grad(mean_left)(slow)):.3f}, by a difference {difference:.3f}")
    _setting.plot(
        chosen.plot, {"left": dict(zip(fast.tolist(), left.tolist(), strict=True))}, "rate", "left of the first"
    )


if __name__ == "__main__":
    main()
