"""Members on the devices, and the compiled functions that are mapped over them."""

import collections
import functools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax

from paraxis._axes.placing import Placement
from paraxis._calls import surroundings
from paraxis._core.lowerings import Lowering
from paraxis._host import interrupts
from paraxis.ensembles import _programs as programs, _resident as resident
from paraxis.ensembles._arguments import Arguments
from paraxis.ensembles._forms import check_function, guarded
from paraxis.ensembles._members import Apply, Form
from paraxis.ensembles._programs import Current, Everywhere, Program
from paraxis.ensembles._resident import Resident, Separate
from paraxis.errors import StateError

_KEPT = 64  # compiled functions


class Population:
    """The state of all members, what is known of one, and how functions are run."""

    def __init__(self, form: Form, state: Resident, apply: Apply | None, lowering: Lowering, donate: bool) -> None:
        if apply is not None:
            check_function("apply", apply)
        self.form = form
        self.apply = apply
        self.lowering: Lowering = lowering
        self.donate = donate
        self._held: Resident | None = state
        self._programs: collections.OrderedDict[Hashable, Current] = collections.OrderedDict()

    @property
    def state(self) -> Resident:
        """Return the arrays of the members.

        Raises:
            StateError: if it was lost.
        """
        if self._held is None:
            raise StateError(
                "ensemble: the members are gone: a step that failed had taken over their memory. Load them, "
                "px.load_ensemble(make, path), or make them again; px.ensemble(…, donate=False) would have kept them"
            )
        return self._held

    @state.setter
    def state(self, state: Resident) -> None:
        self._held = state

    def elsewhere(self, placement: Placement) -> "Population":
        """Return what looks the same on devices that are not here; see :mod:`paraxis._jax.supposed`."""
        state = resident.described(self.state, placement)
        return Population(self.form, state, self.apply, self.lowering, self.donate)

    @property
    def placement(self) -> Placement:
        return self.state.placement

    @property
    def size(self) -> int:
        return self.placement.size

    def step(self, program: Current, args: Arguments, *more: Everywhere) -> Resident:
        """Run a function that gives ``(state, out)``; keep the one, return the other."""
        before = self.state
        if programs.is_traced([*args.rows, args.shared.given, *(x.given for x in more)]):
            raise StateError(
                "ensemble.train: the members are changed, so it cannot be called in a function that JAX is tracing; "
                "there, map the step over ens.stacked(): px.map_fn(step, (ens.stacked(), …), ens.axis)"
            )
        with interrupts.deferred():  # between giving the memory away and having the new state
            try:
                rows = program([before, *args.rows], [args.shared, *more])
            except Exception:
                if _is_gone(before):
                    self._held = None
                raise
            self._held = rows.part(operator.itemgetter(0))
        return rows.part(operator.itemgetter(1))

    def train_program(self, step: Callable[..., Any], args: Arguments) -> Current:
        """Return the program of one step of each member."""
        form, layout = self.form, args.layout  # not args: a compiled function is kept, the data must not be

        def make() -> Callable[..., Any]:
            own = guarded("step", step)
            return lambda state, *given: form.stepped(own, state, layout.rebuilt(given))

        return self.program("train", step, args.key, make, donate=self.donate)

    def applied(self, args: Arguments, apply: Apply | None, each: Callable[[Any, tuple[Any, ...]], Any]) -> Resident:
        """``each`` of what every member's model gives, and of its inputs."""
        apply = apply or self.apply
        form, layout = self.form, args.layout

        def make() -> Callable[..., Any]:
            own = None if apply is None else guarded("apply", apply)

            def predicted(state: Any, *given: Any) -> Any:
                inputs = layout.rebuilt(given)
                return each(form.applied(own, state, inputs), inputs)

            return predicted

        program = self.program("apply", (apply, each), args.key, make)
        return program([self.state, *args.rows], [args.shared])

    def _read_by(self, fn: Any) -> list[Any]:
        """Return the code of users' that runs: what was given, and the members' classes."""
        functions = fn if isinstance(fn, tuple) else (fn,)
        return [*functions, *surroundings.classes_in(self.form.parts(self.state.struct()))]

    def program(
        self, kind: str, fn: Any, key: Hashable, make: Callable[[], Callable[..., Any]], *, donate: bool = False
    ) -> Current:
        """Return the compiled function for these, made at the first call; ``fn``: the user's, or a tuple of some."""
        place = (kind, fn, key)
        new = functools.partial(Program, placement=self.placement, lowering=self.lowering, donate=donate)
        try:
            known = self._programs.get(place)
        except TypeError:  # a function that cannot be looked up
            return Current(make, new, self._read_by(fn))
        if known is None:
            known = self._programs[place] = Current(make, new, self._read_by(fn))
        self._programs.move_to_end(place)
        if len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return known


def _is_gone(state: Resident) -> bool:
    tree = state.rows if isinstance(state, Separate) else state.as_stacked().tree
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
