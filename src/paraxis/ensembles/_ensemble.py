"""An ensemble: members stacked along an axis. A step is a map over it, a prediction a map and a mean."""

import contextlib
import dataclasses
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
from paraxis._host import processes
from paraxis.ensembles import _averages, _members, _training
from paraxis.ensembles._members import Form, State
from paraxis.errors import DataError, StateError, axis_advice
from paraxis.train import Fitted, fit, loader
from paraxis.train._sources import noted


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

    @property
    def step(self) -> int | None:
        """The most steps that a member has done; ``None`` of members without a ``step``, such as parameters."""
        steps = getattr(self.stacked(), "step", None)
        return None if steps is None or callable(steps) else int(np.max(steps))

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
        here, args = self._here(args)
        with placing.without_context():
            program, args = here._prepared("train", step, Form.step, args, in_axes)
            return program.trace(here._members, args)

    vars(train).update(trace=_trace, lower=lower)  # as of what jax.jit returns

    def fit(
        self, step: Callable[..., Any], data: Any, *, batch_size: int | None = None, seed: int = 0, **words: Any
    ) -> Fitted["Ensemble"]:
        """Train all members, each as ``px.fit`` trains it alone: the same batches and loop.

        Metrics have a value for each member, ``(size,)``; one that is not finite ends nothing. Arrays in memory, of at
        most 1 GiB, are sent to the devices once; an epoch within which nothing is due is then one program, unless its
        steps are slow on CPU.

        Args:
            step: a ``px.train_step``, of members that are train states; or as in :meth:`train`, called with a batch,
                or with the parts of one that is a tuple. Besides the member it returns nothing, the loss, or a dict of
                numbers.
            data: as for ``px.fit``; of a loader with ``rows=`` ``(size, m)``, each member has its own rows. Of a key,
                member ``i`` has what ``px.keys(key, ens.axis)[i]`` gives it in ``px.fit``.
            batch_size, seed: in place of a loader, for a tree of arrays: ``px.loader(data, batch_size, seed=seed)``.
            **words: those of ``px.fit``: ``epochs`` or ``steps``, ``checkpoint``, ``log``, ``callbacks`` and so on. The
                step of ``evaluate=px.Evaluate(step, data)`` is a ``px.eval_step``, or a function of the model, in
                ``eval()`` mode, or of a ``px.TrainState``, and a batch. By ``stop_early``, each member stops by
                itself, and has its best state in the end.

        Returns:
            A ``px.train.Fitted``, whose ``state`` is this ensemble, and ``last`` one of the last states.

        Raises:
            DataError, StateError: as ``px.fit`` and :meth:`train` do.

        Communicates: as :meth:`train`; a checkpoint as ``Checkpoints.save``.

        Example:
            >>> import jax, jax.numpy as jnp, optax, paraxis as px
            >>> make = lambda key: px.TrainState.create({"w": jax.random.normal(key, (3,))}, optax.sgd(0.1))
            >>> ens, step = px.ensemble(make, 5, 0), px.train_step(lambda params, x: (x @ params["w"] - 1) ** 2)
            >>> fitted = ens.fit(step, jnp.ones((40, 3)), batch_size=10, epochs=5, progress=False)
            >>> steps, losses = fitted.history.curve("loss")
            >>> losses.shape, int(ens[3].step)
            ((20, 5), 20)
        """
        members: Any = _training.Members(self, step)
        return fit(members, step, data if batch_size is None else loader(data, batch_size, seed=seed), **words)

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
                the mixture of these normal distributions (Lakshminarayanan et al. 2017, arXiv 1612.01474). Or a
                function of your own, ``average(outputs, axis, where)``, of placed outputs ``(size, ...)``.
            where: booleans ``(size,)``, such as ``ens.finite()``; members with ``False`` are left out, NaN or not.
            apply, in_axes: as in :func:`ensemble` and :meth:`train`, for this call.

        Returns:
            The average, ``(...)``, at least float32; two of them for ``"moments"`` and ``"mixture"``. Under ``jit``,
            it is that of the members with which the function was traced.

        Raises:
            DataError, StateError: if arguments are malformed, or it is not known how to apply the model.

        Communicates: one all-reduce the size of the result; two, one after the other, for two results.
        """
        with placing.without_context():
            program, *call = self._prediction(*inputs, average=average, where=where, apply=apply, in_axes=in_axes)
            return program(*call)

    def _prediction(
        self, *inputs: Any, average: Any = "softmax", where: Any = None, apply: Any = None, in_axes: Any = None
    ) -> tuple[Any, ...]:
        """Return the program of :meth:`predict`, and what it is called with."""
        if not callable(average):
            check.one_of("ensemble.predict", "average", average, _averages.NAMES)
        program, args = self._prepared(average, apply or self._apply, Form.apply, inputs, in_axes)
        return program, self._members, args, np.asarray(where) if isinstance(where, (list, tuple)) else where

    def _trace_prediction(self, *inputs: Any, **words: Any) -> Any:
        here, inputs = self._here(inputs)
        with placing.without_context():
            program, *call = here._prediction(*inputs, **words)
            return program.trace(*call)

    vars(predict).update(trace=_trace_prediction)

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
            are_finite = [arrays.on_host(jnp.isfinite(x).reshape(len(x), -1).all(1))[: len(self)] for x in floats]
        return np.logical_and.reduce([np.ones(len(self), bool), *are_finite])

    def _here(self, args: Any) -> tuple["Ensemble", Any]:
        """Return an ensemble of shapes as it lies here and now, and the shapes of arguments; any other as they are."""
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in self._members.values()):
            return self, args
        placement = placing.place(placing.settled(self.axis))
        rows = lambda x: jax.ShapeDtypeStruct((placement.num_padded, *x.shape[1:]), x.dtype, sharding=side)  # noqa: E731
        side = arrays.sharding(placement)
        here = dataclasses.replace(self, _members=jax.tree.map(rows, self._members), _placement=placement)
        return here, jax.eval_shape(lambda *args: args, *args)

    def _prepared(self, kind: Any, fn: Any, one: Callable[..., Any], args: Any, in_axes: Any) -> tuple[Any, Any]:
        """Return the program of ``one(form, fn, state, args)`` for all members, and arguments that it takes.

        ``kind`` says what is done with the results. As by ``jax.jit``, a program is kept while its function lives.
        """
        fn = _members.called if fn is None else fn
        args, _ = pytrees.arguments("ensemble", args, {})
        leaves, structure = jax.tree.flatten(args)
        axes = pytrees.broadcast_prefix(in_axes, args)
        if not {*axes} <= {0, None}:
            raise DataError(f"ensemble: in_axes must be 0 or None for each of {len(args)} arguments, got {in_axes}")
        mapped = tuple([entry == 0 for entry in axes])
        bound = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer) and x.committed]
        meshes = {getattr(x.sharding, "mesh", None) for x in bound}
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        if not is_abstract and (self._placement.spans_processes or meshes - {self._placement.mesh}):
            pairs = zip(leaves, mapped, strict=True)
            args = structure.unflatten([arrays.to_mesh(jnp.asarray(x), self._placement, rows=o) for x, o in pairs])
        owner, method = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn, None)
        programs, key = self._programs, (id(owner), method, kind, mapped)
        if key not in programs or programs[key][0]() is not owner:
            try:
                alive = weakref.ref(owner, lambda _: programs.pop(key, None))
                held = weakref.WeakMethod(fn) if inspect.ismethod(fn) else alive
            except TypeError:  # with __slots__, it lives as long as the ensemble
                alive, held = (lambda: owner), (lambda: fn)
            programs[key] = alive, self._compiled(kind, held, one, mapped)
        return programs[key][1], args

    def _compiled(self, kind: Any, held: Callable[[], Any], one: Callable[..., Any], mapped: tuple[bool, ...]) -> Any:
        """Return the jitted function; it does not keep the ensemble, nor the user's function, which is ``held``."""
        form, placement, lowering = self._form, self._placement, self._lowering
        average = callable(kind) or kind in _averages.NAMES

        def element(state: State, args: tuple[Any, ...]) -> Any:
            with axis_advice(f"ensemble: write the axis of the members, px.psum(x, {placement.axis.name!r})"):
                result = one(form, held(), state, args)
            return _averages.of_each(kind, result, args) if average else result

        def run(members: State, operands: tuple[Any, ...], where: Any = None) -> Any:
            leaves, structure = jax.tree.flatten(operands)
            leaves = [x if m else broadcast(x, placement.axis) for x, m in zip(leaves, mapped, strict=True)]
            args = arrays.unpadded(members, placement), jax.tree.unflatten(structure, leaves)
            rows = map_fn(element, args, placement.axis, lowering=lowering)
            return _averages.combined(kind, rows, placement.axis, where) if average else padded(rows, placement)

        donated = 0 if self._donate and kind in ("train", "fit") else ()
        return jax.jit(run, out_shardings=None if average else arrays.sharding(placement), donate_argnums=donated)

    def _advance(self, program: Any, args: tuple[Any, ...]) -> Any:
        """Run a program that returns ``(members, out)``; keep the one, return the other."""
        # No interrupt between giving the memory away and having the new members.
        interrupts = processes.deferred_interrupt() if self._donate else contextlib.nullcontext()
        note = "a rate given to make: write optax.inject_hyperparams(optax.adam)(learning_rate=rate)"
        with interrupts, noted(note, of=jax.errors.UnexpectedTracerError):
            members, out = program(self._members, args)
            if isinstance(next(iter(members.values())), jax_api.Tracer):
                raise StateError("ens.train changes members, so JAX cannot trace it; write px.map_fn of ens.stacked()")
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
        with placing.without_context():
            placement = placing.place(dataclasses.replace(self.axis, size=size))
            return dataclasses.replace(self, _members=arrays.laid_out(rows, placement), _placement=placement)


def padded(rows: Any, placement: placing.Placement) -> Any:
    """``(size, ...)`` → ``(num_padded, ...)``; nothing is sent."""
    return jax.tree.map(lambda x: arrays.pad(x, placement, safe=False), rows)
