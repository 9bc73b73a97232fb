"""The form of the members, recognised in what a function made. Flax is needed for modules only."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis._core import lowerings
from paraxis.ensembles._members import Form, TreeForm
from paraxis.errors import StateError


def form_of(made: Any) -> tuple[Form, tuple[Any, ...]]:
    """Return the form of a member that was made, and its parts.

    Raises:
        StateError: if it has no arrays, or has modules and plain arrays beside each other.
    """
    is_tuple = type(made) is tuple
    parts = made if is_tuple else (made,)
    if _flax_is_loaded():
        from paraxis.ensembles import _modules

        if _modules.any_modules(parts):
            return _modules.ModuleForm(parts, is_tuple), parts
    if not jax.tree.leaves(pytrees.sealed(parts)):
        raise StateError(
            f"ensemble: make returned a {type(made).__name__} without arrays; it must return the parameters, a train "
            f"state or a module of one member: lambda key: model.init(key, x)['params']"
        )
    return TreeForm(is_tuple), parts


def check_options(verb: str, apply: Any, lowering: Any, donate: Any, name: Any) -> None:
    """Check what an ensemble is made with.

    Raises:
        LoweringError, TypeError: naming what is not as it must be.
    """
    lowerings.check(verb, lowering)
    arguments.flag(verb, "donate", donate)
    arguments.text(verb, "name", name, "name='members'")
    if apply is not None:
        check_function("apply", apply)


def check_function(what: str, fn: Callable[..., Any]) -> None:
    """Refuse what is no function of one member.

    Raises:
        StateError: if it cannot be called.
    """
    if not callable(fn):
        raise StateError(f"ensemble: {what} must be a function of one member, got {arguments.described(fn)}")


def check_make(make: Callable[..., Any]) -> None:
    """Refuse what is no function that makes a member: a member, say, which can be called as well.

    Raises:
        StateError: naming it.
    """
    check_function("make", make)
    is_module = (pytrees.is_model(make) or pytrees.is_nnx(make)) and not isinstance(make, functools.partial)
    if is_module and any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(make)):
        name, key = type(make).__name__, "rngs=nnx.Rngs(key)" if pytrees.is_nnx(make) else "key=key"
        raise StateError(
            f"ensemble: make must be a function that is given a key and returns a member, got the module {name}; write "
            f"px.ensemble(lambda key: {name}(…, {key}), 5, key)"
        )


def guarded(what: str, fn: Callable[..., Any], within: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function of one member which raises, when traced, if it uses a module from outside.

    All members would share it, frozen. ``within``: a function of ours that calls it, to be guarded as a whole.
    """
    check_function(what, fn)
    if not _flax_is_loaded():
        return within or fn
    from paraxis.ensembles import _modules

    return _modules.guarded(f"ensemble: {what}", fn, within or fn)


def _flax_is_loaded() -> bool:
    """Return whether Flax is loaded; if not, there is no module to be found."""
    return "flax.nnx" in sys.modules
