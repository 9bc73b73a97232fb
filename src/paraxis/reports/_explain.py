"""The report on a function: it is traced, lowered and compiled, as a call would do, and its text is read."""

import dataclasses
import functools
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np

from paraxis._calls import arguments, pytrees
from paraxis._jax import jax_api, supposed
from paraxis.errors import DeviceError
from paraxis.reports import _estimate, _findings, _jitted, _layouts, _leaves, _lines, _machines, _meshes, _text, _work
from paraxis.reports._growth import Growth
from paraxis.reports._machines import Machine
from paraxis.reports._report import Report
from paraxis.reports._values import Collective, Layout, LineWork, Memory, Work

_WRITTEN = re.compile(
    r"(unreduced_)?(psum(2|_invariant|_scatter)?|pmax|pmin|pbroadcast|ppermute|all_gather(_invariant|_reduced)?"
    r"|(ragged_)?all_to_all|reduce_scatter)"
)
"""JAX's names of collectives that a program asks for itself."""


@overload
def explain(
    fn: Callable[..., Any], *, devices: Sequence[int], on: str | Machine | None = None
) -> Callable[..., Growth]: ...
@overload
def explain(
    fn: Callable[..., Any], *, devices: int | Mapping[str, int] | None = None, on: str | Machine | None = None
) -> Callable[..., Report]: ...
@arguments.named()
def explain(
    fn: Callable[..., Any],
    *,
    devices: int | Mapping[str, int] | Sequence[int] | None = None,
    on: str | Machine | None = None,
) -> Callable[..., Any]:
    """Return a function of the same arguments that reports what a call sends, computes and holds; nothing is run.

    It compiles the function for its arguments, as a call would, and reads the compiled program. So it tells what runs,
    with what the compiler has put in, and which line of the source asks for it.

    Args:
        fn: any function of arrays; what ``jax.jit`` returns, with its shardings and donations; a program; a transform
            such as :class:`Parallel`; what :func:`train_step` returns; a bound method such as ``ensemble.train``; an
            NNX module, or a model that is a callable pytree.
        devices: how many devices there are to be, as if they were here; they are simulated CPUs. Axes that leave their
            place open lie over all of them, and so does a mesh of one axis, of the arguments or in force; of a mesh
            with several, say how many each has: ``{"data": 64, "model": 8}``. Several numbers, ``[1, 8, 64]``, give a
            :class:`paraxis.reports.Growth`, with a line and a drawing of each. A function that has made its mesh
            before is refused, and one that reads ``jax.device_count()`` gets the number here: for these there is the
            command ``paraxis explain file.py:fn --devices 512``.
        on: a machine to estimate the time for: ``"h100:8x16"`` is 16 hosts of 8, and the number of devices as well.
            Kinds are ``v100``, ``a100``, ``h100``, ``h200``, ``b200``, and TPUs ``v4``, ``v5e``, ``v5p``, ``v6e``;
            or a :class:`paraxis.reports.Machine`.

    Returns:
        A function. Its arguments are those of ``fn``, with ``jax.ShapeDtypeStruct`` in place of arrays where the values
        do not matter; give these a ``sharding`` to say how they lie. Of a plain function's arguments, arrays and
        numbers are traced, and all others, such as text, ``True`` and functions, are constants. It returns a
        :class:`paraxis.reports.Report`.

    Raises:
        TypeError: if ``fn`` cannot be called. The report's function raises what tracing or compiling ``fn`` raises.
        ValueError: if there is no such number of devices, or no such machine.
        DeviceError: by the report's function, if meshes do not say how they would be on other devices.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> clients = px.Axis("clients", 8)
        >>> def average(x):
        ...     return px.reduce_mean(px.map_fn(jnp.sin, x, clients), clients)
        >>> report = px.explain(average)(jax.ShapeDtypeStruct((8, 1000), jnp.float32))
        >>> [(c.kind, c.bytes, c.axes, c.verb) for c in report.collectives]
        [('all_reduce', 4000, ('clients',), 'px.reduce_mean')]
        >>> growth = px.explain(average, devices=[1, 512])(jax.ShapeDtypeStruct((8, 1000), jnp.float32))
        >>> [(point.devices, point.sent) for point in growth.points]
        [(1, 0), (512, 4000)]
    """
    arguments.function("explain", "fn", fn, "px.explain(lambda x: …)(x)")
    if isinstance(fn, (jax.stages.Compiled, jax.stages.Traced)) or inspect.iscoroutinefunction(fn):
        got = "a coroutine" if inspect.iscoroutinefunction(fn) else f"a {type(fn).__name__}"
        write = "px.explain(jax.jit(fn))(x)"
        raise TypeError(f"explain: fn must be a function that JAX can trace, got {got}; write {write}")
    machine, asked = _machines.named(on) if on is not None else (None, None)
    if asked is not None and devices is not None:
        raise ValueError(f"explain: on={on!r} says how many devices there are; leave out devices={devices!r}")
    numbers = asked if devices is None else _numbers(devices)

    @functools.wraps(fn, updated=())
    @arguments.named(jax.ShapeDtypeStruct)
    def explained(*args: Any, **kwargs: Any) -> Report | Growth:
        if numbers is None:
            return _report(fn, args, kwargs, machine)
        if isinstance(numbers, tuple):
            return Growth({number: _elsewhere(fn, args, kwargs, machine, number) for number in numbers})
        return _elsewhere(fn, args, kwargs, machine, numbers)

    return explained


