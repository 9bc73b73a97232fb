"""The common part of solvers: the problem they are given, and what is compiled for it."""

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self

import jax

from paraxis._axes import arrays
from paraxis._core.programs import Traced
from paraxis._jax import jax_api
from paraxis.solve import (
    _checks as checks,
    _cut as cut,
    _functions as functions,
    _gram as gram,
    _progress as progress,
    _trees as trees,
)
from paraxis.solve._problem import Problem
from paraxis.solve._solution import Iterated, OptStep, in_stages, watched
from paraxis.solve._status import Status
from paraxis.solve.objective import LinearObjective


class Solver(abc.ABC):
    """A solver is its options, which are the fields of its class; what is compiled for it comes and goes."""

    fun: Callable[..., Any]
    value_and_grad: bool
    has_aux: bool
    maxiter: int
    tol: float
    verbose: bool | progress.Watch

    def __getstate__(self) -> dict[str, Any]:
        return checks.options(self)

    @abc.abstractmethod
    def _start(self, params: Any, arguments: Any, preconditioner: Any) -> Any:
        """Return the state before the first iteration."""

    @abc.abstractmethod
    def _iteration(self, params: Any, state: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration, as a part of a program."""

    @abc.abstractmethod
    def _confirmed(self, step: OptStep, arguments: Any) -> OptStep:
        """Return a step that says it converged, judged anew."""

    def _advanced_by_one(self, params: Any, state: Any, args: Any, kwargs: Any) -> OptStep:
        """Run one iteration of a linear model, compiled if nothing else does: laying its rows in blocks copies them.

        What functions of the user's read is read again each time.
        """
        traced = jax_api.is_tracing() or arrays.is_traced((params, state, args, kwargs))
        if traced or not self._reads_arguments_only:
            return watched(self.verbose, functools.partial(self._iteration, params, state, *args, **kwargs))
        return watched(self.verbose, self._compiled_step, params, state, args, kwargs)

    @property
    def _reads_arguments_only(self) -> bool:
        return isinstance(self.fun, LinearObjective) and not callable(getattr(self, "stepsize", None))

    @property
    def _bare(self) -> Self:
        """The same options alone. What JAX keeps of a trace may hold the traced function's owner: it shall be light."""
        bare = object.__new__(type(self))
        vars(bare).update(checks.options(self))
        return bare

    @functools.cached_property
    def _started(self) -> Callable[..., Any]:
        return Traced(self._bare._start, cut.compiled)

    @functools.cached_property
    def _compiled_step(self) -> Callable[..., OptStep]:
        bare = self._bare

        def step(params: Any, state: Any, args: Any, kwargs: Any) -> OptStep:
            return bare._iteration(params, state, *args, **kwargs)

        return Traced(step, cut.compiled)

    @functools.cached_property
    def _iterated(self) -> Iterated:
        bare = self._bare
        told = {name: option for name, option in checks.options(bare).items() if name != "verbose"}
        return Iterated(bare._iteration, bare._confirmed, options=f"{type(self).__name__}({told})")

    def _solved(self, params: Any, arguments: Any, prepared: Any) -> OptStep:
        """Return a whole run, from the start."""
        step = OptStep(params, self._started(params, arguments, prepared))
        return in_stages(self._iterated, self._renewed, step, arguments, (), self.maxiter)

    def _prepared(self, params: Any, args: Any, kwargs: Any) -> Any:
        """Return what is computed once, before the first iteration."""
        return None

    def _pauses(self, problem: Problem, prepared: Any) -> Iterable[int]:
        """After how many iterations what is prepared is to be renewed."""
        return ()

    def _renewed(self, step: OptStep, arguments: Any) -> OptStep:
        """Return the same place, with what is prepared as it is right there."""
        return step

    def _problem(self, params: Any, args: Any, kwargs: Any) -> Problem:
        return functions.problem_of(self.fun, self.value_and_grad, self.has_aux, params, args, kwargs)


class SmoothSolver(Solver):
    """A solver of smooth problems, whose Hessian may start as a Gram matrix."""

    precondition: Literal["auto", "gram"] | None

    @property
    def _precondition(self) -> str | None:
        return self.precondition

    def _prepared(self, params: Any, args: Any, kwargs: Any) -> jax.Array | None:
        return gram.asked_for(self._problem(params, args, kwargs), params, self._precondition)

    def _confirmed(self, step: OptStep, arguments: Any) -> OptStep:
        problem = self._problem(step.params, *arguments)
        return OptStep(step.params, progress.confirmed(problem, *step, tol=self.tol, maxiter=self.maxiter))


class SideBySide:
    """Several runs of a solver at once, as ``vmap`` of it would make them, but that Ctrl-C ends them.

    Args:
        solver: of a linear model.
        arguments: of what each run has of its own, and of what all share, what ``run`` is given.
    """

    def __init__(self, solver: Solver, arguments: Callable[[Any, Any], tuple[Any, ...]]) -> None:
        bare = solver._bare

        def start(params: Any, own: Any, shared: Any) -> Any:
            args = arguments(own, shared)
            return bare._start(params, (args, {}), bare._prepared(params, args, {}))

        def update(params: Any, state: Any, own: Any, shared: Any) -> OptStep:
            return bare._iteration(params, state, *arguments(own, shared))

        def confirm(step: OptStep, both: Any) -> OptStep:
            return bare._confirmed(step, (arguments(*both[0]), {}))

        def renew(step: OptStep, both: Any) -> OptStep:
            renewed = bare._renewed(step, (arguments(*both[0]), {}))
            return trees.choose(step.state.status == Status.RUNNING, renewed, step)

        over = ((0, None), None)
        self._bare, self._arguments = bare, arguments
        self._started = Traced(jax.vmap(start, (0, 0, None)))
        self._renewed = Traced(jax.vmap(renew, (0, over)))
        self._iterated = Iterated(update, confirm, over=over)

    def run(self, params: Any, own: Any, shared: Any) -> OptStep:
        """Run as the solver's ``run`` does, with a first dimension of parameters and arguments for the runs."""
        state = self._started(params, own, shared)
        prepared, pauses = getattr(state, "preconditioner", None), ()
        if prepared is not None:
            first, of_first = jax.tree.map(lambda x: x[0], (params, own))
            problem = self._bare._problem(first, self._arguments(of_first, shared), {})
            pauses = self._bare._pauses(problem, prepared)
        both = ((own, shared), {})
        return in_stages(self._iterated, self._renewed, OptStep(params, state), both, pauses, self._bare.maxiter)
