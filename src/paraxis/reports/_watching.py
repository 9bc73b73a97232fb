"""Every program that somebody else's script runs: which function, and what it was given."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from paraxis._jax import jax_api
from paraxis.reports import _lines
from paraxis.reports._explain import explain
from paraxis.reports._lines import Line
from paraxis.reports._report import Report


class Called:
    """A compiled function that ran, for arrays of some shapes.

    Attributes:
        name: of the function.
        times: how often; 0 of what is a part of another.
        line: that runs it, if another function than ``jax.jit`` made a program of it; else ``None``.
        is_helper: whether it is an operation of JAX's own.
    """

    def __init__(self, fn: Any, name: str, given: Any, line: Line | None = None, *, is_helper: bool = False) -> None:
        self.name, self.line, self.is_helper = name, line, is_helper
        self.times = 0
        self._fn, self._given = fn, given
        self._seconds: tuple[float, float] | None = None
        self._program: Called | None = None  # what JAX ran in the last call
        self._owner = self

    def report(self) -> Report:
        """Return the report on it; nothing is run."""
        args, kwargs = self._given
        report = explain(self._fn)(*args, **kwargs)
        return dataclasses.replace(report, name=self.name, seconds=self._seconds or report.seconds)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Within, what is compiled and run is a part of this."""
        start, self._started = _calling.set(self), time.perf_counter()
        try:
            yield
        finally:
            _calling.reset(start)
            if (program := self._program) is not None and program._owner is program:  # it may run without this, too
                program._owner, self._program = self, None
                self.times, program.times = self.times + program.times, 0
                self._seconds = self._seconds or program._seconds

    def compiled(self, seconds: tuple[float, float]) -> None:
        """Note what tracing and lowering, and then compiling, took."""
        self._seconds = seconds

    def compiled_within(self, seconds: float) -> None:
        """Note what compiling took, in a call that has begun before."""
        self._seconds = time.perf_counter() - self._started - seconds, seconds

    def ran(self) -> None:
        """Count a run of its program."""
        if (calling := _calling.get()) is None:
            self._owner.times += 1
        else:
            calling._program = self


_calling: contextvars.ContextVar[Called | None] = contextvars.ContextVar("calling", default=None)


@contextlib.contextmanager
def watching() -> Iterator[list[Called]]:
    """Within, note what runs: calls of functions that ``jax.jit`` makes, and other programs that JAX compiles.

    What is called in functions that JAX traces is a part of these. It replaces ``jax.jit`` for the whole process.
    Programs that were run before are not seen.
    """
    found: list[Called] = []
    by_kind: dict[Any, Called] = {}

    def note(jitted: Any, static: _Static, args: Any, kwargs: Any) -> Called:
        leaves, structure = jax.tree.flatten((args, kwargs))
        # What it names is kept, so no other has its number. Static values make programs of their own.
        kind = (id(jitted), structure, static(args, kwargs), *map(_kind, leaves))
        if kind not in by_kind:
            by_kind[kind] = Called(jitted, _name(jitted), jax.tree.map(_struct, (args, kwargs)))
            found.append(by_kind[kind])
        by_kind[kind].times += 1
        return by_kind[kind]

    def compiled(name: str, jaxpr: Any, lowered: Any, seconds: tuple[float, float]) -> Callable[[], None]:
        line, own = _asked()
        file = jaxpr.jaxpr.debug_info.func_src_info.partition(" at ")[2].rpartition(":")[0]
        is_helper = own is None and _lines.side(file) == "jax"
        if own is None and is_helper and len(jaxpr.eqns) == 1:
            name = jaxpr.eqns[0].params.get("name") or jaxpr.eqns[0].primitive.name
        called = Called(_Compiled(jaxpr, lowered), own or name, ((), {}), line, is_helper=is_helper)
        called.compiled(seconds)
        if (calling := _calling.get()) is not None:
            calling.compiled_within(seconds[1])
        found.append(called)
        return called.ran

    real = jax.jit

    @functools.wraps(real)
    def jit(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)

        def watched(jitted: Any) -> _Watched:
            return _Watched(jitted, functools.partial(note, jitted, _static(jitted, kwargs)))

        return watched(made) if hasattr(made, "lower") else lambda fun: watched(made(fun))

    jax.jit = jit
    try:
        with jax_api.noticing_programs(compiled):
            yield found
    finally:
        jax.jit = real