Numbers = int | tuple[int, ...] | dict[str, int]


def _numbers(devices: Any) -> Numbers:
    """Return the numbers of devices asked for, each checked."""

    def checked(number: Any) -> int:
        write = "px.explain(fn, devices=512)"
        return arguments.count("explain", "devices", number, most=supposed.MOST, write=write, error=ValueError)

    if isinstance(devices, Mapping) and devices:
        for name in devices:
            arguments.text("explain", "devices", name, "devices={'data': 64, 'model': 8}")
        return {name: checked(number) for name, number in devices.items()}
    if isinstance(devices, Sequence) and not isinstance(devices, (str, bytes)) and devices:
        return tuple(dict.fromkeys(map(checked, devices)))
    return checked(devices)


def _elsewhere(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    machine: Machine | None,
    numbers: int | dict[str, int],
) -> Report:
    """Return the report of other devices than those that are here."""
    if jax_api.is_tracing():
        raise DeviceError(
            f"explain: devices={numbers!r} cannot be supposed while JAX traces a function; call "
            f"px.explain({_name(fn)}, devices={numbers!r})(…) outside of jax.jit, jax.grad and jax.vmap"
        )
    sizes: dict[str, int] | None = numbers if isinstance(numbers, dict) else None
    number = numbers if isinstance(numbers, int) else math.prod(numbers.values())
    with supposed.supposing(number, sizes) as there:
        try:
            return _report(fn, args, kwargs, machine, there)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            raise _made_before(fn, args, kwargs, numbers) from error


def _made_before(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], numbers: Any) -> DeviceError:
    number = math.prod(numbers.values()) if isinstance(numbers, dict) else numbers
    code = getattr(inspect.unwrap(fn), "__code__", None)
    file = Path(code.co_filename if code is not None else "")
    file = os.path.relpath(file) if file.is_file() and "site-packages" not in file.parts else "file.py"
    given = "--arguments function_that_returns_them"
    if args and not kwargs and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in args):
        given = f"--shapes '{' '.join(f'{x.dtype}{[*x.shape]}'.replace(' ', '') for x in args)}'"
    elif not args and not kwargs:
        given = ""
    line = f"paraxis explain {file}:{_name(fn)} --devices {number} {given}"
    return DeviceError(
        f"explain: {_name(fn)} uses a mesh or arrays that were laid over the devices that are here, so it cannot be "
        f"told for devices={numbers!r}. Leave its mesh to its arguments, as jax.ShapeDtypeStruct(shape, dtype, "
        f"sharding=…), or to jax.set_mesh; or let its file be run where there are so many: {line.rstrip()}"
    )


