"""What a loss function is given as its model, by what the state was made from."""

import abc
import contextlib
import dataclasses
import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from paraxis._core import tree
from paraxis._core.errors import StateError

Mode = Literal["train", "eval", "as made"]
Made = tuple[Any, Callable[[], Any]]
"""A model, and a function that gives its mutable state after it was used."""


class Form(abc.ABC):
    """How a model is made of its parameters and its mutable state: what is fixed about it.

    It is part of a state's structure, which is compared and hashed at each step: the same object is equal at once.

    Attributes:
        kind: what it is a form of, for people.
    """

    kind: str

    @abc.abstractmethod
    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        """The model with these values, for one use."""

    @property
    @abc.abstractmethod
    def identity(self) -> Any:
        """What two forms that make the same models have in common."""

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

    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        return params, lambda: mutable

    @property
    def identity(self) -> Any:
        return ()


class LinenForm(Form):
    """A Linen module, bound to its variables."""

    kind = "Linen module"

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
        """What the module's class adds to Flax's own.

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
        """What the module gives; ``method="encode"`` calls another method than ``__call__``."""
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
    """A Linen module's form, parameters and other collections, initialised.

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
    """A value, an array by its dtype and shape."""
    shape = getattr(x, "shape", None)
    return reprlib.repr(x) if shape is None else f"{x.dtype} {tuple(shape)}"


class NNXForm(Form):
    """An NNX module: parameters are its ``nnx.Param`` variables, all other variables are mutable."""

    kind = "NNX module"

    def __init__(self, graph: Any, trainable: tuple[bool, ...]) -> None:
        from paraxis._modules import graphs

        self._graph = graphs.emptied(graph)
        self._trainable = trainable

    def make(self, params: Any, mutable: Any, key: jax.Array | None, mode: Mode) -> Made:
        from paraxis._modules import graphs

        paths = self._graph.paths
        # Containers of the module's own: a variable may hold a dict, which may be written to.
        values = [
            jax.tree.map(lambda x: x, _at(params if ours else mutable, path))
            for path, ours in zip(paths, self._trainable, strict=True)
        ]
        (model,) = self._graph.put_together(values, [_at(mutable, path) for path in self._graph.array_paths])
        if mode != "as made":
            _switch(model, mode)
        return model, lambda: self._after(graphs.take_apart((model,)), values)

    def _after(self, graph: Any, before: list[Any]) -> Any:
        from paraxis._modules import graphs

        if graph.paths != self._graph.paths or graph.array_paths != self._graph.array_paths:
            raise StateError(
                "train_step: the loss function changed which variables the module has; only their values are kept "
                "from step to step. Make them all when the module is made"
            )
        values = [graphs.value(v) for v in graph.variables]
        for path, ours, old, new in zip(graph.paths, self._trainable, before, values, strict=True):
            if ours and any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)):
                raise StateError(
                    f"train_step: the loss function wrote parameter {_name(path)}, which the optimiser changes; keep "
                    f"what is written in an nnx.Variable, or an nnx.BatchStat"
                )
        rest = [(path, x) for path, x, ours in zip(graph.paths, values, self._trainable, strict=True) if not ours]
        return _nested([*rest, *zip(graph.array_paths, graph.arrays, strict=True)])

    @property
    def identity(self) -> Any:
        kinds = tuple((type(v), tuple(sorted(v.get_metadata().items(), key=str))) for v in self._graph.variables)
        return self._graph.definition, self._graph.paths, self._graph.array_paths, kinds, self._trainable


def nnx(module: Any) -> tuple[Form, Any, Any]:
    """An NNX module's form, parameters and other variables: dicts nested as the module is.

    Raises:
        StateError: if there is nothing to train.
    """
    from flax.nnx import Param

    from paraxis._modules import graphs

    graph = graphs.take_apart((module,))
    trainable = tuple(isinstance(v, Param) for v in graph.variables)
    if not any(trainable):
        raise StateError(
            f"TrainState.create: {type(module).__name__} has no nnx.Param; there is nothing to train. Keep what is to "
            f"be trained in variables of this type"
        )
    held = [(path, graphs.value(v)) for path, v in zip(graph.paths, graph.variables, strict=True)]
    params = _nested([x for x, ours in zip(held, trainable, strict=True) if ours])
    rest = [x for x, ours in zip(held, trainable, strict=True) if not ours]
    mutable = _nested([*rest, *zip(graph.array_paths, graph.arrays, strict=True)])
    return NNXForm(graph, trainable), params, mutable


