"""Memory that is told is memory that is used: a program in a process of its own, whose peak grows by as much."""

import json
import subprocess
import sys
import textwrap

import pytest

RUN = """
import json, resource, sys
import jax, jax.numpy as jnp
import paraxis as px

def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

{program}

args = jax.block_until_ready(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes))
told = px.explain(fn)(*args).memory
fn = jax.jit(fn).lower(*args).compile({options})
before = held()
jax.block_until_ready(fn(*args))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([told.peak - told.arguments, peak - before]))
"""
PROGRAMS = {
    "attention": """
        fn = lambda x: jax.nn.softmax(x @ x.T) @ x
        shapes = [jax.ShapeDtypeStruct((12288, 64), jnp.float32)]
    """,
    "convolutions": """
        def fn(x, w):
            for _ in range(3):
                x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))
            return x
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 32, 192, 192), (32, 32, 3, 3))]
    """,
    "a loop that keeps what its derivative needs": """
        def fn(w, x):
            def loss(w):
                return jax.lax.scan(lambda x, _: (jnp.tanh(x * w), None), x, length=64)[0].sum()
            return jax.grad(loss)(w)
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (1024, 1024))]
    """,
}


@pytest.mark.slow  # each is a process that takes hundreds of megabytes
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")
@pytest.mark.parametrize("program", PROGRAMS)
def test_explain_tells_the_peak_that_the_process_takes(program: str) -> None:
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}  # as in px.Stream, which bounds its memory by such figures
    code = RUN.format(program=textwrap.dedent(PROGRAMS[program]), options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told, used = json.loads(done.stdout)
    assert told > 200e6
    assert 0.8 * told < used < 1.25 * told
