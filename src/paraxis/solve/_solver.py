"""What all solvers have in common: one compiled function that iterates, and a loop in Python around it.

The function makes as many iterations as take a moment. Between two calls, Python may be interrupted, tell of the
iteration, or save the run. Inside ``jit``, ``vmap`` and ``grad``, the same function makes all iterations. A solution is
differentiated as the place where an optimality condition is zero, not through the steps that led there (Blondel et al.,
"Efficient and modular implicit differentiation", 2022): that costs a linear solve, and keeps nothing of the iterations.
"""

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api
from paraxis.errors import DataError, axis_advice
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Function, Linear
from paraxis.solve._rows import beside, sent
from paraxis.solve._run import Interrupted, Iteration, OptStep, Status, Watch, recheck, tell
from paraxis.solve._streaming import TableRows, saved, while_loop
from paraxis.solve.objective import LinearObjective

_PART = 0.5  # seconds that Ctrl-C waits, about; and at least an iteration
_RENEWAL, _FAR = 10, 20  # iterations after which a preconditioner is computed anew, if the error is so many tol


@dataclasses.dataclass(frozen=True)
class Solver(abc.ABC):
    """The fields of a solver are its options. The ``arguments`` of a run are ``(hyperparams_prox, args, kwargs)``."""

    fun: Callable[..., Any]
    _: dataclasses.KW_ONLY
    value_and_grad: bool = False
    has_aux: bool = False
    maxiter: int = 500
    tol: float = 1e-5
    stepsize: float | Callable[[Any], Any] = 0.0
    verbose: bool | Watch = False

    _patience: ClassVar[int]  # iterations without progress
    _place: ClassVar[tuple[str, ...]] = ()  # fields of its own that tell where a state is
    _parts: ClassVar[tuple[str, ...]] = ()  # of an iteration, that read no rows: between passes, programs

    def __post_init__(self) -> None:
        check.count(who := type(self).__name__, "maxiter", self.maxiter)
        for name in ("tol", *(() if callable(self.stepsize) else ("stepsize",))):
            check.number(who, name, getattr(self, name), least=0)

    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the state before the first iteration, by the arguments of :meth:`run`."""
        return self._begun(*self._given("init_state", init_params, args, kwargs)).state

    def update(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration from what ``init_state`` or the last update returned, and return ``(params, state)``.

        The other arguments are the same each time. If nothing better is found, ``params`` do not change.
        """
        step, arguments = OptStep(params, state), self._in_order(args, kwargs)
        return self._called("_iteration", step, arguments)

    def run(self, init_params: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the error is small, and return ``(params, state)``; ``state.status`` says whether it is.

        The parameters can be differentiated with respect to ``args``, ``kwargs`` and values that the solver's functions
        close over, and ``jax.vmap`` can map over the run.

        Args:
            init_params: where to start; it need not be allowed by a constraint.
            args, kwargs: further arguments of ``fun``; of :class:`ProximalGradient`, after ``hyperparams_prox``.

        Raises:
            Interrupted: after Ctrl-C, with the result so far.
        """
        operands = self._given("run", init_params, args, kwargs)
        # Where nothing is traced, nobody differentiates: what JAX does to find that out takes as long as a small fit.
        return (self._compiled._solved if _is_traced(operands) else self._solved_by_host)(*operands)

    def _given_stepsize(self, iter_num: Any) -> Any:
        return self.stepsize(iter_num) if callable(self.stepsize) else self.stepsize

    def _given(self, call: str, init_params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call's parameters as arrays, on the data's mesh if their types say it, and its arguments."""
        who = f"{type(self).__name__}.{call}"
        if getattr(type(init_params), "_fields", None) == OptStep._fields:  # also JAXopt's
            init_params = init_params.params
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), init_params)  # of no weak type
        check.leaves(who, "the arguments of fun", (args, kwargs))
        hyper, args, kwargs = self._in_order(args, kwargs)
        hyper = jax.tree.map(jnp.asarray, hyper)
        if isinstance(self.fun, LinearObjective):
            problem = self.fun.check_targets(params, *args, **kwargs)
            dtypes = {x.dtype.name for x in jax.tree.leaves(params)}
            if dtypes != {jnp.result_type(*dtypes, problem.design.dtype).name}:
                raise DataError(
                    f"{who}: init_params are {', '.join(sorted(dtypes))}, and X is {problem.design.dtype}: write "
                    f"fun.init(…, dtype=X.dtype), or X.astype(…)"
                )
        for x in jax.tree.leaves((args, kwargs)):
            if isinstance(x, jax.Array) and jax.typeof(x).sharding.mesh.explicit_axes:
                params, hyper = jax.tree.map(functools.partial(beside, other=x), (params, hyper))
                break
        return params, (hyper, args, kwargs)

    def _problem(self, params: Any, arguments: Any) -> Linear | Function:
        """Return the problem that the function poses with its arguments."""
        _, args, kwargs = arguments
        if isinstance(self.fun, LinearObjective):
            return self.fun.problem(params, *args, **kwargs)

        def evaluate(params: Any) -> tuple[tuple[jax.Array, Any], Any]:
            evaluated = self.fun if self.value_and_grad else jax.value_and_grad(self.fun, has_aux=self.has_aux)
            with axis_advice(f"{type(self).__name__}: fun is a function of all rows; leave the axis out: jnp.mean(x)"):
                found, grad = evaluated(params, *args, **kwargs)
            value, aux = found if self.has_aux else (found, None)
            # The parameters' dtypes are the solver's, whatever the data's are.
            value = jnp.asarray(value, jnp.result_type(*jax.tree.leaves(params)))
            return (value, aux), jax.tree.map(lambda p, g: jnp.asarray(g, p.dtype), params, grad)

        return Function(evaluate)

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return ``(hyperparams_prox, args, kwargs)``."""
        return None, args, kwargs

    def _residual(self, params: Any, grad: Any, arguments: Any) -> Any:
        """Return what is zero at a solution, by the gradient there."""
        return grad

    @abc.abstractmethod
    def _start(self, params: Any, arguments: Any) -> OptStep:
        """Return the parameters, and the state before the first iteration."""

    @abc.abstractmethod
    def _iteration(self, before: OptStep, arguments: Any) -> OptStep:
        """Make one iteration."""

    def _prepared(self, step: OptStep, arguments: Any, again: bool) -> OptStep:
        """Return the same place, with what is computed before the first iteration, and once again."""
        return step

    @functools.cached_property
    def _compiled(self) -> Any:
        """Return the solver's programs, which go when it goes."""
        names = "_start", "_iteration", "_steps", "_solved", *self._parts
        return SimpleNamespace(**{name: jax.jit(getattr(self, name)) for name in names})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}

    def _called(self, name: str, *operands: Any) -> Any:
        """Call a method, compiled, unless it is part of another program or its passes are Python's."""
        return getattr(self if _is_traced(operands) or _tables(operands) else self._compiled, name)(*operands)

    def _grad(self, params: Any, arguments: Any) -> Any:
        return self._problem(params, arguments).at(params).grad

    def _begun(self, params: Any, arguments: Any) -> OptStep:
        """Return where a run begins."""
        step = self._prepared(self._called("_start", params, arguments), arguments, again=False)
        if _is_traced(step):
            return step
        # Later parameters lie where the state does: with others, iterations would be compiled once more.
        return step._replace(params=jax.tree.map(lambda x: beside(x, step.state.error), step.params))

    def _steps(self, step: OptStep, arguments: Any, until: Any) -> OptStep:
        """Iterate until the solver stops, even with a linear model's predictions computed anew; or so often in all."""
        problem = self._problem(step.params, arguments)

        def rechecked(step: OptStep) -> OptStep:
            return step._replace(state=recheck(self, step.state, self._start(step.params, arguments).state))

        def go_on(step: OptStep) -> jax.Array:
            return (step.state.status == Status.RUNNING) & (step.state.iter_num < until)

        def iterate_and_recheck(step: OptStep) -> OptStep:
            step = while_loop(problem.is_table, go_on, lambda step: self._iteration(step, arguments), step)
            may_end = (step.state.status != Status.RUNNING) & (step.state.status != Status.NOT_FINITE)
            if problem.is_table:
                return rechecked(step) if may_end else step
            return jax.lax.cond(may_end, rechecked, lambda step: step, step) if problem.is_linear else step

        return while_loop(problem.is_table, go_on, iterate_and_recheck, step)

    def _solved_by_host(self, params: Any, arguments: Any) -> OptStep:
        tables, is_alone = _tables(arguments), jax.process_count() == 1
        at_once = 1 if tables or self.verbose or is_alone else self.maxiter
        with contextlib.ExitStack() as stack:
            for table in tables:
                stack.enter_context(table.shown())
            step = self._begun(params, arguments)
            options = f"{dataclasses.replace(self, verbose=False)}" if tables else ""
            step, save = stack.enter_context(saved(options, step, arguments))
            try:
                while jax.device_get(step.state.status) == Status.RUNNING:
                    before, began = int(jax.device_get(step.state.iter_num)), time.perf_counter()
                    if before == _RENEWAL and jax.device_get(step.state.error) > _FAR * self.tol:
                        step = self._prepared(step, arguments, again=True)
                    until = min(before + at_once, self.maxiter, _RENEWAL if before < _RENEWAL else self.maxiter)
                    last = sent(np.int32(until), step.state.error)
                    step = jax.block_until_ready(self._called("_steps", step, arguments, last))
                    if is_alone and not (tables or self.verbose):
                        done = int(jax.device_get(step.state.iter_num)) - before
                        at_once = max(1, int(_PART * done / (time.perf_counter() - began)))
                    save(step)
                    if self.verbose:
                        tell(self.verbose, *(getattr(step.state, name) for name in Iteration._fields))
            except KeyboardInterrupt as error:
                save(step)
                status = jnp.where(step.state.status == Status.RUNNING, Status.INTERRUPTED, step.state.status)
                raise Interrupted(step.params, step.state._replace(status=status.astype(jnp.int32))) from error
            return step

    def _solved(self, params: Any, arguments: Any) -> OptStep:
        """Return the end of a run in a program, differentiated as the root of two functions of parameters and gradient.

        They are the true gradient less that one, and the residual: these tell derivatives of gradient and prox apart.
        """

        def iterated(params: Any, arguments: Any) -> OptStep:
            step = self._begun(params, arguments)
            if getattr(step.state, "preconditioner", None) is not None and self.maxiter > _RENEWAL:
                step = self._steps(step, arguments, _RENEWAL)
                renewed = functools.partial(self._prepared, arguments=arguments, again=True)
                is_far = (step.state.status == Status.RUNNING) & (step.state.error > _FAR * self.tol)
                step = jax.lax.cond(is_far, renewed, lambda step: step, step)
            return self._steps(step, arguments, self.maxiter)

        def functions(unknowns: tuple[Any, Any]) -> tuple[Any, Any]:
            return trees.minus(self._grad(unknowns[0], arguments), unknowns[1]), self._residual(*unknowns, arguments)

        # What functions close over has no derivative in the loop either: JAX has none of a loop of unknown length.
        iterate, closed_over = jax.closure_convert(iterated, params, arguments)
        step = iterate(*jax.lax.stop_gradient((params, arguments, *closed_over)))
        solution = step.params, self._grad(step.params, arguments)
        return step._replace(params=jax.lax.custom_root(functions, solution, lambda _, guess: guess, _inverse)[0])


