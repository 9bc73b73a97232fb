"""Each finding has a program that causes it, and one that is alike and does not."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from paraxis.reports import Report

pytestmark = pytest.mark.newest

MIB = 1024**2


def struct(*shape: int, dtype: Any = jnp.float32, lies: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=lies)


@functools.cache
def flat() -> Mesh:
    return Mesh(np.array(jax.devices()), ("d",))


def over(*spec: Any) -> NamedSharding:
    return NamedSharding(flat(), P(*spec))


def per_device(body: Callable[..., Any], *args: Any) -> Any:
    return jax.shard_map(body, mesh=flat(), in_specs=P("d"), out_specs=P(), check_vma=False)(*args)


def compared(x):
    return x @ x.T  # pairs of rows


def summed(x, *, integer):
    def body(x):
        count = (x > 0).astype(jnp.int32 if integer else jnp.float32)
        return jax.lax.psum(x, "d"), jax.lax.psum(count, "d")  # counts

    return per_device(body, x)


def many_rows(x, *, size):
    return px.map_fn(lambda x: x @ x, x, px.Axis("clients", size))  # clients


def trained(rows: int) -> Report:
    state = px.TrainState.create(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1))
    step = px.train_step(lambda model, batch: (model(batch) ** 2).mean())
    return px.explain(step)(state, np.ones((rows, 4), np.float32))


def everywhere(x):
    return jax.lax.with_sharding_constraint(x @ x, over())  # products


def divided(x):
    return jax.lax.with_sharding_constraint(x * 2, over("d")).sum()  # rows


def turned(state, x, *, spec):
    return {"w": jax.lax.with_sharding_constraint(state["w"] + x.sum(), over(*spec)), "b": state["b"] * 2}


LAID = {"w": struct(1024, 1024, lies=over("d")), "b": struct(1024, lies=over("d"))}


def moved(state, x):
    return {name: value + x for name, value in state.items()}


STATE = {"a": struct(MIB // 8), "b": struct(MIB // 8)}
TABLE = np.ones(MIB // 4, np.float32)

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
    "padding": (
        lambda: px.explain(functools.partial(many_rows, size=10))(struct(10, 8, 8)),
        lambda: px.explain(functools.partial(many_rows, size=15))(struct(15, 8, 8)),
        "clients",
        "the 10 elements of 'clients' on 8 devices are padded to 16: 38% of the places are empty",
    ),
    "idle": (
        lambda: px.explain(compared, devices=16)(struct(16, 8)),
        lambda: px.explain(compared, devices=16)(struct(16, 8, lies=over("d"))),
        None,
        "1 of the 16 devices that were asked for run it",
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
    "relaid": (
        lambda: px.explain(jax.jit(functools.partial(turned, spec=(None, "d")), donate_argnums=0))(LAID, struct(8)),
        lambda: px.explain(jax.jit(functools.partial(turned, spec=("d", None)), donate_argnums=0))(LAID, struct(8)),
        None,
        "state['w'] (4 MiB) is given as P('d') and comes back as P(None, 'd')",
    ),
    "too_large": (
        lambda: px.explain(jnp.negative, on="v5e:8")(struct(MIB, 4096)),
        lambda: px.explain(jnp.negative, on="v5e:8")(struct(MIB, 4096, lies=over("d"))),
        None,
        "it does not fit: 32 GiB are needed on each device, and a v5e has 16 GiB; 16 GiB are arguments",
    ),
    "unused_donation": (
        lambda: px.explain(jax.jit(lambda x: x.sum(), donate_argnums=0))(struct(MIB // 4)),
        lambda: px.explain(jax.jit(lambda x: x * 2, donate_argnums=0))(struct(MIB // 4)),
        None,
        "1 MiB are donated",
    ),
    "unjoined": (
        lambda: px.explain(summed)(struct(16, 2), integer=True),
        lambda: px.explain(summed)(struct(16, 2), integer=False),
        "counts",
        "2 all-reduces, of ",
    ),
    "uneven": (
        lambda: px.explain(divided)(struct(10, 2)),
        lambda: px.explain(divided)(struct(16, 2)),
        "rows",
        "10 rows do not divide by 8",
    ),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("kind", CASES)
def test_a_finding_is_told_where_there_is_one_and_only_there(kind: Any) -> None:
    causes, does_not, marker, words = CASES[kind]
    (finding,) = causes().found(kind)
    assert words in finding.text
    assert finding.write in str(finding)
    lines = Path(__file__).read_text("utf-8").splitlines()
    expected = next((n for n, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")), None)
    assert (finding.line and finding.line.number) == expected
    assert 0 < finding.weight <= 1
    assert does_not().found(kind) == []


def picked(x, i):
    return jnp.tanh(x[i])  # picks


INDEX = struct(4096, dtype=jnp.int32, lies=over())


def test_rows_that_an_index_picks_from_blocks_come_by_a_sum() -> None:
    (found,) = px.explain(picked)(struct(4096, 64, lies=over("d")), INDEX).found("gather")
    assert (
        "what an index picks from x, which lies in blocks, is brought to each device by a sum along 'd'" in found.text
    )
    assert "f32[4096,64], 1 MiB" in found.text
    lines = Path(__file__).read_text("utf-8").splitlines()
    assert found.line is not None
    assert lines[found.line.number - 1].endswith("  # picks")
    (other,) = px.explain(lambda x, i: picked(x * 2, i))(struct(4096, 64, lies=over("d")), INDEX).found("gather")
    assert "from an array that lies in blocks is brought" in other.text


@pytest.mark.parametrize("rows", [(), ("d",)])
def test_an_index_of_what_is_whole_and_sums_of_other_things_are_no_picking(rows: Any) -> None:
    x, y = struct(4096, 64, lies=over()), struct(512, 4096, 64, lies=over(*rows))
    assert px.explain(lambda x, y, i: (picked(x, i), y.sum(0)[i]))(x, y, INDEX).found("gather") == []


def test_a_table_in_blocks_and_its_index_in_others_is_a_way_to_split_a_model() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    table = struct(4096, 256, lies=NamedSharding(mesh, P("model")))
    index = struct(2048, dtype=jnp.int32, lies=NamedSharding(mesh, P("data")))
    report = px.explain(picked)(table, index)
    assert [(c.kind, c.bytes, c.axes, c.operand) for c in report.collectives] == [
        ("all_reduce", 512 * 256 * 4, ("model",), "x")
    ]
    assert report.found("gather") == []


def tied(table, tokens):
    def loss(table):
        return jax.nn.logsumexp(table[tokens] @ table.T, -1).mean()  # tied

    return jax.grad(loss)(table)


def tied_in_parts(table, tokens):
    """The same, as a finding tells it."""

    def body(table, tokens):
        return jax.lax.pmean(tied(table, tokens), "d")

    run = jax.shard_map(body, mesh=flat(), in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
    return run(table, tokens)


WHOLE, TOKENS = struct(512, 64, lies=over()), struct(1024, dtype=jnp.int32, lies=over("d"))


def untied(tables, tokens):
    return jax.grad(lambda tables: jax.nn.logsumexp(tables[0][tokens] @ tables[1].T, -1).mean())(tables)


def test_two_parts_of_one_gradient_are_to_be_added_before_they_are_sent() -> None:
    report = px.explain(tied)(WHOLE, TOKENS)
    assert report.total_bytes == 2 * 512 * 64 * 4
    (finding,) = report.found("unjoined")
    assert finding.text == "two arrays f32[512,64] are summed over the devices each, and then added up"
    assert (finding.line and finding.line.code.endswith("  # tied"), finding.weight) == (True, 0.5)
    once = px.explain(tied_in_parts)(WHOLE, TOKENS)
    assert (once.total_bytes, once.found("unjoined")) == (512 * 64 * 4, [])
    table, tokens = np.random.default_rng(0).normal(size=(512, 64)), np.arange(1024) % 512
    np.testing.assert_allclose(tied(table, tokens), tied_in_parts(table, tokens), rtol=1e-3, atol=1e-6)


def test_the_update_that_takes_the_sum_hides_no_parts() -> None:
    (finding,) = px.explain(lambda table, tokens: table - 0.1 * tied(table, tokens))(WHOLE, TOKENS).found("unjoined")
    assert "and then added up" in finding.text


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (lambda a, b: (a + b, a * b))(x.sum(0), y.sum(0)),  # each is needed
        lambda x, y: x.sum(0) - 2 * y.sum(0),
        lambda x, y: x.sum() + y.sum(),  # a number
        lambda x, y: x.max(0) + y.max(0),  # no sums
    ],
)
def test_what_is_not_only_added_up_is_sent_apart(fn: Any) -> None:
    rows = struct(16, 512, 64, lies=over("d"))
    assert px.explain(fn)(rows, rows).found("unjoined") == []
    assert px.explain(untied)((WHOLE, WHOLE), TOKENS).found("unjoined") == []


def twice(x, *, first, second, between=lambda x: x):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def body(x):
        x = jax.lax.psum(x.sum(0), first)
        return jax.lax.psum(between(x), second)  # second

    return jax.shard_map(body, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(), check_vma=False)(x)


def test_a_sum_along_one_axis_and_then_another_is_one_along_both() -> None:
    def found(**how: Any) -> Any:
        return px.explain(functools.partial(twice, **how))(struct(16, 32)).found("unjoined")

    (finding,) = found(first="data", second="model")
    assert finding.text == "f32[32] is summed over 4 and then over 2 devices, with nothing between"
    assert (finding.line and finding.line.code.endswith("  # second"), finding.weight) == (True, 0.5)
    assert found(first=("data", "model"), second=()) == []
    assert found(first="data", second="model", between=jnp.sin) == []
    assert found(first="data", second=("data", "model")) == []  # it counts four times


def test_a_padded_batch_is_found_and_is_no_work_done_twice() -> None:
    report = trained(9)
    assert [finding.kind for finding in report.findings] == ["padding"]
    assert "the 9 elements of 'batch' on 8 devices are padded to 16" in report.findings[0].text
    assert trained(16).findings == ()


def member_step(w, x):
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def of_members(size: int) -> Report:
    members = px.ensemble(lambda key: jax.random.normal(key, (16,)), size, key=jax.random.key(0))
    return px.explain(members.train)(member_step, jnp.ones((64, 16)))


def of_predictions(size: int) -> Report:
    members = px.ensemble(lambda key: jax.random.normal(key, (16, 3)), size, key=0, apply=lambda w, x: x @ w)
    return px.explain(members.predict)(jnp.ones((64, 16)))


def of_shares(rows: int) -> Report:
    return px.explain(px.Parallel(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))(struct(rows, 4))


@pytest.mark.parametrize(("make", "name"), [(of_members, "members"), (of_predictions, "members"), (of_shares, "batch")])
def test_members_and_shares_of_a_batch_are_padded_too(make: Any, name: str) -> None:
    (finding,) = make(10).findings
    assert finding.kind == "padding"
    assert f"10 elements of '{name}' on 8 devices are padded to 16: 38% of the places are empty" in finding.text
    assert make(16).findings == ()


def test_other_objects_that_have_an_axis_are_no_ensembles() -> None:
    class Model:
        axis = px.Axis("members", 10)

        def double(self, x):
            return x * 2

    assert px.explain(Model().double)(struct(64, 4, lies=over("d"))).findings == ()


def test_a_padded_axis_excuses_only_the_work_within_it() -> None:
    def both(x, y):
        within = px.map_fn(lambda x: x @ x, x, px.Axis("one", 1))
        return within, everywhere(y)

    report = px.explain(both)(struct(1, 4, 4), struct(64, 64, lies=over()))
    (finding,) = report.found("redundant")
    assert "the same work is done 8.0 times" in finding.text  # as without the axis
    alone = px.explain(lambda x: px.map_fn(lambda x: x @ x, x, px.Axis("one", 1)))(struct(1, 64, 64))
    assert [finding.kind for finding in alone.findings] == ["padding"]


LARGE = struct(4 * MIB)


@pytest.mark.parametrize(
    ("fn", "args", "write"),
    [
        (lambda unused, how, state, x: moved(state, x), (struct(3), "text", STATE, struct()), "donate_argnums=2"),
        (jax.jit(lambda n, state, x: moved(state, x * n), static_argnums=0), (3, STATE, struct()), "donate_argnums=1"),
        (lambda x, *states: moved(states[1], x), (struct(), struct(3), STATE), "donate_argnums=2"),
        (lambda state, x: {**moved(state, x), "n": x}, (STATE, struct()), "donate_argnums=0"),
        (lambda x, state: ({"new": moved(state, x)}, x), (struct(), STATE), "donate_argnums=1"),
        (lambda x, state: {"w": state["w"] * x}, (LARGE, {"w": LARGE}), "donate_argnums=1"),
        (lambda w, x: w - x.sum(), (LARGE, struct(8)), "donate_argnums=0"),
        (lambda x, w: (x.sum(), w * 2), (struct(8), LARGE), "donate_argnums=1"),
    ],
    ids=[
        *("all positions", "static", "one of many", "one more leaf", "deeper", "not a bare one"),
        *("one array", "one array of a result"),
    ],
)
def test_a_state_is_to_be_donated_by_its_position_in_the_call(fn: Any, args: Any, write: str) -> None:
    (finding,) = px.explain(fn)(*args).found("undonated")
    assert write in finding.write


def test_a_state_that_is_only_given_by_name_is_donated_by_it() -> None:
    def step(x, *, state):
        return moved(state, x)

    (finding,) = px.explain(step)(struct(), state=STATE).found("undonated")
    assert "donate_argnames='state'" in finding.write


def test_modules_that_are_written_are_states() -> None:
    def step(net, x):
        net.kernel[...] += x.sum()
        net.bias[...] *= 2

    net = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    (by_us,) = px.explain(px.Jit(step, net))(struct(8)).found("undonated")
    assert "donate=True" in by_us.write
    assert px.explain(px.Jit(step, net, donate=True))(struct(8)).found("undonated") == []


SQUARE = struct(1024, 1024)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda pair, x: {"u": x @ pair["a"], "v": x.T @ pair["b"]}, ({"a": SQUARE, "b": SQUARE}, SQUARE)),
        (jax.jit(lambda g, state: jax.tree.map(jnp.subtract, state, g), donate_argnums=1), (STATE, STATE)),
        (lambda x: x * 2, (struct(MIB),)),
        (lambda x: jax.lax.with_sharding_constraint(x * 2, over("d")), (struct(4 * MIB, lies=over()),)),
    ],
    ids=["other names", "another is donated", "small", "laid otherwise"],
)
def test_what_is_no_state_is_not_to_be_donated(fn: Any, args: Any) -> None:
    assert px.explain(fn)(*args).found("undonated") == []


def test_of_two_alike_the_one_that_is_returned_is_not_guessed() -> None:
    (finding,) = px.explain(lambda state, g: jax.tree.map(jnp.subtract, state, g))(STATE, STATE).found("undonated")
    assert "is kept beside a result of its shape and dtype" in finding.text


def test_a_constant_of_a_function_within_is_found() -> None:
    table = jnp.ones(MIB // 4)
    (finding,) = px.explain(lambda x: jax.jit(lambda y: y * table)(x))(struct(MIB // 4)).found("constant")
    assert "an array float32[262144] (1 MiB) is closed over" in finding.text


def test_arrays_that_are_whole_everywhere_are_added_up() -> None:
    half = [struct(2 * MIB, lies=over()) for _ in range(4)]  # 8 MiB each
    (of_one,) = px.explain(lambda x: sum(v.sum() for v in x["p"]))({"p": half}).found("replicated")
    assert of_one.text == "4 arrays of x (32 MiB) are whole on each of 8 devices"
    (of_all,) = px.explain(lambda *x: sum(v.sum() for v in x))(*half).found("replicated")
    assert of_all.text == "4 arrays (32 MiB) are whole on each of 8 devices"
    (returned,) = px.explain(lambda x: [v * 2 for v in x])(half).found("replicated")
    assert returned.text.endswith("(32 MiB) are whole on each of 8 devices, and so is what is returned for it")
    assert px.explain(lambda x: x[0].sum())(half).found("replicated") == []


def test_the_worst_comes_first_and_is_shown_with_what_to_write() -> None:
    report = px.explain(lambda x: (many_rows(x[:10], size=10), everywhere(x[0])))(struct(64, 64, 64, lies=over()))
    weights = [finding.weight for finding in report.findings]
    assert weights == sorted(weights, reverse=True)
    assert len(weights) >= 2
    text = str(report)
    assert all(finding.text in text and f"→ {finding.write}" in text for finding in report.findings)


def all_of_it(x):
    jax.debug.print("{}", x[0, 0])  # call of Python
    return everywhere(x) + (x[0, 0] * TABLE).sum()


JITS: dict[str, Callable[..., Any]] = {"jax.jit": jax.jit, "eqx.filter_jit": eqx.filter_jit, "nnx.jit": nnx.jit}


@pytest.mark.parametrize("jit", JITS)
def test_what_any_library_jits_is_looked_through(jit: str) -> None:
    x = jax.device_put(jnp.ones((64, 64)), over())
    report = px.explain(JITS[jit](all_of_it))(x)
    assert {finding.kind for finding in report.findings} == {"constant", "redundant"}
    assert report.work.share == 2 * 64**3 / 8
    assert [line.code.partition("  #")[2] for line in report.callbacks if line] == [" call of Python"]
    assert report.unchecked == ()
    model = eqx.nn.Linear(1024, 1024, key=jax.random.key(0))
    assert px.explain(eqx.filter_jit(model))(jnp.ones(1024)).findings == ()  # what it holds is no constant


def test_a_pmap_is_looked_through_too() -> None:
    def f(x):
        jax.debug.print("{}", x[0, 0])  # call in a pmap
        return x @ x + (x[0, 0] * TABLE).sum()

    report = px.explain(jax.pmap(f))(struct(8, 64, 64))
    assert {finding.kind for finding in report.findings} == {"constant"}
    assert (report.work.flops, report.work.share, report.unchecked) == (2 * 64**3, 2 * 64**3, ())
    assert [line.code.partition("  #")[2] for line in report.callbacks if line] == [" call in a pmap"]


class Opaque:
    """Can be lowered, but not traced."""

    def lower(self, *args: Any) -> Any:
        return jax.jit(everywhere).lower(*args)

    def __call__(self, *args: Any) -> Any:
        return jnp.asarray(np.asarray(args[0]) ** 2)


def until(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, everywhere, x)


UNKNOWN: dict[str, tuple[Callable[[], Report], str]] = {
    "what cannot be traced": (lambda: px.explain(Opaque())(struct(64, 64, lies=over())), "JAX cannot trace this"),
    "a loop": (lambda: px.explain(until)(struct(64, 64, lies=over())), "done twice: a loop has no known end"),
    "a factorization": (
        lambda: px.explain(jnp.linalg.cholesky)(struct(8, 4, 4, lies=over())),
        "work done twice by lapack_spotrf_ffi",
    ),
    "a transform": (lambda: px.explain(jnp.fft.fft)(struct(8, 4, lies=over())), "work done twice by fft"),
    "a state in Equinox": (
        lambda: px.explain(eqx.filter_jit(moved))(jax.tree.map(lambda x: jnp.ones(x.shape), STATE), 1.0),
        "equinox adds",
    ),
    "a state in NNX": (
        lambda: px.explain(nnx.jit(moved))(jax.tree.map(lambda x: jnp.ones(x.shape), STATE), 1.0),
        "flax adds",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_nobody_can_look_for_is_told_instead_of_no_findings(case: str) -> None:
    make, words = UNKNOWN[case]
    report = make()
    (told,) = report.unchecked
    assert words in told
    text = str(report)
    assert "No findings among what can be looked for" in text
    assert f"not looked for: {told}" in text
    assert f"not looked for: {told}" in report._repr_html_()
    alone = px.explain(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, compared, x))(
        struct(64, 64)
    )  # one device does nothing twice
    assert (alone.unchecked, str(alone).endswith("No findings")) == ((), True)
