"""What all solvers have in common: one compiled function that iterates, and a loop in Python around it.

The compiled function makes as many iterations as take a moment. Between two calls, Python may be interrupted, tell of
the iteration, or save the run. Inside ``jit``, ``vmap`` and ``grad``, the same function makes all iterations.

A solution is differentiated as what it is, the place where an optimality condition is zero, and not through the steps
that led there (Blondel et al., "Efficient and modular implicit differentiation", 2022). So the derivative does not
depend on the solver, costs a linear solve, and keeps nothing of the iterations.
"""

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api
from paraxis.errors import DataError
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Function, Linear
from paraxis.solve._run import Interrupted, Iteration, OptStep, Status, Watch, tell
from paraxis.solve._streaming import TableRows, saved, while_loop
from paraxis.solve.objective import LinearObjective

_PART = 0.5  # seconds that Ctrl-C waits, about; and at least an iteration
_RENEWAL = 16  # iterations after which a preconditioner is computed anew


class Solver(abc.ABC):
    """The fields of a solver are its options; ``arguments`` are those of a run but the first, ``(args, kwargs)``."""

    fun: Callable[..., Any]
    value_and_grad: bool
    has_aux: bool
    maxiter: int
    tol: float
    stepsize: float | Callable[[Any], Any]
    verbose: bool | Watch

    def __post_init__(self) -> None:
        who = type(self).__name__
        check.count(who, "maxiter", self.maxiter)
        for name in ("tol", *(() if callable(self.stepsize) else ("stepsize",))):
            check.number(who, name, getattr(self, name), least=0)

    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the state before the first iteration, with value and gradient at ``init_params``.

        Args:
            init_params: where to start.
            args, kwargs: further arguments, as of :meth:`run`.
        """
        return self._begun(*self._given("init_state", init_params, args, kwargs)).state

    def update(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration, of which ``verbose`` tells nothing.

        Args:
            params, state: from ``init_state`` or the last update; they belong together.
            args, kwargs: further arguments, the same as before.

        Returns:
            ``(params, state)``. If nothing better is found, ``params`` do not change.
        """
        step, arguments = OptStep(params, state), self._in_order(args, kwargs)
        in_parts = _is_traced((step, arguments)) or _tables(arguments)
        return (self._iteration if in_parts else self._compiled.iteration)(step, arguments)

    def run(self, init_params: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the error is small.

        The returned parameters can be differentiated with respect to ``args``, ``kwargs`` and values that the solver's
        functions close over, and ``jax.vmap`` can map over the run.

        Args:
            init_params: where to start; it need not be allowed by a constraint.
            args, kwargs: further arguments of ``fun``; of :class:`ProximalGradient`, after ``hyperparams_prox``.

        Returns:
            ``(params, state)``; ``state.status`` says whether this is a solution.

        Raises:
            Interrupted: after Ctrl-C, with the result so far.
        """
        solver, params, arguments = self._without_closures(*self._given("run", init_params, args, kwargs))
        # Where nothing is traced, nobody differentiates: what JAX does to find that out takes as long as a small fit.
        if _is_traced((params, arguments)):
            return _solution(solver, params, arguments)
        return arrays.on_auto_mesh(solver._solved_by_host, params, arguments)

    def optimality_fun(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what is zero at a solution: the gradient, or ``params - prox(params - gradient)``."""
        return self._residual(jax.tree.map(jnp.asarray, params), self._in_order(args, kwargs))

    def _given_stepsize(self, iter_num: Any) -> Any:
        return self.stepsize(iter_num) if callable(self.stepsize) else self.stepsize

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, kwargs

    def _given(self, call: str, init_params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call's parameters as arrays, on the data's mesh if their types say it, and its arguments.

        Raises:
            DataError: if there are no parameters, or one is not of real numbers.
            DataError: if a linear model's targets make no sense, or JAX would cut integers.
        """
        who = f"{type(self).__name__}.{call}"
        if getattr(type(init_params), "_fields", None) == OptStep._fields:  # also JAXopt's
            init_params = init_params.params
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), init_params)  # of no weak type
        dtypes = {x.dtype for x in jax.tree.leaves(params)}
        if not dtypes or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            raise DataError(f"{who}: params must be arrays of floats, at least one, got {dtypes or params}")
        check.no_cut(who, "the arguments of fun", (args, kwargs))
        if isinstance(self.fun, LinearObjective):
            problem = self.fun.check_targets(params, *args, **kwargs)
            if len(dtypes) > 1 or jnp.result_type(*dtypes, problem.design.dtype) not in dtypes:
                raise DataError(
                    f"{who}: init_params are {', '.join(sorted(d.name for d in dtypes))}, and X is "
                    f"{problem.design.dtype}: write fun.init(…, dtype=X.dtype), or X.astype(…)"
                )
            params = jax.tree.map(lambda x: arrays.typed_beside(x, problem.targets), params)
        return params, (args, kwargs)

    def _without_closures(self, params: Any, arguments: Any) -> tuple["Solver", Any, Any]:
        """Move traced values that the function closes over to the arguments, by which JAX differentiates."""
        fun, (args, kwargs) = self.fun, arguments
        if isinstance(fun, LinearObjective) or not jax_api.is_tracing():
            return self, params, arguments
        pure, closed = jax.closure_convert(lambda p, args, kwargs: fun(p, *args, **kwargs), params, args, kwargs)
        if not closed:
            return self, params, arguments
        own: Any = self
        solver = dataclasses.replace(own, fun=lambda params, arguments, closed: pure(params, *arguments, *closed))
        return solver, params, ((arguments, closed), {})

    @abc.abstractmethod
    def _residual(self, params: Any, arguments: Any) -> Any:
        """Return what is zero at a solution."""

    @abc.abstractmethod
    def _start(self, params: Any, arguments: Any, preconditioner: Any) -> OptStep:
        """Return the parameters, and the state before the first iteration."""

    @abc.abstractmethod
    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        """Make one iteration."""

    @abc.abstractmethod
    def _rechecked(self, step: OptStep, arguments: Any) -> OptStep:
        """Return a step at which a run of a linear model may end, with value, gradient and status computed anew."""

    @abc.abstractmethod
    def _inverse(self, params: Any, arguments: Any, right: Any) -> Any:
        """Return what the residual's derivative by the parameters takes to ``right``."""

    def _preconditioner(self, params: Any, arguments: Any) -> Any:
        """Return what is computed once, before the first iteration."""
        return None

    def _renewed(self, step: OptStep, arguments: Any) -> OptStep:
        """Return the same place, with the preconditioner that is right there."""
        return step

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}

    @functools.cached_property
    def _compiled(self) -> Any:
        """Return the solver's programs, which go when it goes."""
        methods = self._start, self._iteration, self._steps, self._tangent
        return SimpleNamespace(**{method.__name__[1:]: jax.jit(method) for method in methods})

    def _begun(self, params: Any, arguments: Any) -> OptStep:
        """Return where a run begins."""
        preconditioner = self._preconditioner(params, arguments)
        if _is_traced((params, arguments)):
            return self._start(params, arguments, preconditioner)
        start = self._start if _tables(arguments) else self._compiled.start
        params, state = start(params, arguments, preconditioner)
        # Later parameters lie where the state does: with others, iterations would be compiled once more.
        return OptStep(jax.tree.map(lambda x: arrays.whole_beside(x, state.error), params), state)

    def _steps(self, step: OptStep, arguments: Any, until: Any) -> OptStep:
        """Iterate until the solver stops, or has made so many iterations in all.

        Where it would stop, a linear model's predictions are computed anew; if it is no solution, the run goes on.
        """
        problem = self._problem(step.params, arguments)

        def go_on(step: OptStep) -> jax.Array:
            return (step.state.status == Status.RUNNING) & (step.state.iter_num < until)

        def iterate(step: OptStep) -> OptStep:
            return while_loop(problem.is_table, go_on, lambda step: self._iteration(step, arguments), step)

        def iterate_and_recheck(step: OptStep) -> OptStep:
            step = iterate(step)
            may_end = (step.state.status != Status.RUNNING) & (step.state.status != Status.NOT_FINITE)
            if problem.is_table:
                return self._rechecked(step, arguments) if may_end else step
            return jax.lax.cond(may_end, lambda step: self._rechecked(step, arguments), lambda step: step, step)

        return while_loop(problem.is_table, go_on, iterate_and_recheck, step) if problem.is_linear else iterate(step)

    def _problem(self, params: Any, arguments: Any) -> Linear | Function:
        """Return the problem that the function poses with its arguments."""
        args, kwargs = arguments
        if isinstance(self.fun, LinearObjective):
            return self.fun.problem(params, *args, **kwargs)

        def evaluate(params: Any) -> tuple[tuple[jax.Array, Any], Any]:
            evaluated = self.fun if self.value_and_grad else jax.value_and_grad(self.fun, has_aux=self.has_aux)
            found, grad = evaluated(params, *args, **kwargs)
            value, aux = found if self.has_aux else (found, None)
            # The parameters' dtypes are the solver's, whatever the data's are.
            value = jnp.asarray(value, jnp.result_type(*jax.tree.leaves(params)))
            return (value, aux), jax.tree.map(lambda p, g: jnp.asarray(g, p.dtype), params, grad)

        return Function(evaluate)

    def _solved_by_host(self, params: Any, arguments: Any) -> OptStep:
        tables, is_alone = _tables(arguments), jax.process_count() == 1
        steps, at_once = self._steps if tables else self._compiled.steps, 1 if is_alone else self.maxiter
        with contextlib.ExitStack() as stack:
            for table in tables:
                stack.enter_context(table.shown())
            options = {name: value for name, value in self.__getstate__().items() if name != "verbose"}
            step = self._begun(params, arguments)
            step, save = stack.enter_context(saved(f"{type(self).__name__}({options})", step, arguments))
            try:
                while int(step.state.status) == Status.RUNNING:
                    before, began = int(step.state.iter_num), time.perf_counter()
                    if before == _RENEWAL:
                        step = self._renewed(step, arguments)
                    until = min(before + (1 if tables or self.verbose else at_once), self.maxiter)
                    until = min(until, _RENEWAL) if before < _RENEWAL else until
                    step = jax.block_until_ready(steps(step, arguments, np.int32(until)))
                    each = (time.perf_counter() - began) / max(1, int(step.state.iter_num) - before)
                    at_once = max(1, int(_PART / each)) if is_alone else at_once
                    save(step)
                    if self.verbose:
                        tell(self.verbose, *(getattr(step.state, name) for name in Iteration._fields))
            except KeyboardInterrupt as error:
                save(step)
                status = jnp.where(step.state.status == Status.RUNNING, Status.INTERRUPTED, step.state.status)
                raise Interrupted(step.params, step.state._replace(status=status.astype(jnp.int32))) from error
            return step

    def _solved_in_program(self, params: Any, arguments: Any) -> OptStep:
        step = self._begun(params, arguments)
        if getattr(step.state, "preconditioner", None) is not None and self.maxiter > _RENEWAL:
            step = self._steps(step, arguments, _RENEWAL)
            is_running = step.state.status == Status.RUNNING
            step = jax.lax.cond(is_running, lambda step: self._renewed(step, arguments), lambda step: step, step)
        return self._steps(step, arguments, self.maxiter)

    def _tangent(self, params: Any, arguments: Any, moved: Any) -> Any:
        """Return the tangent of a solution by those of the arguments."""
        change = jax.jvp(lambda a: self._residual(params, a), (arguments,), (moved,))[1]
        return self._inverse(params, arguments, trees.scaled(-1, change))


def conjugate_gradients(operator: Callable[[Any], Any], right: Any) -> Any:
    """``operator(x) = right`` for a symmetric operator.

    On one vector: of a tree, some leaves might not depend on what is differentiated, which JAX cannot transpose.
    """
    vector, unravel = jax.flatten_util.ravel_pytree(right)

    def product(x: jax.Array) -> jax.Array:
        return jax.flatten_util.ravel_pytree(operator(unravel(x)))[0]

    def conjugate(product: Any, b: jax.Array) -> Any:
        return jax.scipy.sparse.linalg.cg(product, b, tol=10 * float(jnp.finfo(b.dtype).eps))[0]

    return unravel(jax.lax.custom_linear_solve(product, vector, conjugate, symmetric=True))


def _tables(arguments: Any) -> list[TableRows]:
    return [x for x in jax.tree.leaves(arguments) if isinstance(x, TableRows)]


def _is_traced(operands: Any) -> bool:
    return jax_api.is_tracing() or arrays.is_traced(operands)


# One function for all solvers: a derivative that closes over the function it is of, JAX would never let go.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _solution(solver: Solver, params: Any, arguments: Any) -> OptStep:
    if not _is_traced((params, arguments)):
        return arrays.on_auto_mesh(solver._solved_by_host, params, arguments)
    return solver._solved_in_program(params, arguments)


@_solution.defjvp
def _derivative(solver: Solver, primals: Any, tangents: Any) -> Any:
    step = _solution(solver, *primals)
    moved = solver._compiled.tangent(step.params, primals[1], tangents[1])
    return step, OptStep(moved, jax.tree.map(_no_tangent, step.state))


def _no_tangent(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
