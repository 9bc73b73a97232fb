"""A call that an engine runs: its arguments told apart, its function traced and cut, for each length of elements."""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, placing
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import arguments, pytrees
from paraxis._core import programs
from paraxis._jax import dtypes, jax_api, structure
from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, Literal
from paraxis.engines._flat import Flat, Step, Value, axes_of, flat, placement_of, shape
from paraxis.engines._groups import Groups, rounded_up
from paraxis.engines._padding import can_differ
from paraxis.engines._plan import Keep, Plan, plan
from paraxis.engines._stage import Stage
from paraxis.errors import AxisError, DataError, LoweringError, ShapeError

Length = int | None
"""The number of rows to which elements are filled up; ``None``: they all have the same shapes."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Elements that are run together: their numbers, and their common length."""

    numbers: np.ndarray
    length: Length


class Job:
    """A function and its arguments, with the axis whose elements are run in turns.

    ``elsewhere``: it is to be run by other processes, each on one device, whatever its axes say.
    """

    def __init__(
        self,
        who: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        keep: Keep,
        known: dict[Any, Any] | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        self.who, self.fn = who, fn
        self.keep: Keep = keep
        self._placing = placing.alone if elsewhere else contextlib.nullcontext
        if jax_api.is_tracing() or arrays.is_traced(args):
            raise LoweringError(
                f"{who}: args must be arrays and groups, got traced ones: an engine is a loop outside of JAX and "
                f"cannot be traced, but it was called inside jax.jit, jax.grad or the like; write "
                f"px.Stream(at_once=64).run(jax.grad(fn), w, groups), and jit none of it"
            )
        self._leaves, self._structure = jax.tree.flatten(pytrees.sealed(tuple(args)), is_leaf=_is_groups)
        arguments.arrays(who, "args", [leaf for leaf in self._leaves if _is_traced(leaf)])
        arguments.no_cut(who, "args", args)
        if elsewhere:
            self._leaves = [arrays.unbound(x) if _is_spread(x) else x for x in self._leaves]
        self.groups = [leaf for leaf in self._leaves if isinstance(leaf, Groups)]
        counts = {len(groups) for groups in self.groups}
        if len(counts) > 1:
            told = " and ".join(map(str, sorted(counts)))
            raise ShapeError(f"{who}: groups must have equally many elements, got {told}")
        told = {tuple(groups.lengths) for groups in self.groups if groups.lengths is not None}
        if len(told) > 1:
            raise ShapeError(
                f"{who}: groups with lengths must have the same ones, since elements are ordered by them, got two "
                f"that differ; write one px.Groups of elements that hold both, or fill up one of them yourself"
            )
        self.ragged = next((groups for groups in self.groups if groups.lengths is not None), None)
        self._count = counts.pop() if counts else None
        self._traces: dict[Length, Traced] = {}
        self._facts: dict[str, int] = {}
        if known is not None:
            self._traces, self._facts = known.setdefault(self._key, ({}, {}))

    @functools.cached_property
    def axis(self) -> Axis:
        """The axis that the groups' elements lie along."""
        closed = self.traced(self.longest).closed
        found = axes_of(closed)
        if self._count not in (None, *found.values()):
            found = axes_of(closed, within=True)
        fits = {name: size for name, size in found.items() if self._count in (None, size)}
        if len(fits) == 1:
            return Axis(*next(iter(fits.items())))
        told = ", ".join(f"{name!r} of {size}" for name, size in found.items()) or "none"
        if self._count is None:
            raise AxisError(
                f"{self.who}: fn must map along one axis, or get groups that say along which, got axes: {told}"
            )
        raise AxisError(
            f"{self.who}: groups has {self._count} elements, and fn must map along one axis of that size; its axes: "
            f"{told}. Write @px.program(clients={self._count})"
        )

    @functools.cached_property
    def placement(self) -> Placement:
        """Return where the program maps its elements; if it maps none, where it would."""
        with self._placing():
            return placement_of(self.traced(self.longest).closed, self.axis.name) or placing.place(self.axis)

    def chunks(self, count: int) -> list[Chunk]:
        """Return the elements in chunks of ``count``, the last one shorter. Longer elements are first."""
        size = self.axis.size
        starts = range(0, size, count)
        if self.ragged is None:
            return [Chunk(np.arange(start, min(start + count, size)), None) for start in starts]
        lengths = self.ragged.lengths
        assert lengths is not None
        order = np.argsort(-lengths, kind="stable")
        parts = (order[start : start + count] for start in starts)
        shapes = self.ragged._shapes_of(count)
        return [Chunk(part, rounded_up(int(lengths[part[0]]), shapes)) for part in parts]

    def most_filled(self, chunks: Sequence[Chunk]) -> int | None:
        """Return the first chunk in half of whose elements padding could be otherwise, or where it is in most."""
        if self.ragged is None or self.ragged.lengths is None:
            return None
        lengths = self.ragged.lengths
        shares = [can_differ(lengths[chunk.numbers], chunk.length or 0).mean() for chunk in chunks]
        at = int(np.argmax(np.minimum(shares, 0.5)))
        return at if shares[at] else None

    def told(self, where: "Rows") -> tuple[str, str]:
        """Return the argument of ``fn`` that a leaf of groups belongs to, and the leaf, for errors."""
        assert isinstance(where, tuple)
        groups, leaf = where
        path, _ = jax.tree_util.tree_leaves_with_path(groups._first)[leaf]
        return next(name for name, x in self._named if x is groups), jax.tree_util.keystr(path)

    @property
    def _named(self) -> list[tuple[str, Any]]:
        """The leaves of the arguments, named as ``fn`` names them; groups have the name of the argument they are in."""
        paths = jax.tree_util.tree_leaves_with_path(self._structure.unflatten(self._leaves), is_leaf=_is_groups)
        try:
            names = [p.name for p in inspect.signature(self.fn).parameters.values() if p.kind in _BY_POSITION]
        except (TypeError, ValueError):
            names = []
        found: list[tuple[str, Any]] = []
        for (at, *path), x in paths:
            name = names[at.idx] if at.idx < len(names) else f"args[{at.idx}]"
            found.append((name if _is_groups(x) else name + jax.tree_util.keystr(tuple(path)), x))
        return found

    @property
    def longest(self) -> Length:
        """The greatest length there is: as good as any to see what the function maps along."""
        return None if self.ragged is None else int(self.ragged._shapes_of(1)[-1])

    def traced(self, length: Length) -> "Traced":
        """Return the function's trace for elements of this length."""
        if length not in self._traces:
            self._traces[length] = self._trace(length)
        return self._traces[length]

    def remembered(self, what: str, make: Callable[[], int]) -> int:
        """Return something that depends on types only, found out once."""
        if what not in self._facts:
            self._facts[what] = make()
        return self._facts[what]

    @property
    def _key(self) -> Any:
        """Return what a trace depends on."""
        kinds = []
        for leaf in self._leaves:
            if isinstance(leaf, Groups):
                look = jax.tree.map(
                    lambda x: (x.shape, str(x.dtype)), leaf._structs(None if leaf.lengths is None else 1)
                )
                kinds.append((len(leaf), leaf.lengths is not None, str(look)))
            elif _is_traced(leaf):
                aval = jax_api.typed_struct(leaf)
                kinds.append((aval.shape, aval.dtype, aval.weak_type, aval.sharding))
            else:
                kinds.append(structure.key(leaf))
        return (self._structure, *kinds, jax.sharding.get_abstract_mesh(), dtypes.is_wide())

    def _stands(self, length: Length) -> list[Any]:
        """Return what each argument of the trace stands for: an array, or a leaf of groups."""
        found: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, Groups):
                count = len(jax.tree.leaves(leaf._structs(length if leaf.lengths is not None else None)))
                found += [(leaf, number) for number in range(count)]
            elif _is_traced(leaf):
                found.append(leaf)
        return found

    def _trace(self, length: Length) -> "Traced":
        structs: list[Any] = []
        trees: list[Any] = []
        for leaf in self._leaves:
            if isinstance(leaf, Groups):
                leaves, tree = jax.tree.flatten(leaf._structs(length if leaf.lengths is not None else None))
                trees.append((tree, len(leaves)))
                structs += leaves
            elif _is_traced(leaf):
                trees.append(None)
                structs.append(jax_api.typed_struct(leaf))

        def run(*traced: Any) -> Any:
            given, told = iter(traced), iter(trees)
            whole = []
            for leaf in self._leaves:
                if isinstance(leaf, Groups):
                    tree, number = next(told)
                    whole.append(jax.tree.unflatten(tree, [next(given) for _ in range(number)]))
                elif _is_traced(leaf):
                    next(told)
                    whole.append(next(given))
                else:
                    whole.append(leaf)
            return pytrees.sealed(self.fn(*pytrees.opened(jax.tree.unflatten(self._structure, whole))))

        vars(run)["__wrapped__"] = self.fn
        try:
            with self._placing():
                closed, out_tree = jax_api.trace(run, structs, {})
        except Exception as error:
            for groups in self.groups:
                error.add_note(f"{self.who}: {_told(groups, length)}")
            if not self.groups:
                error.add_note(
                    f"{self.who}: none of args is px.Groups; of a list of elements, write px.Groups(clients)"
                )
            raise
        return Traced(closed, out_tree)

    def cut(self, length: Length) -> "Cut":
        """Return the function cut into passes, for elements of this length."""
        traced, stands = self.traced(length), self._stands(length)
        if traced.plan is None:
            axis, placement = self.axis.name, self.placement
            with self._placing():
                program = flat(traced.closed, axis)
                placed = [v for v, x in zip(program.arguments, stands, strict=True) if isinstance(x, tuple)]
                traced.plan = plan(program, placement, placed, self.keep)
        given = dict(zip(traced.plan.flat.arguments, stands, strict=True))
        return Cut(traced.plan, given, traced.out_tree)

    def description(self, chunks: Sequence[Chunk], at_once: str) -> dict[str, "Part"]:
        """Return what the numbers of a run depend on. What comes first may be why a part that follows is another."""
        lengths = list(dict.fromkeys(chunk.length for chunk in chunks))
        texts = [re.sub(r" at 0x[0-9a-f]+", "", str(self.traced(length).closed.jaxpr)) for length in lengths]
        numbers = [_NUMBER.findall(text) for text in texts]  # 0.1 of the user's is in the text, and no constant
        texts = [_NUMBER.sub("", text) for text in texts]
        constants = [x for length in lengths for x in _constants(self.traced(length).closed)]
        sizes = [f"{chunk.length}: {chunk.numbers.tolist()}" for chunk in chunks]
        elements: dict[str, Told] = {}
        given: dict[str, Told] = {}
        for name, x in self._named:
            if isinstance(x, Groups):
                first = jax.tree.leaves(x._first)
                elements[name] = f"{len(x)} elements, the first {', '.join(map(_kind, first))}", digest(*first)
                elements[f"{name}.ids"] = "", digest(*map(str, x.ids))
                elements[f"{name}.lengths"] = "", "" if x.lengths is None else digest(np.asarray(x.lengths))
            elif _is_traced(x):
                array = x if isinstance(x, jax.Array) else np.asarray(x)
                given[name] = _kind(array), digest(array)
        devices = str(self.placement.num_devices)
        most = "" if self.ragged is None else str(self.ragged._most)
        dealt = {"the number of devices": (devices, ""), "at_once": (at_once, ""), "num_shapes": (most, "")}
        return {
            "elements": Part.of(elements),
            "chunks": Part(digest(*sizes, devices), dealt),
            "keep": Part.of({"keep": (repr(self.keep), "")}),
            "arguments": Part.of(given),
            "program": Part(digest(*texts), {"jax_enable_x64": (str(dtypes.is_wide()), "")}),
            "constants": Part(
                digest(*constants, *map(str, numbers)),
                {"what fn closes over": ("", digest(*constants))}
                | {f"number {at} in fn": (number, "") for at, number in enumerate(numbers[0], 1)},
            ),
        }


