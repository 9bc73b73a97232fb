"""Functions timed side by side, round by round, and whether the difference is certain."""

import contextlib
import dataclasses
import functools
import math
import random
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np

from paraxis._core import placing, verbs
from paraxis._core.placing import Axis
from paraxis.errors import AxisError
from paraxis.reports import units
from paraxis.reports._balance import balance
from paraxis.reports._page import Page, Section

Verdict = Literal["baseline", "faster", "slower", "as fast", "uncertain"]
_CERTAIN = 0.99
_ALIKE = 0.05  # functions are as fast as each other if their ratio is certain to be within this of 1
_LEAST_SAMPLE, _MOST_CALLS = 1e-3, 1000  # of a function that takes fewer seconds, several calls are one sample
_MOST_ROUNDS = 200
_MOST_UNROLLED = 8  # elements of a device: each is compiled by itself
_HEAD = ("function", "a call", "ratio", "", "first call", "turns")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measurements of one function.

    Attributes:
        name: of the function.
        seconds: of a call, in each round.
        compile_seconds: what the first call took longer than the second, such as for tracing and compiling.
        ratio: median of its time divided by the baseline's in the same round; below 1, it is faster.
        interval: in which the ratio lies with a probability of 99 %; ``None`` if there were too few rounds.
        verdict: ``"faster"`` or ``"slower"``: the interval leaves out 1; ``"as fast"``: it lies within 5 % of 1;
            ``"uncertain"``: neither, or there is none; ``"baseline"``.
        turns: of a lowering's loops, on the device that has most, as :func:`balance` counts them; ``None``: uncounted.
    """

    name: str
    seconds: tuple[float, ...]
    compile_seconds: float
    ratio: float
    interval: tuple[float, float] | None
    verdict: Verdict
    turns: int | None = None

    @property
    def median(self) -> float:
        """Seconds of a call: half of them take longer."""
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Page):
    """Functions timed side by side; made by :func:`paraxis.compare`.

    Attributes:
        timings: of each function, in the order given.
        baseline: the name of the function with which the others are compared.
    """

    timings: tuple[Timing, ...]
    baseline: str

    def __getitem__(self, name: str) -> Timing:
        return {timing.name: timing for timing in self.timings}[name]

    @property
    def _title(self) -> str:
        functions = units.of(len(self.timings), "function")
        return f"{functions}, {units.of(len(self.timings[0].seconds), 'round')}, against {self.baseline}"

    def _sections(self) -> Iterator[Section]:
        yield Section("", [_row(timing) for timing in self.timings], _HEAD, has_head=True, most=len(self.timings))


def compare(
    fns: Mapping[str, Callable[..., Any] | tuple[Any, ...]] | Callable[..., Any],
    *args: Any,
    baseline: str | None = None,
    seconds: float = 5.0,
    check: bool = False,
    rtol: float = 1e-3,
    atol: float = 1e-6,
) -> Comparison:
    """Time functions, or the lowerings of one, side by side, and return whether the difference is certain.

    The first call of each is timed by itself, since it compiles. Then each round calls all of them, in another order,
    so that what slows the machine down slows down all; ratios are of a round. A call ends when its result is there:
    JAX's arrays are waited for. Calls of less than a millisecond are measured several at a time.

    Args:
        fns: functions by name, of NumPy, JAX or anything else; in place of a function, a tuple ``(fn, *args)`` of it
            and its own arguments. One that returns before its result is there, as PyTorch's on a GPU, has to wait. Or
            one function of an element: ``compare(fn, args, axis)`` times the lowerings of ``map_fn(fn, args, axis)``.
        *args: what the functions are called with. One that donates them is given copies, outside of its time.
        baseline: the name of the function that the others are compared with; ``None``: the first.
        seconds: of rounds, first calls not counted: then no other begins; there is at least one, and at most 200.
        check: whether to raise an error if results differ from the baseline's; integers have to be equal.
        rtol: how far results may differ, relative to the baseline's.
        atol: how far they may differ besides.

    Raises:
        AssertionError: if results differ with ``check=True``, naming the function and the place.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> x = np.ones((300, 300), np.float32)
        >>> times = px.compare({"numpy": np.sin, "jit": (jax.jit(jnp.sin), jnp.asarray(x))}, x, seconds=0.2, check=True)
        >>> [timing.name for timing in times.timings], times["numpy"].ratio
        (['numpy', 'jit'], 1.0)
        >>> count = lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)
        >>> times = px.compare(count, jnp.array([1, 2, 9, 4]), px.Axis("runs", 4), seconds=0.2)
        >>> [timing.name for timing in times.timings]
        ['vmap', 'at_once=1', 'unroll', 'lanes']
    """
    fns, args, turns = (fns, args, {}) if isinstance(fns, Mapping) else _lowerings(fns, *args)
    entrants = {name: _Entrant(*(fn if isinstance(fn, tuple) else (fn, *args))) for name, fn in fns.items()}
    first = next(iter(fns)) if baseline is None else baseline
    for name, entrant in entrants.items() if check else ():
        assert_alike(f"compare: {name!r}", "the baseline", entrant.result, entrants[first].result, rtol, atol)
    order, draw, begin = [*entrants.values()], random.Random(0), time.perf_counter()
    for entrant in order:
        entrant.result = None
    for _ in range(_MOST_ROUNDS):
        begun = time.perf_counter()
        draw.shuffle(order)
        for entrant in order:
            entrant.seconds.append(entrant.sample(entrant.calls))
        now = time.perf_counter()
        if now - begin + (now - begun) > seconds:  # there is no time for another round
            break
    timings = (_timing(name, x, entrants[first], turns.get(name)) for name, x in entrants.items())
    return Comparison(tuple(timings), first)


def _lowerings(fn: Callable[..., Any], args: Any, axis: Axis) -> tuple[dict[str, Any], Any, dict[str, int]]:
    """Return the maps of a function by their lowerings, their arguments, and the turns of those that have loops."""
    turns, few = dict[str, int](), placing.place(axis).num_local <= _MOST_UNROLLED
    with contextlib.suppress(AxisError, NotImplementedError):  # elements that leave all loops together
        turns = balance(fn, args, axis).most
        turns |= {"unroll": turns["at_once=1"]} if few else {}

    def lowered(name: str) -> Callable[..., Any]:
        lowering, _, width = name.partition("at_once=")
        each: Any = dataclasses.replace(axis, at_once=int(width) if width else None)
        how: Any = lowering.removesuffix(", ") or "vmap"
        return jax.jit(lambda args: verbs.map_fn(fn, args, each, lowering=how))

    names = dict.fromkeys(("vmap", "at_once=1", *["unroll"] * few, *turns))
    return {name: lowered(name) for name in names}, (args,), turns


class _Entrant:
    """A function to be timed: its first two calls are made here, since the first one compiles."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self._fn, self._args = fn, args
        self.seconds: list[float] = []
        inputs = _copied(args)
        begin = time.perf_counter()
        self.result = jax.block_until_ready(fn(*inputs))
        first = time.perf_counter() - begin
        self._donates = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(inputs))
        second = self.sample(1)
        self.compile_seconds = max(first - second, 0.0)
        self.calls = 1 if self._donates else min(max(int(_LEAST_SAMPLE / max(second, 1e-9)), 1), _MOST_CALLS)

    def sample(self, calls: int) -> float:
        """Return the seconds of a call, as the mean of some; garbage is not collected within them."""
        run = functools.partial(self._fn, *(_copied(self._args) if self._donates else self._args))
        return timeit.timeit(lambda: jax.block_until_ready(run()), timer=time.perf_counter, number=calls) / calls


