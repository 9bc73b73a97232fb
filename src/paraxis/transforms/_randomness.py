"""Random streams of modules: a key for each element, and one step for the stream that they come from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._modules import graphs
from paraxis.errors import StateError


@dataclasses.dataclass(frozen=True)
class Stream:
    """The numbers of the variables that hold a stream's key and how often it was drawn from.

    ``count`` is ``None`` for a key that stands alone, and is split by whoever draws.
    """

    key: int
    count: int | None


def streams(modules: Any, graph: graphs.Graph) -> list[Stream]:
    number = {id(v): i for i, v in enumerate(graph.variables)}
    found = [
        Stream(number[id(s.key)], number[id(s.count)]) for _, s in graphs.nodes(modules) if isinstance(s, nnx.RngStream)
    ]
    known = {stream.key for stream in found}
    return [*found, *(Stream(i, None) for i, v in enumerate(graph.variables) if i not in known and graphs.is_key(v))]


def element_keys(values: Sequence[Any], of: Sequence[Stream], size: int) -> list[jax.Array]:
    """Return, for each stream, a key for each of ``size`` elements, from its number: ``(size, ...)``.

    Raises:
        StateError: if a key is of the old kind.
    """
    for stream in of:
        if not jnp.issubdtype(values[stream.key].dtype, jax.dtypes.prng_key):
            raise StateError("a random key in a variable must be of the new kind; write nnx.RngKey(jax.random.key(0))")
    return [jax.vmap(_fold, in_axes=(None, 0))(_drawn(values, stream), jnp.arange(size)) for stream in of]


def _drawn(values: Sequence[Any], stream: Stream) -> jax.Array:
    return values[stream.key] if stream.count is None else _fold(values[stream.key], values[stream.count])


def _fold(key: jax.Array, data: Any) -> jax.Array:
    """``fold_in`` for keys of any shape: NNX's split streams hold several."""
    if key.ndim == 0:
        return jax.random.fold_in(key, data)
    return jax.vmap(_fold, in_axes=(0, 0 if jnp.ndim(data) else None))(key, data)


def with_keys(values: Sequence[Any], of: Sequence[Stream], keys: Sequence[jax.Array]) -> list[Any]:
    """Return an element's values: fresh streams from its own keys."""
    new = list(values)
    for stream, key in zip(of, keys, strict=True):
        new[stream.key] = key
        if stream.count is not None:
            new[stream.count] = jnp.zeros(key.shape, jnp.uint32)
    return new


def drawn_from(transform: str, of: Sequence[Stream], new: dict[int, Any], names: Sequence[str]) -> list[Stream]:
    """Take what an element did to its streams out of what it wrote; which of them it drew from.

    Raises:
        StateError: if it gave a stream another key.
    """
    drawn = []
    for stream in of:
        if stream.count is not None and stream.key in new:
            raise StateError(
                f"{transform}: the function set {names[stream.key]}, the key of a random stream; reseed outside"
            )
        wrote = [new.pop(i) for i in (stream.key, stream.count) if i in new]
        if wrote:
            drawn.append(stream)
    return drawn


def advanced(values: Sequence[Any], drawn: Sequence[Stream]) -> dict[int, Any]:
    """Return the streams one step on, as the variables' new values."""
    new: dict[int, Any] = {}
    for stream in drawn:
        if stream.count is None:
            new[stream.key] = jax.random.split(values[stream.key])[0]
        else:
            new[stream.count] = values[stream.count] + jnp.ones((), values[stream.count].dtype)
    return new
