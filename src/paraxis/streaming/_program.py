"""A call and its program: arguments told apart, the function traced, its passes decided and compiled."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._axes import arrays, placing
from paraxis._calls import check, pytrees
from paraxis._core import programs
from paraxis._jax import dtypes, jax_api, structure
from paraxis.errors import LoweringError, ShapeError
from paraxis.streaming import _trace
from paraxis.streaming._groups import Groups
from paraxis.streaming._passes import Pass, Plan
from paraxis.streaming._trace import Flat

Lengths = tuple[int | None, ...]
"""For each of a call's groups, the length to which their elements are padded; ``None``: they have the same shapes."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Elements that are run together: their numbers, and the lengths to which they are padded."""

    numbers: np.ndarray
    lengths: Lengths


class Call:
    """A function and its arguments.

    Attributes:
        groups: among the arguments, in order.
        size: how many elements they have; ``None``: there are no groups.
    """

    def __init__(self, who: str, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        self.who, self.fn = who, fn
        if jax_api.is_tracing() or arrays.is_traced(args):
            raise LoweringError(
                f"{who}: px.Stream is a loop outside of JAX and cannot be traced, but it was called inside jax.jit, "
                f"jax.grad or the like; write px.Stream(at_once=64).run(jax.grad(fn), w, groups), and jit none of it"
            )
        self.leaves, self.structure = jax.tree.flatten(pytrees.sealed(tuple(args)), is_leaf=_is_groups)
        check.no_cut(who, "args", [leaf for leaf in self.leaves if not _is_groups(leaf)])
        self.groups = [leaf for leaf in self.leaves if _is_groups(leaf)]
        sizes = {len(groups) for groups in self.groups}
        if len(sizes) > 1:
            raise ShapeError(f"{who}: groups must have equally many elements, got {' and '.join(map(str, sizes))}")
        self.size = sizes.pop() if sizes else None

    @property
    def key(self) -> Any:
        """What a trace depends on."""
        kinds = [_kind(leaf) for leaf in self.leaves]
        return (self.structure, *kinds, jax.sharding.get_abstract_mesh(), dtypes.is_wide())

    def values(self) -> list[Any]:
        """Return what each argument of the trace stands for: an array, or groups with the number of a leaf."""
        found: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Groups):
                found += [(leaf, number) for number in range(leaf._num_leaves)]
            elif _is_array(leaf):
                found.append(leaf)
        return found

    def chunks(self, size: int, count: int) -> list[Chunk]:
        """Return the elements in chunks of ``count``, the last one shorter. Longer elements come first."""
        ragged = [groups.lengths for groups in self.groups if groups.lengths is not None]
        order = np.argsort(-sum(ragged), kind="stable") if ragged else np.arange(size)  # pyright: ignore[reportOperatorIssue]
        parts = (order[start : start + count] for start in range(0, size, count))
        return [Chunk(part, tuple(_length(groups, part, count) for groups in self.groups)) for part in parts]

    def trace(self, size: int | None, lengths: Lengths) -> tuple[Any, Any]:
        """Return the jaxpr of the function for so many elements, padded to these lengths."""
        structs: list[Any] = []
        trees: list[Any] = []
        padded = iter(lengths)
        for leaf in self.leaves:
            if isinstance(leaf, Groups):
                leaves, tree = jax.tree.flatten(leaf._structs(len(leaf) if size is None else size, next(padded)))
                trees.append(tree)
                structs += leaves
            elif _is_array(leaf):
                structs.append(jax_api.typed_struct(leaf))

        def run(*traced: Any) -> Any:
            given, forms = iter(traced), iter(trees)
            leaves = []
            for leaf in self.leaves:
                if isinstance(leaf, Groups):
                    tree = next(forms)
                    leaves.append(jax.tree.unflatten(tree, [next(given) for _ in range(tree.num_leaves)]))
                else:
                    leaves.append(next(given) if _is_array(leaf) else leaf)
            return pytrees.sealed(self.fn(*pytrees.opened(jax.tree.unflatten(self.structure, leaves))))

        vars(run)["__wrapped__"] = self.fn  # JAX's errors then name the user's function
        return jax_api.trace(run, structs, {})

    def name_of(self, groups: Groups) -> str:
        """Return the name of the argument of ``fn`` that groups are, or are in."""
        paths = jax.tree_util.tree_leaves_with_path(self.structure.unflatten(self.leaves), is_leaf=_is_groups)
        at = next(path[0].idx for path, leaf in paths if leaf is groups)
        with contextlib.suppress(TypeError, ValueError, IndexError):
            return [*inspect.signature(self.fn).parameters][at]
        return f"args[{at}]"


def _length(groups: Groups, numbers: np.ndarray, count: int) -> int | None:
    lengths = groups.lengths
    return None if lengths is None else groups._length(lengths[numbers], count)


def _is_groups(leaf: Any) -> bool:
    return isinstance(leaf, Groups)


def _is_array(leaf: Any) -> bool:
    return not isinstance(leaf, bool) and isinstance(leaf, (int, float, complex, np.ndarray, np.generic, jax.Array))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Groups):
        leaves, tree = jax.tree.flatten(leaf._first)
        is_long = [False] * len(leaves) if leaf.lengths is None else leaf._is_long
        looks = [(x.shape[long:], x.dtype) for x, long in zip(leaves, is_long, strict=True)]
        return len(leaf), leaf.lengths is None, tree, *looks
    if _is_array(leaf):
        aval = jax_api.typed_struct(leaf)
        return aval.shape, aval.dtype, aval.weak_type, aval.sharding
    return structure.key(leaf)


