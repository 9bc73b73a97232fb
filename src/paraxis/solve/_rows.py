"""Rows on devices: any number of them, on any number of these."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, layout, placing
from paraxis._axes.axis import Axis
from paraxis._axes.placing import AT_HAND, Placement
from paraxis._calls import arguments
from paraxis._host import processes
from paraxis._tables import Table, table_of
from paraxis.errors import AxisError, DataError, DeviceError, ShapeError
from paraxis.solve._on_disk import OnDisk, Source


class _Arrays(NamedTuple):
    X: Any  # an array, or what stands for rows on disk
    y: jax.Array
    weight: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class Rows(_Arrays):
    """Data for an objective, ``(X, y, weight)``, distributed over devices; rows of padding have weight zero.

    It records where its blocks of rows lie, one on each device, and the number of real rows, ``num_rows``; the padding
    comes after these. Programs under ``jit`` use this too. Arrays that you take out of it, and rows that :func:`rows`
    laid on one device or on an Explicit mesh, are a single block, which the compiler divides.
    """

    blocks: Placement = AT_HAND
    num_rows: int | None = None

    def __new__(cls, X: Any, y: Any, weight: Any, blocks: Placement = AT_HAND, num_rows: int | None = None) -> "Rows":
        data = _Arrays.__new__(cls, X, y, weight)
        data.blocks, data.num_rows = blocks, num_rows
        return data

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[Placement, int | None]]:
        keys = map(jax.tree_util.GetAttrKey, self._fields)
        return tuple(zip(keys, self, strict=True)), (self.blocks, self.num_rows)

    @classmethod
    def tree_unflatten(cls, known: tuple[Placement, int | None], leaves: Any) -> "Rows":
        X, y, weight = leaves
        return cls(X, y, weight, *known)

    def __reduce__(self) -> Any:
        return Rows, (*self, AT_HAND, self.num_rows)

    def with_arrays(self, **arrays: Any) -> "Rows":
        """Return the same rows with some of the arrays replaced by others that lie as they do."""
        return Rows(**{**self._asdict(), **arrays}, blocks=self.blocks, num_rows=self.num_rows)

    def __repr__(self) -> str:
        return f"Rows(X {self.X.dtype}{self.X.shape}, y {self.y.dtype}{self.y.shape}, weight {self.weight.shape})"

    def shared(self, params: Any) -> Any:
        """Return the same parameters, whole on each device of the rows.

        Use it before a loop of updates: the parameters of the first call then lie where those of later calls do, and
        the update is not compiled twice.
        """
        arguments.arrays("Rows.shared", "params", params)
        if arrays.is_traced(params):
            raise TypeError("Rows.shared: params must be known, not traced; write it before the loop, outside jax.jit")
        return jax.tree.map(lambda x: arrays.whole_beside(jax.numpy.asarray(x), self.X), params)


def blocks_of(data: Any, design: Any) -> Placement:
    """Return where the blocks of an objective's data lie, whose rows are ``design``; one block if that is unknown.

    It is known of what :func:`rows` gave, of as many rows to a block, outside other maps.

    Raises:
        DeviceError: if they were moved to other devices since.
    """
    if isinstance(design, OnDisk):
        return design.chunks.blocks
    blocks = data.blocks if isinstance(data, Rows) else AT_HAND
    mesh = placing.concrete_mesh(blocks) if blocks.mesh is not None else None
    if mesh is None or design.shape[0] % blocks.size or layout.tells_in_type(design):
        return AT_HAND
    if not placing.can_be_entered(blocks):
        return AT_HAND
    now = set() if arrays.is_traced(design) or not design.committed else design.sharding.device_set
    if now and now != set(mesh.devices.flat):
        raise DeviceError(
            f"data: these rows were laid out over {blocks.num_devices} devices, but now lie on {len(now)} others; lay "
            "them out there, px.solve.rows(X, y, axis=…), or write tuple(data) to let the compiler divide them"
        )
    return blocks


def number_of(data: Any, design: Any) -> int:
    """Return how many of an objective's rows are no padding, of which ``design`` are all."""
    given = data.num_rows if isinstance(data, Rows) else None
    return design.shape[0] if given is None else min(given, design.shape[0])


