"""BatchNorm layers that take their statistics over a named axis as well, wherever they come from.

They are asked when they run, not looked for: a layer may be reached by a wrapped function, be put together anew by
NNX's own functions, or be made on the spot.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.linen import normalization as of_linen
from flax.nnx.nn import normalization as of_nnx

from paraxis._modules import hooks

_axes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("paraxis_norms", default=())


class _AxisName:
    """The attribute of a layer that names its axis: its own, or else those that it is used within."""

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        if layer is None:
            return None  # as a dataclass's default
        own = vars(layer).get("axis_name")
        axes = _axes.get()
        if own is not None or not axes:
            return own
        return axes[0] if len(axes) == 1 else axes

    def __set__(self, layer: Any, name: Any) -> None:
        vars(layer)["axis_name"] = name


def _counting(of_flax: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flax's function of the statistics, for masks that leave some devices fewer values than others.

    Flax takes the mean of the devices' means, as if each were of as many values. Here sums and numbers are added up.
    """

    def of_all(
        x: Any, axes: Any, dtype: Any, axis_name: Any = None, *others: Any, mask: Any = None, **options: Any
    ) -> Any:
        is_plain = not others and options.get("axis_index_groups") is None  # as BatchNorm calls it
        if mask is None or axis_name is None or not is_plain or not _axes.get():
            return of_flax(x, axes, dtype, axis_name, *others, mask=mask, **options)
        x = jnp.asarray(x, jnp.promote_types(jnp.result_type(x) if dtype is None else dtype, jnp.float32))
        over = tuple(axis % x.ndim for axis in axes)
        number = jax.lax.psum(jnp.sum(jnp.broadcast_to(mask, x.shape), over, dtype=jnp.float32), axis_name)

        def mean(x: jax.Array) -> jax.Array:
            return jax.lax.psum(jnp.sum(x, over, where=mask), axis_name) / number

        center = mean(x)
        return center, mean(jnp.abs(x - jnp.expand_dims(center, over)) ** 2)

    return of_all


_HOOKS = [
    *(hooks.Attribute(kind, "axis_name", _AxisName()) for kind in (nnx.BatchNorm, linen.BatchNorm)),
    *(hooks.Attribute(m, "_compute_stats", _counting(m._compute_stats)) for m in (of_nnx, of_linen)),
]


@contextlib.contextmanager
def synchronised(axis: str) -> Iterator[None]:
    """Within, in this thread, layers that name no axis themselves take their statistics over this one as well."""
    with contextlib.ExitStack() as stack:
        for hook in _HOOKS:
            stack.enter_context(hook.entered())
        token = _axes.set((*(name for name in _axes.get() if name != axis), axis))
        try:
            yield
        finally:
            _axes.reset(token)
