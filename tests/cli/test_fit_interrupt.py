"""Ctrl-C while ``paraxis fit`` is at work: what was found is saved, and said to be no solution."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraxis.solve import estimators as est
from tests.cli._files import everything, said, write

QUICK = ["--target", "y", "--devices", 1, "--test-fraction", 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chosen", [(), ("--strengths", "10,0.001", "--folds", 2)], ids=["fit", "strengths"])
def test_a_fit_that_is_interrupted_saves_what_was_found(
    chosen: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(tmp_path / "data.csv", {"u": [*range(8)], "y": [0, 0, 1, 0, 1, 0, 1, 1]}), tmp_path / "out"
    fit, cross_validate, sent = est.LogisticRegression.fit, est.cross_validate_path, []

    def interrupting(model: Any) -> Any:
        verbose = model.verbose

        def watch(one: Any) -> None:
            if callable(verbose):
                verbose(one)
            if not sent:
                sent.append(one)
                os.kill(os.getpid(), signal.SIGINT)

        model.verbose = watch
        return model

    given = "fit", file, *QUICK, "--objective", "logistic", "--tol", 1e-300, *chosen, "--out", out
    with monkeypatch.context() as patched:
        patched.setattr(est.LogisticRegression, "fit", lambda model, *data: fit(interrupting(model), *data))
        patched.setattr(
            est, "cross_validate_path", lambda model, *data, **more: cross_validate(interrupting(model), *data, **more)
        )
        status, text, err = said(capsys, *given)
    assert status == 130
    assert re.fullmatch(
        rf"paraxis: interrupted; what was found so far is saved in --out {out}: "
        r"its error is \S+, and 1e-300 is that of a solution\n",
        err,
    )
    assert "Ctrl-C ended the run" in text
    assert everything(out).keys() == {"coefficients.csv", "fit.png", "model.npz", "report.html"}
    assert said(capsys, "predict", out, file)[0] == 0


def _seconds_of(process: int) -> float:
    """For how long a process has computed so far."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ctrl_c_ends_a_fit_within_two_seconds_and_saves_what_was_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20_000, 40)).cumsum(1)  # on which proximal gradients make thousands of steps
    np.savez(tmp_path / "data.npz", X=X, y=(X[:, 0] + rng.logistic(size=len(X)) > 0).astype(int))
    given = ["data.npz", "--target", "y", "--tol", "1e-300", "--penalty", "l1", "--strength", "1e-6"]
    command = [sys.executable, "-u", "-m", "paraxis", "fit", *given, "--out", "out"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    ) as process:
        assert process.stdout is not None
        assert any("iteration 4 " in line for line in process.stdout)
        before = _seconds_of(process.pid) + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        took = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert process.returncode == 130
    assert "what was found so far is saved in --out out: its error is" in err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "coefficients.csv",
        "fit.png",
        "model.npz",
        "report.html",
    }
    assert took < 3  # of computing, by two threads: a loaded machine makes that hardly longer
