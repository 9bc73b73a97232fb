"""No public face: no file of a few rows has all kinds of targets, and each fit of one takes seconds."""

from typing import Any

import numpy as np
import pytest

from paraxis.cli.fit._tables import Column
from paraxis.cli.fit._targets import UNKNOWN, Target, choose


def _integers(values: Any) -> Column:
    x = np.array(values, float)
    return Column("y", "integer", x, np.isnan(x), "int64")


def test_few_different_integers_are_classes() -> None:
    target, _ = choose(_integers([0, 1, 2, 2]), "auto")
    assert (target.objective, target.classes) == ("logistic", (0, 1, 2))
    assert choose(_integers(range(21)), "auto")[0].objective == "squared"


def test_a_label_that_was_not_fitted_is_unknown() -> None:
    target = Target("y", "logistic", (0, 2), "integer")
    assert target.encoded(_integers([2, 1, 0, 3, -1])).tolist() == [1, UNKNOWN, 0, UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            [1.0, 2.0, 3.0],
            "'y' holds whole numbers written with a decimal point; for classes, write --objective logistic",
        ),
        ([0.0, 1.0], "'y' holds whole numbers written with a decimal point; for classes, write --objective logistic"),
        (np.arange(21.0), "'y' holds whole numbers written with a decimal point"),
        ([0.1, 0.9], "'y' holds fractions"),  # which no option makes classes of
    ],
)
def test_whole_numbers_with_a_point_are_values_and_not_called_fractions(values: Any, reason: str) -> None:
    x = np.array(values)
    assert choose(Column("y", "number", x, np.isnan(x), "double"), "auto") == (
        Target("y", "squared", (), "number"),
        reason,
    )


def test_labels_that_differ_in_case_or_spaces_only_are_told() -> None:
    def reason(*labels: str) -> str:
        values = np.array(labels, object)
        return choose(Column("y", "text", values, np.zeros(len(values), bool), "string"), "auto")[1]

    assert reason("yes", "no") == "'y' holds text"
    assert reason("yes", "no", "Yes", "yes ") == (
        "'y' holds text; 'Yes', 'yes', 'yes ' are different classes: they differ in case or spaces"
    )
