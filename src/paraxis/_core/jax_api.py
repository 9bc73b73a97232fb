"""The only door to parts of JAX that may move between versions.

Everything else in the package uses names that JAX documents as public on both ends of the supported
range (0.10.2 and 0.12). What is imported here is listed with the reason why it is needed.
"""

import dataclasses
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core  # named axes, and the traces that are under way, where no argument tells
from jax.core import ShapedArray as ShapedArray, Tracer as Tracer
from jax.experimental import multihost_utils as multihost_utils, topologies as topologies
from jax.extend import source_info_util as source
from jax.extend.core import (
    ClosedJaxpr as ClosedJaxpr,
    Jaxpr as Jaxpr,
    JaxprEqn as JaxprEqn,
    Literal as Literal,
    Primitive as Primitive,
    Var as Var,
    get_opaque_trace_state as get_opaque_trace_state,
    jaxpr_as_fun as jaxpr_as_fun,
    jaxprs_in_params as jaxprs_in_params,
)
from jax.interpreters import ad as ad, batching as batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec as P

_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (jax.__file__, Path(__file__).parent))
"""The folders of code that is not the user's."""


def define_lowering(primitive: Primitive, implementation: Callable[..., Any]) -> None:
    """Lower a single-result primitive by lowering the JAX function that computes it; each with a line of its own."""
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False), cacheable=False)


