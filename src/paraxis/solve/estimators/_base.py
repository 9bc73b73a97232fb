"""The common part of the estimators: data are checked as scikit-learn checks them, laid out, and solved for.

An estimator tells what is particular to it: its loss, its targets, and what its strength means beside a mean of losses.
"""

import abc
import contextlib
import copy
import dataclasses
import itertools
import numbers
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from paraxis import _html as html
from paraxis._calls import arguments
from paraxis._tables import Table, table_of
from paraxis.errors import DataError, ParaxisError
from paraxis.solve import _checks as checks
from paraxis.solve._on_disk import MAX_FEATURES, Source, blocks_of
from paraxis.solve._progress import Watch
from paraxis.solve._solution import Interrupted, attended
from paraxis.solve._status import Status
from paraxis.solve.estimators import _fitting as fitting
from paraxis.solve.estimators._fitting import Method, Penalty, Placed, Plan, Solution
from paraxis.solve.objective import LossName

_GOOD_ENOUGH = 1e-4  # an error at which rounding may stop a solver without a warning; scikit-learn's usual tolerance
_WEIGHTS = "np.ones(n) where all count the same, or px.solve.LogisticRegression(class_weight='balanced')"
_SMOOTH = ("auto", "lbfgs")
_FLOATS: Any = [np.float64, np.float32]


@dataclasses.dataclass(frozen=True)
class Posed:
    """A fit as the solver sees it: its predictions ``z`` are those of the model up to ``origin + scale * z``.

    Args:
        loss: the loss of a row.
        targets: ``(n,)`` or ``(n, k)``.
        weight: ``(n,)``.
        num_outputs: k if coefficients are ``(d, k)``, ``None`` if they are ``(d,)``.
        origin, scale: ``()``, or ``(k,)``.
        intercept: where the solver's own begins, ``()`` or ``(k,)``.
        centre: whether columns have their means subtracted, which changes the intercept only.
    """

    loss: LossName
    targets: np.ndarray
    weight: np.ndarray
    num_outputs: int | None
    origin: Any = 0.0
    scale: Any = 1.0
    intercept: Any = 0.0
    centre: bool = False


class Path(NamedTuple):
    """Solutions along a grid of strengths, in the order of the grid.

    Args:
        strengths: the grid, ``(num,)``.
        coef: coefficients ``(num, *coef_.shape)``.
        intercept: intercepts ``(num, *intercept_.shape)``.
        n_iter: number of iterations of each solution, ``(num,)``.
        status: why the solver stopped for each, in words.
    """

    strengths: np.ndarray
    coef: np.ndarray
    intercept: np.ndarray
    n_iter: np.ndarray
    status: list[str]


def refused(who: str, argument: str, expected: str, error: Exception) -> Exception:
    """Return an error of scikit-learn's or NumPy's, with the name of the argument that it is about."""
    kind = TypeError if isinstance(error, TypeError) else DataError
    return kind(f"{who}: {argument} must be {expected}: {error}")


def as_numpys(x: Any) -> Any:
    """Return the same, numbers of JAX's own, such as bfloat16 and int4, in 32 bits: NumPy can not sort these."""
    is_jaxs = getattr(getattr(x, "dtype", None), "kind", "") == "V" and jnp.issubdtype(x.dtype, jnp.number)
    return np.asarray(x, np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32) if is_jaxs else x


def as_numbers(x: np.ndarray, otherwise: str = "px.solve.LogisticRegression() for classes") -> np.ndarray:
    """Return the same if it holds real numbers; objects that are numbers as such; errors say what to write otherwise.

    Raises:
        TypeError: if it holds others.
    """
    if x.dtype.kind in "biuf":
        return x
    if x.dtype.kind == "O":
        try:
            return x.astype(np.float64)
        except (TypeError, ValueError) as error:
            kind: type[Exception] = type(error)
    else:
        kind = TypeError
    values = x.reshape(-1).tolist()
    odd = next((value for value in values if not isinstance(value, numbers.Real)), values)
    write = "np.asarray(…).astype(float)" if _reads_as_numbers(x) else otherwise
    raise kind(f"{arguments.described(odd)} is no number but {x.dtype}; write {write}")


