"""An optax optimiser with its state in variables, and the learning rate given when it steps."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paraxis._calls import arguments
from paraxis._jax import jax_api, varying
from paraxis._modules import graphs
from paraxis.errors import ShapeError, StateError
from paraxis.transforms._variables import Choice, Gradients, Variables, variables


class OptimizerState(nnx.Variable[Any]):
    """One array of an optimiser's state."""


class Optimizer(nnx.Pytree):
    """An optax optimiser for a module's variables: ``opt(lr, gradients)`` updates them.

    The learning rate is an argument of the step and may be traced, so a schedule does not compile again. The state
    (momenta, counts) is in variables of the optimiser, which you bind to a transform like a module. If the state holds
    the rate itself, as that of ``optax.inject_hyperparams`` does, it is set to the rate of each step.

    Args:
        module: the module to train, or a tree of them.
        factory: a function of optax whose first argument is the learning rate, such as ``optax.sgd``; or any function
            of the rate that returns an optimiser: ``lambda lr: optax.chain(optax.clip(1.0), optax.adam(lr))``.
        wrt: which variables to train; see :class:`GradValues`.
        **options: further arguments of the factory: ``momentum=0.9``.

    Raises:
        StateError: if ``factory`` is not such a function, or there is nothing to train; or if the optimiser
            initialises its state from the rate and then adapts it (``optax.rprop``).

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

    @arguments.named()
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
        made = self.factory(0.0)
        if not isinstance(made, optax.GradientTransformation):
            raise StateError(
                f"Optimizer: factory must give an optax optimiser, got {arguments.described(made)}; write "
                "px.Optimizer(net, optax.sgd)"
            )
        held = _tree(parameters)
        state = made.init(held)
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        self.structure = nnx.static(structure)
        self.state_names = nnx.static(
            tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
        )
        self.rates = nnx.static(_rates(self.factory, held, self.state_names))
        made = [OptimizerState(jnp.asarray(leaf)) for _, leaf in leaves]
        self.state = nnx.Dict(dict(zip(self.state_names, made, strict=True)))

    @arguments.named()
    def __call__(self, lr: Any, gradients: Any, **extra: Any) -> None:
        """Take one step.

        Args:
            lr: learning rate, a scalar: a number or a traced array.
            gradients: as :class:`GradValues` returns them; or a list in the order of
                ``px.variables(net).subset(wrt)``.
            **extra: further arguments of the optimiser's update, such as ``value=``.

        Raises:
            ShapeError: if the gradients do not fit the variables, or the rate is not a scalar. Nothing is changed.
            ValueError: if the rate is infinite or NaN; of a JAX array that is not looked at, as it may be computing.
        """
        parameters = self._parameters()
        if not (arguments.is_number(lr) or (isinstance(lr, jax_api.Tracer) and lr.shape == ())):
            got = f"shape {lr.shape}" if isinstance(lr, (jax.Array, np.ndarray)) else arguments.described(lr)
            raise ShapeError(f"Optimizer: lr must be a scalar, got {got}; write opt(0.1, gradients)")
        if not isinstance(lr, jax.Array):
            arguments.number("Optimizer", "lr", lr, finite=True, write="opt(0.1, gradients)")
        values = _tree(parameters)
        given = _fitting(parameters, gradients)
        own = [self.state[name] for name in self.state_names]
        leaves = [v.get_raw_value() for v in own]
        if self.rates:
            leaves = _with(self.rates, leaves, self.factory(lr).init(values))
        state = jax.tree.unflatten(self.structure, leaves)
        step = optax.with_extra_args_support(self.factory(lr))
        updates, after = step.update(given, state, values, **extra)
        new_values: Any = optax.apply_updates(values, updates)
        new_state = jax.tree.leaves(after)
        if jax.tree.structure(after) != self.structure:
            raise StateError("Optimizer: the optimiser's state changed its structure in a step; it must not")
        for variable, new in [*zip(parameters, new_values, strict=True), *zip(own, new_state, strict=True)]:
            variable.set_value(new)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "Optimizer":
        """With the module, if that is copied together with it."""
        memo = {} if memo is None else memo
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update(graphs.deep_copy(vars(self), memo))
        return made

    def _parameters(self) -> Variables:
        """Return those that it trains, by name: the variables themselves are others in each run of a transform."""
        found = variables(self.module)
        gone = [name for name in self.names if name not in found]
        if gone:
            raise StateError(
                f"Optimizer: variable {gone[0]} is no longer in the module; make a new px.Optimizer for what it is now"
            )
        return found.subset(lambda name, _: name in self.names)


def _with(rates: Sequence[int], leaves: Sequence[Any], fresh: Any) -> list[Any]:
    """Return the leaves of a state, those that are made of the rate as they are in a fresh state."""
    new = jax.tree.leaves(fresh)
    return [jnp.asarray(new[i], jnp.result_type(x)) if i in rates else x for i, x in enumerate(leaves)]


def _rates(factory: Callable[..., Any], parameters: Gradients, names: Sequence[str]) -> tuple[int, ...]:
    """Return the leaves of the state that are the learning rate, or made of it alone, and are to be those of each step.

    Raises:
        StateError: if a leaf is made of the rate first, and of other things later; or if that cannot be seen.
    """
    try:
        init = jax.make_jaxpr(lambda rate, held: jax.tree.leaves(factory(rate).init(held)))(0.0, parameters)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise StateError(
            "Optimizer: factory looks at the learning rate's value, which is not known while a step is traced; leave "
            "the rate as it is, lambda lr: optax.sgd(lr), and choose by it outside"
        ) from error
    weights, state = init.in_avals[1:], init.out_avals
    kept = [i for i, differs in enumerate(_differing(init, [0])) if differs]
    if not kept:
        return ()
    structure, first = jax.tree.structure(parameters), 1 + 2 * len(weights)

    def step(rates: Sequence[int], rate: Any, *values: Any) -> Any:
        tx = optax.with_extra_args_support(factory(rate))
        held = jax.tree.unflatten(structure, values[: len(weights)])
        given = jax.tree.unflatten(structure, values[len(weights) : first - 1])
        fresh = tx.init(held)
        before = jax.tree.unflatten(jax.tree.structure(fresh), _with(rates, values[first - 1 :], fresh))
        updates, after = tx.update(given, before, held, value=0.0, grad=given, value_fn=lambda _: 0.0)
        return jax.tree.leaves(after), jax.tree.leaves(updates)

    avals = [init.in_avals[0], *weights, *weights, *state]
    as_is = jax.make_jaxpr(functools.partial(step, ()))(*avals)
    read = [i for i in kept if any(_differing(as_is, [first + i]))]  # the others are notes
    set_anew = jax.make_jaxpr(functools.partial(step, read))(*avals)
    mixed, moves = (_differing(closed, range(1, len(closed.in_avals))) for closed in (init, set_anew))
    for i in read:
        if mixed[i] or moves[i] or not _stays(init, set_anew, i):
            name = getattr(getattr(factory, "func", factory), "__name__", "<lambda>")
            name, made = ("the optimiser", "…") if name == "<lambda>" else (name, f"optax.{name}(0.01)")
            raise StateError(
                f"Optimizer: {name} initialises {names[i]}, in its state, from the first learning rate and then adapts "
                f"it, so the rates of later steps would have no effect; fix the rate: px.Optimizer(net, lambda lr: "
                f"{made})"
            )
    return tuple(read)


def _stays(init: Any, step: Any, i: int) -> bool:
    """Return whether a leaf of the state, which is made of the rate alone, is the same after a step as before it."""
    values = []
    for closed in (init, step):
        alone = jax_api.pruned(closed, [closed.jaxpr.outvars[i]])
        others = [None] * (len(closed.in_avals) - 1)  # nothing of it is read
        values.append(jax_api.jaxpr_as_fun(alone)(jnp.asarray(0.375, closed.in_avals[0].dtype), *others)[0])
    return bool(jnp.array_equal(*values))


def _differing(closed: Any, of: Sequence[int]) -> list[bool]:
    """Return, for each result of a program: whether it depends on these of its arguments."""
    return varying.batched(closed, [0 if i in of else None for i in range(len(closed.in_avals))], 2, None, {})


def _tree(parameters: Variables) -> Gradients:
    return Gradients({name: v.get_raw_value() for name, v in parameters.items()})


def _fitting(parameters: Variables, gradients: Any) -> Gradients:
    """Return the gradients by the variables' names."""
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
        raise ShapeError(f"Optimizer: {len(leaves)} gradients were given for {len(names)} variables; give one each")
    for name, variable, g in zip(names, parameters, leaves, strict=True):
        value = graphs.value(variable)
        if jax.tree.map(jnp.shape, g) != jax.tree.map(jnp.shape, value):
            raise ShapeError(
                f"Optimizer: the gradient of {name} has shape {jnp.shape(g)}, the variable {jnp.shape(value)}; "
                "write gradients as px.GradValues gives them"
            )
    return Gradients(dict(zip(names, leaves, strict=True)))


def _unnumbered(names: Sequence[str]) -> list[str]:
    """Return names without the numbers of modules that they all begin with."""
    numbers = {match[0] if (match := re.match(r"\[\d+\]", name)) else "" for name in names}
    if len(numbers) != 1 or numbers == {""}:
        return list(names)
    return _unnumbered([name[len(next(iter(numbers))) :] for name in names])
