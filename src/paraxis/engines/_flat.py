"""A traced function as one list of operations, without calls: what engines read.

Calls are opened, wherever they stand, and so are maps of another axis in which elements of this one are mapped or meet,
and maps of this one whose elements exchange values in a loop or branch: they become operations on all of the axis's
elements together. Any other map whose elements exchange values is cut at each
``psum``, ``pmax`` and ``pmin``: into a map up to the value that is sent, a reduction, and a map of the same body, to
which the result is given. An element's index is one more operand of its map. So each map that is left is a function of
one element, and the reductions are the only places where elements meet.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import placing
from paraxis._axes.placing import Placement
from paraxis._core import collectives, maps, primitives
from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from paraxis.errors import AxisError, CollectiveError, LoweringError

LOOPS = frozenset(("scan", "while", "cond"))
COLLECTIVES = {"psum": "sum", "pmax": "max", "pmin": "min"}


@dataclasses.dataclass(eq=False)
class Value:
    """One value of a program: it is what it is, and equal to no other."""

    aval: Any


Atom = Value | Literal


def shape(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return aval.shape


@dataclasses.dataclass(eq=False)
class Step:
    """An operation of a flat program. To who reads it, it is like one of JAX's equations."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Atom]
    outvars: list[Value]
    ctx: Any
    line: str
    effects: Any
    source_info: Any

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def eqn(self) -> Any:
        """Itself, for what reads JAX's equations."""
        return self

    @property
    def operands(self) -> list[Value]:
        return [atom for atom in self.invars if isinstance(atom, Value)]


@dataclasses.dataclass
class Flat:
    """A program: its arguments, constants with their values, operations in order, and what it returns.

    ``index``: the argument that holds the elements' numbers, along the axis; ``None`` if nothing reads them.
    ``same``: values that must be the same in each pass that uses them, to the last bit.
    """

    arguments: list[Value]
    constants: dict[Value, Any]
    steps: list[Step]
    results: list[Atom]
    index: Value | None
    same: set[Value]

    @functools.cached_property
    def values(self) -> list[Value]:
        """All of them, in order: the same places in a trace of the same function for other shapes."""
        index = [] if self.index is None else [self.index]
        return [*self.arguments, *self.constants, *index, *(v for step in self.steps for v in step.outvars)]


def axes_of(closed: ClosedJaxpr, *, within: bool = False) -> dict[str, int]:
    """Return the axes along which a traced function maps or reduces, with their sizes; outermost ones, or all.

    Raises:
        AxisError: if one name stands for two sizes.
    """
    found: dict[str, int] = {}

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name.startswith("px_") and "axis" in eqn.params:
                name, size = eqn.params["axis"], eqn.params["size"]
                if found.setdefault(name, size) != size:
                    raise AxisError(
                        f"axis {name!r} must have one size in a program that an engine runs, got {found[name]} and "
                        f"{size}, at {jax_api.line_of(eqn)}; give the other axis another name"
                    )
                if eqn.primitive is maps.map_p and not within:
                    continue
            for sub in jax_api.subjaxprs(eqn):
                look(sub)

    look(closed.jaxpr)
    return found


def placement_of(closed: ClosedJaxpr, axis: str) -> Placement | None:
    """Return where a traced function first maps this axis, outside of other maps; ``None`` if it does not."""

    def look(jaxpr: Any) -> Placement | None:
        for eqn in jaxpr.eqns:
            if eqn.primitive is maps.map_p and eqn.params["axis"] == axis:
                return eqn.params["how"].placement
            if eqn.primitive is maps.map_p:
                continue
            if (found := next(filter(None, map(look, jax_api.subjaxprs(eqn))), None)) is not None:
                return found
        return None

    return look(closed.jaxpr)


def flat(closed: ClosedJaxpr, axis: str) -> Flat:
    """Return a traced function as a list of operations, in which elements of this axis meet at reductions only.

    Raises:
        CollectiveError: if elements exchange values otherwise; the message has the line.
    """
    closed, constants = jax_api.without_constants(closed)
    made = [Value(v.aval) for v in closed.jaxpr.invars]
    held = dict(zip(made[: len(constants)], constants, strict=True))
    reader = _Reader(axis, held, _around(closed.jaxpr, axis))
    results = reader.read(closed.jaxpr, made)
    return Flat(made[len(constants) :], held, reader.steps, results, reader.index, reader.same)


