"""A body that was traced where its map stands, run where its elements lie: inside ``shard_map``, on the axis's devices.

Most equations mean the same in both places. These do not: a map in the body (its devices' version takes its place), a
``shard_map`` of the user's own, and whatever names a sharding, which there means the mesh as it is inside.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from paraxis._jax import jax_api
from paraxis._jax.jax_api import ClosedJaxpr, JaxprEqn

Nested = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]


def here(body: ClosedJaxpr, args: Sequence[Any], names: Mapping[str, int], nested: Nested) -> list[Any]:
    """Run a body inside ``shard_map``. ``names`` are the axes it may name; ``nested`` runs a map that stands in it."""
    mesh = jax.sharding.get_abstract_mesh()

    def special(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any] | None:
        if eqn.primitive.name == "px_map":
            return nested(eqn, operands)
        if not _is_placed(eqn, mesh):
            return _bind(eqn, eqn.params, operands, mesh)
        if eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")):  # no derivative is taken any more
            return here(eqn.params["call_jaxpr"], operands, names, nested)
        if eqn.primitive.name == "shard_map":
            return jax_api.rebind_shard_map(eqn, lambda body, args: here(body, args, names, nested), operands, mesh)

        def changed(body: ClosedJaxpr) -> ClosedJaxpr:
            avals = [_struct(aval, mesh) for aval in body.in_avals]
            return jax_api.trace(lambda *args: here(body, args, names, nested), avals, names)[0]

        params = {name: _moved(value, mesh) for name, value in jax_api.map_jaxprs(eqn.params, changed).items()}
        return _bind(eqn, params, operands, mesh)

    return jax_api.evaluate(body, args, lambda _: False, special)


def _bind(eqn: JaxprEqn, params: dict[str, Any], operands: Sequence[Any], mesh: AbstractMesh) -> Sequence[Any]:
    with jax_api.from_its_line(eqn), eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(dict(params)))
    return results if eqn.primitive.multiple_results else [results]


def _is_placed(eqn: JaxprEqn, mesh: AbstractMesh) -> bool:
    """Return whether an equation, or one inside it, says something about meshes."""
    if eqn.primitive.name in ("px_map", "shard_map") or any(isinstance(v, NamedSharding) for v in eqn.params.values()):
        return True
    return any(
        _are_elsewhere((*sub.invars, *sub.outvars), mesh)  # a body without equations hands on what its types say
        or any(_was_elsewhere(inner, mesh) or _is_placed(inner, mesh) for inner in sub.eqns)
        for sub in jax_api.subjaxprs(eqn)
    )


def _was_elsewhere(eqn: JaxprEqn, mesh: AbstractMesh) -> bool:
    """Return whether an equation was traced with another mesh in force, or its types name one."""
    before = eqn.ctx.cur_abstract_mesh
    return (not before.empty and before != mesh) or _are_elsewhere((*eqn.invars, *eqn.outvars), mesh)


def _are_elsewhere(values: Sequence[Any], mesh: AbstractMesh) -> bool:
    """Return whether the type of a value in a jaxpr names another mesh."""
    named = [getattr(v.aval, "sharding", None) for v in values]
    return any(s is not None and not s.mesh.empty and s.mesh != mesh for s in named)


def _struct(aval: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    typed = not mesh.empty and jax_api.is_explicit(mesh, mesh.axis_names)
    sharding = _moved(aval.sharding, mesh) if typed and not aval.sharding.mesh.empty else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def _moved(value: Any, mesh: AbstractMesh) -> Any:
    if not isinstance(value, NamedSharding) or mesh.empty:
        return value
    taken = jax_api.manual_axes(mesh)

    def entry(names: Any) -> Any:
        if isinstance(names, tuple):
            return tuple(name for name in names if name not in taken) or None
        return None if names in taken else names

    return NamedSharding(mesh, P(*map(entry, value.spec)))