def _report(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    machine: Machine | None = None,
    there: supposed.Supposed | None = None,
) -> Report:
    start = time.perf_counter()
    with jax_api.lines_kept():
        found = _lowered(fn, args, kwargs)
        closed, lowered = found.closed, found.program
        if closed is not None:
            _check_reads(fn, closed, lowered)
        if there is not None and closed is not None and not _is_free(closed, there):
            raise _made_before(fn, args, kwargs, dict(there.sizes) or len(there.devices))
        middle = time.perf_counter()
        compiled = lowered.compile()
    seconds = middle - start, time.perf_counter() - middle
    program = _text.Program(compiled.as_text() or "")
    jaxpr = jax_api.without_dead(closed) if closed is not None else None
    given, results = _layouts.of(compiled, lowered, found.names)
    results = tuple(dataclasses.replace(array, name=found.returned.get(array.name, array.name)) for array in results)
    shardings = jax.tree.leaves((compiled.input_shardings, jax_api.results_of(lowered, compiled)[1]))
    if there is not None and not supposed.is_on(there, shardings):
        raise _made_before(fn, args, kwargs, dict(there.sizes) or len(there.devices))
    meshes = tuple(_meshes.used(jaxpr, shardings, program.num_devices))
    report = Report(
        name=_name(fn),
        num_devices=program.num_devices,
        collectives=_collectives(program, meshes, given),
        work=_work_of(program, jaxpr),
        memory=memory(lowered, compiled),
        arguments=given,
        results=results,
        callbacks=tuple(_work.calls_python(jaxpr)) if jaxpr is not None else (),
        seconds=seconds,
        asked=0 if there is None else len(there.devices),
    )
    if machine is not None:
        report = dataclasses.replace(report, estimate=_estimate.of(program, machine, report.memory, results))
    owner = getattr(fn, "__self__", None)
    runs_members = hasattr(owner, "_trace_train") and _name(fn) in ("train", "predict")
    members = getattr(owner, "axis", None) if runs_members else None
    by = _jitted.by(fn)
    seen = _findings.Seen(report, program, jaxpr, closed, lowered.args_info, by, members, found.called)
    return dataclasses.replace(report, findings=_findings.of(seen), unchecked=tuple(_findings.not_looked_for(seen)))


def _check_reads(fn: Any, closed: Any, lowered: Any) -> None:
    """Raise an error if a function reads from outside what JAX makes arguments of the program that are not its own."""
    what = ""
    if any(isinstance(value, jax.Ref) for value in closed.consts):
        what = "a jax.Ref"
    elif len(closed.jaxpr.invars) > len(jax.tree.leaves(lowered.args_info)):
        what = "a value of a function that JAX traces now"
    if what:
        raise TypeError(
            f"explain: {_name(fn)} reads {what} that is none of its arguments; write it as one, "
            f"px.explain(lambda x, read: …)(x, read)"
        )


def _is_free(closed: Any, there: supposed.Supposed) -> bool:
    """Return whether a program has nothing on several devices but those supposed."""
    held = [x.sharding for x in closed.consts if isinstance(x, jax.Array) and not isinstance(x, jax_api.Tracer)]
    return supposed.is_on(there, [*held, *_meshes.named(closed.jaxpr)])


# --- lowered, whatever it is ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """A program before it is compiled.

    Attributes:
        closed: its jaxpr; ``None``: somebody else has it.
        program: what is to be compiled.
        names: of the arguments, if they are known.
        called: the function whose parameters these are, if a user could donate to it.
        returned: the names of results that are variables of modules, by their place.
    """

    closed: Any
    program: Any
    names: Sequence[str] | None = None
    called: Any = None
    returned: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _lowered(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Lowered:
    fn, args, kwargs = _jitted.found(fn, args, kwargs)
    args, kwargs = supposed.structs((args, kwargs))
    method, is_own = _method(fn)
    if method is not None:
        traced = method(*args, **kwargs)
        traced = getattr(traced, "traced", traced)  # as NNX has it
        jaxpr, lowered = getattr(traced, "jaxpr", None), traced.lower()
        lowered = getattr(lowered, "lowered", lowered)
        names = None if jaxpr is None else jaxpr.jaxpr.debug_info.arg_names
        if names and is_own:
            users = [_own_name(fn, method, name) for name in names]
            of_modules = _bound(method) is not None
            returned = {name.replace("args", "result", 1): user for name, user in zip(names, users, strict=True)}
            return _Lowered(jaxpr, lowered, users, None, returned if of_modules else {})
        if type(fn).__module__.startswith("flax.") and (users := _names_of_modules(fn, args, kwargs, lowered)):
            names = [name.replace("args", "result[0]", 1) for name in _layouts.argument_names(lowered)]
            return _Lowered(jaxpr, lowered, users, fn, dict(zip(names, users, strict=True)))
        return _Lowered(jaxpr, lowered, names, fn)
    if _jitted.is_one(fn) and type(fn).__module__.startswith("equinox.") and _has_shapes((args, kwargs)):
        fn = fn.__wrapped__  # or it takes shapes for constants
    if _jitted.is_one(fn):  # somebody else's
        lowered = fn.lower(*args, **kwargs)
        # as Equinox has it
        return _Lowered(_traced_within(fn, args, kwargs), getattr(lowered, "lowered", lowered))
    return _flattened(fn, args, kwargs)


def _bound(method: Any) -> Any:
    """Return the modules of one of our transforms, whose programs take these apart."""
    return getattr(getattr(method, "__self__", None), "_bound", None)


def _own_name(fn: Any, method: Any, name: str) -> str:
    """Return the user's name of an argument of one of our programs, which have others than the call."""
    found = re.fullmatch(r"args\[(\d+)\](.*)", name)
    if found is None:
        return re.sub(r"^kwargs\['(\w+)'\]", r"\1", re.sub(r"^first\[0\]", "members", name))  # of an ensemble
    number, path = int(found[1]), found[2]
    bound = _bound(method)
    if bound is not None:  # there are values of variables, those of other arrays, and then the call's arguments
        variable = re.fullmatch(r"\[(\d+)\](.*)", path) if number == 0 else None
        if variable is not None:
            module, _, path = bound.current().names[int(variable[1])].partition(")")
            module = f"modules{module.partition('(')[0]}" if module.startswith("[") else module.removeprefix("(")
            return module + re.sub(r"\(\w+\)", "", path) + variable[2]
        number -= 2
    positional = _positional(fn)
    if 0 <= number < len(positional):
        return re.sub(r"^batch\.tree\b", "batch", positional[number] + path)
    return f"args[{number}]{path}" if number >= 0 else name