def is_nnx(x: Any) -> bool:
    """Whether it is an NNX module (what is one has loaded Flax)."""
    found = sys.modules.get("flax.nnx")
    return found is not None and isinstance(x, found.Module)


def is_linen(x: Any) -> bool:
    """Whether it is a Linen module."""
    found = sys.modules.get("flax.linen")
    return found is not None and isinstance(x, found.Module)


def refuse_class(model: Any) -> None:
    """Refuse a class where one of its instances is meant.

    Raises:
        StateError: saying what to write.
    """
    if not isinstance(model, type):
        return
    linen, flax_nnx = (getattr(sys.modules.get(f"flax.{name}"), "Module", ()) for name in ("linen", "nnx"))
    made, more = f"{model.__name__}(…)", ""
    if issubclass(model, flax_nnx):
        made = f"{model.__name__}(…, rngs=nnx.Rngs(0))"
    elif issubclass(model, linen):
        more = ", key=jax.random.key(0), sample=x[:1]"
    raise StateError(
        f"TrainState.create: model is the class {model.__name__}, not a module made of it; write "
        f"px.TrainState.create({made}, optimizer{more})"
    )


def require_floating(params: Any, form: Form) -> None:
    """Refuse parameters that cannot be trained: there is no derivative with respect to integers.

    Raises:
        StateError: naming one, and saying where it belongs.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(x, "dtype", None) or np.asarray(x).dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            continue
        cure = "keep it in a variable that is no nnx.Param, such as nnx.Variable"
        if isinstance(form, LinenForm):
            cure = "keep it in another collection than 'params': self.variable"
        elif isinstance(form, PlainForm):
            cure = (
                "write it with a point or as jnp.asarray(…, jnp.float32) if it is to be trained; else give it in the "
                "batch, or as TrainState.create(…, mutable=…) to a loss function that takes mutable"
            )
        raise StateError(
            f"TrainState.create: {tree.name('params', path)} is {dtype}, but what is trained is floating; {cure}"
        )


def random_key(key: Any) -> Any:
    """A key as ``jax.random.key`` makes them, of one or of what ``jax.random.PRNGKey`` makes; or ``None``.

    Raises:
        StateError: if it is neither.
    """
    if key is None:
        return None
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    if dtype == np.uint32 and shape and len(shape) == 1:
        with contextlib.suppress(TypeError, ValueError):
            return jax.random.wrap_key_data(jnp.asarray(key))
    got = repr(key) if dtype is None else f"{dtype} of shape {shape}"
    raise StateError(f"TrainState.create: key must be one random key, got {got}; write key=jax.random.key(0)")


def _switch(model: Any, mode: Mode) -> None:
    model.train() if mode == "train" else model.eval()


def _nested(items: list[tuple[Any, Any]]) -> Any:
    """Values by their paths, without the first entry (of the tuple around the module): dicts in dicts, or ``None``."""
    root: dict[str, Any] = {}
    for (_, *path), value in items:
        node = root
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = value
    return root or None


def _at(root: Any, path: Any) -> Any:
    for key in path[1:]:
        root = root[str(key)]
    return root


def _name(path: Any) -> str:
    return ".".join(str(key) for key in path[1:])


def owned(values: Any) -> Any:
    """Arrays of one's own, of strong type: they are given away, and must not be found elsewhere, or twice."""
    return jax.tree.map(_own, values)


def _own(x: Any) -> jax.Array:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.array(x, jnp.result_type(x))


def require_optimizer(optimizer: Any) -> None:
    """Refuse what is no optax optimiser.

    Raises:
        StateError: saying what to write.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        got, wrapper = type(optimizer).__name__, getattr(sys.modules.get("flax.nnx"), "Optimizer", ())
        if optimizer is None:
            got = "none"
        elif isinstance(optimizer, wrapper):
            got = f"an nnx.{got}, which holds one: give that one itself"
        elif inspect.isfunction(optimizer):
            got = f"the function {optimizer.__name__}: call it"
        raise StateError(
            f"TrainState.create: optimizer must be an optax optimiser, got {got}; write "
            f"px.TrainState.create(model, optax.adam(1e-3))"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is fixed about a state: the form of its model, its optimiser, the decay of its average."""

    form: Form
    optimizer: Any
    ema_decay: float | None
