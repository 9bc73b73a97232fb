"""Each front end on two processes with two devices each: what it gives on one."""

from pathlib import Path

import numpy as np
import pytest

from tests.processes import _front_ends
from tests.processes._support import Launch

pytestmark = pytest.mark.floor
EVERY_DAY = ["verbs", "ensembles"]
AT_NIGHT = [pytest.param([name], marks=pytest.mark.slow) for name in _front_ends.PARTS if name not in EVERY_DAY]


@pytest.mark.parametrize("names", [EVERY_DAY, *AT_NIGHT], ids=str)
def test_front_ends_give_on_two_processes_what_they_give_on_one(
    launched: Launch, tmp_path: Path, names: list[str]
) -> None:
    status, _, error = launched(_front_ends.__file__, str(tmp_path), *names, devices=2)
    assert status == 0, error
    expected = _front_ends.results(names)
    for rank in range(2):
        with np.load(tmp_path / f"rank-{rank}.npz") as found:
            assert sorted(found) == sorted(expected)
            for what, value in expected.items():
                np.testing.assert_allclose(found[what], value, rtol=1e-3, atol=2e-4, err_msg=what)
