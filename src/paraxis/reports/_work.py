"""Floating-point operations of matrix products and convolutions, two for each multiplication, by the line that asks.

Counted twice: in the compiled program, for one device; and in the program as it was written, as if one device ran all
of it once. The first times the number of devices equals the second if nothing is done twice. Loops count as often as
they run, which the compiler's own count leaves out; a loop whose end is not known counts as one turn, and all branches
count.
"""

import collections
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from paraxis._axes import layout, placing
from paraxis._jax import cost, jax_api
from paraxis.reports import _lines, _text

_PRODUCTS = ("dot", "convolution", "custom-call")
Lines = collections.Counter[_lines.Line | None]

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}|\"lhs_contracting_dimensions\":\[([\d,\"]*)\]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r" window=\{([^}]*)\}")
_MOVES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")
"""JAX's names of what computes nothing, and so has no products."""
_WAYS = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
"""Words of a window for each dimension, in the order of :func:`cost.of_convolution`, and what holds if it does not."""
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_BY_CUDNN = re.compile(r'custom_call_target="__cudnn\$convBackward(Filter|Input)"')
"""Derivatives with the window and the labels of the convolution itself."""
_OPAQUE = ("cholesky", "fft", "ragged-dot", "triangular-solve")
_FREE = ("Sharding", "SPMD", "callback", "annotate", "AllocateBuffer", "Topk", "SliceTo", "PadTo", "xla.sdy")


def of_program(program: _text.Program, written: Lines) -> tuple[Lines, int]:
    """Return what one device computes, by line, and backward; ``written``: what all have to compute, if it is known.

    The compiler's passes do not always keep lines, and a product that is given the place of its transposition has the
    line of that. An operation without a line gets one from near it that asks for products, first of those that lack as
    much as it does, then of those that have nothing yet.
    """
    found: Lines = collections.Counter()
    without: list[tuple[int, _text.Operation]] = []
    backward = 0
    for operation in program.operations:
        if operation.times and (amount := flops(program, operation) * operation.times):
            backward += amount * program.is_backward(operation)
            line, _ = _lines.behind(program.frames(operation))
            if line is None or (line not in written and operation.path.rpartition("/")[2] in _MOVES):
                without.append((amount, operation))
            else:
                found[line] += amount
    for amount, operation in sorted(without, key=lambda pair: -pair[0]):
        near = [_lines.behind(frames)[0] for frames in program.frames_near(operation)]
        asking = [line for line in (*near, *written) if line in written]
        lacking = [line for line in asking if written[line] >= program.num_devices * (found[line] + 0.9 * amount)]
        empty = [line for line in asking if not found[line]]
        found[next(iter(lacking or empty or asking or near), None)] += amount
    return found, backward


def is_certain(program: _text.Program) -> bool:
    """Return whether it is known how often each product runs."""
    return all(
        operation.is_certain or not (operation.opcode in _PRODUCTS or flops(program, operation))
        for operation in program.operations
        if operation.times
    )


def flops(program: _text.Program, operation: _text.Operation) -> int:
    """Return an operation's floating-point operations, each time that it runs, if it is a product."""
    if operation.opcode == "multiply":
        return 2 * math.prod(_text.dims(operation.shape)) if _is_of_dot(program, operation) else 0
    if operation.opcode not in _PRODUCTS:
        return 0
    operands = [program.find(name) for name in operation.operands[:2]]
    shapes = [_text.dims(x.shape) if x is not None else () for x in operands]
    size = 2 * math.prod(_text.dims(operation.shape))
    if (labels := _LABELS.search(operation.text)) and len(shapes) == 2:
        given, kernel, results = *shapes, _text.dims(operation.shape)
        if by_cudnn := _BY_CUDNN.search(operation.text):
            of_kernel = by_cudnn[1] == "Filter"
            given, kernel, results = (given, results, kernel) if of_kernel else (results, kernel, given)
        return _of_convolution(operation, [given, kernel, results], labels.groups())
    if contracted := _CONTRACTED.search(operation.text):
        numbers = [int(n) for n in (contracted[1] or contracted[2] or "").replace('"', "").split(",") if n]
        return size * math.prod(shapes[0][n] for n in numbers if n < len(shapes[0]))
    return 0


