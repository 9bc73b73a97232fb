"""The options of a solver or estimator, checked."""

import dataclasses
import inspect
import numbers
from typing import Any

import jax.numpy as jnp


def options(solver: Any) -> dict[str, Any]:
    """A solver's options, without what it has compiled: that cannot be pickled."""
    return {field.name: getattr(solver, field.name) for field in dataclasses.fields(solver)}


def positive(asks: Any, *names: str) -> None:
    """Check that these options of a solver or estimator are positive numbers.

    Raises:
        ValueError: naming the one that is not.
    """
    number(asks, *names)
    for name in names:
        value = getattr(asks, name)
        if not value > 0:
            raise ValueError(f"{_who(asks)}: {name} must be positive, got {value!r}; {_usual(asks, name)}")


def not_negative(asks: Any, *names: str) -> None:
    """Check that these options are numbers of at least 0.

    Raises:
        ValueError: naming the one that is not.
    """
    number(asks, *names)
    for name in names:
        value = getattr(asks, name)
        if not value >= 0:
            raise ValueError(f"{_who(asks)}: {name} must not be negative, got {value!r}; write {name}=0")


def number(asks: Any, *names: str) -> None:
    """Check that these options are real numbers.

    Raises:
        ValueError: naming the one that is not.
    """
    for name in names:
        value = getattr(asks, name)
        single = jnp.issubdtype(value.dtype, jnp.number) if getattr(value, "shape", None) == () else False
        if isinstance(value, bool) or not (isinstance(value, numbers.Real) or single):
            raise ValueError(f"{_who(asks)}: {name} must be a number, got {value!r}; {_usual(asks, name)}")


def count(asks: Any, *names: str) -> None:
    """Check that these options are whole numbers above 0.

    Raises:
        ValueError: naming the one that is not.
    """
    whole(asks, *names)
    positive(asks, *names)


def whole(asks: Any, *names: str) -> None:
    """Check that these options are whole numbers.

    Raises:
        ValueError: naming the one that is not.
    """
    for name in names:
        value = getattr(asks, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{_who(asks)}: {name} must be a whole number, got {value!r}; {_usual(asks, name)}")


def _who(asks: Any) -> str:
    return type(asks).__name__


def _usual(asks: Any, name: str) -> str:
    default = inspect.signature(type(asks)).parameters[name].default
    return f"write {name}={default!r}" if default not in (None, float("inf")) else f"leave {name} out"


def one_of(who: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Check that an option is one of those there are.

    Raises:
        ValueError: naming it.
    """
    if value not in choices:
        raise ValueError(f"{who}: {name} must be one of {choices}, got {value!r}; write {name}={choices[0]!r}")
