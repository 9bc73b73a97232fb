"""What a scheduler says of a process: its rank under launchers that JAX does not know, and the GPUs left idle."""

import os
import re

import jax

from paraxis._host import processes
from paraxis.errors import DeviceError


def require_known() -> None:
    """Refuse to be alone where a launcher has started several processes, none of which JAX would find."""
    if (started := processes.launcher()) is not None:
        rank, number, facts = started
        raise DeviceError(
            f"px.initialize: {facts}, but JAX does not know their launcher; before px.initialize(), write "
            f'jax.distributed.initialize("HOST:5000", int(os.environ["{number}"]), int(os.environ["{rank}"])), where '
            f"HOST is that of rank 0, or unset {number} if each is alone"
        )


def require_all_gpus() -> None:
    """Refuse to leave GPUs of this node idle: under SLURM and Open MPI, JAX gives a process one."""
    tasks, visible = _tasks(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = len([name for name in visible if name.strip()])  # of NVIDIA
    if 0 < tasks < gpus and jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        raise DeviceError(
            f"px.initialize: this node has {gpus} GPUs and {tasks} of the processes, and under its scheduler JAX gives "
            f"each one GPU; start one task per GPU, as srun --ntasks-per-node={gpus}, or, of one task per node, set "
            f"JAX_LOCAL_DEVICE_IDS={','.join(map(str, range(gpus)))}; to leave the others idle, JAX_LOCAL_DEVICE_IDS=0"
        )


def _tasks() -> int:
    """Return how many processes of this run are on this node; 0: nobody says, or the user has said which GPUs."""
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return 0
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in os.environ:
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    written = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # as 4(x2),1
    of_nodes = [int(tasks) for tasks, nodes in written for _ in range(int(nodes or 1))]
    node = int(os.environ.get("SLURM_NODEID", 0))
    return of_nodes[node] if node < len(of_nodes) else 0
