"""The layout of a state on the devices: whole on each, or its parameters split by a rule."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paraxis._axes import arrays
from paraxis._axes.placing import Placement
from paraxis._calls import check
from paraxis.errors import ShapeError, StateError

Rule = Callable[[str, Any], Any]
"""``rule(name, array)`` → ``None`` (whole on each device), a dimension to split along, or a PartitionSpec."""

_SMALL = 1024
"""Elements. What has fewer is left whole: to bring it together costs more than it takes to keep."""


def rule_of(shard: Any) -> Any:
    """Return the rule that ``shard=`` asks for: ``None``, ``"params"``, or a function.

    Raises:
        StateError: if it is something else.
    """
    if shard is None or shard == "params" or callable(shard):
        return shard
    raise StateError(
        f"px.train_step: shard must be None, 'params', or a rule of a parameter's name and array, got "
        f"{check.described(shard)}; write shard='params', or shard=lambda name, x: 0 if x.ndim == 2 else None"
    )


def _largest_dimension(num_devices: int) -> Rule:
    """Follow the rule ``"params"``: split the largest dimension that the devices divide; leave small leaves whole."""

    def rule(name: str, x: Any) -> int | None:
        fitting = [d for d in range(x.ndim) if x.shape[d] % num_devices == 0]
        if not fitting or x.size < _SMALL:
            return None
        return max(fitting, key=lambda d: x.shape[d])

    return rule


def of_state(state: Any, placement: Placement, shard: Any) -> Any:
    """Return each leaf's sharding: parameters, their average, and what the optimiser keeps of them by the rule."""
    whole = arrays.whole_sharding(placement)
    if shard is None or whole is None:
        return jax.tree.map(lambda _: whole, state)
    rule: Rule = _largest_dimension(placement.num_devices) if shard == "params" else shard
    split = {
        path: (x.shape, _sharding(rule, path, x, placement, whole))
        for path, x in jax.tree_util.tree_leaves_with_path(state.params)
    }

    def like_parameter(path: Any, x: Any) -> Any:
        """Find a parameter by its path in an optimiser's state, which keeps trees like the parameters."""
        ends = (split.get(path[start:]) for start in range(len(path) + 1))
        return next((sharding for shape, sharding in filter(None, ends) if shape == x.shape), whole)

    def lies_as_parameters(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(like_parameter, tree)

    rest = jax.tree.map(lambda _: whole, state)
    return rest.replace(
        params=lies_as_parameters(state.params),
        opt_state=lies_as_parameters(state.opt_state),
        ema=lies_as_parameters(state.ema),
    )


def _sharding(rule: Rule, path: Any, x: Any, placement: Placement, whole: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    entry = rule(name, x)
    if entry is None:
        return whole
    sharding = arrays.split_sharding(placement, name, x.ndim, entry)
    try:
        sharding.shard_shape(x.shape)
    except ValueError as error:
        raise ShapeError(
            f"shard: the rule splits {name}, which has shape {np.shape(x)}, as {entry!r}, but its "
            f"{placement.num_devices} parts would not be equal; let the rule give None for it, or a dimension "
            f"that divides"
        ) from error
    return sharding
