"""A call and its program: the function traced, its passes decided and compiled."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees
from paraxis._core.program import runner
from paraxis.errors import AxisError, DataError, axis_advice
from paraxis.streaming import _trace
from paraxis.streaming._groups import Form, Groups
from paraxis.streaming._passes import Pass, Plan
from paraxis.streaming._trace import Flat

READERS = 2  # threads that read elements ahead

Lengths = tuple[int | None, ...]
"""For each of a call's groups, the length to which their elements are padded; ``None``: they have the same shapes."""


class Leaf(NamedTuple):
    """An array of the elements of groups: which of the call's groups, and which leaf of their elements."""

    place: int
    number: int


class Chunk(NamedTuple):
    """Elements that are run together: their numbers, and the lengths to which they are padded."""

    numbers: np.ndarray
    lengths: Lengths

    def read(self, groups: Sequence[Groups | None], rows: Sequence[Any]) -> list[Any]:
        """Return rows with those of the groups in place of their leaves."""
        read = dict[int, list[Any]]()
        for place in {x.place for x in rows if isinstance(x, Leaf)}:
            if (own := groups[place]) is not None:
                read[place] = jax.tree.leaves(own._read(self.numbers, self.lengths[place]))
        return [read[x.place][x.number] if isinstance(x, Leaf) and x.place in read else x for x in rows]


