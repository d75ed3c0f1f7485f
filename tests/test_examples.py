"""The adapters of docs/examples train and evaluate, each in its own process, as a user would run it."""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers import ROOT

EXAMPLES = ROOT / "docs" / "examples"

# environment: the package it needs beyond the dependencies, flags
RUNS = {
    "ale_joystick:Joystick/Boxing-v5": (None, []),
    "microrts:MicroRTS-v0": ("gym_microrts", []),
    "retro_airstriker:Airstriker-v0": ("stable_retro", ["--async-envs"]),
}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {env_id.split(":")[0] for env_id in RUNS}


@pytest.mark.parametrize("env_id", RUNS)
def test_example_trains_and_evaluates(env_id, tmp_path):
    package, flags = RUNS[env_id]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see {EXAMPLES.name}/{env_id.split(':')[0]}.py")
    size = ["--num-envs", "2", "--num-steps", "64", "--total-timesteps", "256", "--eval-episodes", "1"]
    command = [sys.executable, str(ROOT / "ppo_multidiscrete.py"), "--env-id", env_id, *size, *flags]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "evaluation: return" in result.stdout
