"""Linen modules as models: bound to their variables."""

import contextlib
import functools
import inspect
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

import jax

from paraxis.errors import StateError
from paraxis.train.steps._forms import Form, Made, Mode


class LinenForm(Form):
    """A Linen module, bound to its variables."""

    kind = "Linen module"
    cure_of_integers = "keep it in another collection than 'params': self.variable"

    def __init__(self, module: Any) -> None:
        self._module = module

    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        bound = Bound(self._module, params, mutable or {}, key, writes=mode == "train")
        return bound, lambda: bound.mutable if mutable is not None else None

    @property
    def identity(self) -> Any:
        return self._module


class Bound:
    """A Linen module with its variables: ``model(x, train=True)`` is its ``apply``.

    Its methods are called in the same way, ``model.encode(x)``; its hyperparameters are there, ``model.features``.

    Random streams have the step's key; each call but the first has one of its own, made from it. Writes to collections
    such as ``batch_stats`` are seen by the next call, and kept if the step is a training step.

    Attributes:
        module: the module.
        params: its parameters.
        mutable: its other collections, by name.
    """

    def __init__(
        self, module: Any, params: Any, mutable: Mapping[str, Any], key: jax.Array | None, *, writes: bool
    ) -> None:
        self.module = module
        self.params = params
        self.mutable = dict(mutable)
        self._key = key
        self._writes = writes
        self._calls = 0

    @property
    def variables(self) -> dict[str, Any]:
        """All collections."""
        return {"params": self.params, **self.mutable}

    def __getattr__(self, name: str) -> Any:
        """Return what the module's class adds to Flax's own.

        Raises:
            AttributeError: saying what to write, if there is no such thing.
        """
        module = self.__dict__.get("module")  # not there yet while it is copied
        if name.startswith("_") or module is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        kind, flax_module = type(module), sys.modules["flax.linen"].Module
        if not hasattr(flax_module, name):
            is_field = name in kind.__dataclass_fields__  # it may hold a function
            if not is_field and inspect.isfunction(inspect.getattr_static(kind, name, None)):
                return functools.partial(self, method=name)
            with contextlib.suppress(AttributeError):
                return getattr(module, name)
        raise AttributeError(
            f"model.{name}: model is the {kind.__name__} bound to its variables, and has no {name!r}; call it as "
            f"model(x, train=True), or a method of the class as model.method(x). Its variables are model.variables; "
            f"the module without them is model.module",
            name=name,
            obj=self,
        )

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the module; ``method="encode"`` calls another method than ``__call__``."""
        if self._key is not None and "rngs" not in options:
            # Linen takes the stream of the parameters for those that have none of their own.
            options["rngs"] = {"params": jax.random.fold_in(self._key, self._calls) if self._calls else self._key}
        self._calls += 1
        if not self._writes or "mutable" in options:
            return self.module.apply(self.variables, *args, **options)
        result, written = self.module.apply(self.variables, *args, mutable=list(self.mutable), **options)
        self.mutable |= written
        return result

    def __repr__(self) -> str:
        return f"Bound({type(self.module).__name__})"


def linen(module: Any, key: jax.Array | None, sample: Any) -> tuple[Form, Any, Any]:
    """Return a Linen module's form, parameters and other collections, initialised.

    Raises:
        StateError: if there is no key or no sample.
    """
    for name, value in (("key", key), ("sample", sample)):
        if value is None:
            raise StateError(
                f"TrainState.create: {name} is needed to initialise a Linen module; write px.TrainState.create(model, "
                f"optimizer, key=jax.random.key(0), sample=x[:1])"
            )
    args, options = (), {}
    if isinstance(sample, Mapping):
        options = dict(sample)
    else:
        args = sample if isinstance(sample, tuple) else (sample,)
    try:
        variables = dict(module.init(key, *args, **options))
    except Exception as error:
        given = ", ".join([*map(_brief, args), *(f"{name}={_brief(value)}" for name, value in options.items())])
        error.add_note(
            f"TrainState.create: raised when the module was initialised with sample=, by a call of "
            f"{type(module).__name__}(…)({given}). Give what it is called with: sample=x[:1], a tuple of arguments, or "
            f"a dict of them by name: sample={{'x': x[:1], 'train': False}}"
        )
        raise
    params = variables.pop("params", {})
    if not jax.tree.leaves(params):
        raise StateError(f"TrainState.create: {type(module).__name__} has no parameters; there is nothing to train")
    return LinenForm(module), params, variables or None


def _brief(x: Any) -> str:
    """Return a value, an array by its dtype and shape."""
    shape = getattr(x, "shape", None)
    return reprlib.repr(x) if shape is None else f"{x.dtype} {tuple(shape)}"
