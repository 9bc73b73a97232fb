"""Sums over elements, taken in the products that end a function instead of after them: an optional pass.

A gradient with respect to shared weights ends in a product, ``inputs.T @ errors``. Where only its sum over elements is
wanted, the elements' dimension can be contracted in that same product, which holds no gradient per element. JAX does it
by itself when it transposes: if ``L_i`` is linear, ``sum_i L_i(v_i)`` is the transpose of ``u -> (L_i^T u)_i``, which
``vmap`` runs with the one ``u`` for all elements. So a linear end of a function is transposed twice.

A map that is the transpose of another is linear as a whole. Of other functions, the end is found from the results back,
through linear operations, to products of two values of the element. A number or mask of the element's own that scales
it goes with its argument: ``w_i L_i(v_i) = L_i(w_i v_i)``. What is not known here is computed, and then summed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, JaxprEqn, Literal

_LINEAR = frozenset(
    ("neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "convert_element_type", "copy")
)
_COPYING = frozenset(("broadcast_in_dim", "reshard"))
_ADDING = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_ENTERED = frozenset(("scan", "while", "jit", "pjit", "checkpoint", "remat2"))


def per_row(values: jax.Array, rows: jax.Array) -> jax.Array:
    return values.reshape(values.shape + (1,) * (rows.ndim - 1))


def masked(mask: jax.Array | None, rows: jax.Array) -> jax.Array:
    """Return rows with zeros where the mask is ``False``; no mask: as they are."""
    return rows if mask is None else jnp.where(per_row(mask, rows), rows, jnp.zeros((), rows.dtype))


def total(rows: jax.Array, real: jax.Array | None) -> jax.Array:
    """Return the sum over real rows."""
    if jnp.issubdtype(rows.dtype, jax.dtypes.extended):  # PRNG keys have no sum
        return jnp.zeros(())
    return jnp.sum(masked(real, rows), axis=0, dtype=rows.dtype)


def over_elements(
    body: ClosedJaxpr,
    operands: Sequence[jax.Array],
    shared: Sequence[bool],
    summed: Sequence[bool],
    linear: Sequence[bool],
    real: jax.Array | None,
    count: int,
    axis_name: str | None = None,
    *,
    contract: bool = True,
    merge: bool = False,
) -> list[jax.Array]:
    """Run a function of one element for rows of it.

    Args:
        body: the function.
        operands: those that are ``shared`` as they are, of the others rows ``(count, ...)``.
        shared: which operands all elements share.
        summed: which results are sums over the elements.
        linear: the operands in which the function is linear, if it is.
        real: booleans ``(count,)``, which rows are elements; ``None``: all.
        count: the number of rows.
        axis_name: a name that collectives in the function have for the elements.
        contract: take sums in products; without it, they are taken of results.
        merge: contract the dimension of rows and those beside it as one. None of these may lie over devices.

    Returns:
        The results: where ``summed``, the sum over real rows, else rows ``(count, ...)``.
    """
    fn, axes = jax_api.jaxpr_as_fun(body), _axes(shared)
    if contract and any(summed) and any(linear):
        args = [masked(real, x) if moves and not s else x for x, moves, s in zip(operands, linear, shared, strict=True)]
        return _contracted(fn, args, axes, linear, body.out_avals, summed, real, count, axis_name, merge=merge)
    end = _end(body, shared, summed) if contract and any(summed) and axis_name is None else None
    if end is not None:
        return end.sums(operands, axes, real, count, merge=merge)
    found = jax.vmap(fn, axes, axis_name=axis_name, axis_size=count)(*operands)
    return [total(y, real) if s else y for y, s in zip(found, summed, strict=True)]


def gains(body: ClosedJaxpr, shared: Sequence[bool]) -> bool:
    """Return whether sums of all results are taken in a product."""
    return _end(body, shared, [True] * len(body.out_avals)) is not None


def _end(body: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> "_End | None":
    """Return the end of a function; ``None`` if no sum meets a product, so that there is nothing to gain."""
    if not jax_api.holds(body.jaxpr, *_PRODUCTS) or jax_api.holds(body.jaxpr, "while", "scan"):
        return None
    if any(isinstance(v, Literal) for v in body.jaxpr.outvars):
        return None
    end = _End(_inlined(body), shared, summed)
    return end if end.has_product else None


def _axes(shared: Sequence[bool]) -> tuple[int | None, ...]:
    return tuple(None if is_shared else 0 for is_shared in shared)


def _contracted(
    fn: Callable[..., Sequence[Any]],
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    linear: Sequence[bool],
    results: Sequence[Any],
    summed: Sequence[bool],
    real: jax.Array | None,
    count: int,
    axis_name: str | None = None,
    *,
    merge: bool,
) -> list[jax.Array]:
    """Transpose twice a function that is linear in some arguments, over all elements together the second time."""
    known = [x for x, moves in zip(args, linear, strict=True) if not moves]
    known_axes = [at for at, moves in zip(axes, linear, strict=True) if not moves]
    moving = [x for x, moves in zip(args, linear, strict=True) if moves]
    moving_axes = [at for at, moves in zip(axes, linear, strict=True) if moves]
    of_one = [_struct(x.shape if at is None else x.shape[1:], x) for x, at in zip(moving, moving_axes, strict=True)]

    def transposed(known: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        def forward(*moving: Any) -> list[Any]:
            given, ours = iter(known), iter(moving)
            return list(fn(*(next(ours if moves else given) for moves in linear)))

        return list(jax.linear_transpose(forward, *of_one)(list(cts)))

    def together(*cts: Any) -> list[Any]:
        over = jax.vmap(transposed, (known_axes, [*_axes(summed)]), axis_name=axis_name, axis_size=count)
        found = zip(over(known, list(cts)), moving_axes, strict=True)
        return [total(y, real) if at is None else y for y, at in found]

    like = [_struct(y.shape if s else (count, *y.shape), y) for y, s in zip(results, summed, strict=True)]
    back = jax.linear_transpose(together, *like)
    return _merged(jax_api.trace(lambda *cts: back(list(cts)), moving, {})[0], moving) if merge else list(back(moving))


def _merged(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Run a function whose products are contracted over leading dimensions, with these made one.

    XLA's CPU products, of which only one dimension is contracted, else bring the second operand's to the end: a copy.
    """

    def special(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        if eqn.primitive.name == "dot_general":
            sides, (batched, _) = eqn.params["dimension_numbers"]
            if (many := len(sides[0])) > 1 and not batched:
                ahead = [jnp.moveaxis(x, dims, range(many)) for x, dims in zip(operands, sides, strict=True)]
                flat = [x.reshape(-1, *x.shape[many:]) for x in ahead]
                return jax_api.bind(eqn, {**eqn.params, "dimension_numbers": (((0,), (0,)), ((), ()))}, flat)
        elif eqn.primitive.name in _ENTERED and jax_api.holds(next(jax_api.subjaxprs(eqn)), "dot_general"):
            return jax_api.bind(eqn, jax_api.map_jaxprs(eqn.params, changed), operands)
        return None

    def changed(body: jax_api.Jaxpr) -> jax_api.Jaxpr:
        closed = ClosedJaxpr(body, ())
        return jax_api.trace(lambda *args: _merged(closed, args), closed.in_avals, {})[0].jaxpr

    return jax_api.evaluate(closed, args, lambda _: False, special)


def _struct(shape: tuple[int, ...], like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, like.dtype)


class _Factor(NamedTuple):
    """A number of the element's own: a weight, or a mask, where ``False`` means zero whatever else there is."""

    is_mask: bool
    variable: Any


class _End:
    """The linear end of a function of one element; the ``head`` before it gives what the end is made of.

    Attributes:
        ends: the results that the end gives, each with the value that the ``factors`` scale to make it.
        steps: its equations, the last one first, with the positions of operands in which they are linear.
        moving, known: the values of the head in which the end is linear, and others that it reads.
    """

    def __init__(self, closed: ClosedJaxpr, shared: Sequence[bool], summed: Sequence[bool]) -> None:
        jaxpr = closed.jaxpr
        self.closed, self.summed, self.has_product = closed, summed, False
        self.varying = {v for v, s in zip(jaxpr.invars, shared, strict=True) if not s}
        self._zeros: set[Any] = set()
        for eqn in jaxpr.eqns:
            if any(v in self.varying for v in _variables(eqn)):
                self.varying.update(eqn.outvars)
            elif eqn.primitive.name in _COPYING and self._is_zero(eqn.invars[0]):
                self._zeros.update(eqn.outvars)
        self.factors, self.ends = self._ends()
        self.steps: list[tuple[JaxprEqn, Sequence[int]]] = []
        self.moving: dict[Any, None] = {}
        self.known: dict[Any, None] = {}
        eqns, whole = self._walk()
        values = [*self.moving, *self.known, *(factor.variable for factor in self.factors), *whole]
        self.given = list(dict.fromkeys(values))
        self.head = jax_api.rebuilt(closed, eqns, self.given)

    def _ends(self) -> tuple[tuple[_Factor, ...], dict[Any, Any]]:
        made = {v: eqn for eqn in self.closed.jaxpr.eqns for v in eqn.outvars}
        found: dict[Any, tuple[tuple[_Factor, ...], Any]] = {}
        for v, is_summed in zip(self.closed.jaxpr.outvars, self.summed, strict=True):
            if is_summed and v in self.varying and _is_summable(v):
                value, factors = v, ()
                while value in made and (scaled := self._scaled(made[value])) is not None:
                    value, factors = scaled[0], (*factors, scaled[1])
                found[v] = factors, value
        first = next((factors for factors, _ in found.values()), ())
        return first, {v: value for v, (factors, value) in found.items() if factors == first}

    def _walk(self) -> tuple[list[JaxprEqn], list[Any]]:
        """Go from the results back; return the equations of the head, and the results that it gives."""
        outs = [v for v in self.closed.jaxpr.outvars if v not in self.ends]
        numbers = [factor.variable for factor in self.factors]
        wanted, whole, eqns = set(self.ends.values()), {*outs, *numbers}, list[JaxprEqn]()
        for eqn in reversed(self.closed.jaxpr.eqns):
            sought = wanted.intersection(eqn.outvars)
            linear = self._linear(eqn) if sought and whole.isdisjoint(eqn.outvars) else None
            if linear is None:
                self.moving.update(dict.fromkeys(sought))
                if sought or not whole.isdisjoint(eqn.outvars):
                    whole.update(_variables(eqn))
                    eqns.append(eqn)
                continue
            self.steps.append((eqn, linear))
            is_product = sum(v in self.varying for v in _variables(eqn)) > len(linear)
            self.has_product |= is_product
            for at, v in enumerate(eqn.invars):
                if at in linear and not is_product:
                    wanted.add(v)
                elif not isinstance(v, Literal):
                    whole.add(v)
                    (self.moving if at in linear else self.known)[v] = None
        self.moving.update((v, None) for v in self.closed.jaxpr.invars if v in wanted)
        return eqns[::-1], outs

    def sums(
        self,
        operands: Sequence[jax.Array],
        axes: Sequence[int | None],
        real: jax.Array | None,
        count: int,
        *,
        merge: bool,
    ) -> list[jax.Array]:
        out_axes = [0 if v in self.varying else None for v in self.given]
        head = jax.vmap(jax_api.jaxpr_as_fun(self.head), axes, out_axes, axis_size=count)
        rows = dict(zip(self.given, head(*operands), strict=True))

        def scaled(v: Any, factors: Sequence[_Factor]) -> jax.Array:
            x = rows[v]
            for is_mask, variable in reversed(factors) if v in self.varying else ():
                x = masked(rows[variable], x) if is_mask else x * per_row(rows[variable], x)
            return masked(real, x) if v in self.varying else x

        def end(*args: Any) -> list[Any]:
            known, moving = args[: len(self.known)], args[len(self.known) :]
            given, values = dict(zip(self.known, known, strict=True)), dict(zip(self.moving, moving, strict=True))
            for eqn, linear in reversed(self.steps):
                read = (
                    v.val if isinstance(v, Literal) else values[v] if at in linear else given[v]
                    for at, v in enumerate(eqn.invars)
                )
                (values[eqn.outvars[0]],) = jax_api.bind(eqn, eqn.params, list(read))
            return [values[v] for v in self.ends.values()]

        masks = [factor for factor in self.factors if factor.is_mask]
        args = [*(scaled(v, masks) for v in self.known), *(scaled(v, self.factors) for v in self.moving)]
        known_axes = [0 if v in self.varying else None for v in self.known]
        linear = [False] * len(self.known) + [True] * len(self.moving)
        avals, every = [v.aval for v in self.ends.values()], [True] * len(self.ends)
        in_axes = [*known_axes, *[0] * len(self.moving)]
        sums = _contracted(end, args, in_axes, linear, avals, every, real, count, merge=merge)
        found = dict(zip(self.ends, sums, strict=True))

        def result(v: Any, is_summed: bool) -> jax.Array:
            if v in found and is_summed:
                return found[v]
            x = rows[v] if v in self.varying else jnp.broadcast_to(rows[v], (count, *rows[v].shape))
            return total(x, real) if is_summed else x

        return [result(v, s) for v, s in zip(self.closed.jaxpr.outvars, self.summed, strict=True)]

    def _linear(self, eqn: JaxprEqn) -> Sequence[int] | None:
        """Return the positions of operands in which an equation is linear, the others known. ``None``: in none."""
        name, operands = eqn.primitive.name, eqn.invars
        differ = [at for at, v in enumerate(operands) if not isinstance(v, Literal) and v in self.varying]
        alike = all(_aval(v).dtype == _aval(eqn.outvars[0]).dtype for v in _variables(eqn))
        if not all(map(_is_summable, (*_variables(eqn), *eqn.outvars))) or not alike:
            return None
        if name in _LINEAR and len(differ) == len(_variables(eqn)) == 1:
            return differ
        if name in _ADDING and len(differ) == len(operands):
            return differ
        if (name in ("mul", *_PRODUCTS) and len(differ) == 1) or (name == "div" and differ == [0]):
            return differ
        return [1] if name in _PRODUCTS and operands[0] is not operands[1] else None

    def _scaled(self, eqn: JaxprEqn) -> tuple[Any, _Factor] | None:
        """Return the value that an equation scales, and by what; ``None`` if it does something else."""
        operands = [v for v in eqn.invars if isinstance(v, Literal) or v in self.varying]
        if eqn.primitive.name == "mul" and len(_variables(eqn)) == len(operands) == 2:
            number, value = sorted(operands, key=lambda v: len(_aval(v).shape))
            alike = _aval(number).dtype == _aval(value).dtype and _is_summable(value)
            return (value, _Factor(is_mask=False, variable=number)) if alike and _is_rank_zero(number, value) else None
        if eqn.primitive.name == "select_n" and len(eqn.invars) == 3:
            mask, nothing, value = eqn.invars
            plain = not any(isinstance(v, Literal) or v not in self.varying for v in (mask, value))
            if plain and self._is_zero(nothing) and _is_summable(value) and _is_rank_zero(mask, value):
                return value, _Factor(is_mask=True, variable=mask)
        return None

    def _is_zero(self, atom: Any) -> bool:
        return bool(np.all(atom.val == 0)) if isinstance(atom, Literal) else atom in self._zeros


def _aval(atom: Any) -> Any:
    return atom.aval


def _is_rank_zero(number: Any, value: Any) -> bool:
    return not number.aval.shape and bool(value.aval.shape)


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _is_summable(var: Any) -> bool:
    """Single precision or better: nothing is widened before it is summed."""
    dtype = var.aval.dtype
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same function without the boundaries of inner ``jit`` calls that hold a product."""

    def is_call(eqn: JaxprEqn) -> bool:
        held = (jax_api.holds(sub, *_PRODUCTS) for sub in jax_api.subjaxprs(eqn))
        return eqn.primitive.name in ("jit", "pjit") and any(held)

    if not any(map(is_call, closed.jaxpr.eqns)):
        return closed
    return jax_api.trace(lambda *args: jax_api.evaluate(closed, args, is_call), closed.in_avals, {})[0]
