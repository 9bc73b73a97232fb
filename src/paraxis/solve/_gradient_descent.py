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
@dataclasses.dataclass(frozen=True)
class GradientDescent:
    """Minimise a smooth function by gradient descent, accelerated, with the interface of JAXopt's solver.

    For few digits of large problems, for fixed steps, and to compare with; :class:`LBFGS` needs fewer iterations.

    Args:
        fun: function ``(params, *args, **kwargs)`` → value, a scalar; ``params`` are any pytree of floats.
        value_and_grad: ``fun`` returns the value and its gradient.
        has_aux: in place of the value, ``fun`` returns the value and something else, which ends up in ``state.aux``.
        stepsize: the step, or a function of ``iter_num`` that gives it; 0 (the default) means: search for it.
        maxiter: stop after so many iterations.
        tol: stop when the Euclidean norm of the gradient is at most this.
        acceleration: whether to extrapolate (Nesterov); this is started anew whenever it leads uphill.
        maxls: give up a search after so many trials.
        decrease_factor: a step that is too long is made at most this short at once, as a part of it.
        verbose: print a line per iteration; or a function to call with each, a :class:`px.solve.Iteration`.

    Raises:
        ValueError: if an option is none of these.
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
            args, kwargs: what ``fun`` is given besides.
        """
        params = functions.beginning("GradientDescent.init_state", self.fun, init_params, args, kwargs)
        return self._proximal.init_state(params, None, *args, **kwargs)

    @arguments.named()
    def update(self, params: Any, state: ProximalGradientState, *args: Any, **kwargs: Any) -> OptStep:
        """Make one iteration.

        Args:
            params, state: from ``init_state`` or the last update; they belong together.
            args, kwargs: what ``fun`` is given besides, as before.

        Returns:
            ``(params, state)``. Where no step is found, ``params`` are the same.
        """
        checks.step(self, params, state, ProximalGradientState, "velocity")
        return self._proximal.update(params, state, None, *args, **kwargs)

    @arguments.named()
    def run(self, init_params: Any, *args: Any, **kwargs: Any) -> OptStep:
        """Iterate until the gradient is small, in one compiled program.

        The parameters that are returned can be differentiated by ``args`` and ``kwargs``, and by what ``fun``
        closes over, and the run can be mapped over with ``jax.vmap``.

        Args:
            init_params: where to start.
            args, kwargs: what ``fun`` is given besides.

        Returns:
            ``(params, state)``; ``state.status`` tells whether this is a solution.
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
