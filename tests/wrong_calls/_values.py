"""Wrong values, and for each kind of argument which of them it may take.

A kind is a predicate: it says of a value whether a call that takes it does right. Where it says yes, the call may
succeed, or refuse; where it says no, the call must refuse, and say why.
"""

import datetime
import decimal
import fractions
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

import paraxis as px

Kind = Callable[[Any], bool]


class Odd:
    """A class of somebody's, and its instances: no number, no array, no function."""


def _deleted() -> jax.Array:
    x = jnp.arange(3.0) + 1
    x.delete()
    return x


def _escaped() -> Any:
    """A tracer of a function that has returned."""
    kept: list[Any] = []
    jax.make_jaxpr(lambda x: kept.append(x * 2) or x)(jnp.ones(3))
    return kept[0]


WRONG: dict[str, Callable[[], Any]] = {
    # arrays that are none, or none of use
    "a deleted array": _deleted,
    "a tracer that escaped": _escaped,
    "a ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct((3,), jnp.float32),
    "an array of objects": lambda: np.array([Odd(), None, Odd()], dtype=object),
    "an array of strings": lambda: np.array(["a", "b", "c"]),
    "an array of dates": lambda: np.array(["2020-01-01"] * 3, dtype="datetime64[D]"),
    "an array of records": lambda: np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]),
    "too many dimensions": lambda: jnp.zeros((2, 1, 2, 1, 2)),
    "too few dimensions": lambda: jnp.float32(1.5),
    "another length": lambda: jnp.ones(7),
    "another length, on the host": lambda: np.ones((7, 3), np.float32),
    "an empty array": lambda: np.zeros((0, 3), np.float32),
    "an array with NaN": lambda: np.array([1.0, np.nan, 2.0], np.float32),
    "an array of complex numbers": lambda: jnp.array([1.0 + 1j, 2.0, 3.0]),
    "an array of integers": lambda: np.array([2, -1, 5]),
    "an array of booleans": lambda: np.array([True, False, True]),
    "a typed key": lambda: jax.random.key(1),
    "a raw key": lambda: np.array([0, 1], np.uint32),
    "typed keys": lambda: jax.random.split(jax.random.key(1), 3),
    "keys of both kinds": lambda: [jax.random.key(1), np.array([0, 1], np.uint32)],
    # numbers
    "2**70": lambda: 2**70,
    "-2**70": lambda: -(2**70),
    "10**400": lambda: 10**400,  # no float holds it
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "a negative fraction": lambda: -0.5,
    "two and a half": lambda: 2.5,
    "three, as a float": lambda: 3.0,
    "True": lambda: True,
    "a complex number": lambda: 1.0 + 2.0j,
    "a Decimal": lambda: decimal.Decimal("1.5"),
    "a Fraction": lambda: fractions.Fraction(1, 3),
    "a NumPy number of its own": lambda: np.float64(-3.5),
    # text
    "a word": lambda: "nonsense",
    "no text": lambda: "",
    "bytes": lambda: b"bytes",
    "text with a NUL": lambda: "nul\0byte",
    "a text too long for a path": lambda: "x" * 5_000,
    "text that is no Unicode": lambda: "\udcff",
    "a path in a directory that is a file": lambda: pathlib.Path(os.devnull, "below"),
    "a path that is a directory": lambda: pathlib.Path(os.sep),
    # things of Python's
    "None": lambda: None,
    "Ellipsis": lambda: ...,
    "a slice": lambda: slice(0, 2),
    "a generator": lambda: (x for x in (1.0, 2.0)),
    "a function": lambda: lambda *args, **kwargs: None,
    "a function of nothing": lambda: lambda: None,
    "a module": lambda: math,
    "a class": lambda: Odd,
    "an instance": Odd,
    "an error": lambda: ValueError("an error"),
    "a date": lambda: datetime.date(2020, 1, 1),
    # containers
    "a list that is ragged": lambda: [[1.0], [2.0, 3.0]],
    "a list of words": lambda: ["nonsense", "words"],
    "a tuple of nothing": tuple,
    "a list of lists": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "a tuple of integers": lambda: (5, -7),
    "a set": lambda: {1, "two"},
    "a dict": lambda: {"nonsense": 1.0},
    "a dict of keys that have no order": lambda: {1: 1.0, "one": 2.0},
    "an empty dict": dict,
    # things of JAX's and ours
    "a dtype": lambda: jnp.float32,
    "a device": lambda: jax.devices()[0],
    "a mesh": lambda: Mesh(np.array(jax.devices()[:2]), ("other",)),
    "an axis": lambda: px.Axis("other", 5),
}


