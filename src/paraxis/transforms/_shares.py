"""One call of ``Parallel``, while it is traced: a map over the devices, each with its share of the rows.

The function is traced once, inside the map. What the trace shows is looked at before it becomes part of the program:
which results differ between devices, and, if rows had to be added, whether they meet the others.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._axes import layout, placing, tree
from paraxis._axes.axis import Axis
from paraxis._core import verbs
from paraxis._jax import jax_api, varying
from paraxis._modules import graphs, norms
from paraxis.errors import ShapeError, StateError
from paraxis.transforms import _batches, _body, _metrics, _padding, _randomness, _results, _statistics, _sync
from paraxis.transforms._binding import Binding
from paraxis.transforms._body import Body
from paraxis.transforms._statics import Statics


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of ``Parallel``, checked. ``place`` is the axis of the devices, its size still open."""

    body: Body
    statics: Statics
    reduce: Any
    batch_axis: _batches.Axes
    sync: Mapping[Any, _sync.Rule | None]
    sync_batch_norm: bool
    check: bool
    place: Axis


class Call:
    """One call: its arguments taken apart, and what its trace shows."""

    def __init__(self, plan: Plan, binding: Binding, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._plan, self._binding = plan, binding
        place = placing.place(plan.place)
        self._axis = place.holding(place.num_devices).axis
        static = plan.statics
        self._num_args = len(args)
        self._static_args = {p: args[p] for p in static.positions if p < len(args)}
        self._static_kwargs = {name: x for name, x in kwargs.items() if name in static.names}
        self._kwargs = {name: x for name, x in kwargs.items() if name not in static.names}
        self._batch = self._split([x for p, x in enumerate(args) if p not in self._static_args])
        self._rows = place.holding(self._batch.size or place.num_devices)  # no padding where nothing is split
        self._drawn: list[_randomness.Stream] = []
        self._differs: Any = None
        self._carries: dict[int, bool] = {}
        self._metrics = [m for m in binding.metrics if not any(map(self._has_rule, m.numbers))]
        self._known = frozenset(i for m in self._metrics for i in m.numbers)

    def run(self, state: tuple[Sequence[Any], Sequence[Any]]) -> tuple[dict[int, Any], Any]:
        """Return new values of variables by their number, and the result."""
        values, arrays = state
        streams = self._binding.streams
        of_streams = {i for s in streams for i in (s.key, s.count)}
        shared = ([None if i in of_streams else v for i, v in enumerate(values)], arrays)
        keys = _randomness.element_keys(values, streams, self._axis.size)
        rows = [self._shares(x, at) for x, at in zip(self._batch.rows, self._batch.axes, strict=True)]
        whole = verbs.broadcast((shared, self._batch.whole, jax.tree.leaves(self._kwargs)), self._axis)
        new, result = verbs.map_sealed(self._on_device, (whole, keys, rows), self._axis)
        merged = self._merged(values, new)
        new = {i: merged[i] if i in merged else self._combined(i, stacked) for i, stacked in new.items()}
        return new | _randomness.advanced(values, self._drawn), self._reduced(result)

    def _split(self, args: Sequence[Any]) -> _batches.Batch:
        _body.refuse_modules("Parallel", args, self._kwargs)
        axes = self._plan.batch_axis
        if isinstance(axes, Sequence) and len(axes) >= self._num_args:
            axes = [at for p, at in enumerate(axes) if p not in self._static_args]
        batch = _batches.split("Parallel", axes, args)
        _batches.refuse_keys("Parallel", axes, args, self._kwargs)
        arrays = [name for name, x in self._kwargs.items() if any(jnp.ndim(leaf) for leaf in jax.tree.leaves(x))]
        if batch.size is None and arrays and axes is not None:
            raise ShapeError(
                f"Parallel: no argument is split: {arrays[0]} was given by keyword, which every device is given whole. "
                f"Give it by position to split it; or write batch_axis=None if that is meant"
            )
        if batch.size == 0:
            raise ShapeError("Parallel: the batch has no rows; give at least one")
        return batch

    def _shares(self, x: Any, at: int) -> jax.Array:
        """``(..., rows, ...)`` → ``(devices, ..., share, ...)``; padded."""
        x = layout.repeat_last(jnp.moveaxis(jnp.asarray(x), at, 0), self._rows.num_padded)
        return jnp.moveaxis(x.reshape(self._axis.size, self._rows.num_local, *x.shape[1:]), 1, at + 1)

    # --- on a device ---------------------------------------------------------------------------------------------

    def _on_device(self, whole: Any, keys: Any, rows: Any) -> Any:
        leaves, structure = jax.tree.flatten((whole, keys, rows))
        row_dims = jax.tree.leaves(tree.spread((-2, -1, list(self._batch.axes)), (whole, keys, rows)))

        def one(*leaves: Any) -> Any:
            return self._traced(*jax.tree.unflatten(structure, leaves))

        avals = [jax_api.struct(x) for x in leaves]
        if self._plan.check and self._rows.is_padded:
            share = self._rows.num_local
            harm = _padding.harm(one, avals, row_dims, share, self._plan.reduce, self._binding.names)
            if harm is not None:
                self._refuse(harm)
        body, out_tree = jax_api.trace(one, avals, {})
        differs = [True] * out_tree.num_leaves
        if self._plan.check:
            differs = self._differing(body, [at > -2 for at in row_dims])
        self._differs = jax.tree.unflatten(out_tree, differs)
        if self._plan.check and self._plan.sync_batch_norm:
            self._warn_of_statistics(_statistics.of_shares(one, body, avals, row_dims, self._axis.name))
        if self._metrics:
            self._look_at_metrics(body, out_tree, whole, keys, rows)
        if self._plan.check:
            self._require_agreement()
        return jax.tree.unflatten(out_tree, jax_api.jaxpr_as_fun(body)(*leaves))

    def _differing(self, body: jax_api.ClosedJaxpr, placed: Sequence[bool]) -> list[bool]:
        try:
            if jax_api.is_impure(body.jaxpr):  # it asks the outside world
                return [True] * len(body.out_avals)
            in_axes = [0 if is_placed else None for is_placed in placed]
            return varying.batched(body, in_axes, self._axis.size, self._axis.name, {})
        except Exception as error:
            raise StateError(
                f"Parallel: the check that variables stay the same on all devices cannot see through the function "
                f"({type(error).__name__}: {error}); if they do, write check=False"
            ) from error

    def _warn_of_statistics(self, places: Sequence[str]) -> None:
        if places and self._axis.size > 1:
            warnings.warn(
                f"Parallel: sync_batch_norm=True reaches Flax's BatchNorm layers, but a statistic of the rows that is "
                f"taken at {', and at '.join(places)} and applied to rows is of each device's share alone. For that of "
                f"the whole batch, combine it there, px.pmean(x.mean(0), {self._axis.name!r}), and for a variance "
                f"px.pmean(((x - mean) ** 2).mean(0), {self._axis.name!r}); if it is meant, write check=False",
                stacklevel=2,
            )

    def _look_at_metrics(self, body: jax_api.ClosedJaxpr, out_tree: Any, whole: Any, keys: Any, rows: Any) -> None:
        """Note for each variable of a metric that is written whether its old value is part of the new one.

        Where that cannot be seen, they are variables like others.
        """
        (values, arrays), *others = whole
        nothing = functools.partial(jax.tree.map, lambda _: False)
        old = [jax.tree.map(lambda _, i=i: i in self._known, value) for i, value in enumerate(values)]
        placed = jax.tree.leaves((((old, nothing(arrays)), *nothing(others)), nothing(keys), nothing(rows)))
        try:
            flags = None if jax_api.is_impure(body.jaxpr) else self._differing(_metrics.plain_writes(body), placed)
        except StateError:
            flags = None
        if flags is None:
            self._metrics, self._known = [], frozenset[int]()
            return
        new, _ = jax.tree.unflatten(out_tree, flags)
        self._carries = {i: any(jax.tree.leaves(x)) for i, x in new.items() if i in self._known}

    def _traced(self, whole: Any, keys: Any, rows: Any) -> tuple[dict[int, Any], Any]:
        (values, arrays), given, named = whole
        kwargs = jax.tree.unflatten(jax.tree.structure(self._kwargs), named)
        state = (_randomness.with_keys(values, self._binding.streams, keys), arrays)
        dynamic = iter(self._batch.put_together(rows, given))
        args = [self._static_args[p] if p in self._static_args else next(dynamic) for p in range(self._num_args)]
        together = norms.synchronised(self._axis.name) if self._plan.sync_batch_norm else contextlib.nullcontext()
        with together:
            result, new = _body.run(self._plan.body, self._binding, state, args, {**kwargs, **self._static_kwargs})
        self._drawn = _randomness.drawn_from("Parallel", self._binding.streams, new, self._binding.names)
        return new, result

    def _require_agreement(self) -> None:
        new, _ = self._differs
        for i, flags in new.items():
            if i not in self._known and self._rule(i) is None and any(jax.tree.leaves(flags)):
                self._refuse_own_metric(i)
                name, kind = self._binding.names[i], graphs.type_name(self._binding.graph.variables[i])
                axis = self._axis.name
                raise StateError(
                    f"Parallel: variable {name} could be left with different values on different devices: what is "
                    f"written to it depends on the device's share. Is a mean forgotten? Write "
                    f"opt(lr, px.pmean(g, {axis!r})) for gradients; or give a rule, sync={{{kind}: 'mean'}}; or write "
                    f"check=False if the values are the same anyway"
                )

    def _refuse_own_metric(self, number: int) -> None:
        if isinstance(self._binding.graph.variables[number], nnx.metrics.MetricState):
            raise StateError(
                f"Parallel: variable {self._binding.names[number]} belongs to a metric of a type whose states Paraxis "
                f"cannot merge across devices. Return the values that update it, and update it outside, "
                f"metric.update(values=fast(x)); or, if the function sets it from the device's share alone, write "
                f"sync={{{self._binding.names[number]!r}: 'sum'}}"
            )

    def _refuse(self, why: str) -> None:
        size = self._axis.size
        raise ShapeError(
            f"Parallel: {self._batch.size} rows do not divide over {size} devices, and padding the last shares "
            f"would change the answer: {why}. Give a multiple of {size} rows; or return one value per row and "
            f"reduce outside; or write check=False if padding does no harm"
        )

    # --- after the map -------------------------------------------------------------------------------------------

    def _rule(self, number: int) -> _sync.Rule | None:
        name, variable = self._binding.names[number], self._binding.graph.variables[number]
        return _sync.rule_of("Parallel", name, variable, self._plan.sync, is_known=number in self._known)

    def _has_rule(self, number: int) -> bool:
        """Return whether the user says what becomes of this very variable."""
        name, variable = self._binding.names[number], self._binding.graph.variables[number]
        return _sync.rule_of("Parallel", name, variable, self._plan.sync, is_known=True) is not None

    def _merged(self, old: Sequence[Any], new: dict[int, Any]) -> dict[int, Any]:
        """Return the new values of metrics, where devices have updated them with different rows."""
        merged: dict[int, Any] = {}
        for metric in self._metrics:
            written = [i for i in metric.numbers if i in new]
            if not any(jax.tree.leaves([self._differs[0][i] for i in written])):
                continue
            before = [jnp.asarray(old[i]) for i in metric.numbers]
            size = self._axis.size
            devices = [
                layout.gathered(new[i], self._axis) if i in new else jnp.broadcast_to(x, (size, *x.shape))
                for i, x in zip(metric.numbers, before, strict=True)
            ]
            carried = any(self._carries[i] for i in written)
            merged |= dict(zip(metric.numbers, metric.merged(before, devices, carried), strict=True))
        return merged

    def _combined(self, number: int, stacked: Any) -> Any:
        rule = self._rule(number)
        combine = _results.fold(self._axis)

        def one(x: jax.Array, differs: bool) -> Any:
            if rule is None or (rule in ("mean", "first", "max", "min") and not differs):
                return layout.agreed(x, self._axis)
            needs_all = rule == "first" or callable(rule)
            return _sync.combined(rule, layout.gathered(x, self._axis) if needs_all else x, combine)

        return jax.tree.map(one, stacked, self._differs[0][number])

    def _reduced(self, result: Any) -> Any:
        leaves, structure = jax.tree.flatten(result)
        kinds = _results.spread("Parallel", self._plan.reduce, result)
        differs = jax.tree.leaves(self._differs[1])
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(result)]
        made = []
        for x, kind, differ, path in zip(leaves, kinds, differs, paths, strict=True):
            if kind == "same" and differ and self._plan.check:
                raise StateError(
                    f"Parallel: {tree.name('result', path)} is to be the same on all devices (reduce='same'), but "
                    f"depends on the device's share; average it, px.pmean(x, {self._axis.name!r}), or reduce it: "
                    f"reduce='mean'"
                )
            y = _results.reduced(kind, x, self._axis, differs=differ)
            has_rows = kind == "concat" and x.shape[1:2] == (self._rows.num_local,)
            made.append(layout.unpad(y, self._rows) if has_rows else y)
        return jax.tree.unflatten(structure, made)
