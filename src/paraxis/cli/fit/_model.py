"""A fitted model, its file, and what it predicts. NumPy only, and no pickles.

The file is an ``.npz`` of arrays and a header in JSON. The header has the checksum of each array, and there is one of
the header.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._host import files
from paraxis.cli._errors import CommandError
from paraxis.cli.fit._columns import Recipe, Source
from paraxis.cli.fit._metrics import log_probabilities
from paraxis.cli.fit._tables import Table
from paraxis.cli.fit._targets import Target

_FORMAT = 1
FILE_NAME = "model.npz"


@dataclasses.dataclass(frozen=True)
class Model:
    """A linear model of the columns of a file.

    Args:
        target: what it predicts.
        recipe: what it predicts from.
        coef: for columns of mean 0 and standard deviation 1, ``(k, d)``; k is 1 for values and for two classes.
        intercept: ``(k,)``.
        fills: whether it was fitted with missing values at the mean.
        about: how it was fitted: numbers and words.
    """

    target: Target
    recipe: Recipe
    coef: np.ndarray
    intercept: np.ndarray
    fills: bool
    about: dict[str, Any]

    def linear(self, table: Table) -> np.ndarray:
        """The linear model's predictions, ``(n, k)``."""
        return self.recipe.design(table) @ self.coef.T + self.intercept

    def predicted(self, z: np.ndarray) -> np.ndarray:
        """Labels, values or expected counts, ``(n,)``, of the linear model's predictions."""
        if self.target.objective == "logistic":
            return self.target.labels(log_probabilities(z).argmax(1))
        return np.exp(z[:, 0]) if self.target.objective == "poisson" else z[:, 0]

    def in_own_units(self) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients and intercept for the columns as they are in the file."""
        coef = self.coef / self.recipe.scales
        return coef, self.intercept - coef @ self.recipe.means


def save(model: Model, path: Path) -> None:
    """Write the model's file."""
    arrays = {
        "coef": model.coef,
        "intercept": model.intercept,
        "means": model.recipe.means,
        "scales": model.recipe.scales,
    }
    header = {
        "format": _FORMAT,
        "target": dataclasses.asdict(model.target),
        "sources": [[source.column, source.level] for source in model.recipe.sources],
        "fills": model.fills,
        "about": model.about,
        "checksums": {name: _checksum(array) for name, array in arrays.items()},
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with files.replaced(path) as file:
        np.savez(file, header=text, checksum=np.array(_checksum(text)), **arrays)  # pyright: ignore[reportArgumentType]
    path.chmod(0o644)


def is_model(path: Path) -> bool:
    """Whether a file has the header of a model, be it damaged otherwise."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(bytes(file["header"]).decode())
        return {"format", "checksums"} <= header.keys()
    except (*files.DAMAGED, AttributeError):
        return False


def load(place: Path) -> Model:
    """Read a model from its file, or from the directory that holds it.

    Raises:
        CommandError: if there is none, or it is not what was written.
    """
    path = place / FILE_NAME if place.is_dir() else place
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text = arrays.pop("header")
        if str(arrays.pop("checksum")) != _checksum(text):
            raise ValueError("its header is not what was written")
        header = json.loads(bytes(text).decode())
        if header["format"] > _FORMAT:
            raise CommandError(f"{path} was written by a newer Paraxis; write: pip install --upgrade paraxis")
        changed = [name for name, sum_ in header["checksums"].items() if _checksum(arrays[name]) != sum_]
        if changed:
            raise ValueError(f"its {changed[0]} are not what was written")
        return _model(header, arrays)
    except files.ABSENT as error:
        raise CommandError(
            f"{path} cannot be read: {error.strerror}; a model is made by: paraxis fit DATA --target COLUMN --out DIR"
        ) from None
    except (*files.DAMAGED, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise CommandError(f"{path} is damaged, or no model of paraxis fit ({reason[:200]}); fit it again") from None


def _model(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Model:
    described = header["target"]
    target = Target(**{**described, "classes": tuple(described["classes"])})
    sources = tuple(Source(column, level) for column, level in header["sources"])
    recipe = Recipe(sources, arrays["means"], arrays["scales"])
    return Model(target, recipe, arrays["coef"], arrays["intercept"], header["fills"], header["about"])


def _checksum(array: np.ndarray) -> str:
    described = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).hexdigest()
