"""Memory that a compiled program reads and writes on one device, and what it computes element by element.

An operation reads its operands and writes its result; a fusion does as a whole, and what lies within it stays in
registers. Of an array that is sliced, the slices count; an array that is updated in place counts with what is new.
"""

import collections
import math
from collections.abc import Iterator

from paraxis.reports import _flops, _hlo, _lines

_NOTHING = (  # names, and not work
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"),
    *("while", "conditional", "call", "optimization-barrier", "replica-id", "copy-start", "copy-done"),
)
_PARTS = ("dynamic-slice", "gather", "slice")  # of an operand, they read what they give
_ARITHMETIC = (
    *("add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "cosine", "divide", "erf", "exponential"),
    *("exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum"),
    *("abs", "multiply", "negate", "not", "or", "popcnt", "power", "real", "remainder", "round-nearest-afz", "rsqrt"),
    *("round-nearest-even", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine"),
    *("sqrt", "subtract", "tan", "tanh", "xor"),
)


def of_program(program: _hlo.Program) -> tuple[_flops.Lines, int]:
    """Return the bytes that one device reads and writes, by line, and its operations on single numbers."""
    moved, elementwise = _flops.Lines(), 0
    products = {x.name for x in program.operations if _flops.flops(program, x)}
    sums = [x for x in program.operations if x.opcode in ("reduce", "reduce-window")]
    factors = {x.name: factor.name for x in sums if (factor := program.factors(x)) is not None}
    products |= {factors[name] for name in products & factors.keys()}
    products |= {name for name, factor in factors.items() if factor in products}
    for operation in program.operations:
        times = operation.within.times
        if times and not operation.within.is_fused and (size := num_bytes(program, operation)):
            moved[_lines.behind(program.frames(operation))[0]] += size * times
        if operation.name not in products:
            elementwise += _elements(program, operation) * times
    return moved, elementwise


def num_bytes(program: _hlo.Program, operation: _hlo.Operation) -> int:
    """Return what an operation reads and writes each time that it runs."""
    if operation.opcode in _NOTHING:
        return 0
    if operation.opcode == "fusion":
        return sum(_of_fusion(program, operation))
    sizes = [_hlo.num_bytes(program.by_name[name].shape) for name in operation.operands if name in program.by_name]
    if operation.opcode in _PARTS:
        return 2 * _hlo.num_bytes(operation.shape) + sum(sizes[1:])
    if operation.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(sizes[1:2]) + sum(sizes[2:])
    return sum(sizes) + _hlo.num_bytes(operation.shape)


def _of_fusion(program: _hlo.Program, fusion: _hlo.Operation) -> Iterator[int]:
    inside = program.fused(fusion)
    readers: dict[str, list[_hlo.Operation]] = collections.defaultdict(list)
    for operation in inside:
        for name in dict.fromkeys(operation.operands):
            readers[name].append(operation)
    updates = [x for x in inside if x.opcode == "dynamic-update-slice" and not readers[x.name]]
    updated = {x.operands[0] for x in updates}
    for operation in inside:
        users = readers[operation.name]
        if operation.opcode == "parameter" and operation.name not in updated:
            parts = [_hlo.num_bytes(x.shape) for x in users if x.opcode in _PARTS and x.operands[0] == operation.name]
            yield sum(parts) if len(parts) == len(users) else _hlo.num_bytes(operation.shape)
    written = [_hlo.num_bytes(program.by_name[x.operands[1]].shape) for x in updates]
    yield sum(written) if updates else _hlo.num_bytes(fusion.shape)


def _elements(program: _hlo.Program, operation: _hlo.Operation) -> int:
    """Return on how many numbers an operation computes one by one; a sum, how many it adds."""
    if operation.opcode in ("reduce", "reduce-window"):
        summed = program.by_name.get(operation.operands[0])
        return math.prod(_hlo.dims(summed.shape)) if summed is not None else 0
    return math.prod(_hlo.dims(operation.shape)) if operation.opcode in _ARITHMETIC else 0
