"""ppo_multidiscrete.py: independent action components, every space they come from, and masks of illegal actions."""

import re
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from helpers import ROOT, golden, load

MICRORTS = np.tile([6, 4, 4, 4, 4, 7, 49], 64)  # the 448 components of an 8x8 map
ppo = load("ppo_multidiscrete")


def make_dist(nvec, logits: torch.Tensor, masks: torch.Tensor | None = None):
    """Returns the distribution that an agent with these logits as the output of its policy head has."""
    agent = ppo.Agent(Box(-1, 1, (1,)), MultiDiscrete(nvec))
    return ppo.MultiCategorical(logits, masks, agent.slots, agent.table_shape)


def make_masks(nvec, rows: int, generator: torch.Generator, empty: bool = False) -> torch.Tensor:
    """Random masks with at least one legal choice a component; with `empty`, some components have none."""
    parts = []
    for n in nvec:
        part = torch.rand((rows, n), generator=generator) < 0.5
        part[torch.arange(rows), torch.randint(int(n), (rows,), generator=generator)] = True
        parts.append(part & (torch.rand((rows, 1), generator=generator) < 0.7) if empty else part)
    return torch.cat(parts, -1)


# The official numbers


def names(agent) -> dict[str, torch.nn.Parameter]:
    layers = {
        "pi/mlp_fc0": agent.actor[0],
        "pi/mlp_fc1": agent.actor[2],
        "pi": agent.policy_head,
        "vf": agent.value_head,
    }
    return {
        f"{name}/{kind}": getattr(layer, long)
        for name, layer in layers.items()
        for kind, long in (("w", "weight"), ("b", "bias"))
    }


@pytest.mark.parametrize("masks", ["unused", "all legal"])
def test_official_update(masks):
    data = golden("multidiscrete")
    agent = ppo.Agent(Box(-1, 1, (6,)), MultiDiscrete([3, 2, 4]), shared_network=True)
    parameters = names(agent)
    assert len(parameters) == len(list(agent.parameters()))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(data[f"init/{name}"].T))
    args = ppo.Args(ent_coef=float(data["ent_coef"]), clip_coef=float(data["cliprange"]))
    optimizer = ppo.Adam(agent.parameters(), lr=1.0, fused=True)
    arrays = [torch.from_numpy(data[name]) for name in ("obs", "actions", "old_neglogpacs", "old_values", "returns")]
    arrays[2] = -arrays[2]
    batch = ppo.Batch(*arrays, torch.ones((256, 1 if masks == "unused" else 9), dtype=torch.bool))
    with torch.no_grad():
        dist, value = agent(batch.obs, batch.masks)
        np.testing.assert_allclose(-dist.log_prob(batch.actions), data["fwd0/neglogp"], atol=5e-6, rtol=0)
        np.testing.assert_allclose(dist.entropy(), data["fwd0/entropy"], atol=5e-6, rtol=0)
        np.testing.assert_allclose(value, data["fwd0/value"], atol=5e-6, rtol=0)
    compared = {"grad": 0, "after": 0}
    for k, rows in enumerate(data["mb_idx"]):
        optimizer.param_groups[0]["lr"] = float(data["lr"][k])
        samples = ppo.Batch(*(x[torch.from_numpy(rows)] for x in batch))
        stats = ppo.update_minibatch(agent, optimizer, samples, torch.tensor(args.clip_coef), args, ppo.backward)
        stats = dict(zip(ppo.STATS, stats.tolist(), strict=True))
        order = "policy_loss", "value_loss", "entropy", "approx_kl_official", "clipfrac"
        np.testing.assert_allclose([stats[name] for name in order], data["losses"][k], atol=5e-6, rtol=0)
        assert stats["grad_norm"] == pytest.approx(float(data["gradnorm"][k]), abs=5e-6)
        for name, parameter in parameters.items():
            for kind, x in ("grad", parameter.grad), ("after", parameter.detach()):
                if f"{kind}{k + 1}/{name}" in data:
                    compared[kind] += 1
                    np.testing.assert_allclose(x.numpy().T, data[f"{kind}{k + 1}/{name}"], atol=1e-6, rtol=0)
    assert compared["grad"] >= len(parameters) and compared["after"] >= 2 * len(parameters)
    assert f"after{len(data['mb_idx'])}/pi/w" in data