class _Watched:
    """A function of ``jax.jit`` that reports its calls."""

    def __init__(self, jitted: Any, note: Callable[[Any, Any], Called]) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted, self._note = jitted, note
        self.trace, self.lower = jitted.trace, jitted.lower  # JAX looks whether it has them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax_api.is_tracing():
            return self._jitted(*args, **kwargs)
        with self._note(args, kwargs).calling():  # noted before it may give its arguments away
            return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class _Compiled:
    """A program that has been compiled, as :func:`explain` takes it."""

    def __init__(self, jaxpr: Any, lowered: Any) -> None:
        self.jaxpr, self._lowered = jaxpr, lowered

    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError  # it is only explained

    def _trace(self) -> Any:
        return self

    def lower(self) -> Any:
        return self._lowered


_Static = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, ...]]


def _static(jitted: Any, options: Mapping[str, Any]) -> _Static:
    """Return what gives the values of a call's static arguments, by the options of ``jax.jit``."""
    numbers, names = (options.get(f"static_arg{what}") for what in ("nums", "names"))
    at = set((numbers,) if isinstance(numbers, int) else numbers or ())
    named = set((names,) if isinstance(names, str) else names or ())
    if at or named:
        with contextlib.suppress(TypeError, ValueError):  # of what has no signature
            parameters = list(inspect.signature(jitted).parameters)
            at |= {number for number, name in enumerate(parameters) if name in named}
            named |= {parameters[number] for number in at if -len(parameters) <= number < len(parameters)}

    def values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        placed = [(number, args[number]) for number in sorted(at) if -len(args) <= number < len(args)]
        return (*placed, *((name, kwargs[name]) for name in sorted(named) if name in kwargs))

    return values


def _struct(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer):
        return x
    sharding = x.sharding if len(x.sharding.device_set) > 1 else None
    return jax_api.laid_struct(x, sharding)


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding if len(x.sharding.device_set) > 1 else None
    return (x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else type(x)


def _name(jitted: Any) -> str:
    inner = getattr(jitted, "__wrapped__", jitted)
    inner = getattr(inner, "func", inner)  # of a partial
    if str(getattr(inner, "__module__", "")).startswith("paraxis.") and (own := _asked()[1]):
        return own
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name.replace("<locals>.", "")


def _asked() -> tuple[Line | None, str | None]:
    """Return the line that is running, and the user's name of what it calls if that is ours."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in (__file__, jax_api.__file__):
            frames.append(frame)
        frame = frame.f_back
    calls = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname) for frame in frames]
    line, verb = _lines.behind(calls)
    for frame in frames:
        if line is None or (frame.f_code.co_filename, frame.f_lineno) == (line.file, line.number):
            break
        if own := _own(frame):
            return line, own
    return line, verb


def _own(frame: types.FrameType) -> str | None:
    """Return the user's name of one of our values that can be explained, where it is called: ``train_step(loss)``."""
    owner, method = frame.f_locals.get("self"), frame.f_code.co_name
    if not type(owner).__module__.startswith("paraxis."):
        return None
    is_public = type(owner).__module__.startswith("paraxis.transforms.")  # and others are made by functions
    kind = type(owner).__name__
    kind = f"px.{kind}" if is_public else re.sub(r"\B(?=[A-Z])", "_", kind).lower()
    if hasattr(owner, f"_trace_{method}"):
        given = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[1 : frame.f_code.co_argcount]]
        return f"{kind}.{method}({_functions(given)})"
    if method == "__call__" and hasattr(owner, "_trace"):
        return f"{kind}({_functions(vars(owner).values())})"
    return None


def _functions(values: Iterable[Any]) -> str:
    found = (getattr(value, "function", value) for value in values)
    return next((fn.__name__ for fn in found if isinstance(fn, types.FunctionType)), "…")
