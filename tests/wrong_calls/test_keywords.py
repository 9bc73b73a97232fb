"""A keyword that a public name does not have is refused with those that it has."""

import enum
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paraxis

px: Any = paraxis  # to type checkers, these calls are mistakes, too

ROOMS = ("train", "ensembles", "solve", "modules", "testing", "engines", "explain", "launch")

MADE_FOR_USERS = {
    "Batch", "Communication", "Ensemble", "Epoch", "Event", "Fitted", "History", "LBFGSState", "NewtonCGState",
    "Padded", "Passes", "Processes", "Progress", "ProximalGradientState", "Record", "Restored",
}  # fmt: skip
"""Classes of what users are given, and do not make."""

TAKES_ANY = {"Optimizer", "program"}


def _public() -> Iterator[Any]:
    rooms = [px, *(getattr(px, name) for name in ROOMS if hasattr(px, name))]
    found = {f"{room.__name__}.{name}": getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())}
    found |= {f"paraxis.Table.{name}": getattr(px.Table, name) for name in ("csv", "npy", "of_arrays", "parquet")}
    for path, value in sorted(found.items()):
        is_data = isinstance(value, type) and issubclass(value, (tuple, enum.Enum, BaseException))
        if callable(value) and not is_data and path.rpartition(".")[2] not in MADE_FOR_USERS | TAKES_ANY:
            yield pytest.param(value, id=path)


@pytest.mark.parametrize("value", list(_public()))
def test_an_unknown_keyword_is_refused_with_the_names_that_there_are(value: Any) -> None:
    name = next(iter(inspect.signature(value).parameters))
    with pytest.raises(TypeError, match=r"(no argument 'zzzz'; (there are|what is one of)|missing a req)") as refused:
        value(zzzz=1)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda: px.Axis("clients", 8, mehs=None), "mesh=…"),
        (lambda: px.solve.LBFGS(len, max_iter=3), "maxiter=…"),
        (lambda: px.solve.GradientDescent(len, learning_rate=0.1), "stepsize=…"),
        (lambda: px.solve.LogisticRegression(c=1), "C=…"),
        (lambda: px.solve.LogisticRegression(penalty="l1"), "l1_ratio=…"),
        (lambda: px.solve.Ridge(C=1), "alpha=…"),
        (lambda: px.train.StopEarly("test_loss", patiense=1), "patience=…"),
        (lambda: px.map_fn(len, arg=1), "args=…"),
        (lambda: px.Table.csv("rows", target="y", sep=";"), "delimiter=…"),
        (lambda: px.Table.parquet("rows", target="y", usecols=["x"]), "columns=…"),
        (lambda: px.Table.csv("rows", targt="y"), "target=…"),
        (lambda: px.broadcast(1, mesh=None), r"axis=px\.Axis\('clients', 8, mesh=mesh\)"),
    ],
)
def test_the_keyword_that_was_meant_is_written(call: Any, written: str) -> None:
    with pytest.raises(TypeError, match=f"there is no argument .*; write {written}"):
        call()


def test_a_call_that_does_not_fit_is_shown_one_that_does() -> None:
    axis = px.Axis("clients", 4)
    with pytest.raises(TypeError, match=r"Axis: missing a required argument: 'size'; write Axis\(name, size\)"):
        px.Axis("clients")
    with pytest.raises(TypeError, match=r"Table\.csv: .*'target'; write Table\.csv\(folder, target=…\)"):
        px.Table.csv("rows.csv")
    with pytest.raises(TypeError, match=r"map_fn: too many .*write map_fn\(fn, args, axis\); several args are one tup"):
        px.map_fn(lambda w, x: w * x, [1.0] * 4, [1.0] * 4, axis)


def test_arguments_in_a_list_are_asked_for_in_a_tuple() -> None:
    rows = np.ones(4, np.float32)
    with pytest.raises(TypeError) as refused:
        px.map_fn(lambda w, x: w * x, [rows, rows], px.Axis("clients", 4))
    assert "write args=(x, y), not a list" in refused.value.__notes__[-1]


