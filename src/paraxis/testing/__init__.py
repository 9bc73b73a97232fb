"""For tests of programs: simulated devices, and assertions about communication, memory, work and placement."""

from paraxis.reports import Communication, communication
from paraxis.testing._assertions import (
    assert_communication,
    assert_memory,
    assert_no_redundant_work,
    assert_same_everywhere,
)
from paraxis.testing._devices import simulate_devices
from paraxis.testing._snapshots import Snapshot

__all__ = [
    "Communication",
    "Snapshot",
    "assert_communication",
    "assert_memory",
    "assert_no_redundant_work",
    "assert_same_everywhere",
    "communication",
    "simulate_devices",
]
