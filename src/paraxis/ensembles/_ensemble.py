"""An ensemble: members stacked along an axis. A step is a map over it, a prediction a map and a mean."""

import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._axes import arrays, layout, placing
from paraxis._axes.axis import Axis
from paraxis._axes.placing import Placement
from paraxis._calls import check, pytrees
from paraxis._core import random
from paraxis._core.lowerings import Lowering
from paraxis._core.verbs import broadcast, map_fn
from paraxis._host import interrupts, processes
from paraxis._jax import cost, jax_api
from paraxis.ensembles import _averages, _epochs, _files, _members
from paraxis.ensembles._averages import Average
from paraxis.ensembles._epochs import Epoch, History
from paraxis.ensembles._members import Form, State
from paraxis.errors import ShapeError, StateError


def ensemble(
    make: Callable[..., Any],
    size: int,
    key: Any,
    *args: Any,
    apply: Callable[..., Any] | None = None,
    mesh: Any = None,
    over: str | tuple[str, ...] | None = None,
    at_once: int | None = None,
    lowering: Lowering = "auto",
    donate: bool = True,
    name: str = "members",
) -> "Ensemble":
    """Make an ensemble of any size on any number of devices from a function that makes one member.

    A member is what ``make`` returns: parameters, a Linen ``TrainState``, an NNX module, a callable pytree such as an
    Equinox module, or a tuple such as ``(net, opt)`` or ``(params, opt_state)``, whose first part is the model.
    Functions of a member, such as a training step, take its parts as their first arguments. The key of a member depends
    only on ``key`` and the member's index, so neither devices nor the number of members change it.

    Args:
        make: ``make(key, *args)`` → a member.
        size: number of members, at least 1.
        key: one key, or an integer as seed. Of hardware generators (``rbg``), many keys at once draw other numbers than
            each alone, so they are refused.
        *args: further arguments of ``make``, arrays ``(size, ...)`` with one row per member, such as learning rates.
        apply: ``apply(model, *inputs)`` → the model's output. By default, an NNX module is called in ``eval()`` mode,
            a train state's ``apply_fn`` is applied to its ``params``, and a callable pytree is called. Layers of
            Equinox are in inference mode, and take one row: ``apply=lambda model, x: jax.vmap(model)(x)``.
        mesh, over, at_once: where the members lie, and how many per device are in flight, as for :class:`Axis`.
        lowering: how a device runs its members, as in :func:`map_fn`.
        donate: whether a step may overwrite the old state, which saves as much memory as the state takes.
        name: what the members are called, in the plural: the name of the axis, for collectives between members.

    Raises:
        StateError: if ``make`` returns no member, or ignores its key, so that all members would be the same.
        AxisError, ShapeError: if the axis, ``key`` or ``args`` are malformed.

    Communicates: nothing.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> make = lambda key: {"w": jax.random.normal(key, (4, 3))}
        >>> ens = px.ensemble(make, 7, 0, apply=lambda params, x: x @ params["w"])
        >>> ens.predict(jnp.ones((5, 4))).shape, ens.members(jnp.ones((5, 4))).shape
        ((5, 3), (7, 5, 3))
    """
    _check_make(make)
    axis = placing.settled(Axis(name, size, mesh=mesh, over=over, at_once=at_once))
    keys, forms = random.keys(_key("ensemble", key), axis), []

    def one(key: jax.Array, *args: Any) -> State:
        form, state = _members.split(make(key, *args))
        forms.append(form)
        return state

    with placing.without_context():
        placement = placing.place(axis)
        make_all = lambda keys, args: _padded(map_fn(one, (keys, *args), axis, lowering="vmap"), placement)  # noqa: E731
        made = jax.jit(make_all, out_shardings=arrays.block_sharding(placement))
        traced = made.trace(keys, args)
        read = [*traced.jaxpr.jaxpr.outvars, *(v for eqn in traced.jaxpr.jaxpr.eqns for v in eqn.invars)]
        if axis.size > 1 and not args and not any(v is traced.jaxpr.jaxpr.invars[0] for v in read):
            raise StateError(
                "ensemble: make does not use its key, so all members would be the same; draw from it, or, if they are "
                f"to begin alike, say so: px.ensemble(lambda key, number: …, {size}, key, jnp.arange({size}))"
            )
        state = traced.lower().compile()(keys, args)
    return Ensemble(forms[0], state, placement, apply, lowering, donate)


