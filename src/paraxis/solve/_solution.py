"""From a step to a solution: the loop, compiled once, and the derivative of where it ends.

A solution is differentiated as what it is, the place where an optimality condition is zero, and not through the steps
that led there (Blondel et al., "Efficient and modular implicit differentiation", 2022). So the derivative does not
depend on the solver, costs a linear solve, and keeps nothing of the iterations.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from paraxis import _html as html
from paraxis._axes import arrays
from paraxis._core.programs import Traced
from paraxis._host import interrupts
from paraxis._jax import jax_api
from paraxis.solve import _cut as cut, _on_disk as on_disk, _trees as trees, _watching as watching
from paraxis.solve._status import Status

_CONFIRMATIONS = 3  # that may fail
_PART = 0.5  # seconds that Ctrl-C waits, about; and at least an iteration


class OptStep(NamedTuple):
    """Parameters and a solver's state: after one more iteration from ``update``, at the end from ``run``."""

    params: Any
    state: Any

    def _repr_html_(self) -> str:
        """Return the shapes of the parameters, and the state, for notebooks."""
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        rows = [(f"params{jax.tree_util.keystr(path)}", jnp.shape(x), jnp.result_type(x)) for path, x in leaves]
        shown = getattr(self.state, "_repr_html_", lambda: html.card(self.state))
        return html.titled("OptStep", html.table(("", "shape", "dtype"), rows), shown())


class Interrupted(KeyboardInterrupt):
    """Raised when Ctrl-C has ended a run after an iteration; it holds the result so far.

    Ctrl-C does not end a run with several processes, in a thread other than the main one, or inside ``jax.jit``. If the
    program has its own handler of SIGINT, that is called instead, and this exception is not raised.

    Attributes:
        params: the best parameters so far.
        state: the solver's state, whose ``status`` is ``INTERRUPTED``.
        estimator: a copy of the estimator, fitted as far as the run came; ``None`` if there is no estimator.
        found: for an estimator's ``path``, the part of the :class:`Path` that was computed; for
            :func:`cross_validate_path`, the :class:`CrossValidated` of the strengths that were scored; else ``None``.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> solver = px.solve.LBFGS(lambda p: jnp.sum((p - 1) ** 2))
        >>> try:
        ...     params, state = solver.run(jnp.zeros(3))
        ... except px.solve.Interrupted as stopped:
        ...     params, state = stopped.params, stopped.state
        >>> state.reason
        'the error is as small as tol asks'
    """

    __module__ = "paraxis.solve"  # as a traceback names it
    estimator: Any = None
    found: Any = None

    def __init__(self, params: Any, state: Any) -> None:
        super().__init__(
            "the run was ended by Ctrl-C; what was found so far is in the exception: "
            "except px.solve.Interrupted as stopped: stopped.params"
        )
        self.params = params
        self.state = state


Solve = Callable[[Any, Any, Any], OptStep]
"""``(init_params, (args, kwargs), prepared)`` → where the run ends."""

Inverse = Callable[[Any, Any, Any], Any]
"""``(params, (args, kwargs), right)`` → what the derivative of an optimality condition takes to ``right``."""


Confirm = Callable[[OptStep, Any], OptStep]
"""The place where a run converged, and ``(args, kwargs)`` → the same place, which may turn out to be no solution."""


def in_stages(
    iterated: "Iterated",
    renewed: Callable[[OptStep, Any], OptStep],
    step: OptStep,
    arguments: Any,
    pauses: Iterable[int],
    maxiter: int,
) -> OptStep:
    """Iterate until the solver stops; after so many iterations as ``pauses`` tell, what it has prepared is renewed.

    Raises:
        Interrupted: after Ctrl-C.
    """
    limits = [*pauses, maxiter]
    with attended(step, arguments) as passed, saved_run(iterated.options, step, arguments) as saved:
        step = _together(step)
        if saved is not None:
            step = saved.restored(step)
        for stage in range(0 if saved is None else saved.stage, len(limits)):
            step = iterated(step, arguments, limits[stage], saved)
            if stage + 1 == len(limits) or not _is_running(step):
                break
            step = _together(renewed(step, arguments))
            if saved is not None:
                saved.stage = stage + 1
        return passed(step)


