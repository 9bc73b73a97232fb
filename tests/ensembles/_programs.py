"""No public face: when a program has run, and which have, can be seen only where programs are made."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from paraxis._jax import structure
from paraxis.reports import Communication, of_program

After = list[Callable[[], None]]


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> After:
    """What is done, in this order, when a function that was jitted from here on has been called; nothing at first.

    It is then that memory has been given away and what came in its place is not kept yet.
    """
    todo: After = []
    jit = jax.jit

    class Jitted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._run: Any = jit(*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = self._run(*args, **kwargs)
            for one in todo:
                one()
            return result

        def __getattr__(self, name: str) -> Any:
            return getattr(self._run, name)

    monkeypatch.setattr(jax, "jit", Jitted)
    monkeypatch.setattr(structure.Recent, "get", lambda _, __, make: make())  # what was jitted before is not found
    return todo


def compiled_for(call: Callable[[], Any]) -> list[Communication]:
    """What each program communicates that a call runs: each is compiled for it, as none is kept from before."""
    jax.clear_caches()
    client = jax.devices()[0].client
    before = client.live_executables()
    call()
    new = [program for program in client.live_executables() if not any(program is old for old in before)]
    return [of_program(module.to_string()) for program in new for module in program.hlo_modules()]