class _Reader:
    def __init__(self, axis: str, constants: dict[Value, Any], around: set[str]) -> None:
        self.axis, self.around = axis, around
        self.constants = constants
        self.steps: list[Step] = []
        self.index: Value | None = None
        self.same: set[Value] = set()
        self.behind: dict[tuple[int, ...], Sequence[Atom]] = {}  # barriers, of which one is as good as several

    def read(self, jaxpr: Any, given: Sequence[Atom], line: str = "a line that JAX has not noted") -> list[Atom]:
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, given, strict=True))

        def atom(v: Any) -> Atom:
            return v if isinstance(v, Literal) else known[v]

        for eqn in jaxpr.eqns:
            operands = [atom(v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self._of(eqn, operands, jax_api.line_of(eqn) or line), strict=True))
        return [atom(v) for v in jaxpr.outvars]

    def _of(self, eqn: JaxprEqn, operands: list[Atom], line: str) -> Sequence[Atom]:
        if eqn.primitive is maps.map_p and (eqn.params["axis"] in self.around or self._meet_in_loop(eqn)):
            self._require_reductions(eqn)
            traced, _ = jax_api.trace(functools.partial(_all_together, eqn.params), [v.aval for v in eqn.invars], {})
            return self._inside(traced, operands, line)
        if eqn.primitive.name in jax_api.CALLS:
            return self._inside(_body_of(eqn), operands, line)
        if eqn.primitive.name == "custom_linear_solve":  # its other functions are for derivatives
            counts = eqn.params["const_lengths"]
            begin = counts.matvec + counts.vecmat
            given = [*operands[begin : begin + counts.solve], *operands[sum(counts) :]]
            return self._inside(eqn.params["jaxprs"].solve, given, line)
        if eqn.primitive.name in COLLECTIVES and all(isinstance(axis, int) for axis in eqn.params["axes"]):
            kind, axes = COLLECTIVES[eqn.primitive.name], eqn.params["axes"]  # of elements that vmap has put together
            run = functools.partial(_reduced, kind, axes)
            return self.read(jax_api.trace(run, [v.aval for v in eqn.invars], {})[0].jaxpr, operands, line)
        is_barrier, which = eqn.primitive.name == jax_api.ONCE, tuple(map(id, operands))
        if is_barrier and which in self.behind:
            return self.behind[which]
        outs = [Value(v.aval) for v in eqn.outvars]
        step = Step(eqn.primitive, dict(eqn.params), operands, outs, eqn.ctx, line, eqn.effects, eqn.source_info)
        if is_barrier:
            self.behind[which] = step.outvars
        if eqn.primitive is maps.map_p and eqn.params["axis"] == self.axis:
            self._map(step)
        else:
            self.steps.append(step)
        return step.outvars

    def _meet_in_loop(self, eqn: JaxprEqn) -> bool:
        """Return whether a map's elements exchange values in a loop or branch of its body."""
        own, body = eqn.params["axis"] == self.axis, eqn.params["body"].jaxpr
        if not (own and _exchanges(body, self.axis, within=True)):
            return False
        if (acts := _calling_back(body)) is not None:
            raise LoweringError(
                f"elements of axis {self.axis!r} exchange values in a loop or branch of a body that calls back to "
                f"Python, at {jax_api.line_of(acts) or jax_api.line_of(eqn)}, which an engine cannot do one by one "
                f"there; leave the callback out, or map it alone, before or after: px.map_fn(lambda x: "
                f"jax.debug.print('{{}}', x), x)"
            )
        return True

    def _require_reductions(self, eqn: JaxprEqn) -> None:
        """Refuse what elements of a map that is run all together cannot exchange: of another axis, only in groups."""
        axis = eqn.params["axis"]
        for inner in _naming(eqn.params["body"].jaxpr, axis):
            collectives.require_whole(inner, axis)
            if axis == self.axis and inner.primitive.name not in ("axis_index", *COLLECTIVES):
                raise self._needs_all(inner, jax_api.line_of(inner) or jax_api.line_of(eqn))

    def _needs_all(self, eqn: JaxprEqn, line: str | None) -> CollectiveError:
        return CollectiveError(
            f"elements of axis {self.axis!r} exchange values by {eqn.primitive.name}, at {line}, "
            f"which needs all of them at once. An engine runs them in turns: write px.psum, px.pmean, px.pmax or "
            f"px.pmin, or reduce after the map: px.reduce_sum(px.map_fn(…))"
        )

    def _inside(self, body: ClosedJaxpr, given: Sequence[Atom], line: str) -> list[Atom]:
        consts = [self._constant(value) for value in body.consts]
        return self.read(jax_api.without_constants(body)[0].jaxpr, [*consts, *given], line)

    def _constant(self, value: Any) -> Value:
        made = Value(jax.typeof(value))
        self.constants[made] = value
        return made

    # --- maps along the axis -----------------------------------------------------------------------------------

    def _map(self, step: Step) -> None:
        how: maps.How = step.params["how"]
        if len(how.mapped) > 1:  # it stood in maps that are open now
            alone = placing.place(dataclasses.replace(how.placement.axis, mesh=None, over=None))
            step.params["how"] = dataclasses.replace(how, placement=alone, mapped=(alone.axis,))
        if not collectives.mentions(step.params["body"].jaxpr, step.params["how"].mapped[-1]):
            self.steps.append(step)
            return
        step.params["recipe"] = None
        step.params["body"] = _opened(step.params["body"], step.params["how"])
        while (cut := self._first_exchange(step)) is not None:
            self._cut(step, cut)
        if _reads_index(step.params["body"].jaxpr, self.axis):
            self.index = self.index or Value(jax_api.ShapedArray((step.params["size"],), jnp.int32))
            step.params["body"] = _given_index(step.params["body"], self.axis, step.params["how"])
            step.params["shared"] = (*step.params["shared"], False)
            step.invars = [*step.invars, self.index]
        self.steps.append(step)

    def _first_exchange(self, step: Step) -> int | None:
        for number, eqn in enumerate(step.params["body"].jaxpr.eqns):
            name, bodies = eqn.primitive.name, list(jax_api.subjaxprs(eqn))
            if name == "axis_index" or not collectives.named_in(eqn, {self.axis}):
                continue
            if bodies and not any(_exchanges(body, self.axis) for body in bodies):
                continue  # it reads the element's index
            collectives.require_whole(eqn, self.axis)
            if name in COLLECTIVES and tuple(eqn.params["axes"]) == (self.axis,):
                return number
            raise self._needs_all(eqn, _line(eqn, step))
        return None

    def _cut(self, step: Step, number: int) -> None:
        """Put the map up to an exchange, and the reductions, before the map; what they give becomes operands."""
        params, body, how = step.params, step.params["body"], step.params["how"]
        eqn = body.jaxpr.eqns[number]
        sent = list(eqn.invars)  # JAX itself gives the sum of a constant
        before = jax_api.pruned(body, sent, effects=False)
        rows = [Value(_rows_aval(v.aval, params["size"])) for v in sent]
        first = {**params, "body": before, "summed": (False,) * len(sent)}
        self._add(maps.map_p, first, list(step.invars), rows, step)
        totals: dict[Any, Value] = {}
        kind = COLLECTIVES[eqn.primitive.name]
        for v, value in zip(sent, rows, strict=True):
            total = totals[v] = Value(v.aval)
            how_reduced = {"axis": self.axis, "size": params["size"], "padded": None}
            self._add(primitives.REDUCTIONS[kind], how_reduced, [value], [total], step)
        params["body"] = _after(body, number, sent, how)
        count = len(sent)
        params["shared"] = (*params["shared"], *[True] * count, *[False] * count)
        step.invars = [*step.invars, *(totals[v] for v in sent), *rows]

    def _add(self, primitive: Any, params: dict[str, Any], invars: list[Atom], outs: list[Value], of: Step) -> None:
        self.steps.append(Step(primitive, params, invars, outs, of.ctx, of.line, frozenset(), of.source_info))


