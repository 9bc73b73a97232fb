"""Modules bound to a wrapped function: taken apart once, looked at again at each call, taken apart anew if changed.

A call costs one comparison by identity per attribute, made in C, and the reading of each variable. What it finds:
``eval()`` and ``train()``, replaced variables, submodules, containers and arrays, attributes added and deleted. What
it cannot find is a change within an attribute that NNX takes for static, such as a user's own mutable object.
"""

import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import Variable

from paraxis._calls import pytrees
from paraxis._jax import jax_api
from paraxis._modules import graphs, naming, reads
from paraxis.errors import StateError
from paraxis.transforms import _frames, _metrics, _randomness

_KEPT = 4  # structures whose marks are kept: train and eval, and a few more


_EQUAL_IS_SAME = (str, type(None), type, types.FunctionType, graphs.Bookkeeping)
"""Types that may be compared by equality, which is quicker. A variable is equal to another of the same value, 1 to
True, 0.0 to -0.0; so all the rest is compared by identity."""


class Binding:
    """Modules with one structure. ``compiled``: what a transform made for it, if it has."""

    @reads.unnoticed()
    def __init__(self, modules: tuple[Any, ...], transform: str) -> None:
        self.graph = graphs.take_apart(modules)
        self.names = naming.names_in(modules, self.graph.paths)
        self.streams = _randomness.streams(modules, self.graph)
        self.metrics = _metrics.found(modules, self.graph)
        self.compiled: Any = None
        self._transform = transform
        nodes = [node for _, node in graphs.nodes(modules)]
        self._dicts = [n if isinstance(n, dict) else vars(n) for n in nodes if isinstance(n, (dict, nnx.Pytree))]
        self._lists = [node for node in nodes if isinstance(node, list)]
        self._containers = graphs.containers(modules)
        self._dicts_then = [dict(d) for d in self._dicts]
        self._metadata = graphs.metadata(self.graph.variables)
        self._metadata_then = [dict(metadata) for metadata in self._metadata]
        self._lists_then = [tuple(items) for items in self._lists]
        self._containers_then = [graphs.parts(x) for x in self._containers]
        watched = [(d, [k for k, x in d.items() if not isinstance(x, _EQUAL_IS_SAME)]) for d in self._dicts]
        self._watched = [d for d, keys in watched if keys]
        self._look = [operator.itemgetter(*keys, keys[0]) for _, keys in watched if keys]  # two at least give a tuple
        self._seen_then = list(self._seen())
        self.key = (
            self.graph.definition,
            self.graph.paths,
            tuple(_exact_numbers([*self._dicts, *self._lists, *self._containers_then])),
        )
        for variable, name in zip(self.graph.variables, self.names, strict=True):
            if graphs.is_reference(variable):
                raise StateError(
                    f"{transform}: variable {name} holds a mutable array (ref=True or hijax=True), which does not pass "
                    f"through gradients and devices; make it a plain one: nnx.Param(value)"
                )

    def is_fresh(self) -> bool:
        """Return whether the modules are what they were when they were taken apart. All comparisons run in C."""
        try:
            return (
                all(map(operator.is_, self._seen(), self._seen_then))
                and (self._dicts == self._dicts_then or self._only_bookkeeping_changed())
                and (not self._lists or all(map(_same, self._lists, self._lists_then)))
                and self._metadata == self._metadata_then
                and (not self._containers or all(map(_same_parts, self._containers, self._containers_then)))
            )
        except KeyError:  # an attribute is gone
            return False

    def _seen(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(_apply, self._look, self._watched))

    def _only_bookkeeping_changed(self) -> bool:
        """NNX's own transforms give each module a new trace state."""
        for now, then in zip(self._dicts, self._dicts_then, strict=True):
            if now != then and now != then | {graphs.TRACE_STATE: now.get(graphs.TRACE_STATE)}:
                return False
        self._dicts_then = [dict(d) for d in self._dicts]
        return True

    def variables(self) -> Sequence[Variable[Any]]:
        """Return the variables to read and write here."""
        return _frames.resolved(self.graph.variables, self.names, self._transform)


