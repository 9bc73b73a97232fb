"""A program means what it says, each time it runs: what it reads is read again, its effects happen once per element."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import paraxis as px
from tests._support import PLACEMENTS, assert_close, axis_on, compilations, values


class Holder:
    """A method that reads an attribute."""

    scale = 1.0

    def times(self, x: jax.Array) -> jax.Array:
        return x * self.scale


@pytest.mark.parametrize("lowering", ["vmap", "unroll"])
def test_what_a_mapped_function_reads_may_change(lowering: Any) -> None:
    axis, x = axis_on(2, 3), values(3)
    holder, listed, array = Holder(), [jnp.float32(1)], np.ones((), np.float32)
    for fn in (holder.times, lambda x: x * listed[0], lambda x: x * array):
        for scale in (1.0, 2.0):
            holder.scale, listed[0], array[...] = scale, jnp.float32(scale), scale
            assert_close(px.map_fn(fn, x, axis, lowering=lowering), x * scale)


def test_what_a_program_reads_may_change() -> None:
    holder, x = Holder(), values(5)

    @px.program(rows=5)
    def total(x: jax.Array) -> jax.Array:
        return px.reduce_sum(px.map_fn(holder.times, x)) + holder.scale

    for scale in (1.0, 2.0):
        holder.scale = scale
        assert_close(total(x), x.sum() * scale + scale)
        assert_close(jax.grad(total)(x), np.full(5, scale))
        assert_close(jax.vmap(total)(jnp.stack([x, 2 * x])), np.array([x.sum(), 2 * x.sum()]) * scale + scale)


def test_constants_that_look_alike_are_told_apart() -> None:
    """They compare equal, or unequal to themselves; programs are found by what they are."""
    axis, x = axis_on(2, 3), np.ones(3, np.float32)
    for constant in (0.0, -0.0, float("nan"), 1, 1.0, True):
        found = np.asarray(px.map_fn(lambda x, c=constant: jnp.copysign(x, c), x, axis))
        np.testing.assert_array_equal(found, np.copysign(x, np.float32(constant)))
        kind = px.map_fn(lambda x, c=constant: jnp.asarray(c) + (x[None] * 0).astype(int)[0], x, axis).dtype
        assert kind == jax.vmap(lambda x, c=constant: jnp.asarray(c) + (x[None] * 0).astype(int)[0])(x).dtype


def test_a_rule_of_ones_own_is_that_of_the_function_at_hand() -> None:
    """The same values with other derivatives: what was compiled for one is not differentiated for the other."""
    axis, x = axis_on(2, 3), values(3)

    def made(slope: float) -> Callable[[jax.Array], jax.Array]:
        @jax.custom_jvp
        def fn(x: jax.Array) -> jax.Array:
            return jnp.sin(x)

        fn.defjvps(lambda t, _, x: slope * t)
        return fn

    for slope in (1.0, 2.0):
        fn = made(slope)
        assert_close(px.map_fn(fn, x, axis), np.sin(x))
        program = px.program(rows=axis)(lambda x, fn=fn: px.reduce_sum(px.map_fn(fn, x)))
        for step in (lambda f: f, jax.jit):
            assert_close(step(program)(x), np.sin(x).sum())
            assert_close(step(jax.grad(program))(x), np.full(3, slope))


def test_a_new_function_of_the_same_structure_compiles_nothing() -> None:
    axis, x = axis_on(2, 5), jnp.asarray(values(5))

    def call(number: int) -> Any:
        offset = jnp.float32(number)  # closed over: an operand, not part of the program
        return jax.value_and_grad(lambda x: px.reduce_sum(px.map_fn(lambda x: jax.nn.relu(x) * offset, x, axis), axis))(
            x
        )

    apart = jax.custom_batching.custom_vmap(jnp.sin)
    apart.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))
    for number in (1, 2):
        call(number)
        px.map_fn(apart, x, axis)
    with compilations() as compiled:
        for number in range(3, 8):
            assert_close(call(number)[0], number * np.maximum(x, 0).sum())
            np.testing.assert_allclose(px.map_fn(apart, x, axis), np.sin(x), rtol=1e-6)
    assert not compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_effects_happen_for_each_element(placement: tuple[int, int], at_once: int | None) -> None:
    """Once, as under ``vmap``; perhaps once more for padding, which repeats an element, and for a derivative."""
    devices, size = placement
    axis, x, seen = axis_on(devices, size, at_once=at_once), np.arange(1.0, size + 1, dtype=np.float32), []

    def body(w: Any, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return w * x**2

    def loss(w: Any) -> jax.Array:
        return px.reduce_sum(px.map_fn(body, (px.broadcast(w, axis), x), axis), axis)

    for run in (loss, jax.jit(loss), px.program(rows=axis)(loss), jax.grad(loss), jax.jit(jax.grad(loss))):
        seen.clear()
        jax.block_until_ready(run(2.0))
        jax.effects_barrier()
        if size % devices or at_once:
            assert set(seen) == set(x.tolist())
        else:
            assert sorted(seen) == x.tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_body_may_use_the_name_of_a_vmap_around_it(placement: tuple[int, int]) -> None:
    axis, x, w = axis_on(*placement), values(3, placement[1]), values(3, 1)[:, 0]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(w: jax.Array, x: jax.Array) -> Any:
            return jnp.sin(w * lax.psum(x, "batch")) + lax.axis_index("batch")

        return px.reduce_sum(px.map_fn(body, (px.broadcast(w, axis), x), axis), axis)

    found = jax.jit(jax.vmap(jax.value_and_grad(loss), axis_name="batch"))(w, x)
    total = x.sum(0)
    value = np.sin(w[:, None] * total).sum(1) + np.arange(3) * placement[1]
    assert_close(found, (value, (np.cos(w[:, None] * total) * total).sum(1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ends", [True, False])
def test_convolutions_are_in_no_branch_where_a_device_is_idle(ends: bool) -> None:
    """On CPU a branch makes them slow. Padding is zeros then, so that a gradient must not take what is not finite."""
    axis, kernels, image = axis_on(8, 9), values(9, 2, 1, 3, 3), values(4, 1, 5, 5)

    def of_one(w: jax.Array, kernel: jax.Array) -> jax.Array:
        times = (
            1.0 if ends else lax.while_loop(lambda v: v < 9.0, lambda v: v * 2, lax.stop_gradient(kernel).max() ** 2)
        )
        return jnp.log(jnp.abs(lax.conv(image * w, kernel, (1, 1), "SAME"))).sum() * times

    def loss(w: Any, k: Any) -> jax.Array:
        return px.reduce_sum(px.map_fn(of_one, (px.broadcast(w, axis), k), axis), axis)

    run = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(1.5, kernels).compile()
    assert (" conditional(" in (run.as_text() or "")) is not ends
    if ends:
        plain = jax.value_and_grad(lambda w, k: jax.vmap(of_one, (None, 0))(w, k).sum(), (0, 1))
        assert_close(run(1.5, kernels), jax.jit(plain)(1.5, kernels), rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at_once", [None, 2])
def test_branches_that_differ_between_elements_have_a_derivative(at_once: int | None) -> None:
    axis, x = axis_on(2, 7, at_once=at_once), np.linspace(1, 2, 7, dtype=np.float32)

    def body(w: Any, e: jax.Array) -> jax.Array:
        chosen = lax.cond(e > 1.5, lambda v: jnp.sin(w * v), lambda v: w * v * v, e)
        switched = lax.switch((e * 3).astype(int) % 3, [jnp.sin, jnp.cos, lambda v: v * w], e)
        scanned = lax.scan(lambda c, _: (lax.cond(c > 1.5, jnp.sin, lambda v: v * w, c), None), e, None, length=2)[0]
        return chosen + switched + scanned

    def both(mapped: Callable[[Any, Any], jax.Array]) -> Any:
        return jax.jit(jax.value_and_grad(lambda w, x: mapped(w, x).sum(), argnums=(0, 1)))(1.3, x)

    here = both(lambda w, x: px.map_fn(body, (px.broadcast(w, axis), x), axis))
    assert_close(here, both(lambda w, x: jax.vmap(body, (None, 0))(w, x)), rtol=1e-4)


def test_callbacks_that_compare_equal_are_told_apart() -> None:
    @dataclasses.dataclass(frozen=True)
    class Scaled:
        factor: float = dataclasses.field(compare=False)

        def __call__(self, v: Any) -> np.ndarray:
            return np.asarray(v) * np.float32(self.factor)

    axis, x, like = axis_on(2, 3), values(3), jax.ShapeDtypeStruct((), np.float32)
    for factor in (2.0, 3.0):
        scaled = Scaled(factor)
        body = lambda v, f=scaled: jax.pure_callback(f, like, v, vmap_method="sequential")  # noqa: E731
        assert_close(px.map_fn(body, x, axis), x * factor)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_a_rule_of_the_users_has_a_second_derivative(at_once: int | None) -> None:
    """A rule that is not the derivative: of what its forward pass returns, the next derivative is the true one."""

    @jax.custom_vjp
    def ruled(u: jax.Array) -> jax.Array:
        return jnp.sin(u)

    ruled.defvjp(lambda u: (jnp.sin(u), u), lambda u, ct: (3 * jnp.cos(u) * ct,))
    axis, w, x = axis_on(2, 3, at_once=at_once), jnp.asarray(0.8), values(3)

    def twice(mapped: Callable[..., Any]) -> Any:
        inner = jax.grad(lambda w: jnp.sum(jnp.sin(mapped(lambda x: ruled(w * x))(x))))
        return jax.jit(jax.value_and_grad(inner))(w)

    # by hand: d/dw sum sin(sin(w x)) with the rule is sum 3 x cos(w x) cos(sin(w x)), and of that the true derivative
    s, c = np.sin(w * x), np.cos(w * x)
    first = (3 * x * c * np.cos(s)).sum()
    second = (3 * x**2 * (-s * np.cos(s) - c**2 * np.sin(s))).sum()
    assert_close(twice(lambda body: lambda x: px.map_fn(body, x, axis)), (first, second), rtol=1e-4)
