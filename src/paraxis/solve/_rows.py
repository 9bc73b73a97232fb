"""Rows on devices: any number of them, on any number of these."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api, placing
from paraxis._core.placing import Axis
from paraxis._host import processes
from paraxis._tables import Table
from paraxis.errors import AxisError, DataError
from paraxis.solve._streaming import TableRows


class Rows(NamedTuple):
    """Data for an objective, ``(X, y, weight)``, distributed over devices; rows of padding have weight zero."""

    X: Any  # (num_padded, d), an array; or what reads them of a table
    y: jax.Array  # (num_padded,) or (num_padded, k)
    weight: jax.Array  # (num_padded,)

    def shared(self, params: Any) -> Any:
        """Return the same parameters, whole on each device of the rows, so that a first update is compiled for all."""
        return jax.tree.map(lambda x: beside(jnp.asarray(x), self.y), params)


class RowsWithOffset(collections.namedtuple("RowsWithOffset", (*Rows._fields, "offset"))):
    """As :class:`Rows`, with what is added to the predictions: ``(num_padded,)``, or ``(num_padded, k)``."""

    shared = Rows.shared


def beside(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return an array whole on each device that another lies on; of several processes, the first one's."""
    target = arrays.whole_on(other)
    if arrays.is_traced((x, other)):  # on an Explicit mesh, where types say so
        return jax.reshard(x, target)
    if x.sharding == target:
        return x
    return arrays.device_put(x if target.is_fully_addressable else agreed(np.asarray(x), other), target)


def agreed(tree: Any, other: jax.Array) -> Any:
    """Return what each process has computed as the first one has: with other last bits, loops would part."""
    if arrays.whole_on(other).is_fully_addressable:
        return tree
    with jax.enable_x64(True):
        return jax_api.multihost_utils.broadcast_one_to_all(tree)


def sent(x: Any, other: jax.Array) -> Any:
    """Return a tree of arrays, or of the host's, on each device that another is bound to, or on none in particular."""
    return arrays.device_put(x, arrays.whole_on(other)) if other.committed else jax.device_put(x)


def rows(
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    offset: Any = None,
    axis: Axis | None = None,
    engine: Any = None,
) -> Any:
    """Distribute rows over devices, as the data of an objective; if they do not divide, with others of weight zero.

    Args:
        X: ``(n, d)``, floating; or a :class:`px.Table`, whose rows stay on disk, and are read in each pass.
        y: ``(n,)`` or ``(n, k)``; left out for a table.
        sample_weight: ``(n,)``, not negative; default 1 each.
        offset: what is added to the linear model's predictions: ``(n,)``, or ``(n, k)``, such as a log-exposure.
        axis: the axis of the rows; default ``px.Axis("rows", n)``, over all devices.
        engine: for a table, what says how many rows are read at once: ``px.Stream(memory="2GB")``.

    Returns:
        :class:`Rows`, ``(X, y, weight)`` of arrays ``(num_padded, ...)``, and ``offset`` if there is one; of a table,
        ``X`` stands for rows on disk.

    Raises:
        DataError: if the numbers of rows differ, or the axis has another size; if there is no row, or no weight is
            positive; if one is a masked array; or if processes were given different rows, as a digest tells.

    Communicates: sends each device its rows; with several processes, 400 bytes from each.

    Example:
        >>> import numpy as np, paraxis as px
        >>> data = px.solve.rows(np.ones((5, 2), "float32"), np.arange(5) % 2)
        >>> float(data.weight.sum())
        5.0
    """
    check.has("rows", "axis", axis, "size", f"px.Axis('rows', {len(X)})", AxisError)
    if isinstance(X, Table):
        X = TableRows("rows", X, y, engine, axis)
        y = X.y
    elif engine is not None:
        raise TypeError("rows: engine is for a px.Table; write px.solve.rows(px.Table.of_arrays(X, y), engine=engine)")
    return lay(X, y, sample_weight, axis, offset=offset, copied=True)


