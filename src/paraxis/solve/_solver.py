"""What all solvers have in common: one compiled function that iterates, and a loop in Python around it.

The compiled function makes as many iterations as take a moment. Between two calls, Python may be interrupted, tell of
the iteration, or save the run. Inside ``jit``, ``vmap`` and ``grad``, the same function makes all iterations.
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
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, jax_api
from paraxis.solve._problem import Function, Linear
from paraxis.solve._run import Interrupted, OptStep, Watch, beginning, floating, tell
from paraxis.solve._stopping import Status
from paraxis.solve._streaming import TableRows, while_loop
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
    verbose: bool | Watch

    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the state before the first iteration, with value and gradient at ``init_params``.

        Args:
            init_params: where to start.
            args, kwargs: further arguments, as of :meth:`run`.
        """
        return self._begun(*self._given("init_state", init_params, args, kwargs)).state

    def update(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration.

        Args:
            params, state: from ``init_state`` or the last update; they belong together.
            args, kwargs: further arguments, the same as before.

        Returns:
            ``(params, state)``. If nothing better is found, ``params`` do not change.
        """
        step, arguments = OptStep(params, state), self._in_order(args, kwargs)
        is_traced = _is_traced((step, arguments))
        new = (self._iteration if is_traced or _tables(arguments) else self._compiled.iteration)(step, arguments)
        if self.verbose:
            self._tell(new.state, is_traced)
        return new

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
        return self._residual(floating(f"{type(self).__name__}.optimality_fun", params), self._in_order(args, kwargs))

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, kwargs

    def _given(self, call: str, init_params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return checked parameters and arguments of a call."""
        return beginning(f"{type(self).__name__}.{call}", self.fun, init_params, args, kwargs), (args, kwargs)

    def _without_closures(self, params: Any, arguments: Any) -> tuple["Solver", Any, Any]:
        """Move traced values that the function closes over to the arguments, by which JAX differentiates."""
        fun, (args, kwargs) = self.fun, arguments
        if isinstance(fun, LinearObjective) or not jax_api.is_tracing():
            return self, params, arguments
        pure, closed = jax.closure_convert(lambda p, args, kwargs: fun(p, *args, **kwargs), params, args, kwargs)
        if not closed:
            return self, params, arguments

        def opened(params: Any, arguments: Any, closed: Any) -> Any:
            return pure(params, *arguments, *closed)

        solver: Any = dataclasses.replace(self, fun=opened)  # pyright: ignore[reportArgumentType]
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
    def _tangent(self, params: Any, arguments: Any, moved: Any) -> Any:
        """Return the tangent of a solution by those of the arguments."""

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
        start, iteration, steps = jax.jit(self._start), jax.jit(self._iteration), jax.jit(self._steps)
        return SimpleNamespace(start=start, iteration=iteration, steps=steps, tangent=jax.jit(self._tangent))

    def _begun(self, params: Any, arguments: Any) -> OptStep:
        """Return where a run begins."""
        preconditioner = self._preconditioner(params, arguments)
        if _is_traced((params, arguments)):
            return self._start(params, arguments, preconditioner)
        start = self._start if _tables(arguments) else self._compiled.start
        params, state = start(params, arguments, preconditioner)
        # Later parameters lie where the state does: with others, iterations would be compiled once more.
        return OptStep(jax.tree.map(lambda x: arrays.whole_beside(x, state.error), params), state)

    def _steps(self, step: OptStep, arguments: Any, until: Any, *, tells: bool = False) -> OptStep:
        """Iterate until the solver stops, or has made so many iterations in all.

        Where it would stop, a linear model's predictions are computed anew; if it is no solution, the run goes on.
        """
        problem = self._problem(step.params, arguments)

        def iterate(step: OptStep) -> OptStep:
            new = self._iteration(step, arguments)
            if tells:
                self._tell(new.state, True)
            return new

        def go_on(step: OptStep) -> jax.Array:
            return (step.state.status == Status.RUNNING) & (step.state.iter_num < until)

        def iterate_and_recheck(step: OptStep) -> OptStep:
            step = while_loop(problem.is_table, go_on, iterate, step)
            may_end = (step.state.status != Status.RUNNING) & (step.state.status != Status.NOT_FINITE)
            if problem.is_table:
                return self._rechecked(step, arguments) if may_end else step
            return jax.lax.cond(may_end, lambda step: self._rechecked(step, arguments), lambda step: step, step)

        if not problem.is_linear:
            return while_loop(False, go_on, iterate, step)
        return while_loop(problem.is_table, go_on, iterate_and_recheck, step)

    def _tell(self, state: Any, is_traced: bool) -> None:
        numbers = state.iter_num, state.value, state.error, state.stepsize, state.data_passes
        if is_traced:
            jax.debug.callback(functools.partial(tell, self.verbose), *numbers)
        else:
            tell(self.verbose, *numbers)

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
        steps = self._steps if tables else self._compiled.steps
        with contextlib.ExitStack() as stack:
            for table in tables:
                stack.enter_context(table.shown())
            step, journal = self._begun(params, arguments), None
            if tables:
                options = {name: value for name, value in self.__getstate__().items() if name != "verbose"}
                journal = stack.enter_context(tables[0].saved(f"{type(self).__name__}({options})", step, arguments))
            if journal is not None and (found := journal.state()) is not None:
                step = _laid_as(step, found[1])
            at_once = 1 if is_alone else self.maxiter
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
                    if self.verbose:
                        self._tell(step.state, False)
                    if journal is not None:
                        journal.save_state([], jax.tree.leaves(step))
            except KeyboardInterrupt as error:
                if journal is not None:
                    journal.save_state([], jax.tree.leaves(step))
                status = jnp.where(step.state.status == Status.RUNNING, Status.INTERRUPTED, step.state.status)
                raise Interrupted(step.params, step.state._replace(status=status.astype(jnp.int32))) from error
            return step

    def _solved_in_program(self, params: Any, arguments: Any) -> OptStep:
        step, tells = self._begun(params, arguments), bool(self.verbose)
        if getattr(step.state, "preconditioner", None) is not None and self.maxiter > _RENEWAL:
            step = self._steps(step, arguments, _RENEWAL, tells=tells)
            is_running = step.state.status == Status.RUNNING
            step = jax.lax.cond(is_running, lambda step: self._renewed(step, arguments), lambda step: step, step)
        return self._steps(step, arguments, self.maxiter, tells=tells)


def _tables(arguments: Any) -> list[TableRows]:
    return [x for x in jax.tree.leaves(arguments) if isinstance(x, TableRows)]


def _is_traced(operands: Any) -> bool:
    return jax_api.is_tracing() or arrays.is_traced(operands)


def _laid_as(step: OptStep, leaves: list[Any]) -> OptStep:
    """Return saved leaves in the structure of a step, where its own lie."""
    own, structure = jax.tree.flatten(step)
    laid = [
        jax.device_put(x, y.sharding if y.committed else None) if isinstance(y, jax.Array) else x
        for x, y in zip(leaves, own, strict=True)
    ]
    return jax.tree.unflatten(structure, laid)


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
