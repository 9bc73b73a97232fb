"""The verbs with a module's state threaded: Jit, Parallel, Vectorize, GradValues on Flax NNX modules."""

from paraxis._core.check import needed

with needed("paraxis.transforms", "nnx"):
    from paraxis.transforms._gradients import GradValues
    from paraxis.transforms._jit import Jit
    from paraxis.transforms._optimizer import Optimizer
    from paraxis.transforms._parallel import Parallel
    from paraxis.transforms._variables import Gradients, Variables, variables
    from paraxis.transforms._vectorize import Vectorize

__all__ = ["GradValues", "Gradients", "Jit", "Optimizer", "Parallel", "Variables", "Vectorize", "variables"]