# The distribution


@pytest.mark.detail(37)
def test_zero_logits():
    dist = make_dist([2, 3], torch.zeros(4, 5))
    actions = torch.tensor([[0, 0], [1, 2], [0, 1], [1, 0]])
    np.testing.assert_allclose(dist.log_prob(actions), np.full(4, -np.log(6)), rtol=1e-6)
    np.testing.assert_allclose(dist.entropy(), np.full(4, np.log(6)), rtol=1e-6)


@pytest.mark.detail(37)
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("nvec", [[3, 2, 4], [1, 5], [11] * 6, MICRORTS], ids=["3", "2", "6", "448"])
def test_equals_torch_component_by_component(nvec, masked):
    generator = torch.Generator().manual_seed(1)
    nvec = np.array(nvec)
    logits = 3 * torch.randn((5, 7, int(nvec.sum())), generator=generator)
    masks = make_masks(nvec, 35, generator).view(5, 7, -1) if masked else None
    dist = make_dist(nvec, logits, masks)
    actions = dist.sample(generator)
    assert actions.shape == (5, 7, len(nvec)) and actions.dtype == torch.int64
    log_prob, entropy = torch.zeros(5, 7, dtype=torch.float64), torch.zeros(5, 7, dtype=torch.float64)
    for i, part in enumerate(logits.double().split(nvec.tolist(), -1)):
        if masks is not None:
            part = part.masked_fill(~masks.split(nvec.tolist(), -1)[i], -1e8)
        expected = torch.distributions.Categorical(logits=part)
        log_prob += expected.log_prob(actions[..., i])
        entropy += expected.entropy()
    np.testing.assert_allclose(dist.log_prob(actions), log_prob, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(dist.entropy(), entropy, rtol=2e-6, atol=2e-6)


@pytest.mark.detail(37)
def test_samples_follow_the_probabilities():
    nvec, count = [3, 2, 4], 40_000
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0))
    actions = make_dist(nvec, logits.expand(count, 9)).sample(torch.Generator().manual_seed(0))
    for i, part in enumerate(logits.split(nvec)):
        frequencies = np.bincount(actions[:, i], minlength=nvec[i]) / count
        np.testing.assert_allclose(frequencies, part.softmax(-1), atol=0.01)  # 4 standard deviations
    joint = np.bincount(actions[:, 0] * 2 + actions[:, 1], minlength=6) / count
    product = torch.outer(logits[:3].softmax(-1), logits[3:5].softmax(-1)).flatten()
    np.testing.assert_allclose(joint, product, atol=0.01)


@pytest.mark.auxiliary(4)
@pytest.mark.parametrize("nvec", [np.array([3, 2, 4]), MICRORTS], ids=["3", "448"])
def test_illegal_choices_are_never_sampled_and_have_no_gradient(nvec):
    generator = torch.Generator().manual_seed(2)
    masks = make_masks(nvec, 200, generator, empty=True)
    logits = (20 * torch.randn(masks.shape, generator=generator)).requires_grad_()
    dist = make_dist(nvec, logits, masks)
    actions = dist.sample(generator).numpy()
    assert (actions >= 0).all() and (actions < nvec).all()
    chosen = masks.numpy()[np.arange(200)[:, None], actions + np.cumsum(nvec) - nvec]
    possible = np.stack([part.any(-1) for part in masks.split(nvec.tolist(), -1)], -1)
    assert 0.5 < possible.mean() < 0.9  # the case has components without any legal choice
    np.testing.assert_array_equal(chosen, possible)
    (dist.log_prob(torch.from_numpy(actions)).sum() + dist.entropy().sum()).backward()
    assert (logits.grad[~masks] == 0).all()
    assert (logits.grad[masks] != 0).float().mean() > 0.1


