"""Functions timed side by side: their calls in turns, and what can be said of the difference.

The first call of a function is apart, since it compiles. A function that donates its arguments is given copies in each
call, which are made before the clock starts.
"""

import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from paraxis._core import check as checks
from paraxis.reports import units
from paraxis.reports._page import Page, Section

Verdict = Literal["baseline", "faster", "slower", "as fast", "too noisy", "too few"]
_CERTAIN = 0.99
_ALIKE = 0.05
"""Ratios that are certain to within this of 1 are those of functions that are as fast as each other."""
_MOST_ROUNDS = 200
_LEAST_SAMPLE = 1e-3
"""Seconds that a sample takes at least: of a faster function, several calls are one sample."""
_MOST_CALLS = 1000
_HEAD = ("function", "a call", "half of them", "ratio", "", "first call")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measurements of one function.

    Attributes:
        name: of the function.
        seconds: of a call, in each turn.
        compile_seconds: what the first call took longer than the second: of a function that is compiled, tracing and
            compiling. Near 0 for one that had been compiled before.
        ratio: median of its time divided by the baseline's in the same turn; below 1, it is faster.
        interval: in which the ratio lies with a probability of 99 %; ``None`` if there were too few turns.
        verdict: ``"faster"`` or ``"slower"``: the interval leaves out 1; ``"as fast"``: it lies within 5 % of 1;
            ``"too noisy"``: it is wider, and includes 1; ``"too few"``: there were fewer than eight turns;
            ``"baseline"``.
    """

    name: str
    seconds: tuple[float, ...]
    compile_seconds: float
    ratio: float
    interval: tuple[float, float] | None
    verdict: Verdict

    @property
    def median(self) -> float:
        """Seconds of a call: half of them take longer."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds between which the middle half of the calls lies."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Page):
    """Functions timed side by side; made by :func:`paraxis.compare`.

    It prints as text, a notebook shows it as a table, and :meth:`save` writes that to a file.

    Attributes:
        timings: of each function, in the order given.
        baseline: the name of the function with which the others are compared.
    """

    timings: tuple[Timing, ...]
    baseline: str

    def __getitem__(self, name: str) -> Timing:
        """Return what was measured of one function.

        Raises:
            KeyError: if there is none of that name.
        """
        return {timing.name: timing for timing in self.timings}[name]

    @property
    def _title(self) -> str:
        functions = units.of(len(self.timings), "function")
        return f"{functions}, {units.of(len(self.timings[0].seconds), 'turn')} each, against {self.baseline}"

    def _sections(self) -> Iterator[Section]:
        yield Section("", [_row(timing) for timing in self.timings], _HEAD, has_head=True, most=len(self.timings))


def compare(
    fns: Mapping[str, Callable[..., Any] | tuple[Any, ...]],
    *args: Any,
    baseline: str | None = None,
    seconds: float = 5.0,
    check: bool = False,
    rtol: float = 1e-3,
    atol: float = 1e-6,
) -> Comparison:
    """Run functions in turns, and return how long each takes, with the spread, and whether the difference is certain.

    The first call of each is measured apart, since it compiles. Then they take turns, in another order each time, so
    that what slows the machine down slows down all; they are compared turn by turn. A call ends when its result is
    there: JAX's arrays are waited for. Calls of less than a millisecond are measured several at a time.

    Args:
        fns: functions by name, of NumPy, JAX or anything else; in place of a function, a tuple ``(fn, *args)`` of it
            and its own arguments. One that returns before its result is there, as PyTorch's on a GPU, has to wait.
        *args: what the functions are called with. Each function's first call is given copies of JAX's arrays, and one
            that donates them is given copies each time, which are not part of its time.
        baseline: the name of the function that the others are compared with; ``None``: the first.
        seconds: after which no other turn begins; each function has at least one turn, and at most 200.
        check: whether to raise an error if results differ from the baseline's.
        rtol: how far results may differ, relative to the baseline's.
        atol: how far they may differ besides.

    Returns:
        A :class:`paraxis.reports.Comparison`, which prints as text, and is shown by a notebook.

    Raises:
        TypeError: if there are no functions.
        AssertionError: if results differ with ``check=True``, naming the function and the place.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> x = np.ones((300, 300), np.float32)
        >>> times = px.compare({"numpy": np.sin, "jit": (jax.jit(jnp.sin), jnp.asarray(x))}, x, seconds=0.2, check=True)
        >>> [timing.name for timing in times.timings], times["numpy"].ratio
        (['numpy', 'jit'], 1.0)
    """
    write = "px.compare({'numpy': f, 'jit': jax.jit(f)}, x)"
    if not isinstance(fns, Mapping) or not fns:
        raise TypeError(f"compare: fns must be a dict of functions by name, got {checks.described(fns)}; write {write}")
    checks.one_of("compare", "baseline", baseline, (None, *fns))
    checks.number("compare", "seconds", seconds, above=0, most=1e9, write="seconds=5")
    entrants = []
    for name, entry in fns.items():
        fn: Any = entry[0] if isinstance(entry, tuple) and entry else entry
        given = entry[1:] if isinstance(entry, tuple) else args
        checks.function("compare", f"fns[{name!r}]", fn, write)
        entrants.append(_Entrant(name, fn, given))
    first = next(entrant for entrant in entrants if baseline in (None, entrant.name))
    results = {entrant.name: entrant.start() for entrant in entrants}
    if check:
        for entrant in entrants:
            _check(entrant.name, results[entrant.name], results[first.name], rtol, atol)
    results.clear()
    _take_turns(entrants, seconds)
    return Comparison(tuple(_timing(entrant, first) for entrant in entrants), first.name)


