"""The launches of this folder's tests."""

from tests.launch._support import launched

__all__ = ["launched"]
