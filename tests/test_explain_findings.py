"""Each finding has a program that causes it, and one that is alike and does not."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import paraxis as px
from paraxis.reports import Report
from paraxis.testing import communication
from tests._explained import lies, line_with, struct
from tests._support import mesh_over

pytestmark = pytest.mark.floor

MIB = 1024**2


def over(*spec: Any) -> NamedSharding:
    return lies(mesh_over(d=8), *spec)


def compared(x):
    return x @ x.T  # pairs of rows


def many_rows(x, *, size):
    return px.map_fn(lambda x: x @ x, x, px.Axis("clients", size))  # clients


def everywhere(x):
    return jax.lax.with_sharding_constraint(x @ x, over())  # products


def until(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x)  # condition


def together(x):
    return jax.lax.while_loop(lambda x: jax.lax.psum(x.sum(), "rows") < 9, lambda x: x * 2, x)


def turned(x, number):
    return px.map_fn(lambda x: jax.lax.fori_loop(0, number, lambda _, x: x * 2, x), x, ROWS)


def less(g, state):
    return jax.tree.map(jnp.subtract, state, g)


def moved(state, x):
    return {name: value + x for name, value in state.items()}


STATE = {"a": struct(MIB // 8), "b": struct(MIB // 8)}
TABLE = np.ones(MIB // 4, np.float32)
ROWS = px.Axis("rows", 64)

# The kind, a program that causes it and one that does not; the marker of its line, and words of its text.
CASES: dict[str, tuple[Callable[[], Report], Callable[[], Report], str | None, str]] = {
    "gather": (
        lambda: px.explain(compared)(struct(256, 128, lies=over("d"))),
        lambda: px.explain(compared)(struct(256, 128, lies=over())),
        "pairs of rows",
        "x, which lies in blocks, is gathered on each device along 'd'",
    ),
    "redundant": (
        lambda: px.explain(everywhere)(struct(64, 64, lies=over())),
        lambda: px.explain(functools.partial(many_rows, size=64))(struct(64, 8, 8)),
        "products",
        "the same work is done 8.0 times: each device computes 524 kFLOP, an equal share is 65.5 kFLOP",
    ),
    "condition": (
        lambda: px.explain(jax.vmap(until))(struct(64, 4, lies=over("d"))),
        lambda: px.explain(lambda x: px.map_fn(until, x, ROWS))(struct(64, 4)),
        "condition",
        "the devices exchange a loop's condition in each iteration",
    ),
    "padding": (
        lambda: px.explain(functools.partial(many_rows, size=10))(struct(10, 8, 8)),
        lambda: px.explain(functools.partial(many_rows, size=15))(struct(15, 8, 8)),
        "clients",
        "the 10 elements of 'clients' on 8 devices are padded to 16: 38% of the places are empty",
    ),
    "waiting": (
        lambda: px.explain(lambda x: px.map_fn(until, x, ROWS))(struct(64, 4)),  # map
        lambda: px.explain(lambda x: px.map_fn(until, x, dataclasses.replace(ROWS, at_once=1)))(struct(64, 4)),
        "map",
        "a loop ends at different times for the 8 elements of 'rows' that a device has",
    ),
    "replicated": (
        lambda: px.explain(lambda x: x.sum())(struct(4 * MIB, lies=over())),
        lambda: px.explain(lambda x: x.sum())(struct(4 * MIB, lies=over("d"))),
        None,
        "x (16 MiB) is whole on each of 8 devices",
    ),
    "constant": (
        lambda: px.explain(lambda x: x + TABLE)(struct(MIB // 4)),
        lambda: px.explain(lambda x, table: x + table)(struct(MIB // 4), TABLE),
        None,
        "an array float32[262144] (1 MiB) is closed over",
    ),
    "undonated": (
        lambda: px.explain(moved)(STATE, struct()),
        lambda: px.explain(jax.jit(moved, donate_argnums=0))(STATE, struct()),
        None,
        "state (1 MiB on each device) is returned changed",
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_explain_tells_a_finding_where_there_is_one_and_only_there(kind: Any) -> None:
    causes, does_not, marker, words = CASES[kind]
    (finding,) = causes().found(kind)
    assert words in finding.text
    assert (finding.line and finding.line.code.partition("  # ")[2]) == marker
    assert 0 < finding.weight <= 1
    assert does_not().found(kind) == []


def test_explain_tells_first_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "memory_stats", lambda _: {"bytes_limit": 64 * MIB})
    report = px.explain(lambda x: (x @ x.T) @ x)(struct(8192, 8))
    assert report.fits is False
    assert report.findings[0].kind == "too_large"
    assert "64 MiB; 256 MiB are temporaries" in report.findings[0].text
    assert px.explain(lambda x: (x @ x.T) @ x)(struct(1024, 8)).found("too_large") == []


PAIR = {"a": struct(1024, 1024), "b": struct(1024, 1024)}
WHOLE = [struct(MIB, lies=over())]
NOTHING: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "other names": ("undonated", lambda pair, x: {"u": x @ pair["a"], "v": x.T @ pair["b"]}, (PAIR, PAIR["a"])),
    "another is donated": ("undonated", jax.jit(less, donate_argnums=1), (STATE, STATE)),
    "a bare array": ("undonated", lambda x: x * 2, (struct(4 * MIB),)),
    "laid otherwise": ("undonated", lambda x: [jax.lax.with_sharding_constraint(x[0], over("d"))], (WHOLE,)),
    "a small state": ("undonated", moved, ({"a": struct(MIB // 8)}, struct())),
    "few rows": ("gather", compared, (struct(64, 128, lies=over("d")),)),
    "an element each": ("waiting", lambda x: px.map_fn(until, x, px.Axis("rows", 8)), (struct(8, 4),)),
    "lanes": ("waiting", lambda x: px.map_fn(until, x, ROWS, lowering="lanes"), (struct(64, 4),)),
    "no loop": ("waiting", lambda x: px.map_fn(jnp.sin, x, ROWS), (struct(64, 4),)),
    "in step": ("waiting", lambda x: px.map_fn(together, x, ROWS), (struct(64, 4),)),
    "as often each": ("waiting", turned, (struct(64, 4), struct(dtype=jnp.int32))),
    "one device": ("replicated", jnp.sum, (struct(4 * MIB),)),
    "a copy on some": ("replicated", jnp.sum, (struct(4 * MIB, lies=lies(mesh_over(d=2, m=4), "m")),)),
    "few numbers": ("replicated", jnp.sum, (struct(3 * MIB, lies=over()),)),
    "a short table": ("constant", lambda x: x + TABLE[1:], (struct(MIB // 4 - 1),)),
}


@pytest.mark.parametrize("case", NOTHING)
def test_explain_finds_nothing_where_there_is_no_fault_or_a_small_one(case: str) -> None:
    kind, fn, args = NOTHING[case]
    assert px.explain(fn)(*args).found(kind) == []


def test_explain_writes_which_state_to_donate_and_guesses_none_of_two() -> None:
    (finding,) = px.explain(lambda state, g: less(g, state))(STATE, STATE).found("undonated")
    assert finding.text.startswith("state or g (1 MiB on each device)")
    (finding,) = px.explain(lambda x, state: ({"new": moved(state, x)}, x))(struct(), STATE).found("undonated")
    assert "jax.jit(…, donate_argnames='state')" in finding.write


def test_explain_adds_up_arrays_that_are_whole_everywhere() -> None:
    half = [struct(2 * MIB, lies=over()) for _ in range(4)]  # 8 MiB each
    (of_one,) = px.explain(lambda x: sum(v.sum() for v in x["p"]))({"p": half}).found("replicated")
    assert of_one.text == "4 arrays of x (32 MiB) are whole on each of 8 devices"
    assert len(px.explain(lambda x: [v * 2 for v in x])(half).found("replicated")) == 1  # not again as a result
    made = jax.jit(lambda x: jnp.broadcast_to(x, (4 * MIB,)), out_shardings=over())
    (result,) = px.explain(made)(struct(lies=over())).found("replicated")
    assert "out_shardings" in result.write


def all_of_it(x):
    jax.debug.print("{}", x[0, 0])  # call of Python
    return everywhere(x) + (x[0, 0] * TABLE).sum()


JITS: dict[str, Callable[..., Any]] = {"jax.jit": jax.jit, "eqx.filter_jit": eqx.filter_jit, "nnx.jit": nnx.jit}


@pytest.mark.parametrize("jit", JITS)
def test_explain_looks_through_what_any_library_jits(jit: str) -> None:
    x = jax.device_put(jnp.ones((64, 64)), over())
    report = px.explain(JITS[jit](all_of_it))(x)
    assert {finding.kind for finding in report.findings} == {"constant", "redundant"}
    assert report.work.share == 2 * 64**3 / 8
    assert [line.code.partition("  #")[2] for line in report.callbacks if line] == [" call of Python"]
    assert report.unchecked == ()
    model = eqx.nn.Linear(1024, 1024, key=jax.random.key(0))
    assert px.explain(eqx.filter_jit(model))(jnp.ones(1024)).findings == ()  # what it holds is no constant


def endless(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, everywhere, x)


UNKNOWN: dict[str, tuple[Any, Any]] = {
    "done twice: a loop has no known end": (endless, struct(64, 64, lies=over())),
    "work done twice by lapack_spotrf_ffi": (jnp.linalg.cholesky, struct(8, 4, 4, lies=over())),
    "work done twice by fft": (jnp.fft.fft, struct(8, 4, lies=over())),
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_explain_tells_what_nobody_can_look_for(words: str) -> None:
    fn, x = UNKNOWN[words]
    report = px.explain(fn)(x)
    (told,) = report.unchecked
    assert words in told
    assert "No findings among what can be looked for" in str(report)
    assert f"not looked for: {told}" in str(report)
    once = px.explain(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, compared, x))
    alone = once(struct(64, 64))  # one device does nothing twice
    assert (alone.unchecked, str(alone).endswith("No findings")) == ((), True)


def squares(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return ((hidden @ params["w"].T) ** 2).mean(1)


@pytest.mark.parametrize("is_abstract", [False, True])
@pytest.mark.parametrize("shard", [None, "params"])
def test_explain_knows_what_a_training_step_was_told_and_needs_no_arrays(shard: Any, is_abstract: bool) -> None:
    """Where the state is split, gathers of it are what was asked for; where it is not, the step can be told to."""
    make = lambda: px.TrainState.create({"w": jnp.zeros((1024, 2048))}, optax.adam(0.1))  # noqa: E731
    state, batch = jax.eval_shape(make) if is_abstract else make(), {"x": struct(8192, 1024)}
    report = px.explain(px.train_step(squares, shard=shard))(state, batch)
    size = 1024 * 2048 * 4
    sent = report.communication
    assert sent.bytes["all_gather"] >= size if shard else sent.bytes["all_reduce"] >= size
    whole = [finding.write for finding in report.found("replicated")]
    assert whole == ['split it: px.train_step(…, shard="params")'] * (shard is None)
    assert not report.found("gather")
    assert px.explain(px.eval_step(squares))(state, batch).work.factor == 1


def test_explain_says_first_that_the_rows_of_a_step_do_not_divide() -> None:
    """Then compilers may gather the rows, where they else gather the parameters."""
    state = jax.eval_shape(lambda: px.TrainState.create({"w": jnp.zeros((1024, 2048))}, optax.adam(0.1)))
    found = px.explain(px.train_step(squares, shard="params"))(state, {"x": struct(4100, 1024)}).found("gather")
    words = "take a multiple of 8 rows, as 4,100 of batch['x'] do not divide; else compute on each device's own rows"
    assert found
    assert all(finding.write.startswith(words) for finding in found)
    assert px.explain(compared)(struct(256, 128, lies=over("d"))).found("gather")[0].write.startswith("compute on")


def test_explain_takes_an_ensemble_of_shapes_as_one_of_arrays() -> None:
    make = lambda key: px.TrainState.create({"w": jax.random.normal(key, (6, 4))}, optax.adam(0.1))  # noqa: E731
    apply = lambda state, batch: batch["x"] @ state.params["w"]  # noqa: E731
    step, batch = px.train_step(squares), {"x": struct(5, 6)}
    held, shapes = (px.ensemble(make, 12, key, apply=apply) for key in (0, jax.eval_shape(jax.random.key, 0)))
    assert shapes.lower(step, batch).as_text() == held.lower(step, batch).as_text()
    for args in (("train", step, batch), ("predict", batch)):
        found, expected = (px.explain(getattr(ens, args[0]))(*args[1:]) for ens in (shapes, held))
        assert (found.arguments, found.findings) == (expected.arguments, expected.findings)
        assert found.summary() == expected.summary()
        assert {x.split for x in found.arguments if x.name == "members['params.w']"} == {(8, 1, 1)}
    assert communication(shapes.predict, batch, average="moments", where=[True] * 12).count["all_reduce"] == 2


def test_explain_finds_no_fault_with_a_gather_that_the_elements_ask_for() -> None:
    all_of_them = lambda x: px.map_fn(lambda x: x.sum() - px.all_gather(x, "rows").mean(0), x, ROWS)  # noqa: E731
    report = px.explain(all_of_them)(struct(64, 2048))
    assert report.communication.bytes["all_gather"] == 64 * 2048 * 4
    assert report.findings == ()


def test_explain_names_a_function_without_a_name_by_its_line() -> None:
    fn = lambda x: x + 1  # noqa: E731  # unnamed
    assert px.explain(fn)(struct()).name.endswith(f" of test_explain_findings.py:{line_with('unnamed', __file__)}")