def _of_convolution(operation: _text.Operation, shapes: list[tuple[int, ...]], labels: Sequence[str]) -> int:
    """Return the same of a convolution; each label names the dimensions of a shape: input, kernel, result."""
    window = _WINDOW.search(operation.text)
    says = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = [letter for letter in labels[0] if letter.isdigit()]

    def each(name: str, default: str) -> list[int]:
        return [int(part.partition("_")[0]) for part in says.get(name, "x".join(default for _ in spatial)).split("x")]

    sizes = [[shape[label.index(d)] for d in sorted(spatial)] for shape, label in zip(shapes, labels, strict=True)]
    ways = [each(name, default) for name, default in _WAYS.items()] if spatial else [[]] * len(_WAYS)
    result, kernel = dict(zip(labels[2], shapes[2], strict=True)), dict(zip(labels[1], shapes[1], strict=True))
    return cost.of_convolution(result["b"] * result["f"] * kernel["i"], zip(*sizes, *ways, strict=True))


def _is_of_dot(program: _text.Program, multiply: _text.Operation) -> bool:
    """Return whether a multiplication is what is left of a product: of columns with rows, or of a sum of products."""
    many = math.prod(_text.dims(multiply.shape)) > 1  # one number is where a block begins
    named = program.named(multiply) if many else None
    if named is None or not named.path.partition(";")[0].endswith("/dot_general"):
        return False
    return named is multiply or named.opcode == "reduce"


def uncounted(program: _text.Program) -> tuple[str, ...]:
    """Return the names of what others' code computes, of which the text does not say how much it is."""
    found: set[str] = set()
    for operation in program.operations:
        if operation.opcode in _OPAQUE and operation.times:
            found.add(operation.opcode)
        target = _TARGET.search(operation.text) if operation.opcode == "custom-call" and operation.times else None
        if target and not any(word in target[1] for word in _FREE) and not flops(program, operation):
            found.add(target[1])
    return tuple(sorted(found))


def of_jaxpr(jaxpr: jax_api.Jaxpr) -> tuple[Lines, bool]:
    """Return what all devices have to compute together, by line, and whether each loop's end is known."""
    found: Lines = collections.Counter()
    is_certain = True
    for eqn, times, is_bounded, _ in _scoped(jaxpr, chosen=_distinct):
        flops = cost.of_product(eqn) * cost.groups(eqn)
        if flops:
            found[_lines.behind(jax_api.frames_of(eqn))[0]] += flops * times
            is_certain &= is_bounded
    return found, is_certain


_PADS = layout.repeat_last.__code__
"""The function of ours that pads a batch in the program itself."""


def padding(eqn: Any) -> tuple[int, int] | None:
    """Return the number of rows that an operation pads, and to how many; ``None``: it is not our padding."""
    if eqn.primitive.name != "concatenate":
        return None
    frames = jax_api.frames_of(eqn)
    if not any(file == _PADS.co_filename and function.endswith(_PADS.co_name) for file, _, function in frames):
        return None
    return eqn.invars[0].aval.shape[0], eqn.outvars[0].aval.shape[0]


