"""No public face: runs ask which process this is, and note their steps, by functions that show nothing of themselves.

A lone process is first, and waits for nobody.
"""

import numpy as np
import pytest

import paraxis as px
from paraxis._host import processes


def test_a_lone_process_is_first_and_waits_for_nobody() -> None:
    assert (processes.index(), processes.count(), processes.is_first()) == (0, 1, True)
    processes.barrier("nobody")
    assert processes.reports("") == {}
    assert processes.reports("no room") == {0: "no room"}


def test_what_processes_tell_each_other_before_they_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(processes, "reports", lambda text: told.append(text) or {1: "ValueError: no"})
    with pytest.raises(AssertionError), processes.together("px.fit"):
        raise AssertionError
    assert told == ["AssertionError: "]
    with (
        pytest.raises(px.ProcessError, match=r"px\.fit: process 1 cannot continue: ValueError"),
        processes.together("px.fit"),
    ):
        pass


@pytest.mark.parametrize("odd", [None, "X", "y", "rows", "dtype", "last row", "later"])
def test_arrays_of_two_processes_are_compared_by_name(odd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = np.random.default_rng(0).normal(size=(5000, 40)), np.arange(5000)  # X is more than is read whole
    mine = {"X": X, "y": y, **{f"later[{i}]": np.ones(i) for i in range(20)}}
    changed = {
        None: {},
        "X": {"X": X + 1},
        "y": {"y": np.where(y == 77, 0, y)},
        "rows": {"X": X[:-1]},
        "dtype": {"y": y.astype("int32")},
        "last row": {"X": np.vstack([X[:-1], X[:1]])},
        "later": {"later[19]": np.zeros(19)},
    }[odd]
    told: list[str] = []
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "reports", lambda text: told.append(text) or {0: text})
    processes.require_same("px.fit", {**mine, **changed}, "give all the same")
    assert len(told[0].encode()) <= 400
    monkeypatch.setattr(processes, "reports", lambda text: {0: text, 1: told[0]})
    if odd is None:
        processes.require_same("px.fit", mine, "give all the same")
        return
    name = {"rows": "X", "dtype": "y", "last row": "X", "later": r"later\[19\]"}.get(odd, odd)
    with pytest.raises(px.DataError, match=rf"px\.fit: {name} is another one in process 1 than .*; give all the same"):
        processes.require_same("px.fit", mine, "give all the same")