def _copied(args: Any) -> Any:
    return jax.block_until_ready(jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args))


def assert_alike(what: str, other: str, ours: Any, theirs: Any, rtol: float, atol: float) -> None:
    """Raise an error if results differ, integers by anything, with the path of the leaf."""

    def one(path: Any, a: Any, b: Any) -> None:
        a, b = (x.astype(np.float32) if x.dtype.kind == "V" else x for x in map(np.asarray, (a, b)))  # as bfloat16
        message = f"{what}: result{jax.tree_util.keystr(path)} differs from that of {other}"
        is_exact = a.dtype.kind in "biu" and b.dtype.kind in "biu"
        np.testing.assert_allclose(a, b, rtol * (not is_exact), atol * (not is_exact), err_msg=message)

    jax.tree_util.tree_map_with_path(one, ours, theirs)


def _timing(name: str, entrant: _Entrant, first: _Entrant, turns: int | None) -> Timing:
    ratios = sorted(a / b if b else math.inf for a, b in zip(entrant.seconds, first.seconds, strict=True))
    outside, rank, n = 0.0, 0, len(ratios)
    while (outside := outside + 2 * math.comb(n, rank) / 2**n) <= 1 - _CERTAIN:
        rank += 1  # so many of the smallest, and of the largest, are left out: half of all are below the median
    interval = (ratios[rank - 1], ratios[n - rank]) if rank else None
    low, high = interval or (0, math.inf)
    verdicts: dict[Verdict, bool] = {
        "baseline": entrant is first,
        "as fast": low >= 1 - _ALIKE and high <= 1 + _ALIKE,
        "slower": low > 1,
        "faster": high < 1,
        "uncertain": True,
    }
    verdict: Verdict = next(word for word, holds in verdicts.items() if holds)
    ratio = statistics.median(ratios)
    return Timing(name, tuple(entrant.seconds), entrant.compile_seconds, ratio, interval, verdict, turns)


def _row(timing: Timing) -> list[str]:
    often = 1 / timing.ratio if timing.verdict == "faster" and timing.ratio else timing.ratio
    times = f"{often:.3g} ×" if often < 100 else f"{often:,.0f} ×"
    words: dict[Verdict, str] = {
        "baseline": "",
        "faster": f"{times} as fast",
        "slower": f"takes {times} as long",
        "uncertain": "uncertain: give it more seconds=",
    }
    return [
        timing.name,
        units.time(timing.median),
        "" if timing.interval is None or timing.verdict == "baseline" else "{:.3g} to {:.3g}".format(*timing.interval),
        words.get(timing.verdict, timing.verdict),
        f"{units.time(timing.compile_seconds)} longer" if timing.compile_seconds else "",
        "" if timing.turns is None else f"{timing.turns:,}",
    ]
