"""What goes into a run and comes out of it: parameters, iterations as they are told, and a run that was interrupted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._core import arrays, check
from paraxis.errors import DataError
from paraxis.solve._stopping import Status
from paraxis.solve.objective import LinearObjective


class OptStep(NamedTuple):
    """Parameters and a solver's state: after one more iteration from ``update``, at the end from ``run``."""

    params: Any
    state: Any


class Interrupted(KeyboardInterrupt):
    """Raised when Ctrl-C has ended a run after an iteration; it holds the result so far.

    Attributes:
        params: the parameters after the last iteration.
        state: the solver's state, whose ``status`` is ``INTERRUPTED`` unless the run was over.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> solver = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2))
        >>> try:
        ...     params, state = solver.run(jnp.zeros(3))
        ... except px.solve.Interrupted as stopped:
        ...     params, state = stopped.params, stopped.state
    """

    __module__ = "paraxis.solve"  # as a traceback names it

    def __init__(self, params: Any, state: Any) -> None:
        super().__init__("the run was interrupted; the exception has its params and state so far")
        self.params = params
        self.state = state


class Iteration(NamedTuple):
    """One iteration, in Python numbers, as passed to the function that you give as ``verbose``.

    Args:
        iter_num: iterations so far, this one included.
        value: what is minimised; with an operator of your own, ``ProximalGradient`` does not know its penalty.
        error: the error that is compared with ``tol``.
        stepsize: the step size.
        data_passes: how often all data were read so far.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> seen = []
        >>> solver = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2), verbose=seen.append)
        >>> _ = solver.run(jnp.zeros(2))
        >>> [(one.iter_num, one.value) for one in seen][-1]
        (2, 0.0)
    """

    iter_num: int
    value: float
    error: float
    stepsize: float
    data_passes: int


Watch = Callable[[Iteration], Any]


def tell(verbose: Any, iter_num: Any, value: Any, error: Any, stepsize: Any, data_passes: Any) -> None:
    """Print a line about an iteration; or call the function that is to know of it."""
    seen = Iteration(int(iter_num), float(value), float(error), float(stepsize), int(data_passes))
    if callable(verbose):
        verbose(seen)
        return
    print(  # noqa: T201
        f"iteration {seen.iter_num}: value {seen.value:.8g}, error {seen.error:.3g}, step {seen.stepsize:.3g}, "
        f"{seen.data_passes} passes over the data",
        flush=True,
    )


@property
def reason(self: Any) -> str:
    """The reason why the solver stopped, in words; for a single problem, not for a batch."""
    return Status(int(self.status)).words


def shown(self: Any) -> str:
    """Return a state on one line: what one looks for in it, not all its arrays."""
    name, status = type(self).__name__, self.status
    if arrays.is_traced(status) or jnp.ndim(status):
        return f"{name}(… {jnp.shape(status)})"
    return (
        f"{name}({Status(int(status)).name}, iter_num={int(self.iter_num)}, value={float(self.value):.8g}, "
        f"error={float(self.error):.3g}, stepsize={float(self.stepsize):.3g}, data_passes={int(self.data_passes)}, …)"
    )


def beginning(who: str, fun: Callable[..., Any], params: Any, args: Any, kwargs: Any) -> Any:
    """Return the initial parameters as arrays, on the data's mesh if their types say it.

    Raises:
        DataError: if there are none, or one is not of real numbers.
        DataError: if a linear model's targets make no sense, or JAX would cut integers.
    """
    if getattr(type(params), "_fields", None) == OptStep._fields:  # also JAXopt's
        params = params.params
    params = floating(who, params)
    check.no_cut(who, "the arguments of fun", (args, kwargs))
    if not isinstance(fun, LinearObjective):
        return params
    problem = fun.check_targets(params, *args, **kwargs)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    if len(dtypes) > 1 or jnp.result_type(*dtypes, problem.design.dtype) not in dtypes:
        raise DataError(
            f"{who}: init_params are {', '.join(sorted(d.name for d in dtypes))}, and X is {problem.design.dtype}: "
            f"their dtypes must have the same width; write fun.init(…, dtype=X.dtype), or X.astype(…)"
        )
    return jax.tree.map(lambda x: arrays.typed_beside(x, problem.targets), params)


def floating(who: str, params: Any) -> Any:
    """Return parameters as arrays without weak types; a DataError if one is not of real numbers, or there are none."""
    params = jax.tree.map(jnp.asarray, params)
    dtypes = {x.dtype for x in jax.tree.leaves(params)}
    if not dtypes or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise DataError(f"{who}: params must be arrays of floats, at least one, got {dtypes or params}")
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), params)
