"""Floating-point operations of matrix products and convolutions, two for each multiplication, by the line that asks.

Counted twice: in the compiled program, for one device; and in the program as it was written, as if one device ran all
of it once. The first times the number of devices equals the second if nothing is done twice. Loops count as often as
they run, which the compiler's own count leaves out; a loop whose end is not known counts as one turn, and all branches
count.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

from paraxis._jax import cost, jax_api
from paraxis.reports import _lines, _text

PRODUCTS = ("dot", "convolution", "custom-call")
Lines = collections.Counter[_lines.Line | None]

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}|\"lhs_contracting_dimensions\":\[([\d,\"]*)\]")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_FREE = ("Sharding", "SPMD", "callback", "annotate", "AllocateBuffer", "Topk", "SliceTo", "PadTo", "xla.sdy")


def of_program(program: _text.Program, written: Lines) -> Lines:
    """Return what one device computes, by line; ``written``: what all have to compute, as far as it is known.

    The compiler's passes do not always keep lines. An operation without gets one from near it that asks for products,
    first of those that lack as much as it does.
    """
    found: Lines = collections.Counter()
    without: list[tuple[int, _text.Operation]] = []
    for operation in program.operations:
        if operation.times and (amount := flops(program, operation) * operation.times):
            line, _ = _lines.behind(program.frames(operation))
            if line is None:
                without.append((amount, operation))
            else:
                found[line] += amount
    for amount, operation in sorted(without, key=lambda pair: -pair[0]):
        near = [_lines.behind(frames)[0] for frames in program.frames_near(operation)]
        asking = [line for line in (*near, *written) if line in written]
        lacking = [line for line in asking if written[line] >= program.num_devices * (found[line] + 0.9 * amount)]
        found[next(iter(lacking or asking or near), None)] += amount
    return found


def flops(program: _text.Program, operation: _text.Operation) -> int:
    """Return an operation's floating-point operations, each time that it runs, if it is a product."""
    if operation.opcode not in PRODUCTS:
        return 0
    operands = [program.find(name) for name in operation.operands[:2]]
    shapes = [_text.dims(x.shape) if x is not None else () for x in operands]
    size = 2 * math.prod(_text.dims(operation.shape))
    if labels := _LABELS.search(operation.text):
        kernel = shapes[1] if len(shapes) > 1 else ()
        return size * math.prod(kernel) // max(kernel[labels[1].index("o")], 1) if kernel else 0
    if contracted := _CONTRACTED.search(operation.text):
        numbers = [int(n) for n in (contracted[1] or contracted[2] or "").replace('"', "").split(",") if n]
        return size * math.prod(shapes[0][n] for n in numbers if n < len(shapes[0]))
    return 0


def uncounted(program: _text.Program) -> tuple[str, ...]:
    """Return the names of what others' code computes, of which the text does not say how much it is."""
    found: set[str] = set()
    for operation in program.operations:
        target = _TARGET.search(operation.text) if operation.opcode == "custom-call" and operation.times else None
        if target and not any(word in target[1] for word in _FREE) and not flops(program, operation):
            found.add(target[1])
    return tuple(sorted(found))


def of_jaxpr(jaxpr: jax_api.Jaxpr) -> tuple[Lines, bool]:
    """Return what all devices have to compute together, by line, and whether each loop's end is known."""
    found: Lines = collections.Counter()
    is_certain = True
    for eqn, times, is_bounded in equations(jaxpr):
        flops = cost.of_product(eqn)
        if flops:
            found[_lines.behind(jax_api.frames_of(eqn))[0]] += flops * times
            is_certain &= is_bounded
    return found, is_certain


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


def _scoped(
    jaxpr: jax_api.Jaxpr, times: int = 1, is_bounded: bool = True, scope: str = ""
) -> Iterator[tuple[Any, int, bool, str]]:
    for eqn in jaxpr.eqns:
        within = f"{scope}/{jax_api.scope_of(eqn)}"
        yield eqn, times, is_bounded, within
        name, params = eqn.primitive.name, eqn.params
        if name == "px_map":  # the others of its parameters say how this one is run
            yield from _scoped(params["body"].jaxpr, times * params["size"], is_bounded, within)
            continue
        inner = times
        if name == "scan":
            inner *= params["length"]
        elif name == "shard_map":
            inner *= math.prod(params["mesh"].shape[axis] for axis in jax_api.bound_axes(eqn))
        solved = params["jaxprs"].solve if name == "custom_linear_solve" else None  # the others are for derivatives
        for sub in jax_api.subjaxprs(eqn) if solved is None else [solved.jaxpr]:
            yield from _scoped(sub, inner, is_bounded and name != "while", within)
