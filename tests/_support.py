"""Axes laid over some of the devices, and the comparison of trees, for the tests of all rooms."""

import contextlib
import importlib.util
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AxisType, Mesh

import paraxis as px

# The columns of every law: (number of devices, number of elements). Of every day are one device, sizes that divide and
# sizes that do not; a few of all the others, picked by a fixed seed, are of the night.
EVERY_DAY = [(1, 3), (8, 8), (8, 13)]
ALL_PLACEMENTS = [(devices, size) for devices in (1, 2, 3, 8) for size in (1, 3, 7, 8, 10, 16)]

# All reductions that are exported, by the names that jax.numpy and NumPy have for them: laws go through each.
_NAMES = [name.removeprefix("reduce_") for name in px.__all__ if name.startswith("reduce_")]
REDUCTIONS: dict[str, Any] = {name: getattr(px, f"reduce_{name}") for name in _NAMES if name != "weighted_mean"}


def at_night(cases: Iterable[Any], number: int, seed: int = 0) -> list[Any]:
    """So many of the cases, picked by a fixed seed, marked ``slow``."""
    cases = list(cases)
    return [pytest.param(case, marks=pytest.mark.slow) for case in random.Random(seed).sample(cases, number)]


def table(every_day: Iterable[tuple[Any, ...]], others: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Rows of every day, and those of the others that are not among them, marked ``slow``."""
    rows = list(every_day)
    return [*rows, *(pytest.param(*row, marks=pytest.mark.slow) for row in others if row not in rows)]


STRICT_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "disable_jit": jax.disable_jit,
    "enable_checks": lambda: jax.enable_checks(True),
    "checking_leaks": jax.checking_leaks,
    "debug_nans": lambda: jax.debug_nans(True),
}
PLACEMENTS = [*EVERY_DAY, *at_night((p for p in ALL_PLACEMENTS if p not in EVERY_DAY), 5)]


def axis_on(devices: int, size: int, name: str = "rows", **wishes: Any) -> px.Axis:
    """An axis over the first so many devices."""
    return px.Axis(name, size, mesh=Mesh(np.array(jax.devices()[:devices]), (name,)), **wishes)


def mesh_over(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh of axes of these sizes."""
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    return Mesh(devices, (*axes,), axis_types=(kind,) * len(axes))


def values(*shape: int, seed: int = 0) -> jax.Array:
    """Random float32 numbers between 0.5 and 1.5, away from zeros and ties."""
    return jax.numpy.asarray(np.random.default_rng(seed).uniform(0.5, 1.5, shape), "float32")


def assert_close(actual: Any, expected: Any, *, rtol: float = 2e-5, atol: float = 1e-5) -> None:
    """Two trees have one structure, the same shapes and dtypes, and nearly the same values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert np.shape(a) == np.shape(e), f"{where}: shape {np.shape(a)} is not {np.shape(e)}"
        if isinstance(e, jax.Array):
            assert a.dtype == e.dtype, f"{where}: dtype {a.dtype} is not {e.dtype}"
        a, e = (x.astype(np.float32) if x.dtype.kind == "V" else x for x in map(data, (a, e)))  # as NumPy compares
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=where)


def in_double(f: Callable[..., Any], *args: Any) -> Any:
    """``f(*args)`` compiled in float64 and rounded: an oracle whose own rounding, and whose ties, do not matter."""

    def narrow(x: Any) -> jax.Array:
        kind = {"f": "float32", "i": "int32"}.get(np.asarray(x).dtype.kind)
        return jax.numpy.asarray(np.asarray(x), kind)

    with jax.enable_x64(True):
        wide = jax.jit(f)(*(jax.numpy.asarray(np.asarray(x), "float64") for x in args))
        wide = jax.tree.map(np.asarray, wide)
    return jax.tree.map(narrow, wide)


def module_at(path: Path) -> Any:
    """The module of a file that is in no package."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_lowered: list[str] = []


def _note(event: str, duration_secs: float, **what: Any) -> None:
    del duration_secs
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        _lowered.append(what.get("fun_name", "?"))


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX makes ready for XLA within, by its name; in the list when the block has ended."""
    before, found = len(_lowered), []
    yield found
    found.extend(_lowered[before:])


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr, those of loops, branches and calls included."""
    for eqn in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, (Jaxpr, ClosedJaxpr)):
                    yield from equations(item)


def data(x: Any) -> np.ndarray:
    """The numbers of an array, of random keys too."""
    is_key = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def bits(tree: Any) -> list[bytes]:
    """All leaves, as they lie in memory."""
    return [data(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