@dataclasses.dataclass(repr=False, eq=False)
class Ensemble:
    """Members on the devices, made by :func:`ensemble` or :func:`load_ensemble`.

    ``len(ens)`` is the number of members. ``ens[3]`` is an ordinary member, as ``make`` returned it, with its own
    arrays; ``ens[:3]``, ``ens[[0, 2]]`` and ``ens[ens.finite()]`` are ensembles of some of the members.

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
    _placement: Placement
    _apply: Callable[..., Any] | None
    _lowering: Lowering
    _donate: bool
    _programs: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary, init=False)

    @property
    def axis(self) -> Axis:
        """The axis of the members, for ``px.keys(key, ens.axis)`` and the other verbs."""
        return self._placement.axis

    def __len__(self) -> int:
        return self.axis.size

    def __repr__(self) -> str:
        count = sum(math.prod(x.shape[1:]) for x in self._members.values())
        return f"Ensemble({len(self)} {self.axis.name} of {count:,} numbers, on {self._placement.num_devices} devices)"

    def stacked(self) -> Any:
        """Return all members as one tree, with leaves ``(size, ...)``, for ``px.map_fn`` and ``jax.vmap``.

        Communicates: nothing if the sizes divide; else one all-gather per leaf.
        """
        with placing.without_context():
            return self._form.member(jax.tree.map(jnp.copy, self._cut(self._members)))

    def __getitem__(self, index: Any) -> Any:
        """Return one member for an int, or an ensemble of some members for a slice, a sequence of ints or a mask."""
        chosen = np.arange(len(self))[np.asarray(index) if isinstance(index, jax.Array) else index]
        rows = self._rows(chosen)
        return self._like(rows) if chosen.ndim else self._form.member(arrays.unbound(rows))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def drop(self, *indices: Any) -> "Ensemble":
        """Return an ensemble without the members of these indices or masks; this one does not change."""
        everyone = np.arange(len(self))
        gone = [number for index in indices for number in np.atleast_1d(everyone[np.asarray(index)])]
        return self[np.setdiff1d(everyone, gone)]

    def add(self, *members: Any) -> "Ensemble":
        """Return an ensemble with further members at the end, each as ``make`` returns it; this one does not change.

        Raises:
            StateError: if a new member has other variables, shapes or dtypes, or other functions and settings, such as
                an activation: all members share those.
        """
        rows = self._rows(np.arange(len(self)))
        one = jax.tree.map(lambda x: x[0], rows)
        for number, member in enumerate(members):
            form, state = _members.split(member)
            _members.require_same_form(f"ensemble.add: members[{number}]", self._form, form)
            _members.require_alike(f"ensemble.add: members[{number}] would change", one, state)
            rows = {name: jnp.concatenate([rows[name], arrays.unbound(state[name])[None]]) for name in rows}
        return self._like(rows)

    def train(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        """Take one step with each member.

        Args:
            step: for pytrees, ``step(*parts, *args)`` returns the new member, or ``(member, out)``; a member that is a
                tuple is passed as its parts and returned as a tuple. For modules, ``step(*modules, *args)`` changes
                them in place and returns ``out``. As by ``jax.jit``, it is traced once for each function and shapes, so
                define it once. It may use collectives with the axis's name.
            *args: pytrees of arrays; by default the same for all members, such as a batch.
            in_axes: 0 for arguments with a row per member, ``(size, ...)``: batches, rates, keys. One value for all
                arguments, or a tuple with a value (or a tree) for each.

        Returns:
            ``out`` with leaves ``(size, ...)``.

        Raises:
            StateError, ShapeError: if the step does not return a member like the one that it was given, or an argument
                is malformed; the members are unchanged.

        Communicates: nothing. If the members do not divide evenly, or lie over several processes, ``out`` is gathered.
        """
        with placing.without_context():
            return self._cut(self._advance(*self._prepared("train", step, Form.step, args, in_axes)))

    def lower(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        """Return the program of :meth:`train` for these arguments, as ``jax.jit(f).lower`` does, without running it."""
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
        first_epoch: int = 0,
        rows: Any = None,
        per_member: tuple[Any, ...] = (),
        own_order: bool = False,
        evaluate: Callable[..., Mapping[str, Any]] | None = None,
        held_out: tuple[Any, ...] = (),
        stop_early: Any = None,
        progress: Callable[[Epoch], Any] | None = None,
    ) -> History:
        """Train all members for some epochs, on data that is sent to the devices once.

        Each epoch shuffles the rows with the key and the epoch's number, cuts them into batches (rows left over are
        skipped) and calls the step on each batch: ``step(*parts, *batch, *per_member)``, as in
        :meth:`train`. A whole epoch is one program, but on CPU, where a loop on the devices runs on one thread, if the
        step has a convolution or much work. If it is interrupted, members are as after the last complete step.

        Args:
            step: as in :meth:`train`.
            data: a tuple of pytrees of arrays ``(num_rows, ...)``.
            batch_size: rows of a step.
            key: one key, or an integer as seed, for the order of the rows.
            epochs: total number of epochs, including those before ``first_epoch``.
            first_epoch: number of the first epoch. With the same key, a call continues where another ended.
            rows: row numbers ``(size, m)`` of each member. For bagging:
                ``np.random.default_rng(0).integers(0, num_rows, (size, num_rows))``.
            per_member: further arguments of the step, pytrees of arrays ``(size, ...)``, such as learning rates.
            own_order: whether each member visits its rows in its own order.
            evaluate: ``evaluate(model, *held_out)`` → a dict of numbers, such as ``{"loss": …}``, after each epoch, in
                ``eval()`` mode.
            held_out: further arguments of ``evaluate``; sent to the devices once.
            stop_early: a rule, ``px.train.StopEarly("accuracy", patience=3, mode="max")``, with a metric of
                ``evaluate``. It stops each member by itself, and in the end every member has its best state.
            progress: a function that is called with an :class:`Epoch` after each, such as ``print``.

        Returns:
            A :class:`History`.

        Raises:
            ShapeError, StateError: if an argument is malformed, or as in :meth:`train`.

        Communicates: as :meth:`train`.
        """
        size, key = len(self), _key("ensemble.fit", key)
        rows = None if rows is None else np.asarray(rows)
        num_rows = _epochs.num_rows(size, data, batch_size, rows)
        check.count("ensemble.fit", "first_epoch", first_epoch, least=0, error=ShapeError)
        check.count("ensemble.fit", "epochs", epochs, least=first_epoch + 1, error=ShapeError)
        if stop_early is not None and not (evaluate and hasattr(stop_early, "patience")):
            raise ShapeError("ensemble.fit: stop_early is a rule for a metric of evaluate: px.train.StopEarly('loss')")
        check.no_cut("ensemble.fit", "data", data)
        data, held_out = arrays.everywhere(jax.tree.map(jnp.asarray, (data, held_out)), self._placement)
        axes = (None, 0, None if rows is None and not own_order else 0, 0)
        active, least = np.ones(size, bool), np.full(size, np.inf)
        best_epoch, stopped = np.full(size, -1), np.full(size, -1)
        best: State | None = None
        scanned: bool | None = None
        outputs, metrics = [], []
        for number in range(first_epoch, epochs):
            order = _epochs.order(key, np.int32(number), num_rows, batch_size, size if own_order else None, rows)
            given = (data, per_member, order, None if stop_early is None else active)
            scanned = self._pays_to_scan(step, given, axes) if scanned is None else scanned
            steps = [order] if scanned else np.split(np.asarray(order), order.shape[-2], -2)
            with placing.without_context():
                each = ((*given[:2], one, given[3]) for one in steps)
                outs = [self._advance(*self._prepared("epoch", step, _epochs.steps, x, axes)) for x in each]
                out = outs[0] if scanned else jax.tree.map(lambda *y: jnp.mean(jnp.stack(y), 0), *outs)
                outputs.append(jax.tree.map(lambda y: arrays.on_host(y)[:size], out))
            metrics.append({} if evaluate is None else self._evaluated(evaluate, held_out))
            if stop_early is not None:
                value = _epochs.watched(stop_early, metrics[-1])
                improved = active & (value < least - stop_early.min_change)  # never so for NaN
                padded = np.pad(improved, (0, self._placement.num_padded - size))
                best = _chosen(padded, self._members, best or self._members)
                least, best_epoch = np.where(improved, value, least), np.where(improved, number, best_epoch)
                stop = active & (number - np.maximum(best_epoch, first_epoch - 1) >= stop_early.patience)
                stopped, active = np.where(stop, number, stopped), active & ~stop
            if progress is not None:
                progress(Epoch(number, epochs, outputs[-1], metrics[-1], active))
            if not active.any():
                break
        self._members = best or self._members
        out, found = (jax.tree.map(lambda *xs: np.stack(xs), *epochs) for epochs in (outputs, metrics))
        return History(out, found, None if stop_early is None else best_epoch, stopped, bool(scanned))

    def predict(
        self, *inputs: Any, average: Average = "softmax", where: Any = None, apply: Any = None, in_axes: Any = None
    ) -> Any:
        """Average the members' predictions on the devices; only the average leaves them.

        Args:
            *inputs: the model's inputs, the same for all members.
            average: what to average: ``"softmax"``, probabilities of logits ``(..., classes)``; ``"sigmoid"``, those
                of logits entry by entry; ``"mean"``, outputs; ``"moments"``, outputs, with their variance between
                members (``ddof=0``); ``"mixture"``, of models that return ``(mean, variance)``: mean and variance of
                the mixture of these normal distributions (Lakshminarayanan et al. 2017, arXiv 1612.01474).
            where: booleans ``(size,)``; members with ``False`` are left out, even if their outputs are NaN:
                ``where=ens.finite()``.
            apply, in_axes: as in :func:`ensemble` and :meth:`train`, for this call.

        Under ``jit`` and ``grad``, the members are those at the time when the function was traced. If they should
        change, pass them as an argument, ``jax.jit(f)(ens.stacked(), x)``, and map over ``ens.axis``.

        Returns:
            The average, ``(...)``, at least float32; two of them for ``"moments"`` and ``"mixture"``.

        Raises:
            ShapeError, StateError: if arguments are malformed, or it is not known how to apply the model.

        Communicates: one all-reduce the size of the result; two, one after the other, for two results.
        """
        check.one_of("ensemble.predict", "average", average, _averages.NAMES)
        with placing.without_context():
            program, args = self._prepared(average, apply or self._apply, Form.apply, inputs, in_axes)
            if jax.default_backend() == "cpu":  # a device would hold the thread that others need to come to it
                jax.block_until_ready((self._members, args))
            return program(self._members, args, where)

    def members(self, *inputs: Any, apply: Any = None, in_axes: Any = None) -> Any:
        """Return every member's prediction, as the model returns it: leaves ``(size, ...)``. See :meth:`predict`.

        Communicates: nothing if the sizes divide and all devices are this process's; else they are gathered.
        """
        with placing.without_context():
            program, args = self._prepared("members", apply or self._apply, Form.apply, inputs, in_axes)
            return self._cut(program(self._members, args))

    def finite(self) -> np.ndarray:
        """Return which members are finite: booleans ``(size,)``, ``False`` for a member with any NaN or infinity.

        ``ens.predict(x, where=ens.finite())`` leaves the others out, ``ens.drop(~ens.finite())`` drops them.
        """
        floats = [x for x in self._members.values() if jnp.issubdtype(x.dtype, jnp.inexact)]
        with placing.without_context():
            found = [arrays.on_host(jnp.isfinite(x).reshape(len(x), -1).all(1))[: len(self)] for x in floats]
        return np.logical_and.reduce([np.ones(len(self), bool), *found])

    def save(self, path: Any) -> None:
        """Write all members to a file, a NumPy ``.npz`` with an array ``(size, ...)`` for each of a member's.

        An old file stays until the new one is whole. With several processes, the first one writes, and all must call
        it. :func:`load_ensemble` reads it, on any devices.
        """
        check.path("ensemble.save", "path", path)
        members = self._rows(np.arange(len(self)))
        processes.by_first("ensemble.save", lambda: _files.write(path, members))

    def _prepared(
        self, kind: str, fn: Callable[..., Any] | None, one: Callable[..., Any], args: tuple[Any, ...], in_axes: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the program of ``one(form, fn, state, args)`` for all members, and arguments that it takes.

        ``kind`` says what is done with the results. As by ``jax.jit``, a program is kept while its function lives.
        """
        fn = _members.called if fn is None else fn
        check.function(f"ensemble.{kind}", "the function of a member", fn)
        check.no_cut(f"ensemble.{kind}", "args", args)
        leaves, structure = jax.tree.flatten(args)
        own = (False,) * len(leaves) if in_axes is None else _own(in_axes, args)
        if self._spans or any(self._is_elsewhere(x) for x in leaves):
            settled = [arrays.settle(jnp.asarray(x), self._placement, rows=o) for x, o in zip(leaves, own, strict=True)]
            args = jax.tree.unflatten(structure, settled)
        owner, key = (fn.__self__, (fn.__func__, kind, own)) if inspect.ismethod(fn) else (fn, (kind, own))
        try:
            programs = self._programs.setdefault(owner, {})
        except TypeError:  # it has no hash, or cannot be let go: compiled anew
            return self._compiled(kind, lambda: fn, one, own), args
        if key not in programs:
            held = weakref.WeakMethod(fn) if inspect.ismethod(fn) else weakref.ref(fn)
            programs[key] = self._compiled(kind, held, one, own)
        return programs[key], args

    def _compiled(self, kind: str, held: Callable[[], Any], one: Callable[..., Any], own: tuple[bool, ...]) -> Any:
        """Return the jitted function; it does not keep the ensemble, nor the user's function, which is ``held``."""
        form, placement, lowering, average = self._form, self._placement, self._lowering, kind in _averages.NAMES

        def element(state: State, args: tuple[Any, ...]) -> Any:
            result = one(form, held(), state, args)
            return _averages.of_each(kind, result, args) if average else result

        def run(members: State, given: tuple[Any, ...], where: Any = None) -> Any:
            leaves, structure = jax.tree.flatten(given)
            leaves = [x if is_own else broadcast(x, placement.axis) for x, is_own in zip(leaves, own, strict=True)]
            args = _unpadded(members, placement), jax.tree.unflatten(structure, leaves)
            rows = map_fn(element, args, placement.axis, lowering=lowering)
            return _averages.combined(kind, rows, placement.axis, where) if average else _padded(rows, placement)

        target = None if average else arrays.block_sharding(placement)
        return jax.jit(
            run, out_shardings=target, donate_argnums=0 if self._donate and kind in ("train", "epoch") else ()
        )

    @functools.cached_property
    def _spans(self) -> bool:
        return placing.spans_processes(self._placement)

    def _is_elsewhere(self, x: Any) -> bool:
        """Return whether an array is bound to another mesh."""
        concrete = isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer)
        return concrete and x.committed and getattr(x.sharding, "mesh", None) != self._placement.mesh

    def _advance(self, program: Any, args: tuple[Any, ...]) -> Any:
        """Run a program that returns ``(members, out)``; keep the one, return the other."""
        with interrupts.deferred():  # between giving the memory away and having the new members
            members, out = program(self._members, args)
            if isinstance(next(iter(members.values())), jax_api.Tracer):
                raise StateError(
                    "ensemble.train: it changes the members, so it cannot be called in a function that JAX is tracing; "
                    "there, map the step: px.map_fn(step, (ens.stacked(), …), ens.axis)"
                )
            self._members = members
        return out

    def _pays_to_scan(self, step: Callable[..., Any], given: tuple[Any, ...], axes: tuple[Any, ...]) -> bool:
        """Return whether a loop on the devices is quicker than a call for each step."""
        if jax.default_backend() != "cpu":
            return True
        given = (*given[:2], np.asarray(given[2])[..., :1, :], given[3])
        with placing.without_context():
            program, args = self._prepared("epoch", step, _epochs.steps, given, axes)
            jaxpr = program.trace(self._members, args).jaxpr.jaxpr
        return not cost.convolves(jaxpr) and cost.flops(jaxpr) <= _epochs.SMALL

    def _evaluated(self, evaluate: Callable[..., Any], held_out: tuple[Any, ...]) -> dict[str, np.ndarray]:
        found = self.members(*held_out, apply=evaluate)
        if not isinstance(found, dict) or any(np.shape(x) != (len(self),) for x in found.values()):
            raise ShapeError(
                f"ensemble.fit: evaluate must give a dict of numbers for a member, got "
                f"{jax.tree.map(lambda x: np.shape(x)[1:], found)}; write evaluate=lambda model, x: {{'loss': …}}"
            )
        return {name: np.asarray(x) for name, x in found.items()}

    def _cut(self, rows: Any) -> Any:
        """Cut rows ``(num_padded, ...)`` to ``(size, ...)``; of several processes, each can read all of them."""
        if self._placement.is_padded:
            rows = _unpadded(arrays.ready(rows), self._placement)
        return arrays.whole(rows) if self._spans else rows

    def _rows(self, chosen: np.ndarray) -> State:
        """Return some members' arrays, ``(...)`` or with a row for each."""
        with placing.without_context():
            rows = self._cut(arrays.ready(self._members))
            return {name: layout.gathered(x, self.axis)[chosen] for name, x in rows.items()}

    def _like(self, rows: State) -> "Ensemble":
        """Return an ensemble of the same form with other members, ``(size, ...)``."""
        size = len(next(iter(rows.values())))
        if not size:
            raise ShapeError("ensemble: no member would be left; give at least one index")
        with placing.without_context():
            placement = placing.place(dataclasses.replace(self.axis, size=size))
            return dataclasses.replace(self, _members=arrays.laid_out(rows, placement), _placement=placement)


