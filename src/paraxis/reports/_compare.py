"""Functions timed side by side: their calls in turns, and what can be said of the difference."""

import dataclasses
import io
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis._calls.extras import needed
from paraxis._host import files, threads
from paraxis.reports import _as_html, _as_text, _jitted, _turns, units
from paraxis.reports._page import Page

Verdict = Literal["baseline", "faster", "slower", "as fast", "too noisy", "too few"]
_CERTAIN = 0.99
_ALIKE = 0.05
"""Ratios that are certain to within this of 1 are those of functions that are as fast as each other."""
_HEAD = ("function", "a call", "half of them", "ratio", "", "first call", "memory")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measurements of one function.

    Attributes:
        name: of the function.
        seconds: of a call, in each turn.
        compile_seconds: what the first call took longer than the second: of a function that is compiled, tracing and
            compiling. Near 0 for one that had been compiled before.
        memory: bytes that a call needs beside its arguments, on one device: of a ``jax.jit`` function as its compiler
            says, of one from NumPy's arrays to NumPy's arrays as Python says; ``None``: it cannot be told.
        ratio: median of its time divided by the baseline's in the same turn; below 1, it is faster.
        interval: in which the ratio lies with a probability of 99 %; ``None`` if there were too few turns.
        verdict: ``"faster"`` or ``"slower"``: the interval leaves out 1; ``"as fast"``: it lies within 5 % of 1;
            ``"too noisy"``: it is wider, and includes 1; ``"too few"``: there were fewer than eight turns;
            ``"baseline"``.
        copies_host_arrays: whether it is compiled by JAX and its arguments are NumPy's, so that each call copies them.
        uses_up: whether it donates or changes its arguments, of which each call is then given copies.
        threads: with how many threads PyTorch computes, if it returns PyTorch's arrays; ``None``: it does not.
    """

    name: str
    seconds: tuple[float, ...]
    compile_seconds: float
    memory: int | None
    ratio: float
    interval: tuple[float, float] | None
    verdict: Verdict
    copies_host_arrays: bool = False
    uses_up: bool = False
    threads: int | None = None

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

    It prints as text, a notebook shows it with bars, :meth:`save` writes these to a file, and :meth:`plot` draws it.

    Attributes:
        timings: of each function, in the order given.
        baseline: the name of the function with which the others are compared.
    """

    timings: tuple[Timing, ...]
    baseline: str

    def __getitem__(self, name: str) -> Timing:
        """Return what was measured of one function.

        Raises:
            ValueError: if there is none of that name.
        """
        arguments.one_of("Comparison", "name", name, tuple(timing.name for timing in self.timings))
        return next(timing for timing in self.timings if timing.name == name)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the remarks on the numbers."""
        return tuple(_notes(self))

    @property
    def _title(self) -> str:
        functions = units.of(len(self.timings), "function")
        return f"{functions}, {units.of(len(self.timings[0].seconds), 'turn')} each, against {self.baseline}"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        table = _as_text.table([_HEAD, *map(_row, self.timings)], len(self.timings) + 1)
        return "\n".join(line.rstrip() for line in [self._title, "", *table, *self.notes])

    def _parts(self) -> Iterator[str]:
        yield html.table(_HEAD, [_row(timing) for timing in self.timings])
        yield _bars(self.timings)
        if self.notes:
            yield "".join(map(html.note, self.notes))

    @arguments.named()
    def plot(self, path: str | Path | None = None) -> Any:
        """Draw a box for each function: the middle half of its calls, their median, and the fastest and the slowest.

        Args:
            path: of a file to write, ``.png``, ``.svg`` or ``.pdf``; ``None``: none. One that is there is replaced.

        Returns:
            matplotlib's figure, which a notebook shows; it is its own, and not one of ``pyplot``.

        Raises:
            ModuleNotFoundError: without matplotlib, saying how to install it.
            ValueError: if ``path`` has another ending.
            OSError: if it cannot be written.

        Example:
            >>> import numpy as np, os, paraxis as px, tempfile
            >>> found = px.compare({"sin": np.sin, "cos": np.cos}, np.ones(10), seconds=0.1)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     figure = found.plot(os.path.join(folder, "times.png"))
            ...     os.listdir(folder)
            ['times.png']
        """
        ending = ""
        if path is not None:
            arguments.path("plot", "path", path, write="path='times.png'")
            ending = Path(path).suffix.lower().removeprefix(".")
            if ending not in ("png", "svg", "pdf"):
                raise ValueError(
                    f"plot: path must end in .png, .svg or .pdf, got {str(path)!r}; write path='times.png'"
                )
        with needed("Comparison.plot", "fit"):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(7, 0.8 + 0.5 * len(self.timings)), layout="constrained")
        axes = figure.subplots()
        axes.boxplot([t.seconds for t in self.timings], orientation="horizontal", whis=(0, 100))
        axes.set_yticks(range(1, len(self.timings) + 1), [timing.name for timing in self.timings])
        axes.invert_yaxis()
        axes.set(xlabel="seconds of a call", xscale="log")
        axes.grid(axis="x", alpha=0.3)
        if path is not None:
            drawn = io.BytesIO()
            figure.savefig(drawn, format=ending, dpi=120)
            with files.replaced(Path(path)) as file:
                file.write(drawn.getvalue())
        return figure


@arguments.named()
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
    there, also one of JAX or of PyTorch on a GPU. Calls of less than a millisecond are measured several at a time.

    Args:
        fns: functions by name, of NumPy, JAX, PyTorch or anything else; in place of a function, a tuple ``(fn, *args)``
            of it and its own arguments.
        *args: what the functions are called with. Each function's first call is given copies of the arrays, and one
            that donates them or writes to them is given copies each time, which are not part of its time.
        baseline: the name of the function that the others are compared with; ``None``: the first.
        seconds: after which no other turn begins; each function has at least one turn, and at most 200.
        check: whether to raise an error if results differ from the baseline's.
        rtol: how far results may differ, relative to the baseline's.
        atol: how far they may differ besides.

    Returns:
        A :class:`paraxis.reports.Comparison`, which prints as text, is drawn by a notebook, and has ``plot``.

    Raises:
        TypeError: if there are no functions, or one returns a generator, which has done nothing yet.
        ValueError: if an option is none, or results differ with ``check=True``, naming the function and the place.
        Exception: what a function raises, with a note that names it.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, paraxis as px
        >>> x = np.ones((300, 300), np.float32)
        >>> times = px.compare({"numpy": np.sin, "jit": (jax.jit(jnp.sin), jnp.asarray(x))}, x, seconds=0.2, check=True)
        >>> [timing.name for timing in times.timings], times["numpy"].ratio, times["jit"].memory
        (['numpy', 'jit'], 1.0, 360000)
    """
    entrants = _entrants(fns, args)
    arguments.one_of("compare", "baseline", baseline, (None, *fns))
    arguments.number("compare", "seconds", seconds, above=0, finite=True, unit="seconds", write="seconds=5")
    arguments.flag("compare", "check", check)
    for name, value in (("rtol", rtol), ("atol", atol)):
        arguments.number("compare", name, value, least=0, write=f"{name}=1e-3")
    first = next(entrant for entrant in entrants if baseline in (None, entrant.name))
    for entrant in entrants:
        entrant.start()
    if check:
        for entrant in entrants:
            _check(entrant, first, float(rtol), float(atol))
    for entrant in entrants:
        entrant.look_at_memory()
        entrant.result = None
    _turns.run(entrants, float(seconds))
    return Comparison(tuple(_timing(entrant, first) for entrant in entrants), first.name)


