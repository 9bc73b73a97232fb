"""The rules by which the values that several elements have written to a variable become one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._calls import arguments
from paraxis.errors import StateError

Rule = str | Callable[[jax.Array], Any]
"""``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"first"``, ``"stack"``, or a function of all values stacked."""

Fold = Callable[[str, jax.Array], jax.Array]
"""A reduction by name (``sum``, ``max``, ``min``) of ``(size, ...)`` over the elements."""

RULES = ("mean", "sum", "max", "min", "first", "stack")
_DEFAULT: Mapping[Any, Rule | None] = {nnx.BatchStat: "mean"}


def checked(transform: str, sync: Any, names: Sequence[str]) -> dict[Any, Rule | None]:
    """Return the rules that ``sync=`` gives.

    Raises:
        StateError: if these are none, or name a variable that there is not.
    """
    if sync is None:
        return {}
    if not isinstance(sync, Mapping):
        raise StateError(
            f"{transform}: sync must be a dict of variable types and rules, got {arguments.described(sync)}; write "
            "sync={nnx.BatchStat: 'mean'}"
        )
    for key, rule in sync.items():
        if not isinstance(key, (type, str)) or not _is_rule(rule):
            raise StateError(
                f"{transform}: sync must map variable types, or names, to one of {', '.join(map(repr, RULES))}, a "
                f"function or None, got {key!r}: {rule!r}; write sync={{nnx.BatchStat: 'mean'}}"
            )
        if isinstance(key, str) and key not in names:
            raise StateError(f"{transform}: sync names {key!r}, but the variables are {', '.join(names) or 'none'}")
    return dict(sync)


def rule_of(
    transform: str,
    name: str,
    variable: nnx.Variable[Any],
    sync: Mapping[Any, Rule | None],
    *,
    is_known: bool = False,
) -> Rule | None:
    """Return a variable's own rule, or that for its name, or that for the nearest of its types; ``None``: none.

    ``is_known``: its type does not matter, as it is known what becomes of it.
    """
    if variable.has_metadata("sync"):
        own = variable.get_metadata("sync")
        if not _is_rule(own):
            raise StateError(
                f"{transform}: variable {name} has sync={own!r}; it must be one of {', '.join(map(repr, RULES))}, a "
                f"function or None"
            )
        return own
    if name in sync:
        return sync[name]
    if is_known:
        return None
    for rules in (sync, _DEFAULT):
        for kind in type(variable).__mro__:
            if kind in rules:
                return rules[kind]
    return None


def combined(rule: Rule, x: jax.Array, fold: Fold) -> Any:
    """``(size, ...)`` → the variable's new value. Integers and booleans keep their dtype: means are rounded."""
    if not isinstance(rule, str):
        return rule(x)
    if rule == "stack":
        return x
    if rule == "first":
        return x[0]
    if rule == "mean":
        return _mean(x, fold)
    if x.dtype == bool:
        return fold(rule, x.astype(jnp.int32)).astype(bool)
    return fold(rule, x).astype(x.dtype)


def _mean(x: jax.Array, fold: Fold) -> jax.Array:
    size = x.shape[0]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return (fold("sum", x) / size).astype(x.dtype)
    if x.dtype == bool:
        return fold("sum", x.astype(jnp.int32)) * 2 > size
    # Counters may be larger than floats are exact, and their sum larger than their dtype: divide first.
    rest = fold("sum", (x % size).astype(jnp.int32))
    return (fold("sum", x // size) + (rest + size // 2) // size).astype(x.dtype)


def _is_rule(rule: Any) -> bool:
    return rule is None or callable(rule) or (isinstance(rule, str) and rule in RULES)
