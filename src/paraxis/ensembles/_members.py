"""A member as arrays by name, and as what the user's functions see: pytrees, or Flax NNX modules."""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import check, pytrees
from paraxis.errors import DataError, StateError

State = dict[str, jax.Array]
"""A member's arrays by name; of random keys, their numbers, which can be padded and saved."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How a member is made of its arrays.

    Attributes:
        structure: of the sealed pytree, or of the ``nnx.State``.
        names: of its leaves.
        impls: for each leaf with random keys, their implementation.
        graphdef: of NNX modules; ``None`` for pytrees.
        is_tuple: whether ``make`` returned a tuple of parts.
    """

    structure: Any
    names: tuple[str, ...]
    impls: tuple[Any, ...]
    graphdef: Any
    is_tuple: bool

    def parts(self, state: State) -> tuple[Any, ...]:
        """Return a member's parts, of which the first is the model."""
        arrays = [state[name] for name in self.names]
        leaves = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arrays, self.impls, strict=True)
        ]
        tree = jax.tree.unflatten(self.structure, leaves)
        return pytrees.opened(tree) if self.graphdef is None else _nnx().merge(self.graphdef, tree)

    def member(self, state: State) -> Any:
        """Return what ``make`` returned: a single part, or the tuple."""
        parts = self.parts(state)
        return parts if self.is_tuple else parts[0]

    def step(self, step: Callable[..., Any], state: State, args: Sequence[Any]) -> tuple[State, Any]:
        """Return the state after a step, and what else the step returned."""
        parts = self.parts(state)
        out = step(*parts, *args)
        if self.graphdef is None:
            tree, out = self._returned(out)
        else:
            graphdef, tree = _nnx().split(parts, graph=True)
            if graphdef != self.graphdef or jax.tree.structure(tree) != self.structure:
                raise StateError(
                    "ensemble.train: step changed the structure of its member (attributes, submodules, train() or "
                    "eval()); only values of variables change from step to step. Set the rest in make"
                )
        new = _arrays(self.names, jax.tree.leaves(tree))
        require_alike("ensemble.train: step changed", state, new)
        return new, out

    def _returned(self, result: Any) -> tuple[Any, Any]:
        """Return the tree of the new member and the further result: of ``member``, or ``(member, out)``."""
        pair = [result] if isinstance(result, tuple) and len(result) == 2 else []
        for member, out in [(result, None), *pair]:
            tree = pytrees.sealed(member if self.is_tuple else (member,))
            if jax.tree.structure(tree) == self.structure:
                return tree, out
        raise StateError(
            f"ensemble.train: step must return the new member, with the structure and settings of the old one, or a "
            f"pair of it and a further result; it returned {jax.tree.structure(pytrees.sealed(result))}. Write return "
            f"{'(params, opt_state)' if self.is_tuple else 'params'}, loss"
        )

    def apply(self, apply: Callable[..., Any], state: State, inputs: Sequence[Any]) -> Any:
        """Return what the model gives for inputs, in evaluation mode; what it writes to itself is dropped."""
        model = self.parts(state)[0]
        if self.graphdef is None:
            model = pytrees.evaluating(model)
        elif hasattr(model, "eval"):
            model.eval()
        return apply(model, *inputs)


def called(model: Any, *inputs: Any) -> Any:
    """Return what a model gives that says itself how it is applied."""
    if hasattr(model, "apply_fn") and hasattr(model, "params"):
        return model.apply_fn({"params": model.params}, *inputs)
    if callable(model):
        return model(*inputs)
    raise StateError(
        f"ensemble: a {type(model).__name__} does not say how it is applied; write "
        f"px.ensemble(make, …, apply=lambda model, x: …), or give apply= to predict"
    )


