"""How ``px.Parallel`` splits arguments over devices; rows that do not divide are padded, or refused with the reason."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close, values
from tests.transforms._models import MLP


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("device",))


def mlp() -> MLP:
    return MLP(nnx.Rngs(0))


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_each_device_is_given_its_share() -> None:
    def body(x: jax.Array, y: jax.Array, a: Any, b: Any, *, k: jax.Array) -> jax.Array:
        shapes = (x.shape, y.shape, jnp.shape(a), jnp.shape(b), k.shape)
        assert shapes == ((3, 2), (3,), (), (), (5,)), shapes
        return jnp.stack([x.sum() * a, y.sum() * b, k.sum()])

    x, y, k = values(24, 2), values(24), values(5)
    got = px.Parallel(body, reduce="stack")(x, np.asarray(y), 2.0, jnp.asarray(3.0), k=k)
    sums = np.asarray(x).reshape(8, -1).sum(1) * 2, np.asarray(y).reshape(8, -1).sum(1) * 3
    assert_close(np.asarray(got), np.stack([*sums, np.full(8, np.asarray(k).sum())], 1).astype("float32"))


TREES: dict[str, tuple[Any, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "one for all": (1, lambda x, y: x.T * y.T, lambda: (values(3, 24), values(3, 24, seed=1))),
    "from the end": (-1, lambda x: x.T * 2, lambda: (values(3, 24),)),
    "one of them whole": ((0, None), lambda x, w: x @ w, lambda: (values(24, 3), values(3, 3))),
    "none of them": ((None, None), lambda x, w: x @ w, lambda: (values(4, 3), values(3, 3))),
    "more than needed": ((0, 0, 1), lambda x: x + 1, lambda: (values(24, 3),)),
    "a dict": (0, lambda d: d["a"] * d["b"][0][:, None], lambda: ({"a": values(24, 3), "b": [values(24), 2.0]},)),
    "a prefix": (
        ({"a": 0, "b": None}, [1, None]),
        lambda d, e: d["a"] @ d["b"]["c"] + e[0].T + e[1].sum(),
        lambda: ({"a": values(24, 3), "b": {"c": values(3, 3)}}, [values(3, 24), values(7)]),
    ),
    "a missing one": (0, lambda x, y: x if y is None else y, lambda: (values(24, 3), None)),
    "integers and booleans": (0, lambda x, y: jnp.where(y, x, -x), lambda: (np.arange(24), np.arange(24) % 2 > 0)),
    "keys": (0, lambda k: jax.vmap(jax.random.normal)(k), lambda: (jax.random.split(jax.random.key(0), 24),)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("name", TREES)
def test_axes_of_arguments(name: str, devices: int) -> None:
    axes, body, make = TREES[name]
    args = make()
    kind = "same" if name == "none of them" else "concat"
    got = px.Parallel(body, batch_axis=axes, reduce=kind, mesh=mesh_of(devices))(*args)
    assert_close(host(got), host(jnp.asarray(body(*args))))


def test_static_arguments() -> None:
    traced = []

    def body(net: MLP, kind: str, x: jax.Array, power: int = 1, *, shift: Any = 0.0) -> jax.Array:
        assert isinstance(kind, str)
        assert isinstance(power, int)
        traced.append(kind)
        return net(x) ** power + shift if kind == "net" else x

    net, x = mlp(), values(16, 3)
    by_number = px.Parallel(body, net, static_argnums=(0, 2))
    for fast in (by_number, px.Parallel(body, net, static_argnames=("kind", "power"))):
        traced.clear()
        for _ in range(2):
            assert_close(host(fast("net", x, 2)), net(x) ** 2)
            assert_close(host(fast("net", x, power=2)), net(x) ** 2)
            assert_close(host(fast("net", x, shift=0.5)), net(x) + 0.5)
            assert_close(host(fast("as is", x, 1)), x)
        assert sorted(traced) == ["as is", "net", "net", "net"]
    axes = px.Parallel(body, net, static_argnums=(0, 2), batch_axis=(None, 1, None))
    with pytest.raises(TypeError, match="dot_general"):
        axes("net", x, 1)
    assert_close(host(px.Parallel(lambda x, flag: x.T if flag else x, static_argnums=1, batch_axis=1)(x.T, True)), x)


# --- rows that do not divide -----------------------------------------------------------------------------------------
