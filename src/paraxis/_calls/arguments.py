"""Checks of a caller's arguments, and the errors that name them.

Options are checked where they are given, by the functions below. Arrays are not: to look at each leaf would cost time
at each call. :func:`named` looks when a call has failed, and only then, for a leaf that no call could have taken.
"""

import difflib
import functools
import importlib
import inspect
import math
import numbers
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import integers
from paraxis.errors import DataError, ParaxisError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def described(value: Any) -> str:
    """Return a value as an error shows it, on one line."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if isinstance(value, types.FunctionType):
        return f"the function {value.__name__}"
    try:
        value = value.item() if isinstance(value, np.generic) and _can_be_jax(value.dtype) else value
        shown = repr(value).partition("\n")[0]
    except Exception:  # of a deleted array in it, say
        shown = ""
    return shown if len(shown) <= 60 else f"{shown[:50]}… ({type(value).__name__})"


# --- options ----------------------------------------------------------------------------------------------------------


def function(who: str, argument: str, value: Any, write: str = "") -> None:
    """Check that an argument is a function.

    Raises:
        TypeError: naming it.
    """
    if not callable(value):
        _refuse(TypeError, who, argument, "must be a function", value, write or f"lambda x: … for {argument}")


def flag(who: str, argument: str, value: Any) -> None:
    """Check that an argument is ``True`` or ``False``.

    Raises:
        TypeError: naming it.
    """
    if not isinstance(value, (bool, np.bool_)):
        _refuse(TypeError, who, argument, "must be True or False", value, f"{argument}=True")


def one_of(who: str, argument: str, value: Any, choices: tuple[Any, ...], error: type[Exception] = ValueError) -> None:
    """Check that an argument is one of those there are.

    Raises:
        ValueError: naming it; or the given error.
    """
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        listed = ", ".join(map(repr, choices))
        _refuse(error, who, argument, f"must be one of {listed}", value, f"{argument}={choices[0]!r}")


def text(who: str, argument: str, value: Any, write: str) -> None:
    """Check that an argument is text, and not empty.

    Raises:
        TypeError: naming it.
    """
    if not isinstance(value, str) or not value:
        _refuse(TypeError, who, argument, "must be text", value, write)


def count(
    who: str,
    argument: str,
    value: Any,
    *,
    least: int = 1,
    most: int | None = None,
    write: str = "",
    error: type[Exception] = ValueError,
) -> int:
    """Return the argument as an ``int``, if it is a whole number that is not less.

    Raises:
        ValueError: naming it; or the given error.
    """
    found = integers.at_least(least, value)
    most = LARGEST if most is None else most
    if found is None or found > most:
        expected = f"must be an integer of at least {least}" if found is None else f"must be at most {most:,}"
        _refuse(error, who, argument, expected, value, write or f"{argument}={max(least, 1)}")
    return found


LARGEST = 2**31 - 1
"""The largest number for the elements of an axis and the rows of an array."""


def number(
    who: str,
    argument: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float | None = None,
    finite: bool = False,
    unit: str = "",
    write: str,
    error: type[Exception] = ValueError,
) -> None:
    """Check that an argument is a real number in these bounds, none of which is NaN; of a unit, as the error says.

    Raises:
        ValueError: naming it; or the given error.
    """
    bounds = [f"of at least {least:g}"] * (least > -math.inf) + ([] if above is None else [f"above {above:g}"])
    bounds += [f"of at most {most:g}"] * (most < math.inf)
    x = _as_float(value) if is_number(value) else math.nan
    if not (least <= x <= most and (above is None or x > above) and (math.isfinite(x) or not finite)):
        kind = f"must be a {'finite ' * finite}number{unit and f' of {unit}'}"
        _refuse(error, who, argument, " ".join([kind, " and ".join(bounds)]).strip(), value, write)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int that no float holds
        return math.nan


def is_number(value: Any) -> bool:
    """Return whether it is a real number, of Python, NumPy or JAX; booleans and tracers are none."""
    if isinstance(value, (bool, np.bool_)) or is_traced(value):
        return False
    if isinstance(value, (jax.Array, np.ndarray)):
        real = jnp.issubdtype(value.dtype, jnp.integer) or jnp.issubdtype(value.dtype, jnp.floating)
        return value.shape == () and real and why_not(value) is None
    return isinstance(value, numbers.Real)


def is_traced(value: Any) -> bool:
    """Return whether it is an array without values, of a function that JAX traces: it has no buffer."""
    try:
        if isinstance(value, jax.Array):
            value.is_deleted()
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def positions(who: str, argument: str, value: Any, error: type[Exception] = ValueError) -> tuple[int, ...]:
    """Return the positions that an argument gives: a whole number from 0, or several.

    Raises:
        ValueError: naming it; or the given error.
    """
    given = value if isinstance(value, (tuple, list)) else (value,)
    found = [integers.at_least(0, at) for at in given]
    if any(at is None or at > LARGEST for at in found):
        _refuse(error, who, argument, "must be positions from 0", value, f"{argument}=(0,)")
    return tuple(at for at in found if at is not None)


def names(who: str, argument: str, value: Any, error: type[Exception] = ValueError) -> tuple[str, ...]:
    """Return the names that an argument gives: text, or several.

    Raises:
        ValueError: naming it; or the given error.
    """
    given = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(name, str) and name for name in given):
        _refuse(error, who, argument, "must be a name, or a list or tuple of names", value, f"{argument}=['x']")
    return tuple(given)


def path(who: str, argument: str, value: Any, error: type[Exception] = ValueError, write: str = "") -> None:
    """Check that an argument can be the path of a file or a directory.

    Raises:
        ValueError: naming it; or the given error.
    """
    write = write or f"{argument}='run'"
    if not isinstance(value, (str, os.PathLike)):
        _refuse(error, who, argument, "must be a path, text or a pathlib.Path", value, write)
    given = os.fspath(value)
    if not isinstance(given, str) or not given:
        _refuse(error, who, argument, "must be a path of some letters", value, write)
    try:
        os.lstat(given)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as reason:  # too long; a NUL in it; no Unicode; a loop of links
        text = getattr(reason, "strerror", None) or str(reason)
        _refuse(error, who, argument, f"must be a path that this system knows ({text})", value, write)


def of_no_use(
    who: str, name: str, value: Any, without: str, write: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise an error for an argument that means nothing without another one."""
    raise error(f"{who}: {name}={described(value)} is of no use without {without}; write {write}")


