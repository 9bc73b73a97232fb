"""One call of ``Parallel``, while it is traced: a map over the devices, each with its share of the rows.

The function is traced once, inside the map. Before the trace becomes part of the program it shows which results differ
between devices, and, if rows had to be added, whether they meet the others.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._axes import layout, placing, tree
from paraxis._axes.axis import Axis
from paraxis._core import verbs
from paraxis._jax import jax_api, varying
from paraxis._modules import graphs
from paraxis.errors import ShapeError, StateError
from paraxis.transforms import _batches, _binding, _padding, _randomness, _reduce
from paraxis.transforms._binding import Structure
from paraxis.transforms._wrapped import Body


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``Parallel``. ``place`` is the axis of the devices, its size still open."""

    reduce: Any
    batch_axis: _batches.Axes
    sync: _reduce.Sync
    sync_batch_norm: bool
    check: bool
    place: Axis


class Call:
    """One call: its arguments taken apart, and what its trace shows."""

    def __init__(self, body: Body, structure: Structure, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._body, self._structure, self._options = body, structure, body.options
        place = placing.place(self._options.place)
        self._axis = place.holding(place.num_devices).axis
        self._num_args = len(args)
        self._static_args = {p: args[p] for p in body.static.positions if p < len(args)}
        self._static_kwargs = {name: x for name, x in kwargs.items() if name in body.static.names}
        self._kwargs = {name: x for name, x in kwargs.items() if name not in body.static.names}
        self._batch = self._split([x for p, x in enumerate(args) if p not in self._static_args])
        self._rows = place.holding(self._batch.size or place.num_devices)  # no padding where nothing is split
        self._drawn: list[_randomness.Stream] = []
        self._differs: Any = None

    def run(self, state: tuple[Sequence[Any], Sequence[Any]]) -> tuple[dict[int, Any], Any]:
        """Return new values of variables by their number, and the result."""
        values, arrays = state
        streams = self._structure.streams
        of_streams = {i for s in streams for i in (s.key, s.count)}
        shared = ([None if i in of_streams else v for i, v in enumerate(values)], arrays)
        keys = _randomness.element_keys(values, streams, self._axis.size)
        rows = [self._shares(x, at) for x, at in zip(self._batch.rows, self._batch.axes, strict=True)]
        whole = verbs.broadcast((shared, self._batch.whole, jax.tree.leaves(self._kwargs)), self._axis)
        new, result = verbs.map_sealed(self._on_device, (whole, keys, rows), self._axis)
        new = {i: self._combined(i, stacked) for i, stacked in new.items()}
        return new | _randomness.advanced(values, self._drawn), self._reduced(result)

    def _split(self, args: Sequence[Any]) -> _batches.Batch:
        _binding.refuse_modules("Parallel", args, self._kwargs)
        axes = self._options.batch_axis
        if isinstance(axes, Sequence) and len(axes) >= self._num_args:
            axes = [at for p, at in enumerate(axes) if p not in self._static_args]
        batch = _batches.split("Parallel", axes, args, self._kwargs)
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
        body, out_tree = traced = jax_api.trace(one, avals, {})
        if self._options.check and self._rows.is_padded:
            share, names = self._rows.num_local, self._structure.names
            harm = _padding.harm(one, traced, avals, row_dims, share, self._options.reduce, names)
            if harm is not None:
                self._refuse(harm)
        differs = [True] * out_tree.num_leaves
        if self._options.check:
            differs = self._differing(body, [0 if at > -2 else None for at in row_dims])
        self._differs = jax.tree.unflatten(out_tree, differs)
        if self._options.check:
            self._require_agreement()
        return jax.tree.unflatten(out_tree, jax_api.jaxpr_as_fun(body)(*leaves))

    def _differing(self, body: jax_api.ClosedJaxpr, in_axes: Sequence[int | None]) -> list[bool]:
        if jax_api.is_impure(body.jaxpr):  # it asks the outside world
            return [True] * len(body.out_avals)
        try:
            return varying.batched(body, in_axes, self._axis.size, self._axis.name, {})
        except Exception as error:
            raise StateError(
                f"Parallel: the check that variables stay the same on all devices cannot see through the function "
                f"({type(error).__name__}: {error}); if they do, write check=False"
            ) from error

    def _traced(self, whole: Any, keys: Any, rows: Any) -> tuple[dict[int, Any], Any]:
        (values, arrays), given, named = whole
        kwargs = jax.tree.unflatten(jax.tree.structure(self._kwargs), named)
        state = (_randomness.with_keys(values, self._structure.streams, keys), arrays)
        dynamic = iter(self._batch.put_together(rows, given))
        args = [self._static_args[p] if p in self._static_args else next(dynamic) for p in range(self._num_args)]
        kwargs = {**kwargs, **self._static_kwargs}
        result, new = _binding.run("Parallel", self._body.fn, self._structure, state, args, kwargs, self._synchronise)
        self._drawn = _randomness.drawn_from("Parallel", self._structure.streams, new, self._structure.names)
        return new, result

    def _synchronise(self, modules: Any) -> None:
        """Let the run's own BatchNorm layers that name no axis take their statistics over the devices."""
        for _, node in graphs.nodes(modules) if self._options.sync_batch_norm else ():
            if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
                node.axis_name = self._axis.name

    def _require_agreement(self) -> None:
        new, _ = self._differs
        for i, flags in new.items():
            if self._rule(i) is None and any(jax.tree.leaves(flags)):
                variable, name, axis = self._structure.graph.variables[i], self._structure.names[i], self._axis.name
                cure = (
                    "Return what the metric is updated with, and update it once, outside: metric.update(values=f(x))"
                    if isinstance(variable, nnx.metrics.MetricState)
                    else f"Is a mean forgotten? Write opt(lr, px.pmean(g, {axis!r})) for gradients; or give a rule, "
                    f"sync={{{graphs.type_name(variable)}: 'mean'}}; or write check=False if the values are the same "
                    f"anyway"
                )
                raise StateError(
                    f"Parallel: variable {name} could be left with different values on different devices: what is "
                    f"written to it depends on the device's share. {cure}"
                )

    def _refuse(self, why: str) -> None:
        size = self._axis.size
        raise ShapeError(
            f"Parallel: {self._batch.size} rows do not divide over {size} devices, and padding the last shares "
            f"would change the answer: {why}. Give a multiple of {size} rows; or return one value per row and "
            f"reduce outside; or write check=False if padding does no harm"
        )

    # --- after the map -------------------------------------------------------------------------------------------

    def _rule(self, number: int) -> _reduce.Rule | None:
        return _reduce.rule_of(self._structure, number, self._options.sync)

    def _combined(self, number: int, stacked: Any) -> Any:
        rule = self._rule(number)

        def one(x: jax.Array, differs: bool) -> Any:
            if rule is None or (rule in ("mean", "first", "max", "min") and not differs):
                return layout.agreed(x, self._axis)
            needs_all = rule == "first" or callable(rule)
            return _reduce.combined(rule, layout.gathered(x, self._axis) if needs_all else x, _reduce.fold(self._axis))

        return jax.tree.map(one, stacked, self._differs[0][number])

    def _reduced(self, result: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(result)
        kinds, differs = _reduce.spread("Parallel", self._options.reduce, result), jax.tree.leaves(self._differs[1])
        made = []
        for (path, x), kind, differ in zip(leaves, kinds, differs, strict=True):
            if kind == "same" and differ and self._options.check:
                raise StateError(
                    f"Parallel: {tree.name('result', path)} is to be the same on all devices (reduce='same'), but "
                    f"depends on the device's share; average it, px.pmean(x, {self._axis.name!r}), or reduce it: "
                    f"reduce='mean'"
                )
            y = _reduce.reduced(kind, x, self._axis, differs=differ)
            has_rows = kind == "concat" and x.shape[1:2] == (self._rows.num_local,)
            made.append(layout.unpad(y, self._rows) if has_rows else y)
        return jax.tree.unflatten(structure, made)