def _together(step: OptStep) -> OptStep:
    """Return the same with all of it on the devices that the first values lie on, as iterations leave it.

    For each other way to lie, the iterations would be compiled once more; on one device, to lie there by a mesh is
    another way than without one.
    """
    beside = step.state.error
    if arrays.is_traced(step) or not isinstance(beside, jax.Array):
        return step
    devices, mesh = beside.sharding.device_set, getattr(beside.sharding, "mesh", None)
    if len(devices) == 1 and mesh is None:
        return step

    def lies(x: Any) -> bool:
        if not isinstance(x, jax.Array) or x.sharding.device_set != devices:
            return False
        return len(devices) > 1 or getattr(x.sharding, "mesh", None) == mesh

    return jax.tree.map(lambda x: x if lies(x) else arrays.whole_beside(jnp.asarray(x), beside), step)


@contextlib.contextmanager
def attended(*operands: Any) -> Iterator[Callable[[OptStep], OptStep]]:
    """Within, Ctrl-C waits until it is asked for: by the function yielded, which returns its step if there was none.

    That raises ``Interrupted`` if there was one. A run that is traced, or in several processes, is not ended.
    """
    if _has_to_be_whole(operands):
        yield lambda step: step
        return
    with interrupts.asked_for() as asked:
        yield functools.partial(_unless, asked)


class Iterated:
    """Update until the solver stops, or has made so many iterations in all; compiled as one program.

    Where Ctrl-C can be asked for, the program is called for a part of the iterations, as many as take a moment, again
    and again. It is the same program whatever the parts are, and all that it knows goes from one to the next: so do the
    bits. How long an iteration takes, the first run tells; a run that is short enough is one part. Of a run that is
    saved, or tells a function of its iterations, each iteration is a part.

    Args:
        update: one iteration, ``(params, state, *args, **kwargs)`` → the next.
        confirm: judges a solution anew.
        over: of several runs side by side, as the first dimension of all in a step, those arguments that have such a
            dimension, as ``in_axes`` of ``jax.vmap``.
        options: the solver's, by which a run that is saved is known again.
    """

    def __init__(
        self, update: Callable[..., OptStep], confirm: Confirm, *, over: Any = None, options: str = ""
    ) -> None:
        self.options = options
        part: Any = functools.partial(_part, update, confirm)
        self._program = Traced(part if over is None else jax.vmap(part, (0, 0, over, None)), cut.compiled)
        self._seconds: dict[Any, float] = {}  # an iteration takes, by the types of the arguments

    def __call__(self, step: OptStep, arguments: Any, limit: int, saved: "_Saved | None" = None) -> OptStep:
        none = np.zeros(jnp.shape(step.state.status), np.int32)
        may_end = interrupts.can_be_asked_for() or watching.is_listening() or saved is not None
        if _has_to_be_whole((step, arguments)) or not may_end:
            return self._program(step, none, arguments, np.int32(limit))[0]
        with attended() as passed:
            return self._in_parts(passed, step, none if saved is None else saved.begun(none), arguments, limit, saved)

    def _in_parts(
        self,
        passed: Callable[[OptStep], OptStep],
        step: OptStep,
        refuted: Any,
        arguments: Any,
        limit: int,
        saved: "_Saved | None",
    ) -> OptStep:
        types = _types((step, arguments))
        done, first = _count(step), types not in self._seconds
        while True:
            seconds = self._seconds.get(types)
            at_once = 1 if seconds is None else max(1, int(_PART / max(seconds, 1e-9)))
            until = min(limit, done + (at_once if saved is None and not watching.is_listening() else 1))
            began = time.perf_counter()
            step, refuted = self._program(step, refuted, arguments, np.int32(until))
            if until == limit and seconds is not None and saved is None:  # which is not waited for
                return passed(step)
            before, done = done, _count(step)
            if done > before and not first:
                self._seconds[types] = (time.perf_counter() - began) / (done - before)
            first = False  # that one was compiled
            if saved is not None:
                saved.save(step, refuted)
            try:
                passed(step)
            except BaseException:
                if saved is not None:
                    saved.save(step, refuted, now=True)
                raise
            if done >= limit or not _is_running(step):
                return step
            refuted = np.asarray(refuted)  # as it began, or the program would be compiled for it once more


