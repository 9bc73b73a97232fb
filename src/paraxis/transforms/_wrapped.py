"""A function with the modules it works on, bound once: what Jit, Parallel, Vectorize and GradValues have in common."""

import dis
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
from flax import nnx

from paraxis._core import pytrees
from paraxis.errors import StateError, axis_advice
from paraxis.transforms import _modules

_WHOLE = (nnx.Pytree, nnx.Variable, nnx.State)
_NOTES = {"_pytree__state", "_pytree__nodes"}  # attributes that NNX keeps for itself

R = TypeVar("R", covariant=True)


class Body:
    """A function and its options, and the programs compiled for them: what the copies of a wrapped function share."""

    donate = False
    static: Any = None, None
    options: Any = None
    axis_advice = "it names no axis; combine its results outside, or write px.Parallel, whose axis is 'device'"

    def __init__(self, transform: str, fn: Callable[..., Any], name: str, signature: inspect.Signature) -> None:
        self.transform, self.fn, self.name, self.signature = transform, fn, name, signature
        self.programs: list[Any] = []

    def __getstate__(self) -> Any:
        return vars(self) | {"programs": []}


class Wrapped(Generic[R]):
    """Base of the wrapped functions: pytrees of their modules. Values stay where they are, in the modules."""

    _binding: "Binding | None" = None

    def __init__(self, f: Any, modules: tuple[Any, ...]) -> None:
        owner = f.__self__ if isinstance(f, types.MethodType) else f
        called = f
        if pytrees.is_nnx(owner) or pytrees.is_model(owner):
            f, modules = operator.call if owner is f else f.__func__, (owner, *modules)
        if modules and isinstance(f, jax.stages.Wrapped):
            who = type(self).__name__
            raise StateError(f"{who}: f is compiled by jax.jit already: its writes would be lost; give f.__wrapped__")
        try:
            bound = functools.partial(called, *modules[f is not called :])
            parameters = inspect.signature(bound).parameters.values()
        except (TypeError, ValueError):  # some built-in functions have none
            parameters = ()
        # Without annotations, of which some cannot be pickled.
        signature = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        name = str(getattr(called, "__name__", type(called).__name__))
        self._set(Body(type(self).__name__, f, name, signature), modules)
        self.binding()

    def _set(self, body: Body, modules: tuple[Any, ...]) -> Self:
        self._body, self.modules, self.__name__, self.__signature__ = body, modules, body.name, body.signature
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_pytree_with_keys_class(cls)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Body]:
        return [(jax.tree_util.SequenceKey(i), m) for i, m in enumerate(self.modules)], self._body

    @classmethod
    def tree_unflatten(cls, body: Body, modules: Iterable[Any]) -> Self:
        return object.__new__(cls)._set(body, tuple(modules))

    def __deepcopy__(self, memo: Any) -> Self:
        return nnx.clone(self, graph=True)

    def __reduce__(self) -> Any:
        return self.tree_unflatten, (self._body, self.modules)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([self.__name__, *(type(m).__name__ for m in self.modules)])})"

    def binding(self) -> "Binding":
        """Return the modules split as they are now."""
        if self._binding is None or not self._binding.is_fresh():
            self._binding = Binding(self.modules)
        return self._binding


def refuse_outside(body: Body, code: types.CodeType | None = None) -> None:
    """Refuse a module from outside, whose values would be constants in silence; ``net.bias.shape`` may be read.

    It may be in the function's closure, globals, defaults or partial arguments, or in the object whose method it is.
    """
    fn = body.fn
    while isinstance(fn, functools.partial):
        refuse_modules(body.transform, (fn.args, fn.keywords))
        fn = fn.func
    owner, fn = getattr(fn, "__self__", None), getattr(fn, "__func__", fn)
    if not inspect.isfunction(fn):
        return
    refuse_modules(body.transform, (fn.__defaults__, fn.__kwdefaults__))
    owners = {} if owner is None else {fn.__code__.co_varnames[0]: owner}
    scopes = {"LOAD_GLOBAL": fn.__globals__, "LOAD_DEREF": {**inspect.getclosurevars(fn).nonlocals, **owners}}
    name, x = "", None
    for step in dis.get_instructions(code or fn.__code__):
        is_read = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if is_read and x is not None and x is owner:
            name, x = f"{name}.{step.argval}", inspect.getattr_static(x, step.argval, None)
        elif is_read and _holds_module(x):
            held, x = x, getattr(x, step.argval, None)
            x = held if isinstance(getattr(x, "__self__", x), jax.Array) else x
        elif _holds_module(x):
            raise StateError(
                f"{body.transform}: {fn.__name__!r} uses {name!r} from outside, a module, whose values would be "
                f"constants there. Give it as an argument, px.{body.transform}(lambda net, …: …, {name}); if a "
                f"constant is meant, write jax.jit(lambda x: net(x))"
            )
        else:
            is_local = step.opname.startswith("LOAD_FAST")  # of one, or of a pair
            name = step.argval[-1] if is_local and isinstance(step.argval, tuple) else step.argval
            x = (owners if is_local else scopes.get(step.opname, {})).get(name)
    for inner in filter(inspect.iscode, (code or fn.__code__).co_consts):
        refuse_outside(body, inner)


