"""Calls of ensembles."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import paraxis as px
from paraxis import ensembles
from tests._support import axis_on
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    array,
    count,
    either,
    flag,
    function,
    instance,
    items,
    key,
    none,
    number,
    one_of,
    optional,
    path,
    text,
    tree,
)

ONE = axis_on(1, 3, "members").mesh
X = np.ones((4, 3), np.float32)
P = np.full((4, 2), 0.5, np.float32)
MANY = np.full((3, 4, 2), 0.5, np.float32)
LABELS = np.array([0, 1, 1, 0])


@functools.cache
def made() -> Any:
    return px.ensemble(own.make, 3, 0, apply=own.apply, mesh=ONE, donate=False, lowering="vmap")


@functools.cache
def trained() -> Any:
    """One of its own: NaN in the rows makes NaN of the members."""
    return px.ensemble(own.make, 3, 0, apply=own.apply, mesh=ONE, donate=False, lowering="vmap")


@functools.cache
def saved() -> Path:
    folder = Path(tempfile.mkdtemp())
    made().save(folder / "members")
    made().save_member(0, folder / "one.npz")
    return folder


def seed(v: Any) -> bool:
    return key(v) or count(-(2**31), 2**32)(v)


def features(v: Any) -> bool:
    return tree(v)


def indices(v: Any) -> bool:
    return count(-3, 2)(v) or array(3, dtypes="b")(v)


def labels(v: Any) -> bool:
    return array(4, dtypes="iu")(v)


def probabilities(v: Any) -> bool:
    return array(4, None, dtypes="f")(v)


LOWERING = one_of("auto", "vmap", "unroll", "dispatch")


def placed() -> dict[str, Any]:
    return {
        "apply": (own.apply, optional(function)),
        "mesh": (ONE, optional(instance(Mesh))),
        "over": ("members", optional(either(text, items(text)))),
        "at_once": (2, optional(count())),
        "lowering": ("vmap", LOWERING),
        "donate": (False, flag),
        "name": ("members", text),
    }


SCORES = [ensembles.accuracy, ensembles.brier_score, ensembles.nll, ensembles.fit_temperature]
OF_MEMBERS = [ensembles.disagreement, ensembles.mutual_information]
CALLS = [
    Call(
        "px.ensemble",
        px.ensemble,
        lambda: {"*make": (own.make, function), "*size": (3, count()), "*key": (0, seed), **placed()},
    ),
    Call(
        "px.load_ensemble",
        px.load_ensemble,
        lambda: {"*make": (own.make, function), "*path": (saved() / "members", none), **placed()},
    ),
    Call(
        "ensembles.load_member",
        px.ensembles.load_member,
        lambda: {"make": (own.make, function), "path": (saved() / "one.npz", none)},
        documented=(OSError,),
    ),
    Call(
        "Ensemble.train",
        lambda *a, **k: trained().train(*a, **k),
        lambda: {
            "*step": (own.member_step, function),
            "*args[0]": (X, features),
            "in_axes": (None, optional(one_of(0))),
        },
        left_out=("a tracer that escaped",),
    ),
    Call(
        "Ensemble.lower",
        lambda *a, **k: made().lower(*a, **k),
        lambda: {
            "*step": (own.member_step, function),
            "*args[0]": (X, either(features, instance(jax.ShapeDtypeStruct))),
            "in_axes": (None, optional(one_of(0))),
        },
        left_out=("a tracer that escaped", "a deleted array"),  # nothing is run
    ),
    Call(
        "Ensemble.predict",
        lambda *a, **k: made().predict(*a, **k),
        lambda: {
            "*inputs[0]": (X, features),
            "average": ("mean", one_of("softmax", "sigmoid", "mean", "moments", "mixture")),
            "where": (np.array([True, True, False]), optional(array(3, dtypes="b"))),
            "apply": (own.apply, optional(function)),
            "in_axes": (None, none),
            "batch_size": (2, optional(count())),
        },
    ),
    Call(
        "Ensemble.members",
        lambda *a, **k: made().members(*a, **k),
        lambda: {
            "*inputs[0]": (X, features),
            "apply": (own.apply, optional(function)),
            "in_axes": (None, none),
            "batch_size": (2, optional(count())),
        },
    ),
    Call(
        "Ensemble.fit",
        lambda *a, **k: made().fit(*a, **k),
        lambda: {
            "*step": (own.member_step, function),
            "*data": ((X,), none),
            "batch_size": (2, count()),
            "key": (0, seed),
            "num_epochs": (1, count(0, 3)),
            "first_epoch": (0, count(0)),
            "rows": (None, optional(array(None, dtypes="iu"))),
            "weights": (None, optional(array(4))),
            "own_order": (False, flag),
            "validate": (own.score, optional(function)),
            "validation": ((X,), none),
            "patience": (2, optional(count())),
        },
    ),
    Call("Ensemble.save", lambda **k: made().save(**k), lambda: {"path": ("saved", path)}, documented=(OSError,)),
    Call(
        "Ensemble.save_member",
        lambda **k: made().save_member(**k),
        lambda: {"index": (0, count(-3, 2)), "path": ("one.npz", path)},
        documented=(OSError, IndexError),
    ),
    Call(
        "Ensemble.add", lambda *a: made().add(*a), lambda: {"*members[0]": ({"w": np.ones((3, 2), np.float32)}, none)}
    ),
    Call(
        "Ensemble.drop",
        lambda *a: made().drop(*a),
        lambda: {"*indices[0]": (1, either(indices, array(None, dtypes="iu"), array(0, None), one_of(())))},
        documented=(IndexError,),
    ),
    Call(
        "Ensemble.__getitem__",
        lambda i: made()[i],
        lambda: {"*index": (1, either(indices, array(None, dtypes="iu"), instance(slice)))},
        documented=(IndexError,),
    ),
    Call(
        "Ensemble.bootstrap_rows",
        lambda **k: made().bootstrap_rows(**k),
        lambda: {"key": (0, seed), "num_rows": (4, count())},
    ),
    *(
        Call(f"ensembles.{fn.__name__}", fn, lambda: {"probabilities": (P, probabilities), "labels": (LABELS, labels)})
        for fn in SCORES
    ),
    *(
        Call(
            f"ensembles.{fn.__name__}",
            fn,
            lambda: {"probabilities": (P, probabilities), "labels": (LABELS, labels), "num_bins": (5, count())},
        )
        for fn in [ensembles.calibration_error, ensembles.reliability]
    ),
    *(
        Call(
            f"ensembles.{fn.__name__}",
            fn,
            lambda: {"member_probabilities": (MANY, array(None, None, None, dtypes="f"))},
        )
        for fn in OF_MEMBERS
    ),
    Call(
        "ensembles.entropy",
        ensembles.entropy,
        lambda: {"probabilities": (P, either(array(None, None, dtypes="f"), array(None, dtypes="fu")))},
    ),
    Call(
        "ensembles.evaluate",
        ensembles.evaluate,
        lambda: {"member_probabilities": (MANY, array(None, None, None, dtypes="f")), "labels": (LABELS, labels)},
    ),
    Call(
        "ensembles.apply_temperature",
        ensembles.apply_temperature,
        lambda: {
            "probabilities": (P, either(array(None, None, dtypes="f"), array(None, dtypes="fu"))),
            "temperature": (2.0, number(above=0)),
        },
    ),
    Call(
        "ensembles.cross_fitted_nll",
        ensembles.cross_fitted_nll,
        lambda: {
            "probabilities": (P, probabilities),
            "labels": (LABELS, labels),
            "num_splits": (2, count(2, 4)),
            "seed": (0, count(0, 2**32 - 1)),
        },
    ),
]
