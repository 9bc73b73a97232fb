"""No public face: LAPACK's threads. One for small matrices, all for large ones, and afterwards as before."""

import jax.numpy as jnp
import pytest

from paraxis._host import threads

threadpoolctl = pytest.importorskip("threadpoolctl")


def num_threads() -> set[int]:
    return {found["num_threads"] for found in threadpoolctl.threadpool_info() if found["user_api"] == "blas"}


def test_small_matrices_are_factored_on_one_thread() -> None:
    jnp.linalg.cholesky(jnp.eye(2))  # that SciPy's library is loaded
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        before = num_threads()
        with threads.lapack_alone(10):
            assert num_threads() == {1}
        with threads.lapack_alone(5_000):
            assert num_threads() == before
        assert num_threads() == before
