"""BatchNorm layers that take their statistics over a named axis as well, wherever they come from.

They are asked when they run, not looked for: a layer may be reached by a wrapped function, be put together anew by
NNX's own functions, or be made on the spot.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from flax import linen, nnx

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


_HOOKS = [hooks.Attribute(kind, "axis_name", _AxisName()) for kind in (nnx.BatchNorm, linen.BatchNorm)]


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
