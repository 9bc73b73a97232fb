"""A drug's rates fitted to patients who were seen at times of their own, each solve by diffrax, streamed in chunks.

One dose is absorbed and eliminated. Every patient has sorted observation times, few or many; a stream pads elements of
similar length together, by their last time, and a mask says which rows are real. The table has the three rates step by
step, beside those that the data were drawn with; the last line compares the gradient with that of all patients on the
mesh.
"""

from collections.abc import Sequence
from typing import Any

import _setting
import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paraxis as px

DOSE, TRUTH, NAMES = 100.0, np.array([1.2, 3.0, 20.0]), ("absorption", "clearance", "volume")


def concentrations(log_rates: jax.Array, times: jax.Array) -> jax.Array:
    """Concentrations ``(times,)`` in the blood after one dose at time 0."""
    absorption, clearance, volume = jnp.exp(log_rates)

    def flow(t: Any, amounts: jax.Array, args: Any) -> jax.Array:
        absorbed, eliminated = absorption * amounts[0], clearance / volume * amounts[1]
        return jnp.stack([-absorbed, absorbed - eliminated])

    control, start = diffrax.PIDController(rtol=1e-4, atol=1e-5), jnp.array([DOSE, 0.0])
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(flow), diffrax.Tsit5(), 0.0, 24.0, 0.1, start,
        saveat=diffrax.SaveAt(ts=times), stepsize_controller=control, max_steps=256,
    )  # fmt: skip
    assert found.ys is not None
    return found.ys[:, 1] / volume


def patients(count: int, most: int) -> px.Groups:
    """Patients with 3 to ``most`` noisy log concentrations each, at sorted times of their own."""
    rng, found = np.random.default_rng(0), []
    absorption, clearance, volume = TRUTH
    rate = clearance / volume
    for size in rng.integers(3, most + 1, count):
        t = np.sort(rng.uniform(0.5, 24.0, size)).astype("float32")
        exact = DOSE * absorption / (volume * (absorption - rate)) * (np.exp(-rate * t) - np.exp(-absorption * t))
        found.append({"t": t, "y": np.log(exact).astype("float32") + rng.normal(0, 0.1, size).astype("float32")})
    return px.Groups(found, lengths=[len(patient["t"]) for patient in found])


def main(argv: Sequence[str] | None = None) -> None:
    chosen = _setting.options(__doc__, argv, patients=(200, "number of patients"), steps=(60, "steps of Adam"))
    count, steps, most = (20, 3, 4) if chosen.quick else (chosen.patients, chosen.steps, 8)

    def squares(log_rates: jax.Array, patient: Any) -> jax.Array:
        errors = jnp.log(concentrations(log_rates, patient["t"])) - patient["y"]
        return jnp.sum(jnp.where(patient.mask, errors**2, 0.0))

    @px.program(patients=count)
    def misfit(log_rates: jax.Array, data: Any) -> jax.Array:
        total = px.reduce_sum(px.map_fn(squares, (px.broadcast(log_rates), data)))
        return total / px.reduce_sum(data.count)

    data = patients(count, most)
    gradient = px.Stream(at_once=5).jit(jax.value_and_grad(misfit))
    optimizer, start = optax.adam(0.1), jnp.log(jnp.array([0.5, 1.0, 10.0]))
    log_rates: Any = start
    state, rows, curve = optimizer.init(log_rates), [], {}
    for step in range(steps + 1):
        value, slope = gradient(log_rates, data)
        curve[step] = float(value)
        if step % max(steps // 6, 1) == 0:
            rows.append((step, curve[step], *map(float, jnp.exp(log_rates))))
        updates, state = optimizer.update(slope, state)
        log_rates = optax.apply_updates(log_rates, updates)
    in_memory = data.arrays()
    print(f"{count} patients with {in_memory.count.sum()} observations on {jax.device_count()} devices")
    _setting.table(["step", "misfit", *NAMES], [*rows, ("drawn with", "", *map(float, TRUTH))])
    streamed, whole = gradient(start, data)[1], jax.grad(misfit)(start, in_memory)
    print(f"the gradient of all patients on the mesh differs by {float(jnp.abs(streamed - whole).max()):.1e}")
    _setting.plot(chosen.plot, {"misfit": curve}, "step", "misfit")


if __name__ == "__main__":
    main()
