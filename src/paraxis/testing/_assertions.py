"""The laws as assertions. Each raises an ``AssertionError`` that says what was found instead."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import placing
from paraxis._calls import arguments, integers
from paraxis._core import maps
from paraxis.errors import CommunicationError, DeviceError
from paraxis.reports import Communication, Memory, Work, explain, num_devices, of_program, program_of, total_bytes


@arguments.named(jax.ShapeDtypeStruct)
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
        fn: a function of arrays, jitted or not.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
        all_reduce: exact number of all-reduces in the compiled program; ``None``: any number. The other kinds of
            collectives likewise.
        max_bytes: largest number of bytes per device in all collectives together, each as often as loops run it; a
            loop without a known end counts as one turn, and all branches count.

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
    arguments.function("assert_communication", "fn", fn, "assert_communication(lambda x: …, x, all_reduce=1)")
    promised = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "collective_permute": collective_permute,
        "collective_broadcast": collective_broadcast,
    }
    for name, wanted in {**promised, "max_bytes": max_bytes}.items():
        if wanted is not None:
            arguments.count("assert_communication", name, wanted, least=0, most=2**63, write=f"{name}=0")
    program = program_of(fn, args, {})
    found, sent = of_program(program), total_bytes(program)
    broken = [
        f"{kind}={wanted} was promised, found {found.count[kind]}"
        for kind, wanted in promised.items()
        if wanted is not None and found.count[kind] != wanted
    ]
    if max_bytes is not None and sent > max_bytes:
        loops = ", loops multiplied" if sent > found.total_bytes else ""
        broken.append(f"max_bytes={max_bytes:,} was promised, found {sent:,}{loops}")
    if broken:
        raise CommunicationError(
            f"{_name(fn)}: {'; '.join(broken)}. The compiled program has: {found}{_why_none(program)}"
        )
    return found


def _why_none(program: str) -> str:
    """Return why a program for one device sends nothing, and how to have one for several; nothing of others."""
    if num_devices(program) > 1:
        return ""
    there = len(jax.devices())
    advice = (
        f"lay its arguments over several of the {there} that there are: write px.scatter(x, px.Axis('rows', {there}))"
        if there > 1
        else "JAX has one: call paraxis.testing.simulate_devices(8) before anything uses JAX, or start Python with "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    )
    return f". It is for one device, which sends nothing; {advice}"


@arguments.named(jax.ShapeDtypeStruct)
def assert_memory(
    fn: Callable[..., Any], *args: Any, max_bytes: int | None = None, max_temporary_bytes: int | None = None
) -> Memory:
    """Assert how much memory of one device a function needs; it is compiled, but not run.

    Args:
        fn: as in :func:`paraxis.explain`.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
        max_bytes: the most bytes of arguments, results and temporaries together; what is donated counts once.
        max_temporary_bytes: the most bytes of what is neither.

    Returns:
        What the compiler says.

    Raises:
        AssertionError: if it needs more; the message lists all parts.

    Example:
        >>> import jax.numpy as jnp
        >>> from paraxis.testing import assert_memory
        >>> assert_memory(lambda x: x * 2, jnp.ones(256), max_bytes=2048).arguments
        1024
    """
    arguments.function("assert_memory", "fn", fn, "assert_memory(lambda x: …, x, max_bytes=2**30)")
    promised = {"max_bytes": max_bytes, "max_temporary_bytes": max_temporary_bytes}
    for name, most in promised.items():
        if most is not None:
            arguments.count("assert_memory", name, most, least=0, most=2**63, write=f"{name}=2**30")
    memory = explain(fn)(*args).memory
    found = {"max_bytes": memory.peak, "max_temporary_bytes": memory.temporaries}
    broken = [
        f"{name}={most:,} was promised, found {found[name]:,}"
        for name, most in promised.items()
        if most is not None and found[name] > most
    ]
    if broken:
        raise AssertionError(
            f"{_name(fn)}: {'; '.join(broken)}. One device holds arguments of {memory.arguments:,} bytes, results of "
            f"{memory.results:,}, of these {memory.donated:,} where arguments were, and temporaries of "
            f"{memory.temporaries:,}"
        )
    return memory


@arguments.named(jax.ShapeDtypeStruct)
def assert_no_redundant_work(fn: Callable[..., Any], *args: Any, allow_uncounted: bool = False) -> Work:
    """Assert that the devices share a function's work, and none does what another does; it is compiled, but not run.

    Matrix products and convolutions are looked at. Together, the devices may do a quarter more of them than there is to
    do, beside the work on padding.

    Args:
        fn: as in :func:`paraxis.explain`.
        *args: its arguments, or ``jax.ShapeDtypeStruct`` in their place.
        allow_uncounted: whether there may be factorizations, Fourier transforms and what else is computed by code of
            which nobody says how much it is. They are not looked at.

    Returns:
        What one device computes, and an equal share.

    Raises:
        AssertionError: if work is done more than once, with the lines; or if nobody can tell, as in a loop without a
            known end, or of what is not counted.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from paraxis.testing import assert_no_redundant_work
        >>> rows = px.Axis("rows", 16)
        >>> assert_no_redundant_work(lambda x: px.map_fn(lambda x: x @ x, x, rows), jnp.ones((16, 4, 4))).flops
        256
    """
    arguments.function("assert_no_redundant_work", "fn", fn, "assert_no_redundant_work(lambda x: …, x)")
    arguments.flag("assert_no_redundant_work", "allow_uncounted", allow_uncounted)
    report = explain(fn)(*args)
    if report.work.uncounted and report.num_devices > 1 and not allow_uncounted:
        raise AssertionError(
            f"{_name(fn)}: nobody can tell whether work is done twice by {', '.join(report.work.uncounted)}, which is "
            f"not counted; if that does not matter, write assert_no_redundant_work(…, allow_uncounted=True)"
        )
    if report.work.flops and report.work.share is None:
        raise AssertionError(
            f"{_name(fn)}: nobody can tell whether work is done twice, since a loop has no known end, or another "
            f"library compiles the function; assert it of a part, such as the body of the loop"
        )
    if found := report.found("redundant"):
        raise AssertionError(f"{_name(fn)}: {'; '.join(map(str, found))}")
    return report.work


@arguments.named()
def assert_same_everywhere(
    fn: Callable[..., Any],
    *args: Any,
    devices: Sequence[int] = (1, 2, 3, 8),
    rtol: float = 1e-5,
    atol: float = 1e-6,
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
    arguments.function("assert_same_everywhere", "fn", fn, "assert_same_everywhere(lambda x: …, x)")
    counts = devices if isinstance(devices, (tuple, list)) else ()
    if not counts or any(integers.at_least(1, number) is None for number in counts):
        got = arguments.described(devices)
        raise ValueError(f"assert_same_everywhere: devices must be numbers of devices, got {got}; write devices=(1, 2)")
    for name, tolerance in {"rtol": rtol, "atol": atol}.items():
        arguments.number("assert_same_everywhere", name, tolerance, least=0, write=f"{name}=1e-5")
    there = jax.devices()
    if max(devices) > len(there):
        raise DeviceError(
            f"assert_same_everywhere: {max(devices)} devices were asked for, there are {len(there)}; call "
            f"paraxis.testing.simulate_devices({max(devices)}) before anything uses JAX"
        )
    args = jax.tree.map(_unbound, args)
    first: Any = None
    for number in devices:
        with jax.set_mesh(placing.devices_mesh(there[:number])):
            _require_use(fn, args)
            result = jax.tree.map(np.asarray, jax.device_get(fn(*args)))
        if first is None:
            first = result
        _compare(fn, first, result, f"{devices[0]} and on {number} devices", rtol, atol)


def _compare(fn: Callable[..., Any], first: Any, other: Any, where: str, rtol: float, atol: float) -> None:
    def one(path: Any, a: np.ndarray, b: np.ndarray) -> None:
        message = f"{_name(fn)}: result{jax.tree_util.keystr(path)} differs on {where}"
        if np.issubdtype(a.dtype, np.inexact) or a.dtype.kind == "V":
            wide = np.complex128 if np.iscomplexobj(a) else np.float64
            a, b = a.astype(wide), b.astype(wide)
            np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=message)
        else:
            np.testing.assert_array_equal(b, a, err_msg=message)

    jax.tree_util.tree_map_with_path(one, first, other)


def _require_use(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    jaxpr = jax.make_jaxpr(fn)(*args)
    if placing.DEVICES not in str(jaxpr) and not maps.lies_over(jaxpr.jaxpr, placing.DEVICES):
        raise AssertionError(
            f"{_name(fn)} places nothing on the devices, so nothing can be compared: it must use an axis whose mesh "
            f"and over are left open, as in px.Axis('clients', 8)"
        )


def _unbound(x: Any) -> Any:
    bound = isinstance(x, jax.Array) and x.committed and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return np.asarray(x) if bound else x


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))
