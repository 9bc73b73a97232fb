"""A network with one hidden layer and Dropout; its loss on the rows of a batch, as for one device."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, jax.Array]

HIDDEN, DROPPED, LEARNING_RATE, MOMENTUM = 128, 0.2, 0.1, 0.9


def make(key: jax.Array) -> Params:
    """Weights scaled for rectifiers (He et al., 2015), biases zero."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (784, HIDDEN)) * (2 / 784) ** 0.5,
        "hidden_bias": jnp.zeros(HIDDEN),
        "dense": jax.random.normal(second, (HIDDEN, 10)) * (2 / HIDDEN) ** 0.5,
        "dense_bias": jnp.zeros(10),
    }


def optimizer(num_steps: int) -> optax.GradientTransformation:
    """Descent with momentum, at a rate that falls to zero over the whole run."""
    return optax.sgd(optax.cosine_decay_schedule(LEARNING_RATE, num_steps), MOMENTUM)


def loss(params: Params, batch: Any, key: jax.Array) -> jax.Array:
    """Cross-entropy of each row, some of the hidden numbers dropped: ``(batch,)``."""
    hidden = _hidden(params, batch["images"])
    kept = jax.random.bernoulli(key, 1 - DROPPED, hidden.shape)
    return _cross_entropy(params, jnp.where(kept, hidden / (1 - DROPPED), 0), batch["labels"])[0]


def metrics(params: Params, batch: Any) -> dict[str, jax.Array]:
    """Cross-entropy of each row, with nothing dropped, and whether it is told right."""
    losses, right = _cross_entropy(params, _hidden(params, batch["images"]), batch["labels"])
    return {"loss": losses, "accuracy": right}


def _hidden(params: Params, images: jax.Array) -> jax.Array:
    # A smooth activation keeps rounding errors small over many steps; behind the kinks of relu they grow.
    return jax.nn.gelu(images.reshape(len(images), -1) @ params["hidden"] + params["hidden_bias"])


def _cross_entropy(params: Params, hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = hidden @ params["dense"] + params["dense_bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels), jnp.argmax(logits, -1) == labels
