"""The function that a user gives to a solver, taken for what it is."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import arrays, layout
from paraxis._calls import arguments
from paraxis._jax import jax_api
from paraxis.errors import ShapeError
from paraxis.solve._problem import Function, Problem
from paraxis.solve._solution import OptStep
from paraxis.solve.objective import LinearObjective


def problem_of(
    fun: Callable[..., Any], value_and_grad: bool, has_aux: bool, params: Any, args: Any, kwargs: Any
) -> Problem:
    """Return the problem that a function poses with its arguments."""
    if isinstance(fun, LinearObjective):
        return fun.problem(params, *args, **kwargs)

    def evaluate(params: Any) -> tuple[tuple[jax.Array, Any], Any]:
        evaluated = fun if value_and_grad else jax.value_and_grad(fun, has_aux=has_aux)
        found, grad = evaluated(params, *args, **kwargs)
        value, aux = found if has_aux else (found, None)
        # The parameters' dtypes are the solver's, whatever the data's are.
        value = jnp.asarray(value, jnp.result_type(*jax.tree.leaves(params)))
        return (value, aux), jax.tree.map(lambda p, g: jnp.asarray(g, p.dtype), params, grad)

    return Function(evaluate)


def floating(who: str, argument: str, params: Any) -> Any:
    """Parameters as arrays, without weak types.

    Raises:
        ShapeError: if there are none, or one is not of real numbers.
        TypeError: if one is no array.
    """
    arguments.arrays(who, argument, params)
    if not jax.tree.leaves(params):
        raise ShapeError(f"{who}: {argument} must hold at least one array, got {params!r}")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = f"{argument}{jax.tree_util.keystr(path)}"
            raise ShapeError(
                f"{who}: {name} must be of a floating dtype, got {jnp.result_type(leaf)}; write jnp.zeros(…)"
            )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)


def beginning(who: str, fun: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Any:
    """Return the initial parameters as arrays, without weak types, on the data's mesh if their types say it.

    Raises:
        ShapeError: if there are none, or one is not of real numbers.
        DataError: if a linear model's targets make no sense, or JAX would cut integers.
    """
    if getattr(type(params), "_fields", None) == OptStep._fields:  # also JAXopt's
        params = params.params
    params = floating(who, "init_params", params)
    arguments.no_cut(who, "args", args)
    arguments.no_cut(who, "kwargs", kwargs)
    if not isinstance(fun, LinearObjective):
        return params
    problem = fun.check_targets(params, *args, **kwargs)
    design = problem.design
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(params)}
    if len(dtypes) > 1 or jnp.result_type(*dtypes, design) not in dtypes:
        raise ShapeError(
            f"{who}: init_params are {', '.join(sorted(d.name for d in dtypes))}, and X is {design.dtype}: their "
            f"dtypes must have the same width; write fun.init(…, dtype=X.dtype), or X.astype(…)"
        )
    return jax.tree.map(lambda x: layout.typed_beside(x, problem.beside), params)


def closes_over_traced(fun: Any) -> bool:
    """Return whether a function holds tracers: in its closure, its defaults, or the object it is a method of."""
    seen: set[int] = set()
    left = [fun]
    while left:
        held_by = left.pop()
        if id(held_by) in seen:
            continue
        seen.add(id(held_by))
        found = _held_by(held_by)
        if arrays.is_traced(found):
            return True
        left += [x for x in found if callable(x) and not isinstance(x, type)]
    return False


def _held_by(fun: Any) -> list[Any]:
    if isinstance(fun, functools.partial):
        return [fun.func, *fun.args, *fun.keywords.values()]
    cells = [cell.cell_contents for cell in getattr(fun, "__closure__", None) or () if _is_filled(cell)]
    owner = getattr(fun, "__self__", fun if not isinstance(fun, types.FunctionType) else None)
    return [*cells, *(getattr(fun, "__defaults__", None) or ()), *getattr(owner, "__dict__", {}).values()]


def hoisted(fun: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """Return the function with what it closes over as arguments, which are then differentiated, and these."""
    leaves, structure = jax.tree.flatten((params, args, kwargs))

    def flat(*leaves: Any) -> Any:
        params, args, kwargs = jax.tree.unflatten(structure, leaves)
        return fun(params, *args, **kwargs)

    closed, result = jax_api.trace(flat, leaves, {})
    jaxpr = closed.jaxpr

    def pure(params: Any, args: Any, kwargs: Any, consts: Any) -> Any:
        run = jax_api.jaxpr_as_fun(jax_api.ClosedJaxpr(jaxpr, consts))
        return jax.tree.unflatten(result, run(*jax.tree.leaves((params, args, kwargs))))

    return pure, (args, kwargs, list(closed.consts))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