@pytest.mark.auxiliary(4)
def test_component_without_legal_choice_counts_for_nothing():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    dist = make_dist([2, 3], logits, torch.tensor([[True, True, False, False, False]]))
    first = torch.distributions.Categorical(logits=logits[:, :2])
    for action in range(3):
        expected = first.log_prob(torch.tensor([1]))
        np.testing.assert_allclose(dist.log_prob(torch.tensor([[1, action]])), expected, rtol=1e-6)
    np.testing.assert_allclose(dist.entropy(), first.entropy(), rtol=1e-6)
    nothing = make_dist([2, 3], logits, torch.zeros((1, 5), dtype=torch.bool))
    assert nothing.log_prob(torch.tensor([[0, 2]])).item() == 0 and nothing.entropy().item() == 0


# Action spaces


class Strict(gym.Env):
    """Episodes of 5 steps; refuses actions outside of its space and remembers the others."""

    observation_space = Box(-1, 1, (2,))

    def __init__(self, action_space, render_mode=None):
        self.action_space, self.seen = action_space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert isinstance(action, np.ndarray) and action.dtype == self.action_space.dtype
        assert action.shape == self.action_space.shape and self.action_space.contains(action), action
        self.seen.append(action.copy())
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 5, False, {}


def register(entry_point, **options) -> str:
    env_id = f"Test{len(gym.registry)}-v0"
    gym.register(env_id, entry_point=entry_point, kwargs=options)
    return env_id


def quick_args(env_id: str, folder, **changes):
    settings = {"num_envs": 2, "num_steps": 16, "eval_episodes": 0, "total_timesteps": 64, "device": "cpu"}
    return ppo.Args(env_id=env_id, run_dir=str(folder), **settings | changes)


LOW, HIGH = np.array([-1.7, 0.1, -3.0]), np.array([0.3, 0.7, -1.0])
CASES = {
    "unequal": (MultiDiscrete([3, 2, 4]), [3, 2, 4], [0, 0, 0], [2, 1, 3]),
    "start": (MultiDiscrete([3, 11], start=[-1, 25]), [3, 11], [-1, 25], [1, 35]),
    "n-d": (
        MultiDiscrete([[2, 3], [4, 1]], dtype=np.int32, start=[[5, 0], [-9, 2]]),
        [2, 3, 4, 1],
        [5, 0, -9, 2],
        [6, 2, -6, 2],
    ),
    "binary": (MultiBinary(3), [2, 2, 2], [0, 0, 0], [1, 1, 1]),
    "binary n-d": (MultiBinary((2, 2)), [2] * 4, [0] * 4, [1] * 4),
    "box float64": (Box(LOW, HIGH, dtype=np.float64), [5, 5, 5], LOW, HIGH),
    "box float32": (
        Box(LOW.astype(np.float32), HIGH.astype(np.float32)),
        [5] * 3,
        LOW.astype(np.float32),
        HIGH.astype(np.float32),
    ),
    "box n-d": (Box(-0.3, 0.9, (2, 2)), [5] * 4, [np.float32(-0.3)] * 4, [np.float32(0.9)] * 4),
    "box scalar": (Box(-2.0, 2.0, ()), [5], [-2.0], [2.0]),
    "box integer": (Box(0, 8, (2,), np.int64), [5, 5], [0, 0], [8, 8]),
}


@pytest.mark.parametrize("case", CASES)
def test_action_space(case, tmp_path):
    space, sizes, low, high = CASES[case]
    env_id = register(Strict, action_space=space)
    envs = ppo.make_envs(quick_args(env_id, tmp_path, bins=5), 2)
    np.testing.assert_array_equal(envs.single_action_space.nvec, sizes)
    for choices, expected in ((np.zeros_like(sizes), low), (np.array(sizes) - 1, high)):
        envs.reset(seed=0)
        envs.step(np.stack([choices, choices]))
        for env in envs.unwrapped.envs:
            np.testing.assert_array_equal(
                env.unwrapped.seen[-1].ravel(), expected
            )  # the bounds themselves, to the last bit
    assert ppo.train(quick_args(env_id, tmp_path, bins=5))["global_step"] == 64


