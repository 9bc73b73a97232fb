"""``Jit``: a function of modules, compiled, with their variables threaded through."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from paraxis._calls import arguments
from paraxis.transforms import _body
from paraxis.transforms._binding import Binding
from paraxis.transforms._compiled import Compiled, CompiledOptions, State
from paraxis.transforms._wrapped import Of1, Of2, Of3

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)


class Jit(Compiled[_P, _R], Generic[_P, _R]):
    """Compile a function that works on modules: ``jax.jit`` with their variables threaded through.

    The modules are bound once and passed first: ``px.Jit(f, net, opt)(x)`` calls ``f(net, opt, x)``;
    ``px.Jit(net)(x)`` calls ``net(x)``. They keep their variables. The next call sees edits made outside, without
    compiling again. Values that the function writes are written back once, after it has succeeded. A variable that two
    modules share stays shared. ``eval()`` and ``train()``, replaced variables and replaced submodules are noticed as
    well; each structure is compiled once.

    Args:
        f: a function of modules and further arguments; or a module, or a method of one.
        *modules: NNX modules, optimisers, ``nnx.Rngs``, variables, containers of these, or functions that are
            wrapped already; and callable pytrees, such as Equinox modules, to which nothing is written back.
        static_argnums: positions, counted after the modules, of arguments that are compile-time constants (hashable).
        static_argnames: their names.
        donate: whether the compiler may reuse the variables' memory. Arrays that you took out of the variables before
            a call are then deleted by it, and an exception while it runs loses the variables' values.

    Raises:
        StateError: when called, if ``f`` uses a module that it was not given, in whatever way (its values would
            silently become constants), changes more than the values of variables, or returns a part of the modules
            (which would be a copy, apart from the one outside); or if a static argument is not hashable.

    Without ``donate``, all variables are unchanged after an exception. Inside your own ``jax.jit``, a wrapped function
    reads its variables once, while that is traced.

    Communicates: what ``f`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> fast = px.Jit(net)
        >>> x = jnp.ones((4, 2))
        >>> net.bias[...] += 1.0
        >>> bool(jnp.allclose(fast(x), net(x)))
        True
    """

    @overload
    def __init__(self, f: Callable[_P, _R], /, **options: Unpack[CompiledOptions]) -> None: ...
    @overload
    def __init__(self, f: Of1[_P, _R], m0: Any, /, **options: Unpack[CompiledOptions]) -> None: ...
    @overload
    def __init__(self, f: Of2[_P, _R], m0: Any, m1: Any, /, **options: Unpack[CompiledOptions]) -> None: ...
    @overload
    def __init__(self, f: Of3[_P, _R], m0: Any, m1: Any, m2: Any, /, **options: Unpack[CompiledOptions]) -> None: ...
    @overload
    def __init__(self: "Jit[..., Any]", f: Any, /, *modules: Any, **options: Unpack[CompiledOptions]) -> None: ...
    @arguments.named()
    def __init__(
        self,
        f: Callable[..., Any],
        *modules: Any,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate: bool = False,
    ) -> None:
        super().__init__(f, modules, static_argnums, static_argnames, donate)

    def _run(self, binding: Binding, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result, new = _body.run(self._body, binding, state, args, kwargs)
        return new, result
