"""Ten million simulated paths, in chunks, in the memory of a few: the price of an option and its slope, by px.Stream.

The mean over all paths and its gradient with respect to the volatility are one pass each, beside the formulas of Black
and Scholes. A path's random numbers depend on its index, so neither chunks nor devices change them.
"""

import math
from collections.abc import Sequence

import _setting
import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px

STEPS = 50


def gain(index: jax.Array, volatility: jax.Array) -> jax.Array:
    """What the option is worth at the end of one path."""
    moves = jax.random.normal(jax.random.fold_in(jax.random.key(0), index), (STEPS,)) / STEPS**0.5
    return jnp.maximum(jnp.exp(volatility * jnp.sum(moves) - volatility**2 / 2) - 1, 0.0)


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, paths=(10_000_000, "number of paths"))
    size = 20_000 if chosen.quick else chosen.paths
    volatility = jnp.float32(0.2)

    @px.program(paths=size)
    def price(volatility: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        gains = px.map_fn(gain, (index, px.broadcast(volatility)))
        return px.reduce_mean(gains), px.reduce_mean(gains**2)

    stream = px.Stream(at_once=min(size // 16, 20_000))
    index = px.Groups.of_arrays(np.arange(size, dtype=np.int32))
    mean, square = stream.run(price, volatility, index)
    slope = stream.run(jax.grad(lambda v, index: price(v, index)[0]), volatility, index)
    error = math.sqrt((float(square) - float(mean) ** 2) / size)
    exact = math.erf(0.1 / math.sqrt(2))
    exact_slope = math.exp(-0.005) / math.sqrt(2 * math.pi)
    print(f"{size:,} paths of {STEPS} steps, {stream.at_once:,} at once on each; on {jax.device_count()} devices")
    rows = [("price", float(mean), exact), ("its standard error", error, 0.0), ("slope", float(slope), exact_slope)]
    _setting.table(["", "simulated", "by the formula"], rows)
    _setting.plot(chosen.plot, {"price": {0: float(mean), 1: exact}}, "simulated, exact", "price")


if __name__ == "__main__":
    main()
