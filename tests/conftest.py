"""All tests run on eight simulated CPU devices; each worker of pytest-xdist starts its own."""

import os

NUM_DEVICES = 8

# JAX reads these when it starts, which importing a test module may do.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES} {os.environ.get('XLA_FLAGS', '')}"
os.environ["JAX_PLATFORMS"] = "cpu"
