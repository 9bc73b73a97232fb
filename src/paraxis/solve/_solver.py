"""What all solvers have in common: one compiled function that iterates, and a loop in Python around it.

The function makes as many iterations as take a moment. Between two calls, Python may be interrupted, tell of the
iteration, or save the run. Inside ``jit``, ``vmap`` and ``grad``, the same function makes all iterations. A solution is
differentiated as the place where an optimality condition is zero, not through the steps that led there (Blondel et al.,
"Efficient and modular implicit differentiation", 2022): that costs a linear solve, and keeps nothing of the iterations.
"""

import abc
import contextlib
import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api
from paraxis.errors import DataError, axis_advice
from paraxis.solve import _trees as trees
from paraxis.solve._problem import Function, Linear
from paraxis.solve._rows import beside, sent
from paraxis.solve._run import Interrupted, Iteration, OptStep, Status, Watch, recheck
from paraxis.solve._streaming import TableRows, saved, while_loop
from paraxis.solve.objective import LinearObjective

_PART = 0.5  # seconds that Ctrl-C waits, about; and at least an iteration


@dataclasses.dataclass(frozen=True)
class Solver(abc.ABC):
    """The fields of a solver are its options. The ``arguments`` of a run are ``(hyperparams_prox, args, kwargs)``."""

    fun: Callable[..., Any]
    _: dataclasses.KW_ONLY
    value_and_grad: bool | Callable[..., Any] = False
    has_aux: bool = False
    maxiter: int = 500
    tol: float = 1e-5
    stepsize: float | Callable[[Any], Any] = 0.0
    verbose: int | Watch = False

    _patience: ClassVar[int]  # iterations without progress
    _place: ClassVar[tuple[str, ...]] = ()  # fields of its own that tell where a state is
    _parts: ClassVar[tuple[str, ...]] = ()  # of an iteration, that read no rows: between passes, programs
    _on_host: ClassVar[bool] = False  # whether iterations are NumPy's, around compiled passes, each from scratch

    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the state before the first iteration, by the arguments of :meth:`run`."""
        return self._begun(*self._operands("init_state", init_params, args, kwargs)).state

    def update(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration from what ``init_state`` or the last update returned, and return ``(params, state)``.

        The other arguments are the same each time. If nothing better is found, ``params`` do not change.
        """
        return self._called("_iteration", OptStep(params, state), self._in_order(args, kwargs))

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
        operands = self._operands("run", init_params, args, kwargs)
        # Where nothing is traced, nobody differentiates: what JAX does to find that out takes as long as a small fit.
        if _is_traced(operands):
            return self._programs._solved((self.tol, self.maxiter), *operands)
        return self._solved_by_host(*operands)

    @property
    def _is_fixed(self) -> bool:
        """Whether step sizes are given; else they are searched for."""
        return callable(self.stepsize) or self.stepsize > 0

    def _fixed_stepsize(self, iter_num: Any) -> Any:
        return self.stepsize(iter_num) if callable(self.stepsize) else self.stepsize

    def _operands(self, call: str, init_params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call's parameters as arrays, on the data's mesh if their types say it, and its arguments."""
        who = f"{type(self).__name__}.{call}"
        if getattr(type(init_params), "_fields", None) == OptStep._fields:  # also JAXopt's
            init_params = init_params.params
        xp: Any = np if self._on_host else jnp
        params: Any = jax.tree.map(lambda x: xp.asarray(x, xp.result_type(x)), init_params)  # of no weak type
        if any(jnp.iscomplexobj(x) for x in jax.tree.leaves(params)):
            raise DataError(f"{who}: init_params are complex; write them as a pair (real, imaginary) of floats")
        check.leaves(who, "the arguments of fun", (args, kwargs))
        hyper, args, kwargs = self._in_order(args, kwargs)
        hyper: Any = jax.tree.map(xp.asarray, hyper)
        if isinstance(self.fun, LinearObjective):
            problem = self.fun.check_targets(params, *args, **kwargs)
            dtypes = {x.dtype.name for x in jax.tree.leaves(params)}
            if dtypes != {jnp.result_type(*dtypes, problem.design.dtype).name}:
                both = f"init_params are {', '.join(sorted(dtypes))}, and X is {problem.design.dtype}"
                raise DataError(f"{who}: {both}; write fun.init(…, dtype=X.dtype), or X.astype(…)")
        for x in jax.tree.leaves((args, kwargs)):
            if isinstance(x, jax.Array) and jax.typeof(x).sharding.mesh.explicit_axes:
                params, hyper = (jax.tree.map(functools.partial(beside, other=x), y) for y in (params, hyper))
                break
        return params, (hyper, args, kwargs)

    def _problem(self, params: Any, arguments: Any) -> Linear | Function:
        """Return the problem that the function poses with its arguments."""
        _, args, kwargs = arguments
        if isinstance(self.fun, LinearObjective):
            return self.fun.problem(params, *args, **kwargs)

        def evaluate(params: Any) -> tuple[tuple[jax.Array, Any], Any]:
            with_grad: Any = self.value_and_grad or jax.value_and_grad(self.fun, has_aux=self.has_aux)
            fn: Any = with_grad if callable(with_grad) else self.fun
            with axis_advice(f"{type(self).__name__}: fun is a function of all rows; leave the axis out: jnp.mean(x)"):
                output, grad = fn(params, *args, **kwargs)
            value, aux = output if self.has_aux else (output, None)
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

    def _prepared(self, step: OptStep, arguments: Any) -> OptStep:
        """Return the same place, with what is computed before the first iteration."""
        return step

    @functools.cached_property
    def _programs(self) -> SimpleNamespace:
        """The compiled methods, which solvers that differ in ``tol``, ``maxiter`` and ``verbose`` only may share."""
        like = dataclasses.replace(self, tol=0, maxiter=1, verbose=False)
        if isinstance(self.fun, LinearObjective):  # holds no data: its programs may outlive a solver
            with contextlib.suppress(TypeError):  # of an option without a hash
                return _programs_like(like)
        return _programs_like.__wrapped__(like)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_programs"}

    def _called(self, name: str, *operands: Any) -> Any:
        """Call a method, compiled, unless it is part of another program or its passes are Python's."""
        if self._on_host or _is_traced(operands) or _tables(operands):
            return getattr(self, name)(*operands)
        leaves = (x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array))  # and no functions
        return getattr(self._programs, name)(sent((float(self.tol), int(self.maxiter)), next(leaves)), *operands)

    def _begun(self, params: Any, arguments: Any) -> OptStep:
        """Return where a run begins."""
        step = self._prepared(self._called("_start", params, arguments), arguments)
        if self._on_host or _is_traced(step):
            return step
        # Later parameters lie where the state does: with others, iterations would be compiled once more.
        return step._replace(params=jax.tree.map(lambda x: beside(x, step.state.error), step.params))

    def _steps(self, step: OptStep, arguments: Any, until: Any) -> OptStep:
        """Iterate until the solver stops, even with a linear model's predictions computed anew; or so often in all."""
        problem = self._problem(step.params, arguments)
        in_python = self._on_host or problem.is_table

        def rechecked(step: OptStep) -> OptStep:
            return step._replace(state=recheck(self, step.state, self._start(step.params, arguments).state))

        def go_on(step: OptStep) -> jax.Array:
            return (step.state.status == Status.RUNNING) & (step.state.iter_num < until)

        def iterate_and_recheck(step: OptStep) -> OptStep:
            step = while_loop(in_python, go_on, lambda step: self._iteration(step, arguments), step)
            if self._on_host or not problem.is_linear:
                return step
            may_end = (step.state.status != Status.RUNNING) & (step.state.status != Status.NOT_FINITE)
            if in_python:
                return rechecked(step) if may_end else step
            return jax.lax.cond(may_end, rechecked, lambda step: step, step)

        return while_loop(in_python, go_on, iterate_and_recheck, step)

    def _solved_by_host(self, params: Any, arguments: Any) -> OptStep:
        tables, is_alone = _tables(arguments), jax.process_count() == 1
        at_once = 1 if tables or self.verbose or is_alone else self.maxiter
        with contextlib.ExitStack() as stack:
            for table in tables:
                stack.enter_context(table.shown())
            step = self._begun(params, arguments)
            options = f"{dataclasses.replace(self, verbose=False)}" if tables else ""
            step, save = stack.enter_context(saved(options, step, arguments))
            first = float(step.state.error)
            try:
                while jax.device_get(step.state.status) == Status.RUNNING:
                    before, began = int(jax.device_get(step.state.iter_num)), time.perf_counter()
                    until = min(before + at_once, self.maxiter)
                    last = until if self._on_host else sent(np.int32(until), step.state.error)
                    step = jax.block_until_ready(self._called("_steps", step, arguments, last))
                    if is_alone and not (tables or self.verbose):
                        done = int(jax.device_get(step.state.iter_num)) - before
                        at_once = max(1, int(_PART * done / (time.perf_counter() - began)))
                    for table in tables:
                        table.expected_passes = _expected(table.num_passes, first, float(step.state.error), self.tol)
                    save(step)
                    if self.verbose:
                        numbers = (kind(getattr(step.state, name)) for name, kind in Iteration.__annotations__.items())
                        iteration = Iteration(*numbers)
                        (self.verbose if callable(self.verbose) else functools.partial(print, flush=True))(iteration)
            except KeyboardInterrupt as error:
                save(step)
                is_over = jax.device_get(step.state.status) != Status.RUNNING
                status = step.state.status if is_over else 0 * step.state.status + Status.INTERRUPTED
                raise Interrupted(step.params, step.state._replace(status=status)) from error
            return step

    def _solved(self, params: Any, arguments: Any) -> OptStep:
        """Return the end of a run in a program, differentiated as the root of two functions of parameters and gradient.

        They are the true gradient less that one, and the residual: these tell derivatives of gradient and prox apart.
        """

        def iterated(params: Any, arguments: Any) -> OptStep:
            return self._steps(self._begun(params, arguments), arguments, self.maxiter)

        def grad(params: Any) -> Any:
            return self._problem(params, arguments).at(params).grad

        def functions(unknowns: tuple[Any, Any]) -> tuple[Any, Any]:
            return trees.minus(grad(unknowns[0]), unknowns[1]), self._residual(*unknowns, arguments)

        # What functions close over has no derivative in the loop either: JAX has none of a loop of unknown length.
        iterate, closed_over = jax.closure_convert(iterated, params, arguments)
        step = iterate(*jax.lax.stop_gradient((params, arguments, *closed_over)))
        solution = step.params, grad(step.params)
        return step._replace(params=jax.lax.custom_root(functions, solution, lambda _, guess: guess, trees.inverse)[0])


@functools.lru_cache(maxsize=128)
def _programs_like(like: Solver) -> SimpleNamespace:
    """Return a solver's methods, compiled, of which ``(tol, maxiter)`` are the first operand."""

    def compiled(name: str) -> Callable[..., Any]:
        def program(limits: Any, *operands: Any) -> Any:
            solver = copy.copy(like)
            vars(solver).update(zip(("tol", "maxiter"), limits, strict=True))
            return getattr(solver, name)(*operands)

        program.__name__ = name
        return jax.jit(program)

    names = "_start", "_iteration", "_steps", "_solved", *like._parts
    return SimpleNamespace(**{name: compiled(name) for name in names})


def _expected(passes: int, first: float, error: float, tol: float) -> int | None:
    """Return how many passes there are in all, if the error, of which the first is known, falls on as it has."""
    if not first > error > tol > 0:
        return None
    return round(passes * math.log(first / tol) / math.log(first / error))


def _tables(arguments: Any) -> list[TableRows]:
    return [x for x in jax.tree.leaves(arguments) if isinstance(x, TableRows)]


def _is_traced(operands: Any) -> bool:
    return jax_api.is_tracing() or arrays.is_traced(operands)
