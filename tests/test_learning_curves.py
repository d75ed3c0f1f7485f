"""Short trainings reach a stated return within a stated number of steps; the same training without learning does not.

Thresholds: from the worst of five seeds (1 to 5), 15 % of the way towards the training with learning rate 0. Measured:
`python tests/test_learning_curves.py` prints the figures that stand in CURVES.
"""

import sys
import tempfile
from typing import Any, NamedTuple

import pytest
from helpers import load


class Curve(NamedTuple):
    """A short training: the mean return of its last 100 episodes with seeds 1 to 5, and without learning."""

    script: str
    settings: dict[str, Any]
    reached: list[float]
    without_learning: float
    slow: bool = False

    @property
    def threshold(self) -> float:
        worst = min(self.reached)
        return worst - 0.15 * (worst - self.without_learning)


CURVES = {
    "cartpole": Curve(
        "ppo_classic",
        {"env_id": "CartPole-v1", "total_timesteps": 100_000},
        reached=[234.8, 287.0, 237.4, 318.1, 304.6],
        without_learning=22.0,
    ),
    "pendulum": Curve(
        "ppo_continuous",
        {"env_id": "InvertedPendulum-v5", "total_timesteps": 100_000},
        reached=[821.2, 820.2, 805.8, 814.6, 813.1],
        without_learning=6.5,
    ),
    "halfcheetah": Curve(
        "ppo_continuous",
        {"env_id": "HalfCheetah-v5", "total_timesteps": 200_000},
        reached=[634.9, 242.4, 846.0, 766.3, 376.2],
        without_learning=-349.0,
    ),
    "bins": Curve(
        "ppo_multidiscrete",
        {"env_id": "Swimmer-v5", "total_timesteps": 50_000},
        reached=[22.2, 22.4, 24.4, 22.6, 24.0],
        without_learning=1.1,
    ),
    "breakout": Curve(
        "ppo_atari",
        {"env_id": "breakout", "total_timesteps": 100_000, "anneal_lr": False, "compile": True},
        reached=[3.63, 3.26, 3.01, 3.06, 2.57],
        without_learning=1.41,
        slow=True,
    ),
}
SEED = 1
MARKS = (pytest.mark.slow, pytest.mark.timeout(1800))
NAMES = [pytest.param(name, marks=MARKS if curve.slow else ()) for name, curve in CURVES.items()]


def train(name: str, folder, seed: int = SEED, **changes: Any) -> float:
    module = load(CURVES[name].script)
    settings = {"eval_episodes": 0, "run_dir": str(folder), "device": "cpu", "seed": seed}
    return module.train(module.Args(**CURVES[name].settings | settings | changes))["episodic_return"]


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name, tmp_path):
    assert train(name, tmp_path) >= CURVES[name].threshold


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_without_learning(name, tmp_path):
    """A fifth of the steps is enough: with learning rate 0 the policy never changes."""
    steps = CURVES[name].settings["total_timesteps"] // 5
    assert train(name, tmp_path, learning_rate=0.0, total_timesteps=steps) < CURVES[name].threshold


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    for name in sys.argv[1:] or CURVES:
        figures = [round(train(name, folder, seed), 1) for seed in range(1, 6)]
        print(name, figures, round(train(name, folder, learning_rate=0.0), 1), file=sys.stderr)
