"""Comparisons by a clock that the functions turn on themselves, and of real functions what is certain of them."""

import gc
import math
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import paraxis as px
from tests.reports._html import Tags

wrongly: Any = px.compare


class Clock:
    """Time passes only where a function says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def takes(self, *seconds: float) -> Callable[..., Any]:
        """A function that takes so long, the last of these from then on."""
        left: Iterator[float] = iter(seconds)
        last = [seconds[-1]]

        def fn(*args: Any) -> None:
            self.now += next(left, last[0])

        return fn

    def draws(self, draw: Callable[[], float]) -> Callable[..., Any]:
        def fn(*args: Any) -> None:
            self.now += draw()

        return fn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_times_are_medians_of_turns_and_compiling_is_apart(clock: Clock) -> None:
    slow, fast = clock.takes(7.0, 2.0), clock.takes(1.5, 0.5)
    found = px.compare({"slow": slow, "fast": fast}, seconds=30)
    assert [timing.median for timing in found.timings] == pytest.approx([2.0, 0.5])
    assert [timing.compile_seconds for timing in found.timings] == pytest.approx([5.0, 1.0])
    assert found["fast"].quartiles == pytest.approx((0.5, 0.5))
    assert (found.baseline, found["fast"].ratio, found["fast"].verdict) == ("slow", pytest.approx(0.25), "faster")
    other = px.compare({"slow": slow, "fast": fast}, seconds=30, baseline="fast")
    assert (other["slow"].ratio, other["slow"].verdict, other["fast"].verdict) == (4.0, "slower", "baseline")
    assert "4 × as fast" in str(found)
    assert "takes 4 × as long" in str(other)
    assert "takes 2,500 × as long" in str(px.compare({"a": clock.takes(1.0), "b": clock.takes(2500.0)}, seconds=30000))


def test_no_turn_begins_that_would_end_after_the_time(clock: Clock) -> None:
    found = px.compare({"a": clock.takes(2.0), "b": clock.takes(1.0)}, seconds=10)
    assert len(found["a"].seconds) == 3  # of 3 s each; the first two calls of each are before
    assert len(px.compare({"a": clock.takes(50.0)}, seconds=10)["a"].seconds) == 1
    assert len(px.compare({"a": clock.takes(1e-3)}, seconds=10)["a"].seconds) == 200
    assert found["b"].verdict == "too few"
    assert "too few turns" in str(found)


def test_what_is_fast_is_called_several_times_for_a_sample(clock: Clock) -> None:
    calls = []
    tick = clock.takes(1e-5)
    found = px.compare({"f": lambda: calls.append(tick())}, seconds=10)
    assert found["f"].median == pytest.approx(1e-5)
    assert len(calls) == pytest.approx(200 * 100, rel=0.02)


def test_functions_take_turns(clock: Clock) -> None:
    """So what slows the machine down, here from one turn to the next, slows all, and ratios stay."""
    calls: list[str] = []

    def drifting(name: str, seconds: float) -> Callable[[], None]:
        def fn() -> None:
            calls.append(name)
            clock.now += seconds * 1.05 ** ((len(calls) - 1) // 2)

        return fn

    found = px.compare({"a": drifting("a", 1.0), "b": drifting("b", 1.5)}, seconds=500)
    turns = [set(calls[i : i + 2]) for i in range(4, len(calls), 2)]
    assert turns == [{"a", "b"}] * len(turns)
    assert len({tuple(calls[i : i + 2]) for i in range(4, len(calls), 2)}) == 2
    assert max(found["a"].seconds) > 3 * min(found["a"].seconds)
    assert found["b"].ratio == pytest.approx(1.5)
    assert found["b"].verdict == "slower"


NOISE = {  # how much a turn varies, how much slower the second is: what can be told of 60 turns
    "quiet, alike": (0.01, 1.0, {"as fast"}),
    "quiet, slower": (0.01, 1.2, {"slower"}),
    "noisy, alike": (0.8, 1.0, {"too noisy"}),
    "noisy, a little slower": (0.8, 1.1, {"too noisy"}),
    "noisy, far slower": (0.8, 5.0, {"slower"}),
    "noisy, far faster": (0.8, 0.2, {"faster"}),
}


@pytest.mark.parametrize("case", NOISE)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_says_when_the_machine_is_too_noisy_to_tell(clock: Clock, case: str, seed: int) -> None:
    noise, ratio, verdicts = NOISE[case]
    draw = random.Random(seed)
    a = clock.draws(lambda: math.exp(draw.gauss(0, noise)))
    b = clock.draws(lambda: ratio * math.exp(draw.gauss(0, noise)))
    found = px.compare({"a": a, "b": b}, seconds=60 * (1 + ratio))
    assert found["b"].verdict in verdicts
    assert ("too noisy to tell" in str(found)) == (found["b"].verdict == "too noisy")


def test_the_interval_has_the_median_as_often_as_it_says(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 comparisons of a function with itself, 99 in 100 intervals include 1."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that the tests before have left
    draw = random.Random(5)
    same = clock.draws(lambda: math.exp(draw.gauss(0, 0.5)))
    intervals = [px.compare({"a": same, "b": same}, seconds=50)["b"].interval for _ in range(300)]
    missed = sum(not (i is not None and i[0] <= 1 <= i[1]) for i in intervals)
    assert missed <= 9


def test_numpy_jax_and_jit_agree_and_their_memory_is_told() -> None:
    x = np.linspace(0, 1, 90_000, dtype=np.float32).reshape(300, 300)
    jitted = jax.jit(lambda x: jnp.sin(x) @ x)
    fns = {"numpy": lambda x: np.sin(x) @ x, "jax": lambda x: jnp.sin(x) @ x, "jit": (jitted, jnp.asarray(x))}
    found = px.compare(fns, x, check=True, seconds=0.1)
    used = jitted.lower(x).compile().memory_analysis()
    assert used is not None
    assert found["jit"].memory == used.output_size_in_bytes + used.temp_size_in_bytes
    memory = found["numpy"].memory
    assert memory is not None
    assert 2 * x.nbytes <= memory < 2.2 * x.nbytes  # the sine, and the product
    assert found["jax"].memory is None
    assert not found["jit"].copies_host_arrays
    assert px.compare({"jit": jitted}, x, seconds=0.01)["jit"].copies_host_arrays


def test_a_result_of_a_tree_is_there_when_the_clock_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or x)
    found = px.compare({"f": jax.jit(lambda x: (x, x)), "g": np.sin}, np.ones(3), seconds=0.02)
    assert len([one for one in waited if isinstance(one, tuple) and len(one) == 2]) >= len(found["f"].seconds)


def test_a_function_is_compiled_once() -> None:
    traced = []

    def f(x):
        traced.append(1)
        return x + 1

    found = px.compare({"f": jax.jit(f)}, jnp.ones(3), seconds=0.05)
    assert len(traced) == 1
    assert found["f"].compile_seconds > 0


def test_donated_and_changed_arguments_stay_as_they_are() -> None:
    x, host = jnp.ones(1000), np.ones(1000)

    def adds(x: np.ndarray) -> np.ndarray:
        x += 1
        return x

    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    found = px.compare(
        {"donates": (donating, x), "hidden": (lambda x: donating(x), x), "adds": adds, "not": np.sin}, host, seconds=0.1
    )
    assert [timing.uses_up for timing in found.timings] == [True, True, True, False]
    assert not x.is_deleted()
    assert (host == 1).all()
    assert "donates: it donates or changes its arguments" in str(found)


def test_a_result_is_there_when_the_clock_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        waited = 0

        def block_until_ready(self) -> "Later":
            Later.waited += 1
            return self

    waits: list[int] = []
    cuda = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, synchronize=lambda: waits.append(1)
    )
    torch = types.SimpleNamespace(cuda=cuda, Tensor=Later, get_num_threads=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", torch)
    calls: list[int] = []
    px.compare({"f": lambda: calls.append(1) or Later()}, seconds=0.05)
    assert Later.waited == len(waits) == len(calls) > 2


class Tensor:
    """What of PyTorch's tensors is used here; NumPy cannot read one whose conjugate or dtype is not settled."""

    def __init__(self, values: Any, dtype: str = "torch.float32", lazy: bool = False, sparse: bool = False) -> None:
        self.values, self.dtype, self.lazy, self.sparse = np.array(values), dtype, lazy, sparse
        self.shape, self.requires_grad, self.is_meta = self.values.shape, False, dtype == "meta"

    def detach(self) -> "Tensor":
        return self

    cpu = resolve_neg = detach

    def resolve_conj(self) -> "Tensor":
        return Tensor(self.values, self.dtype, sparse=self.sparse)

    def to_dense(self) -> "Tensor":
        return Tensor(self.values, self.dtype, self.lazy)

    def float(self) -> "Tensor":
        return Tensor(self.values)

    def clone(self) -> "Tensor":
        return Tensor(self.values, self.dtype, self.lazy, self.sparse)

    def requires_grad_(self, wanted: bool) -> "Tensor":
        return self

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        if self.lazy or self.sparse:
            raise RuntimeError("Can't call numpy() on it")
        return self.values


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_available=lambda: False)
    stands_in = types.SimpleNamespace(cuda=cuda, Tensor=Tensor, get_num_threads=lambda: 4321)
    monkeypatch.setitem(sys.modules, "torch", stands_in)


