"""Where a program's axes are known: in it, not outside, and never in another thread's program."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import paraxis as px

VERBS = {
    "broadcast": px.broadcast,
    "map_fn": functools.partial(px.map_fn, jnp.sin),
    "reduce_sum": px.reduce_sum,
    "reduce_mean": px.reduce_mean,
    "reduce_weighted_mean": lambda x: px.reduce_weighted_mean(x, x),
    "reduce_max": px.reduce_max,
    "reduce_min": px.reduce_min,
    "reduce_any": px.reduce_any,
    "reduce_all": px.reduce_all,
    "scatter": px.scatter,
    "gather": px.gather,
    "keys": px.keys,
}


@pytest.mark.parametrize("verb", VERBS)
def test_outside_a_program_both_ways_to_write_it_are_said(verb):
    both = rf"^{verb}: no axis was given.*px\.{verb}\(…, px\.Axis\('clients', 8\)\).*@px\.program\(clients=8\)"
    with pytest.raises(px.AxisError, match=both):
        VERBS[verb](jnp.zeros(3))


def test_a_decorator_without_parentheses_is_refused():
    with pytest.raises(px.AxisError, match=r"must be a dict of axes and sizes; write @px\.program\(clients=8\)"):
        px.program(lambda x: x)  # pyright: ignore[reportArgumentType]


def test_a_program_leaves_no_trace_behind_even_when_it_fails():
    @px.program(clients=3)
    def broken(x):
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        broken(jnp.zeros(3))
    with pytest.raises(px.AxisError, match="in no program"):
        px.reduce_sum(jnp.zeros(3))


def test_a_program_called_in_another_has_its_own_axes():
    @px.program(members=2)
    def inner(x):
        return px.reduce_sum(px.broadcast(x))

    @px.program(clients=3)
    def outer(x):
        before = px.reduce_sum(px.broadcast(x))
        return before + inner(before) + px.reduce_sum(px.broadcast(x))

    assert outer(1.0) == 3 + 2 * 3 + 3
    assert jax.grad(outer)(1.0) == 12


# --- threads ---------------------------------------------------------------------------------------------------------


def totals_when_all_are_inside(library, sizes):
    """Run one program per size, each in its thread, all inside at the same moment: sum of as many ones as elements."""
    everyone = threading.Barrier(len(sizes), timeout=60)

    def run(size):
        @library.program(placements={"clients": size})
        def total(x):
            everyone.wait()
            y = library.reduce_sum(library.broadcast(x))
            everyone.wait()
            return y

        return float(total(1.0))

    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(run, sizes))


def test_programs_in_threads_do_not_mix():
    assert totals_when_all_are_inside(px, [2, 3, 4, 5, 6, 7, 8, 9]) == [2, 3, 4, 5, 6, 7, 8, 9]
