"""Members read back from files, as what the function that makes them would make."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paraxis._axes import placing
from paraxis._axes.axis import Axis
from paraxis._calls import arguments
from paraxis._core.lowerings import Lowering
from paraxis.ensembles import _files, _resident as resident
from paraxis.ensembles._ensemble import Ensemble
from paraxis.ensembles._forms import check_options, form_of, guarded
from paraxis.ensembles._members import Apply, Form
from paraxis.ensembles._population import Population
from paraxis.errors import ParaxisError, StateError


@arguments.named()
def load_member(make: Callable[[jax.Array], Any], path: Any) -> Any:
    """Read one member from a file that ``ens.save_member`` or ``ens.save`` wrote.

    Args:
        make: ``make(key)`` → a member like the one in the file. It is traced, not run.
        path: the file.

    Returns:
        The member, as ``make`` returns it.

    Raises:
        DataError: if the file is damaged.
        StateError: if its member has other variables, shapes or dtypes than the result of ``make``.
        FileNotFoundError: if there is no such file.

    Communicates: nothing.

    Example:
        >>> import jax, jax.numpy as jnp, paraxis as px, tempfile
        >>> make = lambda key: {"w": jax.random.normal(key, (4,))}
        >>> ens = px.ensemble(make, 3, 0)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     ens.save_member(1, f"{place}/best.npz")
        ...     member = px.ensembles.load_member(make, f"{place}/best.npz")
        >>> float(abs(member["w"] - ens.stacked()["w"][1]).max())
        0.0
    """
    arguments.path("load_member", "path", path)
    form, struct = _made("load_member", make)
    return form.member(_state(form, struct, path))


@arguments.named()
def load_ensemble(
    make: Callable[[jax.Array], Any],
    path: Any,
    *,
    apply: Apply | None = None,
    mesh: Any = None,
    over: str | tuple[str, ...] | None = None,
    at_once: int | None = None,
    lowering: Lowering = "auto",
    donate: bool = True,
    name: str = "members",
) -> Ensemble:
    """Read the members that ``ens.save`` wrote, onto the present devices.

    Args:
        make: ``make(key)`` → a member like those in the directory. It is traced, not run.
        path: the directory.
        apply, mesh, over, at_once, lowering, donate, name: as in :func:`ensemble`.

    Raises:
        DataError: if a file is damaged, or is another member's; the message names it.
        StateError: if a file is missing, superfluous, or of another kind of member; the message names it.

    Communicates: nothing.

    Example:
        >>> import jax, paraxis as px, tempfile
        >>> make = lambda key: {"w": jax.random.normal(key, (4,))}
        >>> with tempfile.TemporaryDirectory() as place:
        ...     px.ensemble(make, 3, 0).save(f"{place}/ensemble")
        ...     ens = px.load_ensemble(make, f"{place}/ensemble")
        >>> len(ens)
        3
    """
    check_options("load_ensemble", apply, lowering, donate, name)
    arguments.path("load_ensemble", "path", path)
    form, struct = _made("load_ensemble", make)
    states = [_state(form, struct, file, digest) for file, digest in _files.member_files(path)]
    axis = placing.settled(Axis(name, len(states), mesh=mesh, over=over, at_once=at_once))
    with placing.without_context():
        rows = resident.on_devices(jax.tree.map(lambda *xs: jnp.stack(xs), *states), placing.place(axis))
    return Ensemble(Population(form, rows, apply, lowering, donate))


def _made(what: str, make: Callable[[jax.Array], Any]) -> tuple[Form, Any]:
    forms: list[Form] = []

    def one(key: jax.Array) -> Any:
        form, parts = form_of(make(key))
        forms.append(form)
        return form.state(parts)

    try:
        struct = jax.eval_shape(guarded("make", make, one), jax.random.key(0))
    except ParaxisError:
        raise
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{what}: make must be a function of a key alone, here: lambda key: make(key, 0.1) ({error})"
        ) from error
    return forms[0], struct


def _state(form: Form, struct: Any, path: Any, digest: str | None = None) -> Any:
    """Return a state from a file.

    Raises:
        DataError: if the file is damaged; StateError: if it is not the state of such a member.
    """
    expected = dict(zip(form.names(struct), jax.tree.leaves(struct), strict=True))
    return jax.tree.unflatten(jax.tree.structure(struct), _files.read(path, expected, digest))
