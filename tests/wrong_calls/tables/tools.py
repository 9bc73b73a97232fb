"""Calls of assertions, and of what starts processes."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import paraxis as px
from paraxis import launch, reports, testing
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    anything,
    count,
    either,
    flag,
    function,
    instance,
    items,
    none,
    number,
    one_of,
    optional,
    path,
    rows,
    text,
    tree,
)

ROWS = px.Axis("rows", 8)
KINDS = (
    "gather",
    "redundant",
    "padding",
    "replicated",
    "constant",
    "undonated",
    "unused_donation",
    "unjoined",
    "uneven",
)
HERE = __file__
NOTHING = str(Path(__file__).parents[1] / "_nothing.py")
NOT_RUN = ("a tracer that escaped", "a deleted array")  # what is only lowered is not looked into


_MACHINE = reports.Machine("mine", {"f32": 1e9}, 1e9, 1e9, 1e9, 1e9)


def _numbers_of_devices(x: Any) -> bool:
    if isinstance(x, dict):
        return bool(x) and all(text(name) and count(1, 8192)(number) for name, number in x.items())
    return isinstance(x, (list, tuple)) and bool(x) and all(map(count(1, 8192), x))


def _reports(x: Any) -> bool:
    return isinstance(x, dict) and bool(x) and all(isinstance(report, reports.Report) for report in x.values())


@functools.cache
def explained() -> Any:
    return px.explain(own.plus)(jax.ShapeDtypeStruct((8,), jnp.float32))


@functools.cache
def compared() -> Any:
    return px.compare({"f": own.plus}, np.ones(8), seconds=0.01)


COUNTS = {
    name: (0, optional(count(0)))
    for name in [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "collective_permute",
        "collective_broadcast",
        "max_bytes",
    ]
}
CALLS = [
    Call(
        "testing.communication",
        testing.communication,
        lambda: {"*fn": (own.plus, function), "*args[0]": (jnp.ones(8), either(tree, instance(jax.ShapeDtypeStruct)))},
        left_out=NOT_RUN,
    ),
    Call(
        "px.tabulate",
        px.tabulate,
        lambda: {"*model": (own.plus, function), "*args[0]": (jnp.ones(8), anything)},
    ),
    Call("px.show", px.show, lambda: {"*x": (jnp.ones(8), anything)}),
    Call(
        "px.explain",
        px.explain,
        lambda: {
            "*fn": (own.plus, function),
            "devices": (8, optional(either(count(1, 8192), _numbers_of_devices))),
            "on": (None, optional(instance(reports.Machine))),
        },
    ),
    Call("reports.Growth", reports.Growth, lambda: {"reports": ({8: explained()}, _reports)}),
    Call(
        "reports.Machine",
        reports.Machine,
        lambda: {
            "kind": ("mine", text),
            "flops": ({"f32": 1e9}, lambda v: isinstance(v, dict) and "f32" in v),
            **dict.fromkeys(("memory", "bandwidth", "link", "network"), (1e9, number(above=0))),
            "devices_per_host": (8, count(1)),
            "source": ("", lambda v: isinstance(v, str)),
        },
    ),
    Call("Machine.speed", lambda **k: _MACHINE.speed(**k), lambda: {"dtype": ("bf16", text)}),
    Call(
        "px.compare",
        px.compare,
        lambda: {
            "*fns": ({"f": own.plus}, lambda v: isinstance(v, dict) and bool(v) and all(map(callable, v.values()))),
            "*args[0]": (np.ones(8), anything),
            "baseline": ("f", optional(one_of("f"))),
            "seconds": (0.01, number(above=0, most=1e300)),
            "check": (True, flag),
            "rtol": (0.1, number(0)),
            "atol": (0.1, number(0)),
        },
    ),
    Call("Comparison.plot", lambda **k: compared().plot(**k), lambda: {"path": ("x.png", none)}, documented=(OSError,)),
    Call("Comparison.__getitem__", lambda **k: compared()[k["name"]], lambda: {"name": ("f", one_of("f"))}),
    Call(
        "Report.found",
        lambda **k: explained().found(**k),
        lambda: {"kind": ("gather", one_of(*KINDS))},
    ),
    Call("Report.save", lambda **k: explained().save(**k), lambda: {"path": ("saved", path)}, documented=(OSError,)),
    Call("reports.of_program", reports.of_program, lambda: {"text": ("", lambda v: isinstance(v, str))}),
    Call(
        "testing.assert_communication",
        testing.assert_communication,
        lambda: {
            "*fn": (own.plus, function),
            "*args[0]": (jnp.ones(8), either(tree, instance(jax.ShapeDtypeStruct))),
            **COUNTS,
        },
        left_out=NOT_RUN,
    ),
    Call(
        "testing.assert_memory",
        testing.assert_memory,
        lambda: {
            "*fn": (own.plus, function),
            "*args[0]": (jnp.ones(8), either(tree, instance(jax.ShapeDtypeStruct))),
            "max_bytes": (2**30, optional(count(0))),
            "max_temporary_bytes": (None, optional(count(0))),
        },
        left_out=NOT_RUN,
        documented=(AssertionError,),
    ),
    Call(
        "testing.assert_no_redundant_work",
        testing.assert_no_redundant_work,
        lambda: {
            "*fn": (own.plus, function),
            "*args[0]": (jnp.ones(8), either(tree, instance(jax.ShapeDtypeStruct))),
            "allow_uncounted": (True, flag),
        },
        left_out=(*NOT_RUN, "a function"),  # which takes whatever it is given, as a fixed value
    ),
    Call(
        "testing.Snapshot",
        testing.Snapshot,
        lambda: {"path": ("x.paraxis.txt", path), "name": ("test", text), "update": (True, flag)},
    ),
    Call(
        "Snapshot.__call__",
        lambda *args, **k: testing.Snapshot("x.paraxis.txt", "test", update=True)(*args, **k),
        lambda: {
            "*fn": (own.plus, function),
            "*args[0]": (jnp.ones(8), either(tree, instance(jax.ShapeDtypeStruct))),
            "tolerance": (0.0, number(0)),
        },
        left_out=NOT_RUN,
        documented=(OSError,),
    ),
    Call(
        "testing.assert_same_everywhere",
        testing.assert_same_everywhere,
        lambda: {
            "*fn": (own.averaged, function),
            "*args[0]": (jnp.ones(8), rows(8)),
            "devices": ((1, 2), lambda v: items(count(1, 8))(v) and bool(v)),
            "rtol": (1e-5, number(0)),
            "atol": (1e-6, number(0)),
        },
        documented=(AssertionError,),
    ),
    Call("testing.simulate_devices", testing.simulate_devices, lambda: {"n": (1, count(1, 8))}),
    Call(
        "px.initialize",
        px.initialize,
        lambda: {
            "cluster": (None, optional(text)),
            "join_timeout": (None, optional(number(above=0))),
            "stuck_after": (None, optional(number(0))),
        },
    ),
    Call(
        "launch.Options",
        launch.Options,
        lambda: {
            "num_processes": (1, count()),
            "target": (HERE, none),
            "arguments": ((), items(text)),
            "module": (False, flag),
            "devices": (None, optional(count())),
            "restarts": (0, count(0)),
            "grace": (1.0, number(above=0, most=1e300)),
            "stuck_after": (0.0, number(0, 1e300)),
        },
    ),
    Call(
        "launch.launch",
        launch.launch,
        lambda: {"options": (launch.Options(1, NOTHING, grace=1), instance(launch.Options))},
    ),
]
