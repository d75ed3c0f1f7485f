"""What the tests share: the table of scripts, toy environments and ways to run a script."""

import functools
import importlib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

ROOT = Path(__file__).parents[1]
CORE = set(range(1, 14))


@dataclass(frozen=True)
class Script:
    """One row per script; the tests of what scripts have in common run over this table."""

    parent: str | None  # the script that its diff is read against
    details: set[int]
    auxiliary: set[int]
    lines: int  # at most
    action_space: gym.Space  # of its toy environment
    env_id: str  # a quick one of gymnasium's own


SCRIPTS = {
    "ppo_classic": Script(None, CORE, {1, 3}, 640, Discrete(3), "CartPole-v1"),
    "ppo_continuous": Script(
        "ppo_classic", CORE | set(range(23, 32)), {1, 3}, 720, Box(-1, 1, (3,)), "InvertedPendulum-v5"
    ),
    "ppo_multidiscrete": Script(
        "ppo_classic", CORE | {37}, {1, 3, 4}, 710, MultiDiscrete([3, 2]), "InvertedPendulum-v5"
    ),
}


def load(name: str) -> types.ModuleType:
    return importlib.import_module(name)


def mutate(name: str, old: str, new: str) -> types.ModuleType:
    """Returns the script as a module in which `old`, which must stand there exactly once, is replaced."""
    text = (ROOT / f"{name}.py").read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}.py"
    module = types.ModuleType(f"{name}_mutant")
    module.__file__ = str(ROOT / f"{name}.py")
    importlib.import_module("sys").modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(text.replace(old, new), f"{name}_mutant.py", "exec"), module.__dict__)
    return module


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a golden file."""
    with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as file:
        return dict(file)


class Toy(gym.Env):
    """Episodes of three steps: the observation is the number of steps and noise, the reward is 1. Counts its resets."""

    resets = 0
    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, action_space: gym.Space, render_mode: str | None = None) -> None:
        self.action_space, self.render_mode = action_space, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Toy.resets += 1
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"illegal action {action!r}"
        self.steps += 1
        return self.observe(), 1.0, self.steps == 3, False, {}

    def observe(self):
        return np.array([self.steps, self.np_random.normal()], np.float32)


def toy_id(name: str) -> str:
    """Returns the id of the toy environment with the action space of a script."""
    return f"Toy-{name}-v0"


for _name, _script in SCRIPTS.items():
    gym.register(toy_id(_name), entry_point=Toy, kwargs={"action_space": _script.action_space})


def quick_args(module: types.ModuleType, folder: Path, iterations: int = 2, **changes: Any) -> Any:
    """Returns the Args of a short training on the toy environment."""
    name = module.__name__.removesuffix("_mutant")
    settings = {"env_id": toy_id(name), "eval_episodes": 0, "run_dir": str(folder), "device": "cpu"}
    settings |= {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 4} | changes
    settings.setdefault("total_timesteps", iterations * settings["num_envs"] * settings["num_steps"])
    return module.Args(**settings)


def make_agent(module: types.ModuleType, seed: int = 0, **options: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    name = module.__name__.removesuffix("_mutant")
    return module.Agent(Box(-np.inf, np.inf, (2,), np.float32), SCRIPTS[name].action_space, **options)


def make_batch(module: types.ModuleType, agent: torch.nn.Module, size: int = 64, noise: float = 0.5) -> Any:
    """Returns a batch whose old policy and values differ from the agent's by `noise`."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    obs = draw(size, 2)
    with torch.no_grad():
        dist, value = agent(obs)
        actions = dist.sample(generator)
        log_probs, values = dist.log_prob(actions) + noise * draw(size), value + noise * draw(size)
    masks = [torch.ones((size, 1), dtype=torch.bool)] if "masks" in module.Batch._fields else []
    return module.Batch(obs, actions, log_probs, values, values + draw(size), *masks)
