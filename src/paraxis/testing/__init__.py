"""For tests of programs: simulated devices, and assertions about communication and placement."""

from paraxis.reports import Communication
from paraxis.testing._assertions import assert_communication, assert_same_everywhere, communication
from paraxis.testing._devices import simulate_devices

__all__ = ["Communication", "assert_communication", "assert_same_everywhere", "communication", "simulate_devices"]
