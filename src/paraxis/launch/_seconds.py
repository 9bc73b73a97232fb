"""Times as users give them."""

import math
from typing import Any


def seconds_of(value: Any) -> float | None:
    """A number of seconds, at least 0 and finite; ``None`` if it is none. Words and booleans are no numbers."""
    if isinstance(value, (str, bytes, bool)):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
