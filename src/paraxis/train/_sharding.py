"""The layout of a state on the devices: whole on each, or its parameters split by a rule."""

from typing import Any

import jax

from paraxis._core import arrays
from paraxis._core.placing import Placement

_SMALL = 1024
"""Elements. What has fewer is left whole: to bring it together costs more than it takes to keep."""


def of_state(state: Any, placement: Placement, shard: Any) -> Any:
    """Return each leaf's sharding: parameters, their average, and what the optimiser keeps of them by the rule.

    The rule is ``None``, ``"params"``, or ``rule(name, array)``, which returns ``None`` (whole on each device), a
    dimension to split along, or a PartitionSpec.
    """
    whole = arrays.sharding(placement, ())
    if shard is None or whole is None:
        return jax.tree.map(lambda _: whole, state)

    def largest_dimension(name: str, x: Any) -> int | None:
        fitting = [d for d in range(x.ndim) if x.shape[d] % placement.num_devices == 0]
        return max(fitting, key=lambda d: x.shape[d]) if fitting and x.size >= _SMALL else None

    rule = largest_dimension if shard == "params" else shard
    split = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        entry = rule(name, x)
        sharding = whole if entry is None else arrays.sharding(placement, entry)
        assert sharding is not None
        sharding.shard_shape(x.shape)  # an error of JAX's, if its parts would not be equal
        split[path] = x.shape, sharding

    def like_parameter(path: Any, x: Any) -> Any:
        """Find a parameter by its path in an optimiser's state, which keeps trees like the parameters."""
        ends = (split.get(path[start:]) for start in range(len(path) + 1))
        return next((sharding for shape, sharding in filter(None, ends) if shape == x.shape), whole)

    rest = jax.tree.map(lambda _: whole, state)
    split_parts = {
        name: jax.tree_util.tree_map_with_path(like_parameter, getattr(state, name))
        for name in ("params", "opt_state", "ema")
    }
    return rest.replace(**split_parts)
