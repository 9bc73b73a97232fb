"""A jaxpr that was traced outside of a mesh, for a place inside ``shard_map``, where some of its axes are manual.

Only what names meshes differs: shardings, the types of arrays on an Explicit mesh, maps and the ``shard_map`` of users.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from paraxis._core import jax_api
from paraxis._core.jax_api import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


def moved(closed: ClosedJaxpr, mesh: AbstractMesh) -> ClosedJaxpr:
    """Return the same computation for a place inside this mesh."""
    if mesh.empty or not _is_placed(closed.jaxpr):
        return closed
    return ClosedJaxpr(_moved(closed.jaxpr, mesh), closed.consts)


def renamed(jaxpr: Jaxpr, names: Mapping[str, tuple[str, ...]]) -> Jaxpr:
    """Return the same computation with other names of axes in its collectives."""

    def one(eqn: JaxprEqn) -> JaxprEqn:
        free = {name: new for name, new in names.items() if name not in jax_api.bound_axes(eqn)}
        params = jax_api.map_jaxprs(eqn.params, lambda body: renamed(body, free))
        for key in {"axes", "axis_name"} & params.keys():
            if not free.keys().isdisjoint(old := jax_api.named_axes(eqn)):
                params[key] = tuple(new for name in old for new in free.get(name, (name,)))
        return eqn.replace(params=params, effects=_renamed_effects(eqn.effects, free))

    return jaxpr.replace(eqns=[*map(one, jaxpr.eqns)], effects=_renamed_effects(jaxpr.effects, names))


def _renamed_effects(effects: Any, names: Mapping[str, tuple[str, ...]]) -> set[Any]:
    return {
        new for e in effects for new in ([type(e)(n) for n in names[e.name]] if jax_api.axis_of(e) in names else [e])
    }


def _is_placed(jaxpr: Jaxpr) -> bool:
    """Return whether it names a mesh."""
    variables = [*jaxpr.invars, *jaxpr.outvars]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("px_map", "shard_map") or not eqn.ctx.cur_abstract_mesh.empty:
            return True
        if any(isinstance(value, NamedSharding) for value in eqn.params.values()):
            return True
        variables += eqn.outvars
    if any(_is_laid(v.aval) for v in variables):
        return True
    return any([_is_placed(sub) for eqn in jaxpr.eqns for sub in jax_api.subjaxprs(eqn)])  # noqa: C419  # fewer calls


def _moved(jaxpr: Jaxpr, mesh: AbstractMesh) -> Jaxpr:
    known: dict[Any, Any] = {}

    def var(v: Any) -> Any:
        if isinstance(v, Literal):
            return Literal(v.val, _aval(v.aval, mesh))
        return known.setdefault(v, Var(_aval(v.aval, mesh)))

    def one(eqn: JaxprEqn) -> JaxprEqn:
        inner = mesh
        if eqn.primitive.name == "shard_map":
            inner = mesh.update_axis_types(dict.fromkeys(eqn.params["newly_manual_axes"], AxisType.Manual))
        params = jax_api.map_jaxprs(eqn.params, lambda body: _moved(body, inner))
        params = {name: _sharding(value, mesh) for name, value in params.items()}
        if eqn.primitive.name == "shard_map":
            params["mesh"] = mesh
        with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
            here = type(eqn.ctx)()
        return eqn.replace(invars=[*map(var, eqn.invars)], outvars=[*map(var, eqn.outvars)], params=params, ctx=here)

    ends = {"constvars": [*map(var, jaxpr.constvars)], "invars": [*map(var, jaxpr.invars)]}
    eqns = [*map(one, jaxpr.eqns)]
    return jaxpr.replace(**ends, eqns=eqns, outvars=[*map(var, jaxpr.outvars)])


def _aval(aval: Any, mesh: AbstractMesh) -> Any:
    return aval.update(sharding=_sharding(aval.sharding, mesh)) if _is_laid(aval) else aval


def _is_laid(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


@functools.lru_cache(maxsize=256)
def _on(spec: P, mesh: AbstractMesh) -> NamedSharding:
    taken = mesh.manual_axes

    def entry(names: Any) -> Any:
        if isinstance(names, tuple):
            return tuple(name for name in names if name not in taken) or None
        return None if names in taken else names

    return NamedSharding(mesh, P(*map(entry, spec)))


def _sharding(value: Any, mesh: AbstractMesh) -> Any:
    return _on(value.spec, mesh) if isinstance(value, NamedSharding) else value
