"""What a run shows in a notebook while it goes on: one area that changes, by IPython's display and nothing else."""

import sys
import types
from typing import Any

import numpy as np
import pytest

import paraxis as px
from tests._fits import Steps

pytestmark = pytest.mark.floor


class Kernel:
    """In the place of IPython in a notebook: keeps every form that each area has had."""

    def __init__(self) -> None:
        self.areas: list[list[dict[str, str]]] = []
        self.kernel: object | None = object()
        self.display = types.SimpleNamespace(display=self._display)

    def get_ipython(self) -> "Kernel":
        return self

    def _display(self, form: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        forms = [form]
        self.areas.append(forms)

        def update(form: dict[str, str], *, raw: bool) -> None:
            assert raw
            forms.append(form)

        return types.SimpleNamespace(update=update)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    for name, module in {"IPython": found, "rich": None, "rich.console": None, "rich.progress": None}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def step(state: Steps, batch: Any) -> tuple[Steps, dict[str, float]]:
    return Steps(state.step + 1), {"loss": 1.0 / (state.step + 1)}


def test_fit_in_a_notebook_shows_one_area_that_changes(kernel: Kernel, capfd: pytest.CaptureFixture[str]) -> None:
    test = px.Evaluate(lambda state, batch: {"<b>": 0.25}, [0])
    px.fit(Steps(0), step, [np.zeros(4)] * 5, epochs=2, evaluate=test)
    (forms,) = kernel.areas
    assert forms[-1]["text/plain"].startswith("step 10 of 10, epoch 2 of 2  loss 0.1")
    assert "step 5 of 10, epoch 1 of 2  loss 0.2  test/<b> 0.25" in forms[-1]["text/plain"]
    assert '<progress value="10" max="10">' in forms[-1]["text/html"]
    assert "test/&lt;b&gt; 0.25" in forms[-1]["text/html"]
    assert capfd.readouterr() == ("", "")


def test_fit_in_a_notebook_shows_a_form_a_quarter_of_a_second(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def later(event: px.train.Event) -> None:
        now[0] += 0.01 * (event.kind == "step")

    px.fit(Steps(0), step, [np.zeros(4)] * 1000, epochs=1, callbacks=later)
    assert 35 <= len(kernel.areas[0]) <= 45


def test_fit_takes_ipython_on_a_terminal_for_no_notebook(kernel: Kernel, capfd: pytest.CaptureFixture[str]) -> None:
    kernel.kernel = None
    px.fit(Steps(0), step, [np.zeros(4)] * 5, epochs=1)
    assert kernel.areas == []
    assert "step 5 of 5" in capfd.readouterr().err


def test_stream_in_a_notebook_shows_one_area_that_changes(kernel: Kernel, capfd: pytest.CaptureFixture[str]) -> None:
    total = px.Stream(at_once=1, progress=True).run
    total(lambda x: px.reduce_sum(x, px.Axis("<rows>", 40)), px.Groups.of_arrays(np.ones(40, np.float32)))
    (forms,) = kernel.areas
    assert forms[0]["text/plain"].startswith("pass 1 of 1: 8 of 40 <rows>")
    assert forms[-1]["text/plain"].startswith("pass 1 of 1: 40 of 40 <rows>, ")
    assert '<progress value="40" max="40">' in forms[-1]["text/html"]
    assert "&lt;rows&gt;" in forms[-1]["text/html"]
    assert capfd.readouterr() == ("", "")


def test_ensemble_fit_in_a_notebook_shows_one_area_that_changes_unless_it_is_off(kernel: Kernel) -> None:
    def step(w: Any, x: Any) -> Any:
        return w + x.mean(), w

    for shows in (False, True):
        ens = px.ensemble(lambda key, start: start, 2, 0, np.zeros(2, np.float32))
        ens.fit(step, (np.ones(8, np.float32),), batch_size=4, epochs=3, progress=shows)
        assert len(kernel.areas) == shows
    assert kernel.areas[0][-1]["text/plain"].startswith("step 6 of 6, epoch 3 of 3  loss 5 (5 to 5)")
    assert '<progress value="6" max="6">' in kernel.areas[0][-1]["text/html"]
