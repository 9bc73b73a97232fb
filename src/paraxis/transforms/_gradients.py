"""Gradients with respect to variables and arguments, with the state that the function writes threaded through."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paraxis._calls import arguments, pytrees
from paraxis._modules import graphs
from paraxis.errors import ShapeError, StateError
from paraxis.transforms import _body
from paraxis.transforms._binding import Binding, Bound, write_all
from paraxis.transforms._body import Body
from paraxis.transforms._variables import Choice, Gradients, chooser
from paraxis.transforms._wrapped import Of1, Of2, Of3, Wrapped

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)
_Value = TypeVar("_Value")
_First = TypeVar("_First")
_Module = TypeVar("_Module", bound=nnx.Pytree)


class _Options(TypedDict, total=False):
    """Options, for type checkers."""

    wrt: Choice | None
    argnums: int | Sequence[int] | None


class GradValues(Wrapped[_P, _R], Generic[_P, _R]):
    """Compute gradients and values of a loss of modules: ``gradients, values = px.GradValues(loss, net)(x, y)``.

    This order is that of Objax's ``GradValues``, whose place it takes; :func:`value_and_grad` has JAX's order.

    State that the loss writes (BatchNorm's statistics, counters, random streams) is written back once, after the loss
    has succeeded; gradients are taken at the values before.

    Args:
        f: a function of modules and further arguments that returns a float scalar, or a tuple that begins with one.
        *modules: as in :class:`Jit`.
        wrt: which variables to differentiate with respect to: a type, a tuple of types, a function of a variable's
            name and the variable, or a ``px.variables`` collection. ``None``: no variables.
        argnums: further arguments to differentiate with respect to (positions after the modules), as in ``jax.grad``.

    Returns:
        When called, ``(gradients, values)``. ``gradients`` is a collection in the order of ``px.variables``, which
        iterates over its arrays; with ``argnums``, a pair of that and the gradients of the arguments. ``values`` is
        what ``f`` returned.

    Raises:
        ShapeError: if the loss is not a float scalar.
        StateError: as in :class:`Jit`; and if a chosen variable does not hold floats, or none was chosen.

    Communicates: what ``f`` does, and its derivative.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> gradient_loss = px.GradValues(lambda net, x, y: ((net(x) - y) ** 2).mean(), net)
        >>> gradients, value = gradient_loss(jnp.ones((10, 3)), jnp.ones((10, 4)))
        >>> [g.shape for g in gradients]
        [(4,), (3, 4)]
    """

    @overload
    def __init__(self, f: Callable[_P, _R], /, **options: Unpack[_Options]) -> None: ...
    @overload
    def __init__(self, f: Of1[_P, _R], m0: Any, /, **options: Unpack[_Options]) -> None: ...
    @overload
    def __init__(self, f: Of2[_P, _R], m0: Any, m1: Any, /, **options: Unpack[_Options]) -> None: ...
    @overload
    def __init__(self, f: Of3[_P, _R], m0: Any, m1: Any, m2: Any, /, **options: Unpack[_Options]) -> None: ...
    @overload
    def __init__(self: "GradValues[..., Any]", f: Any, /, *modules: Any, **options: Unpack[_Options]) -> None: ...
    @arguments.named()
    def __init__(
        self,
        f: Callable[..., Any],
        *modules: Any,
        wrt: Choice | None = nnx.Param,
        argnums: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(f, modules)
        if wrt is not None:
            chooser("GradValues", wrt)
        argnums = _argnums("GradValues", argnums)
        self._wrt, self._argnums = wrt, argnums

    @arguments.named()
    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, _R]:
        """Return gradients and values of ``f(*modules, *args, **kwargs)``."""
        given, named = pytrees.sealed((args, kwargs))
        binding = self._bound.current()
        chosen = _chosen("GradValues", binding, self._wrt, range(len(binding.graph.variables)))
        positions = _positions("GradValues", self._argnums, len(given))
        if not chosen and not positions:
            raise StateError(
                f"GradValues: nothing to differentiate with respect to: wrt={self._wrt!r} picks no variable of "
                f"{', '.join(type(m).__name__ for m in self.modules) or 'no module'}; write wrt=nnx.Param, argnums=0. "
                f"A model that is a pytree has no variables: write px.value_and_grad(f)(model, …)"
            )
        for p in positions:
            _require_floats("GradValues", f"args[{p}]", given[p])
        result, gradients, of_args = _differentiate(self._body, binding, chosen, positions, given, named, _first)
        found = Gradients({binding.names[i]: g for i, g in gradients.items()})
        if self._argnums is None:
            return found, result
        inputs = of_args[0] if isinstance(self._argnums, int) else tuple(of_args)
        return (found, inputs) if chosen else inputs, result


@overload  # a lambda's first argument may be anything, so this cannot say that it is of a module
def value_and_grad(
    f: Callable[Concatenate[_Module, _P], _Value], *, wrt: Choice = nnx.Param, has_aux: bool = False
) -> Callable[..., tuple[_Value, Any]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[_First, _P], _Value], *, wrt: Choice = nnx.Param, has_aux: bool = False
) -> Callable[..., tuple[_Value, _First]]: ...
@overload
def value_and_grad(
    f: Callable[_P, _Value], argnums: int | Sequence[int] = 0, *, wrt: Choice = nnx.Param, has_aux: bool = False
) -> Callable[..., tuple[_Value, Any]]: ...
@arguments.named()
def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    wrt: Choice = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return value and gradients of a function of modules and pytrees, in the order of ``jax.value_and_grad``.

    No modules are bound: they are ordinary arguments, in any position. The gradient of a module is a collection of the
    gradients of its chosen variables, in the order of ``px.variables``. The gradient of a pytree is a tree of the same
    structure; that of a callable pytree, such as an Equinox module, has ``None`` for all leaves but floating-point
    arrays. State that ``f`` writes to any of the modules is written back after it has succeeded.

    Args:
        f: a function that returns a float scalar, or with ``has_aux`` a pair that begins with one.
        argnums: position, or positions, of the arguments to differentiate with respect to.
        wrt: which variables of a module: see :class:`GradValues`.
        has_aux: whether ``f`` returns ``(value, anything)``.

    Returns:
        A function that returns ``(value, gradients)``; gradients are a tuple if ``argnums`` is one.

    Raises:
        ShapeError, StateError: when called, as in :class:`GradValues`.

    Communicates: what ``f`` does, and its derivative.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
        >>> value, gradients = px.value_and_grad(lambda net, x: net(x).sum())(net, jnp.ones((2, 3)))
        >>> gradients["(Linear).kernel"].tolist()
        [[2.0], [2.0], [2.0]]
        >>> px.value_and_grad(lambda w: w**2)(3.0)
        (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    argnums = _checked("value_and_grad", f, argnums, wrt, has_aux)

    @arguments.named()
    def call(*args: Any, **kwargs: Any) -> Any:
        result, gradients = _unbound("value_and_grad", f, argnums, wrt, has_aux, args, kwargs)
        return result, gradients

    return _named("value_and_grad", call, f, argnums, wrt)


@overload  # a lambda's first argument may be anything, so this cannot say that it is of a module
def grad(f: Callable[Concatenate[_Module, _P], Any], *, wrt: Choice = nnx.Param) -> Callable[..., Any]: ...
@overload
def grad(f: Callable[Concatenate[_First, _P], Any], *, wrt: Choice = nnx.Param) -> Callable[..., _First]: ...
@overload
def grad(
    f: Callable[_P, Any], argnums: int | Sequence[int] = 0, *, wrt: Choice = nnx.Param, has_aux: bool = False
) -> Callable[..., Any]: ...
@arguments.named()
def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    wrt: Choice = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return the gradient of a function of modules and pytrees, like ``jax.grad``. See :func:`value_and_grad`.

    For functions of arrays it is ``jax.grad``. For modules it differs: the gradient is a collection of the chosen
    variables' gradients, and state that ``f`` writes is kept.

    Returns:
        A function that returns the gradients; with ``has_aux``, ``(gradients, aux)``.

    Communicates: what ``f`` does, and its derivative.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> net = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        >>> [g.shape for g in px.grad(lambda net, x: net(x).mean())(net, jnp.ones((2, 3)))]
        [(4,), (3, 4)]
    """
    argnums = _checked("grad", f, argnums, wrt, has_aux)

    @arguments.named()
    def call(*args: Any, **kwargs: Any) -> Any:
        result, gradients = _unbound("grad", f, argnums, wrt, has_aux, args, kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return _named("grad", call, f, argnums, wrt)


def _named(
    transform: str, call: Callable[..., Any], f: Callable[..., Any], argnums: int | Sequence[int], wrt: Choice
) -> Callable[..., Any]:
    """Return what is returned, with the function's name, text and signature.

    Raises:
        StateError: if it could not be called with anything.
    """
    if not callable(f):
        raise StateError(
            f"{transform}: f must be a function, got {type(f).__name__}; write px.{transform}(lambda net, x: …)(net, x)"
        )
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    if not positions or any(isinstance(p, bool) or not isinstance(p, int) or p < 0 for p in positions):
        raise StateError(f"{transform}: argnums must be positions, counted from 0, got {argnums!r}; write argnums=0")
    chooser(transform, wrt)
    functools.update_wrapper(call, f, updated=())
    call.__name__ = f"{transform}({getattr(f, '__name__', 'f')})"
    return call


def _checked(transform: str, f: Any, argnums: Any, wrt: Choice, has_aux: Any) -> int | tuple[int, ...]:
    arguments.function(transform, "f", f, f"px.{transform}(lambda net, x: …)")
    arguments.flag(transform, "has_aux", has_aux)
    chooser(transform, wrt)
    found = _argnums(transform, argnums)
    return () if found is None else found


def _argnums(transform: str, argnums: Any) -> int | tuple[int, ...] | None:
    """Positions, checked: one by itself as one by itself."""
    if argnums is None and transform == "GradValues":
        return None
    found = arguments.positions(transform, "argnums", argnums, StateError)
    return found if isinstance(argnums, (tuple, list)) else found[0]


def _unbound(
    transform: str,
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    wrt: Choice,
    has_aux: bool,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    args, kwargs = pytrees.sealed((args, kwargs))
    positions = _positions(transform, argnums, len(args))
    modules = {p: arg for p, arg in enumerate(args) if graphs.holds_modules(arg)}
    named = {name: x for name, x in kwargs.items() if graphs.holds_modules(x)}
    plain = [arg for p, arg in enumerate(args) if p not in modules]
    binding = Bound((*modules.values(), *named.values()), transform).current()

    def call(*given: Any, **rest: Any) -> Any:
        bound, free = iter(given[: len(modules)]), iter(given[len(modules) + len(named) :])
        kept = dict(zip(named, given[len(modules) : len(modules) + len(named)], strict=True))
        return f(*(next(bound) if p in modules else next(free) for p in range(len(args))), **rest, **kept)

    for p in (p for p in positions if p not in modules):
        _require_floats(transform, f"args[{p}]", args[p])
    ours = _shared_out(binding, {p: modules[p] for p in positions if p in modules})
    chosen = {p: _chosen(transform, binding, wrt, indices) for p, indices in ours.items()}
    for p, picked in chosen.items():
        if not picked:
            raise StateError(
                f"{transform}: wrt={wrt!r} picks no variable of args[{p}], a {type(args[p]).__name__}; "
                f"write wrt=nnx.Param, or another argnums"
            )
    free_position = {p: number for number, p in enumerate(p for p in range(len(args)) if p not in modules)}
    result, gradients, of_args = _differentiate(
        Body(transform, call, list, sealed=False),
        binding,
        [i for picked in chosen.values() for i in picked],
        [free_position[p] for p in positions if p not in modules],
        plain,
        {name: x for name, x in kwargs.items() if name not in named},
        _with_aux(transform) if has_aux else (lambda result: result),
    )
    inputs = iter(of_args)
    found = [_gradients(binding, chosen[p], gradients) if p in chosen else next(inputs) for p in positions]
    return result, found[0] if isinstance(argnums, int) else tuple(found)


def _gradients(binding: Binding, chosen: Sequence[int], gradients: dict[int, Any]) -> Gradients:
    return Gradients({binding.names[i]: gradients[i] for i in chosen})


def _shared_out(binding: Binding, modules: dict[int, Any]) -> dict[int, list[int]]:
    """Return the variables of each of some bound modules. A shared one counts for the first that has it."""
    number = {id(v): i for i, v in enumerate(binding.graph.variables)}
    ours: dict[int, list[int]] = {}
    for position, module in modules.items():
        taken = {i for indices in ours.values() for i in indices}
        own = [number[id(v)] for v in graphs.take_apart((module,)).variables]
        ours[position] = [i for i in own if i not in taken]
    return ours


def _differentiate(
    body: Body,
    binding: Binding,
    chosen: Sequence[int],
    positions: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_of: Callable[[Any], Any],
) -> tuple[Any, dict[int, Any], Sequence[Any]]:
    """Run a body and its derivative; write its state.

    Returns:
        What it returned, gradients of the chosen variables by number, and those of the arguments.
    """
    variables = binding.variables()
    values, arrays = graphs.state(variables, binding.graph)
    parts = [pytrees.split(args[p]) for p in positions]

    def loss(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[Any, Any]:
        here, given = list(values), list(args)
        for i, value in zip(chosen, ours, strict=True):
            here[i] = value
        for p, params, (_, others, rest) in zip(positions, theirs, parts, strict=True):
            given[p] = rest.joined(params, others)
        result, new = _body.run(body, binding, (here, arrays), given, kwargs)
        value = loss_of(result)
        _require_scalar(body.transform, value)
        return value, (result, new)

    differentiable = [values[i] for i in chosen], [params for params, _, _ in parts]
    gradients, (result, new) = jax.grad(loss, argnums=(0, 1), has_aux=True)(*differentiable)
    write_all(binding, variables, new, body.transform)
    return pytrees.opened(result), dict(zip(chosen, gradients[0], strict=True)), gradients[1]


def _chosen(transform: str, binding: Binding, wrt: Choice | None, indices: Sequence[int]) -> list[int]:
    if wrt is None:
        return []
    chosen = chooser(transform, wrt)
    picked = [i for i in indices if chosen(binding.names[i], binding.graph.variables[i])]
    for i in picked:
        for leaf in jax.tree.leaves(graphs.value(binding.graph.variables[i])):
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.inexact):
                raise StateError(
                    f"{transform}: wrt picks variable {binding.names[i]} of dtype {dtype}, which has no gradient; "
                    f"choose those of floats: wrt=nnx.Param"
                )
    return picked


def _positions(transform: str, argnums: int | Sequence[int] | None, num_args: int) -> list[int]:
    positions = [] if argnums is None else [argnums] if isinstance(argnums, int) else list(argnums)
    for p in positions:
        if not isinstance(p, int) or not 0 <= p < num_args:
            raise StateError(
                f"{transform}: argnums={argnums!r}, but {num_args} positional arguments were given; write argnums=0"
            )
    return positions


def _require_floats(transform: str, name: str, given: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(pytrees.split(given)[0]):
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int)) and not _is_inexact(leaf):
            raise StateError(
                f"{transform}: {name}{jax.tree_util.keystr(path)} is {arguments.described(leaf)}, which has no "
                "gradient; write it as floats, or choose another position by argnums"
            )


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf), jnp.inexact)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, (tuple, list)) and result else result


def _with_aux(transform: str) -> Callable[[Any], Any]:
    def first(result: Any) -> Any:
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ShapeError(
                f"{transform}: with has_aux=True the function must return (value, aux), got {type(result).__name__}"
            )
        return result[0]

    return first


def _require_scalar(transform: str, value: Any) -> None:
    is_array = jax.tree.structure(value) == jax.tree.structure(0)
    if not is_array:
        got = type(value).__name__
    elif jnp.shape(value) != ():
        got = f"shape {jnp.shape(value)}"
    elif not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        got = f"a scalar of dtype {jnp.result_type(value)}"
    else:
        return
    raise ShapeError(
        f"{transform}: the loss must be a float scalar, got {got}; reduce it, loss.mean(), or return (loss, …) if "
        f"there is more to return"
    )
