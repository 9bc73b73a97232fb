"""Gradient descent: proximal gradients without a penalty."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from paraxis._calls import arguments
from paraxis.solve import _checks as checks, _functions as functions
from paraxis.solve._progress import Watch
from paraxis.solve._proximal import ProximalGradient, ProximalGradientState, check_options
from paraxis.solve._solution import OptStep


@checks.with_options_of_jaxopt
@arguments.options(learning_rate="stepsize", lr="stepsize")
@dataclasses.dataclass(frozen=True)
class GradientDescent:
    """Minimise a smooth function by accelerated gradient descent, with the interface of JAXopt's solver.

    Use it for low accuracy on large problems, for fixed steps, and for comparisons; :class:`LBFGS` needs fewer
    iterations.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        value_and_grad: whether ``fun`` returns a pair of the value and its gradient.
        has_aux: whether ``fun`` returns a pair of the value and something else, which is put into ``state.aux``.
        stepsize: the step size, or a function of ``iter_num`` that returns it; 0 (the default) means a line search.
        maxiter: stop after this many iterations.
        tol: stop when the Euclidean norm of the gradient is at most this.
        acceleration: whether to extrapolate (Nesterov); the extrapolation restarts whenever it leads uphill.
        maxls: give up a search after this many trials.
        decrease_factor: the smallest factor by which a step that is too long is shortened at once.
        verbose: whether to print a line per iteration; or a function to call with each :class:`px.solve.Iteration`.

    Raises:
        ValueError: if an option is not valid.
        ShapeError: if the arguments of ``run`` do not fit together.

    Communicates: as :class:`ProximalGradient`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> bowl = lambda p: (p[0] - 1) ** 2 + 10 * (p[1] + 2) ** 2
        >>> params, state = px.solve.GradientDescent(bowl).run(jnp.zeros(2))
        >>> params.round(3), state.reason
        (Array([ 1., -2.], dtype=float32), 'the error is as small as tol asks')

    Source: Nesterov 1983, in the form of Beck and Teboulle 2009; the restart is O'Donoghue and Candès 2015.
    """

    fun: Callable[..., Any]
    value_and_grad: bool = False
    has_aux: bool = False
    _: dataclasses.KW_ONLY
    stepsize: float | Callable[[Any], Any] = 0.0
    maxiter: int = 500
    tol: float = 1e-5
    acceleration: bool = True
    maxls: int = 30
    decrease_factor: float = 0.5
    verbose: bool | Watch = False

    def __post_init__(self) -> None:
        check_options("GradientDescent", self)

    def __getstate__(self) -> dict[str, Any]:
        return checks.options(self)

    @arguments.named()
    def init_state(self, init_params: Any, *args: Any, **kwargs: Any) -> ProximalGradientState:
        """Return the state before the first iteration, with value and gradient at ``init_params``.

        Args:
            init_params: where to start.
            args, kwargs: further arguments of ``fun``.
        """
        params = functions.beginning("GradientDescent.init_state", self.fun, init_params, args, kwargs)
        return self._proximal.init_state(params, None, *args, **kwargs)

    @arguments.named()
    def update(self, params: Any, state: ProximalGradientState, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration.

        Args:
            params, state: from ``init_state`` or the last update; they belong together.
            args, kwargs: further arguments of ``fun``, the same as before.

        Returns:
            ``(params, state)``. If no step is found, ``params`` do not change.

        Raises:
            StateError: if ``state`` has other parts than that of ``init_state``, as one of an earlier version has.
        """
        checks.step(self, params, state, ProximalGradientState, "velocity")
        return self._proximal.update(params, state, None, *args, **kwargs)

    @arguments.named()
    def run(self, init_params: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the gradient is small, in one compiled program.

        The returned parameters can be differentiated with respect to ``args``, ``kwargs`` and values that ``fun``
        closes over, and ``jax.vmap`` can map over the run.

        Args:
            init_params: where to start.
            args, kwargs: further arguments of ``fun``.

        Returns:
            ``(params, state)``; ``state.status`` says whether this is a solution.
        """
        params = functions.beginning("GradientDescent.run", self.fun, init_params, args, kwargs)
        return self._proximal.run(params, None, *args, **kwargs)

    @arguments.named()
    def optimality_fun(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradient, which is zero at a solution."""
        params = functions.floating("GradientDescent.optimality_fun", "params", params)
        return self._proximal.optimality_fun(params, None, *args, **kwargs)

    @functools.cached_property
    def _proximal(self) -> ProximalGradient:
        return ProximalGradient(**checks.options(self))
