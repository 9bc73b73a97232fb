"""Compilation: ``px.Jit`` on a module, on a function and on a whole train step; static arguments; constants.

Typical output (times differ)::

    difference, module:   0.0
    difference, function: 0.0
    seconds: 0.00093 plain, 0.00012 compiled
    (Sequential).layers[0](Linear).bias    3 (3,)
    (Sequential).layers[0](Linear).kernel  6 (2, 3)
    (Sequential).layers[2](Linear).bias    4 (4,)
    (Sequential).layers[2](Linear).kernel 12 (3, 4)
    +Total(4)                             25
    (Jit)(Sequential).layers[0](Linear).bias    3 (3,)
    (Jit)(Sequential).layers[0](Linear).kernel  6 (2, 3)
    (Jit)(Sequential).layers[2](Linear).bias    4 (4,)
    (Jit)(Sequential).layers[2](Linear).kernel 12 (3, 4)
    +Total(4)                                  25
    difference after an edit: 0.0
    loss: 1.725, after 100 compiled steps 0.08783
    difference with a static argument: 0.0
    without static_argnums: TracerBoolConversionError
    constant, before the edit: 0.0
    constant, after the edit:  40.0
"""

from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import paraxis as px


def network(seed: int) -> Any:
    """Two layers, from two numbers to four."""
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), jax.nn.relu, nnx.Linear(3, 4, rngs=rngs))


def difference(a: jax.Array, b: jax.Array) -> float:
    """The sum of squared differences, to five digits: a compiler may round otherwise than the layers one by one."""
    return round(float(jnp.sum((a - b) ** 2)), 5)


def seconds(f: Any, x: jax.Array) -> float:
    start = perf_counter()
    jax.block_until_ready(f(x))
    return perf_counter() - start


def sharing() -> dict[str, Any]:
    """A compiled module, and a compiled function: they share the variables of the module that they were given."""
    net = network(0)
    x = jax.random.normal(jax.random.key(0), (100, 2))

    jit_net = px.Jit(net)
    jit_func = px.Jit(lambda net, x: jax.nn.softmax(net(x)), net)
    found: dict[str, Any] = {
        "module": difference(net(x), jit_net(x)),
        "function": difference(jax.nn.softmax(net(x)), jit_func(x)),
        "tables": [str(px.variables(f)) for f in (net, jit_net, jit_func)],
    }
    print(f"difference, module:   {found['module']}")
    print(f"difference, function: {found['function']}")
    print(f"seconds: {seconds(net, x):.5f} plain, {seconds(jit_net, x):.5f} compiled")
    print(found["tables"][0], found["tables"][1], sep="\n")

    before = jit_net(x)
    net.layers[-1].bias[...] += 1
    found["edited"] = difference(net(x), jit_net(x))
    found["moved"] = np.asarray(jit_net(x) - before)
    print(f"difference after an edit: {found['edited']}")
    return found


def loss(net: nnx.Sequential, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(net(x), labels).mean()


def train(gradient_loss: Any, opt: px.Optimizer, x: jax.Array, labels: jax.Array, lr: Any) -> jax.Array:
    """One step of gradient descent; the loss before it."""
    gradients, value = gradient_loss(x, labels)
    opt(lr, gradients)
    return value


def quadrants() -> tuple[jax.Array, jax.Array]:
    """Points ``x (100, 2)``, and which of the four quadrants they are in."""
    x = jax.random.normal(jax.random.key(1), (100, 2))
    return x, 2 * (x[:, 0] > 0) + (x[:, 1] > 0)


def train_step(num_steps: int = 100) -> dict[str, Any]:
    """Gradient, optimiser and state in one compiled call; the learning rate is an argument like any other."""
    net = network(1)
    opt = px.Optimizer(net, optax.sgd, momentum=0.9)
    gradient_loss = px.GradValues(loss, net)
    train_jit = px.Jit(train, gradient_loss, opt)  # the top level call: what is inside is optimised with it

    x, labels = quadrants()
    losses = [float(train_jit(x, labels, 0.2 if i < num_steps // 2 else 0.1)) for i in range(num_steps)]
    print(f"loss: {losses[0]:.4g}, after {num_steps} compiled steps {losses[-1]:.4g}")
    return {"losses": losses, "trained": [np.asarray(v[...]) for v in px.variables(net)]}


def normalised(net: nnx.List, x: jax.Array, training: bool) -> jax.Array:
    linear, norm = net
    return norm(linear(x), use_running_average=not training)


def static_arguments() -> dict[str, Any]:
    """``training`` decides what is computed, so it must be known when compiling: argument 1 after the module."""
    rngs = nnx.Rngs(2)
    net: Any = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
    jit_net_static = px.Jit(normalised, net, static_argnums=(1,))
    x = jax.random.normal(jax.random.key(2), (100, 2))
    same = difference(normalised(net, x, False), jit_net_static(x, False))
    print(f"difference with a static argument: {same}")

    error = ""
    try:
        px.Jit(normalised, net)(x, False)
    except TypeError as reason:
        error = type(reason).__name__
    print(f"without static_argnums: {error}")

    jit_net_static(x, True)  # compiled anew; the running statistics it writes are kept
    return {"static": same, "error": error, "running mean": np.asarray(net[1].mean[...]), "hidden": net[0](x)}


def constants() -> dict[str, Any]:
    """A compiled function of JAX takes the values that it reads for constants: it does not see edits."""
    net: Any = nnx.Linear(3, 4, rngs=nnx.Rngs(3))
    jit_constant = jax.jit(lambda x: net(x))
    x = jax.random.normal(jax.random.key(3), (10, 3))
    before = difference(net(x), jit_constant(x))
    net.bias[...] += 1
    after = difference(net(x), jit_constant(x))
    print(f"constant, before the edit: {before}")
    print(f"constant, after the edit:  {after}")
    return {"before": before, "after": after}


def main() -> dict[str, Any]:
    return sharing() | train_step() | static_arguments() | constants()


if __name__ == "__main__":
    main()
