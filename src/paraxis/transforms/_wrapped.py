"""A function with the modules it works on, bound once: what Jit, Parallel, Vectorize and GradValues have in common."""

import contextlib
import contextvars
import dis
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import jax
from flax import nnx

from paraxis._calls import pytrees
from paraxis._jax import jax_api
from paraxis._modules import graphs
from paraxis.errors import StateError
from paraxis.transforms._binding import Binding

_JITTED = type(jax.jit(lambda: None))

_R = TypeVar("_R", covariant=True)

_within: contextvars.ContextVar[str | None] = contextvars.ContextVar("paraxis_within", default=None)
"""The transform that runs its function, and has to be given what that uses."""


@contextlib.contextmanager
def running(transform: str) -> Iterator[None]:
    """Within, a wrapped function that holds values from outside is refused."""
    token = _within.set(transform)
    try:
        yield
    finally:
        _within.reset(token)


class Statics(NamedTuple):
    """The arguments that are compile-time constants, by position and by name."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()


class Body:
    """A function and its options, and the programs compiled for them: what the copies of a wrapped function share."""

    static = Statics()
    donate = False
    options: Any = None
    """Those of the transform alone."""

    def __init__(self, transform: str, fn: Callable[..., Any], given: Sequence[Any]) -> None:
        self.transform, self.fn = transform, fn
        called = given[0] if fn is call else fn
        self.name = getattr(called, "__name__", type(called).__name__)
        self.programs: dict[Any, Any] = {}

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __getstate__(self) -> Any:
        return vars(self) | {"programs": {}}


class Wrapped(graphs.Holder, Generic[_R]):
    """Base of the wrapped functions: pytrees of their modules. Values stay where they are, in the modules."""

    _binding: Binding | None = None

    def __init__(self, f: Any, modules: tuple[Any, ...]) -> None:
        name = type(self).__name__
        fn, given = _target(f, modules)
        if given and isinstance(fn, _JITTED):
            raise StateError(
                f"{name}: f is compiled by jax.jit already, through which nothing that is written to a module comes "
                f"back; give the function itself: px.{name}({getattr(fn, '__name__', 'f')}.__wrapped__, net)"
            )
        if not callable(fn):
            raise StateError(f"{name}: f must be a function or a module, got {type(f).__name__}; write px.{name}(net)")
        for position, module in enumerate(given):
            if not (isinstance(module, Wrapped) or graphs.holds_modules(module) or pytrees.is_model(module)):
                raise StateError(
                    f"{name}: modules[{position}] is a {type(module).__name__} without variables. Bind modules only, "
                    f"NNX modules or pytrees that can be called: px.{name}(f, net, …). Give plain arrays when calling: "
                    f"f(net, params, x)"
                )
        self._body, self.modules = Body(name, fn, given), given
        self.__name__ = self._body.name
        signature = _signature(fn, given)
        if signature is not None:
            self.__signature__ = signature
        self.binding()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_pytree_with_keys(
            cls, _keys_and_modules, cls._of, lambda self: (self.modules, self._body)
        )

    @classmethod
    def _of(cls, body: Body, modules: Iterable[Any]) -> Self:
        self = object.__new__(cls)
        self._body, self.modules = body, tuple(modules)
        self.__name__ = body.name
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return nnx.clone(self, graph=True)

    def __reduce__(self) -> Any:
        return type(self)._of, (self._body, self.modules)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([self.__name__, *(type(m).__name__ for m in self.modules)])})"

    def binding(self) -> Binding:
        """Return the modules split as they are now."""
        binding = self._binding
        if binding is None or not binding.is_fresh():
            binding = self._binding = Binding(self.modules, type(self).__name__)
        within = _within.get()
        if within is not None and _is_from_outside(binding):
            raise StateError(
                f"{type(self).__name__}: {self!r} is used inside a function of {within}, which was not given it, so "
                f"its values would be constants there. Give it as an argument: px.{within}(f, wrapped, …)"
            )
        return binding


def _keys_and_modules(wrapped: Wrapped[Any]) -> tuple[list[tuple[Any, Any]], Body]:
    return [(jax.tree_util.SequenceKey(i), m) for i, m in enumerate(wrapped.modules)], wrapped._body


def _target(f: Any, modules: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the function to call and what it is called with first."""
    if isinstance(f, types.MethodType) and (graphs.is_module(f.__self__) or pytrees.is_model(f.__self__)):
        return f.__func__, (f.__self__, *modules)
    if graphs.is_module(f) or pytrees.is_model(f):
        return call, (f, *modules)
    return f, modules


def _signature(fn: Callable[..., Any], given: Sequence[Any]) -> inspect.Signature | None:
    """Return how the wrapped function is called: without the modules, which are bound."""
    target, taken = (given[0], len(given) - 1) if fn is call else (fn, len(given))
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some built-in functions have none
        return None
    parameters = list(signature.parameters.values())
    free = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:taken]
    return signature.replace(parameters=[p for p in parameters if p not in free])


def call(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _is_from_outside(binding: Binding) -> bool:
    values = jax.tree.leaves(binding.values())
    return bool(values) and all(isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) for x in values)


def refuse_outside(transform: str, fn: Any) -> None:
    """Refuse a module that a function takes from its closure or globals: its values would be constants, in silence.

    Sizes and dtypes of it, such as ``net.kernel.shape``, may be read.
    """
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    scopes = {"LOAD_GLOBAL": fn.__globals__, "LOAD_DEREF": {name: _content(cell) for name, cell in cells}}
    for name, x in _modules_read(fn.__code__, scopes):
        if _owner(x) is not None:
            raise StateError(
                f"{transform}: {fn.__name__!r} uses {name!r}, a {type(_owner(x)).__name__}, from outside; its values "
                f"would be constants there. Give it as an argument, px.{transform}(lambda net, …: "
                f"…, {name}); if a constant is meant, write jax.jit(lambda x: net(x))"
            )


def _modules_read(code: types.CodeType, scopes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names of modules that a function's code reads, and what it takes of them at once by attributes."""
    name, x = "", None
    for instruction in dis.get_instructions(code):
        if _owner(x) is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            x = getattr(x, instruction.argval, None)
            continue
        yield name, x
        name, x = instruction.argval, scopes.get(instruction.opname, {}).get(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _modules_read(inner, scopes)


def _owner(x: Any) -> Any:
    """Return the module that a value is, or is a method of; ``None``: neither."""
    x = x.__self__ if isinstance(x, types.MethodType) else x
    return x if isinstance(x, Wrapped) or graphs.is_module(x) else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
