"""``ens.train``: one member's step for all members, with what they share and what is each one's own."""

import dataclasses
import gc
import signal
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests._members import mesh_of
from tests._support import assert_close, values

SIZE = 5
X, Y = values(6, 2), values(6, seed=1)
W = values(SIZE, 2, seed=2)
Step = Callable[..., Any]


def linear(**options: Any) -> px.Ensemble:
    """Five members ``(2,)`` with weights that are given, on two devices."""
    return px.ensemble(lambda key, w: w, SIZE, 0, W, apply=lambda w, x: x @ w, mesh=mesh_of(2), **options)


def mse(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ w - y) ** 2)


def step(w: jax.Array, x: jax.Array, y: jax.Array, lr: Any = 0.1) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(mse)(w, x, y)
    return w - lr * gradient, loss


def check(ens: px.Ensemble, out: Any, expected: Any) -> None:
    assert_close((ens.stacked(), out), jax.tree.map(jnp.asarray, expected))


OWN = values(SIZE, 6, 2, seed=3), values(SIZE, 6, seed=4), values(SIZE, seed=5)
CASES: dict[str, tuple[Step, tuple[Any, ...], Any, Step, tuple[Any, ...]]] = {
    # step, its arguments, in_axes, one member's step of the rows that are its own, those rows
    "each its own batch": (step, OWN[:2], 0, step, OWN[:2]),
    "a tree": (
        lambda w, batch, given: step(w, batch["x"], batch["y"], given["lr"][0]),
        ({"x": X, "y": OWN[1]}, {"lr": [OWN[2]]}),
        ({"x": None, "y": 0}, 0),
        lambda w, y, lr: step(w, X, y, lr),
        OWN[1:],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ensemble_train_shares_arguments_or_gives_each_member_its_own(name: str) -> None:
    fn, args, in_axes, alone, rows = CASES[name]
    ens = linear()
    out = ens.train(fn, *args, in_axes=in_axes)
    each = [jax.jit(alone)(*own) for own in zip(W, *rows, strict=True)]
    check(ens, out, jax.tree.map(lambda *leaves: np.stack(leaves), *each))


@pytest.mark.parametrize("lowering", ["auto", "vmap"])
def test_ensemble_train_lets_members_exchange_values_by_the_axis_s_name(lowering: Any) -> None:
    def pulled(w: jax.Array) -> Any:
        return 0.5 * (w + px.pmean(w, "members")), (px.axis_index("members"), jax.lax.psum(1, "members"))

    ens = linear(lowering=lowering)
    out = ens.train(pulled)
    check(ens, out, (0.5 * (W + W.mean(0)), (jnp.arange(SIZE, dtype="int32"), jnp.full(SIZE, SIZE))))


@pytest.mark.parametrize("donate", [True, False])
def test_ensemble_train_gives_the_old_state_away_only_if_donated(donate: bool) -> None:
    width = 7  # by which the members' arrays are known
    others = jax.live_arrays()  # held: the number of one that is freed may be given to a new one
    alive = {id(array) for array in others}
    ens = px.ensemble(lambda key, w: w, SIZE, 0, np.ones((SIZE, width)), mesh=mesh_of(2), donate=donate)
    before = [a for a in jax.live_arrays() if id(a) not in alive and a.shape[-1:] == (width,)]
    assert sum(a.size for a in before) >= SIZE * width
    ens.train(lambda w: 2 * w)
    assert [leaf.is_deleted() for leaf in before] == [donate] * len(before)


def test_ensemble_train_lets_an_interrupt_wait_until_the_members_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a program has run, memory has been given away, and what came in its place is not kept yet."""
    jit = jax.jit

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        run = jit(*args, **kwargs)
        return lambda *args: (run(*args), signal.raise_signal(signal.SIGINT))[0]

    ens = linear(donate=True)
    monkeypatch.setattr(jax, "jit", interrupting)
    double = lambda w: 2 * w  # noqa: E731
    for number in range(1, 3):
        with pytest.raises(KeyboardInterrupt):
            ens.train(double)
        assert_close(ens.stacked(), 2**number * W)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("lowering", ["vmap", "unroll"])
def test_ensemble_train_traces_a_step_for_the_first_call_only(lowering: Any) -> None:
    traced = []

    def counted(w: jax.Array, x: jax.Array, y: jax.Array, lr: Any) -> Any:
        traced.append(w)
        return step(w, x, y, lr)

    ens = linear(lowering=lowering)
    for rate in (0.1, 0.2, 0.3):
        ens.train(counted, X + rate, Y, rate)
    assert len(traced) == 1


def test_ensemble_train_compiles_one_program_for_a_step_with_convolutions(caplog: pytest.LogCaptureFixture) -> None:
    """One for all devices, and not one for each."""

    def convolve(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.convolve(x, w).sum())(w), x.sum()

    ens, x = px.ensemble(lambda key: jax.random.normal(key, (3,)), 8, 0, mesh=mesh_of(4)), jnp.ones(9)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        ens.train(convolve, x)
    assert sum("Finished XLA compilation" in record.getMessage() for record in caplog.records) == 1


def test_ensemble_train_lets_go_of_a_function_and_what_it_closes_over() -> None:
    """A step that closes over its batch is ordinary."""

    @dataclasses.dataclass
    class Trainer:  # which has no hash, as it is compared by value
        x: jax.Array

        def step(self, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return w - 0.1, (self.x @ w).sum()

    ens = linear()

    def use(number: int) -> list[weakref.ref[jax.Array]]:
        x = jnp.full((6, 2), float(number))
        trainer = Trainer(x + 1)
        ens.train(lambda w: (w, (x @ w).sum()))
        ens.train(trainer.step)
        ens.members(X, apply=lambda w, _: x @ w)
        return [weakref.ref(x), weakref.ref(trainer.x)]

    gone = [ref for number in range(2) for ref in use(number)]
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * len(gone)


REFUSED: dict[str, tuple[type[Exception], str, Callable[[px.Ensemble], Any]]] = {
    "traced": (px.StateError, "so JAX cannot trace it", lambda ens: jax.jit(lambda x: ens.train(step, x, Y))(X)),
    "a loss alone": (px.StateError, r"from float32\[2\] to float32\[\]", lambda ens: ens.train(mse, X, Y)),
    "another dtype": (
        px.StateError,
        r"step changed value from float32\[2\] to bfloat16\[2\].*x\.astype\('float32'\)",
        lambda ens: ens.train(lambda w: w.astype("bfloat16")),
    ),
    "a rate in a function": (
        jax.errors.UnexpectedTracerError,
        r"a rate given to make: write optax\.inject_hyperparams",
        lambda _: px.ensemble(
            lambda key, rate: px.TrainState.create(jax.random.normal(key, (2,)), optax.sgd(rate)), 3, 0, X[:3, 0]
        ).fit(px.train_step(lambda w, x: x @ w), X, batch_size=6, epochs=1, progress=False),
    ),
    "another structure": (px.StateError, "step must return the new member", lambda ens: ens.train(lambda w: [w, w])),
    "rows of three": (px.DataError, r"has shape \(3,\)", lambda ens: ens.train(step, X[:3, 0], in_axes=0)),
    "an axis of one": (px.DataError, "in_axes must be 0 or None", lambda ens: ens.train(step, X, in_axes=1)),
    "one number per row": (px.DataError, "needs logits", lambda ens: ens.predict(X)),
    "another mask": (px.DataError, "one boolean", lambda ens: ens.predict(X, average="mean", where=np.arange(SIZE))),
    "an average": (ValueError, "average must be one of", lambda ens: ens.predict(X, average="logits")),  # pyright: ignore
    "no apply": (px.StateError, "apply=lambda", lambda _: px.ensemble(jax.random.normal, 2, 0).predict(X)),
    "no mixture": (px.DataError, r"\(mean, variance\)", lambda ens: ens.predict(X, average="mixture")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ensemble_train_refuses_what_is_wrong_and_leaves_the_members_alone(case: str) -> None:
    kind, message, call = REFUSED[case]
    ens = linear()
    with pytest.raises(kind, match=message):
        call(ens)
    assert_close(ens.stacked(), W)


@dataclasses.dataclass(slots=True, eq=False)
class Slotted:
    """A step without a ``__dict__``, of which there are no weak references."""

    rate: float

    def __call__(self, w: Any) -> Any:
        return w + self.rate

    def down(self, w: Any) -> Any:
        return w - self.rate


def test_ensemble_train_takes_steps_without_weak_references() -> None:
    ens, one, two = linear(), Slotted(1.0), Slotted(2.0)
    for step in (one, two, two.down, one):
        ens.train(step)
    assert_close(ens.stacked(), W + 2.0)
