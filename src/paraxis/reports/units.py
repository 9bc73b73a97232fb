"""Sizes and amounts as people read them."""

from collections.abc import Sequence

_MOST_RUNS = 4


def size(num_bytes: float) -> str:
    """Return a number of bytes in powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.4g} TiB"


def amount(number: float, unit: str = "FLOP") -> str:
    """Return an amount in powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:,.4g} P{unit}"


def of(number: int, thing: str) -> str:
    """Return a number of things."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def runs(numbers: Sequence[int]) -> str:
    """Return sorted numbers with those in a row joined, such as ``0–3, 8``; of many, the first ones."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}–{run[-1]}" for run in found[:_MOST_RUNS]]
    return ", ".join(texts) + (" …" if len(found) > _MOST_RUNS else "")


def time(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 0.9995:
            return f"{seconds * factor:,.3g} {unit}" if abs(seconds) * factor < 999.5 else f"{seconds:,.0f} s"
    return f"{seconds * 1e9:.3g} ns"