def _inverse(derivative: Callable[[Any], Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return what the derivative of a solution's two functions takes to ``right``.

    With M the derivative of ``prox`` and H that of the gradient, that is ``A x = right[1] + M right[0] = b`` for the
    parameters, where ``A = I - M + M H``. A is not symmetric, but both M and H are, and M lies between 0 and I. Let
    ``rest = b - M b``. If ``S w = M (b + rest - H rest)`` with ``S = M - M M + M H M``, then ``x = rest + M w``; and S
    is symmetric, and no less definite than H where M is not zero. (Of a projection, what it holds fast is eliminated.)
    """
    zero = jax.tree.map(jnp.zeros_like, right[0])

    def hessian(x: Any) -> Any:
        return derivative((x, zero))[0]

    def prox(x: Any) -> Any:
        return derivative((zero, x))[1]

    whole = trees.along(right[1], 1, prox(right[0]))
    rest = trees.minus(whole, prox(whole))
    free = prox(trees.minus(trees.along(whole, 1, rest), hessian(rest)))
    # On one vector: of a tree, some leaves might not depend on what is differentiated, which JAX cannot transpose.
    vector, unravel = jax.flatten_util.ravel_pytree(free)

    def operator(vector: jax.Array) -> jax.Array:
        w = unravel(vector)
        kept = prox(w)
        return jax.flatten_util.ravel_pytree(prox(trees.along(trees.minus(w, kept), 1, hessian(kept))))[0]

    def conjugate(operator: Any, b: jax.Array) -> jax.Array:
        return jax.scipy.sparse.linalg.cg(operator, b, tol=10 * float(jnp.finfo(b.dtype).eps))[0]

    w = unravel(jax.lax.custom_linear_solve(operator, vector, conjugate, symmetric=True))
    params = trees.along(rest, 1, prox(w))
    return params, trees.minus(hessian(params), right[0])


def _tables(arguments: Any) -> list[TableRows]:
    return [x for x in jax.tree.leaves(arguments) if isinstance(x, TableRows)]


def _is_traced(operands: Any) -> bool:
    return jax_api.is_tracing() or arrays.is_traced(operands)
