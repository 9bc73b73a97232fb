"""``Jit``: a function of modules, compiled, with their variables threaded through."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from paraxis._core import pytrees
from paraxis.transforms._modules import Graph
from paraxis.transforms._wrapped import Binding, Body, R, Wrapped, refuse_outside, run


class Jit(Wrapped[R]):
    """Compile a function that works on modules: ``jax.jit`` with their variables threaded through.

    The modules are bound once and passed first: ``px.Jit(f, net, opt)(x)`` calls ``f(net, opt, x)``;
    ``px.Jit(net)(x)`` calls ``net(x)``. They keep their variables. The next call sees edits made outside, without
    compiling again, and ``eval()``, ``train()``, replaced variables and submodules; each structure is compiled once.
    Values that the function writes are written back once, after it has succeeded; after an exception, all variables
    are unchanged. Everything else that the function reads is read when it is traced, as by ``jax.jit``.
    ``nnx.jit_partial`` binds modules likewise, but to one structure, and reads each variable in Python.

    Args:
        f: a function of modules and further arguments; or a module, or a method of one.
        *modules: NNX modules, optimisers (``nnx.Optimizer`` too), ``nnx.Rngs``, variables, containers of these, wrapped
            functions; and callable pytrees, such as Equinox modules, to which nothing is written back.
        static_argnums, static_argnames: arguments that are compile-time constants (hashable), as in ``jax.jit``;
            positions are counted after the modules.
        donate: whether the compiler may reuse the variables' memory. Arrays that you took out of the variables are then
            deleted, and an exception while it runs loses the variables' values.

    Raises:
        StateError: if ``f`` names a module from its closure or globals that it was not given (its values would become
            constants in silence); and when called, if it changes more than the values of variables, or returns a part
            of the modules (which would be a copy, apart from the one outside).

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
        f: Callable[..., R],
        *modules: Any,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        donate: bool = False,
    ) -> None:
        super().__init__(f, modules)
        refuse_outside(self._body)
        positions = [static_argnums] if isinstance(static_argnums, int) else static_argnums
        self._body.donate = donate
        self._body.static = [p if p < 0 else p + 2 for p in positions] or None, static_argnames or None

    _run: Any = staticmethod(run)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        binding, program, values, args, kwargs = self._ready(args, kwargs)
        new, result = program(values, binding.graph.arrays, *args, **kwargs)
        return self._finished(binding, values, new, result)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the program for these arguments, as ``jax.jit(f).lower`` gives it; nothing is run or written."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trace for these arguments, as ``jax.jit(f).trace`` gives it; nothing is run or written."""
        binding, program, values, args, kwargs = self._ready(args, kwargs)
        return program.trace(values, binding.graph.arrays, *args, **kwargs)

    def _ready(self, args: Any, kwargs: dict[str, Any]) -> Any:
        binding = self.binding()
        args, kwargs = pytrees.arguments(self._body.transform, args, kwargs)
        return binding, binding.program or self._compile(binding), binding.graph.values(), args, kwargs

    def _finished(self, binding: Binding, values: Sequence[Any], new: dict[int, Any], result: Any) -> Any:
        if new:
            binding.graph.write(new)
        return pytrees.combine(result)

    def _compile(self, binding: Binding) -> Any:
        """Return the program for a structure of the modules: by ``==``, since a static attribute may have no hash."""
        programs = self._body.programs
        binding.program = next((program for key, program in programs if key == binding.key), None)
        if binding.program is None:
            valueless = tuple(v.copy(None) for v in binding.graph.variables)
            graph = dataclasses.replace(binding.graph, variables=valueless, arrays=())
            binding.program = _jitted(self._body, self._run, graph)
            programs.append((binding.key, binding.program))
        return binding.program


def _jitted(body: Body, call: Callable[..., Any], graph: Graph) -> Any:
    # A closure over what all copies share, not over self, whose modules may be those of another run.
    def run(values: Sequence[Any], arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        kinds = (jax.Array, np.ndarray)
        args, kwargs = jax.tree.map(lambda x: x if isinstance(x, kinds) else pytrees.Static(x), (args, kwargs))
        result, new = call(body, graph, (values, arrays), args, kwargs)
        # What is not written goes through if its memory was given away.
        return dict(enumerate(values)) | new if body.donate else new, result

    ours = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("values", "arrays")]
    vars(run)["__signature__"] = inspect.Signature([*ours, *body.signature.parameters.values()])
    run.__name__ = body.name
    positions, names = body.static
    return jax.jit(run, static_argnums=positions, static_argnames=names, donate_argnums=(0,) if body.donate else ())
