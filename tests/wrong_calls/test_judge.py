"""The judge of wrong calls finds each way in which a call can end badly."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import paraxis as px
from tests.wrong_calls import _calls, _functions as own, _values
from tests.wrong_calls._calls import AT_NIGHT, Call, Hung, Mistake, flaw, judge, mistakes

KEY = jax.random.key(0)


def call_of(fn: Callable[..., Any], value: Any = 3) -> Call:
    return Call("f", fn, lambda: {"x": (value, lambda x: isinstance(x, int) and x == 3)})


def ending(error: Exception) -> Callable[..., Any]:
    def fn(x: Any) -> None:
        if x != 3:
            raise error

    return fn


def judged(fn: Callable[..., Any], folder: Path, value: Any = 3) -> str | None:
    """What the judge says of ``fn(x=-1)``."""
    mistake = Mistake("x = minus one", lambda given: {**given, "x": -1}, ("x",))
    return judge(call_of(fn, value), (mistake,), folder)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (px.AxisError("f: x must be 3, got -1; write x=3"), None),
        (TypeError("f: x must be 3, got -1"), None),
        (ValueError("f: y must be 3"), "does not name x"),
        (ValueError("f: x_max must be 3"), "does not name x"),
        (ValueError("x"), "does not say what was expected"),
        (KeyError("x must be 3"), "somebody else's builtins.KeyError"),
        (AttributeError("x must be 3"), "somebody else's"),
        (IndexError("x must be 3"), "somebody else's"),
        (jax.errors.UnexpectedTracerError("x must be 3"), "somebody else's jax.errors"),
        (jax.errors.JaxRuntimeError("x must be 3"), "somebody else's"),
        (UnicodeError("x must be 3"), "somebody else's"),
        (AssertionError("x must be 3"), "somebody else's"),
    ],
)
def test_errors(error: Exception, found: str | None, tmp_path: Path):
    said = judged(ending(error), tmp_path)
    assert said is None if found is None else found in str(said)


def test_a_wrong_value_that_is_taken(tmp_path: Path):
    assert judged(lambda x: x, tmp_path) == "it was taken"
    assert flaw(None, accepted=True, named=["x"]) is None


def test_a_call_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_calls, "MOST_SECONDS", 0.05)
    assert judged(lambda x: time.sleep(30), tmp_path) == f"it hangs: {Hung.__name__}: ['no end after 0.05 seconds']"


def test_what_a_call_leaves(tmp_path: Path):
    right = ValueError("f: x must be 3")

    def writes(x: Any) -> None:
        (tmp_path / "file").write_text("here")
        raise right

    assert "leaves a file changed" in str(judged(writes, tmp_path))

    kept = np.zeros(2)

    def changes(x: Any, y: Any = kept) -> None:
        y += 1
        raise right

    call = Call("f", changes, lambda: {"x": (3, lambda x: x == 3), "y": (kept, _values.anything)})
    mistake = Mistake("x = minus one", lambda given: {**given, "x": -1}, ("x",))
    assert "leaves an argument changed" in str(judge(call, (mistake,), tmp_path))


def test_an_error_of_the_users_own_function_is_none_of_ours(tmp_path: Path):
    assert judged(lambda x: own.row_loss({}, {}) if x != 3 else None, tmp_path) is None


def test_variables_are_looked_at():
    net = own.Net()
    before = _calls.print_of([net, {"a": jax.random.key(0)}])
    net.kernel[...] += 1
    assert before != _calls.print_of([net, {"a": jax.random.key(0)}])


def test_mistakes_are_the_same_each_time_and_as_many_as_asked_for():
    call = Call("f", lambda x, y: None, lambda: {"x": (3, _values.count()), "y": ({"a": 1}, _values.tree)})
    labels = [[mistake.label for mistake in made] for made in mistakes(call, AT_NIGHT)]
    assert len(labels) == AT_NIGHT
    assert labels == [[mistake.label for mistake in made] for made in mistakes(call, AT_NIGHT)]
    assert {"x = NaN", "an item of y = NaN", "x is spelt xs", "an argument too many"} <= {found[0] for found in labels}


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (_values.count(), [1, np.int32(4), 2**31 - 1], [0, True, 2.0, 2**70, "1", None]),
        (_values.number(0), [0, 1.5, np.float64(2)], [-1, float("nan"), 1j, True, "1"]),
        (_values.rows(3), [np.zeros((3, 2)), {"a": np.ones(3)}], [np.zeros(4), 1.0, "abc"]),
        (
            _values.key,
            [jax.random.key(0), np.zeros(2, np.uint32)],
            [0, np.zeros(2), jax.random.split(jax.random.key(0))],
        ),
        (_values.path, ["a", Path("a/b")], ["", "a\0", "x" * 5000, b"a", None]),
        (_values.array(2, None), [np.zeros((2, 5)), [[1.0], [2.0]]], [np.zeros(2), [[1.0], [2.0, 3.0]], "a"]),
    ],
)
def test_kinds(kind: _values.Kind, right: list[Any], wrong: list[Any]):
    assert [value for value in right if not _values.judged(kind, value)] == []
    assert [value for value in wrong if _values.judged(kind, value)] == []