def test_bins_are_equally_spaced():
    env = ppo.Components(Strict(Box(LOW, HIGH, dtype=np.float64)), 5)
    env.reset()
    for choice in range(5):
        env.step(np.array([choice, 4 - choice, 2]))
    fractions = (np.array(env.unwrapped.seen) - LOW) / (HIGH - LOW)
    np.testing.assert_allclose(fractions[:, 0], [0, 0.25, 0.5, 0.75, 1], atol=1e-12)
    np.testing.assert_allclose(fractions[:, 1], [1, 0.75, 0.5, 0.25, 0], atol=1e-12)
    np.testing.assert_allclose(fractions[:, 2], 0.5, atol=1e-12)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Discrete(3), "must be MultiDiscrete, not Discrete(3); use ppo_classic.py"),
        (Box(-np.inf, np.inf, (2,)), "--bins needs finite bounds"),
        (Box(np.array([0, 0]), np.array([1, np.inf]), dtype=np.float64), "--bins needs finite bounds"),
        (gym.spaces.Dict(a=Discrete(2)), "use a wrapper"),
    ],
)
def test_other_spaces_are_refused(space, message, tmp_path):
    env_id = register(Strict, action_space=space)
    with pytest.raises(ppo.UsageError, match=re.escape(message)):
        ppo.train(quick_args(env_id, tmp_path))
    assert not list(tmp_path.iterdir())


def test_command_line_refuses(tmp_path):
    for flags, message in ((["--env-id", "CartPole-v1"], "use ppo_classic.py"), (["--bins", "1"], "--bins 1")):
        command = [sys.executable, str(ROOT / "ppo_multidiscrete.py"), "--run-dir", str(tmp_path), *flags]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert process.returncode == 2 and message in process.stderr and "Traceback" not in process.stderr
    assert not list(tmp_path.iterdir())


# Masks


