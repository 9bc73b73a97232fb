"""Models of which states are made: NNX, Linen and Equinox modules, and plain parameters, split into values and form."""

import abc
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis._calls import pytrees
from paraxis.errors import StateError

Mode = Literal["train", "eval", "as made"]


class Form(abc.ABC):
    """The fixed part of a model: how it is made of its parameters and its mutable state.

    It is part of a state's structure, which JAX compares and hashes at each step: the same object is equal at once.

    Attributes:
        kind: what it is a form of, for people.
    """

    kind: str

    @abc.abstractmethod
    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> tuple[Any, Callable[[], Any]]:
        """Return the model with these values, for one use, and a function that gives its mutable state after it."""

    @property
    @abc.abstractmethod
    def identity(self) -> Any:
        """Return what two forms that make the same models have in common."""

    @functools.cached_property
    def _hash(self) -> int:
        try:
            return hash((type(self), self.identity))
        except TypeError:  # a module with attributes that cannot be hashed is equal to none but itself
            return id(self)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Form) or type(self) is not type(other) or hash(self) != hash(other):
            return False
        return bool(self.identity == other.identity)


class Recipe:
    """The fixed part of a state: the form of its model, its optimiser, the decay of its average."""

    def __init__(self, form: Form, optimizer: Any, ema_decay: float | None) -> None:
        self.form = form
        self.optimizer = optimizer
        self.ema_decay = ema_decay
        self._hash = hash((form, optimizer, ema_decay))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Recipe) and self._parts == other._parts

    @property
    def _parts(self) -> Any:
        return self.form, self.optimizer, self.ema_decay


class PlainForm(Form):
    """Parameters as they are, for functions of them."""

    kind = "plain"

    def make(self, params: Any, mutable: Any, key: Any, mode: Mode) -> tuple[Any, Callable[[], Any]]:
        return params, lambda: mutable

    @property
    def identity(self) -> Any:
        return ()


class PytreeForm(Form):
    """Models that are pytrees, such as Equinox modules, or a tree of them.

    Their floating arrays are parameters. Their other arrays are mutable to the state, though no step changes them.
    """

    kind = "pytree"

    def __init__(self, rest: pytrees.Rest) -> None:
        self._rest = rest

    def make(self, params: Any, mutable: Any, key: Any, mode: Mode) -> tuple[Any, Callable[[], Any]]:
        model = self._rest.joined(params, mutable if self._rest.has_others else None)
        return pytrees.evaluating(model) if mode == "eval" else model, lambda: mutable

    @property
    def identity(self) -> Any:
        return self._rest


class NNXForm(Form):
    """An NNX module: parameters are its ``nnx.Param`` variables, all other variables are mutable."""

    kind = "NNX module"

    def __init__(self, graph: Any, params: Any, rest: Any) -> None:
        self._graph = graph
        self._structures = jax.tree.structure(params), jax.tree.structure(rest)

    def make(self, params: Any, mutable: Any, key: Any, mode: Mode) -> tuple[Any, Callable[[], Any]]:
        from flax import nnx

        # The leaves of nested dicts have the order of those of the states that they were made of.
        values = [
            jax.tree.unflatten(structure, jax.tree.leaves(x))
            for structure, x in zip(self._structures, (params, mutable), strict=True)
        ]
        model = nnx.merge(self._graph, *values, copy=True)
        if mode != "as made":
            model.train() if mode == "train" else model.eval()

        def after() -> Any:
            _, written, rest = nnx.split(model, nnx.Param, ...)
            before = jax.tree.leaves(params)
            if any(a is not b for a, b in zip(before, jax.tree.leaves(written), strict=True)):
                raise StateError(
                    "px.train_step: the loss function wrote a parameter of the module, which the optimiser changes; "
                    "keep what is written in an nnx.Variable, or an nnx.BatchStat"
                )
            return nnx.to_pure_dict(rest) or None

        return model, after

    @property
    def identity(self) -> Any:
        return self._graph, self._structures


