"""Floating-point operations of matrix products and convolutions, by the line that asks.

A multiplication of real numbers with its addition counts two, of complex numbers eight. All is counted twice: in the
compiled program, for one device; and in the program as it was written, as if one device ran all of it once. The first
times the number of devices equals the second if nothing is done twice. Loops count as often as they run, unlike in the
compiler's own count; a loop of unknown end counts as one iteration; all branches count.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paraxis._core import jax_api
from paraxis.reports import _hlo, _lines, _meshes

Lines = collections.Counter[_lines.Line | None]

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}|\"lhs_contracting_dimensions\":\[([\d,\"]*)\]")
# Words of a window for each dimension, in the order of `_met`, and their defaults.
_WAYS = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
_FIRST = re.compile(r"(-?\d+)(?:_-?\d+)?")  # of what stands on both sides
# Derivatives with the window and the labels of the convolution itself.
_BY_CUDNN = re.compile(r'custom_call_target="__cudnn\$convBackward(Filter|Input)"')
_OPAQUE = ("cholesky", "fft", "ragged-dot", "triangular-solve")
_FREE = (
    *("Sharding", "SPMD", "callback", "annotate", "Topk", "SliceTo", "PadTo", "xla.sdy"),
    *("AllocateBuffer", "AssumeGatherIndices", "AsyncCollective", "Bitcast"),  # on TPUs
)


def of_program(program: _hlo.Program) -> tuple[Lines, bool, tuple[str, ...]]:
    """Return what one device computes, by line, whether each loop's end is known, and the names of what is unknown."""
    counts, is_certain, unknown = Lines(), True, set[str]()
    for operation in program.operations:
        if amount := flops(program, operation) * operation.within.times:
            counts[_lines.behind(program.frames(operation))[0]] += amount
            is_certain &= operation.within.is_certain
        elif operation.within.times and operation.opcode in (*_OPAQUE, "custom-call"):
            target = re.search(r'custom_call_target="([^"]+)"', operation.text)  # of a custom call alone
            name = target[1] if target else operation.opcode
            unknown |= set() if any(word in name for word in _FREE) else {name}
    return counts, is_certain, tuple(sorted(unknown))


def flops(program: _hlo.Program, operation: _hlo.Operation) -> int:
    """Return an operation's floating-point operations, each time that it runs, if it is a product."""
    if operation.opcode == "multiply":
        size = math.prod(_hlo.dims(operation.shape))  # what is left of a product; one number is where a block begins
        return _each(operation) * size if size > 1 and operation.is_product else 0
    if operation.opcode == "reduce" and operation.is_product and (factors := program.factors(operation)) is not None:
        # The multiplication has another name, or none.
        return 0 if factors.is_product else _each(factors) * math.prod(_hlo.dims(factors.shape))
    if operation.opcode not in ("dot", "convolution", "custom-call"):
        return 0
    shapes = [_hlo.dims(x.shape) if (x := program.by_name.get(name)) else () for name in operation.operands[:2]]
    if (labels := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.text)) and len(shapes) == 2:
        lhs, rhs, out = *shapes, _hlo.dims(operation.shape)
        if by_cudnn := _BY_CUDNN.search(operation.text):
            lhs, rhs, out = (lhs, out, rhs) if by_cudnn[1] == "Filter" else (out, rhs, lhs)
        return 2 * _written(operation, [lhs, rhs, out], labels.groups())
    if contracted := _CONTRACTED.search(operation.text):
        numbers = [int(n) for n in (contracted[1] or contracted[2] or "").replace('"', "").split(",") if n]
        size = math.prod(_hlo.dims(operation.shape)) * math.prod(shapes[0][n] for n in numbers if n < len(shapes[0]))
        return _each(operation) * size
    return 0


def _each(operation: _hlo.Operation) -> int:
    return 8 if operation.shape.startswith("c") else 2


def _written(operation: _hlo.Operation, shapes: Sequence[tuple[int, ...]], labels: Sequence[str]) -> int:
    """Return the multiplications of a convolution whose dimensions are named by the letters of labels."""
    window = re.search(r" window=\{([^}]*)\}", operation.text)
    says = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = sorted(filter(str.isdigit, labels[0]))
    specs = [[label.index(d) for d in (*of, *spatial)] for of, label in zip(("bf", "oi", "bf"), labels, strict=True)]
    texts = [says.get(name, f"{default}x" * len(spatial)) for name, default in _WAYS.items()]
    return _convolution(shapes, specs, [[*map(int, _FIRST.findall(text))] for text in texts])


