"""``Parallel``: the function of one device's share of a batch, traced in a map over the devices.

The trace shows which results differ between devices. If rows do not divide, a shorter share is traced as well.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._core import arrays, jax_api, placing, pytrees, verbs
from paraxis.errors import DataError, StateError, axis_advice
from paraxis.transforms import _batches, _modules, _wrapped
from paraxis.transforms._jit import Jit


class Parallel(Jit[_wrapped.R]):
    """Split a batch over the devices, and run a compiled function of modules on each share.

    Every device has all variables and its share: ``(rows, ...)`` becomes ``(rows / devices, ...)``. In the function,
    ``px.pmean(x, "device")`` and the other collectives, including those of ``jax.lax``, combine all devices. A value
    that the function writes must be the same on all devices, which is checked before anything runs, or have a rule.
    Each device has its own random streams, made from its number; the modules' streams advance once per call. If the
    rows do not divide, the last shares are smaller, or empty; results must then be rows, with ``reduce="concat"``.

    Args:
        f: a function of modules and a share of each argument; or a module, or a method of one.
        *modules: as in :class:`Jit`.
        reduce: how to combine the devices' results, for every leaf: ``"concat"`` (along the first axis; scalars are
            stacked), ``"stack"`` (``(devices, ...)``), ``"first"``, ``"mean"``, ``"sum"``, ``"max"``, ``"min"``,
            ``"same"`` (checked to be equal), or a function of the stacked results. Or a tree of these that is a
            prefix of the result.
        batch_axis: the axis to split, or ``None`` to pass an argument whole: for all arguments after the modules, or a
            tuple with one, or a prefix tree, for each. Keyword arguments are split along their first axis, unless it
            is ``None``. Numbers and 0-d arrays are passed whole.
        axis_name: the name of the devices in collectives.
        static_argnums, static_argnames, donate: as in :class:`Jit`.
        sync: for a variable type, how to combine the devices' values: ``"mean"`` (that of ``nnx.BatchStat``),
            ``"sum"``, ``"max"``, ``"min"``, ``"first"``, ``"stack"``, or a function of all of them, ``(devices, ...)``.
            A variable's own rule, ``nnx.Variable(x, sync="sum")``, takes precedence. Integers keep their dtype. Each
            device starts from the whole old value, so a ``"sum"`` counts it once per device.
        sync_batch_norm: whether the modules' ``nnx.BatchNorm`` layers that name no axis use the statistics of the whole
            batch, as on one device, instead of those of each device's share.
        check: whether to require that values written without a rule are the same on all devices. Write ``False`` for
            functions that the check misjudges; shares that are too small are then filled with the last row.
        mesh: the devices, a ``jax.sharding.Mesh``; default: those of ``jax.set_mesh``, or all.
        over: the axis, or axes, of the mesh to split over; default: the one with the name ``axis_name``.

    Raises:
        StateError: as in :class:`Jit`; and when called, if a variable could be left with different values on different
            devices (a forgotten ``pmean``); the message names it.
        DataError: when called, if the sizes of the batch axes disagree; or if the rows do not divide over the
            devices, and the function exchanges values, writes variables, or returns more than rows.

    Communicates: what ``f`` does; one all-reduce for each variable that has a rule and was written, and for each
    result that is reduced. With several processes, each passes the whole batch, and results are gathered for all.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net, x = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((96, 3))
        >>> px.Parallel(net)(x).shape
        (96, 4)
        >>> bool(jnp.allclose(px.Parallel(lambda net, x: net(x).mean(), net, reduce="mean")(x), net(x).mean()))
        True
    """

    _placed: Sequence[Any] = ()  # the mesh, and the values of variables that lie on it

    def __init__(
        self,
        f: Callable[..., _wrapped.R],
        *modules: Any,
        reduce: Any = "concat",
        batch_axis: _batches.Axes = 0,
        axis_name: str = "device",
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        sync: _batches.Sync | None = None,
        sync_batch_norm: bool = False,
        check: bool = True,
        donate: bool = False,
        mesh: Any = None,
        over: str | tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(f, *modules, static_argnums=static_argnums, static_argnames=static_argnames, donate=donate)
        axis = placing.Axis(axis_name, 1, mesh=mesh, over=over)
        self._body.axis_advice = f"write the axis of the devices, px.pmean(x, {axis_name!r})"
        self._body.options = axis, reduce, batch_axis, dict(sync or {}), sync_batch_norm, check

    @staticmethod
    def _run(
        body: _wrapped.Body, graph: _modules.Graph, state: Any, args: Any, kwargs: Any
    ) -> tuple[Any, dict[int, Any]]:
        return Call(body, graph, args, kwargs).run(state)

    def _ready(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Bring to all devices what is not there yet: otherwise it would be sent at every call."""
        binding, program, values, args, kwargs = super()._ready(args, kwargs)
        with axis_advice("Parallel: write px.Parallel(…, mesh=mesh, over='data'), or neither for all devices"):
            placement = placing.place(self._body.options[0])
        args, kwargs = jax.tree.map(partial(_sent, placement=placement), (args, kwargs))
        if not _wrapped.same([placement.devices, *values], self._placed):
            self._placed = [placement.devices]  # until the call has succeeded
            values = [arrays.to_mesh(x, placement, rows=False) for x in values]
        return binding, program, values, args, kwargs

    def _finished(self, binding: _wrapped.Binding, values: Sequence[Any], new: dict[int, Any], result: Any) -> Any:
        mesh, *are_there = self._placed
        if not are_there:  # they stay there, unless this is a part of another program, whose values only it may use
            new = {i: x for i, x in enumerate(values) if not isinstance(x, jax_api.Tracer)} | new
        result = super()._finished(binding, values, new, result)
        self._placed = [mesh, *binding.graph.values()]
        return arrays.gather_processes(result) if mesh is not None and mesh.is_multi_process else result


