"""What joining the processes of a job needs of JAX and is not public; each name is imported where it is used."""

from typing import Any

import jax


def detects_cluster() -> bool:
    """Return whether ``jax.distributed.initialize()`` would find a scheduler that has started this process."""
    from jax._src import clusters

    return any(kind.is_env_present() for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method)


def backends_are_initialized() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def collect_at(address: str) -> None:
    """Have CPU devices meet others' here, unless they have started: JAX takes what the host's name resolves to."""
    from jax._src import distributed, xla_bridge

    def make() -> Any:
        client, gloo = distributed.global_state.client, xla_bridge._jax.make_gloo_tcp_collectives  # pyright: ignore
        return xla_bridge.make_cpu_client(gloo(distributed_client=client, hostname=address))

    kind = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if kind == "gloo" and not backends_are_initialized():
        xla_bridge.register_backend_factory("cpu", make, fail_quietly=False)
