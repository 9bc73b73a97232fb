"""Reports on programs whose communication, work and memory are known by hand."""

import functools
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import equinox as eqx
import flax.linen as nn
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

HERE = Path(__file__).name


def struct(*shape: int, dtype: Any = jnp.float32, lies: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=lies)


@functools.cache
def mesh(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape([*axes.values()]), (*axes,))


def lies(over: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(over, P(*spec))


def sent(report: Report) -> list[tuple[Any, ...]]:
    return [(c.kind, c.bytes, c.times, c.axes) for c in report.collectives]


def line_with(marker: str) -> int:
    """The number of this file's line that ends with a comment."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}"))


# --- programs with known communication ------------------------------------------------------------------------------

ROWS = px.Axis("rows", 16)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)  # product


def data_parallel(w, x, y):
    def mean_loss(w):
        losses = px.map_fn(loss, (px.broadcast(w, ROWS), x, y), ROWS)  # map
        return px.reduce_mean(losses, ROWS)

    def step(w, _):
        return w - px.reduce_max(jnp.abs(x), ROWS).max() * jax.grad(mean_loss)(w), None  # maximum

    return jax.lax.scan(step, w, length=7)[0]


@px.program(pods=2, clients=4)
def nested(x):
    within = px.map_fn(lambda x: px.reduce_max(px.map_fn(jnp.sin, x, "clients"), "clients"), x, "pods")
    return px.reduce_sum(within, "pods")


def tensor_parallel(a, b, x):
    return jnp.tanh(x @ a) @ b  # hidden


def gathered(w, x):
    return x @ w  # weights


TENSOR = mesh(data=2, model=4)
FLAT = mesh(d=8)
STAGES, BATCHES, WIDTH = 4, 6, 8
PIPE = mesh(data=2, stage=STAGES)


def pipeline(w, x):
    """Return what layers make of batches: each stage has one layer, and hands on what it has made in each turn."""

    def body(w, x):
        stage, last = jax.lax.axis_index("stage"), STAGES - 1

        def turn(carry, t):
            held, out = carry
            done = jnp.tanh(jnp.where(stage == 0, x[jnp.minimum(t, BATCHES - 1)], held) @ w[0])
            out = out.at[jnp.maximum(t - last, 0)].set(done)
            return (jax.lax.ppermute(done, "stage", [(i, i + 1) for i in range(last)]), out), None  # hand on

        (_, out), _ = jax.lax.scan(turn, (jnp.zeros_like(x[0]), jnp.zeros_like(x)), jnp.arange(BATCHES + last))
        return jax.lax.psum(jnp.where(stage == last, out, 0), "stage")

    specs = P("stage"), P(None, "data")
    return jax.shard_map(body, mesh=PIPE, in_specs=specs, out_specs=specs[1], check_vma=False)(w, x)


def fsdp(w, x):
    def body(w, x):
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ jax.lax.all_gather(w, "d", tiled=True))))(w)

    return jax.shard_map(body, mesh=FLAT, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False)(w, x)


HEADS, MODEL = 4, 16


def gpt_block(w, x):
    """Tensor-parallel: heads and hidden units lie along "model", and each half ends in one sum over it."""
    split = (*x.shape[:2], HEADS, MODEL // HEADS)
    q, k, v = ((x @ w[name]).reshape(split) for name in "qkv")
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    scores = jnp.where(mask, jnp.einsum("bihd,bjhd->bhij", q, k), -jnp.inf)
    x = x + jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


COLUMNS, LINES = lies(TENSOR, None, "model"), lies(TENSOR, "model", None)
BLOCK = {name: struct(MODEL, MODEL, lies=COLUMNS) for name in "qkv"} | {
    "out": struct(MODEL, MODEL, lies=LINES),
    "up": struct(MODEL, 4 * MODEL, lies=COLUMNS),
    "down": struct(4 * MODEL, MODEL, lies=LINES),
}
CLIENTS = px.Axis("clients", 8)


def diloco(w, x):
    """Rounds of inner steps: ``x`` is of (rounds, clients, steps, rows, columns)."""

    def client(w, x):
        return jax.lax.scan(lambda w, x: (w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), None), w, x)[0]

    def outer(w, x):
        return px.reduce_mean(px.map_fn(client, (px.broadcast(w, CLIENTS), x), CLIENTS), CLIENTS), None

    return jax.lax.scan(outer, w, x)[0]


HANDED_ON = ("collective_permute", 2 * WIDTH * 4, BATCHES + STAGES - 1, ("stage",))
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "data-parallel steps in a loop": (
        data_parallel,
        (struct(8, 4), struct(16, 3, 8), struct(16, 3, 4)),
        [("all_reduce", 8 * 4 * 4, 7, ("rows",)), ("all_reduce", 3 * 8 * 4, 1, ("rows",))],
    ),
    "tensor-parallel MLP": (
        tensor_parallel,
        (
            struct(8, 32, lies=lies(TENSOR, None, "model")),
            struct(32, 4, lies=lies(TENSOR, "model", None)),
            struct(6, 8, lies=lies(TENSOR, "data", None)),
        ),
        [("all_reduce", 3 * 4 * 4, 1, ("model",))],
    ),
    "sharded weights, gathered when used": (
        jax.jit(gathered, out_shardings=lies(FLAT, "d")),
        (struct(16, 4, lies=lies(FLAT, "d")), struct(64, 16, lies=lies(FLAT, "d"))),
        [("all_gather", 16 * 4 * 4, 1, ("d",))],
    ),
    "pipeline": (
        pipeline,
        (struct(STAGES, WIDTH, WIDTH), struct(BATCHES, 4, WIDTH)),
        [HANDED_ON, ("all_reduce", BATCHES * 2 * WIDTH * 4, 1, ("stage",))],
    ),
    "gradient of the pipeline": (
        jax.grad(lambda w, x: pipeline(w, x).sum()),
        (struct(STAGES, WIDTH, WIDTH), struct(BATCHES, 4, WIDTH)),
        [HANDED_ON, HANDED_ON, ("all_reduce", WIDTH * WIDTH * 4, 1, ("data",))],
    ),
    "weights in parts, gathered and scattered": (
        fsdp,
        (struct(16, 4), struct(64, 16)),
        [("all_gather", 16 * 4 * 4, 1, ("d",)), ("reduce_scatter", 16 * 4 * 4, 1, ("d",))],
    ),
    "GPT block": (
        gpt_block,
        (BLOCK, struct(2, 6, MODEL, lies=lies(TENSOR, "data"))),
        [("all_reduce", 6 * MODEL * 4, 1, ("model",))] * 2,
    ),
    "DiLoCo": (diloco, (struct(8), struct(5, 8, 3, 2, 8)), [("all_reduce", 8 * 4, 5, ("clients",))]),
    "nested axes": (
        nested,
        (struct(2, 4, 5),),
        [("all_reduce", 5 * 4, 1, ("clients",)), ("all_reduce", 5 * 4, 1, ("pods",))],
    ),
}


@functools.cache
def report_on(name: str) -> Report:
    fn, args, _ = PROGRAMS[name]
    return px.explain(fn)(*args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_sent_is_what_theory_says(name: str) -> None:
    report, expected = report_on(name), PROGRAMS[name][2]
    assert sorted(sent(report)) == sorted(expected)
    assert report.num_devices == 8
    assert report.total_bytes == sum(size * times for _, size, times, _ in expected)


def test_each_collective_has_the_line_the_verb_and_the_side() -> None:
    steps = report_on("data-parallel steps in a loop").collectives
    gradient, maximum = sorted(steps, key=lambda c: -c.times)
    assert (gradient.verb, gradient.is_backward, gradient.is_written) == ("px.map_fn", True, False)
    assert (maximum.verb, maximum.is_backward, maximum.operand) == ("px.reduce_max", False, None)
    assert [c.line.number for c in (gradient, maximum) if c.line] == [line_with("map"), line_with("maximum")]
    assert {c.line.file for c in steps if c.line} == {__file__}
    (permute, _) = report_on("pipeline").collectives
    assert permute.is_written
    assert permute.line is not None
    assert (str(permute.line), "ppermute" in permute.line.code) == (f"{HERE}:{line_with('hand on')}", True)
    (weights,) = report_on("sharded weights, gathered when used").collectives
    assert (weights.operand, weights.is_written) == ("w", False)
    # Newer compilers give what they gather the name of the argument, and no line.
    assert weights.line is None or weights.line.number == line_with("weights")


def test_a_pipeline_hands_on_once_forward_and_once_backward_and_computes_in_each_turn() -> None:
    w, x = (np.random.default_rng(0).normal(size=x.shape).astype(np.float32) for x in PROGRAMS["pipeline"][1])
    expected = functools.reduce(lambda x, w: np.tanh(x @ w), w, x)
    np.testing.assert_allclose(pipeline(w, x), expected, rtol=1e-4, atol=1e-5)
    forward, report = report_on("pipeline").work, report_on("gradient of the pipeline")
    permutes = [c for c in report.collectives if c.kind == "collective_permute"]
    assert sorted(c.is_backward for c in permutes) == [False, True]
    assert {c.line.number for c in permutes if c.line} == {line_with("hand on")}
    assert forward.flops == (BATCHES + STAGES - 1) * 2 * 2 * WIDTH * WIDTH
    assert (report.work.flops, report.work.factor) == (3 * forward.flops, 1)


def test_work_is_counted_by_line_with_loops_and_shared_equally() -> None:
    work = report_on("data-parallel steps in a loop").work
    # Forward x @ w, and in the backward pass one product for w: 2 * 3 * 8 * 4 each, 2 elements a device, 7 turns.
    assert (work.flops, work.share, work.is_certain, work.uncounted) == (2 * 2 * 3 * 8 * 4 * 2 * 7,) * 2 + (True, ())
    (line,) = work.lines
    assert line.line is not None
    assert line.line.number == line_with("product")
    dense = report_on("tensor-parallel MLP").work
    assert (dense.flops, dense.factor) == ((2 * 6 * 8 * 32 + 2 * 6 * 32 * 4) // 8, 1.0)


def strided(kernels, x):
    for kernel in kernels:
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME")
    return x


def back(kernels, x, ct):
    return jax.vjp(lambda kernels: strided(kernels, x), kernels)[1](ct)


def convolution(strides: Any, padding: Any, *dilations: Any, **groups: Any) -> Callable[..., Any]:
    return lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, strides, padding, *dilations, **groups)


LAYERS = [struct(16, 3, 3, 3), struct(32, 16, 3, 3), struct(64, 32, 3, 3)]
ODD = struct(2, 8, 9, 11)
CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "strides": (strided, (LAYERS, struct(8, 3, 32, 32))),
    "their derivatives": (back, (LAYERS, struct(8, 3, 32, 32), struct(8, 64, 4, 4))),
    "padding": (convolution((1, 1), [(10, 10), (10, 10)]), (struct(1, 8, 4, 4), struct(8, 8, 3, 3))),
    "dilation": (convolution((1, 2), [(1, -1), (3, 0)], (2, 3), (2, 1)), (ODD, struct(8, 8, 3, 4))),
    "groups of channels": (convolution((1, 2), "SAME", feature_group_count=4), (ODD, struct(16, 2, 3, 4))),
    "groups of a batch": (convolution((1, 2), "SAME", batch_group_count=2), (ODD, struct(16, 8, 3, 4))),
    "no axis": (convolution((), ()), (struct(2, 4), struct(8, 4))),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_are_counted_as_xla_counts_them_without_inserted_zeros(case: str) -> None:
    fn, args = CONVOLUTIONS[case]
    found: Any = jax.jit(fn).lower(*args).cost_analysis()
    work = px.explain(fn)(*args).work
    assert (work.flops, work.share) == (found["flops"],) * 2


def mapped(w, x):
    return px.map_fn(lambda w, x: jnp.tanh(x @ w), (px.broadcast(w, axis := px.Axis("rows", len(x))), x), axis)


@pytest.mark.parametrize("rows", [1, 12, 41])
def test_padding_is_more_than_an_equal_share(rows: int) -> None:
    """By the places that rows take on eight devices; forward, and in the derivative."""
    w, x = np.ones((16, 16), np.float32), np.ones((rows, 16), np.float32)
    for call in (mapped, jax.grad(lambda w, x: mapped(w, x).sum())):
        report = px.explain(call)(w, x)
        assert report.work.factor == pytest.approx(-(-rows // 8) * 8 / rows), call
        assert report.found("redundant") == []


def ragged(x, w, groups):
    return jax.lax.ragged_dot(x, w, groups)  # ragged


@pytest.mark.parametrize("spec", [(), ("d",)])
def test_rows_that_each_have_a_matrix_of_a_group_are_shared_or_not(spec: Any) -> None:
    """JAX multiplies all rows with the matrices of all 4 groups, and leaves out the rest; on TPUs, it does not."""
    args = struct(64, 8, lies=lies(FLAT, *spec)), struct(4, 8, 16, lies=lies(FLAT)), struct(4, dtype=jnp.int32)
    rows = 64 // 8 if spec else 64
    derivatives = jax.grad(lambda x, w, groups: (ragged(x, w, groups) ** 2).sum(), (0, 1))
    for fn, products, out in ((ragged, 1, lies(FLAT, *spec)), (derivatives, 3, (lies(FLAT, *spec), lies(FLAT)))):
        work = px.explain(jax.jit(fn, out_shardings=out))(*args).work
        assert (work.flops, work.factor) == (products * 4 * 2 * rows * 8 * 16, rows / 8)
        assert [line.line.number for line in work.lines if line.line] == [line_with("ragged")]
    assert px.tabulate(ragged, *args).total.flops == 2 * 64 * 8 * 16


def test_memory_is_what_the_compiler_says() -> None:
    fn, args, _ = PROGRAMS["tensor-parallel MLP"]
    memory: Any = report_on("tensor-parallel MLP").memory
    expected: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert memory.arguments == expected.argument_size_in_bytes == (8 * 8 + 8 * 4 + 3 * 8) * 4
    assert memory.results == expected.output_size_in_bytes
    assert memory.peak >= memory.arguments + memory.results
    attention = px.explain(lambda x: jax.nn.softmax(x @ x.T) @ x)(struct(4096, 64))
    assert attention.memory.temporaries >= 4 * 4096**2  # its scores, which a library call of XLA's would hide
    donating = px.explain(jax.jit(lambda x: x + 1, donate_argnums=0))(struct(1024))
    assert (donating.memory.donated, donating.arguments[0].is_donated) == (4096, True)


def test_how_arrays_lie_is_told_for_any_rank() -> None:
    a, b, x = report_on("tensor-parallel MLP").arguments
    assert (a.name, a.split, a.blocks, a.copies) == ("a", (1, 4), ((0, 4), (1, 5), (2, 6), (3, 7)), 2)
    assert (b.split, b.bytes, b.bytes_per_device) == ((4, 1), 32 * 4 * 4, 8 * 4 * 4)
    assert (x.split, x.copies, x.dtype) == ((2, 1), 4, "float32")
    cube = px.explain(lambda x: x + 1)(struct(4, 2, 6, lies=lies(mesh(a=2, b=2, c=2), "a", "b", "c"))).arguments[0]
    assert (str(cube), cube.blocks) == ("4/2 × 2/2 × 6/2", tuple((i,) for i in range(8)))


# --- whatever can be called -------------------------------------------------------------------------------------------


def net() -> nnx.Linear:
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


def of_train_step() -> Report:
    state = px.TrainState.create(net(), optax.sgd(0.1))
    batch = {"x": np.ones((20, 4), np.float32), "y": np.ones((20, 2), np.float32)}
    report = px.explain(px.train_step(lambda net, batch: ((net(batch["x"]) - batch["y"]) ** 2).mean()))(state, batch)
    assert not state.step.is_deleted()  # nothing was run
    return report


def of_ensemble() -> Report:
    ens = px.ensemble(lambda key: jax.random.normal(key, (4, 2)), 8, key=jax.random.key(0))
    return px.explain(ens.train)(lambda w, x: w - jax.grad(lambda w: (x @ w).sum())(w), jnp.ones((5, 4)))


def linear() -> eqx.nn.Linear:
    return eqx.nn.Linear(4, 2, key=jax.random.key(0))


LINEN = {"params": {"kernel": struct(4, 2), "bias": struct(2)}}
SQUARE, BATCH, PRODUCT = struct(4, 4), struct(8, 4), 2 * 8 * 4 * 2
FORMS: dict[str, tuple[Callable[[], Report], int, int]] = {
    "partial": (lambda: px.explain(functools.partial(jnp.matmul, jnp.ones((4, 4))))(SQUARE), 1, 2 * 4**3),
    "constants": (lambda: px.explain(lambda x, how, on: x @ x if on and how else x)(SQUARE, "", on=1 > 0), 1, 0),
    "Jit": (lambda: px.explain(px.Jit(net()))(BATCH), 1, PRODUCT),
    "Parallel": (lambda: px.explain(px.Parallel(net()))(jnp.ones((16, 4))), 8, PRODUCT // 4),
    "NNX module": (lambda: px.explain(net())(BATCH), 1, PRODUCT),
    "nnx.jit": (lambda: px.explain(nnx.jit(lambda net, x: net(x)))(net(), jnp.ones((8, 4))), 1, PRODUCT),
    "Equinox module": (lambda: px.explain(linear())(struct(4)), 1, PRODUCT // 8),
    "filter_jit": (
        lambda: px.explain(eqx.filter_jit(lambda m, x: jax.vmap(m)(x)))(linear(), jnp.ones((8, 4))),
        1,
        PRODUCT,
    ),
    "Linen": (lambda: px.explain(nn.Dense(2).apply)(LINEN, BATCH), 1, PRODUCT),
    "jax.pmap": (lambda: px.explain(jax.pmap(lambda x: x @ x))(struct(8, 4, 4)), 8, 2 * 4**3),
    "pmap": (lambda: px.explain(px.pmap(lambda x: x @ x))(struct(8, 4, 4)), 8, 2 * 4**3),
    "train_step": (of_train_step, 8, 2 * 2 * 3 * 4 * 2),
    "ensemble.train": (of_ensemble, 8, 2 * 5 * 4 * 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_can_be_called_is_explained(form: str) -> None:
    make, devices, flops = FORMS[form]
    report = make()
    assert (report.num_devices, report.work.flops) == (devices, flops)
    assert report.arguments


def parts_named(report: Report) -> list[str]:
    return [array.name for array in report.arguments]


def test_arguments_have_the_names_of_the_call_and_of_variables() -> None:
    assert parts_named(px.explain(net())(BATCH)) == ["self.bias.value", "self.kernel.value", "inputs"]
    assert parts_named(px.explain(linear())(struct(4))) == ["self.weight", "self.bias", "x"]
    named = px.explain(lambda w, *xs, how, **rest: w["a"] + xs[1] + rest["b"])
    report = named({"a": struct(3)}, 1.0, struct(3), how="text", b=struct(3))
    assert parts_named(report) == ["w['a']", "xs[1]", "rest['b']"]  # what nothing reads is left out


def test_bound_methods_and_partials_of_jitted_functions_are_explained_with_what_they_bind() -> None:
    class Model:
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, x, times):
            return x @ x * times

    assert parts_named(px.explain(Model().step)(struct(4, 4), struct())) == ["x", "times"]
    partial = functools.partial(jax.jit(lambda w, x: w @ x, donate_argnums=1), struct(4, 4))
    assert [array.is_donated for array in px.explain(partial)(struct(4, 4)).arguments] == [False, True]


def test_what_a_library_does_has_the_line_of_the_library() -> None:
    (total,) = px.explain(jax.jit(optax.tree.norm))(struct(64, lies=lies(FLAT, "d"))).collectives
    assert total.line is not None
    assert Path(total.line.file).is_relative_to(Path(optax.__file__).parent)


def test_each_line_of_a_mapped_function_has_its_own_work_and_what_nothing_needs_is_none() -> None:
    def two(x):
        y = x @ x  # first
        return y @ jnp.ones((4, 4))  # second

    lines = px.explain(lambda x: px.map_fn(two, x, ROWS))(struct(16, 4, 4)).work.lines
    found = {line.line.number: (line.flops, line.share) for line in lines if line.line}
    assert found == {line_with("first"): (2 * 2 * 64,) * 2, line_with("second"): (2 * 2 * 64,) * 2}
    gradient = lambda x: jax.grad(lambda w: (x @ w).sum())(jnp.ones((4, 2)))  # noqa: E731  # needs no product x @ w
    work = px.explain(lambda x: px.map_fn(gradient, x, ROWS))(struct(16, 5, 4)).work
    assert (work.flops, work.share) == (2 * 2 * 5 * 4 * 2,) * 2


def test_nothing_is_run_and_calls_of_python_are_named() -> None:
    called: list[Any] = []

    def f(x):
        jax.debug.callback(called.append, x)  # call
        return x * 2

    x = jnp.ones(3)
    report = px.explain(jax.jit(f, donate_argnums=0))(x)
    assert [line.number for line in report.callbacks if line] == [line_with("call")]
    assert not called
    assert not x.is_deleted()


def test_totals_say_what_they_count_of_loops_and_branches() -> None:
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + jax.lax.psum(x, "d"), x)

    def either(x):
        return jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum(x, "d"), lambda x: jax.lax.pmax(x, "d"), x)

    def reported(body):
        fn = jax.shard_map(body, mesh=FLAT, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        return px.explain(fn)(struct(64))

    loop, branches = reported(until), reported(either)
    work = px.explain(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x))(struct(4, 4)).work
    assert (work.flops, work.is_certain, work.share) == (128, False, None)
    counting = "counting one turn of a loop without a known end"
    assert f"Sends 32 bytes per device in 1 collective, {counting}" in str(loop)
    assert "Sends 64 bytes per device in 2 collectives, counting all branches\n" in str(branches)
    assert (loop.is_certain, branches.is_certain) == (False, True)
    assert [c.is_branch for c in (*loop.collectives, *branches.collectives)] == [False, True, True]
    turn = "one turn of a loop without a known end"
    assert loop.summary()[f"all_reduce along d, bytes, {turn}"] == 32
    assert not any(turn in name for name in branches.summary())


def test_of_a_solver_only_what_it_runs_is_counted() -> None:
    work = px.explain(lambda a, b: jnp.linalg.solve(a, b) + a @ b)(struct(8, 8), struct(8)).work
    assert (work.flops, work.share) == (2 * 8 * 8, 2 * 8 * 8)
    assert [name for name in work.uncounted if "getrf" in name]  # the factorization itself is LAPACK's


# --- shown -----------------------------------------------------------------------------------------------------------


def test_the_text_has_it_all_in_a_few_lines() -> None:
    text = str(report_on("data-parallel steps in a loop"))
    line = rf"7 × 128 bytes +all_reduce f32\[8,4\] +along rows +px.map_fn, backward +{HERE}:{line_with('map')} "
    assert re.search(line, text)
    assert text.startswith("data_parallel on 8 devices; traced in ")
    assert "Sends 992 bytes per device in 2 collectives" in text
    assert "1.00 × an equal share" in text
    assert re.search(r"x +float32 +16/8 × 3 × 8 +192 bytes per device", text)
    numbers = {"devices": 8, "all_reduce along rows, times": 7 + 1, "all_reduce along rows, bytes": 992}
    assert report_on("data-parallel steps in a loop").summary().items() >= numbers.items()


def test_html_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    x = struct(4, 8, lies=lies(mesh(d=2, m=4), "d", "m"))
    report = px.explain(jax.jit(lambda **xs: xs["<b>"] + 1))(**{"<b>": x})
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    words = [*ElementTree.fromstring(report._repr_html_()).itertext()]
    assert all(html.escape(word) in page for word in words)
    assert any("<b>" in word for word in words)
    assert any("dimension 1 (8) to the right, dimension 0 (4) down" in word for word in words)
    assert [word for word in words if word.isdigit()][:8] == [str(i) for i in range(8)]
    assert not re.search(r"https?:|<script|@import|url\(", page)
    with pytest.raises(ValueError, match=r"save: path must end in .html, got 'r.png'; write 'r.html'"):
        report.save("r.png")
