"""A fitted model, its file, and what it predicts. NumPy only, and no pickles.

The file is an ``.npz`` of arrays and a header in JSON. The header has the checksum of each array, and there is one of
the header.
"""

import dataclasses
import hashlib
import json
import reprlib
from pathlib import Path
from typing import Any, get_args

import numpy as np

from paraxis._host import archives, files, records
from paraxis.cli._errors import CommandError
from paraxis.cli.fit._columns import Recipe, Source
from paraxis.cli.fit._metrics import log_probabilities
from paraxis.cli.fit._options import CsvForm
from paraxis.cli.fit._tables import Table
from paraxis.cli.fit._targets import Target
from paraxis.cli.fit._values import Kind

_FORMAT = 2
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
        id: the columns that name the rows, to be written beside predictions.
        form: how the file was written, as far as it is :func:`remembered`.
    """

    target: Target
    recipe: Recipe
    coef: np.ndarray
    intercept: np.ndarray
    fills: bool
    about: dict[str, Any]
    id: tuple[str, ...] = ()
    form: CsvForm = dataclasses.field(default_factory=CsvForm)

    @property
    def weights(self) -> str | None:
        """The column of weights that it was fitted with; files of before have none in them."""
        name = self.about.get("weights")
        return name if isinstance(name, str) else None

    def linear(self, table: Table) -> np.ndarray:
        """Return the linear model's predictions, ``(n, k)``."""
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


def remembered(form: CsvForm) -> CsvForm:
    """Return the part of a form by which other files of the same kind are read."""
    return CsvForm(**{name: getattr(form, name) for name in _FORM})


def save(model: Model, path: Path) -> None:
    """Write the model's file."""
    arrays = {
        "coef": model.coef,
        "intercept": model.intercept,
        "means": model.recipe.means,
        "scales": model.recipe.scales,
    }
    header = {
        "format": 1 if model.form == CsvForm() else _FORMAT,
        "target": dataclasses.asdict(model.target),
        "sources": [[source.column, source.level] for source in model.recipe.sources],
        "fills": model.fills,
        "about": model.about,
        "id": model.id,
        "checksums": {name: _checksum(array) for name, array in arrays.items()},
    }
    if model.form != CsvForm():  # without it, earlier versions read the file
        header["form"] = {name: getattr(model.form, name) for name in _FORM}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with files.replaced(path) as file:
        np.savez(file, header=text, checksum=np.array(_checksum(text)), **arrays)  # pyright: ignore[reportArgumentType]


def is_model(path: Path) -> bool:
    """Return whether a file has the header of a model, be it damaged otherwise."""
    try:
        with archives.Archive(path) as archive:
            return {"format", "checksums"} <= records.read(_text(archive), _ANY_HEADER).keys()
    except (archives.Damaged, records.Wrong, OSError):
        return False


def load(place: Path) -> Model:
    """Read a model from its file, or from the directory that holds it.

    Each field is checked before an array is read, and each array before memory is taken for it.

    Raises:
        CommandError: if there is none, or it is not what was written.
    """
    files.put_back(place.parent if place.name == FILE_NAME else place, lambda left: is_model(left / FILE_NAME))
    path = place / FILE_NAME if place.is_dir() else place
    try:
        with archives.Archive(path) as archive:
            text = _text(archive)
            if archive.kind("checksum") != _CHECKSUM or str(archive.read("checksum")) != _checksum(text):
                raise records.Wrong("its header is not what was written")
            header = records.read(text, _ANY_HEADER)
            records.integer(1)(header.get("format"), "format")
            if header["format"] > _FORMAT:
                raise CommandError(f"{path} was written by a newer Paraxis; write: pip install --upgrade paraxis")
            _HEADER(header, "")
            return _model(header, archive)
    except files.ABSENT as error:
        raise CommandError(
            f"{path} cannot be read: {error.strerror}; a model is made by: paraxis fit DATA --target COLUMN --out DIR"
        ) from None
    except (archives.Damaged, records.Wrong, OSError) as error:
        reason = " ".join(str(error).split())
        raise CommandError(f"{path} is damaged, or no model of paraxis fit ({reason[:200]}); fit it again") from None


