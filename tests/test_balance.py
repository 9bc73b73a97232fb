"""``px.balance`` counts what each element needs, and what devices do where elements wait for each other."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import axis_on

LENGTHS = np.random.default_rng(3).geometric(0.2, (12, 5)).astype("int32")


def nest(lengths: jax.Array) -> jax.Array:
    def outer(total: jax.Array, length: jax.Array) -> tuple[jax.Array, None]:
        inner = lambda s: (s[0] + 1, s[1] + 1.0)  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < length, inner, (0, total))[1], None

    return jax.lax.scan(outer, jnp.zeros(()), lengths)[0]


@pytest.mark.parametrize("layout", ["blocks", "cyclic"])
def test_balance_counts_turns_as_numpy_does(layout: Any) -> None:
    """By vmap, each inner loop of a device turns as often as the slowest of its elements asks."""
    found = px.balance(nest, jnp.asarray(LENGTHS), axis_on(5, 12, layout=layout), widths=[3, 1])
    needed, numbers = LENGTHS.sum(1), np.arange(15)
    groups = {"blocks": numbers.reshape(5, 3), "cyclic": numbers.reshape(3, 5).T}
    by_device = {name: [group[group < 12] for group in table] for name, table in groups.items()}
    own = by_device[layout]
    np.testing.assert_array_equal(found.turns, needed)
    in_step = [LENGTHS[group].max(0, initial=0).sum() for group in own]
    one_by_one = max(needed[group].sum() for group in own)
    most = {"at_once=1": one_by_one, "vmap": max(in_step), "lanes": needed.max(), "lanes, at_once=1": one_by_one}
    assert found.most == most
    assert found.waste["vmap"] == pytest.approx(3 * sum(in_step) / needed.sum())
    assert found.waste["lanes"] < found.waste["vmap"]
    assert found.waste["lanes, at_once=1"] == found.waste["at_once=1"] == 1
    for name, table in by_device.items():
        sums = [needed[group].sum() for group in table]
        assert found.devices[name] == pytest.approx(max(sums) / np.mean(sums))


def test_balance_prints_what_to_write(tmp_path: Path) -> None:
    count = lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)  # noqa: E731
    found = px.balance(count, jnp.arange(1, 65) ** 3, axis_on(4, 64))
    assert "in cyclic\n  write px.map_fn(…, px.Axis('rows', 64, " in str(found)
    assert 'at_once=4, layout="cyclic"), lowering="lanes")' in found.advice
    for few, end in ((jnp.full(64, 3), "64)"), (jnp.arange(1, 65), "64); on CPU, try at_once=1 too")):
        assert px.balance(count, few, axis_on(4, 64)).advice.endswith(f"leave the lowering out, px.Axis('rows', {end}")
    found.plot(tmp_path / "turns.png")
    assert (tmp_path / "turns.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(px.AxisError, match="none waits for another"):
        px.balance(jnp.sin, jnp.ones(8), axis_on(1, 8))
    with pytest.raises(ValueError, match="widths must be an integer of at least 1"):
        px.balance(count, jnp.ones(8), axis_on(1, 8), widths=[0])