def _refuse(error: type[Exception], who: str, argument: str, expected: str, value: Any, write: str) -> NoReturn:
    raise error(f"{who}: {argument} {expected}, got {described(value)}; write {write}")


def array(who: str, argument: str, value: Any) -> Any:
    """Return the argument, if it is one of JAX's arrays, also under ``jit``; else as NumPy's array. It holds numbers.

    Raises:
        TypeError: naming it, if it is none.
    """
    try:
        found = value if isinstance(value, jax.Array) else np.asarray(value)
    except Exception:  # lists that are ragged, or hold what has no numbers
        found = None
    if found is not None and (reason := why_not(found)) is not None:
        raise TypeError(f"{who}: {argument} {reason}")
    if found is not None and _can_be_jax(found.dtype):
        return found
    if isinstance(value, (list, tuple)) and "different lengths" in (reason := why_no_array(argument, value)):
        raise TypeError(f"{who}: {argument} {reason}")
    return _refuse(
        TypeError, who, argument, "must be an array of numbers", value, f"np.asarray({argument}, np.float32)"
    )


def host_array(who: str, argument: str, value: Any) -> np.ndarray:
    """Return the argument as NumPy's array of numbers, which must be known.

    Raises:
        TypeError: naming it, if it is none, or is traced.
    """
    if is_traced(value):
        _refuse(TypeError, who, argument, "must be known, not traced", value, f"{argument}=np.array(…)")
    return np.asarray(array(who, argument, value))


def arrays(who: str, argument: str, tree: Any) -> None:
    """Check that the leaves of a tree are arrays and numbers that JAX can compute with.

    Raises:
        TypeError: naming the first leaf that is not.
    """
    for at, leaf in _leaves(who, argument, tree):
        known = isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
        reason = why_not(leaf) if known else f"must be an array or a number, got {described(leaf)}; write np.asarray(…)"
        if reason is not None:
            raise TypeError(f"{who}: {at} {reason}")


