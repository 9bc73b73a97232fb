"""``Parallel``: the function of one device's share of a batch, run on all devices.

The function is traced once, inside a map over the devices. Before the trace becomes part of the program it shows which
results differ between devices, and, if rows have to be added, whether they meet the others.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._core import arrays, jax_api, layout, placing, tree, varying, verbs
from paraxis._core.axis import Axis
from paraxis.errors import ShapeError, StateError
from paraxis.transforms import _batches, _modules, _padding, _wrapped
from paraxis.transforms._jit import Compiled, State
from paraxis.transforms._modules import Graph
from paraxis.transforms._wrapped import Binding, Body

_R = TypeVar("_R", covariant=True)


class Parallel(Compiled[_R], Generic[_R]):
    """Split a batch over the devices, and run a compiled function of modules on each share.

    The axis is *mapped*: an element is a device's share of the rows, and sees the others only through collectives.
    Every device has all variables and its share: ``(rows, ...)`` becomes ``(rows / devices, ...)``. In the function,
    ``px.pmean(x, "device")`` and the other collectives, including those of ``jax.lax``, combine all devices. A value
    that the function writes must be the same on all devices, which is checked before anything runs, or have a rule.
    Each device has its own random streams, made from its number; the modules' streams advance once per call.

    Args:
        f: a function of modules and a share of each argument; or a module, or a method of one.
        *modules: as in :class:`Jit`.
        reduce: how to combine the devices' results, for every leaf: ``"concat"`` (along the first axis; scalars are
            stacked), ``"stack"`` (``(devices, ...)``), ``"first"``, ``"mean"``, ``"sum"``, ``"max"``, ``"min"``,
            ``"same"`` (checked to be equal), or a function of the stacked results. Or a tree of these that is a
            prefix of the result.
        batch_axis: for each argument after the modules, the axis to split, or ``None`` to pass it whole; or a tree of
            these that is a prefix of the argument. One integer applies to all arguments. Numbers, 0-d arrays and
            keyword arguments are always passed whole.
        axis_name: the name of the devices in collectives.
        static_argnums: as in :class:`Jit`.
        static_argnames: as in :class:`Jit`.
        sync: for a variable type (or a variable's name), how to combine the devices' values: ``"mean"`` (that of
            ``nnx.BatchStat``), ``"sum"``, ``"max"``, ``"min"``, ``"first"``, ``"stack"``, or a function of all of them,
            ``(devices, ...)``. A variable's own rule, ``nnx.Variable(x, sync="sum")``, takes precedence. Integers keep
            their dtype. Each device starts from the whole old value, so a ``"sum"`` counts it once per device.
        sync_batch_norm: whether the modules' ``nnx.BatchNorm`` layers that name no axis use the statistics of the whole
            batch, as on one device, instead of those of each device's share. A layer that takes statistics itself,
            such as ``x.mean(0)``, is not changed; write ``px.pmean(x.mean(0), "device")`` there.
        check: whether to require that values written without a rule are the same on all devices, and that padding of a
            batch that does not divide changes no result. Write ``False`` for functions that the checks misjudge.
        donate: as in :class:`Jit`.
        mesh: the devices, a ``jax.sharding.Mesh``; default: those of ``jax.set_mesh``, or all.
        over: the axis, or axes, of the mesh to split over; default: the one with the name ``axis_name``.

    Raises:
        StateError: as in :class:`Jit`; and when called, if a variable could be left with different values on different
            devices (a forgotten ``pmean``); the message names it.
        ShapeError: when called, if the sizes of the batch axes disagree; or if the rows do not divide over the
            devices and padding could change a result.
        AxisError: when called, if the mesh has no such axis.

    Communicates: what ``f`` does; one all-reduce for each variable that has a rule and was written, and for each
    result that is reduced. With several processes, each passes the whole batch, and results that lie over the devices
    of all processes are gathered, so that each process can read them.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net, x = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((96, 3))
        >>> px.Parallel(net)(x).shape
        (96, 4)
        >>> bool(jnp.allclose(px.Parallel(lambda net, x: net(x).mean(), net, reduce="mean")(x), net(x).mean()))
        True
    """

    _target: Any = None
    _placed: Sequence[Any] = ()

    def __init__(
        self,
        f: Callable[..., _R],
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
        super().__init__(f, modules, _run, static_argnums, static_argnames, donate)
        _batches.check_names("Parallel", sync or {}, self.binding().graph.names)
        axis = Axis(axis_name, 1, mesh=mesh, over=over)
        self._body.options = Options(reduce, batch_axis, dict(sync or {}), sync_batch_norm, check, axis)

    def _ready(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Bring to all devices what is not there yet: otherwise it would be sent at every call."""
        binding, program, values, args, kwargs = super()._ready(args, kwargs)
        placement = placing.place(self._body.options.axis)
        target = arrays.sharding(placement, rows=False)
        if target is None:
            return binding, program, values, args, kwargs
        arrays.ready(values)  # a loop of steps, each begun before the last one is done, could deadlock on CPU
        body, send = self._body, functools.partial(_sent, placement=placement)
        args = [x if p in body.static_positions else jax.tree.map(send, x) for p, x in enumerate(args)]
        kwargs = {n: x if n in body.static_names else jax.tree.map(send, x) for n, x in kwargs.items()}
        is_placed = len(values) == len(self._placed) and all(map(operator.is_, values, self._placed))
        if target != self._target or not is_placed:
            self._target, self._placed = target, []  # until the call has succeeded
            values = [arrays.settle(x, placement, rows=False) for x in values]
        return binding, program, values, args, kwargs

    def _finished(self, binding: Binding, values: Sequence[Any], new: dict[int, Any], result: Any) -> Any:
        if self._target is not None and not self._placed:
            # They stay there, unless this is a part of another program, whose values only it may use.
            new = {i: x for i, x in enumerate(values) if not isinstance(x, jax_api.Tracer)} | new
        result = super()._finished(binding, values, new, result)
        if self._target is None:
            return result
        self._placed = binding.graph.values()
        return arrays.whole(arrays.ready(result))  # calls of the same values would not wait for each other


def _run(
    body: Body, graph: Graph, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[int, Any]]:
    return Call(body, graph, args, kwargs).run(state)


class Options(NamedTuple):
    """The arguments of ``Parallel``. ``axis`` is that of the devices, its size still open."""

    reduce: Any
    batch_axis: _batches.Axes
    sync: _batches.Sync
    sync_batch_norm: bool
    check: bool
    axis: Axis


def _sent(x: Any, placement: placing.Placement) -> Any:
    """Bring an argument that is bound to another mesh to this one. One that is bound to none goes by itself."""
    if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or not x.committed:
        return x
    if x.ndim == 0:
        return arrays.settle(x, placement, rows=False)
    return arrays.settle(x, placement.holding(max(x.shape[0], 1)), rows=True)


class Call:
    """One call, while it is traced: its arguments split, and what its trace shows."""

    def __init__(self, body: Body, graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._body, self._graph, self._options = body, graph, body.options
        _wrapped.refuse_modules("Parallel", (args, kwargs))
        axes = self._options.batch_axis
        self._batch = batch = _batches.split("Parallel", axes, args, kwargs)
        if batch.size is None and axes is not None and any(map(jnp.ndim, jax.tree.leaves(kwargs))):
            raise ShapeError(
                "Parallel: no argument is split: those by keyword are given whole to every device. Give what is a "
                "batch by position; or write batch_axis=None if that is meant"
            )
        place = placing.place(self._options.axis)
        self._axis = place.holding(place.num_devices).axis
        self._rows = place.holding(batch.size or place.num_devices)  # no padding where nothing is split

    def run(self, state: State) -> tuple[Any, dict[int, Any]]:
        """Return the result, and new values of variables by their number."""
        values, arrays = state
        self._streams = _modules.streams(self._graph, values)
        keys = _modules.element_keys(values, self._streams, self._axis.size)
        drawn = {number for stream in self._streams for number in stream}
        shared = [None if i in drawn else x for i, x in enumerate(values)], arrays
        leaves = [
            verbs.broadcast(x, self._axis) if at is None else self._shares(x, at)
            for x, at in zip(self._batch.leaves, self._batch.axes, strict=True)
        ]
        operands = (verbs.broadcast(shared, self._axis), keys, leaves)
        stacked, result = verbs.map_sealed(self._on_device, operands, self._axis)
        new = {i: self._combined(i, x) for i, x in stacked.items()}
        return self._reduced(result), new | _modules.advanced(values, self._drawn)

    def _shares(self, x: Any, at: int) -> jax.Array:
        """``(..., rows, ...)`` → ``(devices, ..., share, ...)``; padded."""
        x = layout.repeat_last(jnp.moveaxis(jnp.asarray(x), at, 0), self._rows.num_padded)
        return jnp.moveaxis(x.reshape(self._axis.size, self._rows.num_local, *x.shape[1:]), 1, at + 1)

    # --- on a device ---------------------------------------------------------------------------------------------

    def _on_device(self, *operands: Any) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        own = len(operands[1]) + len(operands[2])  # of each device: keys and arguments

        def one(*leaves: Any) -> Any:
            return self._traced(*jax.tree.unflatten(structure, leaves))

        avals = [jax_api.struct(x) for x in leaves]
        body, out_tree = traced = jax_api.trace(one, avals, {})
        differs = [True] * out_tree.num_leaves
        if self._options.check:
            row_dims = [*[None] * (len(leaves) - len(self._batch.axes)), *self._batch.axes]
            share, reduce = self._rows.num_local, self._options.reduce
            harm = _padding.harm(one, traced, avals, row_dims, share, reduce) if self._rows.is_padded else None
            if harm is not None:
                raise ShapeError(
                    f"Parallel: {self._batch.size} rows do not divide over {self._axis.size} devices, and padding the "
                    f"last shares could change the answer: {harm}. Give a multiple of {self._axis.size} rows; or "
                    f"return one value per row and reduce outside; or train with px.train_step, which takes any "
                    f"number; or write check=False if padding does no harm"
                )
            if not jax_api.is_impure(body.jaxpr):  # else it asks the outside world
                axes = [None] * (len(leaves) - own) + [0] * len(operands[1])
                axes += [None if at is None else 0 for at in self._batch.axes]
                differs = varying.batched(body, axes, self._axis.size, self._axis.name, {})
        self._differs = jax.tree.unflatten(out_tree, differs)
        if self._options.check:
            self._require_agreement()
        return jax.tree.unflatten(out_tree, jax_api.jaxpr_as_fun(body)(*leaves))

    def _traced(self, shared: Any, keys: Any, leaves: Any) -> tuple[dict[int, Any], Any]:
        values, arrays = shared
        args, kwargs = jax.tree.unflatten(self._batch.structure, leaves)
        state = (_modules.with_keys(values, self._streams, keys), arrays)
        result, new = _wrapped.run("Parallel", self._body.fn, self._graph, state, args, kwargs, self._synchronise)
        self._drawn = _modules.drawn(self._streams, new)
        return new, result

    def _synchronise(self, modules: Any) -> None:
        """Let the run's own BatchNorm layers that name no axis take their statistics over the devices."""
        for node in _modules.nodes(modules) if self._options.sync_batch_norm else ():
            if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
                node.axis_name = self._axis.name

    def _require_agreement(self) -> None:
        new, _ = self._differs
        for i, flags in new.items():
            if self._rule(i) is None and any(jax.tree.leaves(flags)):
                kind, name, axis = type(self._graph.variables[i]), self._graph.names[i], self._axis.name
                written = f"{'nnx.' * kind.__module__.startswith('flax.')}{kind.__name__}"
                raise StateError(
                    f"Parallel: variable {name} could be left with different values on different devices: what is "
                    f"written to it depends on the device's share. Is a mean forgotten? Write opt(lr, px.pmean(g, "
                    f"{axis!r})) for gradients; or give a rule, sync={{{written}: 'mean'}}; or write check=False if "
                    f"the values are the same anyway"
                )

    # --- after the map -------------------------------------------------------------------------------------------

    def _rule(self, number: int) -> _batches.Rule | None:
        return _batches.rule_of(self._graph, number, self._options.sync)

    def _combined(self, number: int, stacked: Any) -> Any:
        rule = self._rule(number)

        def one(x: jax.Array, differs: bool) -> Any:
            if rule is None or (rule in ("mean", "first", "max", "min") and not differs):
                return layout.agreed(x, self._axis)
            x = layout.gathered(x, self._axis) if rule == "first" or callable(rule) else x
            return _batches.combined(rule, x, _batches.over(self._axis))

        return jax.tree.map(one, stacked, self._differs[0][number])

    def _reduced(self, result: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(result)
        kinds, differs = tree.entries(self._options.reduce, result), jax.tree.leaves(self._differs[1])
        made = []
        for (path, x), kind, differ in zip(leaves, kinds, differs, strict=True):
            if kind == "same" and differ and self._options.check:
                raise StateError(
                    f"Parallel: {tree.name('result', path)} is to be the same on all devices (reduce='same'), but "
                    f"depends on the device's share; average it, px.pmean(x, {self._axis.name!r}), or reduce it: "
                    f"reduce='mean'"
                )
            y = _batches.reduced(kind, x, self._axis, differs=differ)
            has_rows = kind == "concat" and x.shape[1:2] == (self._rows.num_local,)
            made.append(layout.unpad(y, self._rows) if has_rows else y)
        return jax.tree.unflatten(structure, made)
