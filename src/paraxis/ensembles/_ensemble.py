"""An ensemble: members of one form on the devices, trained one by one, predicting together."""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from paraxis import _html as html
from paraxis._axes import placing, tree
from paraxis._axes.axis import Axis
from paraxis._calls import arguments, integers
from paraxis._core import random
from paraxis._core.lowerings import Lowering
from paraxis._host import processes
from paraxis._jax import dtypes, supposed
from paraxis.ensembles import _arguments, _averages, _files, _fitting, _order, _resident as resident
from paraxis.ensembles._forms import check_make, check_options, form_of, guarded
from paraxis.ensembles._history import Epoch, History
from paraxis.ensembles._members import Apply, Form
from paraxis.ensembles._population import Population
from paraxis.ensembles._programs import Program
from paraxis.ensembles._resident import Resident
from paraxis.errors import ParaxisError, ShapeError, StateError

Average = Literal["softmax", "sigmoid", "mean", "moments", "mixture"]


@arguments.named(num_members="size", n_members="size", rng="key", seed="key")
def ensemble(
    make: Callable[..., Any],
    size: int,
    key: Any,
    *args: Any,
    apply: Apply | None = None,
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
    Functions of a member, such as a training step, take its parts as their first arguments. The key of a member
    depends only on ``key`` and the member's index, so the member does not depend on the devices or on the number of
    members; the axis of the members is *mapped*. Each call of ``ensemble`` traces ``make``; what
    computes the same is not compiled again.

    Args:
        make: ``make(key, *args)`` → a member.
        size: number of members, at least 1.
        key: one key, or an integer as seed.
        *args: further arguments of ``make``, arrays ``(size, ...)`` with one row per member, such as learning rates.
        apply: ``apply(model, *inputs)`` → the model's output. By default, an NNX module is called in ``eval()`` mode,
            a train state's ``apply_fn`` is applied to its ``params``, and a callable pytree is called. Layers of
            Equinox are in inference mode, and take one row: ``apply=lambda model, x: jax.vmap(model)(x)``.
        mesh: the mesh to lay the members over; default: all devices, or the mesh in force, as for :class:`Axis`.
        over: axis or axes of the mesh; default: the one called ``name``.
        at_once: the largest number of members per device in flight. It bounds the memory of their computations.
        lowering: how a device runs its members. ``"auto"``: on CPU, large members and those with convolutions
            separately, each in its own executable (``"dispatch"``), and small ones together (``"vmap"``); on
            accelerators, all together. ``"unroll"``: one after the other in one program.
        donate: whether a step may overwrite the old state, which saves as much memory as the state takes.
        name: what the members are called, in the plural: the name of the axis, for collectives between members.

    Raises:
        StateError: if ``make`` returns no member.
        AxisError: if the axis is malformed.
        ShapeError: if ``args`` are malformed.

    Communicates: nothing.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> make = lambda key: {"w": jax.random.normal(key, (4, 3))}
        >>> ens = px.ensemble(make, 7, 0, apply=lambda params, x: x @ params["w"])
        >>> ens.predict(jnp.ones((5, 4))).shape, ens.members(jnp.ones((5, 4))).shape
        ((5, 3), (7, 5, 3))
    """
    check_make(make)
    check_options("ensemble", apply, lowering, donate, name)
    axis = placing.settled(Axis(name, size, mesh=mesh, over=over, at_once=at_once))
    key = _key(key)
    given = tree.placed("ensemble", "args", args, axis)
    forms: list[Form] = []

    def one(row: Any) -> Any:
        form, parts = form_of(make(*row))
        forms.append(form)
        return form.state(parts)

    # Together: what is drawn is not worth a program for each device. Not vectorised where that would draw others.
    how: Lowering = "vmap" if _draws_alike(key) else "unroll"
    with placing.without_context():
        placement = placing.place(axis)
        rows = resident.on_devices((random.keys(key, axis), *given), placement)
        state = Program(guarded("make", make, one), placement, how)([rows], [])
    return Ensemble(Population(forms[0], state, apply, lowering, donate))


def _draws_alike(key: jax.Array) -> bool:
    """Return whether many keys of this kind at once draw what each draws alone; hardware generators do not."""
    return not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or "rbg" not in str(jax.random.key_impl(key))


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_own_devices(method: _Method) -> _Method:
    """Return a method that leaves the members where they were made, whatever mesh is in force when it is called."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with placing.without_context():
            return method(*args, **kwargs)

    return cast(_Method, run)


class Ensemble:
    """Members on the devices, made by :func:`ensemble` or :func:`load_ensemble`.

    ``len(ens)`` is the number of members. ``ens[3]`` is an ordinary member, as ``make`` returned it, with its own
    arrays; ``ens[:3]``, ``ens[[0, 2]]`` and ``ens[ens.finite()]`` are ensembles of some of the members.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> def step(w, x, y):
        ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        ...     return w - 0.1 * gradient, loss
        >>> ens = px.ensemble(lambda key: jax.random.normal(key, (2,)), 5, 0, apply=lambda w, x: x @ w)
        >>> x = jax.random.normal(jax.random.key(1), (20, 2))
        >>> for _ in range(50):
        ...     losses = ens.train(step, x, x @ jnp.array([1.0, 2.0]))
        >>> losses.shape, bool(losses.max() < 1e-3)
        ((5,), True)
        >>> mean, variance = ens.predict(x, average="moments")
        >>> ens[0].shape, len(ens.drop(1, 3))
        ((2,), 3)
    """

    def __init__(self, population: Population) -> None:
        self._population = population

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def axis(self) -> Axis:
        """The axis of the members, for ``px.keys(key, ens.axis)`` and the other verbs."""
        return self._state.placement.axis

    def __len__(self) -> int:
        return self.axis.size

    def __repr__(self) -> str:
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._state.struct()))
        place = f"on {self._population.placement.num_devices} devices"
        return f"Ensemble({len(self)} {self.axis.name} of {count:,} numbers, {place})"

    def _repr_html_(self) -> str:
        """Return the members on their devices, and what a member is, for notebooks."""
        parts = self._state.struct()
        only_one = isinstance(parts, tuple) and len(parts) == 1
        leaves = jax.tree_util.tree_leaves_with_path(parts[0] if only_one else parts)
        rows = [(jax.tree_util.keystr(path) or "itself", leaf.shape, leaf.dtype) for path, leaf in leaves]
        return html.card(self, html.table(("a member's", "shape", "dtype"), rows))

    @_on_own_devices
    def stacked(self) -> Any:
        """Return all members as one tree, with leaves ``(size, ...)``, for ``px.map_fn`` and ``jax.vmap``.

        Communicates: nothing if the sizes divide; else one all-gather per leaf.
        """
        return self._form.member(jax.tree.map(_copy, self._state.stacked()))

    @arguments.named()
    @_on_own_devices
    def __getitem__(self, index: Any) -> Any:
        """Return one member for an int, or an ensemble of some members for a slice, a sequence of ints or a mask."""
        if isinstance(index, slice):
            return self._chosen(range(len(self))[index])
        is_array = isinstance(index, (np.ndarray, jax.Array)) and np.ndim(index) > 0
        if is_array or (isinstance(index, Sequence) and not isinstance(index, (str, bytes))):
            return self._chosen(self._numbers("index", index))
        return self._form.member(self._state.row(self._number(index)))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @arguments.named()
    @_on_own_devices
    def drop(self, *indices: Any) -> "Ensemble":
        """Return an ensemble without the members of these indices; the others keep their order.

        This ensemble does not change.
        """
        gone = {number for index in indices for number in self._numbers("indices", _sequence(index))}
        return self._chosen([index for index in range(len(self)) if index not in gone])

    @arguments.named()
    @_on_own_devices
    def add(self, *members: Any) -> "Ensemble":
        """Return an ensemble with further members at the end, each as ``make`` returns it.

        This ensemble does not change.

        Raises:
            StateError: if a new member has other variables, shapes or dtypes.
        """
        states = [self._fitting(position, member) for position, member in enumerate(members)]
        rows = [jax.tree.map(lambda x: x[None], state) for state in states]
        return self._like(jax.tree.map(lambda *xs: jnp.concatenate(xs), self._state.gathered(), *rows))

    # --- what it does -------------------------------------------------------------------------------------------------

    @arguments.named()
    @_on_own_devices
    def train(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        """Take one step with each member.

        Args:
            step: a step of one member. For pytrees, ``step(*parts, *args)`` returns the new state, or
                ``(state, out)``; a member that is a tuple is passed as its parts and returned as a tuple. For modules,
                ``step(*modules, *args)`` changes them in place and returns ``out``. The step is traced and compiled
                once for each function and shapes, so define it only once. If something else that it reads has changed,
                such as ``config["rate"]``, it is traced anew; what changes often is better an argument. It may use
                collectives with the axis's name; all members then run together.
            *args: pytrees of arrays; by default the same for all members, such as a batch.
            in_axes: 0 for arguments that have a row per member, ``(size, ...)``: batches, weights, learning rates,
                keys. One value for all arguments, or a tuple with a value (or a tree) for each.

        Returns:
            ``out`` with leaves ``(size, ...)``. To find members that are no longer finite, use :meth:`finite`.

        Raises:
            StateError: if the step does not return a member like the one that it was given.
            ShapeError: if the arguments are malformed. In both cases the members are unchanged.

        Communicates: nothing. If the members do not divide evenly, or lie over several processes, ``out`` is gathered.
        """
        placed = _arguments.place("ensemble.train", args, in_axes, self._population.placement)
        return self._population.step(self._population.train_program(step, placed), placed).readable()

    @arguments.named()
    @_on_own_devices
    def lower(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        """Return the program of :meth:`train` for these arguments, as ``jax.jit(f).lower`` does, without running it.

        It is the program of all members if they run together, or that of one member if they run separately.
        """
        return self._trace_train(step, *args, in_axes=in_axes).lower()

    @_on_own_devices
    def _trace_train(self, step: Callable[..., Any], *args: Any, in_axes: Any = None) -> Any:
        population = self._population
        if supposed.current() is not None:
            population = population.elsewhere(placing.place(population.placement.axis))
        placed = _arguments.place("ensemble.lower", args, in_axes, population.placement, shapes=True)
        program = population.train_program(step, placed)
        return program.trace([population.state, *placed.rows], [placed.shared])

    @arguments.named()
    @_on_own_devices
    def fit(
        self,
        step: Callable[..., Any],
        data: tuple[Any, ...],
        *,
        batch_size: int,
        key: Any,
        num_epochs: int = 1,
        first_epoch: int = 0,
        rows: Any = None,
        weights: Any = None,
        per_member: tuple[Any, ...] = (),
        own_order: bool = False,
        validate: Callable[..., Any] | None = None,
        validation: tuple[Any, ...] = (),
        patience: int | None = None,
        progress: bool | Callable[[Epoch], None] = False,
    ) -> History:
        """Train all members for some epochs, on data that is sent to the devices once.

        Each epoch shuffles the rows with the key and the epoch's number, cuts them into batches (rows left over are
        skipped) and calls the step on each batch: ``step(*parts, *batch, [weights], *per_member)``, as in
        :meth:`train`. If calls cost more than the work, a whole epoch is one program, with the loop on the devices.

        Args:
            step: as in :meth:`train`.
            data: a tuple of pytrees of arrays ``(num_rows, ...)``.
            batch_size: rows of a step.
            key: one key, or an integer as seed, for the order of the rows.
            num_epochs: number of epochs.
            first_epoch: number of the first epoch. With the same key, a call can continue where another ended.
            rows: row numbers ``(size, m)``: each member sees only these, with repetitions. For bagging:
                ``rows=ens.bootstrap_rows(key, num_rows)``.
            weights: weights of the rows, ``(num_rows,)``, or ``(size, num_rows)`` with weights for each member; a
                batch of weights comes after the data.
            per_member: further arguments of the step, pytrees of arrays ``(size, ...)``, such as learning rates.
            own_order: whether each member visits its rows in its own order.
            validate: ``validate(model, *validation)`` → one number, lower is better; called after each epoch, in
                ``eval()`` mode.
            validation: further arguments of ``validate``.
            patience: stop a member that has not improved for this many epochs, and in the end restore every member's
                best state.
            progress: ``True`` shows a bar, which needs the extra ``cli`` outside of notebooks; a function is called
                with an ``Epoch``.

        Returns:
            A :class:`History`.

        Raises:
            ShapeError: if an argument is malformed; the message names it.
            StateError: as in :meth:`train`.

        If the call is interrupted, the members are as they were after the last complete step.

        Warns:
            RuntimeWarning: if results of members are not finite; the message has their indices.

        Communicates: as :meth:`train`, once per epoch.
        """
        if validate is not None:
            arguments.function("ensemble.fit", "validate", validate, "validate=lambda model, x, y: …")
        arguments.flag("ensemble.fit", "own_order", own_order)
        plan = _fitting.Plan(
            step,
            data,
            batch_size,
            num_epochs,
            first_epoch,
            _key(key),
            None if rows is None else arguments.host_array("ensemble.fit", "rows", rows),
            None if weights is None else jnp.asarray(arguments.array("ensemble.fit", "weights", weights)),
            per_member,
            own_order,
            validate,
            validation,
            patience,
        )
        return _fitting.fit(self._population, plan, progress)

    @arguments.named()
    def bootstrap_rows(self, key: Any, num_rows: int) -> np.ndarray:
        """Return, for each member, as many row numbers as there are rows, drawn with replacement: ``(size, num_rows)``.

        A member's row numbers depend on the key and the member's index (bagging; Breiman 1996).
        """
        num_rows = arguments.count("ensemble.bootstrap_rows", "num_rows", num_rows, error=ShapeError)
        return _order.bootstrap_rows(_key(key), len(self), num_rows)

    @arguments.named()
    @_on_own_devices
    def predict(
        self,
        *inputs: Any,
        average: Average = "softmax",
        where: Any = None,
        apply: Apply | None = None,
        in_axes: Any = None,
        batch_size: int | None = None,
    ) -> Any:
        """Average the members' predictions on the devices; only the average leaves them.

        Args:
            *inputs: the model's inputs, the same for all members.
            average: what to average.

                * ``"softmax"``: models return logits ``(..., classes)``; average their probabilities;
                * ``"sigmoid"``: models return logits; average their probabilities, entry by entry;
                * ``"mean"``: average the models' outputs;
                * ``"moments"``: return the mean of the outputs, and their variance between members (``ddof=0``);
                * ``"mixture"``: models return ``(mean, variance)``; return mean and variance of the mixture of these
                  normal distributions (Lakshminarayanan et al. 2017, arXiv 1612.01474).
            where: booleans ``(size,)``; members with ``False`` are left out, even if their outputs are NaN:
                ``where=ens.finite()``.
            apply: as in :func:`ensemble`, for this call.
            in_axes: as in :meth:`train`.
            batch_size: the largest number of rows of the inputs to compute at once; all inputs must then have rows.

        Under ``jit`` and ``grad``, the members are those at the time when the function was traced. If they should
        change, pass them as an argument: ``jax.jit(f)(ens.stacked(), x)``, and map over ``ens.axis``.

        Returns:
            The average, the same on all devices: ``(...)``, at least float32; two of them for ``"moments"`` and
            ``"mixture"``.

        Raises:
            ShapeError: if arguments are malformed, or ``where`` leaves out all members.
            StateError: if it is not known how to apply the model.

        Communicates: one all-reduce the size of the result; ``num_devices`` times as much for ``"moments"`` and
        ``"mixture"``.
        """
        _require_apply("ensemble.predict", apply)
        averaged = _averages.named(average, get_args(Average))
        weights = _weights(where, len(self))
        parts = _batches("ensemble.predict", inputs, in_axes, batch_size)
        given = (_arguments.place("ensemble.predict", part, in_axes, self._population.placement) for part in parts)
        return _joined([averaged.of(self._population.applied(args, apply, averaged.each), weights) for args in given])

    @arguments.named()
    @_on_own_devices
    def members(
        self, *inputs: Any, apply: Apply | None = None, in_axes: Any = None, batch_size: int | None = None
    ) -> Any:
        """Return every member's prediction, as the model returns it: leaves ``(size, ...)``. See :meth:`predict`.

        Communicates: nothing if the sizes divide and all devices are this process's; else the predictions are
        gathered.
        """
        _require_apply("ensemble.members", apply)
        parts = _batches("ensemble.members", inputs, in_axes, batch_size)
        given = (_arguments.place("ensemble.members", part, in_axes, self._population.placement) for part in parts)
        return _joined([self._population.applied(args, apply, _averages.same).readable() for args in given], axis=1)

    @_on_own_devices
    def finite(self) -> np.ndarray:
        """Return which members are finite: booleans ``(size,)``, ``False`` for a member with any NaN or infinity.

        ``np.flatnonzero(~ens.finite())`` has the indices of the others; ``ens.predict(x, where=ens.finite())`` leaves
        them out of one prediction, and ``ens.drop(*indices)`` returns an ensemble without them.
        """
        program = self._population.program("finite", None, (), lambda: _all_finite)
        return np.asarray(program([self._state], []).readable())

    @arguments.named()
    @_on_own_devices
    def save(self, path: Any) -> None:
        """Write every member to its own file in a directory, ``member-000.npz`` and so on.

        :meth:`save_member` describes the files. A file ``paraxis.json`` holds a digest of each. The directory is
        first written under another name, so an old one stays in place until the new one is complete. An old one is
        replaced only if it contains nothing but members. With several processes, the first one writes, and all must
        call it.

        Raises:
            StateError: if ``path`` exists and is neither an ensemble nor an empty directory.
        """
        arguments.path("ensemble.save", "path", path)
        names = self._form.names(self._state.struct())
        rows = (jax.tree.leaves(self._state.row(index)) for index in range(len(self)))
        members = (dict(zip(names, row, strict=True)) for row in rows)
        if placing.spans_processes(self._state.placement):  # all are needed to bring the members together
            members = list(members)
        processes.by_first("ensemble.save", lambda: _files.write_directory(path, members))

    @arguments.named()
    @_on_own_devices
    def save_member(self, index: int, path: Any) -> None:
        """Write all parts of one member to a file, with the names of its leaves; :func:`load_member` reads it.

        The format is NumPy's ``.npz``, with a checksum for every array; it is readable without Paraxis.
        """
        arguments.path("ensemble.save_member", "path", path)
        state = self._state.row(self._number(index))
        arrays = dict(zip(self._form.names(state), jax.tree.leaves(state), strict=True))
        processes.by_first("ensemble.save_member", lambda: _files.write(path, arrays))

    # --- how ----------------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> Resident:
        return self._population.state

    @property
    def _form(self) -> Form:
        return self._population.form

    def _numbers(self, argument: str, indices: Any) -> list[int]:
        """Return the members that a sequence of numbers means, or a mask."""
        given = arguments.host_array("ensemble", argument, indices)
        if given.dtype == bool:
            if given.shape != (len(self),):
                raise ShapeError(
                    f"ensemble: {argument} as a mask needs one entry per member, ({len(self)},), got {given.shape}; "
                    f"write ens[ens.finite()]"
                )
            return list(map(int, np.flatnonzero(given)))
        if given.size and given.dtype.kind not in "iu":
            raise ShapeError(
                f"ensemble: {argument} must be whole numbers or a mask of booleans, got {given.dtype}; "
                f"write ens[[0, 2]]"
            )
        return [self._number(index) for index in given]

    def _number(self, index: Any) -> int:
        number = integers.at_least(-len(self), index)
        if number is None or number >= len(self):
            error = TypeError if integers.at_least(-math.inf, index) is None else IndexError
            raise error(
                f"ensemble: there is no member {arguments.described(index)}; there are {len(self)}, from 0: index must "
                "be a whole number"
            )
        return number % len(self)

    def _chosen(self, indices: Sequence[int]) -> "Ensemble":
        if not len(indices):
            raise ShapeError("ensemble: there is no index, so no member would be left; give at least one")
        chosen = np.asarray(indices)
        return self._like(jax.tree.map(lambda leaf: leaf[chosen], self._state.gathered()))

    def _like(self, tree: Any) -> "Ensemble":
        """Return an ensemble of the same form with other members, ``(size, ...)``."""
        axis = self.axis
        size = jax.tree.leaves(tree)[0].shape[0]
        resized = Axis(axis.name, size, mesh=axis.mesh, over=axis.over, at_once=axis.at_once)
        state = resident.on_devices(jax.tree.map(_copy, tree), placing.place(resized))
        ours = self._population
        return Ensemble(Population(ours.form, state, ours.apply, ours.lowering, ours.donate))

    def _fitting(self, position: int, member: Any) -> Any:
        try:
            form, parts = form_of(member)
            state = form.state(parts)
        except ParaxisError as error:
            raise StateError(
                f"ensemble.add: members[{position}] must be a member, as make returns it: {error}"
            ) from error
        expected = self._state.struct()
        ours, theirs = self._form.names(expected), form.names(state)
        if ours != theirs:
            odd = next(iter(sorted({*ours} ^ {*theirs})), "their order")
            raise StateError(f"ensemble.add: members[{position}] is not like the others; they differ in {odd}")
        for name, a, b in zip(ours, jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise StateError(
                    f"ensemble.add: members[{position}] is not like the others: {name} is {b.dtype}{list(b.shape)}, "
                    f"theirs {a.dtype}{list(a.shape)}"
                )
        return jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(state))


def _key(key: Any) -> Any:
    seed = integers.at_least(-(2**63), key)
    if seed is not None and seed < 2**63:
        with jax.enable_x64(dtypes.is_wide() or not -(2**31) <= seed < 2**32):  # else it would be cut: 2**32 to 0
            return jax.random.key(seed)
    if not random.is_one_key(key):
        got = arguments.described(key)
        raise ShapeError(
            f"ensemble: key must be a random key or a whole number below 2**63, got {got}; write jax.random.key(0)"
        )
    return key


def _require_apply(verb: str, apply: Any) -> None:
    if apply is not None:
        arguments.function(verb, "apply", apply, "apply=lambda params, x: …")


def _sequence(index: Any) -> Any:
    if isinstance(index, (list, tuple, bool)):
        return index
    return np.atleast_1d(arguments.host_array("ensemble.drop", "indices", index))


def _copy(x: jax.Array) -> jax.Array:
    """Memory of its own: what the ensemble holds may be given away."""
    return jnp.array(x, copy=True)


def _all_finite(state: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats]).all() if floats else jnp.array(True)


def _weights(where: Any, size: int) -> np.ndarray:
    if where is None:
        return np.ones(size, np.float32)
    mask = arguments.host_array("ensemble.predict", "where", where)
    if mask.shape != (size,) or mask.dtype != bool:
        raise ShapeError(
            f"ensemble.predict: where must be booleans ({size},), one per member, got {mask.dtype}{list(mask.shape)}; "
            f"write where=ens.finite()"
        )
    if not mask.any():
        raise ShapeError("ensemble.predict: where leaves no member; there is nothing to average")
    return mask.astype(np.float32)


def _batches(verb: str, inputs: tuple[Any, ...], in_axes: Any, batch_size: int | None) -> list[tuple[Any, ...]]:
    if batch_size is None:
        return [inputs]
    if in_axes is not None:
        raise ShapeError(
            f"{verb}: batch_size cuts inputs that all members share, so in_axes must be None; leave in_axes out, or "
            "batch_size"
        )
    batch_size = arguments.count(verb, "batch_size", batch_size, error=ShapeError)
    sizes = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in jax.tree.leaves(inputs)}
    if len(sizes) != 1 or None in sizes:
        raise ShapeError(
            f"{verb}: batch_size={batch_size} needs inputs that all have the same number of leading rows, got {sizes}; "
            "leave it out"
        )
    (rows,) = sizes
    assert rows is not None
    starts = range(0, max(rows, 1), batch_size)
    return [jax.tree.map(operator.itemgetter(slice(start, start + batch_size)), inputs) for start in starts]


def _joined(parts: list[Any], axis: int = 0) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *parts)
