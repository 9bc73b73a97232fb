"""Rules of other interpreters of jaxprs for a map, whose body is a parameter.

``checkify`` gets a rule. ``jet`` is refused, as it would raise a ``KeyError``. Under ``jax.debug_nans`` a map runs
again, to find the operation, its line and the first element. References that live in a body become values. All of this
needs private names of JAX's, each imported where it is used: where one is gone, a warning says what is not seen.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import jax_api, maps, sums
from paraxis._core.jax_api import ClosedJaxpr
from paraxis._core.maps import map_p
from paraxis._core.record import Map
from paraxis._core.reductions import REDUCTIONS, broadcast_p
from paraxis.errors import AxisError


def without_references(body: ClosedJaxpr, names: Mapping[str, int]) -> ClosedJaxpr:
    """Return the same body with the references that live in it replaced by their values: only ``jit`` knows them."""
    if "InternalMutableArrayEffect" not in {type(effect).__name__ for effect in body.effects}:
        return body
    from jax._src.state.discharge import discharge_state

    def pure(*args: Any) -> list[Any]:
        return jax_api.jaxpr_as_fun(discharge_state(body, lower=False))(*args)

    return jax_api.trace(pure, body.in_avals, names)[0]


def _know_checkify() -> None:
    from jax._src import checkify

    class ElementError(checkify.JaxException):
        """An error of an element, whose number is one more value of its payload."""

        def __init__(self, index: Any, error: Any) -> None:
            super().__init__(error.traceback_info)
            self.index, self.error = index, error

        def tree_flatten(self) -> Any:
            return (self.index, self.error), None

        @classmethod
        def tree_unflatten(cls, metadata: Any, payload: Any) -> Any:
            return cls(*payload)

        def __str__(self) -> str:
            where, inner = f"at mapped index {self.index}", str(self.error)
            if isinstance(self.error, ElementError):  # of a map within this one: at mapped index 2, 5
                return f"{where}, {inner.removeprefix('at mapped index ')}"
            return f"{where}: {inner}"

    def first(errors: Any, size: int) -> Any:
        """Return the error of the first element that has one: leaves ``(size, ...)`` → ``(...)``."""
        errors = jax.tree.map(lambda y: jax_api.typed_as(jax_api.ShapedArray(y.shape, y.dtype), y), errors)
        numbers = jnp.arange(size, dtype=jnp.int32)
        index = jnp.min(jnp.where(functools.reduce(operator.or_, errors._pred.values()), numbers, size))
        one = jax.tree.map(functools.partial(sums.of_rows, real=numbers == index), errors)  # streams have sums, too

        def with_index(effect: Any) -> Any:
            return type(effect)(effect.error_type, (jax.ShapeDtypeStruct((), jnp.int32), *effect.shape_dtypes))

        parts: list[dict[Any, Any]] = [one._pred, one._code, {e: [index, *xs] for e, xs in one._payload.items()}]
        pred, code, payload = ({with_index(effect): value for effect, value in part.items()} for part in parts)
        raised = {code: ElementError(0, e.unflatten([0] * e.num_leaves)) for code, e in one._metadata.items()}
        return checkify.Error(pred, code, {code: jax.tree.structure(e) for code, e in raised.items()}, payload)

    def rule(*args: Any, **params: Any) -> Any:
        """Map the checked body; merge the first element's error with those of the operations before."""
        m = Map.of(params)
        at = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        context, (error, enabled, *operands) = args[:at], args[at:]  # jax < 0.12 has no context
        checked = checkify.checkify(jax_api.jaxpr_as_fun(m.body), errors=enabled)
        traced, operands, structure = maps.trace_like(m, checked, operands, m.shared, m.alike)
        num_errors = structure.num_leaves - len(m.summed)
        results = maps.bind(traced._replace(summed=[*[False] * num_errors, *m.summed]), operands)
        errors, results = jax.tree.unflatten(structure, results)
        if num_errors:
            leaves, tree = jax.tree.flatten(first(errors, m.placement.size))
            leaves = [x if isinstance(x, jax_api.Tracer) else np.asarray(x) for x in leaves]  # of no device
            check = checkify.error_checks[checkify.check_p]
            error, _ = check(*context, error, enabled, *leaves, err_tree=tree, debug=False)
        return error, results

    checkify.error_checks[map_p] = rule
    for primitive in REDUCTIONS.values():
        checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)


def _know_jet() -> None:
    from jax.experimental import jet

    def refuse(*_: Any, axis: str, **params: Any) -> Any:
        write = "lambda x, t: jet.jet(fn, (x,), ((t,),))"
        raise AxisError(f"jet does not look into a map (axis {axis!r}); write it inside: map {write}")

    jet.jet_rules.update(dict.fromkeys((map_p, broadcast_p, *REDUCTIONS.values()), refuse))


def _know_debug_nans() -> None:
    evaluated: Callable[..., Any] = map_p.impl

    @map_p.def_impl
    def _(*operands: Any, **params: Any) -> Any:
        if not jax_api.checks_numbers():
            return evaluated(*operands, **params)
        tests = {"nan": jnp.isnan} if jax.config.jax_debug_nans else {}  # pyright: ignore
        tests |= {"inf": jnp.isinf} if jax.config.jax_debug_infs else {}  # pyright: ignore
        with jax.debug_nans(False), jax.debug_infs(False):
            results = evaluated(*operands, **params)
            for kind, test in tests.items():
                if _meets(test, *results):
                    raise FloatingPointError(_located(kind, test, operands, **params))
        return results


def _meets(test: Any, *values: Any) -> jax.Array:
    """Return whether one of the values holds such a number."""
    numbers = [y for y in values if jnp.issubdtype(jax.typeof(y).dtype, jnp.inexact)]
    return functools.reduce(operator.or_, [jnp.any(test(y)) for y in numbers], jnp.zeros((), bool))


def _located(kind: str, test: Any, operands: Any, **params: Any) -> str:
    """Return what JAX says of the first operation that gives such a number, with its line and its first element."""
    eqns, m, axis = list[Any](), Map.of(params), params["axis"]

    def element(*args: Any) -> jax.Array:
        met = [jnp.zeros((), bool)]

        def noting(eqn: Any, *inputs: Any) -> Any:
            results = jax_api.bind(eqn, *inputs)
            eqns.append(eqn)
            met.append(_meets(test, *results))
            return results

        jax_api.evaluate(m.body, *args, opens=lambda eqn: eqn.primitive.name == "jit", apply=noting)
        return jnp.stack(met)

    traced, operands, _ = maps.trace_like(m, element, operands, m.shared, m.alike)
    [met] = maps.bind(traced, operands)  # (size, operations)
    if not np.any(met):  # the operations together gave it, as they are rounded otherwise
        return f"invalid value ({kind}) encountered in a map over axis {axis!r}"
    at, index = np.argwhere(np.asarray(met).T)[0]  # the first is of no operation
    line, name = jax_api.line_of(eqns[at - 1]), eqns[at - 1].primitive.name
    what = f"invalid value ({kind}) encountered in {name}, in element {index} of axis {axis!r}"
    return f"{what}, at {line}" if line else what


for _know in (_know_checkify, _know_jet, _know_debug_nans):
    try:
        _know()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"jax {jax.__version__} has changed what paraxis needs for {_know.__name__[6:]}, which will not see what "
            f"is inside a map ({error}); write it inside of the mapped function, or update paraxis",
            stacklevel=2,
        )
