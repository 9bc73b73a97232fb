"""``Vectorize``: the function of one row, run on all rows of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._core import jax_api, pytrees
from paraxis.errors import DataError
from paraxis.transforms import _batches, _modules
from paraxis.transforms._wrapped import R, Wrapped, run


class Vectorize(Wrapped[R]):
    """Apply a function of one row to a batch: ``jax.vmap`` with modules' variables and randomness threaded through.

    All rows see the same variables. Each row has its own random streams, made from its index; the modules' streams
    advance once per call if the function draws from them. ``Vectorize`` neither compiles nor moves anything: use it
    inside :class:`Jit` or :class:`Parallel`. Results have leaves ``(rows, ...)``.

    Args:
        f: a function of modules and one row of each argument.
        *modules: as in :class:`Jit`.
        batch_axis: for each argument after the modules, the axis along which its rows lie; as in :class:`Parallel`.
        sync: how to combine the rows' values of variables, ``(rows, ...)``; as in :class:`Parallel`.

    Raises:
        DataError: when called, if the sizes of the batch axes disagree, or there are none.
        StateError: as in :class:`Jit`; and if rows would leave a variable with different values.

    Communicates: nothing, unless ``f`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> noisy = px.Vectorize(lambda rngs, x: x + rngs.normal(), rngs)
        >>> len(set(noisy(jnp.zeros(5)).tolist()))
        5
    """

    def __init__(
        self, f: Callable[..., R], *modules: Any, batch_axis: _batches.Axes = 0, sync: _batches.Sync | None = None
    ) -> None:
        super().__init__(f, modules)
        self._body.options = batch_axis, dict(sync or {})

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        args, kwargs = pytrees.arguments("Vectorize", args, kwargs)
        batch_axis, sync = self._body.options
        batch = _batches.split("Vectorize", batch_axis, args, kwargs)
        if batch.size is None:
            raise DataError("Vectorize: no argument has a batch axis; write batch_axis=0 for what is a batch")
        graph = self.binding().graph
        values = graph.values()
        streams = _modules.streams(graph, values)
        differs, drawn = list[bool](), list[_modules.Stream]()

        def row(index: jax.Array, leaves: list[Any]) -> Any:
            state = (_modules.fold_streams(values, streams, index), graph.arrays)
            args, kwargs = jax.tree.unflatten(batch.structure, leaves)
            result, new = run(self._body, graph, state, args, kwargs)
            drawn[:] = _modules.used_streams(streams, new)
            return result, jax_api.observe_vmap(new, index, differs.extend)

        over = jax.vmap(row, in_axes=(0, batch.axes), axis_size=batch.size)
        result, new = over(jnp.arange(batch.size), batch.leaves)
        flags = jax.tree.unflatten(jax.tree.structure(new), differs)
        kept = _batches.written("Vectorize", graph, sync, new, flags, None, "by different rows; write")
        graph.write(kept | _modules.next_streams(values, drawn))
        return pytrees.combine(result)
