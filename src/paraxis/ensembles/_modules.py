"""Members that are Flax NNX modules: which arrays they are, and how a step writes to them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._modules import captured, graphs, naming
from paraxis.ensembles._members import Apply, Form, require_same_leaves, strong
from paraxis.errors import StateError


def any_modules(parts: tuple[Any, ...]) -> bool:
    """Return whether a member has a module among its parts."""
    return graphs.holds_modules(parts)


class ModuleForm(Form):
    """Modules, optimisers and ``nnx.Rngs``, which steps change in place. Each variable is held once."""

    def __init__(self, parts: tuple[Any, ...], is_tuple: bool) -> None:
        super().__init__(is_tuple)
        for position, part in enumerate(parts):
            if not graphs.holds_modules(part):
                raise StateError(
                    f"ensemble: make returned modules and, as number {position}, a {type(part).__name__}, which a step "
                    f"could not change in place; keep it in a variable, nnx.Variable(x), an optimiser in "
                    f"nnx.Optimizer(net, tx, wrt=nnx.Param) or px.Optimizer(net, optax.sgd)"
                )
        graph = graphs.take_apart(parts)
        self._graph = graphs.emptied(graph)
        self._names = naming.names_in(parts, [*graph.paths, *graph.array_paths])
        if not self._names:
            raise StateError(
                f"ensemble: make returned a {type(parts[0]).__name__} without variables; there is nothing to be "
                f"different about its members"
            )

    def state(self, parts: tuple[Any, ...]) -> Any:
        return _held(graphs.take_apart(parts))

    def parts(self, state: Any) -> tuple[Any, ...]:
        values, arrays = jax.tree.map(lambda x: x, state)  # containers of our own: a variable may hold a dict
        return self._graph.put_together(values, arrays)

    def stepped(self, step: Callable[..., Any], state: Any, args: Sequence[Any]) -> tuple[Any, Any]:
        parts = self.parts(state)
        before = graphs.take_apart(parts)
        out = step(*parts, *args)
        after = graphs.take_apart(parts)
        if graphs.holds_modules(out):
            raise StateError(
                "ensemble.train: step returned a module; modules are changed in place, so return what else is wanted: "
                "return loss"
            )
        if before.definition != after.definition or before.paths != after.paths:
            raise StateError(
                "ensemble.train: step changed the structure of the member (attributes, submodules, train() or eval()); "
                "only values of variables are kept from step to step. Change the rest in make, and keep what changes "
                "in an nnx.Variable"
            )
        new = _held(after)
        if jax.tree.structure(new) != jax.tree.structure(state):
            raise StateError("ensemble.train: step changed the structure of what a variable holds; it must not")
        require_same_leaves(state, new, self.names(state))
        return new, out

    def applied(self, apply: Apply | None, state: Any, args: Sequence[Any]) -> Any:
        model = self.parts(state)[0]
        if isinstance(model, nnx.Module):
            model.eval()
        if apply is not None:
            return apply(model, *args)
        if callable(model):
            return model(*args)
        raise StateError(
            f"ensemble: a {type(model).__name__} cannot be called; write "
            f"px.ensemble(make, …, apply=lambda net, x: …), or give apply= to predict"
        )

    def names(self, state: Any) -> list[str]:
        values, arrays = state
        named = zip(self._names, [*values, *arrays], strict=True)
        return [name + jax.tree_util.keystr(path) for name, x in named for path, _ in _leaves(x)]


def _leaves(x: Any) -> Any:
    return jax.tree_util.tree_leaves_with_path(x)


def _held(graph: graphs.Graph) -> Any:
    values = [v.get_raw_value() for v in graph.variables]
    return strong(jax.tree.map(jnp.asarray, (values, graph.arrays)))


def guarded(what: str, fn: Callable[..., Any], within: Callable[..., Any]) -> Callable[..., Any]:
    """``within``, which raises if it, or ``fn``, uses a module from outside: all members would share it, frozen."""
    called = getattr(fn, "__name__", type(fn).__name__)
    return captured.guarded(captured.Guard(what, called, _cure), within)


def _cure(name: str) -> str:
    return f"Make it part of each member, return it from make; or say that it is constant: px.freeze({name})"
