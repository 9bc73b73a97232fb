"""L-BFGS: descent along what the last few steps tell of the curvature."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from paraxis._axes import arrays
from paraxis.solve import (
    _checks as checks,
    _functions as functions,
    _gram as gram,
    _memory as memories,
    _progress as progress,
    _trees as trees,
)
from paraxis.solve._linear import Linear
from paraxis.solve._memory import Memory
from paraxis.solve._problem import Point, Problem
from paraxis.solve._progress import Progress
from paraxis.solve._search import RULES, Found, Options, Rule, search
from paraxis.solve._solution import OptStep, Solve, differentiable, in_stages
from paraxis.solve._solver import SmoothSolver
from paraxis.solve._status import Status

_LONGER = 8  # by this factor, each Gram matrix serves longer than the last
_REFRESH = 50  # iterations after which predictions are computed anew
_SLOPE_OF_LINEAR, _SLOPE = 0.2, 0.9  # of the first slope, what a step may leave; trials of linear models read no rows
_LONGEST_FIRST = 2.0  # a step to be tried first


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "iter_num", "value", "grad", "stepsize", "error", "s_history", "y_history", "rho_history", "gamma", "num_pairs",
        "aux", "failed_linesearch", "num_fun_eval", "num_grad_eval", "num_linesearch_iter", "status", "data_passes",
        "progress", "cache", "preconditioner",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class LBFGSState:
    """The state of an L-BFGS run. A pytree; names as in JAXopt.

    Args:
        iter_num: iterations so far, int32.
        value: the objective at the parameters.
        grad: its gradient there.
        stepsize: the last step along its direction.
        error: Euclidean norm of the gradient.
        s_history, y_history, rho_history, gamma, num_pairs: the stored curvature.
        aux: what ``fun`` returned besides the value.
        failed_linesearch: whether the last search found nothing better.
        num_fun_eval, num_grad_eval: evaluations; a linear model's trials are evaluations without a gradient.
        num_linesearch_iter: trials so far.
        status: a :class:`Status`, as int32.
        data_passes: how often all data were read, or would have been by a function that reads them once forwards and
            once backwards.
        progress: what the solver needs to detect that rounding allows no more progress.
        cache: a linear model's predictions.
        preconditioner: the inverse of the initial Hessian, or ``None``.
    """

    iter_num: jax.Array
    value: jax.Array
    grad: Any
    stepsize: jax.Array
    error: jax.Array
    s_history: Any
    y_history: Any
    rho_history: jax.Array
    gamma: jax.Array
    num_pairs: jax.Array
    aux: Any
    failed_linesearch: jax.Array
    num_fun_eval: jax.Array
    num_grad_eval: jax.Array
    num_linesearch_iter: jax.Array
    status: jax.Array
    data_passes: jax.Array
    progress: Progress
    cache: Any
    preconditioner: gram.Inverse | None

    @property
    def reason(self) -> str:
        """The reason why the solver stopped, in words; for a single problem, not for a batch."""
        return progress.words(self)

    def __repr__(self) -> str:
        return progress.shown(self)

    def _repr_html_(self) -> str:
        """Return what one looks for in it, for notebooks."""
        return progress.shown_as_html(self)


@dataclasses.dataclass(frozen=True)
class LBFGS(SmoothSolver):
    """Minimise a smooth function by L-BFGS, with the interface of JAXopt's solver.

    For a function of :mod:`paraxis.solve.objective`, the solver exploits the structure of linear models: an iteration
    reads the data twice, however many steps the line search tries, line searches are thorough, and the Hessian starts
    as the Gram matrix of a sample of rows if that pays. Any other function is evaluated, with its gradient, at each
    trial step.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        value_and_grad: whether ``fun`` returns a pair of the value and its gradient.
        has_aux: whether ``fun`` returns a pair of the value and something else, which is put into ``state.aux``.
        maxiter: stop after this many iterations.
        tol: stop when the Euclidean norm of the gradient is at most this.
        stepsize: the step size, or a function of ``iter_num`` that returns it; 0 (the default) means a line search.
        linesearch: ``"zoom"`` (strong Wolfe conditions), ``"backtracking"`` (sufficient decrease) or
            ``"hager-zhang"`` (approximate Wolfe conditions, steps by slopes).
        history_size: number of steps to store.
        maxls: give up a search after this many trials.
        decrease_factor: sufficient decrease, as a fraction of the decrease that the slope predicts (c1).
        curvature_factor: the fraction of the slope that may remain (c2); ``None``: 0.2 for linear models, else 0.9.
        max_stepsize: largest step size.
        precondition: ``"auto"``, ``"gram"`` or ``None``: whether a linear model's Hessian starts as a Gram matrix.
            With a fixed ``stepsize``, ``"auto"`` makes none.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Raises:
        ValueError: if an option is not valid.
        ShapeError: if the arguments of ``run`` do not fit together.

    Communicates, if rows are spread over devices: for a linear model, one all-reduce of three scalars per trial step
    and one the size of ``params`` per iteration; for other functions, whatever value and gradient do, per trial step.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rosenbrock = lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
        >>> params, state = px.solve.LBFGS(rosenbrock, tol=1e-4).run(jnp.array([-1.2, 1.0]))
        >>> params.round(3), state.reason
        (Array([1., 1.], dtype=float32), 'the error is as small as tol asks')

    Source: Liu and Nocedal 1989; see also :mod:`paraxis.solve._linear` and :mod:`paraxis.solve._gram`.
    """

    fun: Callable[..., Any]
    value_and_grad: bool = False
    has_aux: bool = False
    _: dataclasses.KW_ONLY
    maxiter: int = 500
    tol: float = 1e-5
    stepsize: float | Callable[[Any], Any] = 0.0
    linesearch: Rule = "zoom"
    history_size: int = 10
    maxls: int = 30
    decrease_factor: float = 1e-4
    curvature_factor: float | None = None
    max_stepsize: float = float("inf")
    precondition: Literal["auto", "gram"] | None = "auto"
    verbose: bool | progress.Watch = False

    def __post_init__(self) -> None:
        checks.function(self)
        checks.one_of("LBFGS", "linesearch", self.linesearch, RULES)
        checks.one_of("LBFGS", "precondition", self.precondition, ("auto", "gram", None))
        checks.count(self, "maxiter", "history_size", "maxls")
        checks.positive(self, "max_stepsize", "decrease_factor")
        checks.not_negative(self, "tol", *(() if callable(self.stepsize) else ("stepsize",)))
        if self.curvature_factor is not None:
            checks.number(self, "curvature_factor")
        left = _SLOPE_OF_LINEAR if self.curvature_factor is None else self.curvature_factor
        if not 0 < self.decrease_factor < left < 1:
            raise ValueError(
                f"LBFGS: decrease_factor must be below curvature_factor and both between 0 and 1, got "
                f"{self.decrease_factor!r} and {self.curvature_factor!r}; write decrease_factor=1e-4, "
                f"curvature_factor=0.9"
            )

    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> LBFGSState:
        """Return the state before the first iteration, with value and gradient at ``init_params``.

        Args:
            init_params: where to start.
            args, kwargs: further arguments of ``fun``.
        """
        params = functions.beginning("LBFGS.init_state", self.fun, init_params, args, kwargs)
        return self._started(params, (args, kwargs), self._prepared(params, args, kwargs))

    def update(self, params: Any, state: LBFGSState, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration.

        Args:
            params, state: from ``init_state`` or the last update; they belong together.
            args, kwargs: further arguments of ``fun``, the same as before.

        Returns:
            ``(params, state)``. If nothing better is found, ``params`` do not change.

        Raises:
            StateError: if ``state`` has other parts than that of ``init_state``, as one of an earlier version has.
        """
        checks.step(self, params, state, LBFGSState, "grad")
        return self._advanced_by_one(params, state, args, kwargs)

    def _iteration(self, params: Any, state: LBFGSState, *args: Any, **kwargs: Any) -> OptStep:
        problem = self._problem(params, args, kwargs)
        passes = problem.passes
        point = Point(params, state.value, state.grad, state.aux, state.cache)
        refreshed = state.iter_num % _REFRESH == _REFRESH - 1
        if problem.adds_up:
            point = jax.lax.cond(refreshed, problem.refreshed, lambda same: same, point)
        memory = _memory(state)
        precondition = functools.partial(_preconditioned, state.preconditioner)
        direction, gamma = memories.descent(memory, state.grad, precondition)
        line = problem.line(point, direction)
        found = self._searched(line, problem, state)
        new = line.end(found.stepsize, found.trial)
        step = trees.scaled(found.stepsize, direction)
        new_memory = memories.push(memory._replace(gamma=gamma), step, trees.minus(new.grad, state.grad))
        start_again = memories.forget(memory, self._first_scale(state.preconditioner, state.error))
        memory = trees.choose(found.failed, start_again, new_memory)
        error = trees.norm(new.grad)
        advanced, status = progress.advance(
            state.progress,
            new,
            error,
            tol=self.tol,
            iter_num=state.iter_num + 1,
            maxiter=self.maxiter,
            hopeless=found.failed & (state.num_pairs == 0),
            slope=line.origin.slope,
        )
        num_evals = found.num_trials if passes.trial else jnp.ones((), jnp.int32)
        read = passes.line + passes.end + passes.trial * found.num_trials + passes.refresh * refreshed
        new_state = LBFGSState(
            iter_num=state.iter_num + 1,
            value=new.value,
            grad=new.grad,
            stepsize=found.stepsize,
            error=error,
            s_history=memory.s,
            y_history=memory.y,
            rho_history=memory.rho,
            gamma=memory.gamma,
            num_pairs=memory.num_pairs,
            aux=new.aux,
            failed_linesearch=found.failed,
            num_fun_eval=state.num_fun_eval + found.num_trials,
            num_grad_eval=state.num_grad_eval + num_evals,
            num_linesearch_iter=state.num_linesearch_iter + found.num_trials,
            status=status,
            data_passes=state.data_passes + read,
            progress=advanced,
            cache=new.cache,
            preconditioner=state.preconditioner,
        )
        if self.verbose:
            progress.say(new_state, self.verbose)
        return OptStep(new.params, new_state)

    def run(self, init_params: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the gradient is small, as compiled programs; under ``jit``, as a part of one.

        The returned parameters can be differentiated with respect to ``args``, ``kwargs`` and values that ``fun``
        closes over, and ``jax.vmap`` can map over the run.

        Args:
            init_params: where to start.
            args, kwargs: further arguments of ``fun``.

        Returns:
            ``(params, state)``; ``state.status`` says whether this is a solution.
        """
        params = functions.beginning("LBFGS.run", self.fun, init_params, args, kwargs)
        if functions.closes_over_traced(self.fun):
            fun, args = functions.hoisted(self.fun, params, args, kwargs)
            return dataclasses.replace(self, fun=fun).run(params, *args)
        return arrays.on_auto_mesh(self._run, params, (args, kwargs), None)

    def optimality_fun(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient, which is zero at a solution."""
        params = functions.floating("LBFGS.optimality_fun", "params", params)
        return self._problem(params, args, kwargs).start(params).grad

    @functools.cached_property
    def _run(self) -> Solve:
        return differentiable(self._solved, self.optimality_fun, self.verbose)

    def _solved(self, params: Any, arguments: Any, prepared: None) -> OptStep:
        """Return some iterations with the rows' curvatures at the start, and the others with those found by then."""
        problem = self._problem(params, *arguments)
        matrix = gram.asked_for(problem, params, self._precondition)
        step = OptStep(params, self._started(params, arguments, matrix))
        pauses = self._pauses(problem, matrix)
        if arrays.is_traced((step, arguments)):  # then the program has one matrix more, not many
            for pause in itertools.islice(pauses, 1):
                step = self._iterated(step, arguments, pause)
                running = step.state.status == Status.RUNNING
                step = jax.lax.cond(running, lambda step: self._renewed(step, arguments), lambda step: step, step)
            return self._iterated(step, arguments, self.maxiter)
        return in_stages(self._iterated, self._renewed, step, arguments, pauses, self.maxiter)

    def _pauses(self, problem: Problem, prepared: gram.Inverse | None) -> Iterator[int]:
        if prepared is None:
            return
        assert isinstance(problem, Linear)
        pause = gram.refresh_after(problem)
        while pause < self.maxiter:
            yield pause
            pause *= _LONGER

    def _renewed(self, step: OptStep, arguments: Any) -> OptStep:
        """With the Gram matrix that is right there, and no memory of how it was elsewhere."""
        problem = self._problem(step.params, *arguments)
        assert isinstance(problem, Linear)
        matrix = gram.prepared(problem, step.params)
        memory = memories.forget(_memory(step.state), self._first_scale(matrix, step.state.error))
        changes = {"rho_history": memory.rho, "gamma": memory.gamma, "num_pairs": memory.num_pairs}
        return OptStep(step.params, dataclasses.replace(step.state, preconditioner=matrix, **changes))

    def _start(self, params: Any, arguments: Any, preconditioner: gram.Inverse | None) -> LBFGSState:
        args, kwargs = arguments
        problem = self._problem(params, args, kwargs)
        point = problem.start(params)
        error = trees.norm(point.grad)
        memory = memories.empty(params, self.history_size, self._first_scale(preconditioner, error))
        zero, count = jnp.zeros((), point.value.dtype), jnp.zeros((), jnp.int32)
        begun, status = progress.begin(point, error, self.tol)
        return LBFGSState(
            iter_num=count,
            value=point.value,
            grad=point.grad,
            stepsize=zero,
            error=error,
            s_history=memory.s,
            y_history=memory.y,
            rho_history=memory.rho,
            gamma=memory.gamma,
            num_pairs=memory.num_pairs,
            aux=point.aux,
            failed_linesearch=jnp.array(False),
            num_fun_eval=count + 1,
            num_grad_eval=count + 1,
            num_linesearch_iter=count,
            status=status,
            data_passes=count + problem.passes.start,
            progress=begun,
            cache=point.cache,
            preconditioner=preconditioner,
        )

    def _searched(self, line: Any, problem: Problem, state: LBFGSState) -> Found:
        dtype = state.value.dtype
        if self.stepsize:
            given = self.stepsize(state.iter_num) if callable(self.stepsize) else self.stepsize
            stepsize = jnp.asarray(given, dtype)
            return Found(stepsize, line.at(stepsize), jnp.array(False), jnp.ones((), jnp.int32))
        left = self.curvature_factor or (_SLOPE_OF_LINEAR if problem.tight else _SLOPE)
        options = Options(self.linesearch, self.decrease_factor, left, self.maxls, self.max_stepsize)
        # The initial Hessian is right up to a factor, which is the same for some iterations: searches of a slope that
        # small end at steps like the last one.
        is_alike = problem.tight and self.linesearch == "zoom"
        first = jnp.clip(state.stepsize, 1, _LONGEST_FIRST) if is_alike else jnp.ones((), dtype)
        return search(line, first, options)

    @property
    def _precondition(self) -> str | None:
        """A fixed step is one along the direction of L-BFGS as it is everywhere."""
        return None if self.stepsize and self.precondition == "auto" else self.precondition

    def _first_scale(self, preconditioner: gram.Inverse | None, error: jax.Array) -> jax.Array:
        """Return the scale of a first direction: no longer than 1, unless its length is right, or steps are given."""
        if preconditioner is not None or self.stepsize:
            return jnp.ones_like(error)
        return 1 / jnp.maximum(error, 1)


def _memory(state: LBFGSState) -> Memory:
    return Memory(state.s_history, state.y_history, state.rho_history, state.gamma, state.num_pairs)


def _preconditioned(preconditioner: gram.Inverse | None, both: tuple[Any, Any]) -> tuple[Any, Any]:
    if preconditioner is None:
        return both
    together = jax.tree.map(lambda *vectors: jnp.stack(vectors), *both)
    found = jax.vmap(functools.partial(gram.apply, preconditioner))(together)
    return tuple(jax.tree.map(lambda x, index=index: x[index], found) for index in range(2))