_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\w.+-]*|inf|nan|True|False)(?=:\w+\[\])")
"""A number in the text of a trace: ``mul b 0.5:f32[]``."""

Told = tuple[str, str]
"""Words of an error about something that a run depends on, and a digest of what they do not say."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of what a run depends on: a digest of it, and by their names what an error can tell of it."""

    digest: str
    told: Mapping[str, Told]

    @classmethod
    def of(cls, told: Mapping[str, Told]) -> "Part":
        """Return a part that is nothing but what an error can tell."""
        return cls(digest(*(text for name, each in told.items() for text in (name, *each))), told)


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


@dataclasses.dataclass
class Traced:
    """A function's trace, the structure of its result, and its passes, once they are decided."""

    closed: ClosedJaxpr
    out_tree: Any
    plan: Plan | None = None


def _constants(closed: ClosedJaxpr) -> Iterator[Any]:
    """Yield the arrays in a trace, those in bodies included, which its text leaves out or shortens."""
    yield from closed.consts
    for eqn in closed.jaxpr.eqns:
        yield from (v.val for v in eqn.invars if isinstance(v, Literal) and shape(v))
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, (ClosedJaxpr, Jaxpr)):
                    yield from _constants(item if isinstance(item, ClosedJaxpr) else ClosedJaxpr(item, ()))


