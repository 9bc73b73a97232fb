"""A run as a user would start it: ``python -m tests.train._fit_script DIRECTORY``."""

import sys
import time
from pathlib import Path

import paraxis as px
from tests.train import _fits as fits

directory = Path(sys.argv[1])
px.fit(
    fits.start(),
    fits.step,
    fits.data(),
    steps=100,
    checkpoint=px.Checkpoints(directory / "checkpoints", every=1000),
    log=directory / "log.jsonl",
    callbacks=lambda event: time.sleep(0.05) if event.step > 10 else None,
)
