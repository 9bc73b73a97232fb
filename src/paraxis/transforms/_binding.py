"""Modules bound to a wrapped function: split once, split again when an attribute was replaced, written back.

A call compares attributes by identity, in C, and reads each variable. So it sees ``eval()`` and ``train()``, replaced
variables, submodules and arrays, and attributes added and deleted. It cannot see a change within an attribute that NNX
takes for static, such as a mutable object of the user's.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import Variable

from paraxis._calls import pytrees
from paraxis._jax import jax_api
from paraxis._modules import graphs, naming
from paraxis.errors import StateError
from paraxis.transforms import _randomness


class Structure:
    """The graph of bound modules with its names and random streams; what every copy of the modules has alike."""

    def __init__(self, modules: tuple[Any, ...], graph: graphs.Graph) -> None:
        self.graph = graph
        self.names = naming.names_in(modules, graph.paths)
        self.streams = _randomness.streams(modules, graph)

    def emptied(self) -> "Structure":
        """Return the same without values, to be kept."""
        new = object.__new__(Structure)
        new.graph, new.names, new.streams = graphs.emptied(self.graph), self.names, self.streams
        return new


class Binding(Structure):
    """Bound modules as they were split. ``program``: what was compiled for this structure."""

    program: Any = None

    def __init__(self, modules: tuple[Any, ...], transform: str) -> None:
        super().__init__(modules, graphs.take_apart(modules))
        nodes = [node for _, node in graphs.nodes(modules)]
        self._dicts = [n if isinstance(n, dict) else vars(n) for n in nodes if isinstance(n, (dict, nnx.Pytree))]
        self._lists = [node for node in nodes if isinstance(node, list)]
        self._others = [n for n in nodes if not isinstance(n, (nnx.Pytree, Variable, list, tuple, dict))]
        self._keys, self._then = self._attributes()
        self.key = (self.graph.definition, self.graph.paths, tuple(map(type, self._then)))
        for variable, name in zip(self.graph.variables, self.names, strict=True):
            if variable.hijax or variable.ref:
                raise StateError(
                    f"{transform}: variable {name} holds a mutable array (ref=True or hijax=True), which does not pass "
                    f"through gradients and devices; make it a plain one: nnx.Param(value)"
                )

    def is_fresh(self) -> bool:
        """Return whether the modules still have the attributes that they had when they were split."""
        keys, now = self._attributes()
        return keys == self._keys and len(now) == len(self._then) and all(map(operator.is_, now, self._then))

    def _attributes(self) -> tuple[list[Any], list[Any]]:
        join = itertools.chain.from_iterable
        others = join(map(_parts, self._others)) if self._others else ()
        return [*join(self._dicts)], [*join(map(dict.values, self._dicts)), *join(self._lists), *others]

    def values(self) -> list[Any]:
        """Return what the variables hold."""
        return [v.get_raw_value() for v in self.graph.variables]

    def write(self, new: Mapping[int, Any], transform: str) -> None:
        """Write values back by their number, all or none.

        Raises:
            StateError: if they belong to a trace that the variables are not part of.
        """
        if any(issubclass(kind, jax_api.Tracer) for kind in set(map(type, jax.tree.leaves(list(new.values()))))):
            for index in new:
                if not graphs.is_writable(self.graph.variables[index]):
                    raise StateError(
                        f"{transform}: variable {self.names[index]} would be written inside a function that JAX is "
                        f"transforming and that it is not an argument of. Transform that with px.Jit, px.Vectorize or "
                        f"px.GradValues, and give it the module: px.Jit(f, net)"
                    )
        graphs.write(self.graph.variables, new)


def _parts(container: Any) -> list[Any]:
    """Return what a pytree that NNX does not know holds now, and what is static in it."""
    children, static = jax.tree_util.default_registry.flatten_one_level(container)
    return [*children, *(static if isinstance(static, tuple) else (static,))]


def run(
    transform: str,
    fn: Callable[..., Any],
    structure: Structure,
    state: tuple[Sequence[Any], Sequence[Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    prepare: Callable[[Any], None] = lambda modules: None,
) -> tuple[Any, dict[int, Any]]:
    """Call a function with modules that hold the values at hand.

    Args:
        transform: for errors.
        fn: what to call: with the modules first.
        structure: of its modules.
        state: values of their variables, and of arrays beside these.
        args: further arguments, sealed.
        kwargs: likewise.
        prepare: sets attributes of the modules of this run.

    Returns:
        What it returned, sealed, and the new values of the variables that it wrote, by their number.

    Raises:
        StateError: if it changed anything but values of variables, was given a module among its arguments, or returned
            a part of those that it was given.
    """
    refuse_modules(transform, args, kwargs)
    values, arrays = jax.tree.map(lambda x: x, state)  # containers of our own: a variable may hold a dict
    modules = structure.graph.put_together(values, arrays)
    prepare(modules)
    before = graphs.take_apart(modules)
    attributes = [(path, n, dict(vars(n))) for path, n in graphs.nodes(modules) if isinstance(n, nnx.Pytree)]
    args, kwargs = pytrees.opened((tuple(args), dict(kwargs)))
    returned = fn(*modules, *args, **kwargs)
    _refuse_own(transform, returned, modules)
    after = graphs.take_apart(modules)
    same = after.definition == before.definition and after.paths == before.paths
    if not (same and _is((*after.variables, *after.arrays), (*before.variables, *before.arrays))):
        raise StateError(_changed(transform, attributes))
    now = [v.get_raw_value() for v in before.variables]
    new = {i: x for i, x in enumerate(now) if not _is(jax.tree.leaves(x), jax.tree.leaves(values[i]))}
    return pytrees.sealed(returned), new


def refuse_modules(transform: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a module given when calling: it is split like any pytree, and writes to it would be lost."""
    for name, x in [*((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]:
        if graphs.holds_modules(x):
            raise StateError(
                f"{transform}: {name} is or holds a module; what is written to it would be lost. Bind modules when "
                f"wrapping, and leave them out when calling: px.{transform}(f, net)(x)"
            )


def _is(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _refuse_own(transform: str, returned: Any, modules: Any) -> None:
    """Refuse results that are parts of the modules: they would be copies, apart from the modules outside."""
    leaves = jax.tree.leaves(returned, is_leaf=lambda x: graphs.is_module(x) or isinstance(x, nnx.State))
    found = {id(x) for x in leaves if graphs.is_module(x)}
    for path, node in graphs.nodes(modules) if found else ():
        if id(node) in found:
            what = ".".join([type(modules[path[0]]).__name__, *map(str, path[1:])])
            raise StateError(
                f"{transform}: the function returned {what}, a part of what it was given; that would be a copy, apart "
                f"from the one outside. Use that one, to which writes are carried, or return values: variable[...], "
                f"nnx.state(module)"
            )


def _changed(transform: str, before: Sequence[tuple[Any, Any, dict[str, Any]]]) -> str:
    """Return which attribute a function set, and where to set it."""
    what = "changed the structure or the metadata of its modules"
    for path, node, old in before:
        new = vars(node)
        changed = [k for k in (*old, *new) if not k.startswith("_pytree__") and old.get(k, old) is not new.get(k, new)]
        if changed:
            where = f"({type(node).__name__})" if len(path) < 2 else ".".join(map(str, path[1:]))
            what = f"set attribute {changed[0]!r} of {where}"
            break
    return (
        f"{transform}: the function {what}; only values of variables are written back. Add and replace attributes, "
        f"call eval() or train(), set metadata, outside, before the call; keep values that change in an nnx.Variable: "
        f"self.count = nnx.Variable(jnp.array(0)), self.count[...] += 1; return what is not state"
    )