def _holds_module(x: Any) -> bool:
    """Return whether a thing, or the one whose method it is, is a module, or a list or dict of some."""
    x = getattr(x, "__self__", x)
    items = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else (x,)
    return any(isinstance(item, Wrapped) or pytrees.is_nnx(item) for item in items)


class Binding:
    """Modules split, and what tells whether one of their attributes was replaced since: compared by identity, in C.

    It sees ``eval()`` and ``train()``, replaced variables, submodules and arrays, attributes added and deleted. It
    cannot see a change within an attribute that is static to NNX.
    """

    program: Any = None  # what was compiled for this structure

    def __init__(self, modules: tuple[Any, ...]) -> None:
        self.graph, nodes = _modules.split(modules), [*_modules.nodes(modules)]
        held = [n for n in nodes if hasattr(n, "__dict__") and not isinstance(n, (nnx.Variable, Wrapped))]
        self._dicts = [*map(vars, held), *(n for n in nodes if isinstance(n, dict))]
        self._lists = [n for n in nodes if isinstance(n, list)]
        self._watched = [name not in _NOTES for d in self._dicts for name in d]
        self._sizes, self._attributes = self._now()
        types = sorted(type(x).__name__ for x in self._attributes)  # 1 is equal to True
        self.key = self.graph.definition, self.graph.paths, types

    def is_fresh(self) -> bool:
        sizes, attributes = self._now()
        return sizes == self._sizes and same(attributes, self._attributes)

    def _now(self) -> tuple[list[int], list[Any]]:
        values = itertools.chain.from_iterable(map(dict.values, self._dicts))
        attributes = [*itertools.compress(values, self._watched), *itertools.chain(*self._lists)]
        return [*map(len, [*self._dicts, *self._lists])], attributes


def run(
    body: Body,
    graph: _modules.Graph,
    state: tuple[Sequence[Any], Sequence[Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    prepare: Callable[[Any], None] = lambda modules: None,
) -> tuple[Any, dict[int, Any]]:
    """Call a function of modules that hold the values at hand, and of further arguments, partitioned.

    Returns its result, partitioned, and the new values of the variables that it wrote, by their number.
    """
    refuse_modules(body.transform, (args, kwargs))
    values, arrays = jax.tree.map(lambda x: x, state)  # containers of our own: a variable may hold a dict
    modules = graph.merged(values, arrays)
    prepare(modules)
    before, nodes = _modules.split(modules), [n for n in _modules.nodes(modules) if pytrees.is_nnx(n)]
    attributes = [(n, dict(vars(n))) for n in nodes if isinstance(n, nnx.Pytree)]
    args, kwargs = pytrees.combine((tuple(args), dict(kwargs)))
    with axis_advice(f"{body.transform}: {body.axis_advice}"):
        returned = body.fn(*modules, *args, **kwargs)
    ours = {*map(id, nodes)}
    if any(id(x) in ours for x in jax.tree.leaves(returned, is_leaf=lambda x: isinstance(x, _WHOLE))):
        copied = "a module that it was given, or a part of one, as a copy"
        raise StateError(f"{body.transform}: the function returned {copied}; return variable[...] or nnx.state(module)")
    after = _modules.split(modules)
    alike = after.definition == before.definition and after.paths == before.paths
    if not (alike and same((*after.variables, *after.arrays), (*before.variables, *before.arrays))):
        changed = {k for n, old in attributes for k in old | vars(n) if vars(n).get(k, n) is not old.get(k, n)}
        names = ", ".join(sorted(changed - _NOTES)) or "metadata"
        raise StateError(
            f"{body.transform}: the function set attribute {names}; set it, and call eval() or train(), outside; or "
            f"write self.count = nnx.Variable(jnp.array(0)), self.count[...] += 1"
        )
    new = {i: x for i, x in enumerate(before.values()) if not same(jax.tree.leaves(x), jax.tree.leaves(values[i]))}
    return pytrees.partition(returned), new


def refuse_modules(transform: str, args: Any) -> None:
    """Refuse a module given when calling: it is split like any pytree, and writes to it would be lost."""
    if any(map(pytrees.is_nnx, jax.tree.leaves(args, is_leaf=pytrees.is_nnx))):
        line = f"px.{transform}(f, net)(x)"
        raise StateError(f"{transform}: an argument is or holds a module, whose new values would be lost; write {line}")


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))
