"""Reports on programs whose communication, work and memory are known by hand."""

import collections
import functools
import html
import random
import re
import textwrap
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
from jax.sharding import PartitionSpec as P

import paraxis as px
from paraxis.reports import Report
from tests._explained import (
    BATCHES,
    FLAT,
    HERE,
    PROGRAMS,
    STAGES,
    WIDTH,
    lies,
    line_with,
    pipeline,
    report_on,
    sent,
    struct,
)
from tests._support import mesh_over
from tests.test_stream_memory import HAS_PROC, printed

pytestmark = pytest.mark.floor


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_finds_what_theory_says_is_sent(name: str) -> None:
    report, expected = report_on(name), PROGRAMS[name][2]
    assert sorted(sent(report)) == sorted(expected)
    assert report.num_devices == 8
    assert report.total_bytes == sum(size * times for _, size, times, _ in expected)


def test_explain_gives_each_collective_its_line_verb_and_side() -> None:
    steps = report_on("data-parallel steps in a loop").collectives
    gradient, maximum = sorted(steps, key=lambda c: -c.times)
    assert (gradient.verb, gradient.is_backward, gradient.is_written) == ("px.map_fn", True, False)
    assert (maximum.verb, maximum.is_backward, maximum.operand) == ("px.reduce_max", False, None)
    assert [c.line.number for c in (gradient, maximum) if c.line] == [line_with("map"), line_with("maximum")]
    assert {c.line.file for c in steps if c.line} == {str(HERE)}
    rows = lies(FLAT, "d")
    (turned,) = px.explain(jax.jit(lambda x: x.T, out_shardings=rows))(struct(16, 8, lies=rows)).collectives
    assert (turned.kind, turned.is_backward) == ("all_to_all", False)  # JAX's name of it is transpose
    (permute, _) = report_on("pipeline").collectives
    assert permute.is_written
    assert permute.line is not None
    assert (str(permute.line), "ppermute" in permute.line.code) == (f"{HERE.name}:{line_with('hand on')}", True)
    (weights,) = report_on("sharded weights, gathered when used").collectives
    assert (weights.operand, weights.is_written) == ("w", False)
    # Newer compilers give what they gather the name of the argument, and no line.
    assert weights.line is None or weights.line.number == line_with("weights")


def test_explain_names_no_private_function_and_no_line_that_computes_nothing() -> None:
    state = px.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
    evaluate = px.eval_step(lambda params, batch: {"m": batch["x"] @ params["w"]})
    report = px.explain(evaluate)(state, {"x": struct(16, 3)})
    assert report.collectives[0].verb == "px.EvalStep"
    assert report.work.flops == 2 * 2 * 3
    assert "\n  0 FLOP" not in str(report)


def test_explain_counts_a_pipeline_s_exchanges_once_a_direction_and_its_work_in_each_turn() -> None:
    w, x = (np.random.default_rng(0).normal(size=x.shape).astype(np.float32) for x in PROGRAMS["pipeline"][1])
    expected = functools.reduce(lambda x, w: np.tanh(x @ w), w, x)
    np.testing.assert_allclose(pipeline(w, x), expected, rtol=1e-4, atol=1e-5)
    forward, report = report_on("pipeline").work, report_on("gradient of the pipeline")
    permutes = [c for c in report.collectives if c.kind == "collective_permute"]
    assert sorted(c.is_backward for c in permutes) == [False, True]
    assert {c.line.number for c in permutes if c.line} == {line_with("hand on")}
    assert forward.flops == (BATCHES + STAGES - 1) * 2 * 2 * WIDTH * WIDTH
    assert (report.work.flops, report.work.factor) == (3 * forward.flops, 1)


def test_explain_tells_the_memory_that_the_compiler_tells() -> None:
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


RUN = """
{program}
args = jax.block_until_ready(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes))
told = px.explain(fn)(*args).memory
fn = jax.jit(fn).lower(*args).compile({options})
before = megabytes("VmRSS")
jax.block_until_ready(fn(*args))
print((told.peak - told.arguments) / 2**20, megabytes("VmHWM") - before)
"""
LARGE = {
    "attention": """
        fn = lambda x: jax.nn.softmax(x @ x.T) @ x
        shapes = [jax.ShapeDtypeStruct((12288, 64), jnp.float32)]
    """,
    "convolutions": """
        def fn(x, w):
            for _ in range(3):
                x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))
            return x
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 32, 192, 192), (32, 32, 3, 3))]
    """,
    "a loop that keeps what its derivative needs": """
        def fn(w, x):
            def loss(w):
                return jax.lax.scan(lambda x, _: (jnp.tanh(x * w), None), x, length=64)[0].sum()
            return jax.grad(loss)(w)
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (1024, 1024))]
    """,
}