def _method(fn: Any) -> tuple[Any, bool]:
    """Return what traces a function without running it, as the function itself would, and whether it is one of ours."""
    if _is_of_modules(fn) and not hasattr(fn, "_trace"):
        from paraxis.transforms import Jit  # which needs NNX

        fn = Jit(fn)
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    own = getattr(fn, "_trace", None) or getattr(owner, f"_trace_{name}", None)
    return own or (fn.trace if hasattr(fn, "trace") and _jitted.is_one(fn) else None), own is not None


def _is_of_modules(fn: Any) -> bool:
    """Return whether a function is an NNX module, or one of our transforms of them."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (isinstance(fn, nnx.Module) or type(fn).__module__.startswith("paraxis.transforms."))


def _flattened(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Lowered:
    """Return the same of a plain function, or a model; what is no array among its arguments is constant."""
    called, names = fn, _argument_names(fn, *pytrees.sealed((tuple(args), kwargs)))
    if pytrees.is_model(fn):  # its arrays are arguments, too
        args, called = (supposed.structs(fn), *args), lambda fn, *args, **kwargs: fn(*args, **kwargs)
        paths = jax.tree_util.tree_flatten_with_path(pytrees.sealed(args[0]))[0]
        names = [*(f"{_name(fn)}{jax.tree_util.keystr(path)}" for path, _ in paths), *names]
    sealed = pytrees.sealed((tuple(args), kwargs))
    leaves, structure = jax.tree.flatten(sealed)
    is_array = [_is_array(leaf) for leaf in leaves]

    def run(*given: Any) -> Any:
        values = iter(given)
        whole = [next(values) if moves else leaf for leaf, moves in zip(leaves, is_array, strict=True)]
        args, kwargs = pytrees.opened(jax.tree.unflatten(structure, whole))
        return pytrees.sealed(called(*args, **kwargs))

    run.__name__ = _name(fn)
    vars(run)["__wrapped__"] = called  # JAX's errors then name the user's function, and not this one
    traced = jax.jit(run).trace(*(leaf for leaf, moves in zip(leaves, is_array, strict=True) if moves))
    names = [name for name, moves in zip(names, is_array, strict=True) if moves]
    return _Lowered(traced.jaxpr, traced.lower(), names, fn)


def _traced_within(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the jaxpr that JAX compiles for somebody else's function, if calling it in another one shows it."""
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    moves = [isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)) for leaf in leaves]

    def call(*given: Any) -> Any:
        values = iter(given)
        args, kwargs = jax.tree.unflatten(
            structure, [next(values) if m else x for x, m in zip(leaves, moves, strict=True)]
        )
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, fn(*args, **kwargs))

    try:
        outer = jax.make_jaxpr(call)(*(leaf for leaf, m in zip(leaves, moves, strict=True) if m))
    except Exception:  # of a function that can only be lowered: the report says what it does not know of it
        return None
    calls = [eqn.params["jaxpr"] for eqn in outer.jaxpr.eqns if eqn.primitive.name in ("jit", "pjit")]
    return calls[0] if len(calls) == 1 else None


