"""One pass over the elements as a function of what is shared and of one chunk.

    shared values, rows of a chunk, the elements' numbers  →  parts of reductions, rows that are kept or returned

A map is the core's own, of fewer elements: it lays the chunk over the devices and runs it as it would run all of them.
What lies between maps is applied to the chunk's rows; each result's shape is checked against what it was for all.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import placing
from paraxis._axes.placing import Placement
from paraxis._core import maps, primitives, programs
from paraxis._jax import jax_api
from paraxis._jax.jax_api import Literal
from paraxis.engines._flat import LOOPS, Atom, Step, Value, rebuilt, shape
from paraxis.engines._plan import Plan
from paraxis.errors import LoweringError


@dataclasses.dataclass
class Stage:
    """A pass: what it is given, what it gives, and the function, for chunks of any size.

    Attributes:
        shared: values that it is given whole.
        rows: values of which it is given a chunk's rows.
        gives: what it computes: parts of reductions, and rows.
        is_checked: whether it is known not to depend on padding.
    """

    plan: Plan
    level: int
    shared: list[Value]
    rows: list[Value]
    gives: list[Value]
    steps: list[Step]
    is_checked: bool = False
    _compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)
    _times: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    @classmethod
    def of(cls, plan: Plan, level: int) -> "Stage":
        """Return a pass of a plan, made when it is first asked for."""
        if level not in plan.stages:
            plan.stages[level] = cls._of(plan, level)
        return plan.stages[level]

    @classmethod
    def _of(cls, plan: Plan, level: int) -> "Stage":
        gives, acting = plan.of_pass(level), plan.acting(level)
        steps = plan.needs(gives, acting, level)
        made = {v for step in steps for v in step.outvars if not plan.is_given(v, level)}
        used: dict[Value, None] = {}
        for step in steps:
            for number, v in enumerate(step.invars):
                if isinstance(v, Value) and v not in made:
                    used.update(dict.fromkeys(_behind(plan, step, number, v)))
        index = plan.flat.index
        used.update((v, None) for v in gives if v not in made)
        shared = [v for v in used if plan.dims[v] is None]
        rows = [v for v in used if plan.dims[v] is not None and v is not index]
        return cls(plan, level, shared, rows, gives, steps)

    @property
    def is_empty(self) -> bool:
        return not self.gives and not self.steps

    def ran(self, count: int, num_processes: int) -> bool:
        """Note that chunks of ``count`` elements were run; return whether each process had run such before."""
        self._times[count] += 1
        return self._times[count] > num_processes

    def compiled(self, shared: Sequence[Any], rows: Sequence[Any], count: int) -> Callable[..., list[Any]]:
        """Return the pass for chunks of ``count`` elements: ``(*shared, *rows, numbers)`` → what it gives."""
        structs = [jax_api.struct(x) for x in (*shared, *rows)]
        key = (count, *((x.shape, x.dtype, x.weak_type) for x in structs))
        if key not in self._compiled:
            self._compiled[key] = self._traced(structs, count)
        return self._compiled[key]

    def exported(self, shared: Sequence[Any], count: int) -> bytes:
        """Return the pass for chunks of ``count`` elements, to be run by another process; random keys as numbers.

        Raises:
            LoweringError: if it calls back to this process, or gives random keys.
        """
        structs = [*map(jax_api.struct, shared), *self._structs_of_rows(count)]
        key = ("exported", count, *((x.shape, x.dtype) for x in structs))
        if key not in self._compiled:
            self._compiled[key] = self._as_bytes(structs, count)
        return self._compiled[key]

    def _as_bytes(self, structs: Sequence[Any], count: int) -> bytes:
        self._require_no_calls_back()
        numbers = jax.ShapeDtypeStruct((count,), jnp.int32)
        plain = [jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for x in structs]
        kinds = [str(jax.random.key_impl(jnp.zeros((), x.dtype))) if _is_key(x) else None for x in structs]

        def run(*args: Any) -> list[Any]:
            *given, last = args
            found = (x if k is None else jax.random.wrap_key_data(x, impl=k) for x, k in zip(given, kinds, strict=True))
            return self.run([*found, last], count)

        return jax_api.exported(run, [*plain, numbers])

    @functools.cached_property
    def calling_back(self) -> Step | None:
        """The first operation that calls Python, or does something besides giving results."""
        for step in self.steps:
            if step.effects or "callback" in step.name or any(map(jax_api.calls_back, jax_api.subjaxprs(step.eqn))):
                return step
        return None

    def _require_no_calls_back(self) -> None:
        if self.calling_back is not None:
            raise LoweringError(
                f"the program calls back to this process, at {self.calling_back.line}, which other processes cannot; "
                f"leave the callback out, or run it here: px.Stream(at_once=64)"
            )
        for v in self.gives:
            if _is_key(v.aval):
                raise LoweringError(
                    f"random keys are kept between passes, or returned, from {self.plan.made[v].line}, which other "
                    f"processes cannot give; make the keys where they are used: px.keys(key)"
                )

    def bytes_for(self, count: int) -> int:
        """Return the bytes that the devices together need to compute a pass over ``count`` elements, rows included."""
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.shared]
        structs += self._structs_of_rows(count)
        numbers = jax.ShapeDtypeStruct((count,), jnp.int32)
        jitted: Any = jax.jit(lambda *args: self.run(args, count))
        used = jitted.lower(*structs, numbers).compile().memory_analysis()
        each = used.temp_size_in_bytes + used.output_size_in_bytes + used.argument_size_in_bytes
        return self.plan.placement.num_devices * each

    def _structs_of_rows(self, count: int) -> list[jax.ShapeDtypeStruct]:
        shapes = []
        for v in self.rows:
            at = self.plan.dims[v] or 0
            shapes.append((*v.aval.shape[:at], count, *v.aval.shape[at + 1 :]))
        return [jax.ShapeDtypeStruct(each, v.aval.dtype) for each, v in zip(shapes, self.rows, strict=True)]

    def bytes_of_rows(self, count: int) -> int:
        """Return the bytes of the rows that a pass over ``count`` elements is given."""
        return sum(count * math.prod(v.aval.shape) * v.aval.dtype.itemsize // self.plan.size for v in self.rows)

    def _traced(self, structs: Sequence[Any], count: int) -> Callable[..., list[Any]]:
        numbers = jax.ShapeDtypeStruct((count,), jnp.int32)
        traced, _ = jax_api.trace(lambda *args: self.run(args, count), [*structs, numbers], {})
        return programs.by_structure(jax_api.pruned(traced, traced.jaxpr.outvars))

    def run(self, args: Sequence[Any], count: int) -> list[Any]:
        values: dict[Value, Any] = dict(zip((*self.shared, *self.rows), args, strict=False))
        if self.plan.flat.index is not None:
            values[self.plan.flat.index] = args[-1]
        chunk = _Chunk(self.plan, count, args[-1], values)
        for step in self.steps:
            chunk.apply(step)
        return [values[v] for v in self.gives]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _behind(plan: Plan, step: Step, number: int, v: Value) -> list[Value]:
    """Return the values that an operand is made of in the pass: itself, or what it repeats."""
    if (step, number) in plan.cut and (source := _repeats(plan, v, plan.cut[step, number])) is not None:
        return [] if isinstance(source.invars[0], Literal) else [source.invars[0]]
    return [v]


def _repeats(plan: Plan, v: Value, dim: int) -> Step | None:
    """Return the operation that gives a value the same row for every element, if there is one."""
    step = plan.made.get(v)
    if step is None or step.name != "broadcast_in_dim" or len(step.invars) != 1:
        return None
    return step if dim not in step.params["broadcast_dimensions"] else None


@dataclasses.dataclass
class _Chunk:
    """A pass under way, over ``count`` elements."""

    plan: Plan
    count: int
    numbers: Any
    values: dict[Value, Any]

    def read(self, atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def apply(self, step: Step) -> None:
        plan = self.plan
        if plan.kinds[step] == "shared":
            found = jax_api.bind(step.eqn, step.params, [self.read(v) for v in step.invars])
            self.values.update(zip(step.outvars, found, strict=True))
            return
        operands = [self._operand(step, number, v) for number, v in enumerate(step.invars)]
        dims = [
            plan.dims[v] if isinstance(v, Value) and (step, n) not in plan.cut else plan.cut.get((step, n))
            for n, v in enumerate(step.invars)
        ]
        results = self._results(step, operands, dims)
        for v, y in zip(step.outvars, results, strict=True):
            expected = self._shape(v)
            if jnp.shape(y) != expected:
                raise LoweringError(
                    f"elements of axis {plan.axis!r} meet in {step.name}, at {step.line}: of {self.count} elements it "
                    f"makes {list(jnp.shape(y))}, where {list(expected)} was expected"
                )
            self.values.setdefault(v, y)  # what the pass is given is as an earlier one has computed it

    def _shape(self, v: Value) -> tuple[int, ...]:
        shape, dim = v.aval.shape, self.plan.dims[v]
        return shape if dim is None else (*shape[:dim], self.count, *shape[dim + 1 :])

    def _operand(self, step: Step, number: int, v: Atom) -> Any:
        dim = self.plan.cut.get((step, number))
        if dim is None or (isinstance(v, Value) and self.plan.dims[v] is not None):
            return self.read(v)
        repeated = _repeats(self.plan, v, dim) if isinstance(v, Value) else None
        if repeated is not None:
            return self._bind(repeated, [self.read(repeated.invars[0])], shape=self._with_count(shape(v), dim))
        return jnp.take(self.read(v), self.numbers, axis=dim)

    def _with_count(self, shape: Sequence[int], dim: int) -> tuple[int, ...]:
        return (*shape[:dim], self.count, *shape[dim + 1 :])

    def _bind(self, step: Step, operands: Sequence[Any], **changed: Any) -> Any:
        found = jax_api.bind(step.eqn, {**step.params, **changed}, operands)
        return found if step.primitive.multiple_results else found[0]

    def _results(self, step: Step, operands: list[Any], dims: list[int | None]) -> Sequence[Any]:
        ours = step.name.startswith("px_") and step.params.get("axis") == self.plan.axis
        if ours and step.primitive is maps.map_p:
            return maps.map_p.bind(*operands, **self._map(step))
        if ours and step.primitive is primitives.broadcast_p:
            return [primitives.copies(operands[0], self.placement)]
        if ours:
            padded = self.placement.num_padded
            changed = {"size": self.count, "padded": primitives.Rows(padded) if padded > self.count else None}
            return [step.primitive.bind(*operands, **{**step.params, **changed})]
        if step.name in LOOPS:
            loop = self.plan.loops[step]
            places = loop.out_dims if step.name == "cond" else None
            return rebuilt(step, operands, lambda number, _, args: self._run_body(loop.bodies[number], args, places))
        if step.name in ("sharding_constraint", "reshard"):
            return operands
        return jax_api.bind(step.eqn, self._resized(step, dims), operands)

    def _map(self, step: Step) -> dict[str, Any]:
        how = step.params["how"]
        placement = how.placement.holding(self.count)
        mapped = tuple(placement.axis if axis == how.placement.axis else axis for axis in how.mapped)
        smaller = dataclasses.replace(how, placement=placement, mapped=mapped)
        return {**step.params, "size": self.count, "how": smaller, "devices": placing.named_devices(placement)}

    @property
    def placement(self) -> Placement:
        return self.plan.placement.holding(self.count)

    def _run_body(self, of: Plan, args: Sequence[Any], places: Sequence[int | None] | None) -> list[Any]:
        """Run the body of a loop in which elements do not meet. Of a branch, ``places`` says where all give rows."""
        inner = _Chunk(of, self.count, self.numbers, {**of.flat.constants})
        inner.values.update(zip(of.flat.arguments, args, strict=True))
        for step in of.flat.steps:
            inner.apply(step)
        found = [inner.read(v) for v in of.flat.results]
        if places is None:
            return found
        own = [of.dims[v] if isinstance(v, Value) else None for v in of.flat.results]
        return [
            jnp.take(y, self.numbers, axis=place) if place is not None and mine is None else y
            for y, place, mine in zip(found, places, own, strict=True)
        ]

    def _resized(self, step: Step, dims: list[int | None]) -> dict[str, Any]:
        """Return an operation's parameters for as many rows as the chunk has."""
        params, out = dict(step.params), self.plan.dims[step.outvars[0]]
        for key in ("sharding", "out_sharding"):
            if key in params:
                params[key] = None
        place = dims[0] if dims else None
        if step.name == "gather" and place in params["dimension_numbers"].operand_batching_dims:
            return params
        changed: dict[str, tuple[str, int | None]] = {
            "broadcast_in_dim": ("shape", out),
            "reshape": ("new_sizes", out),
            "slice": ("limit_indices", place),
            "dynamic_slice": ("slice_sizes", place),
            "gather": ("slice_sizes", place),
        }
        if step.name in changed:
            key, dim = changed[step.name]
            if dim is not None and params[key] is not None:
                params[key] = self._with_count(params[key], dim)
        return params
