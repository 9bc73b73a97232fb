"""No public face: that sums are moved into products cannot be switched off; without it they must be the same."""

import functools

import jax
import pytest

import paraxis as px
from paraxis._core import sums
from tests.core.test_summing import BODIES, _axis, _close, _rows, _weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gradient of an MLP", "two local steps"])
def test_without_the_pass_the_sums_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = functools.partial(sums.over_elements, contract=False)
    monkeypatch.setattr(sums, "over_elements", plain)
    body, axis, (w, x) = BODIES[name], _axis(3), _weights()

    @jax.jit
    def total(w, x):
        return px.reduce_sum(px.map_fn(body, (px.broadcast(w, axis), x), axis), axis)

    _close(total(w, x), jax.tree.map(lambda a: a.sum(0), _rows(body, w, x)))
