"""What ``ens.train`` refuses, with the line to write instead; whatever happens, the members stay as they were."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import paraxis as px
from tests._support import assert_close, values
from tests.ensembles._kinds import arrays_of, mesh_of
from tests.ensembles._programs import After

SIZE = 3
X = values(6, 2)
W = values(SIZE, 2, seed=2)


def linear(**options: Any) -> px.Ensemble:
    return px.ensemble(lambda key, w: w, SIZE, 0, W, mesh=mesh_of(2), **options)


def in_a_dict() -> px.Ensemble:
    return px.ensemble(lambda key, w: {"w": w}, SIZE, 0, W, mesh=mesh_of(2))


def pair() -> px.Ensemble:
    return px.ensemble(lambda key, w: (w, w), SIZE, 0, W, mesh=mesh_of(2))


def net() -> px.Ensemble:
    return px.ensemble(lambda key: nnx.Linear(2, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(key)), SIZE, 0)


OUTSIDE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def _add_a_layer(net: nnx.Linear) -> None:
    net.more = nnx.Param(jnp.ones(2))  # pyright: ignore[reportAttributeAccessIssue]


def _widen(net: nnx.Linear) -> None:
    net.kernel.set_value(jnp.ones((2, 3)))


Case = tuple[Callable[[], px.Ensemble], Callable[..., Any], tuple[Any, ...], Any, type[Exception], str]
CASES: dict[str, Case] = {
    "no function": (linear, 3, (), None, px.StateError, "step must be a function of one member, got 3"),  # pyright: ignore
    "nothing returned": (
        linear,
        lambda w: None,
        (),
        None,
        px.StateError,
        r"it returned NoneType, but the new state, float32\[2\], was expected\. Write return state, loss",
    ),
    "the loss alone": (
        in_a_dict,
        lambda p: p["w"].sum(),
        (),
        None,
        px.StateError,
        r"step must return the new state, with the structure of the old one.*but the new state, dict, was expected",
    ),
    "one part of two": (
        pair,
        lambda a, b: a,
        (),
        None,
        px.StateError,
        r"but a tuple like the member was expected\. Write return \(params, opt_state\), loss",
    ),
    "three results": (
        linear,
        lambda w: (w, 1, 2),
        (),
        None,
        px.StateError,
        r"it returned \(float32\[2\], int, int\), but the new state, float32\[2\], was",
    ),
    "another shape": (
        in_a_dict,
        lambda p: {"w": p["w"][:1]},
        (),
        None,
        px.StateError,
        r"step changed w from float32\[2\] to float32\[1\]; a member keeps its shapes and dtypes",
    ),
    "another dtype": (
        in_a_dict,
        lambda p: {"w": p["w"].astype("bfloat16")},
        (),
        None,
        px.StateError,
        r"step changed w from float32\[2\] to bfloat16\[2\].*new\.astype\(float32\)",
    ),
    "a shorter axis": (
        linear,
        lambda w, x: w,
        (X,),
        0,
        px.ShapeError,
        r"args\[0\] has shape \(6, 2\), but in_axes=0.*each of the 3 members has its own.*write in_axes=None",
    ),
    "a scalar": (
        linear,
        lambda w, d: w,
        ({"x": X, "lr": 0.1},),
        ({"x": None, "lr": 0},),
        px.ShapeError,
        r"args\[0\]\['lr'\] has shape \(\), but in_axes=0.*write in_axes=None",
    ),
    "too few axes": (
        linear,
        lambda w, x, y: w,
        (X, X),
        (None,),
        px.ShapeError,
        r"in_axes has 1 entries for 2 arguments; write one for each, in_axes=\(None, None\)",
    ),
    "another axis": (linear, lambda w, x: w, (X,), 1, px.ShapeError, "0, None, got 1; write in_axes=0"),
    "a boolean": (linear, lambda w, x: w, (X,), False, px.ShapeError, "0, None, got False; write in_axes=0"),
    "axes of another tree": (
        linear,
        lambda w, d: w,
        ({"x": X},),
        ({"y": 0},),
        px.ShapeError,
        r"in_axes=\(\{'y': 0\},\) does not fit the arguments",
    ),
    "no array": (linear, lambda w, x: w, ("text",), None, px.ShapeError, r"args\[0\] is a str, not an array"),
    "a module returned": (
        net,
        lambda net: net,
        (),
        None,
        px.StateError,
        "modules are changed in place, so return what else is wanted: return loss",
    ),
    "a new variable": (net, _add_a_layer, (), None, px.StateError, r"changed the structure.*Change the rest in make"),
    "a wider variable": (
        net,
        _widen,
        (),
        None,
        px.StateError,
        r"changed .*kernel.* from float32\[2, 2\] to .*\[2, 3\]",
    ),
    "a module from outside": (
        linear,
        lambda w: w + OUTSIDE(w),
        (),
        None,
        px.StateError,
        r"step.*OUTSIDE.*return it from make; or say that it is constant: px\.freeze\(OUTSIDE\)",
    ),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_and_the_members_stay_as_they_were(name: str) -> None:
    make, step, args, in_axes, error, message = CASES[name]
    ens = make()
    before = arrays_of(ens.stacked())
    for _ in range(2):  # what failed once is not remembered as good
        with pytest.raises(error, match=message):
            ens.train(step, *args, in_axes=in_axes)
    assert_close(arrays_of(ens.stacked()), before)


def test_an_eval_mode_that_a_step_sets_is_refused() -> None:
    def make(key: jax.Array) -> nnx.Module:
        return nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(key)), nnx.Dropout(0.5, rngs=nnx.Rngs(key)))

    ens = px.ensemble(make, 2, 0, mesh=mesh_of(2))
    with pytest.raises(px.StateError, match=r"train\(\) or eval\(\)\); only values of variables are kept"):
        ens.train(lambda net: net.eval())


@pytest.mark.parametrize("lowering", ["auto", "dispatch", "vmap", "unroll"])
def test_an_exception_of_the_step_comes_through_and_the_members_stay(lowering: Any) -> None:
    fails = [True]

    def step(w: jax.Array) -> jax.Array:
        if fails:
            raise RuntimeError("the user's own")
        return w + 1

    ens = linear(lowering=lowering)
    with pytest.raises(RuntimeError, match="the user's own"):
        ens.train(step)
    fails.clear()
    ens.train(step)
    assert_close(ens.stacked(), W + 1)


@pytest.mark.parametrize("donate", [True, False])
def test_members_lost_in_a_failing_run_are_reported(donate: bool, after: After) -> None:
    """If a program fails after it was given the memory, it is gone; kept memory is not."""

    def fail() -> None:
        raise RuntimeError("out of memory")

    ens = linear(donate=donate, lowering="vmap")
    after.append(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        ens.train(lambda w: w + 1)
    after.clear()
    if donate:
        for use in (lambda: ens.train(lambda w: w), lambda: ens[0], lambda: ens.stacked(), lambda: ens.finite()):
            with pytest.raises(px.StateError, match=r"members are gone.*px\.load_ensemble\(make, path\).*donate=False"):
                use()
    else:
        assert_close(ens.stacked(), W)


MAKE: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "no function": (3, {}, px.StateError, "make must be a function of one member, got 3"),  # pyright: ignore
    "nothing made": (
        lambda key: None,
        {},
        px.StateError,
        r"NoneType without arrays.*lambda key: model\.init\(key, x\)",
    ),
    "a lowering": (
        lambda key: key,
        {"lowering": "map"},
        px.LoweringError,
        r"'dispatch', got 'map'; write lowering='auto'",
    ),
    "no member": (lambda key: key, {"size": 0}, px.AxisError, "members.*at least 1"),
    "a module from outside": (lambda key: OUTSIDE, {}, px.StateError, r"make.*OUTSIDE.*px\.freeze\(OUTSIDE\)"),
    "a module and an array": (
        lambda key: (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2)),
        {},
        px.StateError,
        r"as number 1, a \w+, which a step could not change in place; keep it in a variable, nnx\.Variable\(x\)",
    ),
    "no variables": (lambda key: nnx.Dropout(0.5), {}, px.StateError, "a Dropout without variables"),
    "no function to apply": (lambda key: key, {"apply": 3}, px.StateError, "apply must be a function of one member"),
}


@pytest.mark.parametrize("name", MAKE)
def test_what_cannot_be_made_is_refused(name: str) -> None:
    make, options, error, message = MAKE[name]
    with pytest.raises(error, match=message):
        px.ensemble(make, **{"size": 2, "key": 0, **options})


def test_arguments_of_make_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        px.ShapeError, match=r"ensemble: args\[0\] has shape \(2,\).*starts with its size, \(3, \.\.\.\)"
    ):
        px.ensemble(lambda key, lr: lr, 3, 0, jnp.ones(2))


def test_a_module_in_the_place_of_what_makes_one_is_named() -> None:
    with pytest.raises(
        px.errors.StateError, match=r"got the module Linear; write .*Linear\(…, rngs=nnx\.Rngs\(key\)\)"
    ):
        px.ensemble(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 2, 0)
    bound = jax.tree_util.Partial(lambda w, key: w + jax.random.normal(key, (3,)), jnp.ones(3))
    assert len(px.ensemble(bound, 2, 0)) == 2
