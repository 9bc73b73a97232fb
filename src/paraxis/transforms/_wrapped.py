"""A function with the modules it works on, bound once: what Jit, Parallel, Vectorize and GradValues have in common."""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import jax

from paraxis._calls import pytrees
from paraxis._modules import captured, graphs
from paraxis.errors import StateError
from paraxis.transforms._binding import Bound
from paraxis.transforms._body import Body
from paraxis.transforms._freeze import Frozen
from paraxis.transforms._statics import named, positional

_JITTED = type(jax.jit(lambda: None))


_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)
Of1 = Callable[Concatenate[Any, _P], _R]
Of2 = Callable[Concatenate[Any, Any, _P], _R]
Of3 = Callable[Concatenate[Any, Any, Any, _P], _R]
"""Functions of so many modules, and of what a wrapped function is called with."""


class Wrapped(graphs.Holder, Generic[_P, _R]):
    """Base of the wrapped functions. It holds modules, not values: these stay where they are, in the modules."""

    sealed = False
    """True if the function is compiled, so that a value from outside would be frozen in it."""

    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        self = super().__new__(cls)
        self._made_of = args, options
        return self

    def __init__(self, f: Callable[..., Any], modules: tuple[Any, ...]) -> None:
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
            _require_module(name, position, module)
        self._fn, self._given = fn, given
        called = type(given[0]).__name__ if fn is call else getattr(fn, "__name__", type(fn).__name__)
        guard = captured.Guard(name, called, _cure(name))
        self._body = Body(name, fn, self._pass_on, self.sealed, guard)
        self._bound = Bound(tuple(map(_contents, given)), name)
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__doc__ = getattr(fn, "__doc__", None)
        if fn is not call:
            self.__wrapped__ = fn
        signature = _signature(fn, given)
        if signature is not None:
            self.__signature__ = signature

    @property
    def modules(self) -> tuple[Any, ...]:
        """The modules that are bound, those of wrapped functions among them as well."""
        return tuple(m for module in self._bound.given for m in (module if isinstance(module, tuple) else (module,)))

    def __reduce__(self) -> Any:
        """Wrap a copy anew: a shallow one has the same modules, a deep or a pickled one copies of them."""
        return _made, (type(self), *self._made_of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        args, options = graphs.deep_copy(self._made_of, memo)
        return type(self)(*args, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([self.__name__, *(type(m).__name__ for m in self.modules)])})"

    def _pass_on(self, modules: Sequence[Any]) -> list[Any]:
        """Return the function's first arguments: a module of this run. A wrapped function finds its variables."""
        kept = (Wrapped, Frozen)
        own_or_new = zip(self._given, modules, strict=True)
        return [own if isinstance(own, kept) else pytrees.opened(new) for own, new in own_or_new]

    def _parameters(self) -> list[str]:
        """Return the names of the positional parameters after the modules."""
        if self._fn is not call:
            return positional(self._fn)[len(self._given) :]
        first = self._given[0]
        if isinstance(first, Wrapped):
            return first._parameters()[len(self._given) - 1 :]
        return positional(first.__call__)[len(self._given) - 1 :]

    def _names_taken(self) -> list[str] | None:
        """Return the names by which it takes arguments after the modules; ``None``: any, or that cannot be known."""
        if self._fn is not call:
            return named(self._fn)
        first = self._given[0]
        return first._names_taken() if isinstance(first, Wrapped) else named(first.__call__)


def _made(kind: type[Wrapped], args: Sequence[Any], options: dict[str, Any]) -> Wrapped:
    return kind(*args, **options)


def _target(f: Any, modules: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function to call and what it is called with first."""
    if isinstance(f, types.MethodType) and _is_bindable(f.__self__):
        return f.__func__, (f.__self__, *modules)
    if _is_bindable(f) or isinstance(f, (Wrapped, Frozen)):
        return call, (f, *modules)
    return f, modules


def _is_bindable(x: Any) -> bool:
    """Return whether an object has values of its own: an NNX module, or a pytree that can be called."""
    return graphs.is_module(x) or pytrees.is_model(x)


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


def _cure(transform: str) -> Callable[[str], str]:
    return lambda name: (
        f"Give it as an argument, px.{transform}(lambda net, …: …, {name}), or say that it is constant: "
        f"px.freeze({name})"
    )


def _contents(given: Any) -> Any:
    if isinstance(given, Wrapped):
        return given._bound.given
    return () if isinstance(given, Frozen) else given


def _require_module(transform: str, position: int, module: Any) -> None:
    if isinstance(module, (Wrapped, Frozen)) or graphs.holds_modules(module) or pytrees.is_model(module):
        return
    raise StateError(
        f"{transform}: modules[{position}] is a {type(module).__name__} without variables. Bind modules only, NNX "
        f"modules or pytrees that can be called: px.{transform}(f, net, …). Give plain arrays when calling: "
        f"f(net, params, x)"
    )
