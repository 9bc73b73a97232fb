"""Where a program's axes are known: in it, not outside, and never in another thread's program."""

import contextlib
import functools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import drjax
import jax
import jax.numpy as jnp
import numpy as np
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


def test_a_name_alone_says_nothing_outside_a_program():
    with pytest.raises(px.AxisError, match=r"axis 'clients' is only a name.*@px\.program\(clients=8\)"):
        px.reduce_sum(jnp.zeros(3), "clients")


def test_a_decorator_without_parentheses_is_refused():
    with pytest.raises(px.AxisError, match=r"must be a dict of axes and sizes; write @px\.program\(clients=8\)"):
        px.program(lambda x: x)  # pyright: ignore[reportArgumentType]


def test_a_program_leaves_no_trace_behind_even_when_it_fails():
    @px.program(clients=3)
    def broken(x):
        raise KeyError("inner")

    with pytest.raises(KeyError, match="inner"):
        broken(jnp.zeros(3))
    with pytest.raises(px.AxisError, match="not inside a program"):
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


def test_a_program_mapped_over_the_elements_of_another():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5)).astype(np.float32)

    @px.program(members=5)
    def spread(w, row):
        centred = px.map_fn(lambda w, v: w * v - px.pmean(v, "members"), (px.broadcast(w), row))
        return px.reduce_mean(centred**2)

    @px.program(clients=3)
    def worst(w, x):
        return px.reduce_max(px.map_fn(spread, (px.broadcast(w), x)))

    def oracle(w, x):
        return jnp.max(jnp.mean((w * x - x.mean(1, keepdims=True)) ** 2, axis=1))

    got, want = jax.value_and_grad(worst)(1.3, x), jax.value_and_grad(oracle)(1.3, x)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_program_may_call_itself():
    @px.program(clients=3)
    def power(x, depth: str):
        return px.reduce_sum(px.broadcast(power(x, depth[1:]) if depth else x))

    assert power(1.0, "") == 3
    assert power(1.0, "…" * 3) == 3**4
    assert jax.grad(power)(1.0, "…" * 3) == 3**4


def test_a_program_may_make_programs_of_other_sizes():
    def factorial(n, x):
        @px.program(clients=n)
        def times(x):
            rest = factorial(n - 1, x) if n > 1 else x
            return px.reduce_sum(px.broadcast(rest))

        return times(x)

    assert factorial(5, 1.0) == 120


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


@contextlib.contextmanager
def put_right_afterwards(module):
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def test_programs_in_threads_do_not_mix():
    assert totals_when_all_are_inside(px, [2, 3, 4, 5, 6, 7, 8, 9]) == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")
def test_the_thread_test_can_fail():
    """DrJAX binds its verbs by patching its own module, so the last thread to enter decides for all."""
    with put_right_afterwards(drjax):
        totals = totals_when_all_are_inside(drjax, [2, 3, 4, 5])
    assert len(set(totals)) == 1


@pytest.mark.slow
def test_threads_under_stress():
    """Eight threads make, trace, nest, differentiate and fail programs, yielding at every turn."""

    def pause(rng):
        time.sleep(rng.random() * 2e-3)

    def work(thread):
        rng = random.Random(thread)
        for turn in range(2):
            outer_size, inner_size = rng.randint(2, 9), rng.randint(2, 9)
            name = rng.choice(["clients", "members", "pods"])

            @px.program({name: inner_size})
            def inner(x, rng=rng):
                y = px.broadcast(x)
                pause(rng)
                return px.reduce_sum(px.map_fn(lambda v: v * v, y))

            @px.program(clients=outer_size)
            def outer(x, rng=rng, inner=inner, name=name):
                y = px.broadcast(x)
                pause(rng)
                z = inner(px.reduce_sum(y))
                pause(rng)
                if name != "clients":
                    with pytest.raises(px.AxisError, match=f"no axis '{name}'"):
                        px.reduce_sum(y, name)
                return z + px.reduce_mean(y)

            value, slope = jax.value_and_grad(outer)(1.5)
            expected = (inner_size * (outer_size * 1.5) ** 2 + 1.5, 2 * inner_size * outer_size**2 * 1.5 + 1)
            np.testing.assert_allclose((value, slope), expected, rtol=1e-5, err_msg=f"thread {thread}, turn {turn}")
            with pytest.raises(px.AxisError, match="not inside a program"):
                px.broadcast(1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
