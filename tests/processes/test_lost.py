"""``px.initialize(lost="continue")``: processes that are lost, and that come back, change no number."""

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import paraxis as px
from tests.processes._lost import CLIENTS, ROWS
from tests.processes._support import Launch

SCRIPT, TURNS = str(Path(__file__).with_name("_lost.py")), 150


def undisturbed() -> list[float]:
    """What the turns come to: by NumPy, by ``px.fit`` in this process, and by JAX."""
    w, key = np.zeros(3), jax.random.key(0)
    for i in range(TURNS):
        w -= 0.1 * np.mean([2 * x.T @ (x @ w - 1) / 20 for x in CLIENTS.astype(float)], axis=0)
        key = jax.random.fold_in(key, i)
    step = px.train_step(lambda params, row: (row @ params["w"] - 1) ** 2)
    state = px.TrainState.create({"w": jnp.zeros(3)}, optax.adam(0.01))
    trained = px.fit(state, step, px.loader(ROWS, 7, seed=0), steps=TURNS, progress=False).state
    return [*np.asarray(trained.params["w"]), *w, *jax.random.key_data(key).tolist(), TURNS]


def random_plan(seed: int, kills: int) -> dict[str, list[int]]:
    """Deaths of ranks 1 and 2: in any turn, at once when they are back, before they join, and of both in one turn."""
    choose, plan = random.Random(seed), {"fit": []} if seed else dict[str, list[int]]()
    for rank in choose.choices("12", k=kills):
        own = plan.setdefault(rank, [])
        own.append(choose.choice([-1, max(own, default=0), 5 * len(own), choose.randrange(TURNS - 10)]))
    return plan


@pytest.mark.parametrize(
    ("devices", "plan"),
    [
        pytest.param(1, {"2": [4]}, marks=pytest.mark.slow),
        (1, {"2": [4], "fit": []}),
        *(pytest.param(2, random_plan(seed, 20), marks=pytest.mark.slow) for seed in range(2)),
    ],
)
def test_processes_that_are_killed_change_no_number(launched: Launch, devices: int, plan: dict[str, list[int]]) -> None:
    status, out, error = launched(SCRIPT, f"{TURNS}", json.dumps(plan), n=3, timeout=900, devices=devices, rejoins=20)
    assert status == 0, out + error
    assert error.count("started again") == sum(map(len, plan.values()))
    ends = [line.partition("END ")[2] for line in out.splitlines() if "END" in line]
    assert ends == ends[:1] * 3
    numbers = [float(x) for x in ends[0].split()]
    np.testing.assert_allclose(numbers, undisturbed()[: len(numbers)], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "told"), [("raise", "process 1 cannot continue: ValueError: row 4711 is bad"), ('{"0": [3]}', "SIGKILL")]
)
def test_all_end_with_process_0_or_an_exception(launched: Launch, plan: str, told: str) -> None:
    status, out, error = launched(SCRIPT, f"{TURNS}", plan, n=3, devices=1, rejoins=5)
    assert (status != 0, "END" in out, told in out + error) == (True, False, True), out + error


@pytest.mark.slow
def test_devices_that_have_met_in_each_order_end_all(launched: Launch) -> None:
    status, _, error = launched(
        SCRIPT, f"{TURNS}", json.dumps({"1": [10 * i for i in range(8)]}), n=2, devices=1, rejoins=9
    )
    assert (status != 0, "2 CPU devices have met 2 times" in error) == (True, True), error


def test_outside_of_several_processes_it_is_a_loop() -> None:
    assert px.launch.Processes(0, 1).fori_loop(2, 5, lambda i, state: [*state, i], []) == [2, 3, 4]
