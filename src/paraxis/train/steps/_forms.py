"""The model that a loss function receives: a form, the fixed part of a state, and values to fill it."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from paraxis._calls import pytrees

Mode = Literal["train", "eval", "as made"]
Made = tuple[Any, Callable[[], Any]]
"""A model, and a function that gives its mutable state after it was used."""


class Form(abc.ABC):
    """The fixed part of a model: how it is made of its parameters and its mutable state.

    It is part of a state's structure, which is compared and hashed at each step: the same object is equal at once.

    Attributes:
        kind: what it is a form of, for people.
        cure_of_integers: what to do with a parameter that is not floating, for an error.
    """

    kind: str
    cure_of_integers: str

    @abc.abstractmethod
    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        """Return the model with these values, for one use."""

    def settings(self, params: Any, mutable: Any) -> dict[str, Any]:
        """Return what is fixed about the model besides its structure, by its path if known, as it is to train."""
        return {}

    @property
    @abc.abstractmethod
    def identity(self) -> Any:
        """Return what two forms that make the same models have in common."""

    @functools.cached_property
    def _hash(self) -> int:
        try:
            return hash((type(self), self.identity))
        except TypeError:  # a module with attributes that cannot be hashed is equal to none but itself
            return id(self)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or hash(self) != hash(other):
            return False
        assert isinstance(other, Form)
        return bool(self.identity == other.identity)


class PlainForm(Form):
    """Parameters as they are, for functions of them."""

    kind = "plain"
    cure_of_integers = (
        "write it with a point or as jnp.asarray(…, jnp.float32) if it is to be trained; else give it in the batch, or "
        "as TrainState.create(…, mutable=…) to a loss function that takes mutable"
    )

    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        return params, lambda: mutable

    @property
    def identity(self) -> Any:
        return ()


class PytreeForm(Form):
    """Models that are pytrees, such as Equinox modules, or a tree of them.

    Their floating arrays are parameters. Their other arrays are mutable to the state, though no step changes them.
    """

    kind = "pytree"
    cure_of_integers = (
        "write it with a point or as jnp.asarray(…, jnp.float32) if it is to be trained; else keep it in the model, or "
        "give it in the batch"
    )

    def __init__(self, rest: pytrees.Rest) -> None:
        self._rest = rest

    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        others = mutable if self._rest.has_others else None
        model = self._rest.joined(params, others)
        return pytrees.evaluating(model) if mode == "eval" else model, lambda: mutable

    @property
    def identity(self) -> Any:
        return self._rest


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The fixed part of a state: the form of its model, its optimiser, the decay of its average."""

    form: Form
    optimizer: Any
    ema_decay: float | None
