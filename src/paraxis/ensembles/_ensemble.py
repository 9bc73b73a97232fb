"""An ensemble: members stacked along an axis. A step is a map over it, a prediction a map and a mean."""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import arrays, check, jax_api, placing, pytrees
from paraxis._core.record import Lowering
from paraxis._core.verbs import broadcast, map_fn
from paraxis._host import digests, processes
from paraxis._host.progress import Display
from paraxis.ensembles import _averages, _fit, _members
from paraxis.ensembles._members import Form, State
from paraxis.errors import DataError, StateError, axis_advice


@dataclasses.dataclass(repr=False, eq=False)
class Ensemble:
    """Members on the devices, made by :func:`ensemble`.

    ``ens[3]`` is an ordinary member, as ``make`` returned it, with its own arrays; ``ens[:3]``, ``ens[[0, 2]]`` and
    ``ens[ens.finite()]`` are ensembles of some of the members.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> ens = px.ensemble(lambda key: jax.random.normal(key, (2,)), 5, 0, apply=lambda w, x: x @ w)
        >>> loss = lambda w, x: jnp.mean((x @ (w - 1)) ** 2)
        >>> losses = ens.train(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), loss(w, x)), jnp.eye(2))
        >>> mean, variance = ens.predict(jnp.eye(2), average="moments")
        >>> losses.shape, mean.shape, ens[0].shape, len(ens.drop(1, 3))
        ((5,), (2,), (2,), 3)
    """

    _form: Form
    _members: State  # (num_padded, ...), in blocks over the devices; padding rows hold anything
    _placement: placing.Placement
    _apply: Callable[..., Any] | None
    _lowering: Lowering
    _donate: bool
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)

    @property
    def axis(self) -> placing.Axis:
        """The axis of the members, for ``px.keys(key, ens.axis)`` and the other verbs."""
        return self._placement.axis

    def __len__(self) -> int:
        return self.axis.size

    def __repr__(self) -> str:
        count = sum(x.size // len(x) for x in self._members.values())
        return f"Ensemble({len(self)} {self.axis.name} of {count:,} numbers, on {self._placement.num_devices} devices)"

    @property
    def state(self) -> dict[str, jax.Array]:
        """All arrays of the members by name, ``(size, ...)``; of random keys, their numbers.

        Save them by ``checkpoints.save(0, ens.state)``, and set them, on any devices, by ``ens.state =
        checkpoints.restore(ens.state).tree``: the same names, shapes and dtypes.

        Communicates: nothing if the sizes divide; else one all-gather per leaf.
        """
        with placing.without_context():
            return jax.tree.map(jnp.copy, self._cut(self._members))

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        if odd := sorted({*self._members} ^ {*state}):
            raise StateError(f"ensemble: the state is not like that of the members; they differ in {odd[0]}")
        rows = {name: jnp.asarray(state[name]) for name in self._members}
        _members.require_alike("ensemble: setting the state would change", self.state, rows)
        with placing.without_context():
            self._members = arrays.laid_out(rows, self._placement)

    def stacked(self) -> Any:
        """Return all members as one tree, with leaves ``(size, ...)``. Communicates: as :attr:`state`."""
        return self._form.member(self.state)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Return one member for an int, or an ensemble of some members for a slice, a sequence of ints or a mask."""
        rows = self._rows(chosen := self._chosen(index))
        # By way of the host, so that a member is bound to no device.
        return self._like(rows) if chosen.ndim else self._form.member(jax.device_put(jax.device_get(rows)))

    def drop(self, *indices: Any) -> "Ensemble":
        """Return an ensemble without the members of these indices or masks; this one does not change."""
        return self[np.setdiff1d(np.arange(len(self)), [n for x in indices for n in np.atleast_1d(self._chosen(x))])]

    def add(self, *members: Any) -> "Ensemble":
        """Return an ensemble with further members at the end, each as ``make`` returns it; this one does not change.

        Raises:
            StateError: if it has other variables, shapes, dtypes, functions or settings, which all members share.
        """
        rows = jax.device_get(self._rows(np.arange(len(self))))
        one = {name: x[0] for name, x in rows.items()}
        for number, member in enumerate(members):
            form, state = _members.split(member)
            _members.require_same_form(f"ensemble.add: members[{number}]", self._form, form)
            _members.require_alike(f"ensemble.add: members[{number}] would change", one, state)
            rows = {name: np.concatenate([rows[name], jax.device_get(state[name])[None]]) for name in rows}
        return self._like(rows)

    def train(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        """Take one step with each member.

        Args:
            step: for pytrees, ``step(*parts, *args)`` returns the new member, or ``(member, out)``; a tuple is passed
                as its parts. For modules, ``step(*modules, *args)`` changes them in place and returns ``out``. It is
                traced as by ``jax.jit``, so define it once.
            *args: pytrees of arrays; by default the same for all members, such as a batch.
            in_axes: 0 for arguments with a row per member, ``(size, ...)``: batches, rates, keys. One value for all
                arguments, or a tuple with a value (or a tree) for each.

        Returns:
            ``out`` with leaves ``(size, ...)``.

        Raises:
            StateError, DataError: of a step that returns another kind of member, or a malformed argument; none changes.

        Communicates: nothing. If the members do not divide, or lie over several processes, ``out`` is gathered.
        """
        with placing.without_context():
            return self._cut(self._advance(*self._prepared("train", step, Form.step, args, in_axes)))

    def lower(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        """Return the program of :meth:`train` for these arguments, as ``jax.jit(f).lower`` does."""
        return self._trace(step, *args, in_axes=in_axes).lower()

    def _trace(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        with placing.without_context():
            program, args = self._prepared("train", step, Form.step, args, in_axes)
            return program.trace(self._members, args)

    vars(train).update(trace=_trace, lower=lower)  # as of what jax.jit returns

    def fit(
        self,
        step: Callable[..., Any],
        data: tuple[Any, ...],
        *,
        batch_size: int,
        key: Any,
        epochs: int = 1,
        rows: Any = None,
        per_member: tuple[Any, ...] = (),
        evaluate: Callable[..., Any] | None = None,
        held_out: tuple[Any, ...] = (),
        stop_early: Any = None,
        checkpoint: Any = None,
        callbacks: Callable[[_fit.Epoch], Any] | None = None,
        progress: bool = True,
    ) -> _fit.History:
        """Train all members for some epochs, on data that is sent to the devices once.

        Each epoch shuffles the rows with the key and the epoch's number, cuts them into batches (rows left over are
        skipped) and calls ``step(*parts, *batch, *per_member)`` on each, as in :meth:`train`. If it is interrupted,
        members are as after the last complete step. With ``checkpoint``, the same command resumes a run that was
        killed from its last save, and ends with the same bits.

        Args:
            step: as in :meth:`train`. Besides the member it returns nothing, one array, the loss, or a dict of arrays.
            data: a tuple of pytrees of arrays ``(num_rows, ...)``.
            batch_size: rows of a step.
            key: one key, or an integer as seed, for the order of the rows.
            epochs: total number of epochs, including those before a resume, as in ``px.fit``.
            rows: row numbers ``(size, m)`` of each member, as for bagging. By default all see all, in the same order.
            per_member: further arguments of the step, pytrees of arrays ``(size, ...)``, such as learning rates.
            evaluate: ``evaluate(model, *held_out)`` → likewise, after each epoch, in ``eval()`` mode; its
                ``{"accuracy": …}`` is the metric ``"test/accuracy"``.
            held_out: further arguments of ``evaluate``; sent to the devices once.
            stop_early: a ``px.train.StopEarly``, for each member by itself; in the end each has its best state.
            checkpoint: a ``px.Checkpoints``; members are saved there after each epoch, or as its ``every=`` says.
            callbacks: a function that is called with an :class:`Epoch` after each, such as ``print``.
            progress: whether the first process shows a line that changes, as in ``px.fit``.

        Raises:
            DataError, StateError: if an argument is malformed, or the checkpoint another run's; as in :meth:`train`.

        Communicates: as :meth:`train`; a checkpoint as ``Checkpoints.save``.
        """
        rows, key = None if rows is None else np.asarray(rows), _members.one_key("ensemble.fit", key)
        count = _fit.num_rows(data, rows)
        check.count("ensemble.fit", "batch_size", batch_size, most=count, error=DataError)
        check.count("ensemble.fit", "epochs", epochs, error=DataError)
        check.has("ensemble.fit", "checkpoint", checkpoint, "restore", "px.Checkpoints('runs')")
        check.has("ensemble.fit", "stop_early", stop_early, "patience", "px.train.StopEarly('loss')")
        read = [] if checkpoint is None else [*map(digests.of_array, jax.tree.leaves((data, rows)))]
        run = {"data": read, "batch_size": batch_size, "key": np.ravel(_members.numbers(key)).tolist()}
        history, best, scanned = _fit.History(len(self), epochs, count // batch_size, stop_early), None, None
        prepared = functools.partial(
            self._prepared, "epoch", step, _fit.steps, in_axes=(None, 0, None if rows is None else 0, 0)
        )
        both = pytrees.arrays("ensemble.fit", "(data, held_out)", (data, held_out))
        data, held_out = arrays.device_put(both, arrays.sharding(self._placement, ()))
        with checkpoint or contextlib.nullcontext(), contextlib.closing(Display()) as display:
            if checkpoint is not None and checkpoint.latest is not None:
                names = ["members"] if stop_early is None else ["members", "best"]
                found = _fit.restored(checkpoint, run, dict.fromkeys(names, self.state), history)
                with placing.without_context():
                    self.state, best = found["members"], arrays.laid_out(found.get("best"), self._placement)
            while not history.is_over:
                order = _fit.order(key, np.int32(len(history.epochs)), count, batch_size, rows)
                active = None if stop_early is None else history.stopped < 0
                with placing.without_context():
                    orders = np.split(np.asarray(order), history.num_steps, -2)
                    if scanned is None:
                        program, args = prepared(args=(data, per_member, orders[0], active))
                        scanned = _fit.pays_to_scan(program, self._members, args)
                    given = [(data, per_member, one, active) for one in ([order] if scanned else orders)]
                    metrics = _fit.mean([self._advance(*prepared(args=args)) for args in given], len(self))
                if evaluate is not None:
                    metrics |= _fit.named(self.members(*held_out, apply=evaluate), "test/")
                improved = history.add(metrics)
                best = None if stop_early is None else _fit.where(improved, self._members, best)
                if checkpoint is not None and history.is_due(checkpoint):
                    tree = {"members": self._members} | ({} if best is None else {"best": best})
                    with placing.without_context():
                        checkpoint.save(history.epochs[-1].step, self._cut(tree), history.notes() | {"run": run})
                if progress and processes.is_first():
                    display.show(history.epochs[-1].__str__, len(history.epochs), epochs)
                if callbacks is not None:
                    callbacks(history.epochs[-1])
        self._members = self._members if best is None else best
        return history

    def predict(
        self,
        *inputs: Any,
        average: _averages.Average = "softmax",
        where: Any = None,
        apply: Any = None,
        in_axes: Any = None,
    ) -> Any:
        """Average the members' predictions on the devices; only the average leaves them.

        Args:
            *inputs: the model's inputs, the same for all members.
            average: what to average: ``"softmax"``, probabilities of logits ``(..., classes)``; ``"sigmoid"``, those
                of logits entry by entry; ``"mean"``, outputs; ``"moments"``, outputs, with their variance between
                members (``ddof=0``); ``"mixture"``, of models that return ``(mean, variance)``: mean and variance of
                the mixture of these normal distributions (Lakshminarayanan et al. 2017, arXiv 1612.01474).
            where: booleans ``(size,)``, such as ``ens.finite()``; members with ``False`` are left out, NaN or not.
            apply, in_axes: as in :func:`ensemble` and :meth:`train`, for this call.

        Returns:
            The average, ``(...)``, at least float32; two of them for ``"moments"`` and ``"mixture"``. Under ``jit``,
            it is that of the members with which the function was traced.

        Raises:
            DataError, StateError: if arguments are malformed, or it is not known how to apply the model.

        Communicates: one all-reduce the size of the result; two, one after the other, for two results.
        """
        check.one_of("ensemble.predict", "average", average, _averages.NAMES)
        with placing.without_context():
            program, args = self._prepared(average, apply or self._apply, Form.apply, inputs, in_axes)
            return program(self._members, args, np.asarray(where) if isinstance(where, (list, tuple)) else where)

    def members(self, *inputs: Any, apply: Any = None, in_axes: Any = None) -> Any:
        """Return every member's prediction, as the model returns it: leaves ``(size, ...)``. See :meth:`predict`.

        Communicates: nothing if the sizes divide and all devices are this process's; else they are gathered.
        """
        with placing.without_context():
            program, args = self._prepared("members", apply or self._apply, Form.apply, inputs, in_axes)
            return self._cut(program(self._members, args))

    def finite(self) -> np.ndarray:
        """Return which members are finite: booleans ``(size,)``, ``False`` for a member with any NaN or infinity."""
        floats = [x for x in self._members.values() if jnp.issubdtype(x.dtype, jnp.inexact)]
        with placing.without_context():
            found = [arrays.on_host(jnp.isfinite(x).reshape(len(x), -1).all(1))[: len(self)] for x in floats]
        return np.logical_and.reduce([np.ones(len(self), bool), *found])

    def _prepared(self, kind: str, fn: Any, one: Callable[..., Any], args: Any, in_axes: Any) -> tuple[Any, Any]:
        """Return the program of ``one(form, fn, state, args)`` for all members, and arguments that it takes.

        ``kind`` says what is done with the results. As by ``jax.jit``, a program is kept while its function lives.
        """
        fn = _members.called if fn is None else fn
        args, _ = pytrees.arguments("ensemble", args, {})
        leaves, structure = jax.tree.flatten(args)
        axes: list[Any] = ["of another structure"]
        with contextlib.suppress(ValueError, TypeError):
            axes = [None] * len(leaves) if in_axes is None else pytrees.broadcast_prefix(in_axes, args)
        if not {*axes} <= {0, None}:
            raise DataError(f"ensemble: in_axes must be 0 or None for each of {len(args)} arguments, got {in_axes}")
        own = tuple([entry == 0 for entry in axes])
        bound = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) and x.committed]
        meshes = {getattr(x.sharding, "mesh", None) for x in bound}
        if self._placement.spans_processes or meshes - {self._placement.mesh}:
            settled = [
                arrays.to_mesh(jnp.asarray(x), self._placement, rows=o) for x, o in zip(leaves, own, strict=True)
            ]
            args = jax.tree.unflatten(structure, settled)
        owner, method = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn, None)
        programs, key = self._programs, (id(owner), method, kind, own)
        if key not in programs or programs[key][0]() is not owner:
            try:
                alive = weakref.ref(owner, lambda _: programs.pop(key, None))
                held = weakref.WeakMethod(fn) if inspect.ismethod(fn) else alive
            except TypeError:  # with __slots__, it lives as long as the ensemble
                alive, held = (lambda: owner), (lambda: fn)
            programs[key] = alive, self._compiled(kind, held, one, own)
        return programs[key][1], args

    def _compiled(self, kind: str, held: Callable[[], Any], one: Callable[..., Any], own: tuple[bool, ...]) -> Any:
        """Return the jitted function; it does not keep the ensemble, nor the user's function, which is ``held``."""
        form, placement, lowering, average = self._form, self._placement, self._lowering, kind in _averages.NAMES

        def element(state: State, args: tuple[Any, ...]) -> Any:
            with axis_advice(f"ensemble: write the axis of the members, px.psum(x, {placement.axis.name!r})"):
                result = one(form, held(), state, args)
            return _averages.of_each(kind, result, args) if average else result

        def run(members: State, given: tuple[Any, ...], where: Any = None) -> Any:
            leaves, structure = jax.tree.flatten(given)
            leaves = [x if is_own else broadcast(x, placement.axis) for x, is_own in zip(leaves, own, strict=True)]
            args = arrays.unpadded(members, placement), jax.tree.unflatten(structure, leaves)
            rows = map_fn(element, args, placement.axis, lowering=lowering)
            return _averages.combined(kind, rows, placement.axis, where) if average else padded(rows, placement)

        donated = 0 if self._donate and kind in ("train", "epoch") else ()
        return jax.jit(run, out_shardings=None if average else arrays.sharding(placement), donate_argnums=donated)

    def _advance(self, program: Any, args: tuple[Any, ...]) -> Any:
        """Run a program that returns ``(members, out)``; keep the one, return the other."""
        # No interrupt between giving the memory away and having the new members.
        with processes.deferred_interrupt() if self._donate else contextlib.nullcontext():
            members, out = program(self._members, args)
            if isinstance(next(iter(members.values())), jax_api.Tracer):
                raise StateError(
                    "ensemble.train changes the members, so JAX cannot trace it; there, map the step: "
                    "px.map_fn(step, (ens.stacked(), …), ens.axis)"
                )
            self._members = members
        return out

    def _cut(self, rows: Any) -> Any:
        """Cut rows ``(num_padded, ...)`` to ``(size, ...)``; of several processes, each can read all of them."""
        rows = arrays.unpadded(rows, self._placement) if self._placement.is_padded else rows
        return arrays.gather_processes(rows) if self._placement.spans_processes else rows

    def _chosen(self, index: Any) -> np.ndarray:
        """Return the number of the member that an index is of, or those of some members."""
        is_empty = not np.size(index)  # NumPy takes an empty list for numbers with fractions
        chosen = np.arange(len(self))[index if isinstance(index, slice) else np.array(index, int if is_empty else None)]
        if chosen.ndim > 1:  # of True as well
            raise DataError(f"ensemble: {check.described(index)} is no index; write ens[1], ens[[0, 2]] or ens[mask]")
        return chosen

    def _rows(self, chosen: np.ndarray) -> State:
        """Return some members' arrays, ``(...)`` or with a row for each."""
        with placing.without_context():
            rows = self._cut(self._members)
            return {name: arrays.constrain(x, self._placement, rows=False)[chosen] for name, x in rows.items()}

    def _like(self, rows: State) -> "Ensemble":
        """Return an ensemble of the same form with other members, ``(size, ...)``."""
        size = len(next(iter(rows.values())))
        if not size:
            raise DataError("ensemble: no member would be left; give at least one index")
        with placing.without_context():
            placement = placing.place(dataclasses.replace(self.axis, size=size))
            return dataclasses.replace(self, _members=arrays.laid_out(rows, placement), _placement=placement)


def padded(rows: Any, placement: placing.Placement) -> Any:
    """``(size, ...)`` → ``(num_padded, ...)``; nothing is sent."""
    return jax.tree.map(lambda x: arrays.pad(x, placement, safe=False), rows)