def of_jaxpr(jaxpr: jax_api.Jaxpr, *, padded: bool = False) -> tuple[Lines, bool]:
    """Return what all devices have to compute together, by line, and whether each loop's end is known.

    ``padded``: maps count with the elements that fill up the last device's block.
    """
    counts, is_certain = Lines(), True
    for eqn, times, is_bounded, _ in walk(jaxpr, padded=padded):
        if amount := of_product(eqn) * groups(eqn):
            counts[_lines.behind(jax_api.frames_of(eqn))[0]] += amount * times
            is_certain &= is_bounded
    return counts, is_certain


def calls_python(jaxpr: jax_api.Jaxpr) -> Iterator[_lines.Line | None]:
    for eqn, *_ in walk(jaxpr):
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            yield _lines.behind(jax_api.frames_of(eqn))[0]


def walk(
    jaxpr: jax_api.Jaxpr, times: int = 1, is_bounded: bool = True, scope: str = "", *, padded: bool = False
) -> Iterator[tuple[Any, int, bool, str]]:
    """Yield each operation, how often all devices together run it, whether that is known, and the scopes around it."""
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        within, inner, inside = f"{scope}/{eqn.source_info.name_stack}", times, jax_api.jaxprs_in_params(eqn.params)
        yield eqn, times, is_bounded, within
        if (place := _meshes.placement(eqn)) is not None:  # the others of its parameters say how this one is run
            inner *= place.num_padded if padded else place.size
            inside = [jax_api.dce(params["body"])[0].jaxpr]
        elif name == "scan":
            inner *= params["length"]
        elif name == "shard_map":
            inner *= math.prod(params["mesh"].shape[axis] for axis in jax_api.bound_axes(eqn))
        elif name == "custom_linear_solve":  # the others are for derivatives
            inside = [params["jaxprs"].solve.jaxpr]
        for sub in inside:
            yield from walk(sub, inner, is_bounded and name != "while", within, padded=padded)


# --- one product of a jaxpr ------------------------------------------------------------------------------------------

# What is multiplied with zeros that a convolution puts around or between its numbers does not count.


def of_product(eqn: Any) -> int:
    """Return how many an operation takes; 0: it is neither a matrix product nor a convolution."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("conv_general_dilated", "dot_general", "ragged_dot_general"):
        return 0
    is_complex = np.issubdtype(eqn.outvars[0].aval.dtype, np.complexfloating)
    if name == "conv_general_dilated":
        before, stride = [low for low, _ in params["padding"]], params["window_strides"]
        ways = stride, before, params["lhs_dilation"], params["rhs_dilation"]
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        each = 6 if is_complex else 2  # JAX makes three convolutions of real numbers of it
        return each * _convolution(shapes, params["dimension_numbers"], ways)
    ragged = params.get("ragged_dot_dimension_numbers")
    (contracted, _), _ = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
    each = 8 if is_complex else 2
    size = each * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    return size // groups(eqn) if ragged and ragged.lhs_ragged_dimensions[0] in contracted else size  # one for each


def groups(eqn: Any) -> int:
    """Return with how many groups' matrices JAX multiplies each row of ``jax.lax.ragged_dot``, but on TPUs: all."""
    if eqn.primitive.name != "ragged_dot_general":
        return 1
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    _, (batch, _) = numbers.dot_dimension_numbers
    return 1 if numbers.lhs_ragged_dimensions[0] in batch else max(eqn.invars[2].aval.shape[-1], 1)


def _convolution(shapes: Sequence[tuple[int, ...]], specs: Sequence[Sequence[int]], ways: Sequence[Any]) -> int:
    """Return the multiplications of a convolution.

    ``shapes``, ``specs``: of its input, kernel and result; a spec is JAX's, such as where batch, channels and space
    lie; ``ways``: strides, padding before, and both dilations, of each dimension of space.
    """
    sizes = ([shape[d] for d in spec[2:]] for shape, spec in zip(shapes, specs, strict=True))
    apart = shapes[2][specs[2][0]] * shapes[2][specs[2][1]] * shapes[1][specs[1][1]]
    return apart * math.prod(_met(*dimension) for dimension in zip(*sizes, *ways, strict=True))


@functools.lru_cache(maxsize=1024)
def _met(size: int, kernel: int, results: int, stride: int, before: int, apart: int, spread: int) -> int:
    """Return how often numbers of the input and the kernel meet along a dimension, zeros put in between left out.

    ``before`` zeros stand before the input, its numbers are ``apart``, and those of the kernel are ``spread``.
    """
    (few, step), (many, stretch) = sorted([(kernel, spread), (results, stride)])
    places = (np.arange(many) * stretch - before + step * number for number in range(few))
    inside = ((at >= 0) & (at <= (size - 1) * apart) & (at % apart == 0) for at in places)
    return sum(map(int, map(np.count_nonzero, inside)))