def load_ensemble(make: Callable[[jax.Array], Any], path: Any, **options: Any) -> Ensemble:
    """Read the members that ``ens.save`` wrote, onto the present devices.

    Args:
        make: ``make(key)`` → a member like those in the file. It is traced, not run.
        path: the file.
        **options: ``apply`` and all after it, as in :func:`ensemble`.

    Raises:
        DataError, StateError: if the file is damaged, or holds members of another kind.

    Communicates: nothing.

    Example:
        >>> import jax, paraxis as px, tempfile
        >>> make = lambda key: {"w": jax.random.normal(key, (4,))}
        >>> with tempfile.TemporaryDirectory() as place:
        ...     px.ensemble(make, 3, 0).save(f"{place}/ensemble.npz")
        ...     ens = px.load_ensemble(make, f"{place}/ensemble.npz")
        >>> len(ens)
        3
    """
    check.path("load_ensemble", "path", path)
    forms: list[Form] = []

    def one(key: jax.Array) -> State:
        form, state = _members.split(make(key))
        forms.append(form)
        return state

    rows = _files.read(path, jax.eval_shape(one, jax.random.key(0)))
    size = len(next(iter(rows.values())))
    return ensemble(lambda _, state: forms[0].member(state), size, 0, rows, **options)


def _check_make(make: Any) -> None:
    """Refuse what is no function that makes a member: a class, or a member, which may be called as well."""
    check.function("ensemble", "make", make, "px.ensemble(lambda key: …, 5, 0)")
    model = pytrees.is_nnx(make) or (pytrees.is_model(make) and not isinstance(make, functools.partial))
    if isinstance(make, type) or model:
        what, name = ("class", make.__name__) if isinstance(make, type) else ("model", type(make).__name__)
        raise StateError(
            f"ensemble: make must be a function that is given a key and returns a member, got the {what} {name}; write "
            f"px.ensemble(lambda key: {name}(…), 5, 0), with a key for what it draws"
        )


