"""Models of which states are made: NNX, Linen and Equinox modules, and plain parameters, split into values and form."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import prng_key

from paraxis._core import pytrees
from paraxis.errors import StateError

_Parts = tuple["Form", Any, Any]  # a model's form, its parameters, and what else changes


class Form:
    """The fixed part of a model, in a state's structure, which JAX compares and hashes at each step.

    Attributes:
        kind: what it is a form of, for people.
        make: ``make(params, mutable, key, mode)`` → the model with these values for one use, and a function that gives
            its mutable state after it. The mode is ``"train"``, ``"eval"``, or ``"as made"``.
        mask: ``mask(params, train)`` → whether each leaf of the parameters is trained.
    """

    def __init__(
        self, kind: str, identity: Any, make: Callable[..., tuple[Any, Callable[[], Any]]], mask: Any = None
    ) -> None:
        self.kind, self.make, self.mask, self._identity = kind, make, mask or _mask, (kind, identity)
        try:
            self._hash = hash(self._identity)
        except TypeError:  # a module with attributes that cannot be hashed is equal to none but itself
            self._hash = id(self)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Form) and self._hash == other._hash and bool(self._identity == other._identity)
        )


def split(model: Any, key: Any, sample: Any) -> _Parts:
    if isinstance(model, pytrees.classes("flax.nnx", "Module")):
        return _nnx(model)
    if isinstance(model, pytrees.classes("flax.linen", "Module")):
        return _linen(model, key, sample)
    if any(map(pytrees.is_model, jax.tree.leaves(model, is_leaf=pytrees.is_model))):
        return _pytree(model)
    _refuse_variables(model)
    return Form("plain", None, lambda params, mutable, key, mode: (params, lambda: mutable)), model, None


def partition(form: Form, params: Any, train: Any) -> tuple[Any, Any]:
    """Return the parameters that are trained, and the frozen ones, each with ``None`` for the other's."""
    leaves, structure = jax.tree.flatten(params)
    is_filter = form.kind != "NNX module" or not isinstance(train, Mapping)
    mask = form.mask(params, train) if is_filter else [train]
    if others := [x for x in mask if isinstance(x, (str, type, Mapping))]:
        raise StateError(
            f"TrainState: train= says {others[0]!r} of a parameter; write train=lambda path, x: …, or nnx.LoRAParam"
        )
    parts = [[x if bool(m) is part else None for x, m in zip(leaves, mask, strict=True)] for part in (True, False)]
    return structure.unflatten(parts[0]), None if all(mask) else structure.unflatten(parts[1])


def _mask(params: Any, train: Any) -> list[Any]:
    if not callable(train) or isinstance(train, type) or pytrees.is_model(train):
        return pytrees.broadcast_prefix(train, params)
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=pytrees.is_nnx)
    name = lambda key: getattr(key, "key", jax.tree_util.keystr((key,), simple=True))  # noqa: E731
    return [train(tuple(map(name, path)), x) for path, x in paths_and_leaves]


def combine(params: Any, frozen: Any) -> Any:
    if frozen is None:
        return params
    return jax.tree.map(lambda x, other: other if x is None else x, params, frozen, is_leaf=lambda x: x is None)


def _pytree(model: Any) -> _Parts:
    """Split a model that is a pytree, such as an Equinox module, or a tree of them.

    Its floating arrays are parameters. Its other arrays are mutable to the state, though no step changes them.
    """
    structure, is_fixed = jax.tree.structure(model), lambda x: isinstance(x, pytrees.Static)
    leaves = jax.tree.leaves(pytrees.partition(model), is_leaf=is_fixed)
    # What is fixed; else, whether it is trained.
    kinds: list[Any] = [x if is_fixed(x) else is_a(jnp.inexact, x) for x in leaves]
    parts = [[x if kind is part else None for x, kind in zip(leaves, kinds, strict=True)] for part in (True, False)]
    params, others = map(structure.unflatten, parts)

    def make(params: Any, mutable: Any, key: Any, mode: str) -> Any:
        values = {True: iter(jax.tree.leaves(params)), False: iter(jax.tree.leaves(mutable))}
        model = structure.unflatten([kind.value if is_fixed(kind) else next(values[kind]) for kind in kinds])
        return pytrees.evaluating(model) if mode == "eval" else model, lambda: mutable

    return Form("pytree", (structure, *kinds), make), params, others if jax.tree.leaves(others) else None


