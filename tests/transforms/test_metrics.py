"""Flax's metrics in px.Parallel, against the same metrics updated with all rows at once."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import paraxis as px
from tests._support import assert_close

OFFSETS = {"around zero": 0.0, "far from zero": 300.0}


def metrics() -> Any:
    return nnx.MultiMetric(
        loss=nnx.metrics.Average(),
        right=nnx.metrics.Accuracy(),
        spread=nnx.metrics.Welford(),
    )


def batch(seed: int, offset: float = 0.0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    size = 16 + 8 * (seed % 2)
    return {
        "values": jnp.asarray(rng.normal(size=size) * (seed + 1) + offset, "float32"),
        "logits": jnp.asarray(rng.normal(size=(size, 3)), "float32"),
        "labels": jnp.asarray(rng.integers(0, 3, size)),
    }


def update(metrics: Any, values: jax.Array, logits: jax.Array, labels: jax.Array) -> None:
    metrics.update(values=values, logits=logits, labels=labels)


def anew(metrics: Any, *rows: jax.Array) -> None:
    update(metrics, *rows)
    metrics.reset()
    update(metrics, *rows)


def held(metrics: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(v[...]) for name, v in px.variables(metrics).items()}


def test_there_is_a_rule_for_each_of_flax() -> None:
    kinds = {x for x in vars(nnx.metrics).values() if isinstance(x, type) and issubclass(x, nnx.Metric)}
    assert kinds == {
        nnx.Metric,
        nnx.MultiMetric,
        *(type(x) for x in vars(metrics()).values() if isinstance(x, nnx.Metric)),
    }


@pytest.mark.parametrize("offset", OFFSETS)
def test_metrics_are_those_of_one_device(offset: str) -> None:
    ours, alone = metrics(), metrics()
    fast = px.Parallel(update, ours)
    for seed in range(4):
        rows = batch(seed, OFFSETS[offset])
        fast(*rows.values())
        update(alone, *rows.values())
        assert_close(held(ours), held(alone), rtol=1e-4)
    assert_close(jax.tree.leaves(_numbers(ours)), jax.tree.leaves(_numbers(alone)), rtol=1e-4)
    starting_anew = px.Parallel(anew, ours)
    for seed in range(2):
        rows = batch(seed, OFFSETS[offset])
        starting_anew(*rows.values())
        anew(alone, *rows.values())
        assert_close(held(ours), held(alone), rtol=1e-4)


def _numbers(metrics: Any) -> dict[str, Any]:
    found = metrics.compute()
    spread = found.pop("spread")
    return {name: np.asarray(x) for name, x in (found | vars(spread)).items()}


def test_what_all_devices_are_updated_with_is_counted_once() -> None:
    ours, alone, rows = metrics(), metrics(), batch(0)
    whole = px.Parallel(update, ours, batch_axis=None)
    for _ in range(2):
        whole(*rows.values())
        update(alone, *rows.values())
    assert_close(held(ours), held(alone))
    px.Parallel(lambda metrics, x: metrics.loss.update(values=px.pmean(x.mean(), "device")), ours)(rows["values"])
    alone.loss.update(values=rows["values"].mean())
    assert_close(held(ours), held(alone))
    px.Parallel(lambda metrics, x: metrics.reset(), ours)(rows["values"])
    alone.reset()
    assert_close(held(ours), held(alone))


def test_masked_rows_and_shares_without_any() -> None:
    ours, alone = nnx.metrics.Average(), nnx.metrics.Average()
    x, mask = jnp.arange(16.0), jnp.arange(16) >= 7
    px.Parallel(lambda metric, x, mask: metric.update(values=x, mask=mask), ours)(x, mask)
    alone.update(values=x, mask=mask)
    assert_close(held(ours), held(alone))


def test_a_rule_by_name_goes_before_and_one_by_type_after() -> None:
    ours, alone, x = nnx.metrics.Welford(), nnx.metrics.Welford(), batch(0)["values"]
    px.Parallel(_values, ours, sync={nnx.metrics.MetricState: "mean"})(x)
    _values(alone, x)
    assert_close(held(ours), held(alone), rtol=1e-4)
    named = nnx.metrics.Average()
    rules = {"(Average).total": "max", "(Average).count": "max"}
    px.Parallel(_values, named, sync=rules)(jnp.arange(8.0))
    assert (float(named.total[...]), int(named.count[...])) == (7.0, 1)


def _values(metric: Any, x: jax.Array) -> None:
    metric.update(values=x)


class Largest(nnx.Metric):
    def __init__(self) -> None:
        self.largest = nnx.metrics.MetricState(jnp.asarray(-jnp.inf))

    def update(self, **rows: Any) -> None:
        self.largest[...] = jnp.maximum(self.largest[...], rows["values"].max())


def test_a_metric_of_ones_own_needs_a_rule() -> None:
    own, x = Largest(), batch(0)["values"]
    message = r"Parallel: variable \(Largest\)\.largest belongs to a metric .*metric\.update\(values=fast\(x\)\).*'sum'"
    with pytest.raises(px.StateError, match=message):
        px.Parallel(_values, own)(x)
    px.Parallel(_values, own, sync={"(Largest).largest": "max"})(x)
    assert float(own.largest[...]) == float(x.max())


def test_rows_do_not_update_metrics() -> None:
    message = r"Vectorize: rows leave variable \(Average\)\.total .*update it once, outside"
    with pytest.raises(px.StateError, match=message):
        px.Vectorize(_values, nnx.metrics.Average())(batch(0)["values"])


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "in_jit"), list(itertools.product([1, 2, 3], [False, True])))
def test_metrics_on_any_devices(devices: int, in_jit: bool) -> None:
    ours, alone = metrics(), metrics()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("device",))
    fast = px.Parallel(update, ours, mesh=mesh)
    fast = px.Jit(fast) if in_jit else fast
    for seed in range(3):
        rows = {name: x[:12] for name, x in batch(seed).items()}
        fast(*rows.values())
        update(alone, *rows.values())
    assert_close(held(ours), held(alone), rtol=1e-4)
