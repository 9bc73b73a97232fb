"""The options of the demo."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of ``paraxis demo``.

    Attributes:
        rounds: rounds of training.
        clients: number of clients the digits are split over.
        per_round: number of clients in each round.
        members: number of members of the ensemble.
        epochs: how often all digits are seen, by the ensemble and in the training run.
        devices: number of devices; ``None``: all there are.
        seed: of all randomness.
        out: directory for what is written.
    """

    rounds: int
    clients: int
    per_round: int
    members: int
    epochs: int
    devices: int | None
    seed: int
    out: Path
