"""A member as arrays by name, and as what the user's functions see: pytrees, or Flax NNX modules."""

import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import pytrees
from paraxis.errors import StateError
from paraxis.train import TrainState
from paraxis.train._models import is_a

State = dict[str, jax.Array]  # a member's arrays by name; of random keys, their numbers, which can be padded and saved

_nnx: Any = functools.partial(importlib.import_module, "flax.nnx")


@dataclasses.dataclass(frozen=True)
class Form:
    """The static part of a member, which all members share: with a member's arrays, it makes the member."""

    structure: Any  # of the partitioned pytree, or of the nnx.State
    names: tuple[str, ...]  # of its leaves
    impls: tuple[Any, ...]  # for each leaf with random keys, their implementation
    graphdef: Any  # of NNX modules; None for pytrees
    is_tuple: bool  # whether make returned a tuple of parts

    def parts(self, state: State) -> tuple[Any, ...]:
        """Return a member's parts, of which the first is the model."""
        pairs = zip(self.names, self.impls, strict=True)
        leaves = [jax.random.wrap_key_data(state[name], impl=impl) if impl else state[name] for name, impl in pairs]
        tree = jax.tree.unflatten(self.structure, leaves)
        return pytrees.combine(tree) if self.graphdef is None else _nnx().merge(self.graphdef, tree)

    def member(self, state: State) -> Any:
        """Return what ``make`` returned: a single part, or the tuple."""
        parts = self.parts(state)
        return parts if self.is_tuple else parts[0]

    def step(self, step: Callable[..., Any], state: State, args: Sequence[Any]) -> tuple[State, Any]:
        parts = self.parts(state)
        out = step(*parts, *args)
        if self.graphdef is None:
            tree, out = self._returned(out)
        else:
            graphdef, tree = _nnx().split(parts, graph=True)
            if graphdef != self.graphdef or jax.tree.structure(tree) != self.structure:
                raise StateError("ensemble.train: step changed more than variables, say an attribute; do that in make")
        new = _arrays(self.names, jax.tree.leaves(tree))
        require_alike("ensemble.train: step changed", state, new)
        return new, out

    def _returned(self, result: Any) -> tuple[Any, Any]:
        """Return the tree of the new member and the further result: of ``member``, or ``(member, out)``."""
        pair = [result] if isinstance(result, tuple) and len(result) == 2 else []
        for member, out in [(result, None), *pair]:
            tree = pytrees.partition(member if self.is_tuple else (member,))
            if jax.tree.structure(tree) == self.structure:
                return tree, out
        raise StateError(
            f"ensemble.train: step must return the new member, structured as the old one, or (member, loss); it "
            f"returned {jax.tree.structure(pytrees.partition(result))}"
        )

    def apply(self, apply: Callable[..., Any], state: State, inputs: Sequence[Any]) -> Any:
        """Return what the model gives for inputs, in evaluation mode; what it writes to itself is dropped."""
        model = self.parts(state)[0]
        if self.graphdef is None:  # an evaluation of a train state sets its model's mode
            model = model if isinstance(model, TrainState) else pytrees.evaluating(model)
        elif hasattr(model, "eval"):
            model.eval()
        return apply(model, *inputs)


def called(model: Any, *inputs: Any) -> Any:
    """Return what a model gives that says itself how it is applied."""
    if hasattr(model, "apply_fn") and hasattr(model, "params"):
        return model.apply_fn({"params": model.params}, *inputs)
    if isinstance(model, TrainState):
        model = model.form.make(model.params, model.mutable, None, "eval")[0]
    if callable(model):
        return model(*inputs)
    raise StateError(f"ensemble: a {type(model).__name__} cannot be called; write apply=lambda model, x: …")


def split(member: Any) -> tuple[Form, State]:
    is_tuple = type(member) is tuple
    parts = member if is_tuple else (member,)
    modules = [pytrees.is_nnx(part) for part in parts]
    inside = [x for x in jax.tree.leaves(parts, is_leaf=pytrees.is_nnx) if pytrees.is_nnx(x)]
    if not all(modules) and (any(modules) or any(isinstance(x, _nnx().Pytree) for x in inside)):
        raise StateError("ensemble: modules in a dict, or beside arrays, come apart; write (net, opt), nnx.Variable(x)")
    graphdef, tree = _nnx().split(parts, graph=True) if any(modules) else (None, pytrees.partition(parts))
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not with_paths:
        raise StateError(f"ensemble: make returned no arrays, but a {type(member).__name__}; it must return a member")
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    names = tuple(keystr(path if is_tuple else path[1:]).removesuffix(".value") or "value" for path, _ in with_paths)
    leaves = [leaf for _, leaf in with_paths]
    return Form(structure, names, tuple(map(_impl, leaves)), graphdef, is_tuple), _arrays(names, leaves)


def require_alike(what: str, old: State, new: State) -> None:
    """Raise unless a member's new arrays fit where the old ones were."""
    for name, before in old.items():
        after = new[name]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise StateError(
                f"{what} {name} from {before.dtype}{list(before.shape)} to {after.dtype}{list(after.shape)}; a member "
                f"keeps its shapes and dtypes: x.astype({str(before.dtype)!r})"
            )


def require_same_form(what: str, ours: Form, theirs: Form) -> None:
    """Raise unless two members differ in their arrays only: those of one ensemble share all else."""
    if not _equal(ours, theirs, {}):
        odd = ", ".join(sorted({*ours.names} ^ {*theirs.names})) or "functions or settings: an activation, a rate"
        raise StateError(f"{what} differs from the others in {odd}, which all share; keep what differs in an array")


def _equal(a: Any, b: Any, seen: dict[tuple[int, int], Any]) -> bool:
    """Return whether two things are equal; functions are if their code and what it closes over are."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen[id(a), id(b)] = a, b  # kept, so that their ids stay theirs
    ours, theirs = _parts(a), _parts(b)
    if ours is None or theirs is None:
        return np.array_equal(a, b)
    return len(ours) == len(theirs) and all(_equal(x, y, seen) for x, y in zip(ours, theirs, strict=True))


def _parts(x: Any) -> Sequence[Any] | None:
    """Return what a thing is made of; ``None`` where only ``==`` can tell."""
    match x:
        case tuple() | list():
            return x
        case dict():
            return sorted(x.items(), key=lambda item: str(item[0]))
        case types.FunctionType():
            return x.__code__, x.__defaults__, x.__kwdefaults__, *(cell.cell_contents for cell in x.__closure__ or ())
        case types.MethodType() | functools.partial():
            return x.__reduce__()
        case jax.tree_util.PyTreeDef():
            return x.node_data(), x.children()
        case np.ndarray() | jax.Array() | type():
            return None
    if hasattr(x, "__wrapped__"):  # jitted, say
        return [x.__wrapped__]
    names = getattr(x, "__dataclass_fields__", getattr(x, "__dict__", None))
    return None if names is None else [getattr(x, name) for name in names]


def _arrays(names: Sequence[str], leaves: Sequence[Any]) -> State:
    """Return leaves by their names, strongly typed: else a step would be compiled again for its own results."""
    values = (jax.random.key_data(leaf) if _impl(leaf) else jnp.asarray(leaf) for leaf in leaves)
    return {name: jax.lax.convert_element_type(x, x.dtype) for name, x in zip(names, values, strict=True)}


def _impl(leaf: Any) -> Any:
    """Return the implementation of random keys; ``None`` of other arrays."""
    return jax.random.key_impl(leaf) if is_a(jax.dtypes.prng_key, leaf) else None