def _has_shapes(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _is_array(leaf: Any) -> bool:
    kinds = (int, float, complex, np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)
    kinds = (*kinds, jax.Ref, jax_api.ShapedArray)
    return isinstance(leaf, kinds) and not isinstance(leaf, bool)


def _argument_names(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the name of each leaf of the arguments."""
    return [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, x in _named(fn, args, kwargs)
        for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]
    ]


def _named(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return each argument with its name."""
    positional = _positional(fn)
    rest = next((p.name for p in _parameters(fn) if p.kind == p.VAR_POSITIONAL), "args")
    positional += [f"{rest}[{number}]" for number in range(len(args) - len(positional))]
    return [*zip(positional, args, strict=False), *sorted(kwargs.items())]


def _positional(fn: Callable[..., Any]) -> list[str]:
    return [p.name for p in _parameters(fn) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def _names_of_modules(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], lowered: Any) -> list[str] | None:
    """Return the names of the arguments of ``nnx.jit``, which takes modules apart, if they are in the same order."""
    given = jax.tree.leaves(lowered.args_info)
    leaves = [
        (f"{name}{path if path[:1] in ('', '[', '.') else f'.{path}'}", leaf)
        for name, x in _named(fn, args, kwargs)
        for path, leaf in _leaves.named(x)
    ]
    is_same = [np.shape(leaf) for _, leaf in leaves] == [info.shape for info in given]
    return [name for name, _ in leaves] if is_same else None


def _name(fn: Any) -> str:
    inner = getattr(fn, "func", fn)  # of a partial
    return getattr(inner, "__name__", type(inner).__name__)


# --- read ------------------------------------------------------------------------------------------------------------


def _collectives(
    program: _text.Program, meshes: tuple[_meshes.Shape, ...], given: Sequence[Layout]
) -> tuple[Collective, ...]:
    found = [_collective(program, operation, meshes, given) for operation in program.collectives if operation.times]
    return tuple(sorted(found, key=lambda c: -c.total_bytes))


def _collective(
    program: _text.Program, operation: _text.Operation, meshes: tuple[_meshes.Shape, ...], given: Sequence[Layout]
) -> Collective:
    assert operation.kind is not None
    groups, path = program.groups(operation), operation.path
    is_permutation = operation.kind == "collective_permute"
    axes = (_meshes.axes_crossed if is_permutation else _meshes.axes)(groups, meshes)
    line, verb = _lines.nearest(program.frames_near(operation))
    is_written = _WRITTEN.fullmatch(path.rpartition("/")[2]) is not None
    parts = map(_lines.nearest, program.frames_near_parts(operation, of_operands=not is_written))
    others = {where: by for where, by in parts if where is not None and where != line}
    picked = program.picked(operation)
    number = program.argument_of(picked or operation)
    return Collective(
        kind=operation.kind,
        shape=_text.plain(operation.shape),
        bytes=_text.sent_bytes(program, operation),
        times=operation.times,
        is_certain=operation.is_certain,
        axes=axes,
        group_size=program.num_devices if is_permutation else program.group_size(operation),
        line=line,
        verb=verb,
        is_backward=program.is_backward(operation),
        is_written=is_written,
        is_branch=operation.is_branch,
        operand=given[number].name if number is not None and number < len(given) else None,
        widened=program.widened(operation),
        others=tuple(others.items()),
        picks=picked is not None,
    )


def _work_of(program: _text.Program, jaxpr: jax_api.Jaxpr | None) -> Work:
    written, is_bounded = _work.of_jaxpr(jaxpr) if jaxpr is not None else (None, False)
    done, backward = _work.of_program(program, written or _work.Lines())
    is_certain = _work.is_certain(program)
    shares: dict[_lines.Line | None, float] | None = None
    if written is not None and is_bounded and is_certain:  # the compiler may know an end that the program does not say
        padded = _work.padded_lines(jaxpr) if jaxpr is not None else {}
        shares = {line: flops / program.num_devices / padded.get(line, 1.0) for line, flops in written.items()}
    lines = [
        LineWork(line, done[line], None if shares is None else shares.get(line, 0.0))
        for line in sorted({*done, *(shares or ())}, key=lambda line: (-done[line], str(line)))
    ]
    share = None if shares is None else sum(shares.values())
    return Work(sum(done.values()), share, tuple(lines), is_certain, _work.uncounted(program), backward)


def memory(lowered: Any, compiled: Any) -> Memory:
    """Return what a compiled program needs on one device."""
    used = compiled.memory_analysis()
    arguments_, results = used.argument_size_in_bytes, used.output_size_in_bytes
    temporaries, donated = used.temp_size_in_bytes, used.alias_size_in_bytes
    peak = max(getattr(used, "peak_memory_in_bytes", 0), arguments_ + results - donated + temporaries)
    places = jax.tree.leaves(jax_api.results_of(lowered, compiled)[1] or compiled.input_shardings)[:1]
    here = [device for place in places for device in place.addressable_devices]  # others tell this process nothing
    stats = here[0].memory_stats() if here else None
    return Memory(arguments_, results, temporaries, donated, peak, (stats or {}).get("bytes_limit"))