def _sent(x: Any, placement: placing.Placement) -> Any:
    """Bring an argument that is bound to another mesh to this one. One that is bound to none goes by itself."""
    if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or not x.committed:
        return x
    return arrays.to_mesh(x, placement.holding(x.shape[0] or 1) if x.ndim else placement, rows=x.ndim > 0)


class Call:
    """One call, while it is traced: its arguments split, and what its trace shows."""

    def __init__(
        self, body: _wrapped.Body, graph: _modules.Graph, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._body, self._graph = body, graph
        axis, self._reduce, axes, self._sync, self._sync_norm, self._check = body.options
        self._batch = batch = _batches.split("Parallel", axes, args, kwargs)
        place = placing.place(axis)
        self._axis = place.holding(place.num_devices).axis
        self._rows = place.holding(batch.size or place.num_devices)  # no padding where nothing is split
        self._share = 0 if batch.size == 0 else self._rows.num_local
        self._drawn: list[_modules.Stream] = []

    def run(self, state: Any) -> tuple[Any, dict[int, Any]]:
        """Return the result, and new values of variables by their number."""
        self._streams = _modules.streams(self._graph, state[0])
        leaves = [
            verbs.broadcast(x, self._axis) if at is None else self._shares(x, at)
            for x, at in zip(self._batch.leaves, self._batch.axes, strict=True)
        ]
        operands = (jnp.arange(self._axis.size), verbs.broadcast(state, self._axis), leaves)
        stacked, result = verbs.map_static(self._on_device, operands, self._axis)
        mend = f"on different devices; write opt(lr, px.pmean(g, {self._axis.name!r})), check=False if it is not, or"
        arguments = self._graph, self._sync, stacked, self._differs[0], self._axis
        new = _batches.written("Parallel", *arguments, mend if self._check else "")
        return self._reduced(result), new | _modules.next_streams(state[0], self._drawn)

    def _shares(self, x: Any, at: int) -> jax.Array:
        """``(..., rows, ...)`` → ``(devices, ..., share, ...)``; padded."""
        x = arrays.repeat_last(jnp.moveaxis(jnp.asarray(x), at, 0), self._axis.size * self._share)
        return jnp.moveaxis(x.reshape(self._axis.size, self._share, *x.shape[1:]), 1, at + 1)

    def _on_device(self, index: jax.Array, state: Any, leaves: list[Any]) -> Any:
        shared, structure = jax.tree.flatten((index, state))

        def one(*xs: Any) -> tuple[dict[int, Any], Any]:
            index, (values, arrays) = jax.tree.unflatten(structure, xs[: len(shared)])
            args, kwargs = jax.tree.unflatten(self._batch.structure, xs[len(shared) :])
            state_here = _modules.fold_streams(values, self._streams, index), arrays
            result, new = _wrapped.run(self._body, self._graph, state_here, args, kwargs, self._synchronise)
            self._drawn = _modules.used_streams(self._streams, new)
            return new, result

        operands, row_dims = [*shared, *leaves], [*[None] * len(shared), *self._batch.axes]
        body, out_tree = traced = jax_api.trace(one, [jax_api.struct(x) for x in operands], {})
        run, differs = jax_api.jaxpr_as_fun(body), [True] * out_tree.num_leaves
        if self._check and not jax_api.holds(body.jaxpr, "io_callback"):  # which may differ for the same arguments
            axes = [0, *(None if at is None else 0 for at in row_dims[1:])]
            differs = jax_api.varying_results(body, axes, self._axis.size, self._axis.name)
        self._differs = jax.tree.unflatten(out_tree, differs)
        if self._check and self._rows.is_padded:
            run = self._uneven(one, traced, row_dims)
        return jax.tree.unflatten(out_tree, run(*operands))

    def _synchronise(self, modules: Any) -> None:
        for node in _modules.nodes(modules) if self._sync_norm else ():
            if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
                node.axis_name = self._axis.name

    def _uneven(self, one: Any, traced: Any, row_dims: Sequence[int | None]) -> Any:
        """Return the function of a share, of which the last has fewer rows or none: what fills it up leaves nothing."""
        (body, out_tree), share, size = traced, self._share, self._batch.size or 0
        rows = size % share or share + 1  # if no share is shorter, another number still tells what is rows
        avals = [
            a if at is None else a.update(shape=(*a.shape[:at], rows, *a.shape[at + 1 :]))
            for a, at in zip(body.in_avals, row_dims, strict=True)
        ]
        short, short_tree = jax_api.trace(one, avals, {})
        new, result = jax.tree.unflatten(out_tree, body.out_avals)
        kinds, shapes = pytrees.broadcast_prefix(self._reduce, result), [a.shape for a in body.out_avals]
        are_rows = {*kinds} <= {"concat"} and all(shape[:1] == (share,) for shape in shapes) and out_tree == short_tree
        are_rows &= [a.shape for a in short.out_avals] == [(rows, *shape[1:]) for shape in shapes]
        if new or not are_rows or self._axis.name in jax_api.free_axes(body.jaxpr):
            count = self._axis.size
            raise DataError(
                f"Parallel: {size} rows do not divide over {count} devices, and the function exchanges values, writes "
                f"a variable, or returns more than rows with reduce='concat'. Give a multiple of {count} rows, train "
                f"with px.train_step, or write check=False: copies of the last row fill the shares"
            )
        whole = jax_api.jaxpr_as_fun(body)

        def shorter(*xs: jax.Array) -> list[jax.Array]:
            pairs = zip(xs, row_dims, strict=True)
            rows_only = [x if at is None else jax.lax.slice_in_dim(x, 0, rows, axis=at) for x, at in pairs]
            return [arrays.repeat_last(y, share) for y in jax_api.jaxpr_as_fun(short)(*rows_only)]

        return whole if size % share == 0 else lambda i, *xs: jax.lax.cond(i == size // share, shorter, whole, i, *xs)

    def _reduced(self, result: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(result)
        kinds, differs = pytrees.broadcast_prefix(self._reduce, result), jax.tree.leaves(self._differs[1])
        results = []
        for (path, x), kind, differ in zip(leaves, kinds, differs, strict=True):
            if kind == "same" and differ and self._check:
                raise StateError(
                    f"Parallel: {pytrees.name('result', path)} is to be the same on all devices, but depends on the "
                    f"device's share; average it, px.pmean(x, {self._axis.name!r}), or write reduce='mean'"
                )
            y = _batches.combined(kind, x, self._axis, differs=differ)
            has_rows = kind == "concat" and x.shape[1:2] == (self._share,)
            results.append(arrays.unpad(y, self._rows) if has_rows else y)
        return jax.tree.unflatten(structure, results)
