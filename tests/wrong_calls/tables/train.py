"""Calls of training."""

import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px
from tests._support import axis_on
from tests.wrong_calls import _functions as own
from tests.wrong_calls._calls import Call
from tests.wrong_calls._values import (
    anything,
    count,
    either,
    flag,
    function,
    instance,
    key,
    leaves,
    none,
    number,
    one_of,
    optional,
    path,
    rows,
    text,
    tree,
    usable,
)

ONE = axis_on(1, 1, "batch")
ROWS = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}
PARAMS = {"w": np.ones((3, 2), np.float32)}
SGD = optax.sgd(0.1)


@functools.cache
def step() -> Any:
    return px.train_step(own.row_loss, axis=ONE, donate=False)


@functools.cache
def evaluate() -> Any:
    return px.eval_step(own.row_loss, axis=ONE)


def data() -> Any:
    return px.loader(ROWS, 2, axis=ONE, seed=0)


@functools.cache
def start() -> Any:
    return px.TrainState.create(PARAMS, SGD)


@functools.cache
def kept() -> Any:
    found = px.Checkpoints(tempfile.mkdtemp(), asynchronous=False)
    found.save(1, PARAMS)
    return found


@functools.cache
def history() -> Any:
    return px.fit(start(), step(), [ROWS], epochs=1, progress=False, donate=False).history


def an_axis(v: Any) -> bool:
    return text(v) or isinstance(v, px.Axis)


def floating(v: Any) -> bool:
    return all(usable(x) and np.asarray(x).dtype.kind in "fc" for x in leaves(v)) and bool(leaves(v))


OPTIMIZER = instance(optax.GradientTransformation)
COMPILED = {
    "axis": (ONE, an_axis),
    "microbatches": (None, optional(count())),
    "precision": (None, one_of(None, "bfloat16", "float16", "float32")),
    "reproducible": (None, one_of(None, "bits")),
    "groups": (8, count()),
}
A_NUMBER = either(number(), flag)
CALLS = [
    Call(
        "TrainState.create",
        px.TrainState.create,
        lambda: {
            "model": (PARAMS, floating),
            "optimizer": (SGD, OPTIMIZER),
            "key": (jax.random.key(0), optional(key)),
            "sample": (None, anything),
            "mutable": (None, tree),
            "ema": (0.9, optional(number(0, 0.9999999))),
            "extra": ({"a": 1.0}, tree),
        },
    ),
    Call(
        "TrainState.model",
        lambda **k: px.TrainState.create(PARAMS, SGD, ema=0.5).model(**k),
        lambda: {"ema": (True, flag)},
    ),
    Call(
        "TrainState.weights",
        lambda **k: px.TrainState.create(PARAMS, SGD, ema=0.5).weights(**k),
        lambda: {"ema": (True, flag)},
    ),
    Call(
        "TrainState.replace",
        lambda **k: start().replace(**k),
        lambda: {"params": (PARAMS, anything), "step": (jnp.int32(3), anything)},
    ),
    Call(
        "px.train_step",
        px.train_step,
        lambda: {
            "loss_fn": (own.row_loss, function),
            **COMPILED,
            "clip": (1.0, optional(number(above=0))),
            "guard": (True, flag),
            "shard": (None, optional(function)),
            "donate": (False, flag),
        },
    ),
    Call("px.eval_step", px.eval_step, lambda: {"fn": (own.row_loss, function), **COMPILED, "ema": (False, flag)}),
    Call("a train step", step(), lambda: {"state": (start(), none), "batch": (ROWS, tree)}),
    Call("an eval step", evaluate(), lambda: {"state": (start(), none), "batch": (ROWS, tree)}),
    Call(
        "px.loader",
        px.loader,
        lambda: {
            "source": (ROWS, either(rows(4), rows(7), rows(3), rows(2))),
            "batch_size": (2, count()),
            "axis": (ONE, an_axis),
            "shuffle": (True, optional(flag)),
            "seed": (0, count(0, 2**64 - 1)),
            "drop_last": (False, flag),
            "read_ahead": (0, count(0)),
            "transform": (None, optional(function)),
        },
        lambda made: next(iter(made.epoch(0))),
    ),
    Call("Loader.batches", lambda **k: data().batches(**k).close(), lambda: {"start": (0, count(0))}),
    Call("Loader.epoch", lambda **k: data().epoch(**k).close(), lambda: {"number": (0, count(0))}),
    Call("Loader.rows", lambda **k: data().rows(**k), lambda: {"number": (0, count(0))}),
    Call(
        "px.Checkpoints",
        px.Checkpoints,
        lambda: {
            "path": ("kept", path),
            "every": (1, optional(count())),
            "keep": (3, optional(count())),
            "keep_every": (None, optional(count())),
            "best": (("loss", "min"), none),
            "asynchronous": (False, flag),
        },
    ),
    Call(
        "Checkpoints.save",
        lambda **k: kept().save(**k),
        lambda: {
            "step": (1, count(0, 2**80)),
            "tree": (PARAMS, anything),
            "notes": ({"loss": 1.0}, lambda v: v is None or isinstance(v, dict)),
        },
    ),
    Call(
        "Checkpoints.restore",
        lambda **k: kept().restore(**k),
        lambda: {"target": (PARAMS, anything), "step": (1, optional(count(0))), "partial": (False, flag)},
    ),
    Call("Checkpoints.is_due", lambda **k: kept().is_due(**k), lambda: {"step": (1, count(0))}),
    Call(
        "px.Evaluate",
        px.Evaluate,
        lambda: {
            "step": (evaluate(), function),
            "data": ([ROWS], anything),
            "every": ("epoch", either(count(), one_of("epoch"))),
            "name": ("test", text),
        },
    ),
    Call(
        "Evaluate.__call__",
        lambda **k: px.Evaluate(evaluate(), [ROWS])(**k),
        lambda: {"state": (start(), none)},
    ),
    Call("History.curve", lambda **k: history().curve(**k), lambda: {"metric": ("loss", one_of("loss"))}),
    Call(
        "train.StopEarly",
        px.train.StopEarly,
        lambda: {
            "metric": ("test/loss", text),
            "patience": (3, count()),
            "mode": ("min", one_of("min", "max", None)),
            "min_change": (0.0, number(0)),
        },
    ),
    Call(
        "px.Mean",
        px.Mean,
        lambda: {
            "total": (6.0, either(A_NUMBER, lambda v: v != v)),
            "weight": (3.0, either(number(0, 1e300), flag)),
            "value": (None, optional(either(A_NUMBER, lambda v: v != v))),
        },
        float,
    ),
    Call(
        "px.fit",
        px.fit,
        lambda: {
            "state": (start(), none),
            "step": (step(), none),
            "data": ([ROWS], anything),
            "epochs": (1, count(1, 2)),
            "evaluate": (None, one_of(None, ())),
            "checkpoint": (None, optional(path)),
            "callbacks": (own.seen, function),
            "log": ("log", optional(path)),
            "log_every": (1, count()),
            "tensorboard": (None, optional(path)),
            "plot": (None, none),
            "progress": (False, optional(flag)),
            "stop_early": (None, none),
            "donate": (False, flag),
        },
    ),
]