def digest(*parts: Any) -> str:
    """Return a digest of texts, and of arrays' numbers."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            found.update(f"{len(part)} {part}".encode())
        else:
            is_key = jnp.issubdtype(part.dtype, jax.dtypes.extended)
            host = np.asarray(jax.random.key_data(part) if is_key else part)
            found.update(f"{host.dtype}{host.shape}".encode())
            found.update(np.ascontiguousarray(host).tobytes())
    return found.hexdigest()


def _told(groups: Groups, length: Length) -> str:
    """Return what stands in place of groups, for who reads an error of a function that was traced with it."""
    count = len(groups)
    is_ragged = groups.lengths is not None
    structs = groups._structs(length if is_ragged else None)
    leaves = jax.tree_util.tree_leaves_with_path(structs.data if is_ragged else structs)
    told = ", ".join(f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}".strip() for path, x in leaves[:8])
    filled = ", filled up, with mask and count" if is_ragged else "; no lengths are given, so there is no mask or count"
    return f"fn got groups as {count} elements, {told}{filled}. Its axis has that size: @px.program(clients={count})"


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _is_spread(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and len(leaf.devices()) > 1


def _is_groups(leaf: Any) -> bool:
    return isinstance(leaf, Groups)


def _is_traced(leaf: Any) -> bool:
    return not isinstance(leaf, bool) and isinstance(leaf, (int, float, complex, np.ndarray, np.generic, jax.Array))


@dataclasses.dataclass
class Pieces:
    """Rows that were computed: those of each chunk, on the host, or elsewhere."""

    parts: list[Any] = dataclasses.field(default_factory=list)


Rows = tuple[Groups, int] | Pieces | np.ndarray | jax.Array
"""A source of rows: a leaf of groups, a result of a pass, an array ``(size, ...)``."""


def of_chunk(rows: Rows, chunk: Chunk, at: int, read: dict[int, list[Any]]) -> Any:
    """Return the rows of a chunk, the one with this number; ``read`` has the leaves of groups that were read for it."""
    if isinstance(rows, Pieces):
        return loaded(rows.parts[at])
    if not isinstance(rows, tuple):
        return on_host(rows)[chunk.numbers]
    groups, leaf = rows
    if id(groups) not in read:
        length = chunk.length if groups.lengths is not None else None
        read[id(groups)] = jax.tree.leaves(groups._for_devices(chunk.numbers, length))
    return read[id(groups)][leaf]


class Elsewhere(abc.ABC):
    """Rows that are not in this process's memory."""

    @abc.abstractmethod
    def load(self) -> np.ndarray:
        """Return them."""