class Doors(gym.Env):
    """Two rows of 16 doors, of which two of each row open; a point for each row whose first open door is chosen.

    A closed door is counted in `illegal` and ends nothing. The observation shows the open doors (32,), the mask too.
    `forget` names the sub-environments' calls (reset or step, counted from 0) whose info has no mask.
    """

    observation_space, action_space = Box(0, 1, (32,)), MultiDiscrete([16, 16])
    illegal = made = 0

    def __init__(self, forget=(), length=8, render_mode=None):
        self.index, self.calls, self.forget, self.length = Doors.made, -1, forget, length
        Doors.made += 1

    def observe(self):
        self.calls += 1
        self.open = np.zeros((2, 16), np.int8)
        for row in self.open:
            row[self.np_random.choice(16, 2, replace=False)] = 1
        forgotten = (self.index, self.calls) in self.forget
        return self.open.ravel().astype(np.float32), {} if forgotten else {"action_mask": self.open.ravel()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        Doors.illegal += int((self.open[[0, 1], action] == 0).sum())
        reward = float((action == self.open.argmax(-1)).sum())
        self.t += 1
        obs, info = self.observe()
        return obs, reward, self.t == self.length, False, info


@pytest.fixture
def doors():
    Doors.illegal = Doors.made = 0
    return lambda **options: register(Doors, **options)


@pytest.mark.auxiliary(4)
def test_masked_agent_learns_and_never_acts_illegally(doors, tmp_path):
    returns, illegal = {}, {}
    for masked in (True, False):
        Doors.illegal = 0
        settings = {"num_envs": 8, "num_steps": 64, "total_timesteps": 20_480, "learning_rate": 1e-3, "clip_coef": 0.2}
        results = ppo.train(quick_args(doors(), tmp_path, mask_actions=masked, eval_episodes=10, **settings))
        returns[masked], illegal[masked] = results["episodic_return"], Doors.illegal
        assert len(results["eval_returns"]) == 10
    print(f"returns {returns}, illegal {illegal}")
    assert illegal[True] == 0 and illegal[False] > 10_000
    assert returns[True] > 12 and returns[False] < returns[True] - 4  # 16 at most; by chance 8 with masks, 1 without


def capture_batches(monkeypatch) -> list:
    batches, update = [], ppo.update

    def record(agent, optimizer, batch, *rest):
        batch = ppo.Batch(*(x.clone() for x in batch))  # the next rollout overwrites it
        with torch.no_grad():
            batches.append((batch, *agent(batch.obs, batch.masks), agent(batch.obs)[0]))
        return update(agent, optimizer, batch, *rest)

    monkeypatch.setattr(ppo, "update", record)
    return batches


@pytest.mark.auxiliary(4)
def test_rollout_keeps_the_masks_that_were_used(doors, tmp_path, monkeypatch):
    batches = capture_batches(monkeypatch)
    args = quick_args(doors(), tmp_path, num_envs=3, num_steps=20, total_timesteps=240, learning_rate=1e-2)
    ppo.train(args)
    assert len(batches) == 4
    for batch, dist, _, free in batches:  # episodes of 8 steps end within each rollout
        np.testing.assert_array_equal(batch.masks, batch.obs == 1)  # after an end, those of the new episode
        assert batch.masks.dtype == torch.bool and (batch.masks.sum(-1) == 4).all()
        assert batch.masks[:, :16].gather(-1, batch.actions[:, :1]).all()
        assert batch.masks[:, 16:].gather(-1, batch.actions[:, 1:]).all()
        ratio = (dist.log_prob(batch.actions) - batch.log_probs).exp()
        np.testing.assert_allclose(ratio, 1, atol=1e-6)
        assert (free.log_prob(batch.actions) < batch.log_probs - 1).float().mean() > 0.5  # the masks were needed


@pytest.mark.auxiliary(4)
def test_masks_are_off_without_mask_at_reset(tmp_path, monkeypatch, doors):
    batches = capture_batches(monkeypatch)
    ppo.train(quick_args(register(Strict, action_space=MultiDiscrete([2, 3])), tmp_path))
    ppo.train(quick_args(doors(), tmp_path, mask_actions=False))
    for batch, dist, *_ in batches:
        assert batch.masks.shape == (32, 1) and batch.masks.all()
        np.testing.assert_allclose((dist.log_prob(batch.actions) - batch.log_probs).exp(), 1, atol=1e-6)


@pytest.mark.auxiliary(4)
@pytest.mark.parametrize(
    ("forget", "message"),
    [
        ([(1, 0)], "sub-environment 1 after step 0"),  # the first reset
        ([(1, 5)], "sub-environment 1 after step 5"),
        ([(0, 5), (1, 5)], "sub-environment 0 after step 5"),  # no sub-environment: then the key is missing as well
        ([(1, 9)], "sub-environment 1 after step 0"),  # the reset of the second episode
    ],
)
def test_missing_mask_stops_the_run(forget, message, doors, tmp_path):
    with pytest.raises(ppo.UsageError, match=message):
        ppo.train(quick_args(doors(forget=forget), tmp_path))
    assert not list(tmp_path.glob("*/checkpoint.pt"))


@pytest.mark.auxiliary(4)
def test_mask_of_another_size_is_refused(doors, tmp_path, monkeypatch):
    env_id = doors()
    monkeypatch.setattr(Doors, "action_space", MultiDiscrete([16, 17]))
    with pytest.raises(ppo.UsageError, match="of 33 values"):
        ppo.train(quick_args(env_id, tmp_path))


@pytest.mark.slow
def test_compiled_update_is_the_same(doors, tmp_path):
    weights = []
    for compiled in (False, True):
        args = quick_args(doors(), tmp_path, compile=compiled, total_timesteps=128)
        folder = ppo.train(args)["run_folder"]
        weights.append(torch.load(folder / "checkpoint.pt", weights_only=True)["agent"])
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], atol=2e-6)
