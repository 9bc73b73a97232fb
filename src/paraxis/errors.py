"""The errors that Paraxis raises on purpose. Each class is also the built-in error that a caller would expect."""

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = [
    "AxisError",
    "CheckpointError",
    "CommunicationError",
    "DataError",
    "DeviceError",
    "NonFiniteError",
    "ParaxisError",
    "StateError",
]


class ParaxisError(Exception):
    """Base of every error that Paraxis raises on purpose."""


class AxisError(ParaxisError, ValueError):
    """An axis that cannot be made, placed, identified or used in the way that was asked for."""


class DataError(ParaxisError, ValueError):
    """A leaf without the axis that it should start with, or values that are not what they should be."""


class StateError(ParaxisError, ValueError):
    """A module's variables, a training state or a member that cannot be used in the way that was asked for."""


class CheckpointError(ParaxisError, RuntimeError):
    """A checkpoint that cannot be written, or of which nothing can be restored."""


class NonFiniteError(ParaxisError, ArithmeticError):
    """A loss or a gradient that is not finite.

    Attributes:
        state: the state before the step that met it, if there is one.
        batch: that step's batch, if it is known.
    """

    state: Any = None
    batch: Any = None


class DeviceError(ParaxisError, RuntimeError):
    """Devices that were asked for and are not there, or processes that cannot start or work together."""


class CommunicationError(ParaxisError, AssertionError):
    """A compiled program that communicates otherwise than promised."""


@contextlib.contextmanager
def axis_advice(advice: str) -> Iterator[None]:
    """Answer an axis that is unknown, or cannot be placed, within: a front end says which name to write there.

    JAX names no name in a NameError, as Python does, and tells users to write ``shard_map``.
    """
    try:
        yield
    except AxisError as error:
        error.add_note(advice)
        raise
    except NameError as error:
        if type(error) is not NameError or error.name is not None:
            raise
        raise AxisError(f"{str(error).partition('. ')[0]}. {advice}") from error


for _error in (ParaxisError, *ParaxisError.__subclasses__()):  # a traceback names them as users do
    _error.__module__ = "paraxis"