class _Saved:
    """A run over rows on disk as it is saved: after iterations, all that goes from one to the next.

    Attributes:
        stage: how often what is prepared was renewed.
    """

    def __init__(self, journal: on_disk.Journal) -> None:
        self._journal = journal
        self.stage = 0
        self._refuted: Any = None

    def restored(self, step: OptStep) -> OptStep:
        """Return where an earlier run was, in place of where this one begins."""
        found = self._journal.state()
        if found is None:
            return step
        (self.stage,), (self._refuted, *leaves) = found
        own, structure = jax.tree.flatten(step)
        laid = [
            jax.device_put(x, y.sharding if y.committed else None) if isinstance(y, jax.Array) else x
            for x, y in zip(leaves, own, strict=True)
        ]
        return jax.tree.unflatten(structure, laid)

    def begun(self, none: np.ndarray) -> np.ndarray:
        """Return how often a solution was refuted in the stage that an earlier run was in; else ``none``."""
        found, self._refuted = self._refuted, None
        return none if found is None else np.asarray(found)

    def save(self, step: OptStep, refuted: Any, *, now: bool = False) -> None:
        self._journal.save_state([self.stage], [refuted, *jax.tree.leaves(step)], now=now)


@contextlib.contextmanager
def saved_run(options: str, step: OptStep, arguments: Any) -> Iterator[_Saved | None]:
    """Give where a run is saved that begins with a step, if it is to be; ``options`` are those of its solver."""
    if _has_to_be_whole((step, arguments)):
        yield None
        return
    with on_disk.saved(step, arguments, options) as journal:
        yield None if journal is None else _Saved(journal)


def _has_to_be_whole(operands: Any) -> bool:
    return jax.process_count() > 1 or _is_traced(operands)


def _is_traced(operands: Any) -> bool:
    return jax_api.is_tracing() or arrays.is_traced(operands)


def _count(step: OptStep) -> int:
    return int(np.asarray(step.state.iter_num).max())


def _is_running(step: OptStep) -> bool:
    return bool(np.any(np.asarray(step.state.status) == Status.RUNNING))


def _unless(asked: Callable[[], bool], step: OptStep) -> OptStep:
    """Return the step, unless it is asked for, or who is told of iterations has raised something.

    Raises:
        Interrupted: if it is asked for, or that is a ``KeyboardInterrupt``.
        BaseException: if it is another one.
    """
    watching.settle()
    error = watching.raised()
    if error is not None and not isinstance(error, KeyboardInterrupt):
        raise error
    if error is None and not asked():
        return step
    params, state = step
    ended = jnp.where(jnp.asarray(state.status) == Status.RUNNING, Status.INTERRUPTED, state.status)
    raise Interrupted(params, dataclasses.replace(state, status=ended.astype(jnp.int32))) from error


def watched(watch: object, solve: Callable[..., OptStep], *operands: Any) -> OptStep:
    """Return what a run, or an iteration, comes to.

    Raises:
        BaseException: what ``watch``, if it is a function that is told of iterations, has raised; what is a
            ``KeyboardInterrupt`` as ``Interrupted``.
    """
    with watching.listening(watch, waits=not _has_to_be_whole(operands)), on_disk.shown(operands):
        step = solve(*operands)
        watching.settle()
        return _unless(lambda: False, step)


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in leaves)


def _part(
    update: Callable[..., OptStep], confirm: Confirm, step: OptStep, refuted: Any, arguments: Any, limit: Any
) -> tuple[OptStep, jax.Array]:
    """Update until the solver stops, or has made so many iterations in all.

    If a solution is not confirmed, the run goes on; if that does not help, rounding allows none. ``refuted`` counts how
    often that was. Where no step helps any more, or no more are allowed, the run ends, with what is told of the place
    computed anew, too.
    """
    args, kwargs = arguments

    def go_on(step: OptStep) -> jax.Array:
        return (step.state.status == Status.RUNNING) & (step.state.iter_num < limit)

    def run(step: OptStep) -> OptStep:
        return jax.lax.while_loop(go_on, lambda step: update(step.params, step.state, *args, **kwargs), step)

    def run_and_confirm(carry: tuple[OptStep, jax.Array]) -> tuple[OptStep, jax.Array]:
        step, count = carry
        step = run(step)
        before = step.state.status
        converged, limited = before == Status.CONVERGED, before == Status.ITERATION_LIMIT
        stuck = (before == Status.PRECISION) | (before == Status.LINE_SEARCH_FAILED)
        ended = converged | stuck | limited
        step = jax.lax.cond(ended, lambda step: confirm(step, arguments), lambda step: step, step)
        status = step.state.status
        refuted = converged & (status == Status.RUNNING)
        status = jnp.where(refuted & (count >= _CONFIRMATIONS), Status.PRECISION, status)
        unsolved = (status == Status.RUNNING) | (status == Status.ITERATION_LIMIT)
        status = jnp.where(stuck & unsolved, before, status).astype(jnp.int32)
        return OptStep(step.params, dataclasses.replace(step.state, status=status)), count + refuted

    start = (step, jnp.asarray(refuted, jnp.int32))
    return jax.lax.while_loop(lambda carry: go_on(carry[0]), run_and_confirm, start)


