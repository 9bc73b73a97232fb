"""Newton's method with directions from conjugate gradients, stopped as soon as they are good enough."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from paraxis._axes import arrays
from paraxis._calls import arguments
from paraxis.solve import (
    _checks as checks,
    _functions as functions,
    _gram as gram,
    _progress as progress,
    _trees as trees,
)
from paraxis.solve._problem import Point, Problem
from paraxis.solve._progress import Progress
from paraxis.solve._search import Options, search
from paraxis.solve._solution import OptStep, Solve, differentiable
from paraxis.solve._solver import SmoothSolver, as_now

_LOOSE = 0.5  # a direction need not be better than this, relative to the gradient


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "iter_num", "value", "grad", "stepsize", "error", "aux", "failed_linesearch", "num_cg_iter",
        "num_linesearch_iter", "status", "data_passes", "forcing", "costs", "progress", "cache", "preconditioner",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class NewtonCGState:
    """The state of a run of Newton's method. A pytree.

    Args:
        iter_num: iterations so far, int32.
        value: the objective at the parameters.
        grad: its gradient there.
        stepsize: the last step along its direction; 1 near a solution.
        error: Euclidean norm of the gradient.
        aux: what ``fun`` returned besides the value.
        failed_linesearch: whether the last search found nothing better.
        num_cg_iter: products with the Hessian so far.
        num_linesearch_iter: trials so far.
        status: a :class:`Status`, as int32.
        data_passes: how often all data were read, as in :class:`LBFGSState`.
        forcing: the largest residual of the next direction, relative to the gradient.
        costs: number of products per digit of a direction, with and without the preconditioner, as last measured,
            ``(2,)``.
        progress: what the solver needs to detect that rounding allows no more progress.
        cache: a linear model's predictions.
        preconditioner: the inverse of a Gram matrix, or ``None``.
    """

    iter_num: jax.Array
    value: jax.Array
    grad: Any
    stepsize: jax.Array
    error: jax.Array
    aux: Any
    failed_linesearch: jax.Array
    num_cg_iter: jax.Array
    num_linesearch_iter: jax.Array
    status: jax.Array
    data_passes: jax.Array
    forcing: jax.Array
    costs: jax.Array
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


@checks.with_options_of_jaxopt
@arguments.options()
@dataclasses.dataclass(frozen=True)
class NewtonCG(SmoothSolver):
    """Minimise a smooth function by Newton's method, with directions from conjugate gradients.

    Use it for ill-conditioned problems and for high accuracy: it takes few iterations, each with several products with
    the Hessian. A product of a linear model reads the data twice, and also gives the predictions along the direction.
    The Gram matrix of a sample of rows is the preconditioner, as long as it saves products: it no longer does when the
    curvatures of the rows have changed too much since the start.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar, twice differentiable.
        value_and_grad: whether ``fun`` returns a pair of the value and its gradient.
        has_aux: whether ``fun`` returns a pair of the value and something else, which is put into ``state.aux``.
        maxiter: stop after this many iterations.
        tol: stop when the Euclidean norm of the gradient is at most this.
        maxcg: largest number of products per iteration.
        maxls: give up a search after this many trials.
        precondition: ``"auto"``, ``"gram"`` or ``None``, as for :class:`LBFGS`.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Raises:
        ValueError: if an option is not valid.
        ShapeError: if the arguments of ``run`` do not fit together.

    Communicates, if rows are spread over devices: one all-reduce the size of ``params`` per product and per
    iteration, and one of three scalars per trial step.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> rosenbrock = lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
        >>> params, state = px.solve.NewtonCG(rosenbrock, tol=1e-4).run(jnp.array([-1.2, 1.0]))
        >>> params.round(3)
        Array([1., 1.], dtype=float32)

    Source: Nocedal and Wright, "Numerical Optimization", 2006, algorithm 7.1; Eisenstat and Walker 1996 for when a
    direction is good enough.
    """

    fun: Callable[..., Any]
    value_and_grad: bool = False
    has_aux: bool = False
    _: dataclasses.KW_ONLY
    maxiter: int = 100
    tol: float = 1e-5
    maxcg: int = 100
    maxls: int = 30
    precondition: Literal["auto", "gram"] | None = "auto"
    verbose: bool | progress.Watch = False

    def __post_init__(self) -> None:
        checks.function(self)
        checks.one_of("NewtonCG", "precondition", self.precondition, ("auto", "gram", None))
        checks.count(self, "maxiter", "maxcg", "maxls")
        checks.not_negative(self, "tol")

    @arguments.named()
    @as_now
    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> NewtonCGState:
        """Return the state before the first iteration, as :meth:`LBFGS.init_state`."""
        params = functions.beginning("NewtonCG.init_state", self.fun, init_params, args, kwargs)
        return self._started(params, (args, kwargs), self._prepared(params, args, kwargs))

    @arguments.named()
    def update(self, params: Any, state: NewtonCGState, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration, as :meth:`LBFGS.update`."""
        checks.step(self, params, state, NewtonCGState, "grad")
        return self._advanced_by_one(params, state, args, kwargs)

    def _iteration(self, params: Any, state: NewtonCGState, *args: Any, **kwargs: Any) -> OptStep:
        problem = self._problem(params, args, kwargs)
        passes = problem.passes
        point = Point(params, state.value, state.grad, state.aux, state.cache)
        use_gram = state.costs[0] <= state.costs[1]
        found = _conjugate(problem, point, state.preconditioner, use_gram, state.forcing * state.error, self.maxcg)
        line = problem.line(point, found.direction, found.cached)
        options = Options("zoom", 1e-4, 0.9, self.maxls, float("inf"))
        step = search(line, jnp.ones((), state.value.dtype), options)
        new = line.end(step.stepsize, step.trial)
        error = trees.norm(new.grad)
        advanced, status = progress.advance(
            state.progress,
            new,
            error,
            tol=self.tol,
            iter_num=state.iter_num + 1,
            maxiter=self.maxiter,
            hopeless=step.failed,
            slope=line.origin.slope,
        )
        read = passes.end + passes.trial * step.num_trials + passes.product * found.num_products
        new_state = NewtonCGState(
            iter_num=state.iter_num + 1,
            value=new.value,
            grad=new.grad,
            stepsize=step.stepsize,
            error=error,
            aux=new.aux,
            failed_linesearch=step.failed,
            num_cg_iter=state.num_cg_iter + found.num_products,
            num_linesearch_iter=state.num_linesearch_iter + step.num_trials,
            status=status,
            data_passes=state.data_passes + read,
            forcing=_forcing(state.forcing, error / state.error),
            costs=jnp.where(jnp.stack([use_gram, ~use_gram]), found.cost, state.costs),
            progress=advanced,
            cache=new.cache,
            preconditioner=state.preconditioner,
        )
        if self.verbose:
            progress.say(new_state, self.verbose)
        return OptStep(new.params, new_state)

    @arguments.named()
    @as_now
    def run(self, init_params: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the gradient is small, as :meth:`LBFGS.run`."""
        params = functions.beginning("NewtonCG.run", self.fun, init_params, args, kwargs)
        if functions.closes_over_traced(self.fun):
            fun, args = functions.hoisted(self.fun, params, args, kwargs)
            return dataclasses.replace(self, fun=fun).run(params, *args)
        return arrays.on_auto_mesh(self._run_prepared, params, args, kwargs)

    def _run_prepared(self, params: Any, args: Any, kwargs: Any) -> OptStep:
        return self._run(params, (args, kwargs), self._prepared(params, args, kwargs))

    @arguments.named()
    def optimality_fun(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient, which is zero at a solution."""
        params = functions.floating("NewtonCG.optimality_fun", "params", params)
        return self._problem(params, args, kwargs).start(params).grad

    @functools.cached_property
    def _run(self) -> Solve:
        return differentiable(self._solved, self.optimality_fun, self.verbose)

    def _start(self, params: Any, arguments: Any, preconditioner: gram.Inverse | None) -> NewtonCGState:
        args, kwargs = arguments
        problem = self._problem(params, args, kwargs)
        point = problem.start(params)
        error = trees.norm(point.grad)
        begun, status = progress.begin(point, error, self.tol)
        count = jnp.zeros((), jnp.int32)
        never = jnp.inf if preconditioner is None else 0.0
        return NewtonCGState(
            iter_num=count,
            value=point.value,
            grad=point.grad,
            stepsize=jnp.zeros((), point.value.dtype),
            error=error,
            aux=point.aux,
            failed_linesearch=jnp.array(False),
            num_cg_iter=count,
            num_linesearch_iter=count,
            status=status,
            data_passes=count + problem.passes.start,
            forcing=jnp.asarray(_LOOSE, point.value.dtype),
            costs=jnp.array([never, 0.0], point.value.dtype),
            progress=begun,
            cache=point.cache,
            preconditioner=preconditioner,
        )


def _forcing(before: jax.Array, ratio: jax.Array) -> jax.Array:
    """Eisenstat and Walker's second choice, with their safeguard: as precise as the last iteration was successful."""
    safeguard = 0.9 * before**2
    now = 0.9 * ratio**2
    now = jnp.where(safeguard > 0.1, jnp.maximum(now, safeguard), now)
    return jnp.clip(now, 1e-6, _LOOSE).astype(before.dtype)


class _Direction(NamedTuple):
    direction: Any
    cached: Any  # what a line along it can use
    num_products: jax.Array
    cost: jax.Array  # products per digit


class _Conjugate(NamedTuple):
    """Conjugate gradients under way, for the Hessian times ``x`` equal to minus the gradient."""

    x: Any
    cached: Any
    residual: Any
    search: Any
    rz: jax.Array
    num_products: jax.Array
    bent: jax.Array  # whether a direction of negative curvature was met


def _conjugate(
    problem: Problem, point: Point, inverse: gram.Inverse | None, use_gram: jax.Array, enough: jax.Array, most: int
) -> _Direction:
    """Return a direction whose residual is at most ``enough``, if ``most`` products give it."""
    product, nothing = problem.products(point)

    def precondition(r: Any) -> Any:
        return r if inverse is None else trees.choose(use_gram, gram.apply(inverse, r), r)

    def go_on(cg: _Conjugate) -> jax.Array:
        return ~cg.bent & (cg.num_products < most) & (trees.norm(cg.residual) > enough)

    def body(cg: _Conjugate) -> _Conjugate:
        hp, cached = product(cg.search)
        php = trees.dot(cg.search, hp)
        bent = ~(php > 0)
        # The first direction of all is one of descent whatever the curvature; later ones leave what was found.
        alpha = jnp.where(bent, jnp.where(cg.num_products == 0, 1, 0), cg.rz / jnp.where(bent, 1, php))
        residual = trees.along(cg.residual, -alpha, hp)
        z = precondition(residual)
        rz = trees.dot(residual, z)
        return _Conjugate(
            trees.along(cg.x, alpha, cg.search),
            trees.along(cg.cached, alpha, cached),
            residual,
            trees.along(z, rz / jnp.where(cg.rz > 0, cg.rz, 1), cg.search),
            rz,
            cg.num_products + 1,
            bent,
        )

    r = trees.scaled(-1, point.grad)
    z = precondition(r)
    count = jnp.zeros((), jnp.int32)
    begin = _Conjugate(trees.zeros(r), nothing, r, z, trees.dot(r, z), count, jnp.array(False))
    end = jax.lax.while_loop(go_on, body, begin)
    digits = jnp.log10(trees.norm(r) / jnp.maximum(trees.norm(end.residual), jnp.finfo(end.rz.dtype).tiny))
    cost = end.num_products / jnp.maximum(digits, 0.1)
    return _Direction(end.x, end.cached, end.num_products, jnp.where(end.bent, jnp.inf, cost).astype(end.rz.dtype))
