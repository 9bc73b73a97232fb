"""The digits split over clients by label."""

import numpy as np

from paraxis.cli.demo._digits import Labelled


def split_by_label(digits: Labelled, num_clients: int, seed: int) -> Labelled:
    """Give each client two shards of the digits sorted by label, so that most see two kinds only.

    Every client gets equally many digits, and no digit goes to two clients. Digits left over by the division, drawn
    from the seed, go to nobody.

    Returns:
        Images ``(num_clients, num_digits, 28, 28, 1)`` and labels ``(num_clients, num_digits)``.
    """
    rng = np.random.default_rng(seed)
    num_shards = 2 * num_clients
    shard_size = len(digits.labels) // num_shards
    kept = rng.permutation(len(digits.labels))[: num_shards * shard_size]
    by_label = kept[np.argsort(digits.labels[kept], kind="stable")]
    shards = by_label.reshape(num_shards, shard_size)[rng.permutation(num_shards)]
    chosen = shards.reshape(num_clients, 2 * shard_size)
    return Labelled(digits.images[chosen], digits.labels[chosen])
