"""The options of a solver or estimator, checked."""

import dataclasses
import inspect
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._calls import arguments
from paraxis._jax import jax_api
from paraxis.errors import ShapeError


def options(solver: Any) -> dict[str, Any]:
    """Return a solver's options, without what it has compiled: that cannot be pickled."""
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


def function(asks: Any, *flags: str) -> None:
    """Check a solver's function, how it is told about its progress, and these options that are ``True`` or ``False``.

    Raises:
        TypeError: naming the one that is not.
    """
    arguments.function(_who(asks), "fun", asks.fun, f"px.solve.{_who(asks)}(lambda params: …)")
    for name in ("value_and_grad", "has_aux", *flags):
        arguments.flag(_who(asks), name, getattr(asks, name))
    watch(_who(asks), asks.verbose)


def watch(who: str, verbose: Any) -> None:
    """Check how a run tells of its progress: a flag, or a function of one argument.

    Raises:
        TypeError: naming it.
    """
    if not callable(verbose):
        arguments.flag(who, "verbose", verbose)
        return
    try:
        inspect.signature(verbose).bind(None)
    except TypeError as error:
        raise TypeError(
            f"{who}: verbose must be a function of one argument, a px.solve.Iteration, got "
            f"{arguments.described(verbose)}: {error}; write verbose=print"
        ) from error
    except ValueError:  # it does not say what it takes
        pass


def step(asks: Any, params: Any, state: Any, kind: type, like: str) -> None:
    """Check what a solver's ``update`` is given: by types and shapes alone, as it is called in a loop.

    Raises:
        TypeError: if the state is none of this solver's.
        ShapeError: if the parameters are not like those that it is of.
    """
    who = f"{_who(asks)}.update"
    if not isinstance(state, kind):
        got = arguments.described(state)
        raise TypeError(f"{who}: state must be a {kind.__name__}, got {got}; write solver.init_state(params)")
    expected = getattr(state, like)
    same = jax.tree.structure(params) == jax.tree.structure(expected)
    if (
        not same
        or not all(map(_is_floating, jax.tree.leaves(params)))
        or any(map(operator.ne, map(np.shape, jax.tree.leaves(params)), map(np.shape, jax.tree.leaves(expected))))
    ):
        raise ShapeError(
            f"{who}: params must be like those that state is of, {jax.tree.map(np.shape, expected)}, got "
            f"{arguments.described(params)}; write params, state = solver.update(params, state)"
        )


def share(asks: Any, *names: str) -> None:
    """Check that these options are numbers from 0 to 1.

    Raises:
        ValueError: naming the one that is not.
    """
    number(asks, *names)
    for name in names:
        value = getattr(asks, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{_who(asks)}: {name} must be from 0 to 1, got {value!r}; write {name}=0.5")


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf), jnp.floating)


def number(asks: Any, *names: str) -> None:
    """Check that these options are real numbers.

    Raises:
        ValueError: naming the one that is not.
    """
    for name in names:
        value = getattr(asks, name)
        if not (arguments.is_number(value) or (isinstance(value, jax_api.Tracer) and value.shape == ())):
            got = arguments.described(value)
            raise ValueError(f"{_who(asks)}: {name} must be a number, got {got}; {_usual(asks, name)}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{_who(asks)}: {name} {arguments.too_large(value)}")


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
            got = arguments.described(value)
            raise ValueError(f"{_who(asks)}: {name} must be a whole number, got {got}; {_usual(asks, name)}")
        if int(value) > arguments.LARGEST:
            most = f"{arguments.LARGEST:,}"
            raise ValueError(f"{_who(asks)}: {name} must be at most {most}, got {value}; {_usual(asks, name)}")


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
    arguments.one_of(who, name, value, choices)