def define_map(
    name: str, avals: Any, implementation: Any, evaluated: Any, jvp: Any, transpose: Any, batch_rule: Any
) -> Primitive:
    """Return a primitive of any number of operands and results; ``jvp`` and ``transpose`` get what is not zero.

    ``avals`` gives the results' avals and effects; ``implementation`` is lowered, ``evaluated`` called with concrete
    arrays. Parameters have a ``body``, and ``axis_env``, name and size of each axis that it may name.
    """

    def without_high(*operands: Any, **params: Any) -> Any:
        from jax._src.interpreters.partial_eval import lower_jaxpr2  # carries out what stands for other operations

        with core.extend_axis_env_nd(list(params["axis_env"])):
            body, consts = without_constants(lower_jaxpr2(params["body"]))
        of_consts = {"shared": True, "alike": False, "linear": False}
        masks = {mask: (*[value] * len(consts), *params[mask]) for mask, value in of_consts.items()}
        return primitive.bind(*consts, *operands, **{**params, "body": body, **masks})

    def check(_: Any, *atoms: Any, **params: Any) -> Any:
        with core.extend_axis_env_nd(list(params["axis_env"])):
            core.check_jaxpr(params["body"].jaxpr)
        return primitive.abstract_eval(*(atom.aval for atom in atoms), **params)

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        live = [type(t) is not ad.Zero and getattr(t, "dtype", None) != jax.dtypes.float0 for t in tangents]
        results, moving, tangents = jvp(primals, live, [*itertools.compress(tangents, live)], **params)
        rest, pairs = iter(tangents), zip(results, moving, strict=True)
        return results, [next(rest) if moves else ad.Zero(jax.typeof(y).to_tangent_aval()) for y, moves in pairs]

    def transpose_rule(cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        linear = [ad.is_undefined_primal(x) for x in operands]
        live, pairs = [type(ct) is not ad.Zero for ct in cts], list(zip(operands, linear, strict=True))
        if not any(live):
            return [ad.Zero(x.aval.to_ct_aval()) if is_linear else None for x, is_linear in pairs]
        rest = iter(transpose([*itertools.compress(cts, live)], live, operands, linear, **params))
        return [typed_as(x.aval, next(rest)) if is_linear else None for x, is_linear in pairs]

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(avals)
    primitive.def_impl(evaluated)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp_rule
    ad.primitive_transposes[primitive] = transpose_rule
    batching.fancy_primitive_batchers[primitive] = batch_rule
    primitive.to_lojax = without_high  # of a body with operations that stand for others, such as JAX's searchsorted
    core.custom_typechecks[primitive] = check  # else JAX would look into the body without the names of the axes
    return primitive


def warn_of_gathers(axis: str) -> None:
    """Warn that a ``shard_map`` over some axes gathers what it is given over the others, as these are Explicit."""
    if jax.__version_info__ < (0, 12):  # jax < 0.12
        warnings.warn(
            f"jax {jax.__version__} gathers what a map over {axis!r} is given over the mesh's other axes, as these are "
            "Explicit; update to jax 0.12, or make the mesh with axis_types=(jax.sharding.AxisType.Auto, …)",
            stacklevel=3,
        )


def without_constants(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the same jaxpr with its constants as first arguments, and the constants."""
    if not closed.consts:
        return closed, []
    invars, info = [*closed.jaxpr.constvars, *closed.jaxpr.invars], closed.jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(closed.jaxpr.replace(constvars=[], invars=invars, debug_info=info), ()), list(closed.consts)


def dce(closed: ClosedJaxpr, outvars: Any = None, *, unread: bool = True) -> tuple[ClosedJaxpr, list[bool]]:
    """Return a jaxpr for some of its values, by default its results, with only what these and its effects need.

    Also return which arguments are left: all, or, without ``unread``, those that are read.
    """
    chosen = list(closed.jaxpr.outvars if outvars is None else outvars)
    whole = closed.jaxpr.replace(outvars=chosen, debug_info=closed.jaxpr.debug_info.with_unknown_names())
    with jax.enable_checks(False):  # they would look for axes whose names the caller has bound
        left, kept = partial_eval.dce_jaxpr(whole, [True] * len(chosen), instantiate=unread)
    return ClosedJaxpr(left, closed.consts), list(kept)


def trace(fn: Callable[..., Any], avals: Sequence[Any], axis_env: Mapping[str, int]) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of ``fn(*avals)`` with named axes bound, and the structure of its result."""
    closed, shape = jax.make_jaxpr(fn, axis_env=list(axis_env.items()), return_shape=True)(*avals)
    return closed, jax.tree.structure(shape)


def bind(eqn: JaxprEqn, *operands: Any) -> Sequence[Any]:
    """Apply an equation's primitive to other operands, in the context and from the line that it was traced in."""
    names = source.current_name_stack() + eqn.source_info.name_stack
    with source.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(dict(eqn.params)))
    return results if eqn.primitive.multiple_results else [results]


def bound_axes(eqn: JaxprEqn) -> frozenset[str]:
    """Return the names that mean another axis inside an equation's body."""
    params, is_map = eqn.params, eqn.primitive.name == "px_map"
    return frozenset([params["axis"]] if is_map else params.get("newly_manual_axes", ()))


def _axes_parameter(eqn: JaxprEqn) -> str | None:
    """Return the name of the parameter in which an equation names axes, if it has one."""
    keys = ("axes", "axis_name") if eqn.primitive.name != "shard_map" else ()
    return next((key for key in keys if key in eqn.params), None)


def named_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the names of axes, and the numbers of dimensions, over which an equation works."""
    key = _axes_parameter(eqn)
    axes = () if key is None else eqn.params[key]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def renamed_axes(eqn: JaxprEqn, names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return an equation's parameter in which it names axes, if it has one, with others for ``names``."""
    key, axes = _axes_parameter(eqn), named_axes(eqn)
    if key is None or names.keys().isdisjoint(axes):
        return {}
    axes = tuple(new for name in axes for new in names.get(name, (name,)))
    return {key: axes[0] if len(axes) == 1 and isinstance(eqn.params[key], str) else axes}


def axes_of_shard_map(eqn: JaxprEqn) -> set[str]:
    """Return the mesh axes that a ``shard_map`` uses: those in its specs, and those that its body names."""
    specs = [tuple(spec) for spec in (*eqn.params["in_specs"], *eqn.params["out_specs"])]
    named = [named_axes(e) for e in equations(eqn.params["jaxpr"])]
    return {name for name in jax.tree.leaves((specs, named)) if isinstance(name, str)}


def axis_of(effect: Any) -> str | None:
    """Return the name of the axis that an effect tells of: a collective over it."""
    return str(effect.name) if isinstance(effect, core.NamedAxisEffect) else None


def free_axes(jaxpr: Jaxpr) -> set[str]:
    """Return the names of axes that a program uses and does not bind: its effects', and those of ``ppermute``."""
    names = {str(effect.name) for effect in jaxpr.effects if isinstance(effect, core.NamedAxisEffect)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("ppermute", "pbroadcast"):  # jax 0.10 to 0.12: they have no effect
            names.update(named_axes(eqn))
        for sub in jaxprs_in_params(eqn.params):
            names |= free_axes(sub) - bound_axes(eqn)
    return names


CALLS = frozenset(
    ("jit", "eval_jaxpr", "remat2", "custom_jvp_call", "custom_vjp_call", "call", "closed_call")  # jax < 0.12: two last
)
"""Operations that do what their body does, once."""


def equations(jaxpr: Jaxpr, axis: str | None = None) -> list[JaxprEqn]:
    """Return the equations of a program and of the bodies in it: all, or those that do not bind ``axis`` anew."""
    eqns = list(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        if axis is None or axis not in bound_axes(eqn):
            eqns += itertools.chain(*(equations(sub, axis) for sub in jaxprs_in_params(eqn.params)))
    return eqns


def lines_kept() -> Any:
    """Return a context in which what is compiled has the lines of its own source: else JAX takes it from disk."""
    from jax._src import config

    return config.compilation_cache_include_metadata_in_key(True)


def frames_of(eqn: JaxprEqn) -> list[tuple[str, int, str]]:
    """Return the calls that an equation comes from, the innermost first: file, line, function."""
    frames = getattr(eqn.source_info.traceback, "frames", None) or []
    return [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]


def line_of(eqn: JaxprEqn) -> str | None:
    """Return the user's line that an equation comes from, which is neither JAX's nor ours; ``None``: JAX has it not."""
    users = (f for f in frames_of(eqn) if not f[0].startswith((*_INSIDE, "<frozen")))
    return next((f"{file}:{line} ({function})" for file, line, function in users), None)


def holds(jaxpr: Jaxpr, *names: str) -> bool:
    """Return whether an operation of one of these names is in a program."""
    if (operations := _operations.get(jaxpr)) is None:
        operations = _operations[jaxpr] = frozenset([eqn.primitive.name for eqn in equations(jaxpr)])
    return not operations.isdisjoint(names)


_operations: weakref.WeakKeyDictionary[Jaxpr, frozenset[str]] = weakref.WeakKeyDictionary()


def is_jit_with(eqn: JaxprEqn, names: Iterable[str]) -> bool:
    return eqn.primitive.name == "jit" and holds(eqn.params["jaxpr"].jaxpr, *names)


def holds_foreign(jaxpr: Jaxpr) -> bool:
    """Return whether an operation in a program is a library's own, by its rules."""
    rules = {ad.primitive_transposes.get(eqn.primitive) for eqn in equations(jaxpr)} - {None}
    modules = {getattr(getattr(rule, "func", rule), "__module__", None) or "jax" for rule in rules}
    return not {module.partition(".")[0] for module in modules} <= {"jax", "paraxis"}


def calls_back(jaxpr: Jaxpr) -> bool:
    """Return whether a program calls the host, where it may raise."""
    return holds(jaxpr, "pure_callback", "io_callback", "debug_callback")


def has_effects(program: Jaxpr | JaxprEqn) -> bool:
    """Return whether running a program, or one operation, does something besides giving results."""
    return not {*map(type, program.effects)} <= {core.NamedAxisEffect}


def map_jaxprs(tree: Any, change: Callable[[Jaxpr], Jaxpr], constant: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return a tree, such as an equation's parameters, with its jaxprs and their constants replaced by others."""

    def value(item: Any) -> Any:
        if isinstance(item, ClosedJaxpr):
            return ClosedJaxpr(change(item.jaxpr), [*map(constant, item.consts)])
        return change(item) if isinstance(item, Jaxpr) else item

    return jax.tree.map(value, tree)


def in_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Return an equation with its bodies, of loops, branches and calls, replaced by others."""
    return eqn.replace(params=map_jaxprs(eqn.params, change)) if jaxprs_in_params(eqn.params) else eqn


def rewrite(
    jaxpr: Jaxpr,
    rule: Callable[[JaxprEqn], Sequence[JaxprEqn]],
    aval: Callable[[Any], Any] = lambda aval: aval,
    effects: Callable[[Any], Any] = lambda effects: effects,
) -> Jaxpr:
    """Return a jaxpr with the equations that ``rule`` gives in place of each of its own, and avals changed.

    Bodies are the rule's to change, by :func:`in_bodies`. Nothing is traced again: rules of libraries do not notice.
    """
    known: dict[Any, Any] = {}

    def atom(v: Any) -> Any:
        if (changed := aval(v.aval)) is v.aval:
            return v
        return Literal(v.val, changed) if isinstance(v, Literal) else known.setdefault(v, Var(changed))

    eqns = [
        new.replace(invars=[*map(atom, new.invars)], outvars=[*map(atom, new.outvars)])
        for eqn in jaxpr.eqns
        for new in rule(eqn)
    ]
    ends = {name: [*map(atom, getattr(jaxpr, name))] for name in ("constvars", "invars", "outvars")}
    return jaxpr.replace(**ends, eqns=eqns, effects=effects(jaxpr.effects))


def call(fn: Callable[..., Any], *atoms: Any, axis_env: Mapping[str, int] | None = None) -> JaxprEqn:
    """Return the one equation that a function is traced to, of these variables and literals."""
    closed, _ = trace(fn, [struct(v.aval) for v in atoms], axis_env or {})
    [eqn], atom_of = closed.jaxpr.eqns, dict(zip(closed.jaxpr.invars, atoms, strict=True))
    return eqn.replace(invars=[v if isinstance(v, Literal) else atom_of[v] for v in eqn.invars])


def evaluate(
    closed: ClosedJaxpr, *args: Any, opens: Callable[[JaxprEqn], bool], apply: Callable[..., Sequence[Any]] = bind
) -> list[Any]:
    """Run a jaxpr operation by operation; of a call that ``opens`` holds of, those of its body."""
    values = dict[Any, Any](zip(closed.jaxpr.invars, args, strict=True))
    values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if opens(eqn):
            body = next(value for value in eqn.params.values() if isinstance(value, (Jaxpr, ClosedJaxpr)))
            body = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
            results = evaluate(body, *operands, opens=opens, apply=apply)
        else:
            results = apply(eqn, *operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in closed.jaxpr.outvars]


def with_copies(tree: Any) -> Any:
    """Return a tree with copies of NumPy's arrays in its jaxprs: an inner ``jit`` closes over those of the user."""

    def copied(jaxpr: Jaxpr) -> Jaxpr:
        return rewrite(jaxpr, lambda eqn: [eqn.replace(params=with_copies(eqn.params))])

    return map_jaxprs(tree, copied, lambda x: x.copy() if isinstance(x, np.ndarray) else x)


def batch(
    closed: ClosedJaxpr, axis_data: Any, in_axes: Sequence[int | None], axis_env: Sequence[tuple[str, int]], inner: str
) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the ``vmap`` of a jaxpr, whose batched results have the batch first, and which of them are batched.

    ``axis_data`` is what a batching rule is told of the batch. Where its name is that of the map's ``inner`` axis, the
    inner one is meant. No public function says which results are alike.
    """
    from jax._src.interpreters import batching

    if axis_data.name == inner:
        axis_data = dataclasses.replace(axis_data, name=core.no_axis_name)
    dests = [batching.zero_if_mapped] * len(closed.out_avals)
    with core.extend_axis_env_nd(list(axis_env)):
        batched, mask = batching.batch_jaxpr_axes(closed, axis_data, in_axes, dests)
    return batched, [bool(is_batched) for is_batched in mask]


def varying_results(
    closed: ClosedJaxpr, in_axes: Sequence[Any], size: int, name: str | None, axis_env: Sequence[tuple[str, int]] = ()
) -> list[bool]:
    """Return, for each result of a jaxpr, whether it may differ along the batch in which these arguments do."""
    from jax._src.interpreters import batching

    data = batching.AxisData(core.no_axis_name if name is None else name, size, None, None)
    return batch(closed, data, in_axes, axis_env, inner="")[1]


def observe_vmap(x: Any, index: jax.Array, note: Callable[[list[bool]], None]) -> Any:
    """Return ``x``, and have ``vmap`` call ``note`` with which leaves may differ between elements.

    ``index``, the element's number, does differ: this vmap, and not one around it, then answers.
    """
    same = jax.custom_batching.custom_vmap(lambda _, x: x)

    def over(_: int, differ: Any, __: jax.Array, x: Any) -> Any:
        note(jax.tree.leaves(differ[1]))
        return x, differ[1]

    same.def_vmap(over)
    return same(index, x)


def struct(x: Any, drop: int = 0, lead: Sequence[int] = ()) -> jax.ShapeDtypeStruct:
    """Return what an array looks like without its first ``drop`` dimensions, and with others in their place.

    Its sharding is there where that is part of its type: a dimension lies over an Explicit mesh.
    """
    aval: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    spec = [*aval.sharding.spec][drop:] if aval.sharding.mesh.explicit_axes else []
    sharding = NamedSharding(aval.sharding.mesh, P(*[None] * len(lead), *spec)) if any(spec) else None
    return jax.ShapeDtypeStruct((*lead, *aval.shape[drop:]), aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def typed_as(aval: Any, y: jax.Array) -> jax.Array:
    """On an Explicit mesh: a cotangent laid as what it is of, or whole on each device if that has no such type."""
    laid = jax.typeof(y).sharding
    if not laid.mesh.explicit_axes:
        return y
    spec = aval.sharding.spec if not aval.sharding.mesh.empty else P(*[None] * y.ndim)
    return jax.reshard(y, NamedSharding(laid.mesh, spec))


def is_device_varying(x: Any) -> bool:
    """Return whether a value's type says that it differs between devices of a ``shard_map`` around it."""
    return bool(getattr(getattr(jax.typeof(x), "mat", None), "varying", ()))


def weak(x: jax.Array) -> Any:
    """Return the same ``(...)``, of a dtype that gives way to others, as that of a Python number does."""
    from jax._src.lax import lax  # no public function makes a weak type

    return lax._convert_element_type(x, weak_type=True)


def coordination() -> Any:
    """Return the client of the store in which the processes of a job write what all read; ``None`` in a lone one."""
    from jax._src import distributed

    return distributed.global_state.client


def mesh_entered() -> Any:
    """Return the mesh that ``with mesh:`` entered, which JAX has given up; ``None``: there is none."""
    try:
        from jax._src.mesh import thread_resources
    except ImportError:
        return None
    return None if thread_resources.env.physical_mesh.empty else thread_resources.env.physical_mesh


def is_tracing() -> bool:
    """Return whether JAX traces here, for ``jit``, ``grad``, ``vmap``, a loop: calls are noted instead of run."""
    return not core.trace_state_clean()


def checks_numbers() -> bool:
    """Return whether ``jax.debug_nans`` or ``jax.debug_infs`` is in force, in this thread."""
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # pyright: ignore[reportAttributeAccessIssue]


def is_staging() -> bool:
    """Return whether operations are noted to run later: in ``jit``, loops, ``shard_map``; not in ``grad``, ``vmap``."""
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace

    trace: Any = core.trace_ctx.trace
    while not isinstance(trace, DynamicJaxprTrace) and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return not isinstance(trace, core.EvalTrace)


def is_wide() -> bool:
    """Return whether 64-bit numbers are in force, in this thread."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64