def rows(
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    class_weight: Mapping[int, float] | Literal["balanced"] | None = None,
    axis: Axis | None = None,
    engine: Any = None,
) -> Rows:
    """Distribute rows over devices, as the data of an objective.

    Each device gets the same number of rows. If their number does not divide, rows of weight zero are added, which
    change neither the objective nor the solution.

    Args:
        X: ``(n, d)``, floating; or a :class:`px.Table`, whose rows stay on disk, and are read in each pass.
        y: ``(n,)`` or ``(n, k)``; left out for a table.
        sample_weight: ``(n,)``, not negative; default 1 each.
        class_weight: a factor of the weights for each class; ``"balanced"``: inversely proportional to the classes'
            weights. Classes without an entry have factor 1.
        axis: the axis of the rows; default ``px.Axis("rows", n)``, over all devices.
        engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

    Returns:
        A tuple ``(X, y, weight)`` of arrays ``(num_padded, ...)``; of a table, ``X`` stands for rows on disk.

    Raises:
        ShapeError: if the numbers of rows differ, or the axis has another size.
        AxisError: if the axis has ``at_once``, or cannot be placed.
        DataError: if there is no row, or no weight is positive; or if the processes were given different rows, as far
            as a digest tells: of small arrays whole, of others over 1 MB of 64 rows.

    Communicates: sends each device its rows; with several processes, 400 bytes from each.

    Example:
        >>> import numpy as np, paraxis as px
        >>> data = px.solve.rows(np.ones((5, 2), "float32"), np.arange(5) % 2)
        >>> float(data.weight.sum())
        5.0
    """
    if isinstance(X, Table):
        if y is not None:
            raise TypeError("rows: y must be left out, as the table has it; write rows(table, engine=…)")
        weight = None if sample_weight is None else _checked_weight(sample_weight)
        source = Source("rows", X, engine, axis)
        targets = _targets(source.y, X)
        if weight is not None and weight.shape != (len(source),):
            raise ShapeError(f"rows: sample_weight must have the {len(source)} rows of the table, got {weight.shape}")
        weight = np.ones(len(targets)) if weight is None else weight
        if class_weight is not None:
            weight = weight * _class_factors(np.asarray(targets), weight, class_weight)
        require_sum("rows", "sample_weight", weight, source.dtype)
        return of_source(source, targets, weight.astype(source.dtype), None)
    if isinstance(X, (str, Path)):
        made = table_of(X) if engine is None else f"{table_of(X)}, engine=engine"
        raise TypeError(
            f"rows: X must be numbers (n, d), or a px.Table of files, got a path; write px.solve.rows({made})"
        )
    if engine is not None:
        raise TypeError("rows: engine is for a px.Table; write px.solve.rows(px.Table.of_arrays(X, y), engine=engine)")
    if y is None:
        raise TypeError("rows: y is missing, and only a px.Table has it; write px.solve.rows(X, y)")
    return lay(X, y, sample_weight, class_weight, axis, copied=True)


def of_source(source: Source, targets: Any, weight: np.ndarray, shift: np.ndarray | None) -> Rows:
    """Return rows on disk, with targets ``(n, ...)`` and weights ``(n,)`` in the table's order on the devices."""
    design, blocks = OnDisk.of(source, shift), source.chunks.blocks
    return Rows(design, source.padded(np.asarray(targets)), source.weights(weight), blocks, source.chunks.num_rows)


def lay(X: Any, y: Any, sample_weight: Any, class_weight: Any, axis: Axis | None, *, copied: bool) -> Rows:
    """Lay rows out as :func:`rows`; if not ``copied``, devices may use those on the host where they are."""
    X, y = arguments.array("rows", "X", X), _targets(y)
    if X.ndim != 2 or not X.shape[0]:
        raise DataError(f"rows: X must be (n, d) with at least one row, got {X.shape}")
    dtype = X.dtype if np.issubdtype(X.dtype, np.floating) else np.dtype(np.float32)
    given = np.ones(len(X), dtype) if sample_weight is None else sample_weight
    weight = arguments.host_array("rows", "sample_weight", given)
    for name, x in (("y", y), ("sample_weight", weight)):
        if x.shape[:1] != X.shape[:1]:
            raise ShapeError(f"rows: {name} must have the {len(X)} rows of X, got {x.shape}")
    weight = _checked_weight(weight)
    if class_weight is not None:
        weight = weight * _class_factors(np.asarray(y), weight, class_weight)
    require_sum("rows", "sample_weight", weight, dtype)
    axis = Axis("rows", len(X)) if axis is None else axis
    if not isinstance(axis, Axis):
        got = arguments.described(axis)
        raise AxisError(f"rows: axis must be a px.Axis, got {got}; write axis=px.Axis('rows', {len(X)})")
    if axis.size != len(X):
        raise ShapeError(f"rows: X has {len(X)} rows, but axis {axis.name!r} has size {axis.size}")
    if axis.at_once is not None:
        raise AxisError(
            f"rows: axis {axis.name!r} has at_once={axis.at_once}, but a device takes all of its rows together; leave "
            f"at_once out: px.Axis({axis.name!r}, {axis.size})"
        )
    placement = placing.place(axis)
    if placing.spans_all_processes(placement):
        given_all = "give each process all rows, the same in each: its devices take theirs"
        processes.require_same("rows", {"X": X, "y": y, "sample_weight": weight}, given_all)
    design, targets = arrays.laid_out((X if X.dtype == dtype else X.astype(dtype), y), placement, copied=copied)
    padded = layout.padded_weights(weight.astype(dtype), placement.num_padded)
    return Rows(design, targets, arrays.in_blocks(padded, placement), placing.blocks(placement), axis.size)


