"""A loop whose processes are killed: ``_lost.py turns plan``; ``{"2": [3, 9]}``: 2 in turn 3, then once more in 9.

A process dies in the first turn from that number on that it comes to, or with -1 before it joins; ``"raise"`` in place
of a plan has process 1 raise in turn 3.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

CLIENTS = np.arange(13 * 20 * 3, dtype=np.float32).reshape(13, 20, 3) % 7 / 7
ROWS = CLIENTS.reshape(-1, 3)


def main(turns: int, plan: Any) -> None:
    import paraxis as px

    attempt, deaths = int(os.environ["PARAXIS_ATTEMPT"]), plan.get(os.environ["PARAXIS_PROCESS"], ())
    dies = deaths[attempt] if attempt < len(deaths) else turns
    if dies < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    here = px.initialize(lost="continue")

    import jax
    import jax.numpy as jnp
    import optax

    @jax.jit
    @jax.grad
    @px.program(clients=13)
    def gradient(w: Any, x: Any) -> Any:
        return px.reduce_mean(px.map_fn(lambda w, x: jnp.mean((x @ w - 1) ** 2), (px.broadcast(w), x)))

    step = px.train_step(lambda params, row: (row @ params["w"] - 1) ** 2)
    data, full = px.loader(ROWS, 7, seed=0), jax.device_count()
    first = px.TrainState.create({"w": jnp.zeros(3)}, optax.adam(0.01))

    refused = [lambda: px.fit(first, step, data, steps=1, checkpoint="x"), lambda: px.Checkpoints("x").save(1, first)]
    for needs_all_processes in refused:
        with pytest.raises(px.StateError, match="all processes"):
            needs_all_processes()

    def before(i: int) -> None:
        if i >= dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if plan == {} and here.process == 1 and i == 3:
            raise ValueError("row 4711 is bad")
        if jax.sharding.get_mesh().size < full:
            time.sleep(3)  # it comes back before the end

    def body(i: int, state: Any) -> Any:
        before(i)
        w, trained, key, count = state
        trained, _ = step(trained, next(data.batches(i)))
        return w - 0.1 * gradient(w, CLIENTS), trained, jax.random.fold_in(key, i), count + 1

    if "fit" in plan:
        late = lambda state, batch: before(int(state.step)) or step(state, batch)  # noqa: E731
        results = [px.fit(first, late, data, steps=turns, progress=False).state.params["w"]]
    else:
        init = np.zeros(3, np.float32), first, jax.random.key(0), 0
        w, trained, key, count = here.fori_loop(0, turns, body, init)
        results = [trained.params["w"], w, jax.random.key_data(key), np.array([count])]
    numbers = [x for result in results for x in np.asarray(result).tolist()]
    sys.stdout.write(f"END {' '.join(map(str, numbers))}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), {} if sys.argv[2] == "raise" else json.loads(sys.argv[2]))
