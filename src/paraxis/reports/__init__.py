"""Reports of what compiled functions send, compute and hold, where arrays lie, what models contain, what is faster."""

from paraxis.reports._communication import (
    Communication as Communication,
    communication as communication,
    num_devices as num_devices,
    of_program,
    program_of as program_of,
    total_bytes as total_bytes,
)
from paraxis.reports._compare import Comparison, Timing, compare
from paraxis.reports._explain import explain
from paraxis.reports._findings import for_devices as for_devices
from paraxis.reports._growth import Growth, Point as Point, text as text
from paraxis.reports._leaves import Leaf
from paraxis.reports._machines import Machine
from paraxis.reports._report import Report
from paraxis.reports._show import Arrays, show
from paraxis.reports._tabulate import ModuleRow, ModuleTable, tabulate
from paraxis.reports._values import Collective, Estimate, Finding, Layout, LineWork, Memory, Work
from paraxis.reports._watching import Called as Called, watching as watching

__all__ = [
    "Arrays",
    "Collective",
    "Comparison",
    "Estimate",
    "Finding",
    "Growth",
    "Layout",
    "Leaf",
    "LineWork",
    "Machine",
    "Memory",
    "ModuleRow",
    "ModuleTable",
    "Report",
    "Timing",
    "Work",
    "compare",
    "explain",
    "of_program",
    "show",
    "tabulate",
]
