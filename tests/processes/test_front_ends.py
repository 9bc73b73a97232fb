"""Each front end on several processes, with as many devices each or with three and one: what it gives in one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests._support import table
from tests.processes import _front_ends
from tests.processes._support import Launch

pytestmark = pytest.mark.floor
# Front ends; the number of processes, and of devices of each, or "3 and 1".
CASES: list[tuple[tuple[str, ...], int, Any]] = [
    *(((name,), 2, 2) for name in _front_ends.PARTS),
    *((("verbs", "sizes", "streams"), n, 1) for n in (2, 3)),
    *((("ensembles", "solvers", "transforms"), n, 1) for n in (2, 3)),
    *(((name,), 2, "3 and 1") for name in ("verbs", "sizes", "streams", "solvers", "refusals")),
]


@pytest.mark.parametrize(("names", "n", "devices"), table(CASES[:1], CASES), ids=str)
def test_front_ends_give_on_several_processes_what_they_give_on_one(
    launched: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], n: int, devices: Any
) -> None:
    if devices == "3 and 1":
        monkeypatch.setenv("TESTS_UNEVEN", devices)
    number = 2 if devices == "3 and 1" else devices
    status, _, error = launched(_front_ends.__file__, str(tmp_path), *names, n=n, devices=number)
    assert status == 0, error
    expected = _front_ends.results([*names])
    for rank in range(n):
        with np.load(tmp_path / f"rank-{rank}.npz") as found:
            assert sorted(found) == sorted(expected)
            for what, value in expected.items():
                np.testing.assert_allclose(found[what], value, rtol=1e-3, atol=2e-4, err_msg=what)