def no_cut(who: str, argument: str, tree: Any) -> None:
    """Check that JAX keeps the integers of a tree: where 64 bits are off, it cuts off what is beyond 32, silently.

    Raises:
        DataError: naming the first array with such an integer.
    """
    if any(why_cut(leaf) for leaf in jax.tree.leaves(tree)):
        for at, leaf in _leaves(who, argument, tree):
            if (reason := why_cut(leaf)) is not None:
                raise DataError(f"{who}: {at} {reason}")


_WIDE = {
    np.dtype(np.int64): (np.iinfo(np.int32), -(2**31), 2**31),
    np.dtype(np.uint64): (np.iinfo(np.uint32), 0, 2**32),
}


def why_cut(leaf: Any) -> str | None:
    """Tell which integer of an array JAX would cut, and what to write; ``None``: it keeps all."""
    wide = None if isinstance(leaf, jax.Array) else _WIDE.get(getattr(leaf, "dtype", None))  # at each call: no text
    if wide is None or not hasattr(leaf, "__array__") or jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        return None
    array, (kept, lowest, end) = np.asarray(leaf), wide
    if not array.size or (lowest <= (least := int(array.min())) and int(array.max()) < end):
        return None
    largest = int(array.max())
    worst = largest if largest >= end else least
    return (
        f"holds {worst} ({array.dtype}), which {kept.dtype} does not hold; write x.astype(np.float32) for a quantity, "
        f"np.unique(x, return_inverse=True)[1] for names of things, or jax.config.update('jax_enable_x64', True)"
    )


def _leaves(who: str, argument: str, tree: Any) -> list[tuple[str, Any]]:
    try:
        found = jax.tree_util.tree_leaves_with_path(tree)
    except Exception as reason:  # its keys cannot be sorted, or a class of the user's cannot be taken apart
        raise TypeError(
            f"{who}: {argument} must be a tree that JAX can take apart, got {described(tree)}: {reason} Write keys of "
            "one type in each dict"
        ) from reason
    return [(f"{argument}{jax.tree_util.keystr(at)}", leaf) for at, leaf in found]


# --- calls that failed ------------------------------------------------------------------------------------------------


