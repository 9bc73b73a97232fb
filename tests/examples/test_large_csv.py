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