class Program:
    """A function for arguments of one type.

    Attributes:
        axis, placement: the axis that is streamed, and where its elements lie.
        plan: its passes.
        checked: the passes of which it is known that they use masks.

    Args:
        call: as an example of the arguments.
        alone: chunks are run by other processes, each with one device.
        options: compiler options of the passes.
    """

    def __init__(self, call: Call, *, alone: bool, options: dict[str, Any] | None) -> None:
        self.who = call.who
        self._placing = placing.alone if alone else contextlib.nullcontext
        self._options = options
        self._traces: dict[tuple[int, Lengths], Flat] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.checked: set[Pass] = set()
        self.fits: int | None = None
        lengths = call.chunks(call.size, call.size)[0].lengths if call.size else ()
        try:
            with self._placing(), _trace.sized(None, 0, 0):
                closed, out_tree = call.trace(None, lengths)
        except Exception as error:
            if not call.groups:
                error.add_note(f"{self.who}: no argument is px.Groups; of a list of elements, write px.Groups(clients)")
            raise
        self.axis = _trace.axis_of(self.who, closed, call.size)
        self.size = self.axis.size
        with self._placing():
            self.placement = _trace.placement_of(closed.jaxpr, self.axis.name) or placing.place(self.axis)
        if self.placement.is_explicit:
            raise LoweringError(
                f"{self.who}: axis {self.axis.name!r} lies on a mesh with Explicit axes, where sizes are part of types;"
                f" leave out its mesh, or make it with axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        whole = self._traces[self.size, lengths] = Flat.of(_trace.opened(closed, self.axis.name), out_tree)
        few = 2 * self.placement.num_devices + (2 * self.placement.num_devices == self.size)
        dims = _trace.elements_dims(self.who, whole, self._part(call, few, lengths), self.size, few)
        self.plan = Plan(self.who, whole, dims, self.axis.name)

    @property
    def num_passes(self) -> int:
        return sum(one is not None for one in self.plan.passes)

    def trace(self, call: Call, size: int, lengths: Lengths) -> Flat:
        """Return the function traced for so many elements, with the literals of the trace for all of them."""
        key = size, lengths
        if key not in self._traces:
            if size == self.size:
                with self._placing(), _trace.sized(None, 0, 0):
                    closed, out_tree = call.trace(None, lengths)
                flat = Flat.of(_trace.opened(closed, self.axis.name), out_tree)
                first = next(flat for (count, _), flat in self._traces.items() if count == size)
                _trace.require_same_operations(self.who, first, flat, size, size)
            else:
                whole, part = self.trace(call, self.size, lengths), self._part(call, size, lengths)
                dims = _trace.elements_dims(self.who, whole, part, self.size, size)
                for v in (v for v, pair in enumerate(zip(dims, self.plan.dims, strict=True)) if pair[0] != pair[1]):
                    _trace.meet(self.who, whole.operations[self.plan.made[v]], f"of {size} it makes other shapes")
                flat = _trace.with_literals(self.who, part, whole)
            self._traces[key] = flat
        return self._traces[key]

    def _part(self, call: Call, count: int, lengths: Lengths) -> Flat:
        try:
            with self._placing(), _trace.sized(self.axis.name, self.size, count):
                closed, out_tree = call.trace(count, lengths)
        except Exception as error:
            if isinstance(error, LoweringError):
                raise
            raise LoweringError(
                f"{self.who}: fn can be traced for its {self.size} elements, but not for {count}, as chunks are: "
                f"{type(error).__name__}: {error}. If it writes their number out, take it from an argument: "
                f"jnp.arange(x.shape[0]); an array of all elements, beside groups, is given as px.Groups.of_arrays(x)"
            ) from error
        return Flat.of(_trace.opened(closed, self.axis.name), out_tree)

    def compiled(self, call: Call, one: Pass, chunk_size: int, lengths: Lengths) -> Callable[..., list[Any]]:
        """Return a pass on a chunk: ``(*shared, *rows)`` → parts of reductions, rows."""
        key = id(one), chunk_size, lengths
        if key not in self._compiled:
            fn, structs = one.program(self.trace(call, chunk_size, lengths))
            closed = jax_api.trace(fn, structs, {})[0]
            closed = jax_api.pruned(closed, closed.jaxpr.outvars)
            if self._options is None:
                self._compiled[key] = programs.by_structure(closed)
            else:
                self._compiled[key] = jax.jit(jax_api.jaxpr_as_fun(closed), compiler_options=self._options)
        return self._compiled[key]

    def between(self, call: Call, level: int, lengths: Lengths, values: dict[int, Any]) -> None:
        """Add to values what is computed of them before a pass."""
        block = self.plan.between[level]
        if block is None:
            return
        found = self.compiled(call, block, self.size, lengths)(*(values[v] for v in block.shared))
        values.update(zip(block.results, found, strict=True))

    def bytes_of(self, call: Call, one: Pass, count: int, lengths: Lengths) -> int:
        """Return the bytes that a pass on so many elements takes on all devices, and those of rows read ahead."""
        fn, structs = one.program(self.trace(call, count, lengths))
        used = jax.jit(fn, compiler_options=self._options).lower(*structs).compile().memory_analysis()
        assert used is not None
        each = used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes
        ahead = sum(x.size * x.dtype.itemsize for x in structs[len(one.shared) :])
        return self.placement.num_devices * each + READERS * ahead


READERS = 2
"""Threads that read elements ahead."""


def on_cpu_without_library_calls() -> dict[str, Any]:
    """Return compiler options with which a compiled program says all the memory that it takes.

    On CPU, XLA puts matrix products and what is between them into calls of a library, whose memory it does not count.
    """
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else {}
