"""A call and its program: the function traced, its passes decided and compiled."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees, structure
from paraxis.errors import AxisError, DataError
from paraxis.streaming import _trace
from paraxis.streaming._groups import Groups
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
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        if jax_api.is_tracing() or arrays.is_traced(args):
            raise AxisError(
                "Stream: it is a loop outside of JAX and cannot be traced, but it was called inside jax.jit, jax.grad "
                "or the like; write px.Stream(at_once=64).run(jax.grad(fn), w, groups), and jit none of it"
            )
        args = tuple(x if isinstance(x, Groups) else pytrees.sealed(x) for x in args)
        self._fn, (self._leaves, self._structure) = fn, jax.tree.flatten(args)
        self.groups, self.values = list[Groups](), list[Any]()
        for leaf in self._leaves:
            is_groups = isinstance(leaf, Groups)
            self.values += [Leaf(len(self.groups), n) for n in range(len(leaf._padded))] if is_groups else [leaf]
            self.groups += [leaf] if is_groups else []
        check.no_cut("Stream", "args", [x for x in self.values if isinstance(x, np.ndarray)])
        sizes = set(map(len, self.groups))
        if len(sizes) > 1:
            raise DataError(f"Stream: groups must have equally many elements, got {' and '.join(map(str, sizes))}")
        self.size = sizes.pop() if sizes else None

    @property
    def key(self) -> Any:
        """What a trace depends on."""
        kinds = [leaf._kind if isinstance(leaf, Groups) else jax.typeof(leaf) for leaf in self._leaves]
        return (self._structure, *kinds, jax.sharding.get_abstract_mesh(), jax_api.is_wide())

    def chunks(self, size: int, count: int) -> list[Chunk]:
        """Return the elements in chunks of ``count``, the last one shorter. Longer elements come first."""
        ragged = [groups.lengths for groups in self.groups]
        total = sum(x for x in ragged if x is not None)
        order = np.arange(size) if isinstance(total, int) else np.argsort(-total, kind="stable")
        own = [*zip(self.groups, ragged, strict=True)]
        parts = (order[start : start + count] for start in range(0, size, count))
        return [Chunk(x, tuple(None if n is None else g._length(n[x], count) for g, n in own)) for x in parts]

    def trace(self, size: int | None, lengths: Lengths) -> Flat:
        """Return the function traced for so many elements, padded to these lengths."""
        padded = iter(lengths)
        args = self._structure.unflatten(
            x._structs(size or len(x), next(padded)) if isinstance(x, Groups) else jax_api.struct(x)
            for x in self._leaves
        )

        @functools.wraps(self._fn)  # JAX's errors then name the user's function, and its arguments
        def run(*args: Any) -> Any:
            return pytrees.sealed(self._fn(*pytrees.opened(args)))

        return Flat(*jax_api.trace(run, args, {}))


class Program:
    """A function for arguments of one type, of which a call is an example.

    Attributes:
        axis, size, placement: the axis that is streamed, its number of elements, and where they lie.
        plan: its passes.
        checked: the passes that are known to use masks.
        fits: how many elements fit into memory, once that is known.

    Args:
        alone: chunks are run by other processes, each with one device.
        options: compiler options of the passes.
    """

    def __init__(self, call: Call, *, alone: bool, options: dict[str, Any] | None) -> None:
        self._placing = placing.alone if alone else contextlib.nullcontext
        self._options = options
        self._traces: dict[tuple[int | None, Lengths], Flat] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.checked: set[Pass] = set()
        self.fits: int | None = None
        lengths = call.chunks(call.size, call.size)[0].lengths if call.size else ()
        whole = self.whole(call, lengths)
        self.axis, placement = _trace.axis_of(whole.closed, call.size)
        self.size = self.axis.size
        with self._placing():
            self.placement = placement or placing.place(self.axis)
        if self.placement.is_explicit:
            raise AxisError(
                f"Stream: axis {self.axis.name!r} lies on a mesh with Explicit axes, where sizes are part of types; "
                f"leave out its mesh, or make it with axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        count = 5 + (self.size == 5)
        part = self._part(call, count, lengths)
        self.plan = Plan(whole, part, self.axis.name, _trace.dims_of(whole, part, self.size, count))

    def whole(self, call: Call, lengths: Lengths) -> Flat:
        """Return the function traced for all elements."""
        if (None, lengths) not in self._traces:
            with self._placing(), _trace.sized(None, 0, 0):
                flat = self._traces[None, lengths] = call.trace(None, lengths)
            first = next(iter(self._traces.values()))
            if first is not flat:
                _trace.require_same(first, flat, "elements of another length")
                parts = [v for one in self.plan.passes for v in one.results[: len(one.kinds)]]
                for v in (*parts, *(v for v in flat.results if isinstance(v, int))):
                    if first.avals[v].shape != flat.avals[v].shape:
                        raise AxisError(
                            f"Stream: values of which elements of different length have different numbers are reduced "
                            f"or returned, at {self.plan.line(v)}; reduce them over an element's rows, with its mask"
                        )
        return self._traces[None, lengths]

    def part(self, call: Call, count: int, lengths: Lengths) -> Flat:
        """Return the function traced for a chunk, with the literals of the trace for all elements."""
        whole = self.whole(call, lengths)
        if count == self.size:
            return whole
        if (count, lengths) not in self._traces:
            part = self._part(call, count, lengths)
            _trace.dims_of(whole, part, self.size, count)
            part.operations = _trace.with_literals(whole, part)
            self._traces[count, lengths] = part
        return self._traces[count, lengths]

    def _part(self, call: Call, count: int, lengths: Lengths) -> Flat:
        try:
            with self._placing(), _trace.sized(self.axis.name, self.size, count):
                part = call.trace(count, lengths)
        except AxisError:
            raise
        except Exception as error:
            raise AxisError(
                f"Stream: fn can be traced for its {self.size} elements, but not for {count}, as chunks are: "
                f"{type(error).__name__}: {error}. If it writes their number out, take it from an argument: "
                f"jnp.arange(x.shape[0]); an array of all elements, beside groups, is given as px.Groups.of_arrays(x)"
            ) from error
        one = ": give at_once=2 or more" if count == 1 else ""
        _trace.require_same(self.whole(call, lengths), part, f"{count} of its {self.size} elements{one}")
        return part

    def compiled(self, call: Call, one: Pass, count: int, lengths: Lengths) -> Callable[..., list[Any]]:
        """Return a pass on so many elements: ``(*shared, *rows)`` → parts of sums, rows."""
        key = one, count, lengths
        if key not in self._compiled:
            fn, structs = one.program(self.part(call, count, lengths))
            if self._options is None:
                closed = jax_api.trace(fn, structs, {})[0]
                self._compiled[key] = structure.compiled(jax_api.dce(closed)[0])
            else:
                self._compiled[key] = jax.jit(fn, compiler_options=self._options)
        return self._compiled[key]

    @functools.cache  # noqa: B019  a program is kept by the function that is run
    def sharding(self, count: int | None) -> Any:
        """Return how so many rows lie on the devices, or what is shared; ``None``: there is one."""
        return arrays.sharding(self.placement.holding(count or self.size), rows=count is not None)

    def bytes_of(self, call: Call, one: Pass, count: int, lengths: Lengths) -> int:
        """Return the bytes that a pass on so many elements takes on all devices, and those of rows read ahead."""
        fn, structs = one.program(self.part(call, count, lengths))
        used = jax.jit(fn, compiler_options=self._options).lower(*structs).compile().memory_analysis()
        assert used is not None
        each = used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes
        ahead = sum(x.size * x.dtype.itemsize for x in structs[len(one.shared) :])
        return self.placement.num_devices * each + READERS * ahead
