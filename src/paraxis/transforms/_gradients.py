"""Gradients with respect to variables and arguments, with the state that the function writes threaded through."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from paraxis._core import pytrees
from paraxis.errors import StateError
from paraxis.transforms._variables import Choice, Gradients, Variables, is_chosen, variables
from paraxis.transforms._wrapped import R, Wrapped, refuse_outside, run


class GradValues(Wrapped[R]):
    """Compute gradients and values of a loss of modules: ``gradients, values = px.GradValues(loss, net)(x, y)``.

    This order is that of Objax's ``GradValues``; ``nnx.value_and_grad`` has JAX's order. State that the loss writes
    (statistics, counters, random streams) is written back once, after the loss has succeeded.

    Args:
        f: a function of modules and further arguments that returns a float scalar, or a tuple that begins with one.
        *modules: as in :class:`Jit`.
        wrt: which variables to differentiate with respect to: a type, a tuple of types, a function of a variable's
            name and the variable, or a ``px.variables`` collection. ``None``: no variables.
        argnums: further arguments to differentiate with respect to (positions after the modules), as in ``jax.grad``.

    Returns:
        When called, ``(gradients, values)``. ``gradients`` is a collection of arrays in the order of ``px.variables``;
        with ``argnums``, a pair of it and the gradients of the arguments. ``values`` is what ``f`` returned.

    Raises:
        TypeError: if the loss is not a float scalar, or a chosen variable does not hold floats.
        StateError: as in :class:`Jit`; and if no variable was chosen.

    Communicates: what ``f`` does, and its derivative.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> gradient_loss = px.GradValues(lambda net, x, y: ((net(x) - y) ** 2).mean(), net)
        >>> gradients, value = gradient_loss(jnp.ones((10, 3)), jnp.ones((10, 4)))
        >>> [g.shape for g in gradients]
        [(4,), (3, 4)]
    """

    def __init__(self, f: Callable[..., R], *modules: Any, wrt: Choice | None = nnx.Param, argnums: Any = None) -> None:
        super().__init__(f, modules)
        if self.modules:
            refuse_outside(self._body)
        chosen: Any = wrt
        if isinstance(wrt, Variables):  # by name: the modules of a run have other variables
            chosen = frozenset(variables(self.modules).subset(wrt).names())
        self._body.options = chosen, argnums

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, R]:
        args, kwargs = pytrees.arguments("GradValues", args, kwargs)
        graph, (wrt, argnums) = self.binding().graph, self._body.options
        values = graph.values()
        picked = [i for i, name in enumerate(graph.names) if is_chosen(wrt, name, graph.variables[i])]
        positions = [argnums] if isinstance(argnums, int) else list(argnums or ())
        if not picked and not positions:
            raise StateError(f"GradValues: wrt picks nothing of {self!r}; write argnums=0 or eqx.filter_value_and_grad")

        def loss(chosen: dict[int, Any], *args: Any) -> tuple[Any, Any]:
            here = [chosen.get(i, x) for i, x in enumerate(values)]
            result, new = run(self._body, graph, (here, graph.arrays), args, kwargs)
            value: Any = result[0] if isinstance(result, (tuple, list)) and result else result
            return value, (result, new)

        derivative = jax.grad(loss, (0, *(p + 1 if p >= 0 else p for p in positions)), has_aux=True)
        (gradients, *of_args), (result, new) = derivative({i: values[i] for i in picked}, *args)
        graph.write(new)
        gradients_by_name = Gradients({graph.names[i]: gradients[i] for i in picked})
        if argnums is None:
            return gradients_by_name, pytrees.combine(result)
        inputs = pytrees.combine(of_args[0] if isinstance(argnums, int) else tuple(of_args))
        return (gradients_by_name, inputs) if picked else inputs, pytrees.combine(result)
