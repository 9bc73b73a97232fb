"""Comparisons by a clock that the functions turn on themselves, and of real functions what is certain of them."""

import math
import random
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._support import axis_on


class Clock:
    """Time passes only where a function says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def takes(self, *seconds: float) -> Callable[..., Any]:
        """A function that takes so long, the last of these from then on."""
        left: Iterator[float] = iter(seconds)
        return self.draws(lambda: next(left, seconds[-1]))

    def draws(self, draw: Callable[[], float]) -> Callable[..., Any]:
        def fn(*args: Any) -> None:
            self.now += draw()

        return fn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_compare_gives_medians_of_rounds_and_compiling_apart(clock: Clock) -> None:
    slow, fast = clock.takes(7.0, 2.0), clock.takes(1.5, 0.5)
    found = px.compare({"slow": slow, "fast": fast}, seconds=30)
    assert [timing.median for timing in found.timings] == pytest.approx([2.0, 0.5])
    assert [timing.compile_seconds for timing in found.timings] == pytest.approx([5.0, 1.0])
    assert (found.baseline, found["fast"].ratio, found["fast"].verdict) == ("slow", pytest.approx(0.25), "faster")
    other = px.compare({"slow": slow, "fast": fast}, seconds=30, baseline="fast")
    assert (other["slow"].ratio, other["slow"].verdict, other["fast"].verdict) == (4.0, "slower", "baseline")
    assert "4 × as fast" in str(found)
    assert "takes 4 × as long" in str(other)


def test_compare_begins_no_round_that_would_end_after_the_time(clock: Clock) -> None:
    found = px.compare({"a": clock.takes(2.0), "b": clock.takes(1.0)}, seconds=10)
    assert len(found["a"].seconds) == 3  # of 3 s each; the first two calls of each are before
    assert len(px.compare({"a": clock.takes(50.0)}, seconds=10)["a"].seconds) == 1
    assert len(px.compare({"a": clock.takes(1e-3)}, seconds=10)["a"].seconds) == 200
    assert (found["b"].verdict, found["b"].interval) == ("uncertain", None)


def test_compare_calls_what_is_fast_several_times_for_a_sample(clock: Clock) -> None:
    calls = []
    tick = clock.takes(1e-5)
    assert px.compare({"f": lambda: calls.append(tick())}, seconds=10)["f"].median == pytest.approx(1e-5)
    assert len(calls) == pytest.approx(200 * 100, rel=0.02)


NOISE = {  # how much a round varies, how much slower the second is: what can be told of 60 rounds
    "as fast": (0.01, 1.0),
    "slower": (0.8, 5.0),
    "faster": (0.8, 0.2),
    "uncertain": (0.8, 1.1),
}


@pytest.mark.parametrize("verdict", NOISE)
@pytest.mark.parametrize("seed", [0, 1])
def test_compare_says_when_nothing_is_certain(clock: Clock, verdict: str, seed: int) -> None:
    noise, ratio = NOISE[verdict]
    draw = random.Random(seed)
    a = clock.draws(lambda: math.exp(draw.gauss(0, noise)))
    b = clock.draws(lambda: ratio * math.exp(draw.gauss(0, noise)))
    found = px.compare({"a": a, "b": b}, seconds=60 * (1 + ratio))
    assert found["b"].verdict == verdict
    assert ("uncertain: give it more seconds=" in str(found)) == (verdict == "uncertain")


def test_compare_has_the_median_in_its_interval_as_often_as_it_says(clock: Clock) -> None:
    """Of 300 comparisons of a function with itself, 99 in 100 intervals include 1."""
    draw = random.Random(5)
    same = clock.draws(lambda: math.exp(draw.gauss(0, 0.5)))
    intervals = [px.compare({"a": same, "b": same}, seconds=50)["b"].interval for _ in range(300)]
    missed = sum(not (i is not None and i[0] <= 1 <= i[1]) for i in intervals)
    assert missed <= 9


def test_compare_says_whether_numpy_jax_and_jit_agree() -> None:
    x = np.linspace(0, 1, 2_500, dtype=np.float32).reshape(50, 50)
    jitted = jax.jit(lambda x: jnp.sin(x) @ x)
    fns = {"numpy": lambda x: np.sin(x) @ x, "jax": lambda x: jnp.sin(x) @ x, "jit": (jitted, jnp.asarray(x))}
    found = px.compare(fns, x, check=True, seconds=0.1)
    assert [timing.name for timing in found.timings] == ["numpy", "jax", "jit"]
    assert found["jit"].compile_seconds > 0
    with pytest.raises(AssertionError, match=r"compare: 'cos': result\['a'\] differs from that of the baseline"):
        px.compare({"sin": lambda x: {"a": np.sin(x)}, "cos": lambda x: {"a": np.cos(x)}}, x, check=True, seconds=0.1)
    half = {"a": lambda x: x, "b": lambda x: x + 1e-3}
    assert px.compare(half, jnp.ones(3, jnp.bfloat16), check=True, rtol=0.01, seconds=0.01).baseline == "a"


def test_compare_gives_copies_to_a_function_that_donates() -> None:
    x = jnp.ones(1000)
    donates = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert px.compare({"donates": donates, "keeps": jax.jit(jnp.sin)}, x, seconds=0.1)["donates"].seconds
    assert not x.is_deleted()


def test_compare_times_lowerings_and_tells_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vmap, a device turns as often as the slowest of its three elements asks; one by one, as often as all do."""
    count = lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)  # noqa: E731
    lengths = np.array([5, 1, 2, 7, 9, 3, 4, 1, 1, 1, 6])
    table = np.append(lengths, 0).reshape(4, 3)
    ways: list[Any] = []
    spy = lambda *args, lowering: ways.append((lowering, args[2].at_once)) or px.map_fn(*args, lowering=lowering)  # noqa: E731
    monkeypatch.setitem(px.compare.__globals__, "verbs", types.SimpleNamespace(map_fn=spy))
    found = px.compare(count, jnp.asarray(lengths), axis_on(4, 11), check=True, seconds=0.05)
    assert ways == [("vmap", None), ("vmap", 1), ("unroll", None), ("lanes", None), ("lanes", 1)]
    one_by_one = dict.fromkeys(("at_once=1", "unroll", "lanes, at_once=1"), table.sum(1).max())
    turns = {timing.name: timing.turns for timing in found.timings}
    assert turns == one_by_one | dict.fromkeys(("vmap", "lanes"), table.max())
    assert [line.split()[-1] for line in str(found).splitlines()[2:]] == ["turns", *map(str, turns.values())]
    plain = px.compare(jnp.sin, jnp.ones(100), axis_on(1, 100), seconds=0.05)  # too many to unroll, and no loop
    assert [(timing.name, timing.turns) for timing in plain.timings] == [("vmap", None), ("at_once=1", None)]
