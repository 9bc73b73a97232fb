"""What solvers have in common: the problem they are given, and what is compiled for it."""

import abc
import functools
from collections.abc import Callable
from typing import Any, Literal, Self

import jax

from paraxis._core.programs import Traced
from paraxis.solve import _checks as checks
from paraxis.solve import _functions as functions
from paraxis.solve import _gram as gram
from paraxis.solve import _progress as progress
from paraxis.solve._problem import Problem
from paraxis.solve._solution import OptStep


class Solver(abc.ABC):
    """A solver is its options, which are the fields of its class; what is compiled for it comes and goes."""

    fun: Callable[..., Any]
    value_and_grad: bool
    has_aux: bool
    maxiter: int
    tol: float

    def __getstate__(self) -> dict[str, Any]:
        return checks.options(self)

    @abc.abstractmethod
    def _start(self, params: Any, arguments: Any, preconditioner: Any) -> Any:
        """The state before the first iteration."""

    @property
    def _bare(self) -> Self:
        """The same options alone. What JAX keeps of a trace may hold the traced function's owner: it shall be light."""
        bare = object.__new__(type(self))
        vars(bare).update(checks.options(self))
        return bare

    @functools.cached_property
    def _started(self) -> Callable[..., Any]:
        return Traced(self._bare._start)

    def _problem(self, params: Any, args: Any, kwargs: Any) -> Problem:
        return functions.problem_of(self.fun, self.value_and_grad, self.has_aux, params, args, kwargs)


class SmoothSolver(Solver):
    """A solver of smooth problems, whose Hessian may start as a Gram matrix."""

    precondition: Literal["auto", "gram"] | None

    def _prepared(self, params: Any, args: Any, kwargs: Any) -> jax.Array | None:
        return gram.asked_for(self._problem(params, args, kwargs), params, self.precondition)

    def _confirmed(self, step: OptStep, arguments: Any) -> OptStep:
        problem = self._problem(step.params, *arguments)
        return OptStep(step.params, progress.confirmed(problem, *step, tol=self.tol, maxiter=self.maxiter))
