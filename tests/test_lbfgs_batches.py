"""Many problems at once, with as many columns as LAPACK divides among threads: a batch ends where cores are few."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, paraxis as px

rng = np.random.default_rng(0)
X = rng.normal(size=(2000, 784)).astype("float32")
y = (X[:, :3] + rng.gumbel(size=(2000, 3))).argmax(1).astype("int32")
solver = px.solve.LBFGS(px.solve.objective.l2_multiclass_logreg, maxiter=15)
run = jax.jit(jax.vmap(solver.run, in_axes=(None, 0, None)))
params, state = run(jnp.zeros((784, 3)), jnp.array([0.1, 0.2, 0.3, 0.4]), (X, y))
for number, l2 in enumerate((0.1, 0.4)):
    one = solver.run(jnp.zeros((784, 3)), l2, (X, y))
    np.testing.assert_allclose(params[3 * number], one.params, rtol=1e-3, atol=1e-4)
print(state.status.tolist())
"""


@pytest.mark.slow
def test_lbfgs_of_many_problems_with_784_columns_ends_on_two_threads():
    """In a process of its own, whose time limit only a batch that never ends can reach."""
    env = {**os.environ, "NPROC": "2", "PJRT_NPROC": "2", "XLA_FLAGS": "", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[1, 1, 1, 1]"
