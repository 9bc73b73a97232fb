"""Numbers of things, as callers give them."""

import operator
from typing import Any


def at_least(least: float, value: Any) -> int | None:
    """Return a value as an int, if it is an integer that is not less; otherwise ``None``. Booleans are no numbers."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # a deleted array
        return None
    return None if number < least or isinstance(value, bool) else number