@pytest.mark.usefixtures("torch")
def test_results_of_pytorch_are_compared_whatever_they_are_like_and_threads_are_told() -> None:
    def of(**how: Any) -> tuple[Any, Tensor]:
        return lambda x: x, Tensor([1.0, 2.0], **how)

    fns = {
        "numpy": (lambda x: x, np.array([1.0, 2.0], np.float32)),
        "bfloat16": of(dtype="torch.bfloat16"),
        "conjugate": of(lazy=True),
        "sparse": of(sparse=True),
    }
    found = px.compare(fns, check=True, seconds=0.02)
    assert [timing.uses_up for timing in found.timings] == [False] * 4
    assert [timing.threads for timing in found.timings] == [None, 4321, 4321, 4321]
    assert "sparse: PyTorch computes with 4,321 threads, and JAX with a thread for each of" in str(found)
    with pytest.raises(ValueError, match=r"fns\['b'\].* differs by up to 1"):
        px.compare({"a": of(), "b": (lambda x: x, Tensor([1.0, 3.0]))}, check=True, seconds=0.02)
    with pytest.raises(TypeError, match=r"an argument in args of 'a' is on PyTorch's meta device"):
        px.compare({"a": of(dtype="meta")})


@pytest.mark.usefixtures("torch")
def test_tensors_of_pytorch_that_a_function_changes_are_copied() -> None:
    kept = Tensor([0.0])

    def adds(x: Tensor) -> Tensor:
        x.values += 1
        return x

    assert px.compare({"adds": adds}, kept, seconds=0.02)["adds"].uses_up
    assert kept.values == 0
    assert "No array: ['w'] is" in str(px.show({"w": kept}))


