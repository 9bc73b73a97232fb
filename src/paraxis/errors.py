"""One tree of errors.

    ParaxisError
    ├── AxisError           an axis that cannot be made, placed or used so     (ValueError)
    ├── ShapeError          a leaf that does not carry the axis                (ValueError)
    ├── StateError          variables that cannot be carried as asked          (ValueError)
    ├── DataError           values that cannot be what they are said to be     (ValueError)
    ├── CheckpointError     a checkpoint that cannot be written, or read       (RuntimeError)
    ├── NonFiniteError      a loss or a gradient that is not finite            (ArithmeticError)
    ├── DeviceError         devices asked for and not there                    (RuntimeError)
    ├── ProcessError        processes that cannot work together                (RuntimeError)
    └── CommunicationError  a broken promise about communication               (AssertionError)

Each class is also the built-in error that a caller would expect.
"""

from typing import Any

__all__ = [
    "AxisError",
    "CheckpointError",
    "CommunicationError",
    "DataError",
    "DeviceError",
    "NonFiniteError",
    "ParaxisError",
    "ProcessError",
    "ShapeError",
    "StateError",
]


class ParaxisError(Exception):
    """Base of every error that Paraxis raises on purpose."""


class AxisError(ParaxisError, ValueError):
    """An axis that cannot be made, placed, told or used in the way that was asked for."""


class ShapeError(ParaxisError, ValueError):
    """A leaf that does not carry the axis it is said to carry."""


class StateError(ParaxisError, ValueError):
    """A module's variables that cannot be carried through a transform in the way that was asked for."""


class DataError(ParaxisError, ValueError):
    """Values that cannot be what they are said to be: probabilities, labels, a damaged file."""


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
    """Devices that were asked for and are not there."""


class ProcessError(ParaxisError, RuntimeError):
    """Processes that cannot start, or cannot work together."""


class CommunicationError(ParaxisError, AssertionError):
    """A compiled program that communicates otherwise than promised."""


for _error in (ParaxisError, *ParaxisError.__subclasses__()):  # a traceback names them as users do
    _error.__module__ = "paraxis"
