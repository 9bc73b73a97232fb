"""Run by ``test_borders.py``: one element of each call raises, or takes longer than XLA waits for other devices."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from paraxis.testing import simulate_devices

simulate_devices(8)
import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import paraxis as px  # noqa: E402


def by_host(act: Callable[[], Any]) -> Callable[[jax.Array], jax.Array]:
    def host(x: Any) -> np.ndarray:
        if x == 2:
            act()
        return np.asarray(x)

    return lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), x, vmap_method="sequential")


def no_twos() -> None:
    raise RuntimeError("no twos")


BODIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "error_if": lambda x: eqx.error_if(x, x == 2, "no twos"),
    "callback": by_host(no_twos),
    "sleep": by_host(lambda: time.sleep(50)),
}
body = BODIES[sys.argv[1]]


def mapped(size: int, at_once: int | None = None) -> tuple[Any, px.Axis]:
    axis = px.Axis("rows", size, at_once=at_once)
    return px.map_fn(body, jnp.arange(float(size)), axis), axis


SUM = px.program(rows=16)(lambda x: px.reduce_sum(px.map_fn(body, x)))
CALLS: dict[str, Callable[[], Any]] = {
    "map_fn of 11": lambda: mapped(11)[0],
    "map_fn of 3": lambda: mapped(3)[0],
    "sum of 16": lambda: px.reduce_sum(*mapped(16)),
    "pmap of 11": lambda: px.pmap(body)(jnp.arange(11.0)).sum(),
    "pmap of 16": lambda: px.pmap(body)(jnp.arange(16.0)).sum(),
    "program of 16": lambda: SUM(jnp.arange(16.0)),
    "stream of 16": lambda: px.Stream(at_once=2).run(SUM, px.Groups.of_arrays(np.arange(16.0, dtype="float32"))),
}
for name in sys.argv[2:] or CALLS:
    try:
        found: Any = np.asarray(CALLS[name]()).tolist()
    except Exception as error:
        found = "no twos" if "no twos" in str(error) else repr(error)
    sys.stdout.write(json.dumps([name, found]) + "\n")
    sys.stdout.flush()
