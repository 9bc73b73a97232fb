"""Maps and programs compose with the rest of JAX: whatever surrounds one, whatever it holds, the answer is the same.

Each law is a table of surroundings, programs and places: a new border is a line in one. Expected values are those of
plain ``jax.vmap`` on one device. ``test_borders.py`` has exceptions, interpreters, modes, and what a body may hold.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import paraxis as px
from tests._support import assert_close, axis_on, mesh_over, table, values

Fn = Callable[..., Any]
KEY = jax.random.PRNGKey(0)


def score(f: Fn) -> Fn:
    """A number in which every result counts, each by another factor."""
    return lambda x: sum((jnp.sin(y).sum() * (1 + i) for i, y in enumerate(jax.tree.leaves(f(x)))), 0.0)


# --- a trace belongs to its program ---------------------------------------------------------------------------------


def helper(c: jax.Array) -> jax.Array:
    """Nothing in its argument tells how many elements there are: it depends on the program that calls this."""
    noise = px.map_fn(lambda c, key: c**2 * (1 + jax.random.uniform(key)), (px.broadcast(c), px.keys(KEY)))
    return px.reduce_sum(noise) + px.reduce_sum(px.broadcast(c, "rows"), "rows")


def plain_helper(c: jax.Array, size: int, times: int) -> jax.Array:
    noise = jnp.stack([jax.random.uniform(jax.random.fold_in(KEY, i)) for i in range(size)])
    return times * (c**2 * (1 + noise) + c).sum()


def in_scan(f: Fn) -> Fn:
    return (lambda step: lambda c: lax.scan(step, c, None, length=1)[0])(lambda c, _: (f(c), None))


def ruled(f: Fn) -> Fn:
    made = jax.custom_vjp(f)
    made.defvjp(lambda c: (f(c), jax.grad(f)(c)), lambda slope, ct: (slope * ct,))
    return made


# What keeps a trace of a function. The body of a loop is one object, as that of a helper is.
REMEMBERING: dict[str, Callable[[Fn], Fn]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "eqx.filter_jit": eqx.filter_jit,
    "eqx.filter_checkpoint": eqx.filter_checkpoint,
    "nnx.jit": nnx.jit,
    "scan": in_scan,
    "fori_loop": lambda f: functools.partial(lax.fori_loop, 0, 1, lambda _, c: f(c)),
    "while_loop": lambda f: (lambda goes_on, step: lambda c: lax.while_loop(goes_on, step, (True, c))[1])(
        lambda s: s[0], lambda s: (False, f(s[1]))
    ),
    "cond": lambda f: lambda c: lax.cond(c > 0, f, jnp.sin, c),
    "switch": lambda f: lambda c: lax.switch((c > 0).astype(int), [jnp.sin, f, jnp.cos], c),
    "custom_vjp": ruled,
    "jit in checkpoint in scan": lambda f: in_scan(jax.checkpoint(jax.jit(f))),
}


def within(f: Fn) -> Fn:
    """A program within the map of another: three times the same."""
    inner = px.program(rows=4)(f)
    return px.program(groups=3)(
        lambda c: px.reduce_sum(px.map_fn(lambda c, _: inner(c), (px.broadcast(c), np.zeros(3, np.float32))))
    )


PROGRAMS: dict[str, tuple[int, int, Callable[[Fn], Fn]]] = {
    "4": (4, 1, px.program(rows=4)),
    "6": (6, 1, px.program(rows=6)),
    "6 one at a time": (6, 1, px.program(rows=px.Axis("rows", 6, at_once=1))),
    "6 on two devices": (6, 1, px.program(rows=axis_on(2, 6))),
    "4 within a map": (4, 3, within),
}


@pytest.mark.parametrize(
    ("name", "order"), table([("jit in checkpoint in scan", 1)], itertools.product(REMEMBERING, (1, -1)))
)
def test_a_trace_belongs_to_its_program(name: str, order: int) -> None:
    """Compiled and eager programs in turn; in the other order, each the other way."""
    remembered, c = REMEMBERING[name](helper), jnp.float32(1.5)
    by_jvp: Fn = lambda f: lambda c: jax.jvp(f, (c,), (jnp.ones_like(c),))  # noqa: E731
    with_slope = by_jvp if name == "while_loop" else jax.value_and_grad  # JAX has no reverse mode of it
    of_plain = jax.jit(jax.value_and_grad(plain_helper), static_argnums=(1, 2))
    found, expected = {}, {}
    for number, (program, (size, times, declare)) in enumerate(list(PROGRAMS.items())[::order]):
        if times > 1 and name == "custom_vjp":  # JAX traces a forward pass late, when the program within has ended
            continue
        run, is_compiled = with_slope(declare(remembered)), (number % 2 == 0) == (order == 1)
        found[program] = (jax.jit(run) if is_compiled else run)(c)
        expected[program] = of_plain(c, size, times)
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["jit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("checkpoint", "nnx.jit"))])
def test_a_refusal_belongs_to_its_program(name: str) -> None:
    """One at a time, elements cannot exchange values, whichever program came first."""
    share = REMEMBERING[name](lambda x: x / px.psum(x, "rows"))
    run = lambda axis: px.program(rows=axis)(lambda x: px.reduce_sum(px.map_fn(share, x)))(values(16))  # noqa: E731
    for _ in range(2):
        assert_close(run(px.Axis("rows", 16)), jnp.float32(1))
        with pytest.raises(px.AxisError, match="at_once"):
            run(px.Axis("rows", 16, at_once=1))


# --- a name means the innermost axis of that name -------------------------------------------------------------------


def exchange(by: Any) -> Fn:
    """One element's function by our collectives, ``px``, or by JAX's, ``lax``."""
    return lambda e: {
        "psum": e / by.psum(e, "i"),
        "pmean": e * by.pmean(e, "i"),
        "index": e * by.axis_index("i"),
        "all_gather": jnp.sin(by.all_gather(e, "i")).sum() * e,
        "size": e * by.axis_size("i"),
    }


def by_shard_map(f: Fn) -> Fn:
    return jax.shard_map(lambda x: jax.tree.map(lambda y: y[None], f(x[0])), mesh=mesh_over(i=3),
                         in_specs=P("i"), out_specs=P("i"), check_vma=False)  # fmt: skip


OURS: dict[str, Callable[[Fn], Fn]] = {
    "map_fn": lambda f: lambda x: px.map_fn(f, x, px.Axis("i", len(x))),
    "pmap": lambda f: px.pmap(f, axis_name="i"),
    "program": lambda f: lambda x: px.program(i=len(x))(lambda x: px.map_fn(f, x))(x),
}
VMAP: dict[str, Callable[[Fn], Fn]] = {"jax.vmap": lambda f: jax.vmap(f, axis_name="i")}
MANUAL: dict[str, Callable[[Fn], Fn]] = {"jax.pmap": lambda f: jax.pmap(f, axis_name="i"), "shard_map": by_shard_map}


@pytest.mark.parametrize(
    ("outer", "inner", "size"),
    table([("jax.vmap", "pmap", 4), ("map_fn", "program", 13)],
          [*itertools.product(OURS | VMAP | MANUAL, OURS, (4, 13)), *itertools.product(OURS, VMAP, (4, 13))]),
)  # fmt: skip
def test_a_name_means_the_innermost_axis_of_that_name(outer: str, inner: str, size: int) -> None:
    """Where each device is its own already, a map may refuse to be within."""
    levels, x = OURS | VMAP | MANUAL, values(3, size)

    plain = jax.vmap(jax.vmap(exchange(lax), axis_name="i"), axis_name="i")
    expected = jax.jit(lambda x: (plain(x), jax.grad(score(plain))(x)))(x)
    for by in (px, lax) if inner in OURS else (lax,):
        nested = levels[outer](levels[inner](exchange(by)))
        with contextlib.suppress(*[px.AxisError] if outer in MANUAL else []):
            found = nested(x), jax.jit(jax.grad(score(nested)))(x)
            assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- where data lie ---------------------------------------------------------------------------------------------------


def on(mesh: Mesh, *spec: Any) -> Fn:
    return lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec)))


def squares(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((w - x) ** 4)


ROWS = px.Axis("rows", 8)
PLACES: dict[str, Fn] = {
    "uncommitted": jnp.asarray,
    "NumPy": np.asarray,
    "device 0": lambda x: jax.device_put(x, jax.devices()[0]),
    "device 3": lambda x: jax.device_put(x, jax.devices()[3]),
    "all devices": on(mesh_over(rows=8)),
    "another mesh": on(mesh_over(a=2, b=4), "a"),
    "devices backwards": on(Mesh(np.array(jax.devices()[::-1]), ("i",))),
    "fewer devices": on(mesh_over(c=2), "c"),
}
PLACES_OF_BOTH = [*((p, p) for p in PLACES), ("device 0", "another mesh"), ("fewer devices", "device 3")]
FORMS: dict[str, Fn] = {
    "program": px.program(rows=8)(lambda w, x: px.reduce_mean(px.map_fn(squares, (px.broadcast(w), x)))),
    "pmap": lambda w, x: px.pmap(squares, in_axes=(None, 0))(w, x).mean(),
    "map_fn": lambda w, x: px.reduce_mean(px.map_fn(squares, (px.broadcast(w, ROWS), x), ROWS), ROWS),
}
DERIVATIVES: dict[str, Callable[[Fn], Fn]] = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, argnums=(0, 1)),
    "value_and_grad": jax.value_and_grad,
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "hessian": jax.hessian,
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
    "vmap(grad)": lambda f: jax.vmap(jax.grad(f), in_axes=(0, None)),
}


@pytest.mark.parametrize(
    ("form", "derivative"), table([("program", "grad"), ("pmap", "grad")], itertools.product(FORMS, DERIVATIVES))
)
def test_arguments_may_lie_anywhere_and_gradients_come_back_to_them(form: str, derivative: str) -> None:
    change, w, x = DERIVATIVES[derivative], values(2, 2, seed=1), values(8, 2)
    w = w if "vmap" in derivative else w[0]
    expected = jax.jit(change(lambda w, x: jax.vmap(squares, (None, 0))(w, x).mean()))(w, x)
    for places in PLACES_OF_BOTH:
        arguments = tuple(PLACES[place](leaf) for place, leaf in zip(places, (w, x), strict=True))
        found = change(FORMS[form])(*arguments)
        assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for argument, gradient in zip(arguments, found if derivative == "grad" else (), strict=False):
            if isinstance(argument, jax.Array) and argument.committed:
                assert gradient.sharding.device_set == argument.sharding.device_set, places


def test_pmap_remembers_devices_and_no_abstract_mesh() -> None:
    halves = [Mesh(np.array(part), ("i",)) for part in (jax.devices()[:4], jax.devices()[4:])]
    x, twice = values(8), px.pmap(lambda x: 2 * x, axis_name="i")
    for mesh, given in itertools.product(halves, (on(halves[0], "i")(x), on(halves[1], "i")(x), x)):
        with jax.set_mesh(mesh):
            found = twice(given)
        assert found.sharding.device_set == set(mesh.devices.flat)
        assert_close(found, 2 * x)


# --- maps of any sizes meet -------------------------------------------------------------------------------------------

FEW, MANY, X = values(3, seed=1), values(13, seed=2), values(3, 3, seed=3)
# By a maker of maps: px.pmap, and jax.vmap for the expected value.
SUMS: dict[str, Callable[[Fn], Fn]] = {
    "added": lambda pmap: lambda a, b: pmap(jnp.sin)(a).sum() + pmap(jnp.cos)(b).sum(),
    "shared": lambda pmap: lambda a, b: sum(pmap(jnp.multiply, in_axes=(0, None))(x, a[0]).sum() for x in (a, b)),
    "multiplied": lambda pmap: lambda a, b: (pmap(jnp.sin)(a).sum() * pmap(jnp.cos)(b)).sum(),
    "joined": lambda pmap: lambda a, b: jnp.concatenate([pmap(jnp.sin)(a), pmap(jnp.cos)(b)]).prod(),
}
SITES: dict[str, Callable[[Fn], Fn]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(f, argnums=(0, 1)),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, argnums=(0, 1))),
    "scan": lambda f: lambda a, b: lax.scan(lambda c, _: (f(jnp.tanh(c + a), b), None), 0.5, None, length=3)[0],
    "vmap": lambda f: lambda a, b: jax.vmap(f)(jnp.stack([a, 2 * a]), jnp.stack([b, 2 * b])),
}


@pytest.mark.parametrize(
    ("site", "devices"), table([("eager", 8), ("jit(grad)", 8)], itertools.product(SITES, (1, 2, 8)))
)
def test_maps_of_any_sizes_meet(site: str, devices: int) -> None:
    for make in SUMS.values():
        expected = jax.jit(SITES[site](make(jax.vmap)))(FEW, MANY)
        with jax.set_mesh(mesh_over(i=devices)) if devices < 8 else contextlib.nullcontext():
            found = SITES[site](make(lambda f, **axes: px.pmap(f, axis_name="i", **axes)))(FEW, MANY)
        assert_close(found, expected, rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [8, 13, 3])
def test_results_of_other_parts_meet_maps_of_any_size(size: int) -> None:
    axis, predict = px.Axis("j", 13), lambda ens: ens.predict(X, average="mean").sum()
    members = lambda n: px.ensemble(lambda key, w: w, n, 0, values(n, 3), apply=lambda w, x: x @ w)  # noqa: E731
    total = px.program(rows=13)(lambda x: px.reduce_sum(px.map_fn(jnp.sin, x)))
    parts = {
        "program": (total(MANY), jnp.sin(MANY).sum()),
        "map_fn": (px.map_fn(jnp.sin, MANY, axis).sum(), jnp.sin(MANY).sum()),
        "scatter": (px.scatter(MANY, axis).sum(), MANY.sum()),
        "ensemble of 3": (predict(members(3)), (X @ values(3, 3).mean(0)).sum()),
        "ensemble of 11": (predict(members(11)), (X @ values(11, 3).mean(0)).sum()),
    }
    mapped, plain = px.pmap(jnp.sin)(MANY[:size]).sum(), jnp.sin(MANY[:size]).sum()
    for name, (found, expected) in parts.items():
        assert_close({name: mapped + found}, {name: plain + expected})


# --- solvers, under vmap and in a map within a map --------------------------------------------------------------------


def by_newton(loop: Callable[[Fn, Fn, jax.Array], jax.Array]) -> Fn:
    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        solve = lambda f, y: loop(f, lambda y: y - f(y) / jax.grad(f)(y), y)  # noqa: E731
        return lax.custom_root(lambda y: y**3 + w * y - x, jnp.ones(()), solve, lambda g, y: y / g(1.0))

    return run


def ode(solver: diffrax.AbstractSolver, steps: int, **options: Any) -> Fn:
    term = diffrax.ODETerm(lambda t, y, w: -w * y)
    arguments: Any = {"max_steps": steps, **options}
    solve: Any = diffrax.diffeqsolve
    return lambda w, x: solve(term, solver, 0.0, 1.0, 0.5, x, args=w, **arguments).ys[-1]


SOLVERS: dict[str, Fn] = {
    "lineax": lambda w, x: lx.linear_solve(lx.MatrixLinearOperator(w * jnp.eye(2) + 0.1), x * jnp.ones(2)).value.sum(),
    "optimistix": lambda w, x: (
        optx.root_find(lambda y, _: y**3 + w * y - x, optx.Newton(1e-6, 1e-6), jnp.ones(())).value
    ),
    "while": by_newton(lambda f, step, y: lax.while_loop(lambda y: jnp.abs(f(y)) > 1e-5, step, y)),
    "Euler": ode(diffrax.Euler(), 4),
    "Tsit5": ode(diffrax.Tsit5(), 4),
    "Tsit5, many steps": ode(diffrax.Tsit5(), 256, adjoint=diffrax.DirectAdjoint()),
    "Tsit5, PID": ode(diffrax.Tsit5(), 16, stepsize_controller=diffrax.PIDController(1e-3, 1e-4)),
}
BATCHES: dict[str, Callable[[Fn], Fn]] = {
    "vmap(grad)": lambda f: jax.vmap(jax.grad(f), (0, None)),
    "jit(vmap(grad))": lambda f: jax.jit(jax.vmap(jax.grad(f), (0, None))),
}


@pytest.mark.parametrize(
    ("solver", "batch", "devices", "size"),
    table([("lineax", "jit(vmap(grad))", 8, 13), ("while", "vmap(grad)", 8, 13)],
          ((*names, *place) for *names, place in itertools.product(SOLVERS, BATCHES, [(1, 3), (8, 8), (8, 13)]))),
)  # fmt: skip
def test_programs_that_solve_may_be_batched(solver: str, batch: str, devices: int, size: int) -> None:
    w, x, solve = values(2) + 1, values(size, seed=1), SOLVERS[solver]

    @px.program(rows=axis_on(devices, size))
    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return px.reduce_sum(px.map_fn(solve, (px.broadcast(w), x)))

    plain = lambda w, x: jax.vmap(solve, (None, 0))(w, x).sum()  # noqa: E731
    assert_close(BATCHES[batch](total)(w, x), jax.jit(BATCHES[batch](plain))(w, x), rtol=1e-4, atol=1e-4)


# Elements of the outer and the inner axis, and at_once of both: with several outer ones a device, and with padding.
NESTS: list[tuple[Any, ...]] = [(6, 16, None, None), (3, 50, None, None), (2, 2, None, None), (16, 4, None, None),
                                (8, 16, None, None), (6, 5, 1, None), (6, 5, None, 1), (10, 3, 2, 1)]  # fmt: skip
REVERSE_ONLY = ("Euler", "Tsit5", "Tsit5, many steps", "Tsit5, PID")  # by diffrax, of its default adjoint


@pytest.mark.parametrize(
    ("solver", "derivative", "sizes"),
    table([("lineax", "grad", NESTS[3])],
          ((s, d, sizes) for s, d, sizes in itertools.product(SOLVERS, ("value", "grad", "jvp", "hessian"), NESTS)
           if s not in REVERSE_ONLY or d in ("value", "grad"))), ids=str,
)  # fmt: skip
def test_a_map_within_a_map_solves_as_nested_vmaps_do(solver: str, derivative: str, sizes: Any) -> None:
    num_sets, num_points, *at_once = sizes
    sets, points = px.Axis("sets", num_sets, at_once=at_once[0]), px.Axis("points", num_points, at_once=at_once[1])
    w, x, solve, change = jnp.float32(1.5), values(num_sets, num_points), SOLVERS[solver], DERIVATIVES[derivative]

    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        def of_set(w: jax.Array, x: jax.Array) -> jax.Array:
            return px.reduce_mean(px.map_fn(solve, (px.broadcast(w, points), x), points), points)

        return px.reduce_sum(px.map_fn(of_set, (px.broadcast(w, sets), x), sets), sets)

    plain = lambda w, x: jax.vmap(jax.vmap(solve, (None, 0)), (None, 0))(w, x).mean(1).sum()  # noqa: E731
    assert_close(jax.jit(change(total))(w, x), jax.jit(change(plain))(w, x), rtol=1e-4, atol=1e-4)


def exchanges(by: Any, outer: Any, inner: Any) -> dict[str, Fn]:
    """Functions of one element, by our collectives or by JAX's, along rings of both axes."""
    return {
        "outer psum": lambda v: v / by.psum(v, "outer"),
        "outer ppermute": lambda v: v * lax.ppermute(v * jnp.arange(3.0), "outer", outer).sum(),
        "outer all_gather": lambda v: by.all_gather(v, "outer") * by.axis_index("outer"),
        "inner": lambda v: lax.ppermute(v, "inner", inner) * by.all_gather(v, "inner").sum(),
        "in turn": lambda v: by.psum(v, "inner") * lax.ppermute(v, "outer", outer),
        "outer index": lambda v: by.all_gather(v * jnp.arange(3.0), "outer")[by.axis_index("outer") - 1].sum(),
        "at once": lambda v: v / lax.psum(v, ("outer", "inner")),
        "swap": lambda v: jnp.where(by.pmean(v, "inner") > 1, lax.ppermute(v, "outer", outer), v),
    }


