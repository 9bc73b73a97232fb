"""Federated averaging on handwritten digits: the clients' digits stay apart, only models travel.

A client holds digits of two kinds at most, so no client alone could learn them all. In each round some clients
start from the shared model, train on their own digits, and send back how their model changed; the mean of the
changes is the next model (McMahan et al., 2017, arXiv 1602.05629).
"""

from paraxis.cli.demo.fedavg._chapter import run

__all__ = ["run"]