def named(*taken: type, **other_names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a public function whose errors name its arguments, for what others' code says without a name.

    A call that succeeds is not looked at. One that ends in another error than ours is told by the argument with which
    it does not fit the signature, or by the first leaf that JAX cannot take (see :func:`why_not`), if there is one. If
    not, and the error is a library's, a note tells what the call was given.

    Args:
        *taken: types of leaves that are right here, though JAX cannot compute with them, such as shapes.
        **other_names: names that elsewhere an option has, and what it is called here, or what to write.
    """

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(fn)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return fn(*args, **kwargs)
            except ParaxisError:
                raise
            except Exception as error:
                who = _who(fn, args)
                told: Exception | None = _misfit(who, fn, args, kwargs, other_names)
                told = told or blamed(who, by_name(fn, args, kwargs), error, taken)
                if told is None:
                    _note(error, who, by_name(fn, args, kwargs))
                    raise
                raise told from error

        return call

    return decorate


def options(**other_names: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator of a class, whose errors then name the arguments that it does not have.

    Args:
        **other_names: names that elsewhere an argument has, and what it is called here.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        cls.__init__ = named(**other_names)(cls.__init__)
        return cls

    return decorate


_NOTE = "raised in a call of "
_MOST_SHOWN = 8


def _note(error: Exception, who: str, given: Mapping[str, Any]) -> None:
    """Say below a library's error what the innermost of our calls was given."""
    if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    if isinstance(error, FloatingPointError):  # of jax.debug_nans: no other arguments are needed
        return
    advice = next((text for kind, text in _INSTEAD.items() if isinstance(error, kind)), "")
    if isinstance(error, TypeError) and "positional argument" in str(error) and isinstance(given.get("args"), list):
        advice = ": several arguments of its function are a tuple; write args=(x, y), not a list"
    if not _is_of_libraries(error) and not advice:
        return
    leaves = [pair for name, value in given.items() for pair in _leaves(who, name, value) or [(name, value)]]
    shown = [f"{name} = {described(leaf)}" for name, leaf in leaves]
    if shown:
        more = ["…"] * (len(shown) > _MOST_SHOWN)
        error.add_note(
            f"{_NOTE}{who} with {', '.join([*shown[:_MOST_SHOWN], *more])}{advice or '; it may need other arguments'}"
        )


_INSTEAD: dict[type[Exception], str] = {
    jax.errors.TracerArrayConversionError: ": its functions compute with jnp; write jnp.sin(x) for np.sin(x)",
    jax.errors.TracerBoolConversionError: (
        ": its functions are traced, and cannot branch on values; write jnp.where(x > 0, a, b) for a if x > 0 else b"
    ),
    jax.errors.TracerIntegerConversionError: (
        ": its functions are traced, integers among their arguments too; for one that Python uses, as range(n) does, "
        "write jax.jit(fn, static_argnums=1)(x, n)"
    ),
    jax.errors.ConcretizationTypeError: (
        ": its functions are traced, so what they compute has no value yet; write float(…) around the call, not within"
    ),
}
"""Advice, by the error of a function that does with the values of a trace what JAX cannot."""


def advise(error: Exception, who: str, given: Mapping[str, Any]) -> None:
    """Add a note to an error of a traced function that did with its values what JAX cannot: what to write instead."""
    if isinstance(error, tuple(_INSTEAD)):
        _note(error, who, given)


def _who(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return how an error calls a function, or a method, by the class of the object whose it is."""
    path = fn.__qualname__.rpartition("<locals>.")[2] if "." in fn.__qualname__ else fn.__qualname__
    owner, _, method = path.rpartition(".")
    if not owner:
        return fn.__qualname__.partition(".<locals>")[0]
    owner = type(args[0]).__name__ if args and not isinstance(args[0], type) else owner
    return owner if method in ("__init__", "__call__") else f"{owner}.{method}"


def blamed(who: str, given: Mapping[str, Any], error: Exception, taken: tuple[type, ...] = ()) -> Exception | None:
    """Return an error that names the argument at fault for one of JAX's or NumPy's; ``None``: no argument is.

    Args:
        who: what was called.
        given: its arguments, by name.
        error: how it ended.
        taken: types of leaves that are not at fault.
    """
    try:
        leaves = [leaf for argument, value in given.items() for leaf in _leaves(who, argument, value)]
    except TypeError as told:
        return told
    if isinstance(error, (TypeError, AttributeError)) and any(words in str(error) for words in _OF_LISTS):
        for argument, value in given.items():
            for name, found in _lists(argument, value):
                return TypeError(f"{who}: {name} {why_no_array(name, found)}")
    for name, leaf in leaves:
        reason = _why_no_shape(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else None
        if reason is not None:
            return TypeError(f"{who}: {name} {reason}")
    leaves = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, taken)]
    # Functions come last, and of them the last first: a call's own function is no array either.
    functions = [pair for pair in reversed(leaves) if callable(pair[1])]
    for name, leaf in [*(pair for pair in leaves if not callable(pair[1])), *functions]:
        reason = why_not(leaf, error)
        if reason is not None:
            return TypeError(f"{who}: {name} {reason}")
    return None


_OF_LISTS = ("'list'", "'tuple'", "Cannot determine dtype of [")


def _lists(argument: str, tree: Any) -> list[tuple[str, Any]]:
    """Return the lists in a tree that may have been meant as one array, and how errors call them."""

    def is_list(x: Any) -> bool:
        if not isinstance(x, (list, tuple)) or len(x) < 2 or (isinstance(x, tuple) and argument == "args"):
            return False
        return all(isinstance(y, (bool, int, float, list)) for y in x) or is_list_of_arrays(x)

    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_list)
    return [(f"{argument}{jax.tree_util.keystr(at)}", leaf) for at, leaf in found if is_list(leaf)]


def is_list_of_arrays(x: Any) -> bool:
    """Return whether it is a list of several arrays of one shape, which could be a single array."""
    if not isinstance(x, list) or len(x) < 2 or not all(isinstance(y, (jax.Array, np.ndarray)) for y in x):
        return False
    return len({y.shape for y in x}) == 1 and x[0].ndim > 0


def why_no_array(name: str, value: list[Any] | tuple[Any, ...], *, apart: bool = False) -> str:
    """Tell what a list given in the place of an array is, and what to write; ``apart``: it holds one array a row."""
    found = f"is a {type(value).__name__} of {len(value)}"
    if is_list_of_arrays(value):
        write = f"jnp.stack({name})" if apart else "np.asarray(…) where the list is made"  # a stack of rows would turn
        return f"{found} arrays {value[0].dtype}{list(value[0].shape)}, not one array; write {write}"
    if not any(isinstance(x, (list, tuple)) for x in value):
        return f"{found} numbers, not an array; write np.asarray({name})"
    shape = _shape_of(value)
    if shape is None:
        return f"{found} lists of different lengths, which no array holds; fill the shorter ones up, with a mask beside"
    return f"{found} lists, not an array {list(shape)}; write np.asarray({name})"


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of the array that nested lists of numbers are; ``None``: they are none."""
    if not isinstance(value, (list, tuple)):
        return np.shape(value)
    inner = {_shape_of(x) for x in value}
    first = inner.pop() if len(inner) == 1 else None
    return None if first is None else (len(value), *first)


def why_not(leaf: Any, error: Exception | None = None) -> str | None:
    """Tell why JAX cannot compute with a leaf, and what to write; ``None``: it can, or this is not why a call failed.

    Args:
        leaf: of the arguments.
        error: how a call with it ended; ``None``: any. Some leaves are right for some calls, so they are blamed for
            what JAX raised only.
    """
    if is_traced(leaf):
        if error is None or not _is_stale(leaf):
            return None
        return (
            "is a value of a function that JAX has finished tracing (it was kept in a list, an attribute or a global "
            "there), and must be an array; write `return` in that function for what is needed outside"
        )
    if isinstance(leaf, jax.Array):
        if not leaf.is_deleted() or not (error is None or _tells_of_deletion(error)):
            return None
        return (
            f"is a deleted array {leaf.dtype}{list(leaf.shape)}: it was donated to an earlier call, or `.delete()` was "
            "called; write jnp.copy(x) there to keep it, or use what that call returned"
        )
    if not (error is None or _is_of_libraries(error)):
        return None
    if isinstance(leaf, str) and str(error) == "std::bad_cast":  # of text that is no Unicode
        return f"must be an array or a number, got {described(leaf)}; write np.asarray(…), or close over other values"
    overflows = isinstance(error, OverflowError) and ("parsing an argument" in str(error) or "int32" in str(error))
    if isinstance(leaf, int) and not (-(2**31) <= leaf < 2**31 if overflows else -(2**63) <= leaf < 2**64):
        return too_large(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return f"is a ShapeDtypeStruct, without values, and must be an array; write jnp.zeros({leaf.shape})"
    if error is not None and isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        write = "x.astype(x.dtype.newbyteorder('='))"
        return f"is {described(leaf)}, of another byte order than this machine's; write {write}"
    if error is not None and isinstance(leaf, np.ma.MaskedArray):
        return f"is a masked array {leaf.dtype}{list(leaf.shape)}; write x.filled(0), and pass its mask beside it"
    if isinstance(leaf, (np.ndarray, np.generic)) and not _can_be_jax(leaf.dtype):
        is_text = leaf.dtype.kind in "US"
        write = "np.unique(x, return_inverse=True)[1] of labels" if is_text else "np.asarray(x, np.float32)"
        return f"must be an array of numbers, got {leaf.dtype} {list(leaf.shape)}; write {write}"
    known = isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    if isinstance(error, TypeError) and not known and str(type(leaf)) in str(error):
        return f"must be an array or a number, got {described(leaf)}; write np.asarray(…), or close over other values"
    return None


def _why_no_shape(leaf: jax.ShapeDtypeStruct) -> str | None:
    """Tell why no array can be as a shape says, and what to write; ``None``: one can."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) and not np.dtype(leaf.dtype).isnative:
        write = "dtype.newbyteorder('=') there"
        return f"is a shape of {leaf.dtype}, of another byte order than this machine's; write {write}"
    try:
        if leaf.sharding is not None:
            leaf.sharding.shard_shape(leaf.shape)
    except ValueError as reason:
        return (
            f"is a shape {list(leaf.shape)} that cannot lie by its sharding: {reason}. Write a shape that divides, or "
            "let px.Axis lay it, which pads"
        )
    if isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh):
        return "lies on an abstract mesh, which has no devices; write jax.NamedSharding(jax.make_mesh(…), spec) there"
    return None


def no_attribute(module: str, name: str, known: Iterable[str], rooms: Iterable[str] = ()) -> AttributeError:
    """Return the error of a name that a module does not have: one of these rooms has it, or the nearest one is told."""
    is_public = not name.startswith("_")  # others are asked for by tools that look at modules: that loads nothing
    room = next((room for room in rooms if is_public and _is_in(room, name)), None)
    near = nearest(name, list(known))
    write = f"; write px.{room}.{name}" if room else f"; did you mean {module}.{near}?" if near else ""
    full = module.replace("px", "paraxis", 1)
    return AttributeError(f"module {full!r} has no attribute {name!r}{write}", name=name)


def _is_in(room: str, name: str) -> bool:
    try:
        return name in importlib.import_module(f"paraxis.{room}").__all__
    except ImportError:  # of an extra that is not installed
        return False


def too_large(value: Any) -> str:
    """Describe an integer that no dtype holds, and what to write."""
    as_float = _as_float(value)
    holds = "no integer dtype holds" if not -(2**63) <= value < 2**64 else "int32 does not hold"
    write = f"it as a float, {as_float:g}" if math.isfinite(as_float) else "a number that a float holds, 1e30 say"
    return f"is {described(value)}, which {holds}; write {write}"


def _tells_of_deletion(error: Exception) -> bool:
    """Return whether an array was gone before, and not given away by the call that failed."""
    return "deleted" in str(error) or "donated" in str(error)


def _is_stale(tracer: jax.Array) -> bool:
    """Return whether the function that a tracer is of has been traced to its end, which an operation on it tells."""
    try:
        jax.lax.expand_dims(tracer, (0,))
    except jax.errors.UnexpectedTracerError:
        return True
    return False


def _can_be_jax(dtype: Any) -> bool:
    if getattr(dtype, "char", "") in ("g", "G"):  # NumPy's longdouble
        return False
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_) or dtype == jax.dtypes.float0


_NOT_USERS = {"jax", "jaxlib", "numpy", "flax", "optax", "paraxis"}


def _is_of_libraries(error: Exception) -> bool:
    """Return whether an error was raised by JAX, NumPy or C code, and not by a function of the user's.

    JAX takes its own frames out of tracebacks: then the last one is ours.
    """
    if isinstance(error, OverflowError):
        return True
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS


def by_name(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call, by the names that the function gives them."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # they do not fit, or it does not say what it takes
        return {**{f"args[{i}]": value for i, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            value = {f"{name}[{i}]": item for i, item in enumerate(value)}
        found.update(value if kind in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD) else {name: value})
    first = next(iter(found), None)
    if first == "self" or (first == "cls" and isinstance(found[first], type)):
        del found[first]
    return found


def nearest(wrong: str, known: list[str]) -> str | None:
    """Return the name that was meant, if one of those that there are is like it."""
    lower = {name.lower(): name for name in known}
    return next((lower[name] for name in difflib.get_close_matches(wrong.lower(), lower, 1, 0.6)), None)


def _misfit(
    who: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    other_names: Mapping[str, str],
) -> TypeError | None:
    """Return the error of a call that does not fit the signature, with what would; ``None``: it fits."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin, which does not say what it takes
        return None
    names = list(signature.parameters)
    known = names[1:] if names[:1] in (["self"], ["cls"]) else names
    kinds = {name: signature.parameters[name].kind for name in known}
    others = [name for name in known if kinds[name] is inspect.Parameter.VAR_POSITIONAL]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for wrong in (name for name in kwargs if name not in known and not takes_any):
        near = other_names.get(wrong) or nearest(wrong, known)
        if near is not None:
            write = f"write {near if '=' in near else f'{near}=…'}"
        elif others:
            at = ", ".join([*known[: known.index(others[0])], f"…, {wrong}"])
            write = f"what is one of {others[0]} is given by position; write {who}({at})"
        else:
            write = f"there are {', '.join(known)}; write one of these"
        return TypeError(f"{who}: there is no argument {wrong!r}; {write}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as reason:
        by_position = [name for name in known if kinds[name] is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        required = [
            f"{name}=…"
            for name in known
            if kinds[name] is inspect.Parameter.KEYWORD_ONLY and signature.parameters[name].default is inspect._empty
        ]
        several = "; several args are one tuple, (x, y)" if "args" in by_position else ""
        return TypeError(f"{who}: {reason}; write {who}({', '.join([*by_position, *required])}){several}")
    return None
