"""The common part of ``Jit`` and ``Parallel``: a compiled program for each structure of the modules."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar

import jax
from flax.nnx import Variable

from paraxis._calls import arguments, pytrees
from paraxis._calls.surroundings import Reads
from paraxis._jax import jax_api, supposed
from paraxis._jax.latest import Jitted
from paraxis._modules import graphs
from paraxis.errors import StateError
from paraxis.transforms._binding import Binding, write_all
from paraxis.transforms._statics import Statics
from paraxis.transforms._wrapped import Wrapped, call

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)
State = tuple[Sequence[Any], Sequence[Any]]


class CompiledOptions(TypedDict, total=False):
    """The options of all that is compiled, for type checkers."""

    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate: bool


class Compiled(Wrapped[_P, _R], Generic[_P, _R]):
    """Base of the wrapped functions that are compiled."""

    sealed = True

    def __init__(
        self,
        f: Callable[..., Any],
        modules: tuple[Any, ...],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
        donate: bool,
    ) -> None:
        arguments.flag(type(self).__name__, "donate", donate)
        super().__init__(f, modules)
        self._statics = Statics(
            type(self).__name__, self._parameters(), self._names_taken(), static_argnums, static_argnames
        )
        self._donate = donate

    @arguments.named()
    def __call__(self, *args: Any, **kwargs: Any) -> _R:
        """Call the function; write back what it wrote."""
        binding, variables, program, state, moved, given, named = self._ready(args, kwargs)
        try:
            new, result = program(state, given, named)
        except TypeError as error:
            self._statics.explain(given, named, error)
            raise
        if moved:  # inside another trace only this run uses them where they were moved to
            new = {i: x for i, x in moved.items() if not isinstance(x, jax_api.Tracer)} | new
        write_all(binding, variables, new, type(self).__name__)
        return pytrees.opened(self._finished(variables, result))

    @arguments.named()
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the program for these arguments, as ``jax.jit(f).lower`` gives it; nothing is run or written."""
        return self._trace(*args, **kwargs).lower()

    def _trace(self, *args: Any, **kwargs: Any) -> Any:
        _, _, program, state, _, given, named = self._ready(args, kwargs)
        return program.trace(state, given, named)

    @abc.abstractmethod
    def _run(self, binding: Binding, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return one traced call: new values of variables by their number, and the result."""

    def _place(
        self, values: list[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[int, Any], Sequence[Any], dict[str, Any]]:
        """Values that are moved to where they are needed, by number, and the arguments, moved likewise."""
        return {}, args, kwargs

    def _finished(self, variables: Sequence[Variable[Any]], result: Any) -> Any:
        """Return what the caller gets; called after everything has been written."""
        return result

    def _ready(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._statics:
            self._statics.check(args, kwargs)
        self._statics.refuse_cut(args, kwargs)
        args, kwargs = self._statics.sealed(args, kwargs)
        binding = self._bound.current()
        variables = binding.variables()
        program = binding.compiled or self._bound.compiled(binding, self._compile)
        values, arrays = supposed.structs(graphs.state(variables, binding.graph))
        if self._donate:
            self._refuse_shared_arrays(values, binding.names)
        moved, args, kwargs = self._place(values, args, kwargs)
        if moved:
            values = [moved.get(i, value) for i, value in enumerate(values)]
        return binding, variables, program, (values, arrays), moved, args, kwargs

    def _refuse_shared_arrays(self, values: list[Any], names: Sequence[str]) -> None:
        """Refuse to give away an array that two variables hold: it would be gone for both."""
        first: dict[int, str] = {}
        for value, name in zip(values, names, strict=True):
            other = first.setdefault(id(value), name)
            if other != name and isinstance(value, jax.Array):
                raise StateError(
                    f"{type(self).__name__}: donate=True gives the memory of {name} away, but {other} holds the same "
                    f"array; give one of them a copy: variable[...] = jnp.array(variable[...], copy=True)"
                )

    def _compile(self) -> "Program":
        def run(state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            # Not the binding that it was compiled for: other variables may have come since, in the same structure.
            new, result = self._run(self._bound.current(), state, args, kwargs)
            if self._donate:  # what is not written goes through, since its memory was given away
                new = dict(enumerate(state[0])) | new
            return new, result

        functions = [] if self._fn is call else [self._fn]
        return Program(run, self._statics, self._donate, functions, self.modules)


class Program:
    """A compiled function of state and arguments, as what ``functions`` of users read is now."""

    def __init__(
        self, run: Callable[..., Any], statics: Statics, donate: bool, functions: Sequence[Any], objects: Sequence[Any]
    ) -> None:
        self._traced = False
        self._awaits = False

        def traced(values: Sequence[Any], arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            self._traced = True
            return run((values, arrays), args, kwargs)

        options: dict[str, Any] = {
            "static_argnums": tuple(n + 2 for n in statics.positions),
            "static_argnames": statics.names,
            "donate_argnums": (0,) if donate else (),
        }
        self._jitted = Jitted(traced, functions, Reads(functions, objects, _is_noticed), **options)

    def __call__(self, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[int, Any], Any]:
        new, result = self._jitted(*state, *args, **kwargs)
        if self._traced:
            self._traced = False
            self._awaits |= jax_api.calls_back(self.trace(state, args, kwargs).jaxpr.jaxpr)
        if self._awaits:  # an exception in a callback must come before anything is written; on CPU it does by itself
            jax.block_until_ready((new, result))
        return new, result

    def trace(self, state: State, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Trace what is run, like ``jax.jit(f).trace``."""
        return self._jitted.trace(*state, *args, **kwargs)


def _is_noticed(x: Any) -> bool:
    """Return whether something that a module holds is looked at by a binding."""
    return isinstance(x, Variable) or graphs.is_module(x) or not jax.tree_util.all_leaves([x])