def _nnx(module: Any) -> _Parts:
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    structures = jax.tree.structure(params), jax.tree.structure(rest)

    def make(params: Any, mutable: Any, key: Any, mode: str) -> Any:
        # The leaves of nested dicts have the order of those of the states that they were made of.
        leaves = map(jax.tree.leaves, (params, mutable))
        model = nnx.merge(graph, *map(jax.tree.unflatten, structures, leaves), copy=True)
        if mode != "as made":
            model.train() if mode == "train" else model.eval()

        def after() -> Any:
            _, written, rest = nnx.split(model, nnx.Param, ...)
            if any(a is not b for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(written), strict=True)):
                raise StateError("px.train_step: the loss function wrote a parameter; write an nnx.Variable instead")
            return nnx.to_pure_dict(rest) or None

        return model, after

    # Filters look at the types of variables.
    mask = lambda params, train: _mask(  # noqa: E731
        jax.tree.unflatten(structures[0], jax.tree.leaves(params)), nnx.filterlib.to_predicate(train)
    )
    form = Form("NNX module", (graph, structures), make, mask)
    return form, nnx.to_pure_dict(params), nnx.to_pure_dict(rest) or None


def _linen(module: Any, key: Any, sample: Any) -> _Parts:
    if key is None or sample is None:
        raise StateError("TrainState: a Linen module needs a key and sample; write key=jax.random.key(0), sample=x[:1]")
    named = sample if isinstance(sample, Mapping) else {}
    variables = dict(module.init(key, *(() if named else sample if isinstance(sample, tuple) else (sample,)), **named))

    def make(params: Any, mutable: Any, key: Any, mode: str) -> Any:
        # Linen takes the stream of the parameters for those that have none of their own.
        rngs = None if key is None else {"params": key}
        written = list(mutable or ()) if mode == "train" else False
        bound = module.bind({"params": params, **(mutable or {})}, rngs=rngs, mutable=written)
        return bound, lambda: {name: bound.variables[name] for name in mutable} if mutable else mutable

    return Form("Linen module", module, make), variables.pop("params", {}), variables or None


def _refuse_variables(model: Any) -> None:
    """Refuse a pytree in which running statistics or random streams would be trained as if they were parameters."""
    param, parts = pytrees.classes("flax.nnx", "Param"), jax.tree.leaves(model, is_leaf=pytrees.is_nnx)
    others = [type(x).__name__ for x in parts if pytrees.is_nnx(x) and not isinstance(x, param)]
    if isinstance(model, Mapping) and "params" in model:
        others += sorted({"batch_stats", "cache", "intermediates"} & set(model))
    if others:
        raise StateError(
            f"TrainState.create: {others[0]} in a {type(model).__name__} would be trained like parameters; give the "
            "module itself: px.TrainState.create(module, optimizer); several in one: nnx.Dict(first=…, second=…)"
        )


def copy(values: Any) -> Any:
    """Return copies of all arrays, of strong type: a step donates its state's buffers."""
    return jax.tree.map(lambda x: jnp.copy(x) if is_a(prng_key, x) else jnp.array(x, jnp.result_type(x)), values)


def is_a(kind: Any, x: Any) -> bool:
    """Return whether a number or an array is of a kind of dtypes, such as ``jnp.inexact`` or ``prng_key``."""
    return bool(jnp.issubdtype(getattr(x, "dtype", None) or np.asarray(x).dtype, kind))
