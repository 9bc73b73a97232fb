"""A call and its program: arguments told apart, the function traced, its passes decided and compiled."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._core import arrays, check, dtypes, jax_api, placing, programs, pytrees, structure
from paraxis.errors import LoweringError, ShapeError
from paraxis.streaming import _trace
from paraxis.streaming._groups import Groups
from paraxis.streaming._passes import Pass, Plan
from paraxis.streaming._trace import Flat, Pair

Lengths = tuple[int | None, ...]
"""For each of a call's groups, the length to which their elements are padded; ``None``: they have the same shapes."""

READERS = 2
"""Threads that read elements ahead."""


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
        args = tuple(x if isinstance(x, Groups) else pytrees.sealed(x) for x in args)
        self.leaves, self.structure = jax.tree.flatten(args)
        self._arrays = [isinstance(x, _ARRAYS) and not isinstance(x, bool) for x in self.leaves]
        self.groups = [leaf for leaf in self.leaves if isinstance(leaf, Groups)]
        check.no_cut(who, "args", [leaf for leaf in self.leaves if isinstance(leaf, np.ndarray)])
        sizes = set(map(len, self.groups))
        if len(sizes) > 1:
            raise ShapeError(f"{who}: groups must have equally many elements, got {' and '.join(map(str, sizes))}")
        self.size = sizes.pop() if sizes else None

    @property
    def key(self) -> Any:
        """What a trace depends on."""
        kinds = [
            leaf._kind if isinstance(leaf, Groups) else jax.typeof(leaf) if is_array else structure.key(leaf)
            for leaf, is_array in zip(self.leaves, self._arrays, strict=True)
        ]
        return (self.structure, *kinds, jax.sharding.get_abstract_mesh(), dtypes.is_wide())

    def values(self) -> list[Any]:
        """Return what each argument of the trace stands for: an array, or numbers of groups and of a leaf of these."""
        found, place = list[Any](), 0
        for leaf, is_array in zip(self.leaves, self._arrays, strict=True):
            if isinstance(leaf, Groups):
                found += [(place, number) for number in range(leaf._num_leaves)]
                place += 1
            elif is_array:
                found.append(leaf)
        return found

    def chunks(self, size: int, count: int) -> list[Chunk]:
        """Return the elements in chunks of ``count``, the last one shorter. Longer elements come first."""
        ragged = [groups.lengths for groups in self.groups]
        if all(lengths is None for lengths in ragged):
            none = (None,) * len(ragged)
            return [Chunk(np.arange(start, min(start + count, size)), none) for start in range(0, size, count)]
        order = np.argsort(-sum(x for x in ragged if x is not None), kind="stable")
        chunks = []
        for part in (order[start : start + count] for start in range(0, size, count)):
            own = zip(self.groups, ragged, strict=True)
            chunks.append(Chunk(part, tuple(None if x is None else g._length(x[part], count) for g, x in own)))
        return chunks

    def trace(self, size: int | None, lengths: Lengths) -> Flat:
        """Return the function traced for so many elements, padded to these lengths."""
        given, padded = list[Any](), iter(lengths)
        for leaf, is_array in zip(self.leaves, self._arrays, strict=True):
            if isinstance(leaf, Groups):
                given.append(leaf._structs(len(leaf) if size is None else size, next(padded)))
            else:
                given.append(jax_api.typed_struct(leaf) if is_array else None)
        structs, tree = jax.tree.flatten(given)

        def run(*traced: Any) -> Any:
            leaves = zip(jax.tree.unflatten(tree, traced), self.leaves, strict=True)
            args = jax.tree.unflatten(self.structure, [fixed if x is None else x for x, fixed in leaves])
            return pytrees.sealed(self.fn(*pytrees.opened(args)))

        vars(run)["__wrapped__"] = self.fn  # JAX's errors then name the user's function
        return Flat.of(*jax_api.trace(run, structs, {}))

    def name_of(self, place: int) -> str:
        """Return the name of the argument of ``fn`` that groups are, or are in."""
        paths = jax.tree_util.tree_leaves_with_path(self.structure.unflatten(self.leaves))
        at = next(path[0].idx for path, leaf in paths if leaf is self.groups[place])
        with contextlib.suppress(TypeError, ValueError, IndexError):
            return [*inspect.signature(self.fn).parameters][at]
        return f"args[{at}]"


_ARRAYS = (int, float, complex, np.ndarray, np.generic, jax.Array)
"""Leaves that are traced; of other types, they are part of the program."""


