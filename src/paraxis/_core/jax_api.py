"""The only door to parts of JAX that may move between versions.

Everything else in the package uses names that JAX documents as public on both ends of the supported
range (0.10.2 and 0.12). What is imported here is listed with the reason why it is needed.
"""

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import (
    clusters,  # says whether a scheduler has started this process, which else is alone
    config,  # lets a compiled program that is kept tell the lines of another file, or not
    core,  # the one place that says whether a trace is under way, where no argument tells
    distributed as distributed,  # its client is the only barrier that has a timeout
    hardware_utils,  # says whether there are TPUs, without starting them
    xla_bridge as xla_bridge,  # says whether devices were started; can tell CPU's network its address
)
from jax._src.interpreters.partial_eval import lower_jaxpr2  # carries out what stands for other operations
from jax._src.lax import lax  # the one way to a weak type
from jax._src.mesh import thread_resources as thread_resources  # what `with mesh:` entered, which JAX has given up
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
    subjaxprs,
)
from jax.interpreters import ad as ad, batching as batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec as P

_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (jax.__file__, Path(__file__).parent))
"""The folders of code that is not the user's."""


def define_lowering(primitive: Primitive, implementation: Callable[..., Any]) -> None:
    """Lower a single-result primitive by lowering the JAX function that computes it; each with a line of its own."""
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=False), cacheable=False)


def define_map(
    name: str, avals: Any, implementation: Any, evaluated: Any, jvp: Any, transpose: Any, batched: Any
) -> Primitive:
    """Return a primitive of any number of operands and results, with rules that are given what is not zero.

    ``avals`` gives the results' avals and effects; ``implementation`` is lowered, ``evaluated`` called with concrete
    arrays. Parameters have a ``body``, and say ``how.names``, the sizes of the axes that it may name.
    """

    def without_high(*operands: Any, **params: Any) -> Any:
        with core.extend_axis_env_nd(list(params["how"].names)):
            body, consts = without_constants(lower_jaxpr2(params["body"]))
        shared, linear = (*[True] * len(consts), *params["shared"]), (*[False] * len(consts), *params["linear"])
        return primitive.bind(*consts, *operands, **{**params, "body": body, "shared": shared, "linear": linear})

    def batch_rule(axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        name = None if axis_data.name is core.no_axis_name else axis_data.name
        return batched(operands, dims, size=axis_data.size, name=name, params=params)

    def check(_: Any, *atoms: Any, **params: Any) -> Any:
        with core.extend_axis_env_nd(list(params["how"].names)):
            core.check_jaxpr(params["body"].jaxpr)
        return primitive.abstract_eval(*(atom.aval for atom in atoms), **params)

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        live = [type(t) is not ad.Zero and getattr(t, "dtype", None) != jax.dtypes.float0 for t in tangents]
        results, moving, found = jvp(primals, live, [*itertools.compress(tangents, live)], **params)
        rest, zeros = iter(found), (ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results)
        return results, [next(rest) if moves else zero for moves, zero in zip(moving, zeros, strict=True)]

    def transpose_rule(cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        linear = [ad.is_undefined_primal(x) for x in operands]
        live, each = [type(ct) is not ad.Zero for ct in cts], list(zip(operands, linear, strict=True))
        if not any(live):
            return [ad.Zero(x.aval.to_ct_aval()) if is_linear else None for x, is_linear in each]
        rest = iter(transpose([*itertools.compress(cts, live)], live, operands, linear, **params))
        return [typed_as(x.aval, next(rest)) if is_linear else None for x, is_linear in each]

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


def named_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the names of axes, and the numbers of dimensions, over which an equation works."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ())) if eqn.primitive.name != "shard_map" else ()
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def axis_of(effect: Any) -> str | None:
    """Return the name of the axis that an effect tells of: a collective over it."""
    return str(effect.name) if isinstance(effect, core.NamedAxisEffect) else None


CALLS = frozenset(
    ("jit", "eval_jaxpr", "remat2", "custom_jvp_call", "custom_vjp_call", "call", "closed_call")  # jax < 0.12: two last
)
"""Operations that do what their body does, once."""


def equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations of a program and of all bodies in it, of loops, branches and calls."""
    return [*jaxpr.eqns, *itertools.chain(*map(equations, subjaxprs(jaxpr)))]


lines_kept = functools.partial(config.compilation_cache_include_metadata_in_key, True)
"""A context in which what is compiled has the lines of its own source: JAX keeps programs on disk without them."""


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
    return not {eqn.primitive.name for eqn in equations(jaxpr)}.isdisjoint(names)


def has_effects(program: Jaxpr | JaxprEqn) -> bool:
    """Return whether running a program, or one operation, does something besides giving results."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in program.effects)


def map_jaxprs(tree: Any, change: Callable[[Jaxpr], Jaxpr], constant: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return a tree, such as an equation's parameters, with its jaxprs and their constants replaced by others."""

    def value(item: Any) -> Any:
        if isinstance(item, ClosedJaxpr):
            return ClosedJaxpr(change(item.jaxpr), [*map(constant, item.consts)])
        return change(item) if isinstance(item, Jaxpr) else item

    return jax.tree.map(value, tree)


def to_keep(tree: Any) -> Any:
    """Return a tree with copies of NumPy's arrays in its jaxprs: an inner ``jit`` closes over those of the user."""

    def copied(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[eqn.replace(params=to_keep(eqn.params)) for eqn in jaxpr.eqns])

    return map_jaxprs(tree, copied, lambda x: x.copy() if isinstance(x, np.ndarray) else x)


def has_tpu() -> bool:
    """Return whether there are TPUs on this machine."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


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


weak: Any = functools.partial(lax._convert_element_type, weak_type=True)
"""The same value, of a dtype that gives way to others, as that of a Python number does."""


def detects_cluster() -> bool:
    """Return whether ``jax.distributed.initialize()`` would find a scheduler that has started this process."""
    return any(kind.is_env_present() for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method)


def collect_at(address: str) -> None:
    """Have CPU devices meet others' here, unless they have started: JAX takes what the host's name resolves to."""

    def make() -> Any:
        client, gloo = distributed.global_state.client, xla_bridge._jax.make_gloo_tcp_collectives  # pyright: ignore
        return xla_bridge.make_cpu_client(gloo(distributed_client=client, hostname=address))

    kind = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if kind == "gloo" and not xla_bridge.backends_are_initialized():
        xla_bridge.register_backend_factory("cpu", make, fail_quietly=False)


def is_tracing() -> bool:
    """Return whether JAX traces here, for ``jit``, ``grad``, ``vmap``, a loop: calls are noted instead of run."""
    return not core.trace_state_clean()


def checks_numbers() -> bool:
    """Return whether ``jax.debug_nans`` or ``jax.debug_infs`` is in force, in this thread."""
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # pyright: ignore[reportAttributeAccessIssue]


def no_key_checks() -> Any:
    """Return a context in which ``jax.debug_key_reuse`` is off."""
    is_on = jax.config.jax_debug_key_reuse  # pyright: ignore[reportAttributeAccessIssue]
    return jax.debug_key_reuse(False) if is_on else contextlib.nullcontext()


def is_wide() -> bool:
    """Return whether 64-bit numbers are in force, in this thread."""
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64