class Call:
    """A function and its arguments.

    Attributes:
        groups: among the arguments, in order.
        size: how many elements they have; ``None``: there are no groups.
        values: what each argument of the trace stands for: an array, or a leaf of groups.
        key: what a trace depends on.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        if jax_api.is_tracing() or arrays.is_traced(args):
            raise AxisError(
                "Stream: it is a loop outside of JAX and cannot be traced, but it was called inside jax.jit, jax.grad "
                "or the like; write px.Stream(at_once=64).run(jax.grad(fn), w, groups), and jit none of it"
            )
        leaves, structure = jax.tree.flatten(tuple(x if isinstance(x, Groups) else pytrees.partition(x) for x in args))
        self.groups, self.values, kinds = list[Groups](), list[Any](), list[Any]()
        for leaf in leaves:
            if isinstance(leaf, Groups):
                kinds.append(leaf._form)
                self.values += [Leaf(len(self.groups), n) for n in range(len(leaf._form.padded))]
                self.groups.append(leaf)
            else:
                kinds.append(jax.typeof(leaf))
                self.values.append(leaf)
        check.leaves("Stream", "args", [x for x in self.values if isinstance(x, np.ndarray)])
        sizes = set(map(len, self.groups))
        if len(sizes) > 1:
            raise DataError(f"Stream: groups must have equally many elements, got {' and '.join(map(str, sizes))}")
        self.size = sizes.pop() if sizes else None
        self.key = (self.size, structure, *kinds, placing.mesh_in_force(), jax_api.is_wide())
        self.trace = functools.partial(_traced, fn, structure, kinds)

    def chunks(self, size: int, count: int) -> list[Chunk]:
        """Return the elements in chunks of ``count``, the last one shorter. Longer elements come first."""
        ragged = [groups.lengths for groups in self.groups]
        total = sum(x for x in ragged if x is not None)
        order = np.arange(size) if isinstance(total, int) else np.argsort(-total, kind="stable")
        own = [*zip(self.groups, ragged, strict=True)]
        parts = (order[start : start + count] for start in range(0, size, count))
        return [Chunk(x, tuple(None if n is None else g._length(n[x], count) for g, n in own)) for x in parts]


def _traced(fn: Callable[..., Any], structure: Any, kinds: Sequence[Any], size: int, lengths: Lengths) -> Flat:
    """Return a function traced for so many elements, padded to these lengths."""
    padded = iter(lengths)
    args = [x.stacked(next(padded), size) if isinstance(x, Form) else jax_api.struct(x) for x in kinds]
    with axis_advice(
        "Stream: a program names its axes, @px.program(rows=8); elements meet in px.reduce_sum and the like"
    ):
        return Flat(*jax_api.trace(pytrees.of_combined(fn), structure.unflatten(args), {}))


class Program:
    """A function for arguments of one type, of which ``call`` is an example.

    Attributes:
        axis, size, placement: the axis that is streamed, its number of elements, and where they lie.
        plan: its passes.
        checked: the passes that are known to use masks.
        fits: how many elements of some lengths fit into memory.

    Args:
        alone: chunks are run by other processes, each with one device.
        options: compiler options of the passes.
    """

    def __init__(self, call: Call, *, alone: bool, options: dict[str, Any] | None) -> None:
        self._placing = placing.alone if alone else contextlib.nullcontext
        self._trace, self._options, self.size = call.trace, options, call.size or 0
        self._wholes: dict[Lengths, Flat] = {}
        self._parts: dict[tuple[int, Lengths], Flat] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.checked: set[Pass] = set()
        self.fits: dict[Lengths, int] = {}
        lengths = call.chunks(self.size, self.size)[0].lengths if self.size else ()
        whole = self.whole(lengths)
        self.axis, placement = _trace.axis_of(whole.closed, call.size)
        self.size = self.axis.size
        with self._placing():
            self.placement = placement or placing.place(self.axis)
        if self.placement.is_explicit:
            raise AxisError(
                f"Stream: axis {self.axis.name!r} lies on a mesh with Explicit axes, where sizes are part of types; "
                f"leave out its mesh, or make it with axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        part, dims = self._some(5 + (self.size == 5), lengths)
        self.plan = Plan(whole, part, self.axis.name, dims)

    def whole(self, lengths: Lengths) -> Flat:
        """Return the function traced for all elements."""
        if lengths not in self._wholes:
            with self._placing(), placing.entered(chunk=_trace.Sized(None, 0, 0)):
                flat = self._trace(self.size, lengths)
            first = self._wholes.setdefault(next(iter(self._wholes), lengths), flat)
            _trace.require_same(first, flat, "elements of another length")
            parts = [v for one in self.plan.passes for v in one.results[: len(one.kinds)]] if first is not flat else []
            for v in (*parts, *(v for v in flat.results if isinstance(v, int))):
                if first.avals[v].shape != flat.avals[v].shape:
                    raise AxisError(
                        f"Stream: values of which elements of different length have different numbers are reduced or "
                        f"returned, at {self.plan.line(v)}; reduce them over an element's rows, with its mask"
                    )
            self._wholes[lengths] = flat
        return self._wholes[lengths]

    def part(self, count: int, lengths: Lengths) -> Flat:
        """Return the function traced for a chunk, with the literals of the trace for all elements."""
        if count == self.size:
            return self.whole(lengths)
        if (count, lengths) not in self._parts:
            part = self._parts[count, lengths] = self._some(count, lengths)[0]
            part.operations = _trace.with_literals(self.whole(lengths), part)
        return self._parts[count, lengths]

    def _some(self, count: int, lengths: Lengths) -> tuple[Flat, list[int | None]]:
        """Return the function traced for some elements, and the dimension of the elements in each of its values."""
        try:
            with self._placing(), placing.entered(chunk=_trace.Sized(self.axis.name, self.size, count)):
                part = self._trace(count, lengths)
        except AxisError:
            raise
        except Exception as error:
            raise AxisError(
                f"Stream: fn can be traced for its {self.size} elements, but not for {count}, as chunks are: "
                f"{type(error).__name__}: {error}. If it writes their number out, take it from an argument: "
                f"jnp.arange(x.shape[0]); an array of all elements, beside groups, is given as px.Groups.of_arrays(x)"
            ) from error
        one = ": give at_once=2 or more" if count == 1 else ""
        _trace.require_same(self.whole(lengths), part, f"{count} of its {self.size} elements{one}")
        return part, _trace.dims_of(self.whole(lengths), part, self.size, count)

    def compiled(self, one: Pass, count: int, lengths: Lengths) -> Callable[..., list[Any]]:
        """Return a pass on so many elements: ``(*shared, *rows)`` → parts of sums, rows."""
        key = one, count, lengths
        if key not in self._compiled:
            fn, structs = one.program(self.part(count, lengths))
            if self._options is None:
                closed = jax_api.trace(fn, structs, {})[0]
                self._compiled[key] = runner(jax_api.dce(closed)[0], self.placement)
            else:
                self._compiled[key] = jax.jit(fn, compiler_options=self._options)
        return self._compiled[key]

    @functools.cache  # noqa: B019  a program is kept by the function that is run
    def sharding(self, count: int | None) -> Any:
        """Return how so many rows lie on the devices, or what is shared; ``None``: there is one."""
        placement = self.placement.holding(count or self.size)
        return arrays.sharding(placement, None if count is not None and placement.divides else ())

    def bytes_of(self, count: int, lengths: Lengths) -> int:
        """Return the bytes that a pass on so many elements takes on all devices, and those of rows read ahead."""
        found = []
        for one in self.plan.passes:
            fn, structs = one.program(self.part(count, lengths))
            used = jax.jit(fn, compiler_options=self._options).lower(*structs).compile().memory_analysis()
            assert used is not None
            each = used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes
            ahead = sum(x.size * x.dtype.itemsize for x in structs[len(one.shared) :])
            found.append(self.placement.num_devices * each + READERS * ahead)
        return max(found)
