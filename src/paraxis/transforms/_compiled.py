"""The common part of ``Jit`` and ``Parallel``: a compiled program for each structure of the modules."""

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from paraxis._calls import check, pytrees
from paraxis.transforms._binding import Binding, Structure
from paraxis.transforms._wrapped import Body, Statics, Wrapped, refuse_outside, running

_R = TypeVar("_R", covariant=True)
State = tuple[Sequence[Any], Sequence[Any]]
"""Values of the variables, and of arrays beside them."""


class Compiled(Wrapped[_R], Generic[_R]):
    """Base of the wrapped functions that are compiled."""

    def __init__(
        self,
        f: Any,
        modules: tuple[Any, ...],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
        donate: bool,
    ) -> None:
        super().__init__(f, modules)
        refuse_outside(type(self).__name__, self._body.fn)
        positions = [static_argnums] if isinstance(static_argnums, int) else list(static_argnums)
        for p in positions:
            check.count(type(self).__name__, "static_argnums", p, least=0)
        names = [static_argnames] if isinstance(static_argnames, str) else list(static_argnames)
        signature = getattr(self, "__signature__", inspect.Signature())
        free = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._body.static = Statics(
            frozenset([*positions, *(free.index(n) for n in names if n in free)]),
            frozenset([*names, *(free[p] for p in positions if p < len(free))]),
        )
        self._body.donate = donate

    def __call__(self, *args: Any, **kwargs: Any) -> _R:
        """Call the function; write back what it wrote."""
        binding, program, values, args, kwargs = self._ready(args, kwargs)
        new, result = program(values, binding.graph.arrays, *args, **kwargs)
        return self._finished(binding, values, new, result)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the program for these arguments, as ``jax.jit(f).lower`` gives it; nothing is run or written."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trace for these arguments, as ``jax.jit(f).trace`` gives it; nothing is run or written."""
        binding, program, values, args, kwargs = self._ready(args, kwargs)
        return program.trace(values, binding.graph.arrays, *args, **kwargs)

    def _ready(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        check.no_cut(type(self).__name__, "args", (args, kwargs))
        binding, static = self.binding(), self._body.static
        args = [x if p in static.positions else pytrees.sealed(x) for p, x in enumerate(args)]
        kwargs = {name: x if name in static.names else pytrees.sealed(x) for name, x in kwargs.items()}
        return binding, binding.program or self._compile(binding), binding.values(), args, kwargs

    def _finished(self, binding: Binding, values: Sequence[Any], new: dict[int, Any], result: Any) -> Any:
        """Write the new values, and return what the caller gets."""
        binding.write(new, type(self).__name__)
        return pytrees.opened(result)

    def _compile(self, binding: Binding) -> Any:
        programs = self._body.programs
        try:
            if binding.key not in programs:
                programs[binding.key] = self._jitted(self._body, binding.emptied())
            binding.program = programs[binding.key]
        except TypeError:  # a static attribute that cannot be hashed: nothing to remember it by
            binding.program = self._jitted(self._body, binding.emptied())
        return binding.program

    @classmethod
    def _jitted(cls, body: Body, structure: Structure) -> Any:
        # A closure over what all copies share, not over self, whose modules may be those of another run.
        def run(values: Sequence[Any], arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            with running(body.transform):
                new, result = cls._run(body, structure, (values, arrays), args, kwargs)
            # What is not written goes through if its memory was given away.
            return dict(enumerate(values)) | new if body.donate else new, result

        run.__name__ = body.name
        return jax.jit(
            run,
            static_argnums=tuple(p + 2 for p in body.static.positions),
            static_argnames=tuple(body.static.names),
            donate_argnums=(0,) if body.donate else (),
        )

    @staticmethod
    @abc.abstractmethod
    def _run(
        body: Body, structure: Structure, state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Any], Any]:
        """Trace one call: return new values of variables by their number, and the result."""
