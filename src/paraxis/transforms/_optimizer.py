"""An optax optimiser with its state in variables, and the learning rate given when it steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paraxis.errors import DataError, StateError
from paraxis.transforms._variables import Choice, Variables, variables


class Optimizer(nnx.Pytree):
    """An optax optimiser for a module's variables: ``opt(lr, gradients)`` updates them.

    The learning rate is an argument of the step and may be traced, so a schedule does not compile again. The state is
    in variables of the optimiser, which you bind to a transform like a module. ``nnx.Optimizer`` works there as well.

    Args:
        module: the module to train, or a tree of them.
        factory: a function of optax whose first argument is the learning rate, such as ``optax.sgd``; or any function
            of the rate that returns an optimiser: ``lambda lr: optax.chain(optax.clip(1.0), optax.adam(lr))``.
        wrt: which variables to train; see :class:`GradValues`.
        **options: further arguments of the factory: ``momentum=0.9``.

    Raises:
        StateError: if there is nothing to train; or if the optimiser keeps the rate in its state (``optax.rprop``,
            ``optax.inject_hyperparams``), where those of later steps would have no effect.

    Communicates: nothing. On several devices, average the gradients first: ``opt(lr, px.pmean(g, "device"))``.

    Example:
        >>> import jax.numpy as jnp, optax, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> opt = px.Optimizer(net, optax.sgd, momentum=0.9)
        >>> before = net.kernel[...]
        >>> opt(0.5, [jnp.ones((1, 1))])
        >>> (before - net.kernel[...]).tolist()
        [[0.5]]
    """

    def __init__(self, module: Any, factory: Callable[..., Any], *, wrt: Choice = nnx.Param, **options: Any) -> None:
        self.module = nnx.data(module)
        self.factory = nnx.static(functools.partial(factory, **options))
        parameters = variables(module).subset(wrt)
        if not parameters.names():
            raise StateError(f"Optimizer: wrt={wrt!r} picks no variable; write wrt=nnx.Param")
        self.names = nnx.static(frozenset(parameters.names()))
        values = _values(parameters)
        small = jax.tree.map(lambda x: np.zeros((1,) * jnp.ndim(x), x.dtype), values)
        with jax.ensure_compile_time_eval():  # one number of each parameter tells whether a state depends on the rate
            one, other = (jax.tree.leaves(self.factory(rate).init(small)) for rate in (0.1, 0.2))
        if not all(map(np.array_equal, one, other)):
            raise StateError("Optimizer: this keeps the learning rate in its state; write lambda lr: optax.rprop(0.01)")
        self.state = nnx.data(jax.tree.map(nnx.OptArray, self.factory(0.0).init(values)))

    def __call__(self, lr: Any, gradients: Any, **extra: Any) -> None:
        """Take one step.

        Args:
            lr: learning rate, a scalar: a number or a traced array.
            gradients: as :class:`GradValues` or ``nnx.value_and_grad`` return them; or a list in the order of
                ``px.variables(net).subset(wrt)``.
            **extra: further arguments of the optimiser's update, such as ``value=``.

        Raises:
            DataError: if the gradients do not fit the variables, or the rate is not a scalar. Nothing is changed.
        """
        parameters = variables(self.module).subset(lambda name, _: name in self.names)
        values = _values(parameters)
        slots, structure = jax.tree.flatten(self.state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        leaves = list(gradients) if isinstance(gradients, (list, tuple)) else jax.tree.leaves(gradients)
        shapes = [[jax.tree.map(jnp.shape, x) for x in tree] for tree in (leaves, values.values())]
        if shapes[0] != shapes[1] or jnp.ndim(lr):
            raise DataError(f"Optimizer: gradients must be one for each of {len(values)} variables, lr a scalar")
        state = structure.unflatten([v.get_raw_value() for v in slots])
        step = optax.with_extra_args_support(self.factory(lr))
        updates, after = step.update(dict(zip(values, leaves, strict=True)), state, values, **extra)
        new: Any = optax.apply_updates(values, updates)
        for variable, x in zip([*parameters, *slots], [*map(new.get, values), *jax.tree.leaves(after)], strict=True):
            variable.set_value(x)


def _values(parameters: Variables) -> dict[str, Any]:
    return {name: v.get_raw_value() for name, v in parameters.items()}
