"""Each front end on two processes, with two devices each or with three and one: what it gives in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import _front_ends
from tests.processes._support import Launch

pytestmark = pytest.mark.floor
AT_NIGHT = [pytest.param(name, marks=pytest.mark.slow) for name in _front_ends.PARTS if name != "verbs"]


def check(launched: Launch, folder: Path, *names: str, n: int = 2, devices: int = 2) -> None:
    status, _, error = launched(_front_ends.__file__, str(folder), *names, n=n, devices=devices)
    assert status == 0, error
    expected = _front_ends.results([*names])
    for rank in range(n):
        with np.load(folder / f"rank-{rank}.npz") as found:
            assert sorted(found) == sorted(expected)
            for what, value in expected.items():
                np.testing.assert_allclose(found[what], value, rtol=1e-3, atol=2e-4, err_msg=what)


@pytest.mark.parametrize("name", ["verbs", *AT_NIGHT])
def test_front_ends_give_on_two_processes_what_they_give_on_one(launched: Launch, tmp_path: Path, name: str) -> None:
    check(launched, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("verbs", "sizes", "streams"), ("ensembles", "solvers", "transforms")], ids=str)
@pytest.mark.parametrize(("n", "devices"), [(2, 1), (3, 1)])
def test_so_they_do_on_other_layouts(launched: Launch, tmp_path: Path, n: int, devices: int, names: Any) -> None:
    check(launched, tmp_path, *names, n=n, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["verbs", "sizes", "streams", "solvers", "refusals"])
def test_processes_may_have_different_numbers_of_devices(launched: Launch, tmp_path: Path, monkeypatch, name) -> None:
    monkeypatch.setenv("TESTS_UNEVEN", "3 and 1")
    check(launched, tmp_path, name)
