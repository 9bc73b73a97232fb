"""``reproducible="any device count"``: what may be asked for, and what it needs of the machine."""

import os
from typing import Any

import jax

from paraxis._calls import arguments, integers
from paraxis._host import threads
from paraxis._jax import jax_api
from paraxis.errors import StateError

ANY_DEVICE_COUNT = "any device count"
GROUPS = 8


def is_asked_for(what: str, reproducible: Any, groups: Any, **others: Any) -> bool:
    """Return whether bits must not depend on the devices. Settles XLA's number of threads, if it is open.

    Raises:
        StateError: if it cannot be had, with the number of groups or with another option that is not None.
    """
    if reproducible is None:
        if integers.at_least(1, groups) != GROUPS:
            write = f"{what}(fn, reproducible={ANY_DEVICE_COUNT!r}, groups={arguments.described(groups)})"
            arguments.of_no_use(what, "groups", groups, "reproducible", write, StateError)
        return False
    if not isinstance(reproducible, str) or reproducible != ANY_DEVICE_COUNT:
        raise StateError(
            f"{what}: reproducible must be None (the same bits on the same devices) or {ANY_DEVICE_COUNT!r}, got "
            f"{arguments.described(reproducible)}; write reproducible={ANY_DEVICE_COUNT!r}"
        )
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or groups & (groups - 1):
        raise StateError(
            f"{what}: groups must be a power of two, got {arguments.described(groups)}; write groups={GROUPS}"
        )
    if others.get("microbatches") is not None:
        raise StateError(
            f"{what}: microbatches does not go with reproducible={ANY_DEVICE_COUNT!r}, where each device takes its "
            f"groups of rows one after another; leave it out, and bound memory by groups={2 * groups}"
        )
    if others.get("shard") is not None:
        raise StateError(
            f"{what}: shard does not go with reproducible={ANY_DEVICE_COUNT!r}, where each device has all parameters; "
            f"leave one of them out"
        )
    _settle_threads(what)
    return True


def _settle_threads(what: str) -> None:
    if jax_api.has_started() and jax.default_backend() != "cpu":
        return
    number = threads.asked_for(os.environ)
    if number is None and not jax_api.has_started():
        os.environ[threads.VARIABLE] = str(threads.advised())
    elif number is None:
        raise _unsettled(what, "XLA has taken as many threads as there are cores or devices")
    elif jax_api.has_started() and number < jax.local_device_count():
        devices = jax.local_device_count()
        raise _unsettled(what, f"XLA was to take {number} threads, but takes one for each of {devices} devices")
    elif number > threads.advised() and os.environ.get(threads.OWN) == os.environ.get(threads.VARIABLE):
        raise _unsettled(what, f"XLA was to take {number}, {threads.PER_DEVICE} for each simulated device")


def _unsettled(what: str, why: str) -> StateError:
    return StateError(
        f"{what}: last bits depend on the number of threads, and {why}; before Python starts, write "
        f"export {threads.VARIABLE}={threads.advised()}, the same wherever the bits are to be the same; or start it by "
        f"paraxis launch, which does"
    )