def lay(X: Any, y: Any, sample_weight: Any, axis: Axis | None, *, offset: Any = None, copied: bool) -> Any:
    """Lay rows out as :func:`rows`, or those of a table that is read; if not ``copied``, devices may use the host's."""
    require_unmasked("rows", X=X, y=y, sample_weight=sample_weight, offset=offset)
    X, y = (x if isinstance(x, jax.Array | TableRows) else np.asarray(x) for x in (X, y))
    check.leaves("rows", "y", y)
    if y.dtype.kind not in "biufV" or not y.ndim:
        raise DataError(
            f"rows: y must be numbers, got {check.described(y)}; write y = np.unique(y, return_inverse=True)[1]"
        )
    if X.ndim != 2 or not X.shape[0] or X.dtype.kind not in "biufV":
        raise DataError(f"rows: X must be numbers (n, d) with at least one row, got {check.described(X)}")
    dtype = X.dtype if jnp.issubdtype(X.dtype, jnp.floating) else np.dtype(np.float32)
    weight = np.ones(len(y), dtype) if sample_weight is None else np.asarray(sample_weight)
    if weight.shape != y.shape[:1]:
        raise DataError(f"rows: sample_weight must be one number for each of the {len(y)} rows, got {weight.shape}")
    if not np.all(weight >= 0):
        raise DataError("rows: sample_weight must not be negative; leave out rows not to count, or give them weight 0")
    require_sum("rows", "sample_weight", weight, dtype)
    weight = weight.astype(dtype)
    offset = offset if offset is None else np.asarray(offset, dtype)
    if offset is not None and (offset.shape[:1] != y.shape[:1] or not np.all(np.isfinite(offset))):
        raise DataError(f"rows: offset must be finite numbers for each of the {len(y)} rows, got {offset.shape}")
    kind, others = (Rows, {}) if offset is None else (RowsWithOffset, {"offset": offset})
    if isinstance(X, TableRows):
        return kind(X, X.laid(y), X.laid(weight, is_weight=True), *map(X.laid, others.values()))
    axis = Axis("rows", len(X)) if axis is None else axis
    if not len(X) == len(y) == axis.size:
        raise DataError(f"rows: X has {len(X)} rows, y has {len(y)}, and axis {axis.name!r} has size {axis.size}")
    if axis.at_once is not None:
        raise AxisError(f"rows: axis {axis.name!r} has at_once, but a device takes all of its rows; leave it out")
    placement = placing.place(axis)
    mesh = placement.devices  # what a process alone compares, the others do not hear of
    if mesh is not None and len({d.process_index for d in mesh.devices.flat}) == jax.process_count() > 1:
        inputs = {"X": X, "y": y, "sample_weight": weight, **others}
        processes.require_same("rows", inputs, "give each process all rows")
    by_row = X if X.dtype == dtype else X.astype(dtype), y, *others.values()
    design, targets, *rest = arrays.laid_out(by_row, placement, copied=copied)
    padded = np.pad(weight, (0, placement.num_padded - len(weight)))
    return kind(design, targets, arrays.device_put(padded, arrays.sharding(placement)), *rest)


def require_unmasked(who: str, **values: Any) -> None:
    """Raise :class:`DataError` for a masked array, of which NumPy and scikit-learn would drop the mask."""
    for name, x in values.items():
        if isinstance(x, np.ma.MaskedArray):
            check.by_position(who, name, x)


def require_sum(who: str, name: str, weight: np.ndarray, dtype: Any) -> None:
    """Raise :class:`DataError` if weights, divided by their sum in this dtype, would be zero or infinite."""
    dtype = jnp.promote_types(dtype, jnp.float32)  # integers, and floats that are narrower
    total, least = np.sum(weight, dtype=float), float(np.finfo(dtype).tiny)
    if not least <= total <= 1 / least:
        raise DataError(
            f"{who}: {name} adds up to {total:g}, too much or too little for {np.dtype(dtype)}; write "
            f"{name}={name} / {name}.max()"
        )