@pytest.mark.slow  # each is a process that takes hundreds of megabytes
@HAS_PROC
@pytest.mark.parametrize("program", LARGE)
def test_explain_tells_the_peak_that_the_process_takes(program: str) -> None:
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}  # as in px.Stream, which bounds its memory by such figures
    told, used = printed(RUN.format(program=textwrap.dedent(LARGE[program]), options=options))
    assert told > 200
    assert 0.8 * told < used < 1.25 * told


def net() -> nnx.Linear:
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


def of_train_step() -> Report:
    state = px.TrainState.create(net(), optax.sgd(0.1))
    batch = {"x": np.ones((20, 4), np.float32), "y": np.ones((20, 2), np.float32)}
    report = px.explain(px.train_step(lambda net, batch: ((net(batch["x"]) - batch["y"]) ** 2).mean()))(state, batch)
    assert not state.step.is_deleted()  # nothing was run
    return report


def linear() -> eqx.nn.Linear:
    return eqx.nn.Linear(4, 2, key=jax.random.key(0))


SOME = np.ones((8, 4), np.float32)
LINEN = {"params": {"kernel": struct(4, 2), "bias": struct(2)}}
SQUARE, BATCH, PRODUCT = struct(4, 4), struct(8, 4), 2 * 8 * 4 * 2
FORMS: dict[str, tuple[Callable[[], Report], int, int]] = {
    "partial": (lambda: px.explain(functools.partial(jnp.matmul, jnp.ones((4, 4))))(SQUARE), 1, 2 * 4**3),
    "constants": (lambda: px.explain(lambda x, how, on: x @ x if on and how else x)(SQUARE, "", on=1 > 0), 1, 0),
    "Jit": (lambda: px.explain(px.Jit(net()))(BATCH), 1, PRODUCT),
    "Parallel": (lambda: px.explain(px.Parallel(net()))(jnp.ones((16, 4))), 8, PRODUCT // 4),
    "NNX module": (lambda: px.explain(net())(BATCH), 1, PRODUCT),
    "nnx.jit": (lambda: px.explain(nnx.jit(lambda net, x: net(x)))(net(), SOME), 1, PRODUCT),
    "Equinox module": (lambda: px.explain(linear())(struct(4)), 1, PRODUCT // 8),
    "filter_jit": (lambda: px.explain(eqx.filter_jit(lambda m, x: jax.vmap(m)(x)))(linear(), SOME), 1, PRODUCT),
    "Linen": (lambda: px.explain(nn.Dense(2).apply)(LINEN, BATCH), 1, PRODUCT),
    "jax.pmap": (lambda: px.explain(jax.pmap(lambda x: x @ x))(struct(8, 4, 4)), 8, 2 * 4**3),
    "pmap": (lambda: px.explain(px.pmap(lambda x: x @ x))(struct(8, 4, 4)), 8, 2 * 4**3),
    "train_step": (of_train_step, 8, 2 * 2 * 3 * 4 * 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_explain_takes_whatever_can_be_called(form: str) -> None:
    make, devices, flops = FORMS[form]
    report = make()
    assert (report.num_devices, report.work.flops, report.arguments != ()) == (devices, flops, True)


class Model:
    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x, times):
        return x @ x * times


def test_explain_names_arguments_as_the_call_and_variables_do() -> None:
    partial = functools.partial(jax.jit(lambda w, x: w @ x, donate_argnums=1), struct(4, 4))
    named = px.explain(lambda w, *xs, how, **rest: w["a"] + xs[1] + rest["b"])
    for report, names in (
        (px.explain(net())(BATCH), ["self.bias.value", "self.kernel.value", "inputs"]),
        (px.explain(linear())(struct(4)), ["self.weight", "self.bias", "x"]),
        (px.explain(Model().step)(struct(4, 4), struct()), ["x", "times"]),
        (px.explain(partial)(struct(4, 4)), ["w", "x"]),
        # What nothing reads is left out.
        (named({"a": struct(3)}, 1.0, struct(3), how="text", b=struct(3)), ["w['a']", "xs[1]", "rest['b']"]),
    ):
        assert [array.name for array in report.arguments] == names
    assert [array.is_donated for array in px.explain(partial)(struct(4, 4)).arguments] == [False, True]


def test_explain_gives_what_a_library_does_the_library_s_line() -> None:
    (total,) = px.explain(jax.jit(optax.tree.norm))(struct(64, lies=lies(FLAT, "d"))).collectives
    assert total.line is not None
    assert Path(total.line.file).is_relative_to(Path(optax.__file__).parent)


def test_explain_says_what_totals_count_of_loops_and_branches() -> None:
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
    counting = "counting one iteration of a loop without a known end"
    assert f"Sends 32 bytes per device in 1 collective, {counting}" in str(loop)
    assert "Sends 64 bytes per device in 2 collectives, counting all branches\n" in str(branches)
    assert (loop.is_certain, branches.is_certain) == (False, True)
    assert [c.is_branch for c in (*loop.collectives, *branches.collectives)] == [False, True, True]
    turn = "one iteration of a loop without a known end"
    assert loop.summary()[f"all_reduce along d, bytes, {turn}"] == 32
    assert not any(turn in name for name in branches.summary())


def test_explain_prints_all_in_a_few_lines() -> None:
    text = str(report_on("data-parallel steps in a loop"))
    line = rf"7 × 128 bytes +all_reduce f32\[8,4\] +along rows +px.map_fn, backward +{HERE.name}:{line_with('map')} "
    assert re.search(line, text)
    assert text.startswith("data_parallel on 8 devices; traced in ")
    assert "Sends 992 bytes per device in 2 collectives" in text
    assert "1.00 × an equal share" in text
    assert re.search(r"x +float32 +16/8 × 3 × 8 +192 bytes per device", text)
    numbers = {"devices": 8, "all_reduce along rows, times": 7 + 1, "all_reduce along rows, bytes": 992}
    assert report_on("data-parallel steps in a loop").summary().items() >= numbers.items()


def test_explain_saves_html_that_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    x = struct(4, 8, lies=lies(mesh_over(d=2, m=4), "d", "m"))
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


Fn = Callable[[Any], Any]
MESH = mesh_over(a=2, b=4)


def by_hand(draw: random.Random, depth: int) -> tuple[Fn, collections.Counter[Any]]:
    """A function of a device's 8 x 4 block, and what it sends: kind, bytes, times, axes."""
    name, turns = draw.choice(["a", "b"]), draw.choice([1, 2, 3])
    size, block = MESH.shape[name], 8 * 4 * 4
    along = draw.choice([("a",), ("b",), ("a", "b")])
    around = [(i, (i + 1) % size) for i in range(size)]
    flat: list[tuple[Fn, tuple[Any, ...]]] = [
        (lambda x: jnp.sin(jax.lax.psum(x, along)), ("all_reduce", block, along)),
        (lambda x: jnp.sin(jax.lax.pmax(x, along)) - x, ("all_reduce", block, along)),
        (lambda x: jnp.sin(jax.lax.all_gather(x, name)).sum(0), ("all_gather", block * size, (name,))),
        (lambda x: jax.lax.psum_scatter(jnp.sin(jnp.stack([x, *[2 * x] * (size - 1)])), name),
         ("reduce_scatter", block * size, (name,))),
        (lambda x: jnp.sin(jax.lax.all_to_all(x, name, 1, 1, tiled=True)), ("all_to_all", block, (name,))),
        (lambda x: jnp.sin(jax.lax.ppermute(x, name, around)), ("collective_permute", block, (name,))),
    ]  # fmt: skip
    if not depth:
        fn, (kind, sent, axes) = draw.choice(flat)
        return fn, collections.Counter({(kind, sent, 1, axes): 1})
    (one, first), (two, second) = by_hand(draw, depth - 1), by_hand(draw, depth - 1)
    ways = [
        (lambda x: two(one(x)), 1),
        (lambda x: jax.lax.scan(lambda x, _: (two(one(x)), x.sum()), x, length=turns + 1)[0], turns + 1),
        (lambda x: jax.jit(two)(jax.checkpoint(one)(x)), 1),
        (lambda x: jax.lax.cond(x[0, 0] > 0, one, two, x), 1),  # both count
    ]
    fn, often = draw.choice(ways)
    sent = collections.Counter[Any]()
    for (kind, size, times, axes), number in [*first.items(), *second.items()]:
        sent[kind, size, times * often, axes] += number
    return fn, sent


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_explain_finds_what_random_programs_write_with_its_axes_and_times(seed: int) -> None:
    fn, sent = by_hand(random.Random(seed), 2)
    run = jax.jit(jax.shard_map(fn, mesh=MESH, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False))
    report = px.explain(run)(struct(16, 16))
    assert collections.Counter((c.kind, c.bytes, c.times, c.axes) for c in report.collectives) == sent
    assert all(c.is_written and c.line is not None and c.line.file == __file__ for c in report.collectives)