def _key(who: str, key: Any) -> jax.Array:
    if not isinstance(key, (jax.Array, np.ndarray)):
        return jax.random.key(check.count(who, "key", key, least=0, write="key=0"), impl="threefry2x32")
    if "rbg" in str(jax.random.key_impl(key)):
        raise ShapeError(
            f"{who}: with a key of the hardware generator rbg, members would depend on the devices; write "
            f"jax.random.key(0, impl='threefry2x32')"
        )
    return jnp.asarray(key)


def _own(in_axes: Any, args: tuple[Any, ...]) -> tuple[bool, ...]:
    """Return which leaves of the arguments have a row for each member."""

    def flag(entry: Any) -> bool:
        check.one_of("ensemble", "in_axes", entry, (0, None), ShapeError)
        return entry is not None

    axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    flags = jax.tree.map(flag, axes, is_leaf=lambda x: x is None)
    try:
        return tuple(jax.tree.leaves(jax.tree.broadcast(flags, args)))
    except ValueError as error:
        raise ShapeError(f"ensemble: in_axes={in_axes!r} does not fit {len(args)} arguments: {error}") from None


def _padded(rows: Any, placement: Placement) -> Any:
    """``(size, ...)`` → ``(num_padded, ...)``; nothing is sent."""
    return jax.tree.map(lambda x: layout.pad(x, placement, safe=False), rows)


@functools.partial(jax.jit, static_argnums=1)
def _unpadded(rows: Any, placement: Placement) -> Any:
    return jax.tree.map(lambda x: layout.unpad(x, placement), rows)


@jax.jit
def _chosen(improved: jax.Array, new: State, old: State) -> State:
    return jax.tree.map(lambda a, b: jnp.where(improved.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)
