"""No public face: when a program has run can be seen only where programs are made."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

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
    return todo
