"""Law 1 as an assertion: it passes where it should, and fails where it should."""

import jax
import jax.numpy as jnp
import pytest

import paraxis as px
from paraxis.testing import assert_same_everywhere

ROWS = px.Axis("rows", 10)
X = jnp.arange(30.0).reshape(10, 3)


@px.program(clients=10)
def _mean(w, x):
    return px.reduce_mean(px.map_fn(lambda w, x: {"a": w * x, "b": x.sum()}, (px.broadcast(w), x)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fn", [_mean, jax.jit(_mean), jax.grad(lambda w, x: _mean(w, x)["a"].sum())])
def test_assert_same_everywhere_passes_programs_that_are(fn):
    assert_same_everywhere(fn, 2.0, X)


def test_assert_same_everywhere_moves_arguments_of_any_dtype_from_their_device():
    bound = jax.device_put(jnp.arange(10), jax.devices()[3])
    assert_same_everywhere(lambda x: px.map_fn(lambda x: (x, x.astype(jnp.bfloat16)), x, ROWS), bound, devices=(1, 3))


@pytest.mark.parametrize("x", [X, jnp.arange(10), X + 0j], ids=["floats", "integers", "complex"])
def test_assert_same_everywhere_fails_where_the_answer_depends_on_the_devices(x):
    def devices_seen(x):
        seen = jax.sharding.get_abstract_mesh().size
        return {"y": px.map_fn(lambda x: x, x, ROWS) + (seen if x.dtype == jnp.int32 else 1j * seen)}

    with pytest.raises(AssertionError, match=r"on 2 devices: result\['y'\] differs from that of 1"):
        assert_same_everywhere(devices_seen, x, devices=(1, 2))


def test_assert_same_everywhere_refuses_what_lies_on_no_device_and_too_few_devices():
    with pytest.raises(AssertionError, match="places nothing on the devices"):
        assert_same_everywhere(lambda x: x + 1, X)
    with pytest.raises(px.DeviceError, match=r"64 devices were asked for, there are 8; call .*simulate_devices\(64\)"):
        assert_same_everywhere(_mean, 2.0, X, devices=(1, 64))