def _targets(y: Any, table: Table | None = None) -> Any:
    try:
        given = y if isinstance(y, jax.Array) else np.asarray(y)
    except Exception:
        given = y  # it is said below what it is
    objects = given.flat if isinstance(given, np.ndarray) and given.dtype.kind in "USO" else ()
    text = next((x for x in objects if isinstance(x, (str, bytes))), None)
    if text is not None:
        what, write = "y", "write y = np.unique(y, return_inverse=True)[1]"
        if table is not None:
            what = f"the table's target {table.target!r}"
            write = "write numbers into that column, or px.solve.LogisticRegression().fit(table, engine=engine)"
        raise DataError(f"rows: {what} must be numbers, got text, such as {str(text)!r}; {write}")
    arguments.no_cut("rows", "y", given)
    return arguments.array("rows", "y", y)


def _checked_weight(given: Any) -> np.ndarray:
    weight = arguments.host_array("rows", "sample_weight", given)
    if weight.ndim != 1 or np.iscomplexobj(weight) or not _can_weigh(weight):
        raise DataError(
            "rows: sample_weight must be (n,), finite, not negative and somewhere positive; leave out rows that are "
            "not to count, or give them weight 0"
        )
    return weight


def require_sum(who: str, name: str, weight: np.ndarray, dtype: Any) -> None:
    """Raise :class:`DataError` if weights, divided by their sum in this dtype, would be zero or infinite."""
    dtype = jnp.promote_types(dtype, jnp.float32)  # integers, and floats that are narrower
    total, least = np.sum(weight, dtype=float), float(np.finfo(dtype).tiny)
    if not least <= total <= 1 / least:
        raise DataError(
            f"{who}: {name} adds up to {total:g}, too much or too little for {np.dtype(dtype)}; write "
            f"{name}={name} / {name}.max()"
        )


def _can_weigh(weight: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(weight)) and np.all(weight >= 0) and np.any(weight > 0))


def _class_factors(y: np.ndarray, weight: np.ndarray, class_weight: Any) -> np.ndarray:
    by_class: Mapping[Any, Any] | None = class_weight if isinstance(class_weight, Mapping) else None
    if by_class is None and not (isinstance(class_weight, str) and class_weight == "balanced"):
        raise DataError(
            f"rows: class_weight must be 'balanced' or factors by class, got {arguments.described(class_weight)}; "
            "write class_weight={0: 1.0, 1: 2.0}"
        )
    classes, index = np.unique(y, return_inverse=True)
    if by_class is None:
        totals = np.bincount(index, weight)
        return (weight.sum() / (len(classes) * np.where(totals > 0, totals, 1)))[index]
    unknown = sorted(set(by_class) - set(classes.tolist()), key=str)
    if unknown:
        raise DataError(f"rows: class_weight names {unknown}, but the classes of y are {classes.tolist()}; write these")
    for c, factor in by_class.items():
        if not arguments.is_number(factor):
            got = arguments.described(factor)
            raise DataError(f"rows: class_weight[{c!r}] must be a number, got {got}; write class_weight={{{c!r}: 1.0}}")
    factors = np.array([by_class.get(c, 1.0) for c in classes.tolist()], float)
    if not np.all(np.isfinite(factors)) or np.any(factors < 0) or not np.any(weight * factors[index] > 0):
        raise DataError(
            "rows: class_weight must be finite, not negative, and positive for some row that counts, got "
            f"{class_weight}; write class_weight={{0: 1.0, 1: 2.0}}"
        )
    return factors[index]
