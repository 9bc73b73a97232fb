"""Wrong calls of every public name are refused by an error that names the argument, and there is a table for each."""

import functools
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests.wrong_calls import _public
from tests.wrong_calls._calls import AT_NIGHT, EVERY_DAY, Call, flaws
from tests.wrong_calls.tables import core, engines, ensembles, estimators, solve, tools, train, transforms

TABLES = (core, engines, transforms, ensembles, solve, estimators, train, tools)
CALLS = {f"{table.__name__.rpartition('.')[2]}-{call}": call for table in TABLES for call in table.CALLS}
WITHOUT = {
    "made by our functions, and read": (
        *("ensembles.Ensemble", "ensembles.Epoch", "ensembles.History", "ensembles.Reliability", "ensembles.Scores"),
        *("engines.Padded", "engines.Passes", "testing.Communication", "launch.Processes", "objective.LinearObjective"),
        *("transforms.Gradients", "transforms.Variables"),
        *("solve.CrossValidated", "solve.LBFGSState", "solve.NewtonCGState", "solve.OptStep", "solve.Path"),
        *("solve.ProximalGradientState", "solve.Rows", "solve.Status", "train.Batch", "train.Fitted", "train.History"),
        *("reports.Collective", "reports.Finding", "reports.Layout", "reports.LineWork", "reports.Memory"),
        *("reports.Estimate",),
        *(
            "reports.Arrays",
            "reports.Comparison",
            "reports.Leaf",
            "reports.Timing",
            "reports.ModuleRow",
            "reports.ModuleTable",
            "reports.Report",
            "reports.Work",
        ),
        *("train.Loader", "train.Record", "train.Restored", "train.TrainState"),
    ),
    "a record of what happened, of which all values are right": ("engines.Progress", "train.Event", "solve.Iteration"),
    "asked by our own loops, in each step": ("Batch.turn", "Evaluate.is_due", "Rows.with_arrays"),
    "asked by our own solvers, once": (
        *("Stream.rows_at_once", "Stream.rows_saved", "Pool.rows_at_once", "Pool.of_blocks", "Ray.rows_at_once"),
        "Ray.of_blocks",
    ),
    "asked by what is mapped": ("Padded.__getitem__",),
    "an error that says what to write, whatever it is given": ("Batch.__getitem__",),
}


@pytest.mark.parametrize("number", [EVERY_DAY, pytest.param(AT_NIGHT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_wrong_calls_are_refused_by_name(call: Call, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = flaws(call, number, tmp_path)
    assert not found, "\n".join(f"{label}: {flaw}" for label, flaw in found.items())


BEYOND = {
    "broadcast: x ": lambda n: px.broadcast(n, px.Axis("n", 4)),
    "Parallel: args": lambda n: px.Parallel(lambda x: x)(n),
    "LBFGS: tol ": lambda n: px.solve.LBFGS(jnp.sum, tol=n),
    "Ridge: alpha ": lambda n: px.solve.Ridge(alpha=n).fit(np.eye(3), np.ones(3)),
    "Ridge: sample_weight ": lambda n: px.solve.Ridge().fit(np.eye(3), np.ones(3), n),
    "Mean: weight ": lambda n: float(px.Mean(1.0, n)),
}


@pytest.mark.parametrize("named", BEYOND)
def test_an_integer_that_no_float_holds_is_refused_by_name(named: str):
    for number in (10**400, -(10**400)):
        with pytest.raises((TypeError, ValueError), match=named):
            BEYOND[named](number)


def _fitted(**options):
    state = px.TrainState.create({"w": jnp.zeros(())}, optax.sgd(0.1))
    step = px.train_step(lambda params, batch: params["w"] * batch)
    px.fit(state, step, [jnp.ones(8)], steps=1, progress=False, **options)


def _proximal(prox=None, hyperparams_prox=None):
    options = {} if prox is None else {"prox": prox}
    px.solve.ProximalGradient(lambda w: jnp.sum(w**2), **options).run(jnp.zeros(3), hyperparams_prox)


ENGINES = {engine.__name__: functools.partial(engine, at_once=1) for engine in (px.Stream, px.Pool, px.Ray)}
STEPS = {step.__name__: functools.partial(step, lambda params, batch: 0.0) for step in (px.train_step, px.eval_step)}
TOGETHER = [
    *((name, made, "save_every", 3.5, {"folder": "run"}) for name, made in ENGINES.items()),
    *((name, made, "groups", 4, {"reproducible": "any device count"}) for name, made in STEPS.items()),
    ("Groups", functools.partial(px.Groups, [np.ones(3)] * 4), "num_shapes", 3, {"lengths": [3] * 4}),
    ("px.fit", _fitted, "log_every", 2, {"log": "log.jsonl"}),
    ("px.fit", _fitted, "log_every", 2, {"tensorboard": "board"}),
    ("ProximalGradient.run", _proximal, "hyperparams_prox", 0.5, {"prox": px.solve.prox.l1}),
]


@pytest.mark.parametrize(("who", "call", "name", "value", "other"), TOGETHER)
def test_what_means_nothing_without_another_argument_is_refused(who, call, name, value, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (needed,) = other
    text = rf"^{who}: {name}={value} is of no use without .*{needed}.*; write .*="
    with pytest.raises((ValueError, px.ParaxisError), match=text):
        call(**{name: value})
    assert not list(tmp_path.iterdir())
    call(**{name: value}, **other)


def test_rows_without_targets_say_so():
    with pytest.raises(TypeError, match=r"^rows: y is missing.*write px\.solve\.rows\(X, y\)"):
        px.solve.rows(np.ones((4, 2)), class_weight="balanced")


def test_every_public_name_has_a_table_or_a_reason_why_it_needs_none():
    names, tabled = _public.callables(_public.ROOMS), {call.name for call in CALLS.values()}
    without = [name for group in WITHOUT.values() for name in group]
    assert _public.untabled(names, tabled, without) == set()
    assert set(without) <= set(names) - tabled, "a name that has a table, or is gone, needs no reason"


def test_a_public_name_without_a_table_is_found():
    class Made:
        def __init__(self, size: int) -> None:
            del size

        def method(self, x: int) -> None:
            del x

        def of_nothing(self) -> None:
            pass

    class Below(Made):
        pass

    Made.__module__ = Below.__module__ = Made.method.__module__ = "paraxis.room"
    room = types.ModuleType("paraxis.room")
    vars(room).update(
        Made=Made, Below=Below, fn=lambda x: x, Error=px.AxisError, __all__=["Made", "Below", "fn", "Error"]
    )
    names = _public.callables({"room": room})
    assert set(names) == {"room.Made", "room.Below", "room.fn", "Made.method", "Below.method"}
    assert _public.untabled(names, ["room.Made", "room.fn"], ["room.Below"]) == {"Made.method", "Below.method"}
    assert _public.untabled(names, ["room.fn", "Below.method", "another"], ["room.Made", "room.Below"]) == set()
