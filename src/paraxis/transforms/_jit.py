"""``Jit``: a function of modules, compiled, with their variables threaded through."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from paraxis.transforms import _binding
from paraxis.transforms._binding import Structure
from paraxis.transforms._compiled import Compiled, State
from paraxis.transforms._wrapped import Body

_R = TypeVar("_R", covariant=True)


class Jit(Compiled[_R], Generic[_R]):
    """Compile a function that works on modules: ``jax.jit`` with their variables threaded through.

    The modules are bound once and passed first: ``px.Jit(f, net, opt)(x)`` calls ``f(net, opt, x)``;
    ``px.Jit(net)(x)`` calls ``net(x)``. They keep their variables. The next call sees edits made outside, without
    compiling again. Values that the function writes are written back once, after it has succeeded. A variable that two
    modules share stays shared. ``eval()`` and ``train()``, replaced variables and replaced submodules are noticed as
    well; each structure is compiled once. Everything else that the function reads is read when it is traced, as by
    ``jax.jit``.

    Args:
        f: a function of modules and further arguments; or a module, or a method of one.
        *modules: NNX modules, optimisers (``nnx.Optimizer`` too), ``nnx.Rngs``, variables, containers of these, or
            functions that are wrapped already; and callable pytrees, such as Equinox modules, to which nothing is
            written back.
        static_argnums: positions, counted after the modules, of arguments that are compile-time constants (hashable).
        static_argnames: their names.
        donate: whether the compiler may reuse the variables' memory. Arrays that you took out of the variables before
            a call are then deleted by it, and an exception while it runs loses the variables' values.

    Raises:
        StateError: if ``f`` names a module from its closure or globals that it was not given (its values would become
            constants in silence); and when called, if it changes more than the values of variables, or returns a part
            of the modules (which would be a copy, apart from the one outside).

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

    def __init__(
        self,
        f: Callable[..., _R],
        *modules: Any,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate: bool = False,
    ) -> None:
        super().__init__(f, modules, static_argnums, static_argnames, donate)

    @staticmethod
    def _run(
        body: Body, structure: Structure, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Any], Any]:
        result, new = _binding.run(body.transform, body.fn, structure, state, args, kwargs)
        return new, result
