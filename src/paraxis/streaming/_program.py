"""A call and its program: the function traced, its passes decided and compiled."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees
from paraxis._host.digests import is_key, plain
from paraxis.errors import AxisError, DataError, axis_advice
from paraxis.streaming import _trace
from paraxis.streaming._groups import Form, Groups
from paraxis.streaming._passes import Pass, Plan
from paraxis.streaming._trace import Flat

READERS = 2  # threads that read elements ahead
# For each of a call's groups, the length to which their elements are padded; None: they have the same shapes.
Lengths = tuple[int | None, ...]


class Leaf(NamedTuple):
    """An array of the elements of groups: which of the call's groups, and which leaf of their elements."""

    place: int
    number: int


class Chunk(NamedTuple):
    """Elements that are run together: their numbers, and the lengths to which they are padded."""

    numbers: np.ndarray
    lengths: Lengths

    def read(self, groups: Sequence[Groups], rows: Sequence[Any], count: int) -> list[Any]:
        """Return rows with those of the groups, ``count`` of them, the last one repeated, in place of their leaves."""
        read = dict[int, list[Any]]()
        for place in {x.place for x in rows if isinstance(x, Leaf)}:
            leaves = jax.tree.leaves(groups[place]._read(self.numbers, self.lengths[place]))
            read[place] = [arrays.repeat_last(x, count) for x in leaves]
        return [read[x.place][x.number] if isinstance(x, Leaf) else x for x in rows]


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
        pairs = [*zip(self.groups, ragged, strict=True)]
        parts = (order[start : start + count] for start in range(0, size, count))
        return [Chunk(x, tuple(None if n is None else g._length(n[x], count) for g, n in pairs)) for x in parts]


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
        axis, size, placement: the axis that is streamed, its number of elements, and the devices that share a chunk.
        plan: its passes.
        checked: the passes that are known to use masks.
        lengths: those to which the longest elements of the example are padded.
        whole, part: the function traced for all elements of some lengths, and for a chunk of so many.
        compiled, exported: a pass on so many elements of each device, also as bytes.
        bytes_of: what the largest pass on so many elements of each device takes, with rows that are read ahead.

    Args:
        alone: chunks are run by other processes, each with one device.
        masks: elements may be lost, so none may know the number of all.
        options: compiler options of the passes.
    """

    def __init__(self, call: Call, *, alone: bool, masks: bool, options: dict[str, Any] | None) -> None:
        self._trace, self._options, self.size = call.trace, options, call.size or 0
        self.whole, self.part = functools.cache(self._whole), functools.cache(self._part)
        self.compiled, self.exported = functools.cache(self._compile), functools.cache(self._export)
        self.bytes_of = functools.cache(self._bytes_of)
        self.checked = set[Pass]()
        self.lengths = lengths = call.chunks(self.size, self.size)[0].lengths if self.size else ()
        whole = self.whole(lengths)
        self.axis = _trace.axis_of(whole.closed, call.size)
        self.size = self.axis.size
        with placing.alone() if alone else contextlib.nullcontext():
            placement = placing.place(self.axis)
            self.placement = dataclasses.replace(placement, mesh=placement.devices if placement.mesh_axes else None)
        if self.placement.is_explicit:
            raise AxisError(
                f"Stream: axis {self.axis.name!r} lies on a mesh with Explicit axes, where sizes are part of types; "
                f"leave out its mesh, or make it with axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        if alone and jax_api.calls_back(whole.closed.jaxpr):
            raise AxisError(
                "Stream: fn calls Python while it runs (jax.pure_callback, eqx.error_if and the like), and map= sends "
                "compiled programs without any code; leave out map, or the checks: diffrax has throw=False"
            )
        few, dims = self._some(5 + (self.size == 5), lengths)
        if masks:
            _trace.require_uncounted(whole, few, self.size)
        self.plan = Plan(whole, few, self.axis.name, dims)

    def _whole(self, lengths: Lengths) -> Flat:
        with placing.alone(), placing.entered(chunk=_trace.Sized(None, 0, 0)):
            flat = self._trace(self.size, lengths)
        if lengths == self.lengths:
            return flat
        first = self.whole(self.lengths)
        _trace.require_same(first, flat, "elements of another length")
        parts = [v for one in self.plan.passes for v in one.results[: len(one.kinds)]]
        for v in (*parts, *(v for v in flat.results if isinstance(v, int))):
            if first.avals[v].shape != flat.avals[v].shape:
                raise AxisError(
                    f"Stream: values of which elements of different length have different numbers are reduced or "
                    f"returned, at {self.plan.line(v)}; reduce them over an element's rows, with its mask"
                )
        return flat

    def _part(self, count: int, lengths: Lengths) -> Flat:
        """Return the function traced for a chunk, with the literals of the trace for all elements."""
        if count == self.size:
            return self.whole(lengths)
        part = self._some(count, lengths)[0]
        part.operations = _trace.with_literals(self.whole(lengths), part)
        return part

    def traceable(self, count: int) -> int:
        """Return the same count, but two in place of one for which JAX does other operations than for more."""
        if count == 1 < self.size:
            try:
                self.part(count, self.lengths)
            except AxisError:
                return 2
        return count

    def _some(self, count: int, lengths: Lengths) -> tuple[Flat, list[int | None]]:
        """Return the function traced for some elements, and the dimension of the elements in each of its values."""
        try:
            with placing.alone(), placing.entered(chunk=_trace.Sized(self.axis.name, self.size, count)):
                part = self._trace(count, lengths)
        except Exception as error:
            raise AxisError(
                f"Stream: fn can be traced for its {self.size} elements, but not for {count}, as chunks are: "
                f"{type(error).__name__}: {error}. If it writes their number out, take it from an argument: "
                f"jnp.arange(x.shape[0]); an array of all elements, beside groups, is given as px.Groups.of_arrays(x)"
            ) from error
        one = ": give at_once=2 or more" if count == 1 else ""
        _trace.require_same(self.whole(lengths), part, f"{count} of its {self.size} elements{one}")
        return part, _trace.dims_of(self.whole(lengths), part, self.size, count)

    def _compile(self, one: Pass, count: int, lengths: Lengths) -> Callable[..., list[Any]]:
        """Return ``(*shared, *rows)`` → parts of reductions, rows. Nothing is sent.

        Booleans ``(num_devices * count,)`` may come last, which rows are elements.
        """
        fn = one.program(self.whole(lengths) if one.is_once else self.part(count, lengths))[0]
        ins = [*(self.plan.dims[v] for v in (*one.shared, *one.rows)), 0]

        def on_devices(*args: Any) -> list[Any]:
            return placing.on_devices(fn, self.placement, ins[: len(args)], self.dims_of(one))(*args)

        return jax.jit(fn if one.is_once else on_devices, compiler_options=self._options)

    def dims_of(self, one: Pass) -> list[int]:
        """Return the dimension of the devices in each part of a reduction, and of the elements in rows."""
        return [*[0] * len(one.kinds), *(self.plan.dims[v] or 0 for v in one.results[len(one.kinds) :])]

    def laid(self, rows: Any, dim: int, count: int) -> Any:
        """Lay the rows of this process's devices, ``count`` on each, over them, as part of those of all devices."""
        target = arrays.sharding(self.placement, dim)
        if target is None:
            return rows
        if is_key(rows):
            return jax.random.wrap_key_data(self.laid(plain(rows), dim, count), impl=jax.random.key_impl(rows))
        shape = (*rows.shape[:dim], count * self.placement.num_devices, *rows.shape[dim + 1 :])
        return jax.make_array_from_process_local_data(target, rows, shape)

    def local(self, x: Any, dim: int) -> np.ndarray:
        """Return the rows, in this dimension, that lie on this process's devices, in the host's memory."""
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(jax.device_get(x))
        parts = {shard.index[dim].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate(jax.device_get([parts[start] for start in sorted(parts)]), dim)

    def _export(self, one: Pass, count: int, lengths: Lengths, masked: bool) -> bytes:
        """Return it for one device, as any process with CPU devices can run it."""
        fn, structs = one.program(self.part(count, lengths))
        with check.needed("px.Stream(map=…)", "pool"):
            return bytes(
                jax.export.export(jax.jit(fn), platforms=["cpu"])(*structs[: None if masked else -1]).serialize()
            )

    def places(self, count: int) -> np.ndarray:
        """Return which rows of a chunk of ``count`` on each device lie on this process's devices."""
        whole = np.arange(count * self.placement.num_devices)
        if not self.placement.spans_processes:
            return whole
        target: Any = arrays.sharding(self.placement)
        indices = target.addressable_devices_indices_map(whole.shape)
        return np.unique(np.concatenate([whole[at] for at in indices.values()]))

    def _bytes_of(self, count: int, lengths: Lengths) -> int:
        needed, devices = [], self.placement.num_devices
        for one in self.plan.passes:
            fn, (*structs, _) = one.program(self.part(count, lengths))
            used: Any = jax.jit(fn, compiler_options=self._options).lower(*structs).compile().memory_analysis()
            each = used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes
            ahead = sum(x.size * x.dtype.itemsize for x in structs[len(one.shared) :])
            needed.append(devices * (each + READERS * ahead))
        return max(needed)