def _entrants(fns: Any, args: tuple[Any, ...]) -> list[_turns.Entrant]:
    write = "px.compare({'numpy': f, 'jit': jax.jit(f)}, x)"
    if not isinstance(fns, Mapping) or not fns or not all(isinstance(name, str) for name in fns):
        got = arguments.described(fns)
        raise TypeError(f"compare: fns must be a dictionary of functions by name, got {got}; write {write}")
    found = []
    for name, entry in fns.items():
        fn: Any = entry[0] if isinstance(entry, tuple) and entry else entry
        given = entry[1:] if isinstance(entry, tuple) else args
        arguments.function("compare", f"fns[{name!r}]", fn, write)
        for leaf in jax.tree.leaves(given):
            if getattr(leaf, "is_meta", False):
                write = "torch.ones_like(x, device='cpu')"
                raise TypeError(f"compare: an argument in args of {name!r} is on PyTorch's meta device; write {write}")
            if isinstance(leaf, jax.ShapeDtypeStruct) or arguments.is_traced(leaf) or _is_deleted(leaf):
                what = arguments.why_not(leaf) or "must be known, not traced; write px.compare outside of jax.jit"
                raise TypeError(f"compare: an argument in args of {name!r} {what}")
        found.append(_turns.Entrant(name, fn, given))
    return found


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _check(entrant: _turns.Entrant, first: _turns.Entrant, rtol: float, atol: float) -> None:
    """Raise an error if results differ."""
    (ours, structure), (theirs, wanted) = (jax.tree_util.tree_flatten_with_path(x.result) for x in (entrant, first))
    who = f"compare: fns[{entrant.name!r}] must return what {first.name!r} does; its result"
    if structure != wanted:
        raise ValueError(f"{who} is {structure}, expected {wanted}; write check=False to compare it all the same")
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        a, b = (_turns.as_numpy(x) for x in (one, other))
        at = jax.tree_util.keystr(path)
        if a.shape != b.shape:
            raise ValueError(f"{who}{at} has the shape {a.shape}, expected {b.shape}; write check=False to allow it")
        if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
            if not np.array_equal(a, b):
                raise ValueError(f"{who}{at} is {arguments.described(one)}, expected {arguments.described(other)}")
        elif not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            far = np.nanmax(np.abs(a.astype(np.complex128) - b.astype(np.complex128)))
            raise ValueError(
                f"{who}{at} differs by up to {far:.3g} from values of up to {np.nanmax(np.abs(b)):.3g}, more than "
                f"rtol={rtol:g} and atol={atol:g} allow; write rtol=… if that is rounding"
            )


