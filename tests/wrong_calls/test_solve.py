"""Wrong calls of the solvers: each is refused by an error that names the argument."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call, every_day_and_at_night, flaws
from tests.wrong_calls._values import (
    anything,
    count,
    flag,
    function,
    leaves,
    none,
    number,
    one_of,
    optional,
    usable,
)

solve, objective, prox = px.solve, px.solve.objective, px.solve.prox
P = jnp.zeros(2)
positive = number(above=0)


def floating(v: Any) -> bool:
    """Its own shape is as good as any: the function has none."""
    found = list(leaves(v))
    return bool(found) and all(usable(x) and np.asarray(x).dtype.kind in "f" for x in found)


BOTH = {"maxiter": (2, count()), "tol": (1e-3, number(0)), "verbose": (False, flag)}
FUN = {"fun": (own.quadratic, function), "value_and_grad": (False, flag), "has_aux": (False, flag)}
STEPS = {
    "stepsize": (0.1, number(0)),
    "acceleration": (True, flag),
    "maxls": (5, count()),
    "decrease_factor": (0.5, number(above=0, most=0.9999999)),
}
SOLVERS = {
    "LBFGS": (
        solve.LBFGS,
        {
            "linesearch": ("zoom", one_of("zoom", "backtracking", "hager-zhang")),
            "stepsize": (0.1, number(0)),
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


def second(name: str) -> dict[str, Any]:
    return {"*hyperparams_prox": (None, anything)} if name == "ProximalGradient" else {}


PARAMS = floating
SCALE = usable


CALLS = [
    *(
        Call(f"solve.{name}", made, lambda options=options: {**FUN, **BOTH, **options}, run)
        for name, (made, options) in SOLVERS.items()
    ),
    *(
        Call(
            f"{name}.run",
            lambda *a, name=name, **k: solver(name).run(*a, **k),
            lambda name=name: {"*init_params": (P, PARAMS), **second(name), "scale": (2.0, SCALE)},
        )
        for name in SOLVERS
    ),
    *(
        Call(
            f"{name}.init_state",
            lambda *a, name=name, **k: solver(name).init_state(*a, **k),
            lambda name=name: {"*init_params": (P, PARAMS), **second(name), "scale": (2.0, SCALE)},
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
                **second(name),
                "scale": (2.0, SCALE),
            },
        )
        for name in SOLVERS
    ),
    *(
        Call(
            f"{name}.optimality_fun",
            lambda *a, name=name, **k: solver(name).optimality_fun(*a, **k),
            lambda name=name: {"*params": (P, PARAMS), **second(name), "scale": (2.0, SCALE)},
        )
        for name in SOLVERS
    ),
]


@every_day_and_at_night()
@pytest.mark.parametrize("call", CALLS, ids=repr)
def test_wrong_calls_are_refused_by_name(call: Call, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert flaws(call, number, tmp_path) == {}