class LinenForm(Form):
    """A Linen module, bound to its variables."""

    kind = "Linen module"

    def __init__(self, module: Any) -> None:
        self._module = module

    def make(self, params: Any, mutable: Any, key: Any, mode: Mode) -> tuple[Any, Callable[[], Any]]:
        variables = {"params": params, **(mutable or {})}
        # Linen takes the stream of the parameters for those that have none of their own.
        rngs = None if key is None else {"params": key}
        bound = self._module.bind(variables, rngs=rngs, mutable=list(mutable or ()) if mode == "train" else False)
        return bound, lambda: {name: bound.variables[name] for name in mutable} if mutable else mutable

    @property
    def identity(self) -> Any:
        return self._module


def split(model: Any, key: Any, sample: Any) -> tuple[Form, Any, Any]:
    """Return what a state is made from as a form, parameters, and what else changes.

    Raises:
        StateError: saying what to write, if there is nothing to train.
    """
    if isinstance(model, type):
        raise StateError(f"TrainState.create: model is the class {model.__name__}, not a module made of it")
    if isinstance(model, _module_class("nnx")):
        form, params, rest = _split_nnx(model)
    elif isinstance(model, _module_class("linen")):
        form, params, rest = _split_linen(model, key, sample)
    elif pytrees.found_in(model):
        params, others, fixed = pytrees.split(model)
        form, rest = PytreeForm(fixed), others if fixed.has_others else None
    else:
        _refuse_variables(model)
        form, params, rest = PlainForm(), model, None
    _require_floating(params)
    return form, params, rest


def _split_nnx(module: Any) -> tuple[Form, Any, Any]:
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return NNXForm(graph, params, rest), nnx.to_pure_dict(params), nnx.to_pure_dict(rest) or None


def _split_linen(module: Any, key: Any, sample: Any) -> tuple[Form, Any, Any]:
    if key is None or sample is None:
        raise StateError(
            "TrainState.create: a Linen module is initialised with a key and a sample of its arguments; write "
            "px.TrainState.create(model, optimizer, key=jax.random.key(0), sample=x[:1])"
        )
    args = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
    variables = dict(module.init(key, *args, **(sample if isinstance(sample, Mapping) else {})))
    return LinenForm(module), variables.pop("params", {}), variables or None


def _refuse_variables(model: Any) -> None:
    """Refuse a pytree in which running statistics or random streams would be trained as if they were parameters."""
    nnx = sys.modules.get("flax.nnx")
    classes = (nnx.Module, nnx.Variable) if nnx is not None else ()
    found = [x for x in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, classes)) if isinstance(x, classes)]
    others = [type(x).__name__ for x in found if nnx is not None and not isinstance(x, nnx.Param)]
    if isinstance(model, Mapping) and "params" in model:
        others += sorted({"batch_stats", "cache", "intermediates"} & set(model))
    if others:
        raise StateError(
            f"TrainState.create: {others[0]} in a {type(model).__name__} would be trained like parameters; give the "
            "module itself: px.TrainState.create(module, optimizer); several in one: nnx.Dict(first=…, second=…)"
        )


def _module_class(library: str) -> Any:
    """Return the class of ``"linen"`` or ``"nnx"``; no class if it was not loaded, since nothing is one then."""
    return getattr(sys.modules.get(f"flax.{library}"), "Module", ())


def _require_floating(params: Any) -> None:
    """Refuse parameters that cannot be trained: there is no derivative with respect to integers."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise StateError(
            "TrainState.create: the model has no arrays to train; write px.TrainState.create(params, optimizer)"
        )
    for path, x in leaves:
        dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise StateError(
                f"TrainState.create: {tree.name('model', path)} is {dtype}, but only floating-point arrays are "
                "trained; write it with a point if it is to be trained; else give it in the batch, or as mutable="
            )


def copy(values: Any) -> Any:
    """Return copies of all arrays, of strong type: a step donates its state's buffers."""
    return jax.tree.map(_copy, values)


def _copy(x: Any) -> jax.Array:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.array(x, jnp.result_type(x))
