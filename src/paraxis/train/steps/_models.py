"""Models of which states are made: taken apart, checked, and given arrays of their own."""

import contextlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import tree
from paraxis._calls import pytrees
from paraxis.errors import StateError
from paraxis.train.steps import _linen, _nnx
from paraxis.train.steps._forms import Form, PlainForm, PytreeForm


def taken_apart(model: Any, key: Any, sample: Any) -> tuple[Form, Any, Any]:
    """Return what a state is made from as a form, parameters, and what else changes.

    Raises:
        StateError: saying what to write, if there is nothing to train.
    """
    _refuse_class(model)
    if isinstance(model, _module_class("nnx")):
        return _nnx.nnx(model)
    if isinstance(model, _module_class("linen")):
        return _linen.linen(model, key, sample)
    if pytrees.found_in(model):
        return _pytree(model)
    if not jax.tree.leaves(model) or callable(model):
        raise StateError(
            f"TrainState.create: model must be an NNX or Linen module, a pytree that can be called, such as an Equinox "
            f"module, or a pytree of parameters, got {type(model).__name__} without arrays; write "
            f"px.TrainState.create(params, optimizer)"
        )
    _refuse_unseen_variables(model)
    return PlainForm(), model, None


def _pytree(model: Any) -> tuple[Form, Any, Any]:
    """Return the form of models that are pytrees, their floating arrays, and their others."""
    _refuse_unseen_variables(model)
    params, others, rest = pytrees.split(model)
    if not jax.tree.leaves(params):
        raise StateError(
            f"TrainState.create: {type(model).__name__} has no floating arrays; there is nothing to train. Make its "
            f"parameters arrays: self.w = jnp.zeros(3), and their fields not static"
        )
    return PytreeForm(rest), params, others if rest.has_others else None


_LINEN_COLLECTIONS = {"batch_stats", "cache", "intermediates"}


def _refuse_unseen_variables(model: Any) -> None:
    """Refuse a pytree in which what a module keeps besides its parameters would be trained as if it were some."""
    module, variable = _module_class("nnx"), getattr(sys.modules.get("flax.nnx"), "Variable", ())
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, (module, variable)))
    for path, x in found:
        if isinstance(x, module):
            raise StateError(
                f"TrainState.create: {tree.name('model', path)} is an NNX module in a {type(model).__name__}, whose "
                f"statistics and random streams would be trained like parameters; put the modules into one: "
                f"px.TrainState.create(nnx.Dict(first=…, second=…), optimizer)"
            )
        if isinstance(x, variable) and not isinstance(x, sys.modules["flax.nnx"].Param):
            raise StateError(
                f"TrainState.create: {tree.name('model', path)} is an nnx.{type(x).__name__}, which is not trained; "
                f"give the module itself, px.TrainState.create(module, optimizer), or nnx.state(module, nnx.Param)"
            )
    if isinstance(model, Mapping) and "params" in model and (beside := sorted(_LINEN_COLLECTIONS & set(model))):
        raise StateError(
            f"TrainState.create: model has {', '.join(map(repr, beside))} beside 'params', as variables of a Linen "
            f"module have, and would be trained whole; give the module, state = px.TrainState.create(module, "
            f"optimizer, key=jax.random.key(0), sample=x[:1]), and its values by state.replace("
            f"params=variables['params'], mutable={{{beside[0]!r}: variables[{beside[0]!r}]}})"
        )


def _module_class(library: str) -> Any:
    """Return the class of ``"linen"`` or ``"nnx"``; no class if it was not loaded, since nothing is one then."""
    return getattr(sys.modules.get(f"flax.{library}"), "Module", ())


def _refuse_class(model: Any) -> None:
    """Refuse a class where one of its instances is meant."""
    if not isinstance(model, type):
        return
    made, more = f"{model.__name__}(…)", ""
    if issubclass(model, _module_class("nnx")):
        made = f"{model.__name__}(…, rngs=nnx.Rngs(0))"
    elif issubclass(model, _module_class("linen")):
        more = ", key=jax.random.key(0), sample=x[:1]"
    raise StateError(
        f"TrainState.create: model is the class {model.__name__}, not a module made of it; write "
        f"px.TrainState.create({made}, optimizer{more})"
    )


def require_floating(params: Any, form: Form) -> None:
    """Refuse parameters that cannot be trained: there is no derivative with respect to integers.

    Raises:
        StateError: naming one, and saying where it belongs.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
        if getattr(dtype, "kind", None) in ("O", "U", "S"):  # the dtypes of keys have no kind
            raise StateError(
                f"TrainState.create: {tree.name('model', path)} is a {type(x).__name__}, not an array. A model that "
                f"keeps such things can be called: give its class a method __call__; or leave it out of the pytree"
            )
        if jnp.issubdtype(dtype, jnp.inexact):
            continue
        raise StateError(
            f"TrainState.create: {tree.name('model', path)} is {dtype}, but only floating-point arrays are trained; "
            f"{form.cure_of_integers}"
        )


def random_key(key: Any) -> Any:
    """Return a key as ``jax.random.key`` makes them, of one or of what ``jax.random.PRNGKey`` makes; or ``None``.

    Raises:
        StateError: if it is neither.
    """
    if key is None:
        return None
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    if dtype == np.uint32 and shape and len(shape) == 1:
        with contextlib.suppress(TypeError, ValueError):
            return jax.random.wrap_key_data(jnp.asarray(key))
    got = repr(key) if dtype is None else f"{dtype} of shape {shape}"
    raise StateError(f"TrainState.create: key must be one random key, got {got}; write key=jax.random.key(0)")


def owned(values: Any) -> Any:
    """Arrays of one's own, of strong type: they are given away, and must not be found elsewhere, or twice."""
    return jax.tree.map(_own, values)


def _own(x: Any) -> jax.Array:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.array(x, jnp.result_type(x))


def require_optimizer(optimizer: Any) -> None:
    """Refuse what is no optax optimiser.

    Raises:
        StateError: saying what to write.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        got, wrapper = type(optimizer).__name__, getattr(sys.modules.get("flax.nnx"), "Optimizer", ())
        if optimizer is None:
            got = "none"
        elif isinstance(optimizer, wrapper):
            got = f"an nnx.{got}, which holds one: give that one itself"
        elif inspect.isfunction(optimizer):
            got = f"the function {optimizer.__name__}: call it"
        raise StateError(
            f"TrainState.create: optimizer must be an optax optimiser, got {got}; write "
            f"px.TrainState.create(model, optax.adam(1e-3))"
        )
