"""The report on a function: it is traced, lowered and compiled, as a call would do, and its text is read."""

import contextlib
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from paraxis._core import jax_api
from paraxis._core.pytrees import Static, of_combined
from paraxis.reports import _findings, _flops, _hlo, _lines, _meshes, _topology, _traffic
from paraxis.reports._layout import Layout, is_array, layout_of
from paraxis.reports._report import Report
from paraxis.reports._values import Collective, LineWork, Memory, Traffic, Work

# JAX's names of collectives that a program asks for itself begin so, perhaps after a word.
_WRITTEN = ("psum", "pmax", "pmin", "pbroadcast", "ppermute", "all_gather", "all_to_all", "reduce_scatter")

# XLA's CPU compiler calls a library for attention and the like, and leaves its memory out of the account.
_WHOLE_MEMORY = {"xla_cpu_experimental_ynn_fusion_type": ""}


def explain(fn: Callable[..., Any], *, on: str | None = None) -> Callable[..., Report]:
    """Return a function that compiles ``fn`` for its arguments, and reports what a call sends, computes and holds.

    Args:
        fn: any function of arrays; a model that is a pytree; or a jitted function, as of ``jax.jit``,
            :func:`train_step`, :class:`Parallel`, ``nnx.jit``, ``eqx.filter_jit`` and ``jax.pmap``.
        on: a topology of TPUs, such as ``"v5e:16x16"``, for which the TPUs' own compiler compiles; that needs the extra
            ``tpu``, and no TPU. Meshes must have as many devices, of a topology or simulated
            (:func:`paraxis.simulate_devices`); axes without a mesh lie over all chips.

    Returns:
        A function that returns a :class:`paraxis.reports.Report`, and runs nothing. Its arguments are those of ``fn``,
        with ``jax.ShapeDtypeStruct`` in place of arrays, perhaps with a ``sharding``, where values do not matter. Of a
        plain function's arguments, what is no array and no number, such as text and ``True``, is constant.

    Raises:
        ValueError: by the report's function, if, with ``on``, the program lies over another number of devices than the
            topology has, or calls Python. It also raises what tracing or compiling ``fn`` raises.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px
        >>> clients = px.Axis("clients", 8)
        >>> def average(x):
        ...     return px.reduce_mean(px.map_fn(jnp.sin, x, clients), clients)
        >>> report = px.explain(average)(jax.ShapeDtypeStruct((8, 1000), jnp.float32))
        >>> [(c.kind, c.bytes, c.axes, c.verb) for c in report.collectives]
        [('all_reduce', 4000, ('clients',), 'px.reduce_mean')]
    """
    chips = () if on is None else _topology.chips(on)

    @functools.wraps(fn, updated=())
    def explained(*args: Any, **kwargs: Any) -> Report:
        start = time.perf_counter()
        with jax_api.lines_kept():
            traced, lower = _topology.traced(fn, functools.partial(_staged, fn, args, kwargs), chips)
            lowered = _topology.lowered(name_of(fn), traced, chips) if chips else lower()
            middle = time.perf_counter()
            on_cpu = not chips and jax.default_backend() == "cpu"
            compiled = lowered.compile(compiler_options=_WHOLE_MEMORY) if on_cpu else lowered.compile()
        seconds = middle - start, time.perf_counter() - middle
        return _report(fn, traced.jaxpr, lowered, compiled, seconds, not on_cpu)

    return explained


def _report(
    fn: Any, closed: Any, lowered: Any, compiled: Any, seconds: tuple[float, float], is_of_a_call: bool
) -> Report:
    program = _hlo.Program(compiled.as_text() or "")
    jaxpr, names, path = jax_api.dce(closed)[0].jaxpr, closed.jaxpr.debug_info.arg_names, jax.tree_util.keystr
    of_call = lambda at: f"{'kwargs' if at[0].idx else 'args'}{path(at[1:])}"  # noqa: E731
    arguments = _layouts(lowered.args_info, compiled.input_shardings, of_call, names)
    places = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = tuple(_meshes.used(jaxpr, places, program.num_devices))
    moved, elementwise = _traffic.of_program(program)
    sent = (_collective(program, operation, meshes, arguments) for operation in program.collectives)
    report = Report(
        name=name_of(fn),
        num_devices=program.num_devices,
        collectives=tuple(sorted(sent, key=lambda c: -c.total_bytes)),
        work=_work(program, jaxpr, elementwise),
        traffic=Traffic(sum(moved.values()), tuple(moved.most_common())),
        memory=_memory(compiled, places, is_of_a_call),
        arguments=arguments,
        results=_layouts(lowered.out_info, compiled.output_shardings, lambda at: f"result{path(at)}"),
        callbacks=tuple(_flops.calls_python(jaxpr)),
        seconds=seconds,
    )
    findings = _findings.findings(fn, report, jaxpr, closed.consts)
    return dataclasses.replace(report, findings=findings, unchecked=tuple(_findings.unchecked(report)))


# --- lowered and compiled --------------------------------------------------------------------------------------------