@pytest.mark.parametrize("name", ["train", "predict", "Parallel", "train_step"])
def test_a_list_of_numbers_is_said_to_be_one(name: str) -> None:
    rows, labels = np.ones((8, 3), np.float32), [0, 1] * 4
    members = px.ensemble(lambda key: jax.random.normal(key, (3,)), 2, 0, apply=lambda w, x: x @ w)
    state = px.TrainState.create(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1))
    calls: dict[str, Any] = {
        "train": lambda: members.train(lambda w, x, y: w * y, rows, labels),
        "predict": lambda: members.predict(rows.tolist(), average="mean"),
        "Parallel": lambda: px.Parallel(lambda x, y: x[:, 0] * y)(rows, labels),
        "train_step": lambda: px.train_step(lambda net, batch: jnp.mean(net(batch[0])[:, 0] * batch[1]))(
            state, (rows, labels)
        ),
    }
    with pytest.raises(
        (TypeError, px.ShapeError), match=r"is a list of 8 (numbers|lists), not an array.*; write np\.asarray\("
    ):
        calls[name]()


LISTS: dict[str, tuple[Any, str]] = {
    "numbers": ([1.0, 2.0, 3.0], r"is a list of 3 numbers, not an array; write np\.asarray\("),
    "lists": ([[1.0, 2.0]] * 3, r"is a list of 3 lists, not an array \[3, 2\]; write np\.asarray\("),
    "uneven lists": ([[1.0, 2.0], [3.0]], "is a list of 2 lists of different lengths, which no array holds; fill"),
    "a tuple": ((1.0, 2.0, 3.0), r"is a tuple of 3 numbers, not an array; write np\.asarray\("),
    "arrays": (
        [np.ones(2, np.float32)] * 3,
        r"is a list of 3 arrays float32\[2\], not one array; write (jnp\.stack|np\.asarray)\(",
    ),
}
CALLS: dict[str, tuple[Any, str]] = {
    "pmap": (lambda x: px.pmap(lambda x: x * 2)(x), r"pmap: args\[0\]"),
    "grad": (lambda x: px.grad(lambda x: (x * 2).sum())(x), r"grad: args\[0\]"),
    "LBFGS": (
        lambda x: px.solve.LBFGS(lambda p, x: jnp.sum((p - x) ** 2)).run(jnp.zeros(3), x),
        r"LBFGS\.run: args\[0\]",
    ),
    "init_params": (lambda x: px.solve.LBFGS(lambda p: jnp.sum(p**2)).run(x), r"LBFGS\.run: init_params"),
    "train_step": (
        lambda x: px.train_step(lambda p, batch: jnp.mean(batch["x"] * p))(
            px.TrainState.create(jnp.ones(()), optax.sgd(0.1)), {"x": x}
        ),
        r"batch\['x'\]",
    ),
}


# To pmap, three arrays are an argument of which each has two elements.
@pytest.mark.parametrize(("call", "what"), sorted({*itertools.product(CALLS, LISTS)} - {("pmap", "arrays")}))
def test_a_list_in_the_place_of_an_array_is_described(call: str, what: str) -> None:
    (given, told), (run, argument) = LISTS[what], CALLS[call]
    with pytest.raises((TypeError, px.ShapeError), match=f"{argument} {told}"):
        run(given)


def test_labels_that_are_text_are_to_be_numbered() -> None:
    with pytest.raises(
        TypeError, match=r"y must be an array of numbers, got <U1 \[2\]; write np\.unique\(x, return_inv"
    ):
        px.pmap(lambda y: y)(np.array(["a", "b"]))


def test_the_error_of_a_builtin_is_its_own() -> None:
    with pytest.raises(jax.errors.ConcretizationTypeError, match="Attempted boolean conversion"):
        px.Jit(max)(np.ones(3))
    with pytest.raises(TypeError, match="iteration over a 0-d"):
        px.pmap(max)(np.ones(3))


def test_a_keyword_that_is_missing_is_in_the_line_to_write() -> None:
    members = px.ensemble(lambda key: jax.random.normal(key, (3,)), 2, 0)
    with pytest.raises(TypeError, match=r"'key'; write Ensemble\.fit\(step, data, batch_size=…, key=…\)"):
        members.fit(lambda w, x: w, (np.ones((8, 3)),), batch_size=4)


def test_a_list_that_was_broadcast_is_made_an_array_before() -> None:
    """To stack what it has become would turn it round."""
    axis, x = px.Axis("clients", 4), jnp.ones((4, 4))
    given = [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(
        TypeError, match=r"args\[0\] is a list of 4 arrays .* write np\.asarray\(…\) where the list is made"
    ):
        px.map_fn(lambda w, x: x @ w, (px.broadcast(given, axis), x), axis)
    found = px.map_fn(lambda w, x: x @ w, (px.broadcast(np.asarray(given), axis), x), axis)
    np.testing.assert_array_equal(found, np.full(4, 10.0))
