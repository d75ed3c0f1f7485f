"""What the tests share."""

import functools
import importlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
SCRIPTS = ["ppo_classic"]


def load(script: str):
    return importlib.import_module(script)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a golden file."""
    with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as file:
        return dict(file)
