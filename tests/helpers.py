"""What the tests share: the table of scripts, toy environments and ways to run a script."""

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.wrappers.vector import RecordEpisodeStatistics

ROOT = Path(__file__).parents[1]
CORE = set(range(1, 14))
VECTORS = Box(-np.inf, np.inf, (2,), np.float32)


@dataclass(frozen=True)
class Script:
    """One row per script; the tests of what scripts have in common run over this table."""

    parent: str | None  # the script that its diff is read against
    details: set[int]
    auxiliary: set[int]
    lines: int  # at most
    action_space: gym.Space  # of its toy environment
    env_id: str  # a quick one of gymnasium's own
    obs_space: Box = field(default_factory=lambda: VECTORS)  # of its toy environment

    @property
    def images(self) -> bool:
        return self.obs_space.dtype == np.uint8


SCRIPTS = {
    "ppo_classic": Script(None, CORE, {1, 3}, 640, Discrete(3), "CartPole-v1"),
    "ppo_continuous": Script(
        "ppo_classic", CORE | set(range(23, 32)), {1, 3}, 720, Box(-1, 1, (3,)), "InvertedPendulum-v5"
    ),
    "ppo_multidiscrete": Script(
        "ppo_classic", CORE | {37}, {1, 3, 4}, 710, MultiDiscrete([3, 2]), "InvertedPendulum-v5"
    ),
    "ppo_atari": Script(
        "ppo_classic",
        CORE - {13} | set(range(14, 23)),
        {1, 3},
        750,
        Discrete(4),
        "breakout",
        Box(0, 255, (84, 84, 4), np.uint8),
    ),
    "ppo_atari_lstm": Script(
        "ppo_atari",
        CORE - {13} | set(range(14, 20)) | {21, 22} | set(range(32, 37)),
        {1, 3},
        800,
        Discrete(4),
        "breakout",
        Box(0, 255, (84, 84, 1), np.uint8),
    ),
    "ppo_joint": Script(
        "ppo_atari",
        CORE - {13} | set(range(14, 23)),
        {1, 2, 3},
        1174,
        Discrete(4),
        "breakout",
        Box(0, 255, (84, 84, 4), np.uint8),
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

    def __init__(self, obs_space: Box, action_space: gym.Space, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space, self.render_mode = obs_space, action_space, render_mode

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
        if self.observation_space.dtype == np.uint8:
            return np.full(self.observation_space.shape, 10 * self.steps, np.uint8)
        return np.array([self.steps, self.np_random.normal()], np.float32)


def toy_id(name: str) -> str:
    """Returns the id of the toy environment with the spaces of a script."""
    return f"Toy-{name}-v0"


for _name, _script in SCRIPTS.items():
    _spaces = {"obs_space": _script.obs_space, "action_space": _script.action_space}
    gym.register(toy_id(_name), entry_point=Toy, kwargs=_spaces)


def script_of(module: types.ModuleType) -> tuple[str, Script]:
    name = module.__name__.removesuffix("_mutant")
    return name, SCRIPTS[name]


@contextlib.contextmanager
def toy_envs(module: types.ModuleType) -> Iterator[None]:
    """Puts the toy environment in place of the emulators of a script that makes no others."""
    name, script = script_of(module)

    def make_envs(args, envs, video=None):
        num_envs = envs if isinstance(envs, int) else len(envs)
        make, same_step = [lambda: gym.make(toy_id(name))] * num_envs, gym.vector.AutoresetMode.SAME_STEP
        envs = RecordEpisodeStatistics(gym.vector.SyncVectorEnv(make, autoreset_mode=same_step))
        envs.protocol = "toy"
        return envs

    with pytest.MonkeyPatch.context() as patch:
        if script.images:
            patch.setattr(module, "make_envs", make_envs)
        yield


def quick_args(module: types.ModuleType, folder: Path, iterations: int = 2, **changes: Any) -> Any:
    """Returns the Args of a short training on the toy environment."""
    name, script = script_of(module)
    env_id = script.env_id if script.images else toy_id(name)
    settings = {"env_id": env_id, "eval_episodes": 0, "run_dir": str(folder), "device": "cpu"}
    settings |= {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 4} | changes
    if "levels" in module.Args.__dataclass_fields__:
        settings["levels"] = (settings.pop("env_id"),)
    settings.setdefault("total_timesteps", iterations * settings["num_envs"] * settings["num_steps"])
    return module.Args(**settings)


def make_agent(module: types.ModuleType, seed: int = 0, **options: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    _, script = script_of(module)
    return module.Agent(script.obs_space, script.action_space, **options)


def make_batch(module: types.ModuleType, agent: torch.nn.Module, size: int = 64, noise: float = 0.5) -> Any:
    """Returns a batch whose old policy and values differ from the agent's by `noise`."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    shape = script_of(module)[1].obs_space.shape
    obs = (
        draw(size, *shape)
        if len(shape) == 1
        else torch.randint(256, (size, *shape), dtype=torch.uint8, generator=generator)
    )
    rest: list[torch.Tensor] = []
    if "masks" in module.Batch._fields:
        rest = [torch.ones((size, 1), dtype=torch.bool)]
    if "states" in module.Batch._fields:  # sequences of one step
        obs, rest = obs.unsqueeze(1), [torch.zeros((size, 1), dtype=torch.bool), draw(size, 2, 128)]
    with torch.no_grad():
        dist, value = forward(agent, module.Batch(obs, *[obs] * 4, *rest))
        actions, noises = dist.sample(generator), noise * draw(2, *value.shape)
        log_probs, values = dist.log_prob(actions) + noises[0], value + noises[1]
    return module.Batch(obs, actions, log_probs, values, values + draw(*value.shape), *rest)


def forward(agent: torch.nn.Module, batch: Any) -> tuple[Any, torch.Tensor]:
    """Returns the distribution and the value of a batch, replayed from its states where the agent has a memory."""
    memory = (batch.starts, batch.states) if "states" in batch._fields else ()
    return agent(batch.obs, *memory)[:2]


class Threads:
    """Stands for torch.distributed in a script: the workers are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.values, self.local = (
            size,
            threading.Barrier(size, timeout=60),
            {},
            threading.local(),
        )

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.size

    def all_gather_object(self, values: list, value: Any) -> None:
        self.values[self.local.rank] = value
        self.barrier.wait()
        values[:] = [self.values[rank] for rank in range(self.size)]
        self.barrier.wait()

    def all_reduce(self, x: torch.Tensor) -> None:
        values: list = []
        self.all_gather_object(values, x.clone())
        x.copy_(torch.stack(values).sum(0))

    def run(self, module: types.ModuleType, work: Any) -> list[Any]:
        """Calls work(rank) in every worker; returns what they return."""
        results: list[Any] = [None] * self.size

        def start(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = work(rank)
            except Exception:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self.size)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "distributed", self)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert None not in results, "a worker failed"
        return results
