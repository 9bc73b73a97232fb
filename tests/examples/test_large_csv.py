"""The large CSV: made once, and fitted in turns to what scikit-learn finds in all of its rows at once."""

import csv
import os

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

pytestmark = pytest.mark.slow


def test_the_model_is_that_of_all_rows_and_the_file_is_made_once(example, tmp_path, capsys):
    module = example("large_csv")
    found = module.main(["--quick", "--folder", str(tmp_path)])
    with found["path"].open() as file:
        names, *rows = csv.reader(file)
    assert names == [*module.NAMES, "stops"]
    values = np.array(rows, float)
    whole = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-10).fit(values[:, :-1], values[:, -1])
    for model in found["fits"].values():
        np.testing.assert_allclose(model.coef_, whole.coef_, atol=1e-4)
        np.testing.assert_allclose(model.intercept_, whole.intercept_, atol=1e-4)
    assert os.listdir(tmp_path) == ["quick.csv"]

    made = found["path"].stat()
    module.main(["--quick", "--folder", str(tmp_path)])
    assert found["path"].stat().st_mtime_ns == made.st_mtime_ns
    assert "is there already" in capsys.readouterr().out


def test_a_file_that_is_not_complete_is_not_there(example, tmp_path, monkeypatch):
    module = example("large_csv")

    def full(part):
        if part == 1:
            raise OSError("No space left on device")
        return rows(part)

    rows = module.rows
    monkeypatch.setattr(module, "rows", full)
    with pytest.raises(OSError, match="No space left"):
        module.made(tmp_path / "some.csv", 3e7)
    assert not os.listdir(tmp_path)