SIZES = [(6, 4), (16, 4), (6, 16), (3, 50), (2, 2), (8, 16)]
# Axes of one program, which divide the devices; each an axis by itself; or over axes of a mesh, given or set.
WHERE: dict[str, Mesh | None] = {
    "declared": None,
    "apart": None,
    "other order": mesh_over(inner=2, outer=4),
    "outer only": mesh_over(outer=8),
    "a third axis": mesh_over(outer=2, inner=2, model=2),
    "Explicit": mesh_over(AxisType.Explicit, outer=2, inner=4),
}


@pytest.mark.parametrize(
    ("name", "sizes", "where"),
    table([("outer psum", (6, 4), "declared"), ("in turn", (16, 4), "apart")],
          [*itertools.product(exchanges(px, (), ()), SIZES, [*WHERE][:2]),
           *(case for case in itertools.product(exchanges(px, (), ()), [(4, 8), (3, 5)], [*WHERE][2:])
             if case[::2] != ("inner", "Explicit"))]), ids=str,  # a ring of both, of which JAX cannot tell the types
)  # fmt: skip
def test_inner_maps_exchange_values_along_outer_axes(name: str, sizes: tuple[int, int], where: str) -> None:
    given, is_set = WHERE[where], where == "Explicit"
    rings: Any = [[(i, (i + 1) % size) for i in range(size)] for size in sizes]
    body, plain = (exchanges(by, *rings)[name] for by in (px, lax))

    def ours(args: Any, outer: Any, inner: Any) -> Any:
        def of_row(w: jax.Array, row: jax.Array) -> Any:
            y = px.map_fn(lambda w, v: body(w * v), (px.broadcast(w, inner), row), inner)
            return y, px.reduce_mean(y, inner), px.reduce_max(row, inner)

        return px.map_fn(of_row, (px.broadcast(args[0], outer), args[1]), outer)

    def theirs(args: Any) -> Any:
        y = jax.vmap(jax.vmap(lambda v: plain(args[0] * v), axis_name="inner"), axis_name="outer")(args[1])
        return y, y.mean(1), args[1].max(1)

    axes = {"outer": px.Axis("outer", sizes[0], mesh=None if is_set else given), "inner": px.Axis("inner", sizes[1])}
    run = functools.partial(ours, **axes)
    if where == "declared":
        run = px.program(outer=sizes[0], inner=sizes[1])(functools.partial(ours, outer="outer", inner="inner"))
    args = jnp.float32(1.1), values(*sizes)
    with jax.set_mesh(given) if given and is_set else contextlib.nullcontext():
        found = jax.device_get((jax.jit(run)(args), jax.jit(jax.grad(score(run)))(args)))
    expected = jax.jit(theirs)(args), jax.jit(jax.grad(score(theirs)))(args)
    assert_close(found, jax.device_get(expected), rtol=1e-4, atol=1e-3)  # of sums up to 50