def _timing(entrant: _turns.Entrant, first: _turns.Entrant) -> Timing:
    ratios = [a / b if b else math.inf for a, b in zip(entrant.seconds, first.seconds, strict=True)]
    interval = _interval(ratios)
    leaves = jax.tree.leaves(entrant.args)
    return Timing(
        name=entrant.name,
        seconds=tuple(entrant.seconds),
        compile_seconds=max(entrant.first - entrant.later, 0.0),
        memory=entrant.memory,
        ratio=statistics.median(ratios),
        interval=interval,
        verdict="baseline" if entrant is first else _verdict(interval),
        copies_host_arrays=_jitted.is_one(entrant.fn) and any(isinstance(x, np.ndarray) for x in leaves),
        uses_up=entrant.uses_up,
        threads=entrant.threads,
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


# --- shown ------------------------------------------------------------------------------------------------------------


def _row(timing: Timing) -> list[str]:
    low, high = timing.quartiles
    words: dict[Verdict, str] = {
        "baseline": "",
        "faster": f"{_often(1 / timing.ratio)} as fast" if timing.ratio else "faster",
        "slower": f"takes {_often(timing.ratio)} as long",
        "as fast": "as fast",
        "too noisy": "too noisy to tell",
        "too few": "too few turns to tell",
    }
    return [
        timing.name,
        units.time(timing.median),
        f"{units.time(low)} to {units.time(high)}",
        "" if timing.interval is None or timing.verdict == "baseline" else "{:.3g} to {:.3g}".format(*timing.interval),
        words[timing.verdict],
        f"{units.time(timing.compile_seconds)} longer" if timing.compile_seconds else "",
        "" if timing.memory is None else units.size(timing.memory),
    ]


def _often(number: float) -> str:
    return f"{number:.3g} ×" if number < 100 else f"{number:,.0f} ×"


def _notes(comparison: Comparison) -> Iterator[str]:
    by_verdict: dict[Verdict, list[str]] = {}
    for timing in comparison.timings:
        by_verdict.setdefault(timing.verdict, []).append(timing.name)
    if noisy := by_verdict.get("too noisy"):
        yield (
            f"{', '.join(noisy)}: the machine is too noisy to tell which is faster; give it more seconds=, or end what "
            "else runs on it"
        )
    if few := by_verdict.get("too few"):
        yield f"{', '.join(few)}: too few turns to tell which is faster; give it more seconds="
    for timing in comparison.timings:
        if timing.copies_host_arrays:
            yield (
                f"{timing.name}: each call copies NumPy's arrays to the device; to leave that out, write "
                f"{timing.name!r}: (fn, jnp.asarray(x))"
            )
        if timing.uses_up:
            yield f"{timing.name}: it donates or changes its arguments, so each call is given copies, made beforehand"
        cores = threads.num_cores()
        if timing.threads is not None and timing.threads != cores:
            yield (
                f"{timing.name}: PyTorch computes with {units.of(timing.threads, 'thread')}, and JAX with a thread for "
                f"each of {units.of(cores, 'core')}; torch.set_num_threads({cores}) is as many"
            )


def _bars(timings: tuple[Timing, ...]) -> str:
    longest = max(timing.median for timing in timings) or 1.0
    rows = []
    for number, timing in enumerate(timings):
        size = f"width: {100 * timing.median / longest:.1f}%; min-width: 1px; height: 0.8em"
        rows.append(
            f'<tr><td style="padding: 0.1em 0.7em 0.1em 0; border: none">{html.escaped(timing.name)}</td>'
            '<td style="width: min(24em, 50vw); border: none; padding: 0.1em 0">'
            f'<div style="{size}; background: {_as_html.tone(number)}"></div></td></tr>'
        )
    return (
        '<table role="img" aria-label="seconds of a call, as bars" style="border-collapse: collapse; color: inherit; '
        f'border: none; max-width: 100%"><tbody>{"".join(rows)}</tbody></table>'
    )