@dataclasses.dataclass(frozen=True)
class Saved(Elsewhere):
    """Rows in a file."""

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, rows: np.ndarray, path: Path) -> "Saved":
        """Write rows to a file.

        Raises:
            DataError: if there is no room.
        """
        try:
            path.write_bytes(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise DataError(
                f"rows that are kept between passes cannot be written to {str(path)!r}: {error}; make room, set the "
                f"environment variable TMPDIR to a folder on another disk, or write keep='recompute'"
            ) from error
        return cls(str(path), rows.dtype, rows.shape)

    def load(self) -> np.ndarray:
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.memmap(self.path, self.dtype, "r", shape=self.shape)


def loaded(part: Any) -> Any:
    """Return rows that may be elsewhere."""
    return part.load() if isinstance(part, Elsewhere) else part


def on_host(rows: Any) -> Any:
    """Return rows in the host's memory. Random keys stay where they are."""
    return rows if jnp.issubdtype(rows.dtype, jax.dtypes.extended) else np.asarray(rows)


def numpy_of(rows: Any) -> Any:
    return np if isinstance(rows, np.ndarray) else jnp


@dataclasses.dataclass
class Cut:
    """A program cut into passes, with what is known so far: shared values, and where rows are read.

    Attributes:
        plan: of the program.
        given: what each argument stands for: a value, or rows.
        out_tree: structure of the result.
    """

    plan: Plan
    given: dict[Value, Any]
    out_tree: Any = None

    def __post_init__(self) -> None:
        plan = self.plan
        whole = {v: x for v, x in self.given.items() if not isinstance(x, (tuple, Pieces))}
        known = {**whole, **plan.flat.constants}
        self.shared: dict[Value, Any] = {v: x for v, x in known.items() if v not in plan.sources}
        self.rows: dict[Value, Rows] = {v: x for v, x in known.items() if v in plan.sources}
        self.rows.update((v, x) for v, x in self.given.items() if isinstance(x, (tuple, Pieces)))

    @property
    def program(self) -> Flat:
        return self.plan.flat

    def stage(self, level: int) -> Stage:
        return Stage.of(self.plan, level)

    @property
    def results(self) -> list[Any]:
        """Shared results as values, others as :data:`Rows`."""
        found = []
        for v in self.program.results:
            if isinstance(v, Literal):
                found.append(jnp.asarray(v.val))
            else:
                found.append(self.know([v])[0] if self.plan.dims[v] is None else self.rows[v])
        return found

    def act(self, level: int) -> None:
        """Have the effects that are computed from shared values of a level."""
        acting = [step for step in self.plan.acting(level, "shared") if not self._is_done(step)]
        if acting:
            self.know([v for step in acting for v in step.operands], acting)

    def _is_done(self, step: Step) -> bool:
        return bool(step.outvars) and all(v in self.shared for v in step.outvars)

    def know(self, values: Sequence[Value], acting: Sequence[Step] = ()) -> list[Any]:
        """Return shared values, computed from those that are known, which they become themselves."""
        wanted = {*self._steps_to(values), *acting}
        steps = [step for step in self.program.steps if step in wanted]
        if steps:
            inside = {v for step in steps for v in step.outvars}
            needed = list(dict.fromkeys(v for step in steps for v in step.operands if v not in inside))
            found = list(dict.fromkeys(v for step in steps for v in step.outvars))
            operands = [self.shared[v] for v in needed]
            structs = [jax_api.struct(x) for x in operands]
            key = (*map(id, steps), *((x.shape, x.dtype, x.weak_type) for x in structs))

            def run(*args: Any) -> list[Any]:
                env = dict(zip(needed, args, strict=True))
                for step in steps:
                    read = [v.val if isinstance(v, Literal) else env[v] for v in step.invars]
                    env.update(zip(step.outvars, jax_api.bind(step.eqn, step.params, read), strict=True))
                return [env[v] for v in found]

            if key not in self.plan.between:
                self.plan.between[key] = programs.by_structure(jax_api.trace(run, structs, {})[0])
            self.shared.update(zip(found, self.plan.between[key](*operands), strict=True))
        return [self.shared[v] for v in values]

    def _steps_to(self, values: Sequence[Value]) -> set[Step]:
        wanted, steps = list(values), set[Step]()
        while wanted:
            v = wanted.pop()
            if v not in self.shared and self.plan.made[v] not in steps:
                steps.add(self.plan.made[v])
                wanted += self.plan.made[v].operands
        return steps

    def learn(self, other: "Cut") -> None:
        """Take over what another length's program knows and what is the same in this one."""
        pairs = zip(other.program.values, self.program.values, strict=True)
        differing = self._differing(other)
        for theirs, ours in pairs:
            if theirs in other.shared and ours not in differing and ours not in self.shared:
                self.shared[ours] = other.shared[theirs]

    def _differing(self, other: "Cut") -> set[Value]:
        """Return the shared values that are computed otherwise than for another length."""
        if other.plan not in self.plan.differing:
            self.plan.differing[other.plan] = self._compared(other)
        return self.plan.differing[other.plan]

    def _compared(self, other: "Cut") -> set[Value]:
        if [s.name for s in self.program.steps] != [s.name for s in other.program.steps]:
            raise LoweringError(
                "the program does other operations for elements of another length; write it so that only shapes differ"
            )
        found: set[Value] = set()
        constants = zip(other.program.constants.items(), self.program.constants.items(), strict=True)
        found.update(v for (_, a), (v, b) in constants if jnp.shape(a) != jnp.shape(b) or not np.array_equal(a, b))
        for theirs, ours in zip(other.program.steps, self.program.steps, strict=True):
            if ours.outvars and self.plan.dims[ours.outvars[0]] is None and self.plan.kinds[ours] == "shared":
                same = structure.key(theirs.params) == structure.key(ours.params)
                literals = [(a, b) for a, b in zip(theirs.invars, ours.invars, strict=True) if isinstance(b, Literal)]
                same = same and all(isinstance(a, Literal) and np.array_equal(a.val, b.val) for a, b in literals)
                if not same or any(v in found for v in ours.operands):
                    found.update(ours.outvars)
        return found