class Bound:
    """The modules of one wrapped function.

    Args:
        modules: NNX modules and what holds them; and pytrees that can be called, which in ``self.modules`` are sealed.
        transform: who asks, for errors.
    """

    def __init__(self, modules: tuple[Any, ...], transform: str) -> None:
        self.given = modules
        self._pytrees = [(x, _parts(x)) for x in pytrees.found_in(modules)]
        self.modules = tuple(map(pytrees.sealed, modules))
        self._transform = transform
        self._compiled: dict[Any, Any] = {}
        self._bindings: list[Binding] = []
        self.current()

    def current(self) -> Binding:
        """Return the binding for the structure that the modules have now."""
        if self._pytrees:
            self._look_again()
        for place, binding in enumerate(self._bindings):
            if binding.is_fresh():
                if place:
                    self._bindings = [binding, *(b for b in self._bindings if b is not binding)]
                return binding
        return self._bind()

    def _look_again(self) -> None:
        """Take pytrees apart anew whose parts are others now: their class may allow it."""
        now = [(x, _parts(x)) for x, _ in self._pytrees]
        pairs = zip(self._pytrees, now, strict=True)
        if any(not _same(old, new) or then != rest for (_, (old, then)), (_, (new, rest)) in pairs):
            self._pytrees, self._bindings = now, []
            self.modules = tuple(map(pytrees.sealed, self.given))
            if any(isinstance(x, tuple) for x in self.given):  # a wrapped function's, which it reads by itself
                self._compiled.clear()

    def _bind(self) -> Binding:
        binding = Binding(self.modules, self._transform)
        # Others with the same variables only, so that replaced ones are not kept alive.
        same = [b for b in self._bindings if _same(b.graph.variables, binding.graph.variables)]
        self._bindings = [binding, *same][:_KEPT]
        return binding

    def compiled(self, binding: Binding, compile: Callable[[], Any]) -> Any:  # noqa: A002
        """Return what ``compile`` makes for a structure, once for each."""
        if binding.compiled is None:
            try:
                if binding.key not in self._compiled:
                    self._compiled[binding.key] = compile()
                binding.compiled = self._compiled[binding.key]
            except TypeError:  # a static attribute that cannot be hashed: nothing to remember it by
                binding.compiled = compile()
        return binding.compiled


def _parts(pytree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(pytree)


_apply: Any = operator.call


def _exact_numbers(x: Any) -> Iterator[str]:
    """Return the numbers in attributes and containers, told apart where ``==`` does not: 1, 1.0, True; 0.0, -0.0."""
    if isinstance(x, (bool, int, float, complex)):
        yield repr(x)
    elif isinstance(x, (tuple, list, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _exact_numbers(item)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _same_parts(container: Any, then: tuple[Any, ...]) -> bool:
    *children, fixed = graphs.parts(container)
    return _same(children, then[:-1]) and (fixed is then[-1] or fixed == then[-1])


def write_all(binding: Binding, variables: Sequence[Variable[Any]], new: dict[int, Any], transform: str) -> None:
    """Write values back, all or none.

    Raises:
        StateError: if they belong to a trace that the variables are not part of.
    """
    if new and _is_traced(new):
        for index in new:
            if not graphs.is_writable(variables[index]):
                raise StateError(
                    f"{transform}: variable {binding.names[index]} would be written inside a function that JAX is "
                    f"transforming and that it is not an argument of. Transform that with px.Jit, px.Vectorize or "
                    f"px.grad, and give it the module: px.Jit(f, net), px.grad(f, argnums=1)(net, x)"
                )
    graphs.write(variables, new)


def _is_traced(new: dict[int, Any]) -> bool:
    kinds = set(map(type, new.values()))
    if all(issubclass(kind, jax.Array) and not issubclass(kind, jax_api.Tracer) for kind in kinds):
        return False
    return any(isinstance(leaf, jax_api.Tracer) for leaf in jax.tree.leaves(list(new.values())))
