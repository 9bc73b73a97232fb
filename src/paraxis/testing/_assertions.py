"""The laws as assertions. Each raises an ``AssertionError`` that says what was found instead."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import placing
from paraxis.errors import CommunicationError, DeviceError
from paraxis.reports import Communication, assert_alike, explain


def communication(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Communication:
    """Return how many collectives a function has, and their bytes; it is compiled, as by :func:`paraxis.explain`.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from paraxis.testing import communication
        >>> rows = px.Axis("rows", 16)
        >>> communication(lambda x: px.map_fn(jnp.sin, x, rows), jnp.ones(16)).total_count
        0
    """
    return explain(fn)(*args, **kwargs).communication


def assert_communication(
    fn: Callable[..., Any],
    *args: Any,
    all_reduce: int | None = None,
    all_gather: int | None = None,
    reduce_scatter: int | None = None,
    all_to_all: int | None = None,
    collective_permute: int | None = None,
    collective_broadcast: int | None = None,
    max_bytes: int | None = None,
) -> Communication:
    """Assert how often a function communicates; it is compiled, but not run.

    Args:
        fn: as in :func:`paraxis.explain`.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
        all_reduce: exact number of all-reduces in the compiled program; ``None``: any number. The other kinds of
            collectives likewise.
        max_bytes: largest number of bytes per device in all collectives together, each as often as loops run it, in
            all branches. It fails if a loop without a known end communicates.

    Returns:
        The collectives that were found.

    Raises:
        CommunicationError: if a promise does not hold; the message names each, and lists all collectives.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from paraxis.testing import assert_communication
        >>> rows = px.Axis("rows", 16)
        >>> found = assert_communication(lambda x: px.map_fn(jnp.sin, x, rows), jnp.ones(16), all_reduce=0, max_bytes=0)
    """
    promised = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "collective_permute": collective_permute,
        "collective_broadcast": collective_broadcast,
    }
    report = explain(fn)(*args)
    counts, sent = report.communication, report.total_bytes
    broken = [
        f"{kind}={wanted} was promised, found {counts.count[kind]}"
        for kind, wanted in promised.items()
        if wanted is not None and counts.count[kind] != wanted
    ]
    endless = next((c for c in report.collectives if not c.is_certain), None)
    if max_bytes is not None and sent > max_bytes:
        broken.append(f"max_bytes={max_bytes:,} was promised, found {sent:,}")
    elif max_bytes is not None and endless is not None:
        broken.append(
            f"max_bytes={max_bytes:,} was promised, but a loop without a known end sends {endless.bytes:,} bytes in "
            f"each iteration at {endless.line}; assert it of the loop's body, or loop a known number of times"
        )
    if broken:
        alone = ". It is for one device, which sends nothing; px.simulate_devices(8), before JAX is used, makes more"
        raise CommunicationError(
            f"{report.name}: {'; '.join(broken)}. The compiled program has: {counts}{alone * (report.num_devices == 1)}"
        )
    return counts


def assert_same_everywhere(
    fn: Callable[..., Any], *args: Any, devices: Sequence[int] = (1, 2, 3, 8), rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Assert that a function gives the same answer on any number of devices.

    The function runs with a mesh that the assertion sets; its axes must not have a ``mesh`` or ``over`` of their own.

    Args:
        fn: a function of arrays that uses axes; jitted or not.
        *args: its arguments.
        devices: numbers of devices to compare with the first of them.
        rtol: relative tolerance, as in ``numpy.testing.assert_allclose``.
        atol: absolute tolerance.

    Raises:
        AssertionError: if an answer differs, with the number of devices and the leaf; or if the function places
            nothing on the devices, so that nothing would be checked.
        DeviceError: if there are fewer devices than asked for.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from paraxis.testing import assert_same_everywhere
        >>> rows = px.Axis("rows", 5)
        >>> assert_same_everywhere(lambda x: px.reduce_mean(px.map_fn(jnp.sin, x, rows), rows), jnp.ones(5))
    """
    there = jax.devices()
    if max(devices) > len(there):
        raise DeviceError(
            f"assert_same_everywhere: {max(devices)} devices were asked for, there are {len(there)}; call "
            f"paraxis.simulate_devices({max(devices)}) before anything uses JAX"
        )
    args, results = jax.tree.map(_unbound, args), []
    name = getattr(fn, "__name__", repr(fn))
    for number in devices:
        with jax.set_mesh(placing.mesh_of(tuple(there[:number]))):
            if placing.DEVICES not in str(jax.make_jaxpr(fn)(*args)):
                raise AssertionError(
                    f"{name} places nothing on the devices, so nothing can be compared: it must use an axis whose mesh "
                    "and over are left open, as in px.Axis('clients', 8)"
                )
            results.append(jax.device_get(fn(*args)))
        assert_alike(f"{name} on {number} devices", f"{devices[0]}", results[-1], results[0], rtol, atol)


def _unbound(x: Any) -> Any:
    bound = isinstance(x, jax.Array) and x.committed and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return np.asarray(x) if bound else x