def _staged(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """Return the trace of a function, and a function that lowers it."""
    fn, args, kwargs = _unbound(fn, args, kwargs)
    if not hasattr(fn, "trace") and hasattr(fn, "lower") and hasattr(lowered := fn.lower(*args, **kwargs), "lowered"):
        return _traced(fn.__wrapped__, args, kwargs), lambda: lowered.lowered  # as Equinox has it
    traced = fn.trace(*args, **kwargs) if hasattr(fn, "trace") else _traced(fn, args, kwargs)
    traced = getattr(traced, "traced", traced)  # as NNX has it
    return traced, traced.lower


def _unbound(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the jitted function in a partial or a bound method, with its arguments; any other as it is."""
    inner, positional, named = fn, args, kwargs
    while isinstance(inner, functools.partial) or inspect.ismethod(inner):
        if inspect.ismethod(inner):
            inner = functools.partial(inner.__func__, inner.__self__)
        inner, positional, named = inner.func, (*inner.args, *positional), {**inner.keywords, **named}
    is_model = inspect.ismethod(fn) and not jax.tree_util.all_leaves([fn.__self__])
    is_jitted = hasattr(inner, "trace") or hasattr(inner, "lower")
    return (inner, positional, named) if is_jitted or is_model else (fn, args, kwargs)


def _traced(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the trace of a plain function, or of a model; what is no array among its arguments is constant."""
    if not jax.tree_util.all_leaves([fn]):  # the arrays of a model are arguments, too
        fn, args = type(fn).__call__, (fn, *args)

    args, kwargs = _partition((args, kwargs))
    return jax.jit(of_combined(fn, _partition)).trace(*args, **kwargs)


def _partition(tree: Any) -> Any:
    is_number = lambda x: isinstance(x, (int, float, complex)) and not isinstance(x, bool)  # noqa: E731
    return partition(tree, lambda leaf: is_array(leaf) or is_number(leaf))


def partition(tree: Any, is_dynamic: Callable[[Any], bool] = is_array) -> Any:
    """Return a tree whose other leaves are part of its structure, until ``combine`` gives it as it was."""
    return jax.tree.map(lambda x: x if is_dynamic(x) else Static(x), tree)


def _memory(compiled: Any, places: Sequence[Any], is_of_a_call: bool) -> Memory:
    """Return what a compiled program needs on one device; ``places``: shardings of its arrays."""
    used = compiled.memory_analysis()
    arguments, results = used.argument_size_in_bytes, used.output_size_in_bytes
    temporaries, donated = used.temp_size_in_bytes, used.alias_size_in_bytes
    peak = arguments + results - donated + temporaries  # XLA's own peak has a TPU's other memories in it
    stats: Any = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a topology's chips, nobody can be asked
        here = [device for place in places[:1] for device in place.addressable_devices]
        stats = here[0].memory_stats() if here else None
    return Memory(arguments, results, temporaries, donated, peak, (stats or {}).get("bytes_limit"), is_of_a_call)


def name_of(fn: Any) -> str:
    """Return a function's name; of one without, where it is written."""
    inner = inspect.unwrap(getattr(fn, "func", fn))  # of a partial, of jax.vmap
    name, code = getattr(inner, "__name__", type(inner).__name__), getattr(inner, "__code__", None)
    return (
        f"the function of {_lines.Line(code.co_filename, code.co_firstlineno)}" if name == "<lambda>" and code else name
    )


# --- read ------------------------------------------------------------------------------------------------------------


def _layouts(tree: Any, shardings: Any, name: Callable[[Any], str], names: Sequence[str] = ()) -> tuple[Layout, ...]:
    """Return how the arrays of a tree lie, without those that nothing reads."""
    infos, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaf_shardings = structure.flatten_up_to(shardings) if infos else []
    names = names if len(names) == len(infos) else [name(path) for path, _ in infos]
    return tuple(
        layout_of(name, info.shape, info.dtype, sharding, is_donated=getattr(info, "donated", False))
        for name, (_, info), sharding in zip(names, infos, leaf_shardings, strict=True)
        if sharding is not None
    )


def _collective(
    program: _hlo.Program, operation: _hlo.Operation, meshes: tuple[_meshes.Shape, ...], arguments: Sequence[Layout]
) -> Collective:
    within, dims, is_permutation = operation.within, _hlo.dims(operation.shape), operation.kind == "collective_permute"
    line, verb = _lines.behind(program.frames(operation))
    number, name = program.argument(operation), operation.path.rpartition("/")[2]
    return Collective(
        kind=str(operation.kind),
        shape=_hlo.plain(operation.shape),
        bytes=program.sent_bytes(operation),
        times=within.times,
        is_certain=within.is_certain,
        is_branch=within.is_branch,
        axes=_meshes.axes(program.groups(operation), meshes),
        group_size=program.num_devices if is_permutation else program.group_size(operation),
        line=line,
        verb=verb,
        is_backward="transpose(" in operation.path,
        is_written=name.removeprefix("unreduced_").removeprefix("ragged_").startswith(_WRITTEN),
        is_ring=is_permutation and operation.is_product,
        is_condition=within.is_in_loop and not dims and name in ("while", "reduce_or", "reduce_and"),
        operand=arguments[number].name if number is not None and number < len(arguments) else None,
    )


def _work(program: _hlo.Program, jaxpr: jax_api.Jaxpr, elementwise: int) -> Work:
    done, is_certain, uncounted = _flops.of_program(program)
    written, is_bounded = _flops.of_jaxpr(jaxpr)
    is_known = is_bounded and is_certain  # the compiler may know an end that the program does not say
    shares = {line: flops / program.num_devices for line, flops in written.items()} if is_known else {}
    lines = [
        LineWork(line, done[line], shares.get(line, 0.0) if is_known else None)
        for line in sorted({*done, *shares}, key=lambda line: (-done[line], str(line)))
    ]
    share = sum(shares.values()) if is_known else None
    return Work(sum(done.values()), share, tuple(lines), is_certain, uncounted, elementwise)