def uses(jaxpr: Any, axis: str) -> bool:
    """Return whether a program maps or reduces along an axis, at any depth."""
    return any(
        (eqn.primitive.name.startswith("px_") and eqn.params.get("axis") == axis)
        or any(uses(sub, axis) for sub in jax_api.subjaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _around(jaxpr: Any, axis: str) -> set[str]:
    """Return the axes that have maps, outermost ones, in which another axis is used."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive is not maps.map_p:
            found.update(*(_around(sub, axis) for sub in jax_api.subjaxprs(eqn)))
        elif eqn.params["axis"] != axis and uses(eqn.params["body"].jaxpr, axis):
            found |= {eqn.params["axis"], *_around(eqn.params["body"].jaxpr, axis)}
    return found


def _all_together(params: dict[str, Any], *operands: Any) -> list[Any]:
    """Run a map's elements together, as ``vmap`` does."""
    body, size = params["body"], params["size"]
    in_axes = [None if is_shared else 0 for is_shared in params["shared"]]
    run = jax.vmap(jax_api.jaxpr_as_fun(body), in_axes, axis_name=params["axis"], axis_size=size)
    found = run(*operands)
    return [y.sum(0) if is_summed else y for y, is_summed in zip(found, params["summed"], strict=True)]


def _reduced(kind: str, axes: Sequence[int], *operands: Any) -> list[Any]:
    if kind == "sum":
        return [jnp.sum(x, axes, x.dtype) for x in operands]
    return [(jnp.max if kind == "max" else jnp.min)(x, axes) for x in operands]


def _line(eqn: JaxprEqn, step: Step) -> str:
    return jax_api.line_of(eqn) or step.line


def _rows_aval(aval: Any, size: int) -> Any:
    return jax_api.ShapedArray((size, *aval.shape), aval.dtype, weak_type=aval.weak_type)


def _body_of(eqn: JaxprEqn) -> ClosedJaxpr:
    body = next(value for value in eqn.params.values() if isinstance(value, (ClosedJaxpr, Jaxpr)))
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def _opened(body: ClosedJaxpr, how: maps.How) -> ClosedJaxpr:
    """Return the same body with its calls opened."""

    def run(*args: Any) -> list[Any]:
        return _run(body, args)

    def _run(body: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return jax_api.evaluate(body, args, lambda _: False, special)

    def special(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        return _run(_body_of(eqn), operands) if eqn.primitive.name in jax_api.CALLS else None

    return _retraced(run, body.in_avals, how)


def _retraced(run: Callable[..., Any], avals: Sequence[Any], how: maps.How) -> ClosedJaxpr:
    return jax_api.trace(run, avals, how.names)[0]


def _after(body: ClosedJaxpr, number: int, sent: Sequence[Any], how: maps.How) -> ClosedJaxpr:
    """Return a body that is given what one of its exchanges gives, and as it was computed before, what it sends."""
    jaxpr, count = body.jaxpr, len(sent)

    def run(*args: Any) -> list[Any]:
        own, totals, rows = args[: len(jaxpr.invars)], args[len(jaxpr.invars) : -count], args[len(args) - count :]
        values: dict[Any, Any] = {**dict(zip(jaxpr.invars, own, strict=True)), **dict(zip(sent, rows, strict=True))}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else values[v]

        for at, eqn in enumerate(jaxpr.eqns):
            given = at == number
            found = totals if given else jax_api.bind(eqn, eqn.params, [read(v) for v in eqn.invars])
            values.update((v, y) for v, y in zip(eqn.outvars, found, strict=True) if v not in sent)
        return [read(v) for v in jaxpr.outvars]

    avals = [*body.in_avals, *(v.aval for v in sent), *(v.aval for v in sent)]
    traced = _retraced(run, avals, how)
    return jax_api.pruned(traced, traced.jaxpr.outvars)


# --- an element's index ------------------------------------------------------------------------------------------


def _reads_index(jaxpr: Any, axis: str) -> bool:
    return any(collectives.named_in(eqn, {axis}) for eqn in jaxpr.eqns)


def _exchanges(jaxpr: Any, axis: str, *, within: bool = False) -> bool:
    """Return whether elements exchange values, or whether they do so ``within`` loops and branches."""
    for eqn in jaxpr.eqns:
        bodies = list(jax_api.subjaxprs(eqn))
        if any(_exchanges(body, axis, within=within and eqn.primitive.name not in LOOPS) for body in bodies):
            return True
        if not (bodies or within) and eqn.primitive.name != "axis_index" and collectives.named_in(eqn, {axis}):
            return True
    return False


def _naming(jaxpr: Any, axis: str) -> Iterator[JaxprEqn]:
    """Yield the operations over an axis, at any depth."""
    for eqn in jaxpr.eqns:
        if axis in collectives.named_axes(eqn):
            yield eqn
        if eqn.primitive is not maps.map_p or eqn.params["axis"] != axis:
            for body in jax_api.subjaxprs(eqn):
                yield from _naming(body, axis)


def _calling_back(jaxpr: Any) -> Any:
    """Return the first operation that calls Python, at any depth."""
    for eqn in jaxpr.eqns:
        bodies = list(jax_api.subjaxprs(eqn))
        if (found := next(filter(None, map(_calling_back, bodies)), None)) is not None:
            return found
        if not bodies and ("callback" in eqn.primitive.name or jax_api.has_effects(eqn)):
            return eqn
    return None


def _given_index(body: ClosedJaxpr, axis: str, how: maps.How) -> ClosedJaxpr:
    """Return a body whose last argument is the element's index."""

    def run(*args: Any) -> list[Any]:
        *own, index = args

        def within(body: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
            return jax_api.evaluate(body, args, lambda _: False, special)

        def special(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
            if eqn.primitive.name == "axis_index" and collectives.named_in(eqn, {axis}):
                return [index]
            if eqn.primitive.name in jax_api.CALLS:
                return within(_body_of(eqn), operands)
            if not collectives.named_in(eqn, {axis}):
                return None
            if eqn.primitive.name in LOOPS:
                return rebuilt(eqn, operands, lambda _, body, args: within(body, args))
            raise CollectiveError(
                f"px.axis_index({axis!r}) is read inside {eqn.primitive.name}, at {jax_api.line_of(eqn)}, "
                f"where an engine cannot give it; read it before, and give it to the inner function as an argument"
            )

        return within(body, own)

    return _retraced(run, [*body.in_avals, jax_api.ShapedArray((), jnp.int32)], how)


# --- loops and branches, written anew with other bodies --------------------------------------------------------------

Run = Callable[[int, ClosedJaxpr, Sequence[Any]], list[Any]]


@dataclasses.dataclass
class Scan:
    """The arguments of a ``scan`` by their parts."""

    body: ClosedJaxpr
    fixed: list[Any]
    carry: list[Any]
    scanned: list[Any]
    length: int
    reverse: bool

    @classmethod
    def of(cls, eqn: Any, operands: Sequence[Any]) -> "Scan":
        body = eqn.params["jaxpr"]
        num_fixed, num_carry = jax_api.scan_parts(eqn)
        parts = operands[:num_fixed], operands[num_fixed : num_fixed + num_carry], operands[num_fixed + num_carry :]
        fixed, carry, scanned = map(list, parts)
        return cls(body, fixed, carry, scanned, eqn.params["length"], eqn.params["reverse"])

    def numbers(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1) if self.reverse else range(self.length))


def rebuilt(eqn: Any, operands: Sequence[Any], run: Run) -> list[Any]:
    """Return the results of a loop or branch whose bodies, by their number, are run by ``run(number, body, args)``."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        branches = [functools.partial(_branch, run, number, body) for number, body in enumerate(params["branches"])]
        return list(jax.lax.switch(operands[0], branches, *operands[1:]))
    if eqn.primitive.name == "while":
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        asked, fixed = operands[:num_cond], operands[num_cond : num_cond + num_body]
        return list(
            jax.lax.while_loop(
                lambda carry: run(0, params["cond_jaxpr"], [*asked, *carry])[0],
                lambda carry: run(1, params["body_jaxpr"], [*fixed, *carry]),
                list(operands[num_cond + num_body :]),
            )
        )
    scan = Scan.of(eqn, operands)

    def step(carry: list[Any], scanned: list[Any]) -> tuple[list[Any], list[Any]]:
        found = run(0, scan.body, [*scan.fixed, *carry, *scanned])
        return found[: len(carry)], found[len(carry) :]

    carry, stacked = jax.lax.scan(step, scan.carry, scan.scanned, length=scan.length, reverse=scan.reverse)
    return [*carry, *stacked]


def _branch(run: Run, number: int, body: ClosedJaxpr, *args: Any) -> list[Any]:
    return run(number, body, args)
