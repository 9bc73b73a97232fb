"""``Parallel``: the function of one device's share of a batch, run on all devices."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from paraxis._axes import arrays, placing
from paraxis._axes.axis import Axis
from paraxis._jax import jax_api
from paraxis.errors import AxisError
from paraxis.transforms import _batches, _reduce
from paraxis.transforms._binding import Binding, Structure
from paraxis.transforms._compiled import Compiled, State
from paraxis.transforms._shares import Call, Options
from paraxis.transforms._wrapped import Body

_R = TypeVar("_R", covariant=True)


class Parallel(Compiled[_R], Generic[_R]):
    """Split a batch over the devices, and run a compiled function of modules on each share.

    The axis is *mapped*: an element is a device's share of the rows, and sees the others only through collectives.

    Every device has all variables and its share of the rows: ``(rows, ...)`` becomes ``(rows / devices, ...)``. In
    the function, ``px.pmean(x, "device")`` and the other collectives, including those of ``jax.lax``, combine all
    devices. You need not replicate anything. A value that the function writes must be the same on all devices, which
    is checked before anything runs, or have a rule (``sync``).

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
        sync: for a variable type (or a variable's name), how to combine the devices' values: ``"mean"``, ``"sum"``,
            ``"max"``, ``"min"``, ``"first"``, ``"stack"``, or a function of all of them, ``(devices, ...)``.
            Integers and booleans keep their dtype. A variable's own rule, ``nnx.Variable(x, sync="sum")``, takes
            precedence. ``nnx.BatchStat``: the mean. Each device starts from the whole old
            value: a ``"sum"`` of running totals counts it once per device, and ``"stack"`` adds an axis at each call.
        sync_batch_norm: whether the modules' ``nnx.BatchNorm`` layers that name no axis use the statistics of the whole
            batch, as on one device, instead of those of each device's share. A layer of yours that takes statistics
            itself, such as ``x.mean(0)``, is not changed; write ``px.pmean(x.mean(0), "device")`` there.
        check: whether to require that values written without a rule are the same on all devices, and that padding of a
            batch that does not divide changes no result. Write ``False`` for functions that the checks misjudge.
        donate: as in :class:`Jit`.
        mesh: the devices, a ``jax.sharding.Mesh``; default: those of ``jax.set_mesh``, or all.
        over: the axis, or axes, of the mesh to split over; default: the one with the name ``axis_name``.

    Raises:
        StateError: as in :class:`Jit`; and when called, if a variable could be left with different values on different
            devices (a forgotten ``pmean``); the message names it.
        ShapeError: when called, if the sizes of the batch axes disagree; or if the rows do not divide over the
            devices and padding would change a result that does not have one value per row.
        AxisError: when called, if the mesh has no such axis.

    Each device has its own random streams, made from the device's number; the modules' streams advance once per call
    if the function draws from them. The random numbers depend on how many devices there are.

    Communicates: what ``f`` does; one all-reduce for each variable that has a rule and was written, and for each
    result that is reduced. With several processes, each passes the whole batch, and results that lie over the devices
    of all processes are gathered, so that each process can read them.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((96, 3))
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
        sync: _reduce.Sync | None = None,
        sync_batch_norm: bool = False,
        check: bool = True,
        donate: bool = False,
        mesh: Any = None,
        over: str | tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(f, modules, static_argnums, static_argnames, donate)
        _reduce.check_kinds("Parallel", reduce)
        self._body.options = Options(
            reduce=reduce,
            batch_axis=batch_axis,
            sync=_reduce.check_sync("Parallel", sync, self.binding().names),
            sync_batch_norm=sync_batch_norm,
            check=check,
            place=Axis(axis_name, 1, mesh=mesh, over=over),
        )

    @staticmethod
    def _run(
        body: Body, structure: Structure, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Any], Any]:
        return Call(body, structure, args, kwargs).run(state)

    def _ready(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Bring to all devices what is not there yet: otherwise it would be sent at every call."""
        binding, program, values, args, kwargs = super()._ready(args, kwargs)
        placement = self._placement()
        target = arrays.sharding(placement, rows=False)
        if target is None:
            return binding, program, values, args, kwargs
        arrays.ready(values)  # a loop of steps, each begun before the last one is done, could deadlock on CPU
        static, send = self._body.static, functools.partial(_sent, placement=placement)
        args = [x if p in static.positions else jax.tree.map(send, x) for p, x in enumerate(args)]
        kwargs = {n: x if n in static.names else jax.tree.map(send, x) for n, x in kwargs.items()}
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
        self._placed = binding.values()
        if self._target is None:
            return result
        return arrays.whole(arrays.ready(result))  # calls of the same values would not wait for each other

    def _placement(self) -> placing.Placement:
        try:
            return placing.place(self._body.options.place)
        except AxisError as error:
            raise AxisError(
                f"Parallel: {error}. For Parallel: px.Parallel(f, net, over=…) with the name of a mesh axis"
            ) from error


def _sent(x: Any, placement: placing.Placement) -> Any:
    """Bring an argument that is bound to another mesh to this one. One that is bound to none goes by itself."""
    if not isinstance(x, jax.Array) or isinstance(x, jax_api.Tracer) or not x.committed:
        return x
    if x.ndim == 0:
        return arrays.settle(x, placement, rows=False)
    return arrays.settle(x, placement.holding(max(x.shape[0], 1)), rows=True)
