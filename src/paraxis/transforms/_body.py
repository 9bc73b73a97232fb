"""One run of a wrapped function on modules that hold the values at hand."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from paraxis._calls import pytrees
from paraxis._modules import captured, graphs
from paraxis.errors import StateError
from paraxis.transforms import _frames
from paraxis.transforms._binding import Binding


@dataclasses.dataclass(frozen=True)
class Body:
    """A function and how it is called: ``pass_on`` turns the modules of a run into its first arguments.

    ``guard``: modules that it is not given are an error, which says this. Without it they are constants.
    """

    transform: str
    fn: Callable[..., Any]
    pass_on: Callable[[Sequence[Any]], Sequence[Any]]
    sealed: bool
    guard: captured.Guard | None = None


def run(
    body: Body,
    binding: Binding,
    state: tuple[Sequence[Any], Sequence[Any]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[int, Any]]:
    """Call the function.

    Args:
        body: what to call.
        binding: the structure of its modules.
        state: values of their variables and arrays.
        args: further arguments, sealed.
        kwargs: likewise.

    Returns:
        What it returned, sealed, and the new values of the variables that it wrote, by their number.

    Raises:
        StateError: if it changed anything but values of variables, was given a module among its arguments, used one
            that it was not given, or returned a part of those that it was given.
    """
    refuse_modules(body.transform, args, kwargs)
    values, arrays = jax.tree.map(lambda x: x, state)  # containers of our own: a variable may hold a dict
    modules = binding.graph.put_together(values, arrays)
    graph = graphs.take_apart(modules)
    before = _attributes(modules)
    metadata = [v.get_metadata() for v in graph.variables]
    held = [jax.tree.leaves(value) for value in values]
    inner = {id(v): w for v, w in zip(binding.variables(), graph.variables, strict=True)}
    with _frames.entered(_frames.Frame(body.transform, inner, body.sealed)):
        args, kwargs = pytrees.opened((args, kwargs))
        returned = captured.run(body.guard, body.fn, (*body.pass_on(modules), *args), kwargs)
        _refuse_own(body.transform, returned, modules)
        result = pytrees.sealed(returned)
    for variable, old, name in zip(graph.variables, metadata, binding.names, strict=True):
        if variable.get_metadata() != old:
            raise StateError(
                f"{body.transform}: the function changed the metadata of {name}; set it outside, before the call: "
                f"variable.set_metadata(…)"
            )
    _require_same_structure(body.transform, modules, graph, before)
    now = [graphs.value(v) for v in graph.variables]
    return result, {i: new for i, new in enumerate(now) if not _is(jax.tree.leaves(new), held[i])}


def refuse_modules(transform: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a module given when calling: it is taken apart like any pytree, and writes to it would be lost."""
    for name, x in [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]:
        if graphs.holds_modules(x):
            raise StateError(
                f"{transform}: {name} is or holds a module; what is written to it would be lost. Bind modules when "
                f"wrapping, and leave them out when calling: px.{transform}(f, net)(x)"
            )


def _refuse_own(transform: str, returned: Any, modules: Sequence[Any]) -> None:
    """Refuse results that are parts of the modules: they would be copies, apart from the modules outside."""
    leaves = jax.tree.leaves(returned, is_leaf=lambda x: graphs.is_module(x) or graphs.is_state(x))
    found = {id(x) for x in leaves if graphs.is_module(x)}
    if not found:
        return
    for path, node in graphs.nodes(modules):
        if id(node) in found:
            what = ".".join([type(modules[path[0]]).__name__, *map(str, path[1:])])
            raise StateError(
                f"{transform}: the function returned {what}, a part of what it was given; that would be a copy, apart "
                f"from the one outside. Use that one, to which writes are carried, or return values: variable[...], "
                f"nnx.state(module)"
            )


def _is(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _attributes(modules: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    return [(path, node, dict(vars(node))) for path, node in graphs.nodes(modules) if isinstance(node, nnx.Pytree)]


def _require_same_structure(
    transform: str, modules: Any, graph: graphs.Graph, before: Sequence[tuple[Any, Any, dict[str, Any]]]
) -> None:
    after = graphs.take_apart(modules)
    if (
        after.definition == graph.definition
        and after.paths == graph.paths
        and _is(after.variables, graph.variables)
        and _is(after.arrays, graph.arrays)
    ):
        return
    where, what = "the modules", "their structure"
    for path, node, old in before:
        new = vars(node)
        changed = [k for k in (*old, *new) if not k.startswith("_pytree__") and old.get(k, old) is not new.get(k, new)]
        if changed:
            where = f"({type(node).__name__})" if len(path) < 2 else f"{'.'.join(map(str, path[1:]))}"
            what = f"{changed[0]!r}"
            break
    raise StateError(
        f"{transform}: the function set attribute {what} of {where}; only values of variables are written back. "
        f"Add and replace attributes, call eval() or train(), outside, before the call; keep values that change in an "
        f"nnx.Variable: self.count = nnx.Variable(jnp.array(0)), self.count[...] += 1; return what is not state"
    )
