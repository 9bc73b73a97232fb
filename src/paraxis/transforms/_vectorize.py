"""``Vectorize``: the function of one row, run on all rows of a batch."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from paraxis._calls import check, pytrees
from paraxis._jax import varying
from paraxis._modules import graphs
from paraxis.errors import ShapeError, StateError
from paraxis.transforms import _batches, _randomness, _reduce
from paraxis.transforms._binding import refuse_modules, run
from paraxis.transforms._wrapped import Wrapped

_R = TypeVar("_R", covariant=True)


class Vectorize(Wrapped[_R], Generic[_R]):
    """Apply a function of one row to a batch: ``jax.vmap`` with modules' variables and randomness threaded through.

    All rows see the same variables. Each row has its own random streams, made from its index; the modules' streams
    advance once per call if the function draws from them. A value that a row writes must be the same for all rows, or
    have a rule (``sync``). ``Vectorize`` neither compiles nor moves anything to other devices: use it inside
    :class:`Jit` or :class:`Parallel`.

    Args:
        f: a function of modules and one row of each argument.
        *modules: as in :class:`Jit`.
        batch_axis: for each argument after the modules, the axis along which its rows lie, or ``None`` to pass it
            whole; or a tree of these that is a prefix of the argument. One integer applies to all arguments. Numbers,
            0-d arrays and keyword arguments are always passed whole.
        sync: for a variable type (or a variable's name), how to combine the rows' values: ``"mean"``, ``"sum"``,
            ``"max"``, ``"min"``, ``"first"``, ``"stack"``, or a function of all of them, ``(rows, ...)``. A
            variable's own rule, ``nnx.Variable(x, sync="sum")``, takes precedence. ``nnx.BatchStat``: the mean. Each
            row starts from the whole old value.

    Returns:
        When called, the results with every leaf ``(rows, ...)``.

    Raises:
        ShapeError: when called, if the sizes of the batch axes disagree, or there are none.
        StateError: as in :class:`Jit`; and if rows would leave a variable with different values.

    Communicates: nothing, unless ``f`` does.

    Example:
        >>> import jax.numpy as jnp, paraxis as px
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> noisy = px.Vectorize(lambda rngs, x: x + rngs.normal(), rngs)
        >>> len(set(noisy(jnp.zeros(5)).tolist()))
        5
    """

    def __init__(
        self,
        f: Callable[..., _R],
        *modules: Any,
        batch_axis: _batches.Axes = 0,
        sync: _reduce.Sync | None = None,
    ) -> None:
        super().__init__(f, modules)
        self._body.options = batch_axis, _reduce.check_sync("Vectorize", sync, self.binding().names)

    def __call__(self, *args: Any, **kwargs: Any) -> _R:
        """Return ``f(*modules, *row, **kwargs)`` for every row."""
        check.no_cut("Vectorize", "args", (args, kwargs))
        given, named = pytrees.sealed((args, kwargs))
        refuse_modules("Vectorize", given, named)
        batch_axis, sync = self._body.options
        batch = _batches.split("Vectorize", batch_axis, given, named)
        if batch.size is None:
            raise ShapeError(
                f"Vectorize: no argument has a batch axis (batch_axis={batch_axis!r}), so the number of rows is "
                f"unknown; write batch_axis=0 for what is a batch"
            )
        binding = self.binding()
        values, arrays = binding.values(), binding.graph.arrays
        keys = _randomness.element_keys(values, binding.streams, batch.size)
        differs: list[bool] = []
        drawn: list[_randomness.Stream] = []

        def row(index: jax.Array, keys: list[jax.Array], rows: list[Any]) -> Any:
            state = (_randomness.with_keys(values, binding.streams, keys), arrays)
            result, new = run("Vectorize", self._body.fn, binding, state, batch.put_together(rows, batch.whole), named)
            drawn[:] = _randomness.drawn_from("Vectorize", binding.streams, new, binding.names)
            return result, varying.watched(new, index, differs.extend)

        over = jax.vmap(row, in_axes=(0, 0, list(batch.axes)), axis_size=batch.size)
        result, new = over(jnp.arange(batch.size), keys, batch.rows)
        owners = [i for i, value in sorted(new.items()) for _ in jax.tree.leaves(value)]
        rules = {i: _reduce.rule_of(binding, i, sync) for i in new}
        for number, differ in zip(owners, differs, strict=True):
            if differ and rules[number] is None:
                variable = binding.graph.variables[number]
                cure = (
                    "Return what the metric is updated with, and update it once, outside: metric.update(values=f(x))"
                    if isinstance(variable, nnx.metrics.MetricState)
                    else f"Write a value that is the same for all rows, or give a rule: "
                    f"sync={{{graphs.type_name(variable)}: 'mean'}}"
                )
                raise StateError(
                    f"Vectorize: rows leave variable {binding.names[number]} with different values. {cure}"
                )
        kept = {
            i: jax.tree.map(lambda x, i=i: _reduce.combined(rules[i] or "first", x, _fold), stacked)
            for i, stacked in new.items()
        }
        binding.write(kept | _randomness.advanced(values, drawn), "Vectorize")
        return pytrees.opened(result)


def _fold(kind: str, x: jax.Array) -> jax.Array:
    return {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[kind](x, axis=0)
