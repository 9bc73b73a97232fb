"""``px.explain`` counts floating-point operations: by line, with loops, and each device's share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests._explained import FLAT, ROWS, lies, line_with, report_on, struct

pytestmark = pytest.mark.floor


def test_explain_counts_work_by_line_with_loops_and_equal_shares() -> None:
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
    "dilation": (convolution((1, 2), [(1, -1), (3, 0)], (2, 3), (2, 1)), (ODD, struct(8, 8, 3, 4))),
    "groups of channels": (convolution((1, 2), "SAME", feature_group_count=4), (ODD, struct(16, 2, 3, 4))),
    "groups of a batch": (convolution((1, 2), "SAME", batch_group_count=2), (ODD, struct(16, 8, 3, 4))),
    "no axis": (convolution((), ()), (struct(2, 4), struct(8, 4))),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_explain_counts_convolutions_as_xla_does_without_inserted_zeros(case: str) -> None:
    fn, args = CONVOLUTIONS[case]
    found: Any = jax.jit(fn).lower(*args).cost_analysis()
    work = px.explain(fn)(*args).work
    assert (work.flops, work.share) == (found["flops"],) * 2


def mapped(w, x):
    return px.map_fn(lambda w, x: jnp.tanh(x @ w), (px.broadcast(w, axis := px.Axis("rows", len(x))), x), axis)


@pytest.mark.parametrize("rows", [1, 12, 41])
def test_explain_counts_padding_as_more_than_an_equal_share(rows: int) -> None:
    """By the places that rows take on eight devices; forward, and in the derivative."""
    w, x = np.ones((16, 16), np.float32), np.ones((rows, 16), np.float32)
    for call in (mapped, jax.grad(lambda w, x: mapped(w, x).sum())):
        report = px.explain(call)(w, x)
        assert report.work.factor == pytest.approx(-(-rows // 8) * 8 / rows), call
        assert report.found("redundant") == []


def ragged(x, w, groups):
    return jax.lax.ragged_dot(x, w, groups)  # ragged


@pytest.mark.parametrize("spec", [(), ("d",)])
def test_explain_shares_or_not_rows_that_each_have_a_matrix_of_a_group(spec: Any) -> None:
    """JAX multiplies all rows with the matrices of all 4 groups, and leaves out the rest; on TPUs, it does not."""
    args = struct(64, 8, lies=lies(FLAT, *spec)), struct(4, 8, 16, lies=lies(FLAT)), struct(4, dtype=jnp.int32)
    rows = 64 // 8 if spec else 64
    derivatives = jax.grad(lambda x, w, groups: (ragged(x, w, groups) ** 2).sum(), (0, 1))
    for fn, products, out in ((ragged, 1, lies(FLAT, *spec)), (derivatives, 3, (lies(FLAT, *spec), lies(FLAT)))):
        work = px.explain(jax.jit(fn, out_shardings=out))(*args).work
        assert (work.flops, work.factor) == (products * 4 * 2 * rows * 8 * 16, rows / 8)
        assert [line.line.number for line in work.lines if line.line] == [line_with("ragged", __file__)]
    assert px.tabulate(ragged, *args).total.flops == 2 * 64 * 8 * 16


def test_explain_counts_nothing_that_is_not_needed() -> None:
    gradient = lambda x: jax.grad(lambda w: (x @ w).sum())(jnp.ones((4, 2)))  # noqa: E731  # needs no product x @ w
    work = px.explain(lambda x: px.map_fn(gradient, x, ROWS))(struct(16, 5, 4)).work
    assert (work.flops, work.share) == (2 * 2 * 5 * 4 * 2,) * 2


def test_explain_counts_of_a_solver_only_what_it_runs() -> None:
    work = px.explain(lambda a, b: jnp.linalg.solve(a, b) + a @ b)(struct(8, 8), struct(8)).work
    assert (work.flops, work.share) == (2 * 8 * 8, 2 * 8 * 8)
    assert [name for name in work.uncounted if "getrf" in name]  # the factorization itself is LAPACK's


PRODUCTS = {"one": lambda x, y: jnp.vdot(x[0], y[0]), "one for each row": lambda x, y: jnp.einsum("bi,bi->b", x, y)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("length", [2, 8, 31, 64, 999, 4096])
def test_explain_counts_products_of_vectors_of_any_length(length: int, dtype: Any) -> None:
    """XLA multiplies first, and adds up in one step or several, in one fusion or several."""
    x, each = struct(4, length, dtype=dtype), 8 if dtype == jnp.complex64 else 2
    for name, fn in PRODUCTS.items():
        count = each * length * (1 if name == "one" else 4)
        turns = lambda x, y: jax.lax.scan(lambda x, _: (jnp.sin(x), fn(x, y)), x, length=5)[1]  # noqa: B023, E731
        for program, times in ((fn, 1), (turns, 5)):
            work = px.explain(program)(x, x).work
            assert (work.flops, work.factor) == (times * count, 1.0), (name, times)


def test_explain_counts_complex_convolutions_as_the_three_that_jax_makes_of_them() -> None:
    real, complex_ = (
        px.explain(convolution((1, 1), "SAME"))(struct(2, 3, 8, 8, dtype=dtype), struct(4, 3, 3, 3, dtype=dtype)).work
        for dtype in (jnp.float32, jnp.complex64)
    )
    assert (complex_.flops, complex_.factor) == (3 * real.flops, 1.0)


def test_explain_says_that_a_product_is_not_counted_where_the_program_has_none() -> None:
    outer = jax.grad(lambda x, y: jnp.vdot(x, jnp.sin(y * x)))  # the compiler makes other products of it
    report = px.explain(outer)(struct(99), struct(99))
    assert (report.work.flops, report.work.factor, report.work.share) == (0, None, 4 * 99)
    assert "no matrix products or convolutions that can be told, of 396 FLOP that it asks for" in str(report)
    assert "not counted" in str(report)


# Programs that XLA's own account is right for: no loops, no slices.
SIMPLE: dict[str, Callable[..., Any]] = {
    "fused": lambda x: jnp.sin(x) * 2 + jnp.exp(x),
    "sums": lambda x: (x * x).sum(0) / x.sum(0),
    "softmax": jax.nn.softmax,
    "a layer": lambda x: jnp.tanh(x @ x.T),
    "its gradient": jax.grad(lambda x: (jnp.tanh(x @ x.T) ** 2).sum()),
}


@pytest.mark.parametrize("case", SIMPLE)
def test_explain_tells_the_traffic_and_the_operations_that_xla_does(case: str) -> None:
    report = px.explain(SIMPLE[case])(struct(1000, 50))
    whole: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}
    told: Any = jax.jit(SIMPLE[case]).lower(struct(1000, 50)).compile(compiler_options=whole).cost_analysis()
    assert report.traffic.bytes == told["bytes accessed"] == sum(size for _, size in report.traffic.lines)
    done = report.work.flops + report.work.elementwise
    assert done == pytest.approx(told["flops"] + told.get("transcendentals", 0), rel=0.1)
    assert report.intensity == done / report.traffic.bytes
    least = report.work.flops / report.traffic.bytes  # FLOP per byte from which on traffic bounds it
    assert report.bound(flops_per_second=1.1 * least + 1, bytes_per_second=1) == "traffic"
    assert not least or report.bound(flops_per_second=0.9 * least, bytes_per_second=1) == "products"


def test_explain_tells_the_traffic_of_slices_and_of_all_turns_of_a_loop() -> None:
    taken = px.explain(lambda x: x[jnp.array([1, 2, 3])])(struct(1000, 50))
    assert taken.traffic.bytes < 3 * 4 * (3 * 50 + 3)  # and not the 1,000 rows
    turn = lambda c, row: (c + jnp.sin(row), c)  # noqa: E731
    scan = px.explain(lambda x: jax.lax.scan(turn, x[0], x))(struct(1000, 50))
    assert 4 * 1000 * 200 <= scan.traffic.bytes < 9 * 1000 * 200  # rows of 200 bytes, and never the array in a turn
    assert scan.work.elementwise == pytest.approx(1000 * 2 * 50, rel=0.1)
