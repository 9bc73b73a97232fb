"""An ensemble of networks on handwritten digits: what several say together, and how sure they may be.

All members see the same digits, each in an order of its own, and start from weights of their own. Their averaged
probabilities are right more often than a member's, and closer to how often they are right, most of all on digits
unlike those they were trained on: here, digits that are turned (Lakshminarayanan et al., 2017, arXiv 1612.01474).
"""

from paraxis.cli.demo.ensemble._chapter import run

__all__ = ["run"]
