"""``ensemble``: the members are made on the devices, from a function that makes one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, placing, verbs
from paraxis._core.record import Lowering
from paraxis.ensembles import _members
from paraxis.ensembles._ensemble import Ensemble, padded
from paraxis.errors import AxisError, DataError, StateError, axis_advice


@check.renamed(name="axis_name")
def ensemble(
    make: Callable[..., Any],
    size: int | placing.Axis,
    key: Any,
    *args: Any,
    apply: Callable[..., Any] | None = None,
    mesh: Any = None,
    over: str | tuple[str, ...] | None = None,
    at_once: int | None = None,
    lowering: Lowering = "auto",
    donate: bool | None = None,
    axis_name: str = "members",
) -> Ensemble:
    """Make an ensemble of any size on any number of devices from a function that makes one member.

    A member is what ``make`` returns: parameters, a Linen ``TrainState``, an NNX module, a callable pytree such as an
    Equinox module, or a tuple such as ``(net, opt)`` or ``(params, opt_state)``, whose first part is the model.

    Args:
        make: ``make(key, *args)`` → a member.
        size: number of members, or their :class:`Axis`, which then says what ``mesh`` to ``axis_name`` say here.
        key: one key, or a seed; not of a hardware generator (``rbg``). A member's own depends on its number alone. Of
            a ``jax.ShapeDtypeStruct``, as of ``jax.eval_shape(jax.random.key, 0)``, members are shapes, which no device
            holds, for ``px.explain(ens.train)``, ``px.explain(ens.predict)`` and ``ens.lower``.
        *args: further arguments of ``make``, arrays ``(size, ...)`` with one row per member, such as learning rates.
        apply: ``apply(model, *inputs)`` → the model's output. By default, an NNX module is called in ``eval()`` mode,
            a train state's ``apply_fn`` is applied to its ``params``, and a callable pytree is called. Layers of
            Equinox are in inference mode, and take one row: ``apply=lambda model, x: jax.vmap(model)(x)``.
        mesh, over, at_once: where the members lie, and how many per device are in flight, as for :class:`Axis`.
        lowering: how a device runs its members, as in :func:`map_fn`.
        donate: whether a step may overwrite the old state, which saves its memory; by default, unless on CPU.
        axis_name: the name of the axis, for collectives between members.

    Raises:
        StateError: if ``make`` returns no member, or ignores its key, so that all members would be the same.
        AxisError, DataError: if the axis, ``key`` or ``args`` are malformed.

    Communicates: nothing.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> make = lambda key: {"w": jax.random.normal(key, (4, 3))}
        >>> ens = px.ensemble(make, 7, 0, apply=lambda params, x: x @ params["w"])
        >>> ens.predict(jnp.ones((5, 4))).shape, ens.members(jnp.ones((5, 4))).shape
        ((5, 3), (7, 5, 3))
    """
    is_abstract = isinstance(key, jax.ShapeDtypeStruct)
    with axis_advice("ensemble: write px.ensemble(…, mesh=mesh, over='data'), or neither for all devices"):
        if not isinstance(size, placing.Axis):
            size = placing.Axis(axis_name, size, mesh=mesh, over=over, at_once=at_once)
        elif (mesh, over, at_once) != (None, None, None):
            raise AxisError("ensemble: size is a px.Axis, which has mesh, over and at_once; leave them out here")
        axis = placing.settled(size)
    forms: list[_members.Form] = []

    def one(key: jax.Array, *args: Any) -> _members.State:
        with axis_advice(f"ensemble: write the axis of the members, px.psum(x, {axis.name!r})"):
            form, state = _members.split(make(key, *args))
        forms.append(form)
        return state

    if not isinstance(key, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        key = jax.random.key(check.count("ensemble", "key", key, least=0, write="key=0"), impl="threefry2x32")
    elif not is_abstract and "rbg" in str(jax.random.key_impl(key)):
        raise DataError("ensemble: draws of an rbg key depend on the devices; write key=0, or a key of threefry2x32")
    make_keys = lambda key: verbs.keys(key, axis)  # noqa: E731
    keys = jax.eval_shape(make_keys, key) if is_abstract else make_keys(jnp.asarray(key))
    with placing.without_context():
        placement = placing.place(axis)
        make_all = lambda keys, args: padded(verbs.map_fn(one, (keys, *args), axis, lowering="vmap"), placement)  # noqa: E731
        make_members = jax.jit(make_all, out_shardings=arrays.sharding(placement))
        operands = (keys, args) if is_abstract else arrays.device_put((keys, args), arrays.sharding(placement, ()))
        traced = make_members.trace(*operands)
        read = [*traced.jaxpr.jaxpr.outvars, *(v for eqn in traced.jaxpr.jaxpr.eqns for v in eqn.invars)]
        if axis.size > 1 and not args and not any(v is traced.jaxpr.jaxpr.invars[0] for v in read):
            raise StateError(
                "ensemble: make does not use its key, so all members would be the same; draw from it, or, if they are "
                f"to begin alike, say so: px.ensemble(lambda key, number: …, {axis.size}, key, jnp.arange({axis.size}))"
            )
        state = jax.eval_shape(make_members, *operands) if is_abstract else make_members(*operands)
    donate = jax.default_backend() != "cpu" if donate is None else donate
    return Ensemble(forms[0], state, placement, apply, lowering, donate)
