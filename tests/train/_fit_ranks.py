"""One of several processes of a run: ``paraxis launch -n 2 _fit_ranks.py DIRECTORY WORD…``. Alone, the same run.

With the word ``slow`` it waits after each step; with ``kill`` rank 1 kills itself at step 100, if it was not started
again; with ``raises`` its callback fails at step 75; with ``evaluate`` it evaluates after every 50 steps, with
``slow-evaluation`` 14 batches of three seconds; with ``nan`` another run follows, with a value that is not finite.
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
        x = np.random.default_rng(3).standard_normal((NUM_ROWS, 3)).astype(np.float32)
        self.arrays = {"x": x, "y": (x @ np.array([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)}
        self.asked: list[list[int]] = []
        if bad is not None:
            self.arrays["x"][bad, 1] = np.nan

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.asked.append(rows)
        return [{name: x[row] for name, x in self.arrays.items()} for row in rows]


def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    noise = 0.1 * jax.random.normal(key, batch["y"].shape)
    return (batch["x"] @ params["w"] + params["b"] + noise - batch["y"]) ** 2


def start() -> Any:
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    return px.TrainState.create(params, optax.adam(0.02), key=jax.random.key(7))


def bad_row() -> int:
    """The last row of batch 1: with two processes, the second one has it."""
    return int(px.loader(Rows(), BATCH, seed=1).rows(1)[-1])


def main(directory: Path, *words: str) -> None:
    here = px.initialize()
    evaluated = px.eval_step(lambda params, batch: (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    def evaluate(state: Any, batch: Any) -> Any:
        sys.stdout.write("a batch is evaluated\n")
        time.sleep(3 if "slow-evaluation" in words else 0)
        return evaluated(state, batch)

    def told(event: px.train.Event) -> None:
        if event.kind == "start":
            sys.stdout.write(f"from step {event.step}\n")
        if event.kind != "step":
            return
        if event.step == 5:
            sys.stdout.write("five steps\n")
        time.sleep(0.05 if "slow" in words else 0)
        if "raises" in words and here.process == 1 and event.step == 75:
            raise LookupError("an error of the user's own")
        if "kill" in words and (here.process, here.attempt, event.step) == (1, 0, 100):
            os.kill(os.getpid(), signal.SIGKILL)

    rows, step = Rows(), px.train_step(loss)
    checkpoints = px.Checkpoints(directory / "checkpoints", every=10, keep=None)
    options: dict[str, Any] = {"checkpoint": checkpoints, "callbacks": told, "log": directory / "log"}
    if "evaluate" in words:
        options["evaluate"] = px.Evaluate(evaluate, px.loader(Rows(), 4), every=50)
    fitted = px.fit(start(), step, px.loader(rows, BATCH, seed=1), steps=STEPS, **options)
    params = jax.tree.map(np.asarray, fitted.state.params)
    result: dict[str, Any] = {
        "bits": hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(params))).hexdigest(),
        "w": params["w"].tolist(),
        "losses": [record.metrics["loss"] for record in fitted.history.epochs],
        "asked": rows.asked[:STEPS],
        "evaluated": [record.step for record in fitted.history.evaluations],
    }
    if "nan" in words:
        try:
            px.fit(start(), step, px.loader(Rows(bad_row()), BATCH, seed=1), epochs=1, checkpoint=directory / "bad")
        except px.NonFiniteError as error:
            result["error"] = str(error)
    (directory / f"result-{here.process}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
