"""A linear model of a CSV or Parquet file: gaps filled, text as indicators, scores on rows held out, a plot.

Arrow reads it, scikit-learn's ``ColumnTransformer`` makes numbers of it, and cross-validation, all folds at once,
chooses the penalty of ridge regression, for a target of floating-point numbers, or of logistic regression::

    python examples/fit_table.py patients.csv --target sick

Typical output of ``--devices 8``, which makes a file of synthetic patients::

    1,600 rows and 7 columns on 8 devices, 400 rows held out; C = 0.01
    on rows held out  accuracy
           the model    0.7125
           no column      0.45
              column  coefficient of yes
         number__age              0.7591
      number__visits              0.5655
    text__smoker_yes              0.3958
     text__smoker_no             -0.3958
      number__income            -0.03172
    text__city_Basel             0.02487
     text__city_Bern            -0.02487
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _setting
import jax
import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from pyarrow import csv, parquet
from sklearn.compose import ColumnTransformer
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import paraxis as px


def patients() -> pa.Table:
    """Synthetic patients, with numbers, text and gaps."""
    rng = np.random.default_rng(0)
    age, visits, smoker = rng.normal(55, 15, 2000).round(), rng.poisson(3, 2000), rng.choice(["yes", "no"], 2000)
    city = rng.choice(["Basel", "Bern"], 2000)
    logit = (age - 55) / 12 + (visits - 3) / 2 + 1.5 * (smoker == "yes") - 0.75
    sick = np.where(logit + rng.logistic(size=2000) > 0, "yes", "no")
    income = pa.array(rng.lognormal(8, 0.5, 2000), mask=rng.random(2000) < 0.1)
    return pa.table({"age": age, "visits": visits, "income": income, "smoker": smoker, "city": city, "sick": sick})


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _setting.parser(__doc__)
    parser.add_argument("data", nargs="?", type=Path, help="a .csv or .parquet file (default: synthetic patients)")
    parser.add_argument("--target", default="sick", help="the column to predict (default: sick)")
    chosen = _setting.parsed(parser, argv)
    path = chosen.data or Path(tempfile.mkdtemp(), "patients.csv")
    if chosen.data is None:
        csv.write_csv(patients(), path)

    table = (parquet.read_table if path.suffix == ".parquet" else csv.read_csv)(path)
    target, table = table[chosen.target], table.drop_columns([chosen.target])
    X = np.column_stack([column.to_numpy().astype(object) for column in table.columns])
    is_text = np.array([not pa.types.is_primitive(column.type) for column in table.columns])
    numbers, text = make_pipeline(SimpleImputer(), StandardScaler()), OneHotEncoder(handle_unknown="ignore")
    transformer = ColumnTransformer([("number", numbers, ~is_text), ("text", text, is_text)], sparse_threshold=0)
    X, held_out, y, truth = train_test_split(X, target.to_numpy(), test_size=0.2, random_state=0)
    X, held_out = transformer.fit_transform(X), transformer.transform(held_out)

    if pa.types.is_floating(target.type):
        estimator, strength, score, without = px.solve.Ridge(), "alpha", "R²", DummyRegressor()
    else:
        estimator, strength, score, without = px.solve.LogisticRegression(), "C", "accuracy", DummyClassifier()
    strengths = [10.0**power for power in range(-3, 4)]
    found = px.solve.cross_validate_path(estimator, X, y, strengths[:: 3 if chosen.quick else 1], folds=5)
    model = found.estimator
    names, values = transformer.get_feature_names_out(table.column_names), np.atleast_2d(model.coef_)[-1]
    classes = getattr(model, "classes_", None)
    of = "" if classes is None else f" of {classes[-1]}"
    size = f"{len(y):,} rows and {len(names)} columns on {jax.device_count()} devices"
    print(f"{size}, {len(truth):,} rows held out; {strength} = {found.best:g}")
    scores = {"the model": model.score(held_out, truth), "no column": without.fit(X, y).score(held_out, truth)}
    _setting.table(["on rows held out", score], [*scores.items()])
    largest = sorted(zip(names, map(float, values), strict=True), key=lambda row: -abs(row[1]))[:20]
    _setting.table(["column", f"coefficient{of}"], largest)

    if chosen.plot is not None:
        figure = Figure(figsize=(6, 1 + 0.3 * len(largest)), layout="constrained")
        axes = figure.subplots()
        axes.barh(*zip(*largest, strict=True))
        axes.invert_yaxis()
        axes.set(xlabel=f"coefficient{of}, of a number per standard deviation")
        figure.savefig(chosen.plot, dpi=120)
    return {"model": model, "transformer": transformer, "coefficients": dict(largest), "scores": scores}


if __name__ == "__main__":
    main()
