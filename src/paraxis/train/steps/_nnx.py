"""NNX modules as models: taken apart into their variables, and put together again."""

from typing import Any

import jax

from paraxis.errors import StateError
from paraxis.train.steps._forms import Form, Made, Mode


class NNXForm(Form):
    """An NNX module: parameters are its ``nnx.Param`` variables, all other variables are mutable."""

    kind = "NNX module"
    cure_of_integers = "keep it in a variable that is not an nnx.Param, such as nnx.Variable"

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
            model.train() if mode == "train" else model.eval()
        return model, lambda: self._after(graphs.take_apart((model,)), values)

    def settings(self, params: Any, mutable: Any) -> dict[str, Any]:
        from paraxis._modules import graphs

        model, _ = self.make(params, mutable, None, "train")
        return {".".join(map(str, path)): value for path, value in graphs.settings(model)}

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
    """Return an NNX module's form, parameters and other variables: dicts nested as the module is.

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
