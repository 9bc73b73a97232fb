"""An optax optimiser with its state in variables, and the learning rate given when it steps."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from paraxis._core.errors import ShapeError, StateError
from paraxis._modules import graphs
from paraxis.transforms._variables import Choice, Gradients, Variables, variables


class OptimizerState(nnx.Variable[Any]):
    """One array of an optimiser's state."""


class Optimizer(nnx.Pytree):
    """An optax optimiser for a module's variables: ``opt(lr, gradients)`` changes them.

    The learning rate is an argument of the step and may be traced: a schedule does not recompile anything. The state
    (momenta, counts) is in variables of the optimiser, which is bound to a transform as modules are.

    Args:
        module: the module to train, or a tree of them.
        factory: an optax optimiser that takes the learning rate first, such as ``optax.sgd``; or any function of the
            learning rate that gives one: ``lambda lr: optax.chain(optax.clip(1.0), optax.adam(lr))``.
        wrt: which variables to train; see :class:`GradValues`.
        **options: what else the factory takes: ``momentum=0.9``.

    Raises:
        StateError: if ``factory`` is not such a function, or there is nothing to train.

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
        if isinstance(factory, optax.GradientTransformation) or not callable(factory):
            raise StateError(
                f"Optimizer: factory must be a function of the learning rate, got {type(factory).__name__}; write "
                f"px.Optimizer(net, optax.sgd, momentum=0.9), or lambda lr: optax.chain(…, optax.sgd(lr))"
            )
        self.module = nnx.data(module)
        self.factory = nnx.static(functools.partial(factory, **options))
        parameters = variables(module).subset(wrt)
        self.names = nnx.static(tuple(parameters.names()))
        if not self.names:
            raise StateError(
                f"Optimizer: wrt={wrt!r} picks no variable of {type(module).__name__}; write wrt=nnx.Param"
            )
        state = self.factory(0.0).init(_tree(parameters))
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        self.structure = nnx.static(structure)
        self.state_names = nnx.static(
            tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
        )
        made = [OptimizerState(jnp.asarray(leaf)) for _, leaf in leaves]
        self.state = nnx.Dict(dict(zip(self.state_names, made, strict=True)))

    def __call__(self, lr: Any, gradients: Any, **extra: Any) -> None:
        """One step.

        Args:
            lr: learning rate, a scalar: a number or a traced array.
            gradients: as :class:`GradValues` gives them; or a list in the order of ``px.variables(net).subset(wrt)``.
            **extra: what the optimiser's update takes besides, such as ``value=``.

        Raises:
            ShapeError: if the gradients do not fit the variables, or the rate is not a scalar. Nothing is changed.
        """
        parameters = self._parameters()
        if jnp.shape(lr) != ():
            raise ShapeError(f"Optimizer: lr must be a scalar, got shape {jnp.shape(lr)}; write opt(0.1, gradients)")
        values = _tree(parameters)
        given = _fitting(parameters, gradients)
        own = [self.state[name] for name in self.state_names]
        state = jax.tree.unflatten(self.structure, [v.get_raw_value() for v in own])
        step = optax.with_extra_args_support(self.factory(lr))
        updates, after = step.update(given, state, values, **extra)
        new_values: Any = optax.apply_updates(values, updates)
        new_state = jax.tree.leaves(after)
        if jax.tree.structure(after) != self.structure:
            raise StateError("Optimizer: the optimiser's state changed its structure in a step; it must not")
        for variable, new in [*zip(parameters, new_values, strict=True), *zip(own, new_state, strict=True)]:
            variable.set_value(new)

    def _parameters(self) -> Variables:
        """Those that it trains, by name: the variables themselves are others in each run of a transform."""
        found = variables(self.module)
        gone = [name for name in self.names if name not in found]
        if gone:
            raise StateError(
                f"Optimizer: variable {gone[0]} is no longer in the module; make a new px.Optimizer for what it is now"
            )
        return found.subset(lambda name, _: name in self.names)


def _tree(parameters: Variables) -> Gradients:
    return Gradients({name: v.get_raw_value() for name, v in parameters.items()})


def _fitting(parameters: Variables, gradients: Any) -> Gradients:
    """The gradients by the variables' names."""
    names = parameters.names()
    if isinstance(gradients, Gradients):
        if _unnumbered(gradients.names()) != _unnumbered(names):
            odd = next(iter({*gradients.names()} ^ {*names}), "their order")
            raise ShapeError(
                f"Optimizer: the gradients are not those of the variables that it trains; they differ in {odd}. Use "
                f"the same module and the same wrt in px.GradValues and px.Optimizer"
            )
        leaves = list(gradients)
    else:
        leaves = list(gradients) if isinstance(gradients, (list, tuple)) else jax.tree.leaves(gradients)
    if len(leaves) != len(names):
        raise ShapeError(f"Optimizer: {len(leaves)} gradients were given for {len(names)} variables")
    for name, variable, g in zip(names, parameters, leaves, strict=True):
        value = graphs.value(variable)
        if jax.tree.map(jnp.shape, g) != jax.tree.map(jnp.shape, value):
            raise ShapeError(
                f"Optimizer: the gradient of {name} has shape {jnp.shape(g)}, the variable {jnp.shape(value)}"
            )
    return Gradients(dict(zip(names, leaves, strict=True)))


def _unnumbered(names: Sequence[str]) -> list[str]:
    """Names without the numbers of modules that they all begin with."""
    numbers = {match[0] if (match := re.match(r"\[\d+\]", name)) else "" for name in names}
    if len(numbers) != 1 or numbers == {""}:
        return list(names)
    return _unnumbered([name[len(next(iter(numbers))) :] for name in names])