@dataclasses.dataclass
class _Entrant:
    """A function, its arguments, and the seconds of its calls."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    first: float = 0.0
    later: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    donates: bool = False

    def start(self) -> Any:
        """Call it for the first time, and for the second; return the first result."""
        given = _copied(self.args)
        before = time.perf_counter()
        result = jax.block_until_ready(self.fn(*given))
        self.first = time.perf_counter() - before
        self.donates = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(given))
        self.later = self._sample(1)
        return result

    def take_turn(self) -> None:
        """Add one sample."""
        calls = 1 if self.donates else min(max(int(_LEAST_SAMPLE / max(self.later, 1e-9)), 1), _MOST_CALLS)
        self.seconds.append(self._sample(calls))

    def _sample(self, calls: int) -> float:
        given = _copied(self.args) if self.donates else self.args
        before = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(self.fn(*given))
        return (time.perf_counter() - before) / calls


def _copied(args: Any) -> Any:
    return jax.block_until_ready(jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args))


def _take_turns(entrants: Sequence[_Entrant], seconds: float) -> None:
    """Take turns as long as there is time for another round, in another order each; at least one."""
    order, draw = list(entrants), random.Random(0)
    start = time.perf_counter()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # or the garbage of one is collected in the time of another
    try:
        for _ in range(_MOST_ROUNDS):
            begun = time.perf_counter()
            draw.shuffle(order)
            for entrant in order:
                entrant.take_turn()
            now = time.perf_counter()
            if now - start + (now - begun) > seconds:
                break
    finally:
        if was_enabled:
            gc.enable()


def _check(name: str, ours: Any, theirs: Any, rtol: float, atol: float) -> None:
    """Raise an error if results differ."""

    def one(path: Any, a: Any, b: Any) -> None:
        message = f"compare: the result of {name!r}{jax.tree_util.keystr(path)} differs from the baseline's"
        a, b = (np.asarray(x) for x in (a, b))
        if a.dtype.kind == "V":  # of bfloat16 and the like
            a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=message)

    jax.tree_util.tree_map_with_path(one, ours, theirs)


def _timing(entrant: _Entrant, first: _Entrant) -> Timing:
    ratios = [a / b if b else math.inf for a, b in zip(entrant.seconds, first.seconds, strict=True)]
    interval = _interval(ratios)
    return Timing(
        name=entrant.name,
        seconds=tuple(entrant.seconds),
        compile_seconds=max(entrant.first - entrant.later, 0.0),
        ratio=statistics.median(ratios),
        interval=interval,
        verdict="baseline" if entrant is first else _verdict(interval),
    )


def _interval(values: list[float]) -> tuple[float, float] | None:
    """Return where the median lies, by order statistics: half of all values are below it, whatever they are like."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # rank: so many of the smallest, and of the largest, are left out
    while (outside := outside + 2 * math.comb(n, rank) / 2**n) <= 1 - _CERTAIN:
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def _verdict(interval: tuple[float, float] | None) -> Verdict:
    if interval is None:
        return "too few"
    low, high = interval
    if low >= 1 - _ALIKE and high <= 1 + _ALIKE:
        return "as fast"
    if high < 1:
        return "faster"
    return "slower" if low > 1 else "too noisy"


def _row(timing: Timing) -> list[str]:
    low, high = timing.quartiles
    words: dict[Verdict, str] = {
        "baseline": "",
        "faster": f"{_often(1 / timing.ratio)} as fast" if timing.ratio else "faster",
        "slower": f"takes {_often(timing.ratio)} as long",
        "as fast": "as fast",
        "too noisy": "too noisy to tell: give it more seconds=",
        "too few": "too few turns to tell: give it more seconds=",
    }
    return [
        timing.name,
        units.time(timing.median),
        f"{units.time(low)} to {units.time(high)}",
        "" if timing.interval is None or timing.verdict == "baseline" else "{:.3g} to {:.3g}".format(*timing.interval),
        words[timing.verdict],
        f"{units.time(timing.compile_seconds)} longer" if timing.compile_seconds else "",
    ]


def _often(number: float) -> str:
    return f"{number:.3g} ×" if number < 100 else f"{number:,.0f} ×"
