"""One of several processes of a run: ``paraxis launch -n 2 _fit_ranks.py DIRECTORY``. Alone, the same run.

In the directory, a file ``slow`` has it wait after each step; ``kill`` has rank 1 kill itself at step 100, if it was
not started again; ``raises`` has its callback fail at step 75; ``evaluate`` has it evaluate after every 50 steps,
``slow evaluation`` 14 batches of three seconds; ``nan`` has another run after it, with a value that is not
finite.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

STEPS, BATCH, NUM_ROWS = 120, 16, 56


class Rows:
    """Rows by number, which notes for which of them it was asked."""

    def __init__(self, bad: int | None = None) -> None:
        draw = np.random.default_rng(3)
        self.x = draw.standard_normal((NUM_ROWS, 3)).astype(np.float32)
        self.y = (self.x @ np.array([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)
        self.asked: list[list[int]] = []
        if bad is not None:
            self.x[bad, 1] = np.nan

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.asked.append(rows)
        return [{"x": self.x[row], "y": self.y[row]} for row in rows]


def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    noise = 0.1 * jax.random.normal(key, batch["y"].shape)
    return (batch["x"] @ params["w"] + params["b"] + noise - batch["y"]) ** 2


class Evaluated:
    """A step of an evaluation that says when it begins, and may be slow."""

    def __init__(self, directory: Path) -> None:
        self._slow = directory / "slow evaluation"
        self._step = px.eval_step(lambda params, batch: (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    def __call__(self, state: Any, batch: Any) -> Any:
        sys.stdout.write("a batch is evaluated\n")
        if self._slow.exists():
            time.sleep(3)
        return self._step(state, batch)


def start() -> Any:
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return px.TrainState.create(params, optax.adam(0.02), key=jax.random.key(7))


def main(directory: Path) -> None:
    here = px.initialize()

    kills = (directory / "kill").exists() and (here.process, here.attempt) == (1, 0)

    raises = (directory / "raises").exists() and here.process == 1

    def told(event: px.train.Event) -> None:
        if event.kind == "start":
            sys.stdout.write(f"from step {event.step}\n")
        if event.kind == "step" and event.step == 5:
            sys.stdout.write("five steps\n")
        if event.kind == "step" and (directory / "slow").exists():
            time.sleep(0.05)
        if raises and (event.kind, event.step) == ("step", 75):
            raise LookupError("an error of the user's own")
        if kills and (event.kind, event.step) == ("step", 100):
            os.kill(os.getpid(), signal.SIGKILL)

    rows, step = Rows(), px.train_step(loss)
    checkpoints = px.Checkpoints(directory / "checkpoints", every=10, keep=None)
    data = px.loader(rows, BATCH, seed=1)
    options: dict[str, Any] = {"checkpoint": checkpoints, "callbacks": told, "log": directory / "log"}
    if (directory / "evaluate").exists():
        options["evaluate"] = px.Evaluate(Evaluated(directory), px.loader(Rows(), 4), every=50)
    fitted = px.fit(start(), step, data, steps=STEPS, **options)
    params = {name: np.asarray(x) for name, x in fitted.state.params.items()}
    result: dict[str, Any] = {
        "bits": hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest(),
        "w": params["w"].tolist(),
        "losses": [record.metrics["loss"] for record in fitted.history.epochs],
        "asked": rows.asked[:STEPS],
        "evaluations": [[record.step, record.metrics] for record in fitted.history.evaluations],
    }
    if (directory / "nan").exists():
        try:
            px.fit(start(), step, px.loader(Rows(bad_row()), BATCH, seed=1), epochs=1, checkpoint=directory / "bad")
        except px.NonFiniteError as error:
            result["error"] = str(error)
    (directory / f"result-{here.process}.json").write_text(json.dumps(result))


def bad_row() -> int:
    """The last row of batch 1: with two processes, the second one has it."""
    return int(px.loader(Rows(), BATCH, seed=1).rows(1)[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