def test_results_that_differ_are_told_by_the_function_and_the_place() -> None:
    fns = {"numpy": lambda x: {"a": x, "b": x}, "jit": jax.jit(lambda x: {"a": x, "b": x + (x > 1) / 4})}
    x = np.array([0.0, 1.0, 2.0], np.float32)
    with pytest.raises(
        ValueError, match=r"fns\['jit'\] must return what 'numpy' does; its result\['b'\] differs by up to 0.25"
    ):
        px.compare(fns, x, check=True, seconds=0.05)
    assert px.compare(fns, x, check=True, rtol=0.2, seconds=0.05)
    with pytest.raises(ValueError, match=r"fns\['b'\].*shape \(2,\), expected \(3,\)"):
        px.compare({"a": lambda x: x, "b": lambda x: x[1:]}, x, check=True, seconds=0.05)
    with pytest.raises(ValueError, match=r"fns\['b'\].*PyTreeDef.*expected"):
        px.compare({"a": lambda x: x, "b": lambda x: (x, x)}, x, check=True, seconds=0.05)
    assert px.compare({"a": lambda x: x * np.nan, "b": jax.jit(lambda x: x * jnp.nan)}, x, check=True, seconds=0.05)


def fails(x: Any) -> Any:
    raise KeyError("mine")


REFUSED = {
    "no functions": (lambda: wrongly({}, 1), TypeError, "fns must be a dictionary of functions by name, got {}"),
    "a function alone": (lambda: wrongly(np.sin, 1), TypeError, "fns must be a dictionary"),
    "what is no function": (lambda: wrongly({"f": 3}, 1), TypeError, r"fns\['f'\] must be a function, got 3"),
    "a tuple without": (lambda: wrongly({"f": (3, 4)}), TypeError, r"fns\['f'\] must be a function, got 3"),
    "a generator": (
        lambda: px.compare({"a": np.sin, "g": lambda x: (i for i in x)}, np.ones(3)),
        TypeError,
        "'g' of fns returned <generator.*does its work when it is read; write",
    ),
    "a shape": (lambda: px.compare({"f": np.sin}, jax.ShapeDtypeStruct((3,), int)), TypeError, r"args\[0\] is a Shape"),
    "traced": (lambda: jax.jit(lambda x: px.compare({"f": jnp.sin}, x))(1.0), TypeError, "outside of jax.jit"),
    "no baseline": (lambda: px.compare({"f": np.sin}, 1.0, baseline="g"), ValueError, "baseline must be one of"),
    "no time": (lambda: px.compare({"f": np.sin}, 1.0, seconds=0), ValueError, "seconds must be a finite number"),
    "no tolerance": (lambda: px.compare({"f": np.sin}, 1.0, rtol=-1), ValueError, "rtol must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_calls_are_refused(case: str) -> None:
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()


def test_an_error_names_the_function_that_raises_it() -> None:
    with pytest.raises(KeyError, match="mine") as raised:
        px.compare({"right": np.sin, "wrong": fails}, 1.0)
    assert "raised by 'wrong', one of the functions given to px.compare" in raised.value.__notes__


def test_an_error_that_comes_while_waiting_names_it_too() -> None:
    class Wrong:
        def block_until_ready(self) -> None:
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late") as raised:
        px.compare({"wrong": Wrong})
    assert "raised by 'wrong', one of the functions given to px.compare" in raised.value.__notes__


def test_it_is_shown_saved_and_drawn(tmp_path: Path, clock: Clock) -> None:
    found = px.compare({"<a>": clock.takes(1.0), "b": clock.takes(3.0)}, seconds=60)
    found.save(tmp_path / "x.html")
    assert "takes 3 × as long" in Tags((tmp_path / "x.html").read_text("utf-8")).words
    assert "<a>" not in found._repr_html_()
    assert repr(found) == str(found)
    for name, head in {"x.png": b"\x89PNG", "x.svg": b"<?xml", "x.pdf": b"%PDF"}.items():
        figure = found.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["<a>", "b"]
    with pytest.raises(ValueError, match=r"plot: path must end in .png"):
        found.plot("x.jpg")
    with pytest.raises(ValueError, match=r"name must be one of '<a>', 'b'"):
        _ = found["c"]