def padded_lines(
    jaxpr: jax_api.Jaxpr, padded: float = 1.0, *, of_maps: bool = False
) -> dict[_lines.Line | None, float]:
    """Return how many times as many rows there are with padding, for each line of products on padded rows.

    Args:
        jaxpr: a program, of which ``of_jaxpr`` counts rows of a map without its padding, and those of ``px.Parallel``,
            which the program itself pads, with it.
        padded: what holds for all of it.
        of_maps: whether maps count, too.
    """
    found: dict[_lines.Line | None, float] = {}
    own = [padded * after / before for before, after in filter(None, map(padding, jaxpr.eqns))]
    padded = max(own, default=padded)
    for eqn in jaxpr.eqns:
        if padded > 1 and cost.of_product(eqn):
            line, _ = _lines.behind(jax_api.frames_of(eqn))
            found[line] = max(padded, found.get(line, 1.0))
        bodies, inner = jax_api.subjaxprs(eqn), padded
        if eqn.primitive.name == "px_map":
            place: placing.Placement = eqn.params["how"].placement
            bodies = (eqn.params["body"].jaxpr,)
            inner *= place.num_padded / place.size if of_maps else 1
        for body in bodies:
            for line, factor in padded_lines(body, inner, of_maps=of_maps).items():
                found[line] = max(factor, found.get(line, 1.0))
    return found


def calls_python(jaxpr: jax_api.Jaxpr) -> Iterator[_lines.Line | None]:
    """Yield the line of each call of Python while the program runs."""
    for eqn, _, _ in equations(jaxpr):
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            yield _lines.behind(jax_api.frames_of(eqn))[0]


def by_scope(jaxpr: jax_api.Jaxpr) -> Iterator[tuple[str, int]]:
    """Yield, for each product, the names of ``jax.named_scope`` around it, and what all devices compute for it."""
    for eqn, times, _, scope in _scoped(jaxpr):
        if flops := cost.of_product(eqn):
            yield scope, flops * times


def equations(jaxpr: jax_api.Jaxpr) -> Iterator[tuple[Any, int, bool]]:
    """Yield each operation, how often it is done for all devices together, and whether that is known."""
    for eqn, times, is_bounded, _ in _scoped(jaxpr):
        yield eqn, times, is_bounded


def _distinct(eqns: Sequence[Any]) -> Iterator[Any]:
    """Yield operations but for those that compute the same as one before, which the compiler computes once."""
    before: dict[Any, Any] = {}
    same: dict[Any, Any] = {}
    for eqn in eqns:
        name, inside = eqn.primitive.name, any(True for _ in jax_api.subjaxprs(eqn))
        if eqn.effects or name == "optimization_barrier" or (inside and name not in ("jit", "pjit")):
            yield eqn
            continue
        given = (v if isinstance(v, jax_api.Literal) else same.get(v, v) for v in eqn.invars)
        key = (name, *map(_key, given), *((param, _key(value)) for param, value in eqn.params.items()))
        first = before.setdefault(key, eqn)
        if first is eqn:
            yield eqn
        else:
            same.update(zip(eqn.outvars, first.outvars, strict=True))


def _key(value: Any) -> Any:
    """Return what is equal for equal values: the value itself, or which one it is if it cannot be compared."""
    if isinstance(value, jax_api.Literal):
        return str(value.aval), _key(value.val)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _scoped(
    jaxpr: jax_api.Jaxpr,
    times: int = 1,
    is_bounded: bool = True,
    scope: str = "",
    chosen: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Iterator[tuple[Any, int, bool, str]]:
    for eqn in chosen(jaxpr.eqns):
        within = f"{scope}/{jax_api.scope_of(eqn)}"
        yield eqn, times, is_bounded, within
        name, params = eqn.primitive.name, eqn.params
        if name == "px_map":  # the others of its parameters say how this one is run
            yield from _scoped(params["body"].jaxpr, times * params["size"], is_bounded, within, chosen)
            continue
        inner = times
        if name == "scan":
            inner *= params["length"]
        elif name == "shard_map":
            inner *= math.prod(params["mesh"].shape[axis] for axis in jax_api.bound_axes(eqn))
        solved = params["jaxprs"].solve if name == "custom_linear_solve" else None  # the others are for derivatives
        for sub in jax_api.subjaxprs(eqn) if solved is None else [solved.jaxpr]:
            yield from _scoped(sub, inner, is_bounded and name != "while", within, chosen)
