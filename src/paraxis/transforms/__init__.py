"""The verbs with a module's state threaded: Jit, Parallel, Vectorize, GradValues on Flax NNX modules."""

from paraxis.transforms._freeze import freeze
from paraxis.transforms._jit import Jit

__all__ = ["Jit", "freeze"]