# --- what the file holds ----------------------------------------------------------------------------------------------

_LARGEST_HEADER = 1 << 26  # bytes
_CHECKSUM = archives.Kind(np.dtype("<U64"), ())
_SUM = records.text("[0-9a-f]{64}")
_LABELS: dict[str, records.Check] = {  # of a target, by its kind
    "text": records.text(),
    "boolean": records.flag,
    "integer": records.integer(-(2**63), 2**64 - 1),
    "number": records.number(),
}
_FORM = {
    "delimiter": records.text(),
    "decimal": records.one_of(".", ","),
    "na_values": records.list_of(records.text()),
    "strip": records.list_of(records.text()),
}
_ANY_HEADER = records.table_of(records.anything)
_HEADER = records.fields(
    {
        "format": records.integer(1),
        "target": records.fields(
            {
                "name": records.text(),
                "objective": records.one_of("logistic", "squared", "poisson"),
                "classes": records.list_of(records.either(*_LABELS.values())),
                "kind": records.one_of(*get_args(Kind)),
            }
        ),
        "sources": records.list_of(records.row(records.text(), records.either(records.text(), records.nothing))),
        "fills": records.flag,
        "about": records.table_of(records.anything),
        "id": records.list_of(records.text()),
        "checksums": records.fields(dict.fromkeys(("coef", "intercept", "means", "scales"), _SUM)),
    },
    {"form": records.fields(_FORM)},
)


def _text(archive: archives.Archive) -> bytes:
    """Return the header's JSON."""
    kind = archive.kind("header")
    if kind.dtype != np.uint8 or len(kind.shape) != 1 or kind.shape[0] > _LARGEST_HEADER:
        raise records.Wrong(f"its header is {kind.dtype} {kind.shape}")
    return archive.read("header").tobytes()


def _model(header: dict[str, Any], archive: archives.Archive) -> Model:
    described = header["target"]
    target = Target(**{**described, "classes": tuple(described["classes"])})
    sources = tuple(Source(column, level) for column, level in header["sources"])
    num_outputs = _num_outputs(target)
    shapes = {"coef": (num_outputs, len(sources)), "intercept": (num_outputs,)}
    shapes |= dict.fromkeys(("means", "scales"), (len(sources),))
    for name, shape in shapes.items():
        kind = archive.kind(name)
        if kind.dtype.kind != "f" or kind.shape != shape:
            raise records.Wrong(f"its {name} are {kind.dtype} {kind.shape}, not numbers {shape}")
    arrays = {name: archive.read(name) for name in shapes}
    changed = [name for name, array in arrays.items() if _checksum(array) != header["checksums"][name]]
    if changed:
        raise records.Wrong(f"its {changed[0]} are not what was written")
    recipe = Recipe(sources, arrays["means"], arrays["scales"])
    fills, about, id_columns = header["fills"], header["about"], tuple(header["id"])
    return Model(target, recipe, arrays["coef"], arrays["intercept"], fills, about, id_columns, _form(header))


def _form(header: dict[str, Any]) -> CsvForm:
    written = header.get("form", {})
    given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in written.items()}
    try:
        return CsvForm(**given)
    except CommandError as error:
        raise records.Wrong(f"its form is not what was written: {error}") from None


def _num_outputs(target: Target) -> int:
    """Return how many linear models there are, for classes that are such as the target's column has.

    Raises:
        Wrong: if it cannot have such classes.
    """
    labels = target.classes
    if target.objective != "logistic":
        if labels:
            raise records.Wrong(f"it has classes, for the objective {target.objective}")
        return 1
    if target.kind not in _LABELS or len(labels) < 2 or len(set(labels)) < len(labels):
        raise records.Wrong(f"its classes are {reprlib.repr(labels)}, of a target of kind {target.kind}")
    records.list_of(_LABELS[target.kind])(list(labels), "target.classes")
    return 1 if len(labels) == 2 else len(labels)


def _checksum(array: Any) -> str:
    array = np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array
    described = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).hexdigest()
