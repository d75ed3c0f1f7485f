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


COINRUN = "procgen_levels:Procgen/coinrun-v0?distribution_mode=easy&num_levels=20"


def test_every_example_is_run():
    named = {env_id.split(":")[0] for env_id in (*RUNS, COINRUN)} | {"airstriker_states"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == named


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


def train_joint(folder, *flags):
    size = ["--num-envs", "2", "--num-steps", "32", "--total-timesteps", "128", "--eval-episodes", "1"]
    command = [sys.executable, str(ROOT / "ppo_joint.py"), *size, *flags]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_procgen_levels(tmp_path):
    """Training on twenty seeds, evaluation on others."""
    if importlib.util.find_spec("procgen") is None:
        pytest.skip("procgen is not installed: see examples/procgen_levels.py")
    test_level = f"{COINRUN}&start_level=20"
    result = train_joint(tmp_path, "--levels", COINRUN, "--test-levels", test_level)
    assert result.returncode == 0, result.stderr
    assert f"evaluation of {test_level}: return" in result.stdout


def test_procgen_episodes(tmp_path):
    """The rewards and ends of Procgen itself, the seeds that were asked for, and only images of the episode."""
    if importlib.util.find_spec("procgen") is None:
        pytest.skip("procgen is not installed: see examples/procgen_levels.py")
    program = """
import gymnasium, numpy, procgen_levels
options = {"num_levels": 3, "start_level": 100, "distribution_mode": "easy", "num_threads": 0}
env = gymnasium.make("Procgen/bigfish-v0", **options)
obs, info = env.reset(seed=3)
seed = int(gymnasium.utils.seeding.np_random(3)[0].integers(2**31))
game = procgen_levels.ProcgenGym3Env(1, "bigfish", rand_seed=seed, **options)
seeds, ends, draws = set(), 0, numpy.random.default_rng(0)
assert numpy.array_equal(obs, game.observe()[1]["rgb"][0])
for _ in range(2000):
    action, last = draws.integers(15), obs
    obs, reward, terminated, truncated, info = env.step(action)
    game.act(numpy.array([action]))
    expected, images, first = game.observe()
    assert (reward, terminated, truncated) == (expected[0], first[0], False)
    seeds.add(info["level_seed"])
    if terminated:
        assert numpy.array_equal(obs, last)
        obs, ends = env.reset()[0], ends + 1
    assert numpy.array_equal(obs, images["rgb"][0])
assert seeds == {100, 101, 102} and ends > 10
env.step(0)
assert numpy.array_equal(env.reset(seed=3)[0], env.reset(seed=3)[0])
"""
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_airstriker_states(tmp_path):
    """Every third state is for testing; the others train."""
    if importlib.util.find_spec("stable_retro") is None:
        pytest.skip("stable_retro is not installed: see examples/airstriker_states.py")
    command = [sys.executable, str(EXAMPLES / "airstriker_states.py"), "airstriker", "--states", "3"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "airstriker").glob("*.state")} == {"2s.state", "4s.state", "6s.state"}
    result = train_joint(tmp_path, "--levels", "@airstriker/train.txt", "--test-levels", "@airstriker/test.txt")
    assert result.returncode == 0, result.stderr
    assert "evaluation of retro:Airstriker-Genesis-v0?state=airstriker/6s.state: return" in result.stdout


def test_sonic_levels_exist():
    """All 17 states, each once; the ROM is not needed for it."""
    data = pytest.importorskip("stable_retro").data
    lines = [line for name in ("train", "test") for line in (EXAMPLES / f"sonic_{name}.txt").read_text().splitlines()]
    levels = [line for line in lines if not line.startswith("#")]
    game = "SonicTheHedgehog-Genesis-v0"
    expected = [f"retro:{game}?state={state}&scenario=contest" for state in data.list_states(game)]
    assert sorted(levels) == expected and "contest" in data.list_scenarios(game)
