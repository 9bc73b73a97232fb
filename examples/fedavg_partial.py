"""Federated averaging with partial participation: each round, some clients stay away.

Who takes part is a mask, ``where=``. It is data, not structure: one compiled program serves all rounds, whoever
comes. A client that stays away never reaches the average, whatever its data hold: here a few broken clients, whose
data are NaN, are always told to stay away, and the model does not notice.
"""

from collections.abc import Sequence
from typing import Any

import _setting
import fedavg
import jax
import numpy as np

import paraxis as px

CLIENTS = fedavg.CLIENTS
LOCAL_STEPS = 5


def local_update(model: fedavg.Model, x: jax.Array, y: jax.Array) -> fedavg.Model:
    """What one client would add to the shared model."""
    trained = fedavg.local_training(model, x, y, num_steps=LOCAL_STEPS, learning_rate=0.1)
    return jax.tree.map(lambda new, old: new - old, trained, model)


@px.program(clients=CLIENTS)
def partial_round(model: fedavg.Model, x: Any, y: Any, participates: Any) -> fedavg.Model:
    """One round; if nobody takes part (all of ``participates (clients,)`` ``False``), the model stays as it is."""
    updates = px.map_fn(local_update, (px.broadcast(model), x, y))
    average = px.reduce_mean(updates, where=participates)
    return jax.tree.map(lambda p, u: p + u, model, average)


def cohort(rng: np.random.Generator, able: np.ndarray, num_chosen: int) -> np.ndarray:
    """A mask with so many of the able clients, at random."""
    mask = np.zeros(len(able), bool)
    mask[rng.choice(np.flatnonzero(able), num_chosen, replace=False)] = True
    return mask


def train(num_chosen: int, num_rounds: int, broken: Sequence[int] = ()) -> tuple[fedavg.Model, list[float]]:
    """The model after so many rounds, and the held-out accuracy after each. Broken clients' data are NaN."""
    data = _setting.digits(CLIENTS, by_label=True)
    able = np.ones(CLIENTS, bool)
    able[list(broken)] = False
    x = np.where(able[:, None, None], data.x, np.nan).astype(np.float32)
    rng = np.random.default_rng(0)
    model, told_right = _setting.classifier(jax.random.key(0)), []
    for _ in range(num_rounds):
        model = partial_round(model, x, data.y, cohort(rng, able, num_chosen))
        told_right.append(_setting.accuracy(model, data))
    return model, told_right


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv)
    num_rounds = 5 if chosen.quick else 100
    curves, rows = {}, []
    for num_chosen, broken in ((CLIENTS, ()), (12, ()), (4, ()), (12, (3, 7, 11))):
        _, told_right = train(num_chosen, num_rounds, broken)
        curves[f"{num_chosen} of {CLIENTS}" + (f", {len(broken)} broken" if broken else "")] = dict(
            enumerate(told_right, 1)
        )
        late = told_right[-20:]
        rows.append((num_chosen, len(broken), told_right[-1], float(np.mean(late)), min(late)))
    print(partial_round)
    _setting.table(["taking part", "broken", "accuracy", "mean of last 20", "worst of last 20"], rows)
    _setting.plot(chosen.plot, curves, "round", "held-out accuracy")


if __name__ == "__main__":
    main()
