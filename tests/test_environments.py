"""Environments of every kind: spaces, episode ends, seeds, and what must stop the training."""

import os
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from checks import record
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Sequence, Tuple
from helpers import ROOT, SCRIPTS, forward, load, quick_args, toy_envs


class Spaces(gym.Env):
    """Random observations of any space; refuses an action that is not its own; episodes of five steps."""

    def __init__(self, observation_space, action_space, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"illegal action {action!r}"
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


class Line(gym.Env):
    """The observation is the number of steps, at the limit `last` instead; the reward is 1."""

    observation_space, action_space = Box(-np.inf, np.inf, (1,), np.float32), Discrete(2)

    def __init__(self, limit=4, last=100.0, bad_step=None, bad_field="", render_mode=None):
        self.limit, self.last, self.bad_step, self.bad_field, self.total = limit, last, bad_step, bad_field, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.total += 1
        cut, bad = self.steps == self.limit, self.total == self.bad_step
        obs = np.full(1, self.last if cut else self.steps, np.float32)
        obs = obs * np.nan if bad and self.bad_field == "observation" else obs
        return obs, np.inf if bad and self.bad_field == "reward" else 1.0, False, cut, {}


def register(name: str, entry_point, **options) -> str:
    gym.register(name, entry_point=entry_point, kwargs=options)
    return name


SPACES = {
    "matrix": (Box(-1, 1, (2, 3), np.float64), 6),
    "scalar": (Box(-1, 1, (), np.float32), 1),
    "bytes": (Box(0, 255, (4,), np.uint8), 4),
    "discrete": (Discrete(5, start=2), 5),
    "bits": (MultiBinary(3), 3),
    "dict": (Dict({"a": Box(-1, 1, (2,)), "b": Discrete(3)}), 5),
    "tuple": (Tuple((Discrete(2), Box(-1, 1, (2, 2), np.float64))), 6),
}


@pytest.mark.parametrize("kind", SPACES)
def test_every_vector_observation(kind, tmp_path):
    space, size = SPACES[kind]
    module = load("ppo_classic")
    env_id = register(f"Space-{kind}-v0", Spaces, observation_space=space, action_space=Discrete(2))
    args = quick_args(module, tmp_path, env_id=env_id)
    envs = module.make_envs(args, 2)
    obs, _ = envs.reset(seed=[1, 2])
    expected = [gym.spaces.flatten(space, x) for x in _first_samples(space, [1, 2])]
    np.testing.assert_allclose(obs, np.reshape(expected, (2, size)), rtol=1e-6)
    assert module.train(args)["episodic_return"] == 5.0


def _first_samples(space, seeds):
    for seed in seeds:
        space.seed(seed)
        yield space.sample()


def test_discrete_actions_that_start_elsewhere(tmp_path):
    module, batches = load("ppo_classic"), []
    env_id = register("Start-v0", Spaces, observation_space=Box(-1, 1, (2,)), action_space=Discrete(3, start=-1))
    undo = record(module, "update", batches)
    module.train(quick_args(module, tmp_path, env_id=env_id))  # the environment refuses any other action
    undo()
    assert set(batches[0][2].actions.tolist()) == {0, 1, 2}  # stored as the network gives them


@pytest.mark.parametrize("kind", ["sequence", "box", "multidiscrete"])
def test_other_spaces_are_refused(kind, tmp_path):
    module = load("ppo_classic")
    vector, two = Box(-1, 1, (2,)), Discrete(2)
    space, action_space, message = {
        "sequence": (Sequence(two), two, "varying size"),
        "box": (vector, Box(-1, 1, (2,)), "ppo_continuous.py"),
        "multidiscrete": (vector, gym.spaces.MultiDiscrete([2, 3]), "ppo_multidiscrete.py"),
    }[kind]
    env_id = register(f"Refused-{kind}-v0", Spaces, observation_space=space, action_space=action_space)
    with pytest.raises(module.UsageError, match=message):
        module.train(quick_args(module, tmp_path, env_id=env_id))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_stored_row_is_a_real_step(name, tmp_path):
    """Episodes of three steps: the reset observation follows the end at once, and no row is spent on a reset."""
    module, batches = load(name), []
    undo = record(module, "update", batches)
    args = quick_args(module, tmp_path)
    with toy_envs(module):
        result = module.train(args)
    undo()
    assert result["episodic_return"] == 3.0
    obs = batches[1][2].obs.flatten()
    obs = (
        obs.view(args.num_envs, args.num_steps, -1)[0, :, 0]
        if module.Batch._fields[-1] == "states"
        else obs.view(args.num_steps, args.num_envs, -1)[:, 0, 0]
    )
    levels = sorted(range(args.num_steps), key=lambda t: float(obs[t]))  # a normalizer keeps the order
    expected = sorted(range(args.num_steps), key=lambda t: ((args.num_steps + t) % 3, float(obs[t])))
    assert levels == expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_first_ratio_is_one(name, tmp_path):
    """The update starts from the policy that collected the rollout: log-probs and values agree."""
    module = load(name)
    batches: list = []
    undo = record(module, "update", batches)
    module.train(quick_args(module, tmp_path, iterations=3, learning_rate=0.0))
    undo()
    for agent, _, batch, *_ in batches:
        dist, value = forward(agent, batch)
        torch.testing.assert_close(dist.log_prob(batch.actions), batch.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(value, batch.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_time_limit(bootstrap, tmp_path, monkeypatch):
    """With V(x) = x and gamma = lambda = 1 the return before the limit is 1 + V(last observation), or 1."""
    module, batches = load("ppo_classic"), []
    env_id = register(f"Limit-{bootstrap}-v0", Line)

    class Stub(module.Agent):
        def forward(self, obs):
            return super().forward(obs)[0], obs[..., 0]

    monkeypatch.setattr(module, "Agent", Stub)
    undo = record(module, "update", batches)
    settings = {"num_envs": 2, "num_steps": 16, "gamma": 1.0, "gae_lambda": 1.0, "bootstrap_truncated": bootstrap}
    module.train(quick_args(module, tmp_path, env_id=env_id, **settings))
    undo()
    returns = batches[0][2].returns.view(16, 2)
    last = 100.0 if bootstrap else 0.0
    expected = torch.tensor([4.0, 3.0, 2.0, 1.0]).repeat(4) + last  # none sees the next episode
    torch.testing.assert_close(returns, expected[:, None].expand(16, 2))


def test_value_of_an_endless_task(tmp_path):
    """Reward 1 for ever, cut every 10 steps: V = 1 / (1 - gamma) = 10 with the bootstrap, far below without."""
    module, values = load("ppo_classic"), {}
    env_id = register("Endless-v0", Line, limit=10, last=0.0)
    for bootstrap in (False, True):
        agents: list = []
        undo = record(module, "update", agents)
        settings = {"num_envs": 4, "num_steps": 64, "gamma": 0.9, "learning_rate": 3e-3, "clip_vloss": False}
        args = quick_args(module, tmp_path, 60, env_id=env_id, bootstrap_truncated=bootstrap, **settings)
        module.train(args)
        undo()
        values[bootstrap] = agents[-1][2].values.view(64, 4)[[9, 19, 29]].mean().item()  # at a step before the limit
    assert values[True] == pytest.approx(10, abs=1)
    assert values[False] < 6


# the observation after 50 steps, the reward of step 49 (from 0), the last observation of the episode that step 51 cuts
@pytest.mark.parametrize(
    ("field", "bad_step", "step"), [("observation", 50, 50), ("reward", 50, 49), ("final_value", 52, 51)]
)
def test_nan_stops_the_training(field, bad_step, step, tmp_path):
    module = load("ppo_classic")
    bad_field = "reward" if field == "reward" else "observation"
    env_id = register(f"Bad-{field}-v0", Line, bad_step=bad_step, bad_field=bad_field)
    settings = {"num_envs": 2, "num_steps": 16, "checkpoint_every": 1, "bootstrap_truncated": True}
    args = quick_args(module, tmp_path, 8, env_id=env_id, **settings)
    with pytest.raises(FloatingPointError, match=f"{field} of sub-environment 0 at step {step}"):
        module.train(args)
    (folder,) = tmp_path.iterdir()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 3  # the last good one


def test_diverged_update_stops_the_training(tmp_path):
    module = load("ppo_classic")
    with pytest.raises(FloatingPointError, match="of iteration"):
        module.train(quick_args(module, tmp_path, 50, learning_rate=1e30, max_grad_norm=1e30))


def seeds_of(module, seed, tmp_path):
    """Returns the seeds of the sub-environments at the start."""
    seen = []

    class Stop(Exception):
        pass

    class Envs(SimpleNamespace):
        def reset(self, seed):
            seen.extend(seed)
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        spaces = {"single_observation_space": Box(-1, 1, (2,)), "single_action_space": Discrete(2)}
        patch.setattr(module, "make_envs", lambda *_: Envs(**spaces))
        with pytest.raises(Stop):
            module.train(quick_args(module, tmp_path, seed=seed, num_envs=8, num_steps=16))
    return seen


def test_seeds_share_no_stream(tmp_path):
    module = load("ppo_classic")
    seeds = [seed for start in range(50) for seed in seeds_of(module, start, tmp_path)]
    assert len(set(seeds)) == 400
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_seed_same_training(name, tmp_path):
    """Twice the same seed, then async sub-environments: the same weights; another seed: others."""
    module = load(name)
    changes = [{}, {}, {"async_envs": True}, {"seed": 2}]
    weights = []
    for change in changes:
        if "async_envs" in change and not hasattr(module.Args, "async_envs"):
            continue
        result = module.train(quick_args(module, tmp_path, env_id=SCRIPTS[name].env_id, **change))
        state = torch.load(result["run_folder"] / "checkpoint.pt", weights_only=True)["agent"]
        weights.append(torch.cat([x.flatten() for x in state.values()]))
    for same in weights[1:-1]:
        assert torch.equal(weights[0], same)
    assert not torch.equal(weights[0], weights[-1])


ONE_PER_PROCESS = """
import os
import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Emulator(CartPoleEnv):
    alive = 0
    def __init__(self, **options):
        if Emulator.alive:
            raise RuntimeError("one emulator per process")
        Emulator.alive += 1
        super().__init__(**options)
    def close(self):
        Emulator.alive -= 1

gym.register("Emulator-v0", entry_point=Emulator, max_episode_steps=20)
"""


def test_one_instance_per_process(tmp_path):
    """Sub-environments that need a process of their own work with --async-envs; without, the message says so."""
    (tmp_path / "emulator.py").write_text(ONE_PER_PROCESS)
    flags = "--env-id emulator:Emulator-v0 --total-timesteps 64 --num-steps 16 --eval-episodes 2 --run-dir runs"
    command = [sys.executable, str(ROOT / "ppo_classic.py"), *flags.split()]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    sync = subprocess.run(command, check=False, **options)
    assert sync.returncode == 2 and "--async-envs" in sync.stderr and "Traceback" not in sync.stderr
    parallel = subprocess.run([*command, "--async-envs"], check=False, **options)
    assert parallel.returncode == 0, parallel.stderr
    assert "evaluation: return" in parallel.stdout
