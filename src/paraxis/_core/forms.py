"""What a placed value is made of, remembered while a trace lasts.

A value placed along an axis has the shape ``(size, ...)`` for whoever looks at it. Two kinds of value have a
better form to go on with: a broadcast one is still the shared value it came from, and the result of a map still
has its padding, with each row on its device. The next verb looks the form up by the identity of the tracer; an
operation in between makes a new tracer, which has no form, and then the value itself is used. The form not taken
is dead code, which the compiler drops.
"""

import dataclasses
import weakref
from typing import Any

from paraxis._core.jax_api import Tracer
from paraxis._core.layout import Placement


@dataclasses.dataclass(frozen=True)
class Shared:
    """Every row equals ``value``."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Padded:
    """``value`` holds the rows, then padding, laid out by ``placement``."""

    value: Any
    placement: Placement


_forms: dict[int, tuple[weakref.ref[Any], Shared | Padded]] = {}


def remember(y: Any, form: Shared | Padded) -> Any:
    """Note the form of a traced value. Concrete arrays are what they are."""
    if isinstance(y, Tracer):
        key = id(y)
        _forms[key] = (weakref.ref(y, lambda _: _forms.pop(key, None)), form)
    return y


def recall(y: Any) -> Shared | Padded | None:
    entry = _forms.get(id(y))
    return entry[1] if entry is not None and entry[0]() is y else None
