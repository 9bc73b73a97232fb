"""Calls of the transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    anything,
    array,
    count,
    either,
    flag,
    function,
    instance,
    items,
    number,
    one_of,
    optional,
    text,
    usable,
)

NET = own.Net()
LINEAR = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
X = jnp.ones((4, 3))
MESH = Mesh(np.array(jax.devices()[:2]), ("device",))
module = instance(nnx.Module, nnx.Variable)


def has_modules(v: Any) -> bool:
    return any(
        isinstance(leaf, (nnx.Module, nnx.Variable))
        for leaf in jax.tree.leaves(v, is_leaf=lambda x: isinstance(x, nnx.Module))
    )


def positions(v: Any) -> bool:
    return count(0)(v) or items(count(0))(v)


def names(v: Any) -> bool:
    return text(v) or items(text)(v)


def features(v: Any) -> bool:
    return array(None, 3)(v) or array(3)(v)


def call(made: Any) -> Any:
    return made(X)


def gradients() -> Any:
    return px.GradValues(own.net_loss, NET)(X)[0]


WRT = one_of(nnx.Param)
AXES = one_of(0, -2, (0,), [0], None)
CALLS = [
    Call(
        "px.Jit",
        px.Jit,
        lambda: {
            "*f": (own.net_apply, function),
            "*modules[0]": (NET, has_modules),
            "static_argnums": ((), one_of((), [])),
            "static_argnames": ((), names),
            "donate": (False, flag),
        },
        call,
    ),
    Call("Jit.__call__", px.Jit(NET), lambda: {"*x": (X, features)}),
    Call(
        "px.GradValues",
        px.GradValues,
        lambda: {
            "*f": (own.net_loss, function),
            "*modules[0]": (NET, has_modules),
            "wrt": (nnx.Param, optional(either(WRT, function))),
            "argnums": (None, optional(positions)),
        },
        call,
    ),
    Call(
        "Jit.lower",
        px.Jit(NET).lower,
        lambda: {"*x": (X, either(features, instance(jax.ShapeDtypeStruct)))},
        left_out=("a tracer that escaped", "a deleted array"),  # nothing is run
    ),
    Call(
        "a Jit of somebody's module",
        px.Jit(LINEAR),
        lambda: {"*x": (X, features)},
        left_out=("None",),  # of which the module says what it likes
    ),
    Call("GradValues.__call__", px.GradValues(own.net_loss, NET), lambda: {"*x": (X, features)}),
    Call(
        "px.grad",
        px.grad,
        lambda: {
            "f": (own.net_loss, function),
            "argnums": (0, count(0)),
            "wrt": (nnx.Param, either(WRT, function)),
            "has_aux": (False, flag),
        },
        lambda made: made(NET, X),
    ),
    Call(
        "px.value_and_grad",
        px.value_and_grad,
        lambda: {
            "f": (own.net_loss, function),
            "argnums": (0, count(0)),
            "wrt": (nnx.Param, either(WRT, function)),
            "has_aux": (False, flag),
        },
        lambda made: made(NET, X),
    ),
    Call("what px.grad makes", px.grad(own.net_loss), lambda: {"*net": (NET, module), "*x": (X, features)}),
    Call(
        "px.Parallel",
        px.Parallel,
        lambda: {
            "*f": (own.net_apply, function),
            "*modules[0]": (NET, has_modules),
            "reduce": (
                "concat",
                either(function, one_of("concat", "mean", "sum", "max", "min", "same", "first", "stack")),
            ),
            "batch_axis": (0, AXES),
            "axis_name": ("device", text),
            "static_argnums": ((), one_of((), [])),
            "static_argnames": ((), names),
            "sync": (None, optional(lambda v: isinstance(v, dict) and not v)),
            "sync_batch_norm": (False, flag),
            "check": (True, flag),
            "donate": (False, flag),
            "mesh": (MESH, optional(instance(Mesh))),
            "over": ("device", optional(either(text, items(text)))),
        },
        call,
    ),
    Call("Parallel.__call__", px.Parallel(NET, mesh=MESH), lambda: {"*x": (X, features)}),
    Call(
        "px.Vectorize",
        px.Vectorize,
        lambda: {
            "*f": (own.net_apply, function),
            "*modules[0]": (NET, has_modules),
            "batch_axis": (0, AXES),
            "sync": (None, optional(lambda v: isinstance(v, dict) and not v)),
        },
        call,
    ),
    Call("Vectorize.__call__", px.Vectorize(NET), lambda: {"*x": (X, features)}),
    Call(
        "px.Optimizer",
        px.Optimizer,
        lambda: {
            "*module": (NET, has_modules),
            "*factory": (optax.sgd, function),
            "wrt": (nnx.Param, either(WRT, function)),
            "momentum": (0.9, anything),
        },
    ),
    Call(
        "Optimizer.__call__",
        px.Optimizer(own.Net(), optax.sgd),
        lambda: {
            "*lr": (0.1, either(number(), usable)),
            "*gradients": (gradients(), either(instance(px.transforms.Gradients), array(1, 3, 2))),
        },
    ),
    Call("px.variables", px.variables, lambda: {"module": (NET, has_modules)}),
    Call("px.freeze", px.freeze, lambda: {"module": (NET, has_modules)}),
    Call("Variables.subset", px.variables(NET).subset, lambda: {"wrt": (nnx.Param, either(WRT, function, one_of(())))}),
    Call(
        "Variables.__getitem__",
        px.variables(NET).__getitem__,
        lambda: {"*key": ("(Net).kernel", one_of(0, -1))},
        documented=(IndexError,),
    ),
]
