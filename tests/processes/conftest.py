"""The launches of this folder's tests."""

from tests.processes._support import launched

__all__ = ["launched"]
