"""Calls of the solvers."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import paraxis as px
from tests._support import axis_on
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    Kind,
    anything,
    array,
    count,
    either,
    flag,
    function,
    instance,
    leaves,
    none,
    number,
    one_of,
    optional,
    tree,
    usable,
)

solve, objective, prox = px.solve, px.solve.objective, px.solve.prox
P = jnp.zeros(2)
positive = number(above=0)


def floating(v: Any) -> bool:
    """Its own shape is as good as any: the function has none."""
    found = list(leaves(v))
    return bool(found) and all(usable(x) and np.asarray(x).dtype.kind in "f" for x in found)


BOTH = {"maxiter": (2, count()), "tol": (1e-3, number(0)), "verbose": (False, either(flag, function))}
FUN = {"fun": (own.quadratic, function), "value_and_grad": (False, flag), "has_aux": (False, flag)}
STEPS = {
    "stepsize": (0.1, either(number(0), function)),
    "acceleration": (True, flag),
    "maxls": (5, count()),
    "decrease_factor": (0.5, number(above=0, most=0.9999999)),
}
SOLVERS = {
    "LBFGS": (
        solve.LBFGS,
        {
            "linesearch": ("zoom", one_of("zoom", "backtracking", "hager-zhang")),
            "stepsize": (0.1, either(number(0), function)),
            "history_size": (3, count()),
            "maxls": (5, count()),
            "decrease_factor": (1e-4, number(above=0, most=0.9999999)),
            "curvature_factor": (0.9, optional(number(above=0, most=0.9999999))),
            "max_stepsize": (1.0, positive),
            "precondition": ("auto", one_of("auto", "gram", None)),
        },
    ),
    "NewtonCG": (
        solve.NewtonCG,
        {"maxcg": (5, count()), "maxls": (5, count()), "precondition": ("auto", one_of("auto", "gram", None))},
    ),
    "GradientDescent": (solve.GradientDescent, STEPS),
    "ProximalGradient": (solve.ProximalGradient, {"prox": (prox.none, function), **STEPS}),
}


def run(solver: Any) -> Any:
    return solver.run(P)


@functools.cache
def solver(name: str) -> Any:
    return SOLVERS[name][0](own.quadratic, maxiter=2)


@functools.cache
def first(name: str) -> Any:
    return solver(name).init_state(P)


def second(name: str, kind: Kind) -> dict[str, Any]:
    return {"*hyperparams_prox": (None, kind)} if name == "ProximalGradient" else {}


PARAMS = floating
SCALE = usable
X = np.ones((3, 2), np.float32)
DATA = (X, np.array([0, 1, 1]))
LOSSES = ("softmax", "logistic", "squared", "poisson", "huber")
ONE = axis_on(1, 3)


def real(v: Any) -> bool:
    return bool(leaves(v)) and tree(v) and all(np.asarray(leaf).dtype.kind in "biufV" for leaf in leaves(v))


def a_number(v: Any) -> bool:
    """One for all leaves, or an array that broadcasts against them."""
    return real(v) and (np.shape(v) in ((), (3,)) or np.size(v) == 1)


def a_pair(v: Any) -> bool:
    return isinstance(v, (tuple, list)) and len(v) == 2 and all(map(a_number, v))


def weights(v: Any) -> bool:
    return array(3, dtypes="biuf")(v) and bool(np.all(np.isfinite(v)) and np.all(np.asarray(v) >= 0) and np.any(v))


def asked_of(fun: Any) -> dict[str, Any]:
    """What an objective is called with: parameters, perhaps ``l2reg``, data."""
    classes = np.zeros((2, 2), np.float32) if "softmax" in str(fun) else np.zeros(2, np.float32)
    params = (classes, np.zeros(classes.shape[1:], np.float32)) if fun.intercept else classes
    return {
        "*params": (params, array(2, dtypes="biuf")),
        **({"l2reg": (0.1, a_number)} if fun.l2 else {}),
        "data": (DATA, none),
    }


OBJECTIVES = [
    "binary_logreg",
    "huber",
    "l2_multiclass_logreg",
    "l2_multiclass_logreg_with_intercept",
    "least_squares",
    "multiclass_logreg",
    "multiclass_logreg_with_intercept",
    "poisson",
    "ridge",
]
PENALTIES = {  # a right strength, and kinds of the strength, of x, of scaling
    "l1": (0.1, a_number, real, a_number),
    "elastic_net": ((0.1, 0.1), a_pair, real, a_number),
    "group": (0.1, a_number, real, a_number),
    "box": ((-1.0, 1.0), a_pair, real, anything),
    "non_negative": (None, anything, real, anything),
    "none": (None, anything, anything, anything),
    "simplex": (1.0, a_number, real, anything),
}

CALLS = [
    Call(
        "solve.rows",
        solve.rows,
        lambda: {
            "X": (X, none),
            "y": (DATA[1], either(array(3, dtypes="biufc"))),
            "sample_weight": (np.ones(3, np.float32), optional(weights)),
            "class_weight": (None, either(one_of(None, "balanced"), one_of({}))),
            "axis": (ONE, optional(instance(px.Axis))),
        },
    ),
    Call(
        "Rows.shared",
        lambda **k: solve.rows(*DATA, axis=ONE).shared(**k),
        lambda: {"params": (P, tree)},
    ),
    Call(
        "objective.glm",
        objective.glm,
        lambda: {"loss": ("squared", one_of(*LOSSES)), "intercept": (True, flag), "l2": (True, flag)},
    ),
    *(
        Call(f"objective.{name}", fun, lambda fun=fun: asked_of(fun))
        for name, fun in ((name, getattr(objective, name)) for name in OBJECTIVES)
    ),
    *(
        Call(f"LinearObjective.{name}", getattr(objective.ridge, name), lambda: asked_of(objective.ridge))
        for name in ("problem", "check_targets")
    ),
    Call(
        "LinearObjective.init",
        objective.multiclass_logreg_with_intercept.init,
        lambda: {
            "num_features": (3, count(0)),
            "num_outputs": (2, optional(count())),
            "dtype": (np.float32, one_of(np.float32, jnp.float32)),
        },
    ),
    *(
        Call(
            f"prox.{name}",
            getattr(prox, name),
            lambda value=value, kind=kind, x=x, scaling=scaling: {
                "x": ({"a": np.ones(3, np.float32)}, x),
                "hyperparams": (value, optional(kind)),
                "scaling": (1.0, scaling),
            },
        )
        for name, (value, kind, x, scaling) in PENALTIES.items()
    ),
    Call(
        "prox.first",
        prox.first,
        lambda: {"operator": (prox.l1, function)},
        lambda made: made((P, jnp.float32(1.0)), 0.1),
    ),
    *(
        Call(f"solve.{name}", made, lambda options=options: {**FUN, **BOTH, **options}, run)
        for name, (made, options) in SOLVERS.items()
    ),
    *(
        Call(
            f"{name}.run",
            lambda *a, name=name, **k: solver(name).run(*a, **k),
            lambda name=name: {"*init_params": (P, PARAMS), **second(name, tree), "scale": (2.0, SCALE)},
        )
        for name in SOLVERS
    ),
    *(
        Call(
            f"{name}.init_state",
            lambda *a, name=name, **k: solver(name).init_state(*a, **k),
            lambda name=name: {"*init_params": (P, PARAMS), **second(name, tree), "scale": (2.0, SCALE)},
        )
        for name in SOLVERS
    ),
    *(
        Call(
            f"{name}.update",
            lambda *a, name=name, **k: solver(name).update(*a, **k),
            lambda name=name: {
                "*params": (P, PARAMS),
                "*state": (first(name), none),
                **second(name, anything),
                "scale": (2.0, SCALE),
            },
        )
        for name in SOLVERS
    ),
    *(
        Call(
            f"{name}.optimality_fun",
            lambda *a, name=name, **k: solver(name).optimality_fun(*a, **k),
            lambda name=name: {"*params": (P, PARAMS), **second(name, anything), "scale": (2.0, SCALE)},
        )
        for name in SOLVERS
    ),
]