# --- kinds ------------------------------------------------------------------------------------------------------------


def anything(x: Any) -> bool:
    del x
    return True


def function(x: Any) -> bool:
    """A class is one, too."""
    return callable(x)


def flag(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_))


def text(x: Any) -> bool:
    return isinstance(x, str) and bool(x)


def count(least: int = 1, most: int = 2**31 - 1) -> Kind:
    """A whole number, also NumPy's or an array of one."""

    def accepts(x: Any) -> bool:
        x = x.item() if isinstance(x, (np.integer, jax.Array, np.ndarray)) and np.shape(x) == () else x
        return isinstance(x, int) and not isinstance(x, bool) and least <= x <= most

    return accepts


def number(least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf) -> Kind:
    """A real number, also an array of one."""

    def accepts(x: Any) -> bool:
        if type(x) is int:
            return least <= x <= most and x > above
        if isinstance(x, (bool, np.bool_)) or np.shape(x) != () or not np.issubdtype(np.result_type(x), np.number):
            return False
        return not np.iscomplexobj(x) and least <= float(x) <= most and float(x) > above

    return lambda x: isinstance(x, (fractions.Fraction, decimal.Decimal)) or judged(accepts, x)


def one_of(*choices: Any) -> Kind:
    return lambda x: any(x is choice or (type(x) is type(choice) and x == choice) for choice in choices)


def optional(kind: Kind) -> Kind:
    return lambda x: x is None or kind(x)


def either(*kinds: Kind) -> Kind:
    return lambda x: any(kind(x) for kind in kinds)


def instance(*classes: type) -> Kind:
    return lambda x: isinstance(x, classes)


def none(x: Any) -> bool:
    return x is None


def _is_number(dtype: Any) -> bool:
    return np.issubdtype(dtype, np.number) or dtype == bool or jnp.issubdtype(dtype, jnp.number)


def usable(x: Any) -> bool:
    """An array, or a number, that JAX can compute with. Keys are arrays, too."""
    if isinstance(x, Tracer):
        return False  # all that the catalogue has are of functions that have returned
    if isinstance(x, jax.Array):
        return not x.is_deleted()
    if isinstance(x, (bool, int, float, complex)):
        return not isinstance(x, int) or -(2**31) <= x < 2**32
    return isinstance(x, (np.ndarray, np.generic)) and _is_number(x.dtype)


def tree(x: Any) -> bool:
    """Usable leaves, whatever their shapes; none at all is as good."""
    return all(usable(leaf) for leaf in leaves(x))


def rows(size: int) -> Kind:
    """A tree of arrays with so many rows."""
    return lambda x: tree(x) and all(np.shape(leaf)[:1] == (size,) for leaf in leaves(x))


def array(*shape: int | None, dtypes: str = "biufcV") -> Kind:
    """One array, or what NumPy makes one, of this shape (``None``: any size) and a kind of these dtypes."""

    def accepts(x: Any) -> bool:
        if isinstance(x, Tracer) or (isinstance(x, jax.Array) and x.is_deleted()):
            return False
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        fits = len(x.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
        return fits and x.dtype.kind in dtypes

    return lambda x: not isinstance(x, (dict, set)) and judged(accepts, x)


def key(x: Any) -> bool:
    """One random key, of either kind."""
    if not isinstance(x, (jax.Array, np.ndarray)) or (isinstance(x, jax.Array) and not usable(x)):
        return False
    return x.shape == () if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype == np.uint32 and x.ndim == 1


def path(x: Any) -> bool:
    """What may be a path: whether it can be written there is said by the call."""
    return isinstance(x, (str, os.PathLike)) and 0 < len(os.fspath(x)) < 4_000 and "\0" not in os.fspath(x)


def items(kind: Kind) -> Kind:
    """A list or tuple, perhaps empty, of this kind."""
    return lambda x: isinstance(x, (list, tuple)) and all(kind(item) for item in x)


def leaves(x: Any) -> Iterable[Any]:
    try:
        return jax.tree.leaves(x)
    except ValueError:  # keys without an order
        return [x]


def judged(accepts: Kind, x: Any) -> bool:
    try:
        return bool(accepts(x))
    except Exception:  # whatever a wrong value does when it is looked at: it is not of that kind
        return False
