"""Constants, said aloud."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from paraxis._calls import arguments
from paraxis._modules import graphs, naming
from paraxis.errors import StateError


class Frozen:
    """A module as it is now, for ever. See :func:`freeze`."""

    def __init__(self, module: Any) -> None:
        self._graph = graphs.take_apart((module,))
        self._names = naming.names_in((module,), self._graph.paths)
        self._values = [jax.tree.map(lambda x: x, graphs.value(v)) for v in self._graph.variables]
        self._type = type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(self._made()[0], name)
        if graphs.is_module(attribute) or not callable(attribute):
            return _frozen(attribute)
        return lambda *args, **kwargs: self._run(name, args, kwargs)

    def __repr__(self) -> str:
        return f"Frozen({self._type})"

    def __reduce__(self) -> Any:
        return Frozen, self._made()

    def _made(self) -> Any:
        return self._graph.put_together(self._values, self._graph.arrays)

    def _run(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        (module,) = self._made()
        variables = graphs.take_apart((module,)).variables
        result = getattr(module, method)(*args, **kwargs)
        for variable, old, name in zip(variables, self._values, self._names, strict=True):
            pairs = zip(jax.tree.leaves(graphs.value(variable)), jax.tree.leaves(old), strict=True)
            if any(x is not y for x, y in pairs):
                raise StateError(
                    f"freeze: variable {name} of a frozen module was written. Make it constant in what it does as "
                    f"well, net.eval(), before px.freeze(net); or bind it: px.Jit(f, net)"
                )
        return result


def _frozen(x: Any) -> Any:
    """Return what hangs in a frozen module: lists and dicts of modules as plain ones."""
    if isinstance(x, nnx.List):
        return [_frozen(item) for item in x]
    if isinstance(x, nnx.Dict):
        return {name: _frozen(item) for name, item in x.items()}
    return Frozen(x) if isinstance(x, nnx.Pytree) else x


@arguments.named()
def freeze(module: Any) -> Any:
    """Return a module as it is now: a constant that later edits do not affect.

    You call it like the module; it has the module's methods, and its submodules are frozen too. It holds the module's
    present arrays, not copies: a transform with ``donate=True`` that is bound to the module deletes them. In a compiled
    function, the values are part of the program, which the compiler may simplify (rarely worth it: compiling takes
    longer, and the values are stored twice).

    Args:
        module: an NNX module.

    Returns:
        A callable that may be used in any function, or bound to one.

    Raises:
        StateError: when called, if the module writes one of its variables, as BatchNorm and Dropout do in training.

    Communicates: nothing.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> fast = px.Jit(px.freeze(net))
        >>> x = jnp.ones((10, 3))
        >>> before = fast(x)
        >>> net.bias[...] += 1
        >>> float(abs(fast(x) - before).max())
        0.0
    """
    if not graphs.is_module(module):
        raise StateError(f"freeze: module must be an NNX module, got {type(module).__name__}; write px.freeze(net)")
    return Frozen(module)
