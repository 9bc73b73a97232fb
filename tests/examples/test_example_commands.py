"""Every example runs as a command, says what it is, and prints its table."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_"))
COLUMNS = {
    "distributed_sgd": "above least squares",
    "diloco": "bytes sent per device",
    "fedavg": "rounds to 80 %",
    "fedavg_partial": "taking part",
    "federated_autodiff": "loss, tuned",
}


def test_every_example_is_known_here():
    assert sorted(COLUMNS) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_run_on_simulated_devices(name, run_example, tmp_path):
    picture = tmp_path / "plot.png"
    printed = run_example(name, "--quick", "--devices", "8", "--plot", str(picture))
    assert COLUMNS[name] in printed
    assert "on 8 devices" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_help(name, run_example):
    printed = run_example(name, "--help")
    assert all(option in printed for option in ("--devices N", "--quick", "--plot PATH"))
    assert len(printed) > 400
