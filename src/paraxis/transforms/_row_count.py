"""Detection of functions that use the number of rows, as ``x / len(x)`` does, and are row-wise all the same.

It shows between two traces with different numbers of rows: as a constant that differs, or a shape that does otherwise
than in proportion to them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, Literal, Tracer, num_scanned, subjaxprs


def odd_counts(shapes: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Two numbers of rows to trace with that divide none of the given dimensions."""
    taken = {size for shape in shapes for size in shape}
    odd = (
        n for n in itertools.count(11) if all(n % k for k in range(2, n)) and all(size % n for size in taken if size)
    )
    return next(odd), next(odd)


def use_of_count(one: ClosedJaxpr, other: ClosedJaxpr, counts: tuple[int, int]) -> str | None:
    """Return where a function uses the number of rows itself, by two traces with different ones; ``None``: nowhere."""
    nothing = ("another program", _Fact(None))
    for (name, a), (_, b) in itertools.zip_longest(_facts(one), _facts(other), fillvalue=nothing):
        if not a.is_like(b, counts):
            return f"{name} uses the number of rows"
    return None


@dataclasses.dataclass(frozen=True)
class _Fact:
    """A constant in a program, or a shape: one that has the rows may differ by their number, and so must it then."""

    value: Any
    is_shape: bool = False

    def is_like(self, other: "_Fact", counts: tuple[int, int]) -> bool:
        a, b = self.value, other.value
        if a is b or self.is_shape != other.is_shape:
            return a is b
        if self.is_shape:
            return len(a) == len(b) and all(m == n or m * counts[1] == n * counts[0] for m, n in zip(a, b, strict=True))
        if jnp.issubdtype(getattr(a, "dtype", np.dtype(object)), jax.dtypes.prng_key):
            return True
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _facts(closed: ClosedJaxpr) -> Iterator[tuple[str, _Fact]]:
    """Yield the constants in a program and the shapes of what it makes, bodies included, with the operation of each."""
    yield from (("a constant", _Fact(x)) for x in closed.consts if not isinstance(x, Tracer))
    yield from _facts_of(closed.jaxpr)


def _facts_of(jaxpr: Jaxpr) -> Iterator[tuple[str, _Fact]]:
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", eqn.primitive.name))
        yield from ((name, _Fact(atom.val)) for atom in eqn.invars if isinstance(atom, Literal))
        made: list[Any] = eqn.outvars
        yield from ((name, _Fact(v.aval.shape, is_shape=True)) for v in made)
        if eqn.primitive.name == "scan" and not num_scanned(eqn):
            yield name, _Fact(eqn.params["length"])
        for body in subjaxprs(eqn):
            yield from _facts_of(body)
    yield from (("the result", _Fact(atom.val)) for atom in jaxpr.outvars if isinstance(atom, Literal))