def split(made: Any) -> tuple[Form, State]:
    """Return the form of what ``make`` returned, and its arrays."""
    is_tuple = type(made) is tuple
    parts = made if is_tuple else (made,)
    modules = [pytrees.is_nnx(part) for part in parts]
    if any(modules) and not all(modules):
        raise StateError(
            f"ensemble: make returned modules and a {type(parts[modules.index(False)]).__name__}, which a step could "
            f"not change in place; keep it in a variable, nnx.Variable(x)"
        )
    graphdef, tree = _nnx().split(parts, graph=True) if any(modules) else (None, pytrees.sealed(parts))
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not found:
        raise StateError(
            f"ensemble: make returned a {type(made).__name__} without arrays; it must return the parameters, a train "
            f"state or a module: lambda key: model.init(key, x)['params']"
        )
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    names = tuple(keystr(path if is_tuple else path[1:]).removesuffix(".value") or "value" for path, _ in found)
    leaves = [leaf for _, leaf in found]
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
    if odd := sorted({*ours.names} ^ {*theirs.names}):
        raise StateError(f"{what} is not like the others; they differ in {odd[0]}")
    if not _alike(ours, theirs, {}):
        raise StateError(
            f"{what} has other functions or settings than the others, and all members share these: an activation, an "
            f"optimiser's rate. Make it by the same function, or keep what differs in an array of the member"
        )


def _alike(a: Any, b: Any, seen: dict[tuple[int, int], Any]) -> bool:
    """Return whether two things are equal; functions are if their code and what it closes over are."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, jax.Array)):
        return np.array_equal(a, b)
    seen[id(a), id(b)] = a, b  # kept, so that their ids stay theirs
    ours, theirs = _inside(a), _inside(b)
    if ours is None or theirs is None:
        return bool(a == b)
    return len(ours) == len(theirs) and all(_alike(x, y, seen) for x, y in zip(ours, theirs, strict=True))


def _inside(x: Any) -> Sequence[Any] | None:
    """Return what a thing is made of; ``None`` where only ``==`` can tell."""
    match x:
        case types.FunctionType():
            return x.__code__, x.__defaults__, x.__kwdefaults__, *(cell.cell_contents for cell in x.__closure__ or ())
        case types.MethodType():
            return x.__func__, x.__self__
        case functools.partial():
            return x.func, x.args, x.keywords
        case jax.tree_util.PyTreeDef():
            return x.node_data(), x.children()
        case tuple() | list():
            return x
        case dict():
            return sorted(x.items(), key=lambda item: str(item[0]))
    if hasattr(x, "__wrapped__"):  # jitted, say
        return [x.__wrapped__]
    if dataclasses.is_dataclass(x):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    return [*vars(x).values()] if hasattr(x, "__dict__") else None


def _arrays(names: Sequence[str], leaves: Sequence[Any]) -> State:
    """Return leaves by their names, strongly typed: else a step would be compiled again for its own results."""
    arrays = [numbers(x) for x in leaves]
    return {name: jax.lax.convert_element_type(x, x.dtype) for name, x in zip(names, arrays, strict=True)}


def numbers(leaf: Any) -> jax.Array:
    """Return a leaf's array; of random keys, their numbers."""
    return jax.random.key_data(leaf) if _impl(leaf) else jnp.asarray(leaf)


def _impl(leaf: Any) -> Any:
    """Return the implementation of random keys; ``None`` of other arrays."""
    is_key = jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None


def one_key(who: str, key: Any) -> jax.Array:
    """Return one random key, of one or of a seed."""
    if not isinstance(key, (jax.Array, np.ndarray)):
        return jax.random.key(check.count(who, "key", key, least=0, write="key=0"), impl="threefry2x32")
    if "rbg" in str(jax.random.key_impl(key)):
        raise DataError(
            f"{who}: with a key of the hardware generator rbg, members would depend on the devices; write "
            f"jax.random.key(0, impl='threefry2x32')"
        )
    return jnp.asarray(key)


def _nnx() -> Any:
    from flax import nnx

    return nnx
