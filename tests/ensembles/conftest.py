"""The fixtures of this folder's tests."""

from tests.ensembles._programs import after

__all__ = ["after"]
