"""No public face: a program for a GPU, of which CPUs compile none, has marks on what has effects."""

import re

import jax
import numpy as np
import pytest
from jax import lax

import paraxis as px
from paraxis._jax import jax_api
from tests._support import axis_on


def test_loops_and_branches_with_effects_are_told_apart_in_the_compiled_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA's compiler for GPUs takes those for one that differ in what is called in loops and branches inside of them.

    A loop bears its mark; of branches, what chooses between them does, as they need not give anything.
    """
    axis, x, seen = axis_on(2, 3), np.arange(3, dtype=np.float32), []

    def noted(kind: str, x: jax.Array) -> jax.Array:
        def note(x: jax.Array) -> None:
            jax.debug.callback(lambda x: seen.append((kind, float(x))), x)

        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            lax.cond(x > 1, note, lambda x: None, x)
            lax.cond(True, lambda x: None, note, x)
            return x + px.psum(x, axis), None

        return lax.scan(turn, x, None, length=2)[0]

    def both(x: jax.Array) -> jax.Array:
        return px.map_fn(lambda x: noted("one", x) + noted("two", x), x, axis)

    monkeypatch.setattr(jax_api, "_MERGING", set[str]())
    plain = jax.jit(both).lower(x).as_text()
    assert "px_effect" not in plain
    monkeypatch.setattr(jax_api, "_MERGING", {"cpu", "cuda"})
    fn = jax.jit(lambda x: both(x))
    text = fn.lower(x).as_text()
    loops, choices = (
        re.findall(rf'stablehlo\.{name}[^\n]*px_effect = "(.+?)"', text) for name in ("while", "optimization_barrier")
    )
    assert len(loops) >= 2
    assert len(choices) >= 2
    assert len({*loops, *choices}) == len(loops) + len(choices)
    np.testing.assert_array_equal(fn(x), 2 * (x + 3 + 12))
    jax.effects_barrier()
    expected = [(kind, number) for kind in ("one", "two") for number in (2.0, 3.0, 4.0, 5.0)]
    assert sorted(seen) == expected