class Program:
    """A function for arguments of one type.

    Attributes:
        axis, placement: the axis that is streamed, and where its elements lie.
        plan: its passes.
        checked: the passes of which it is known that they use masks.
        fits: how many elements fit into memory, once that is known.

    Args:
        call: as an example of the arguments.
        alone: chunks are run by other processes, each with one device.
        options: compiler options of the passes.
    """

    def __init__(self, call: Call, *, alone: bool, options: dict[str, Any] | None) -> None:
        self.who = call.who
        self._placing = placing.alone if alone else contextlib.nullcontext
        self._options = options
        self._traces: dict[tuple[int | None, Lengths], Flat] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._shardings: dict[int | None, Any] = {}
        self.checked: set[Pass] = set()
        self.fits: int | None = None
        lengths = call.chunks(call.size, call.size)[0].lengths if call.size else ()
        try:
            whole = self.whole(call, lengths)
        except Exception as error:
            if not call.groups:
                error.add_note(f"{self.who}: no argument is px.Groups; of a list of elements, write px.Groups(clients)")
            raise
        self.axis, placement = _trace.axis_of(self.who, whole.closed, call.size)
        self.size = self.axis.size
        with self._placing():
            self.placement = placement or placing.place(self.axis)
        if self.placement.is_explicit:
            raise LoweringError(
                f"{self.who}: axis {self.axis.name!r} lies on a mesh with Explicit axes, where sizes are part of types;"
                f" leave out its mesh, or make it with axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        self.plan = Plan(self._pair(call, 5 + (self.size == 5), lengths), self.axis.name)

    def whole(self, call: Call, lengths: Lengths) -> Flat:
        """Return the function traced for all elements."""
        if (None, lengths) not in self._traces:
            with self._placing(), _trace.sized(None, 0, 0):
                flat = self._traces[None, lengths] = call.trace(None, lengths)
            first = next(iter(self._traces.values()))
            if first is not flat:
                self._require_same(first, flat)
        return self._traces[None, lengths]

    def _require_same(self, first: Flat, flat: Flat) -> None:
        """Refuse values of all elements that have another shape where these have another length."""
        Pair(self.who, first, flat, self.size, self.size)
        wanted = [v for one in self.plan.passes for v in one.results[: len(one.kinds)]]
        for v in (*wanted, *(v for v in flat.results if isinstance(v, int))):
            if first.avals[v].shape != flat.avals[v].shape:
                raise LoweringError(
                    f"{self.who}: values of which elements of different length have different numbers are reduced or "
                    f"returned, at {self.plan.line(v)}; reduce them over an element's rows, with its mask"
                )

    def part(self, call: Call, count: int, lengths: Lengths) -> Flat:
        """Return the function traced for a chunk, with the literals of the trace for all elements."""
        if count == self.size:
            return self.whole(call, lengths)
        key = count, lengths
        if key not in self._traces:
            pair = self._pair(call, count, lengths)
            for v, (dim, known) in enumerate(zip(pair.dims(), self.plan.dims, strict=True)):
                if dim != known:
                    _trace.meet(self.who, pair.whole.operations[self.plan.made[v]], f"of {count} it makes other shapes")
            self._traces[key] = pair.with_literals()
        return self._traces[key]

    def _pair(self, call: Call, count: int, lengths: Lengths) -> Pair:
        whole = self.whole(call, lengths)
        try:
            with self._placing(), _trace.sized(self.axis.name, self.size, count):
                part = call.trace(count, lengths)
        except LoweringError:
            raise
        except Exception as error:
            raise LoweringError(
                f"{self.who}: fn can be traced for its {self.size} elements, but not for {count}, as chunks are: "
                f"{type(error).__name__}: {error}. If it writes their number out, take it from an argument: "
                f"jnp.arange(x.shape[0]); an array of all elements, beside groups, is given as px.Groups.of_arrays(x)"
            ) from error
        return Pair(self.who, whole, part, self.size, count)

    def compiled(self, call: Call, one: Pass, count: int, lengths: Lengths) -> Callable[..., list[Any]]:
        """Return a pass on so many elements: ``(*shared, *rows)`` → parts of sums, rows."""
        key = one, count, lengths
        if key not in self._compiled:
            fn, structs = one.program(self.part(call, count, lengths))
            closed = jax_api.trace(fn, structs, {})[0]
            if self._options is None:
                closed = jax_api.pruned(closed, closed.jaxpr.outvars)
                self._compiled[key] = programs.by_structure(closed)
            else:
                self._compiled[key] = jax.jit(jax_api.jaxpr_as_fun(closed), compiler_options=self._options)
        return self._compiled[key]

    def sharding(self, count: int | None) -> Any:
        """Return how so many rows lie on the devices, or what is shared; ``None``: there is one."""
        if count not in self._shardings:
            held = self.placement.holding(count or self.size)
            self._shardings[count] = arrays.sharding(held, rows=count is not None)
        return self._shardings[count]

    def bytes_of(self, call: Call, one: Pass, count: int, lengths: Lengths) -> int:
        """Return the bytes that a pass on so many elements takes on all devices, and those of rows read ahead."""
        fn, structs = one.program(self.part(call, count, lengths))
        used = jax.jit(fn, compiler_options=self._options).lower(*structs).compile().memory_analysis()
        assert used is not None
        each = used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes
        ahead = sum(x.size * x.dtype.itemsize for x in structs[len(one.shared) :])
        return self.placement.num_devices * each + READERS * ahead