def _reads_as_numbers(x: np.ndarray) -> bool:
    try:
        return x.dtype.kind in "US" and x.astype(np.float64) is not None
    except (TypeError, ValueError):
        return False


class LinearModel(BaseEstimator, abc.ABC):
    """Base of the estimators."""

    strength_name: ClassVar[str]
    strong_is_large: ClassVar[bool] = True
    coef_: np.ndarray
    intercept_: Any
    status_: str
    data_passes_: int
    n_iter_: Any
    n_features_in_: int
    _is_of_table: bool = False
    tol: float
    max_iter: int
    fit_intercept: bool
    warm_start: bool
    devices: int | None
    solver: str
    verbose: int | Watch

    @property
    def _repr_html_(self) -> Callable[[], str]:
        return self._as_html

    def _as_html(self) -> str:
        """Return what was found, for notebooks; what scikit-learn shows there are the parameters only."""
        found = {name: _told(x) for name, x in vars(self).items() if name.endswith("_") and not name.startswith("_")}
        return html.card(self, html.facts(found) if found else html.note("not fitted"))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return both forms, or the text if that is what ``sklearn.set_config`` says."""
        text = {"text/plain": repr(self)}
        return text if get_config()["display"] == "text" else {**text, "text/html": self._as_html()}

    @abc.abstractmethod
    def _posed(self, y: np.ndarray, weight: np.ndarray, dtype: Any) -> Posed:
        """Return what to solve, for checked targets."""

    @abc.abstractmethod
    def _penalty(self, strength: float, total: float, posed: Posed) -> Penalty:
        """Return what a strength means beside the mean loss; ``total`` is the sum of the weights."""

    @abc.abstractmethod
    def _checked_targets(self, y: np.ndarray) -> np.ndarray:
        """Targets in the form that :meth:`_posed` takes; sets what describes them."""

    @abc.abstractmethod
    def _predicted(self, z: np.ndarray) -> np.ndarray:
        """Return predictions for rows of which those of the linear model are ``(n,)`` or ``(n, k)``."""

    @abc.abstractmethod
    def _score(self, predicted: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Return the score of predictions."""

    def _weighted(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Weights of rows with those of their classes, where there are such."""
        return weight

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, *, engine: Any = None) -> Self:
        """Fit the model.

        Args:
            X: ``(n, d)``. If it is float32, everything is computed in float32, else in float64. Or a
                :class:`px.Table`, of rows that stay on disk and are read about twice per iteration.
            y: targets, ``(n,)``; left out for a table.
            sample_weight: ``(n,)``, not negative, or a number; a row of weight zero does not count.
            engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

        Raises:
            ValueError: if the data or an option cannot be used; the message says why.
            Interrupted: after Ctrl-C, with a copy of the estimator that is fitted as far as the run came. The estimator
                itself does not change.

        Communicates, if there are several devices: sends each its rows; then whatever the solver does.
        """
        with self._as_it_was_if_this_fails():
            return self._fitted(X, y, sample_weight, engine)

    def _fitted(self, X: Any, y: Any, sample_weight: Any, engine: Any) -> Self:
        X, y, weight = self._checked(X, y, sample_weight, engine)
        weight = self._weighted(y, weight)
        posed = self._posed(y, weight, X.dtype)
        with fitting.surroundings(X.dtype, self.devices):
            placed = self._place(X, posed)
            try:
                found = self._solved(self._strength(), self._start(posed, placed), posed, placed)
            except Interrupted as stopped:
                stopped.estimator = copy.copy(self)._taking(fitting.solution_of(stopped), posed, placed)
                raise
        self._taking(found, posed, placed)
        self._warn(found)
        return self

    def _taking(self, found: Solution, posed: Posed, placed: Placed) -> Self:
        self.coef_, self.intercept_ = self._described(found.params, posed, placed.means)
        self.n_iter_ = self._described_count(int(found.iter_num))
        self.status_ = Status(int(found.status)).words
        self.data_passes_ = int(found.data_passes) if placed.source is None else placed.source.num_passes
        return self

    def path(
        self, X: Any, y: Any, strengths: Sequence[float], sample_weight: Any = None, *, engine: Any = None
    ) -> Path:
        """Solve for several strengths, each from the solution of the next stronger one; the data are sent only once.

        Args:
            X, y, sample_weight, engine: as for :meth:`fit`; of a table, write ``path(table, None, …)``.
            strengths: values of the parameter that ``strength_name`` names, in any order.

        Returns:
            The solutions in the order of ``strengths``. The estimator itself is not fitted.

        Raises:
            ValueError: if the data, an option or a strength cannot be used; the message says why.
            Interrupted: after Ctrl-C; its ``found`` is the part of the path that was computed, and its ``estimator`` a
                copy fitted with the strength that was being solved.
        """
        return copy.copy(self)._path(X, y, strengths, sample_weight, engine)

    def _path(self, X: Any, y: Any, strengths: Sequence[float], sample_weight: Any, engine: Any) -> Path:
        if getattr(engine, "folder", None) is not None:
            raise ValueError(
                f"{self._who}: a path is several runs, and none is saved, got engine.folder={engine.folder!r}; write "
                f"px.Stream(memory='2GB'), or fit with each strength, warm_start=True and a folder of its own"
            )
        grid, order = self._from_strong("strengths", strengths)
        X, y, weight = self._checked(X, y, sample_weight, engine)
        weight = self._weighted(y, weight)
        posed = self._posed(y, weight, X.dtype)
        found: dict[int, Solution] = {}

        def described() -> Path:
            there = sorted(found)
            coef, intercept = zip(*(self._described(found[i].params, posed, placed.means) for i in there), strict=True)
            counts = np.array([int(found[i].iter_num) for i in there])
            words = [Status(int(found[i].status)).words for i in there]
            return Path(grid[there], np.stack(coef), np.stack(intercept), counts, words)

        with fitting.surroundings(X.dtype, self.devices), attended():
            placed = self._place(X, posed)
            params = self._zeros(posed, X.shape[1], X.dtype)
            for index in order:
                try:
                    found[index] = self._solved(float(grid[index]), params, posed, placed)
                except Interrupted as stopped:
                    found[index] = fitting.solution_of(stopped)
                    setattr(self, self.strength_name, float(grid[index]))
                    stopped.found, stopped.estimator = described(), self._taking(found[index], posed, placed)
                    raise
                params = found[index].params
        self._warn(*(found[i] for i in range(len(grid))))
        return described()

    @contextlib.contextmanager
    def _as_it_was_if_this_fails(self) -> Iterator[None]:
        attributes: dict[str, Any] = vars(self)
        before = dict(attributes)
        try:
            yield
        except BaseException:
            attributes.clear()
            attributes.update(before)
            raise

    def _scored(self, X: Any, y: Any, sample_weight: Any, engine: Any) -> float:
        """Return the score of rows; those of a table are read once."""
        what = "y"
        if isinstance(X, Table):
            if y is not None:
                raise TypeError(f"{self._who}: y must be left out, as the table has it; write score(table, engine=…)")
            what = f"the table's target {X.target!r}"
            weight = None if sample_weight is None else self._checked_weight(len(X), np.float64, sample_weight)
            predicted, y = self._of_table(X, engine, self._predicted)
        else:
            predicted = self._of_rows(X, engine, self._predicted)
            weight = None if sample_weight is None else self._checked_weight(len(predicted), np.float64, sample_weight)
        try:
            return self._score(predicted, np.asarray(as_numpys(y)), weight)
        except Exception as error:
            raise refused(self._who, what, f"targets {predicted.shape}, one per row", error) from error

    def _of_rows(self, X: Any, engine: Any, of_block: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return a function of ``X @ coef + intercept``, ``(n,)`` or ``(n, k)``, also of a table."""
        check_is_fitted(self)
        if isinstance(X, Table):
            return self._of_table(X, engine, of_block)[0]
        if engine is not None:
            raise self._no_engine(X, "predict")
        try:
            with warnings.catch_warnings():
                if self._is_of_table and not hasattr(X, "columns"):  # as its blocks are
                    warnings.filterwarnings("ignore", "X does not have valid feature names")
                X = validate_data(self, X, reset=False, dtype=_FLOATS)
        except Exception as error:
            raise refused(self._who, "X", f"numbers (n, {self.n_features_in_})", error) from error
        return of_block(X @ self.coef_.T + self.intercept_)

    def _no_engine(self, X: Any, verb: str) -> TypeError:
        return TypeError(
            f"{self._who}: engine is for a px.Table, got X {arguments.described(X)}; leave engine out, or write "
            f"{verb}({table_of(X)}, engine=engine)"
        )

    def _of_table(
        self, table: Table, engine: Any, of_block: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same of a table, as many rows at once as the engine says, and its targets."""
        check_is_fitted(self)
        own = table.columns
        known = list(getattr(self, "feature_names_in_", ()))
        if len(own) != self.n_features_in_ or (known and table._is_named and known != own):
            these, write = "", "[…]"
            if known:
                first = next(pair for pair in itertools.zip_longest(known, own) if pair[0] != pair[1])
                these, write = f", with {first[1]!r} in the place of {first[0]!r}", "list(model.feature_names_in_)"
            raise DataError(
                f"{self._who}: the table must have the {self.n_features_in_} columns that the model was fitted to, in "
                f"their order, got {table!r}{these}; choose them where the table is made: columns={write}"
            )
        blocks = blocks_of(self._who, table, engine)
        parts = [(of_block(X @ self.coef_.T + self.intercept_), y.copy()) for X, y in blocks]
        found, targets = zip(*parts, strict=True)
        return np.concatenate(found), table._as_targets(np.concatenate(targets))

    def _strength(self) -> float:
        return getattr(self, self.strength_name)

    def _from_strong(self, argument: str, strengths: Any) -> tuple[np.ndarray, list[int]]:
        """Return the grid as an array, and its places in the order in which they are solved for."""
        if isinstance(strengths, Iterator):
            got = arguments.described(strengths)
            raise TypeError(f"{self._who}: {argument} must be numbers (num,), got {got}; write list({argument})")
        given = arguments.host_array(self._who, argument, strengths)
        if given.dtype.kind not in "iuf":
            got = arguments.described(given)
            raise ValueError(f"{self._who}: {argument} must be real numbers, got {got}; write [0.1, 1, 10]")
        if given.ndim != 1 or not len(given):
            raise ValueError(
                f"{self._who}: the grid must be numbers (num,), got shape {given.shape}; write [0.1, 1, 10] for "
                f"{argument}"
            )
        grid = given.astype(np.float64)
        wrong = ~(grid >= 0) | np.isinf(grid) if self.strong_is_large else ~(grid > 0)
        if wrong.any():
            expected = "not negative and finite" if self.strong_is_large else "positive"
            raise ValueError(
                f"{self._who}: {self.strength_name} must be {expected}, got {grid[wrong][0]:g} in the grid; write "
                f"[0.1, 1, 10] for {argument}"
            )
        order = np.argsort(grid, kind="stable")
        return grid, [int(i) for i in (order[::-1] if self.strong_is_large else order)]

    def _checked(self, X: Any, y: Any, sample_weight: Any, engine: Any = None) -> tuple[Any, np.ndarray, np.ndarray]:
        for name in ("fit_intercept", "warm_start"):
            arguments.flag(self._who, name, getattr(self, name))
        if isinstance(self.verbose, (bool, np.bool_)) or callable(self.verbose):
            checks.watch(self._who, self.verbose)
        else:
            arguments.count(self._who, "verbose", self.verbose, least=0, write="verbose=1")
        checks.positive(self, "tol")
        checks.count(self, "max_iter")
        if self.devices is not None:
            checks.whole(self, "devices")
        if engine is not None and not isinstance(X, Table):
            raise self._no_engine(X, "fit")
        if isinstance(X, (str, FilePath)):
            raise TypeError(
                f"{self._who}: X must be numbers (n, d), or a px.Table of files, got {arguments.described(X)}; write "
                f"fit({table_of(X)}, engine=px.Stream(memory='2GB'))"
            )
        X, y = self._checked_table(X, y, engine) if isinstance(X, Table) else self._checked_data(X, y)
        checks.one_of(self._who, "solver", self.solver, self._solvers())
        return X, y, self._checked_weight(len(X), X.dtype, sample_weight)

    def _checked_table(self, table: Table, y: Any, engine: Any) -> tuple[Source, np.ndarray]:
        """Return a table's rows and targets; it is read once for that."""
        self._checked_options()
        if y is not None:
            raise TypeError(f"{self._who}: y must be left out, as the table has it; write fit(table, engine=engine)")
        source = fitting.read(self._who, table, engine, self.devices)
        vars(self).pop("feature_names_in_", None)
        if table._is_named:
            self.feature_names_in_ = np.array(table.columns, object)
        self._is_of_table, self.n_features_in_ = True, len(table.columns)
        try:
            return source, self._checked_targets(source.y)
        except ParaxisError:
            raise
        except Exception as error:
            raise refused(self._who, f"the table's target {table.target!r}", "targets, one per row", error) from error

    def _checked_data(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and targets as scikit-learn checks them; what it refuses is named."""
        self._checked_options()
        self._is_of_table = False
        try:
            found: Any = validate_data(self, X, as_numpys(y), dtype=_FLOATS, multi_output=True, y_numeric=False)
            return found[0], self._checked_targets(found[1])
        except ParaxisError:
            raise
        except Exception as error:
            try:
                check_array(X, dtype=_FLOATS)
            except Exception:
                raise refused(self._who, "X", "numbers (n, d)", error) from error
            raise refused(self._who, "y", "targets, one per row of X", error) from error

    def _checked_options(self) -> None:
        """Check what is particular to it of its options."""

    def _checked_weight(self, num_rows: int, dtype: Any, sample_weight: Any) -> np.ndarray:
        if sample_weight is None:
            return np.ones(num_rows, dtype)
        sample_weight = as_numpys(sample_weight)
        try:
            if arguments.is_number(sample_weight):
                sample_weight = np.full(num_rows, float(sample_weight), dtype)
            as_numbers(np.asarray(sample_weight), _WEIGHTS)
            weight = check_array(sample_weight, ensure_2d=False, dtype=_FLOATS, input_name="sample_weight")
        except Exception as error:
            raise refused(self._who, "sample_weight", "numbers (n,)", error) from error
        weight = weight.astype(dtype)
        if weight.shape != (num_rows,):
            raise DataError(f"{self._who}: sample_weight must be {(num_rows,)}, one per row of X, got {weight.shape}")
        if np.any(weight < 0) or not np.any(weight > 0):
            raise DataError(
                f"{self._who}: sample_weight must not be negative, nor all zero; give rows not to count the weight 0"
            )
        return weight

    def _solvers(self) -> tuple[str, ...]:
        return ("auto", "proximal-gradient") if self._has_l1() else _SMOOTH

    def _has_l1(self) -> bool:
        return False

    def _plan(self, posed: Posed) -> Plan:
        method: Method = "proximal-gradient" if self._has_l1() else "lbfgs"
        verbose = self.verbose if callable(self.verbose) else bool(self.verbose)
        return Plan(method, posed.loss, bool(self.fit_intercept), float(self.tol), int(self.max_iter), verbose)

    def _place(self, X: Any, posed: Posed) -> Placed:
        if isinstance(X, Source):
            method = self._plan(posed).method
            return fitting.place_on_disk(X, posed.targets, posed.weight, method, centre=posed.centre)
        return fitting.place(X, posed.targets, posed.weight, self.devices, centre=posed.centre)

    def _solved(self, strength: float, params: Any, posed: Posed, placed: Placed) -> Solution:
        penalty = self._penalty(strength, float(posed.weight.sum(dtype=np.float64)), posed)
        plan = self._plan(posed)
        few = posed.num_outputs is None and len(placed.means) <= MAX_FEATURES
        if placed.source is not None and plan.method == "proximal-gradient" and self.solver == "auto" and few:
            plan = dataclasses.replace(plan, method="proximal-newton")  # which reads the rows a tenth as often
        return fitting.solve(plan, params, penalty, placed.data)

    def _zeros(self, posed: Posed, num_features: int, dtype: Any) -> Any:
        outputs = () if posed.num_outputs is None else (posed.num_outputs,)
        coef = np.zeros((num_features, *outputs), dtype)
        return (coef, np.broadcast_to(posed.intercept, outputs).astype(dtype)) if self.fit_intercept else coef

    def _start(self, posed: Posed, placed: Placed) -> Any:
        zeros = self._zeros(posed, len(placed.means), placed.means.dtype)
        if not self.warm_start or not hasattr(self, "coef_"):
            return zeros
        coef, intercept = self._solver_form()
        zero = zeros[0] if self.fit_intercept else zeros
        if coef.shape != zero.shape:
            return zeros
        moved = (coef / posed.scale).astype(zero.dtype)
        if not self.fit_intercept:
            return moved
        return moved, np.asarray((intercept + placed.means @ coef - posed.origin) / posed.scale, zero.dtype)

    def _solver_form(self) -> tuple[np.ndarray, np.ndarray]:
        """``coef_`` as ``(d,)`` or ``(d, k)``, and ``intercept_`` as ``()`` or ``(k,)``."""
        return self.coef_.T, np.asarray(self.intercept_)

    def _described(self, params: Any, posed: Posed, means: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return what a solver found as ``coef_`` and ``intercept_``."""
        coef, intercept = params if self.fit_intercept else (params, None)
        coef = (coef * posed.scale).astype(coef.dtype)
        if intercept is None:
            return coef.T, np.zeros(coef.shape[1:], coef.dtype)[()]
        return coef.T, (posed.origin + posed.scale * intercept - means @ coef).astype(coef.dtype)[()]

    def _described_count(self, count: int) -> Any:
        return count

    def _warn(self, *found: Solution) -> None:
        """Warn of the worst of the solutions that are none."""
        for one in found:
            for number, error, count in zip(*map(np.ravel, (one.status, one.error, one.iter_num)), strict=True):
                status = Status(int(number))
                rounding = status == Status.PRECISION and error <= _GOOD_ENOUGH
                if status != Status.CONVERGED and not rounding:
                    warnings.warn(
                        f"{self._who} after {count} iterations, with an error of {error:.2g} (tol={self.tol:g}): "
                        f"{status.words}" + self._advice(status),
                        ConvergenceWarning,
                        stacklevel=3,
                    )
                    return

    def _advice(self, status: Status) -> str:
        if status == Status.ITERATION_LIMIT:
            return f"; write {self._who}(max_iter={2 * self.max_iter}), or scale the columns of X"
        return ""

    @property
    def _who(self) -> str:
        return type(self).__name__


def _told(value: Any) -> str:
    """Return a short value as it is, of a long array its shape and dtype, and of another long one its kind."""
    is_long = value.size > 12 if isinstance(value, np.ndarray) else len(str(value)) > 200
    if not isinstance(value, np.ndarray):
        return type(value).__name__ if is_long else str(value)
    described = f"{value.dtype} {value.shape}"
    return described if is_long or value.ndim != 1 else f"{described}: {np.array2string(value, precision=6)}"
