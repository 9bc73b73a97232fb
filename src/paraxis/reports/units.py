"""Sizes and amounts as people read them."""

import itertools
from collections.abc import Sequence

_MOST_RUNS = 4


def size(num_bytes: float) -> str:
    """Return a number of bytes in powers of 1024."""
    return _scaled(num_bytes, 1024, "bytes", "KiB", "MiB", "GiB", "TiB")


def amount(flops: float) -> str:
    """Return a number of floating-point operations in powers of 1000."""
    return _scaled(flops, 1000, "FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def time(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    return _scaled(seconds * 1e9, 1000, "ns", "µs", "ms", "s")


def _scaled(number: float, step: int, unit: str, *larger: str) -> str:
    if abs(number) >= step and larger:
        return _scaled(number / step, step, *larger)
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:,.0f} {unit}"


def of(number: int, thing: str) -> str:
    """Return a number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def runs(numbers: Sequence[int]) -> str:
    """Return sorted numbers with those in a row joined, such as ``0–3, 8``; of many, the first ones."""
    by_shift = itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0])
    groups = [[number for _, number in run] for _, run in by_shift]
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}–{run[-1]}" for run in groups[:_MOST_RUNS]]
    return ", ".join(texts) + (" …" if len(groups) > _MOST_RUNS else "")