def differentiable(
    solve: Solve, optimality: Callable[..., Any], watch: object = None, *, inverse: Inverse | None = None
) -> Solve:
    """Return a run with the derivative of its solution; ``watch`` may be a function that it tells of its iterations.

    ``optimality(params, *args, **kwargs)`` is zero at a solution; its derivative by the parameters is symmetric, or is
    solved for by ``inverse``.
    """
    run = _Run(functools.partial(watched, watch, solve), optimality, inverse)

    def begun(*operands: Any) -> OptStep:
        # Where nothing is traced, nobody differentiates: what JAX does to find that out takes as long as a small fit.
        return _run(run, *operands) if _is_traced(operands) else run.solve(*operands)

    return begun


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A run and what it is differentiated by."""

    solve: Solve
    optimality: Callable[..., Any]
    inverse: Inverse | None

    @functools.cached_property
    def change(self) -> Callable[..., Any]:
        """``(params, arguments, tangents of these)`` → tangents of the params."""
        return jax.jit(functools.partial(_change, self.optimality, self.inverse))


def _change(
    optimality: Callable[..., Any], inverse: Inverse | None, params: Any, arguments: Any, moved_arguments: Any
) -> Any:
    def condition(params: Any, arguments: Any) -> Any:
        args, kwargs = arguments
        return optimality(params, *args, **kwargs)

    _, moved = jax.jvp(lambda a: condition(params, a), (arguments,), (moved_arguments,))
    right = trees.scaled(-1, moved)
    if inverse is not None:
        return inverse(params, arguments, right)
    _, operator = jax.linearize(lambda p: condition(p, arguments), params)
    return _solve(operator, right)


# One function for all runs: a derivative that closes over the function it is of, JAX would never let go.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(run: _Run, init_params: Any, arguments: Any, prepared: Any) -> OptStep:
    return run.solve(init_params, arguments, prepared)


@_run.defjvp
def _derivative(run: _Run, primals: Any, tangents: Any) -> Any:
    step = _run(run, *primals)
    moved = run.change(jax.tree.map(arrays.ready, step.params), primals[1], tangents[1])
    return step, OptStep(moved, jax.tree.map(_no_tangent, step.state))


def through_prox(prox: Callable[[Any], Any], hessian: Callable[[Any], Any], right: Any) -> Any:
    """Return what the derivative of ``params - prox(params - grad)``, by the parameters, takes to ``right``.

    With M the derivative of ``prox`` and H that of ``grad``, it is ``A = I - M + M H``. That is not symmetric, but both
    M and H are, and M lies between 0 and I. Let ``rest = right - M right``. If w solves ``S w = M (right + rest - H
    rest)`` with ``S = M - M M + M H M``, then ``A (rest + M w) = right``; and S is symmetric, and no less definite than
    H where M is not zero. For a projection, this is the elimination of what it holds fast.
    """
    rest = trees.minus(right, prox(right))

    def operator(w: Any) -> Any:
        kept = prox(w)
        return trees.along(kept, -1, prox(trees.minus(kept, hessian(kept))))

    free = prox(trees.minus(jax.tree.map(jnp.add, right, rest), hessian(rest)))
    return jax.tree.map(jnp.add, rest, prox(_solve(operator, free)))


def _no_tangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _solve(operator: Callable[[Any], Any], right: Any) -> Any:
    """``operator(x) = right`` for a symmetric operator, by conjugate gradients.

    On one vector: of a tree, some leaves might not depend on what is differentiated, which JAX cannot transpose.
    """
    vector, unravel = jax.flatten_util.ravel_pytree(right)

    def product(x: jax.Array) -> jax.Array:
        return jax.flatten_util.ravel_pytree(operator(unravel(x)))[0]

    def conjugate(product: Any, b: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(product, b, tol=_tolerance(b))[0]

    return unravel(jax.lax.custom_linear_solve(product, vector, conjugate, symmetric=True))


def _tolerance(b: Any) -> float:
    """Relative, as far as the dtype goes."""
    return float(10 * max(jnp.finfo(x.dtype).eps for x in jax.tree.leaves(b)))
