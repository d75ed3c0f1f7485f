"""The scripts' own functions against numbers that the official implementation produced (golden/README.md)."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import golden, load, quick_args

LOSS, GRADIENT, WEIGHT = 5e-6, 1e-6, 1e-6  # largest absolute differences
ORDER = ["policy_loss", "value_loss", "entropy", "approx_kl_official", "clipfrac"]  # of the official losses


def names(agent) -> dict[str, torch.nn.Parameter]:
    """Maps the official names of the variables to the agent's parameters."""
    layers = {"pi/mlp_fc0": "actor.0", "pi/mlp_fc1": "actor.2", "vf/mlp_fc0": "critic.0", "vf/mlp_fc1": "critic.2"}
    layers |= {"pi": "policy_head", "vf": "value_head"}
    parameters = dict(agent.named_parameters())
    return {
        f"{official}/{kind}": parameters[f"{ours}.{suffix}"]
        for official, ours in layers.items()
        for kind, suffix in (("w", "weight"), ("b", "bias"))
        if f"{ours}.{suffix}" in parameters
    }


def to_official(name: str, x: torch.Tensor) -> np.ndarray:
    return (x.T if name.endswith("/w") else x).detach().numpy()


def set_weights(agent, data, prefix: str = "init") -> None:
    with torch.no_grad():
        for name, parameter in names(agent).items():
            parameter.copy_(torch.from_numpy(data[f"{prefix}/{name}"].T))


def official_columns(data) -> tuple[np.ndarray, ...]:
    return data["obs"], data["actions"], -data["old_neglogpacs"], data["old_values"], data["returns"]


def replay(script, data, agent, backward=None):
    """Takes the recorded gradient steps; yields the number of the minibatch and STATS after each."""
    module = load(script)
    args = module.Args(ent_coef=float(data["ent_coef"]), clip_coef=float(data["cliprange"]))
    optimizer = module.Adam(agent.parameters(), lr=1.0, fused=True)
    batch = module.Batch(*map(torch.from_numpy, official_columns(data)))
    for k, rows in enumerate(data["mb_idx"]):
        optimizer.param_groups[0]["lr"] = float(data["lr"][k])
        minibatch = module.Batch(*(x[torch.from_numpy(rows)] for x in batch))
        clip_coef = torch.tensor(args.clip_coef)
        stats = module.update_minibatch(agent, optimizer, minibatch, clip_coef, args, backward or module.backward)
        yield k, dict(zip(module.STATS, stats.tolist()))


def close(actual, expected, limit: float) -> None:
    np.testing.assert_allclose(actual, expected, atol=limit, rtol=0)


def check_update(script, data, agent) -> None:
    """Compares the forward pass, then losses, clipped gradients and weights of every minibatch."""
    set_weights(agent, data)
    with torch.no_grad():
        dist, value = agent(torch.from_numpy(data["obs"]))
        close(-dist.log_prob(torch.from_numpy(data["actions"])), data["fwd0/neglogp"], LOSS)
        close(value, data["fwd0/value"], LOSS)
        close(dist.entropy(), data["fwd0/entropy"], LOSS)
    compared = set()
    for k, stats in replay(script, data, agent):
        close([stats[name] for name in ORDER], data["losses"][k], LOSS)
        close(stats["grad_norm"], data["gradnorm"][k], LOSS)
        for name, parameter in names(agent).items():
            for kind, x, limit in (("grad", parameter.grad, GRADIENT), ("after", parameter, WEIGHT)):
                if (key := f"{kind}{k + 1}/{name}") in data:
                    close(to_official(name, x), data[key], limit)
                    compared.add(key)
    assert compared == {key for key in data if key.startswith(("grad", "after")) and "/" in key}


@pytest.mark.parametrize("shared", [False, True], ids=["copy", "shared"])
def test_update_discrete(shared):
    data = golden(f"update_discrete_mlp_{'shared' if shared else 'copy'}")
    check_update("ppo_classic", data, load("ppo_classic").Agent(Box(-1, 1, (4,)), Discrete(2), shared))


def test_compiled_update_equals_eager():
    module, data = load("ppo_classic"), golden("update_discrete_mlp_copy")
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    results = []
    for backward in (module.backward, module.compile_backward(torch.device("cpu"))):
        agent = module.Agent(Box(-1, 1, (4,)), Discrete(2))
        set_weights(agent, data)
        stats = [list(stats.values()) for _, stats in replay("ppo_classic", data, agent, backward)]
        results.append((np.array(stats), torch.nn.utils.parameters_to_vector(agent.parameters()).detach()))
    close(results[1][0], results[0][0], 1e-5)
    close(results[1][1], results[0][1], 1e-5)
    assert counters["stats"]["unique_graphs"] == 2  # torch.sin of the trial, and one graph for all minibatches
    assert not counters["graph_break"]


def test_schedule(monkeypatch, tmp_path):
    """Learning rate and clip range of every update, annealed over 100 000 steps of 8 x 128."""
    module, data, seen = load("ppo_classic"), golden("schedule"), []

    def spy(agent, optimizer, batch, clip_coef, *_):
        seen.append((optimizer.param_groups[0]["lr"], float(clip_coef)))
        return torch.zeros(len(module.STATS))

    monkeypatch.setattr(module, "update", spy)
    rate, clip = float(data["sched/lr"][0]), float(data["sched/cliprange"][0])
    settings = {"total_timesteps": 100_000, "num_envs": 8, "num_steps": 128, "learning_rate": rate, "clip_coef": clip}
    module.train(quick_args(module, tmp_path, **settings, anneal_clip=True))
    assert len(seen) == data["sched/nupdates"]
    close([x for x, _ in seen], data["sched/lr"], 1e-12)
    close([x for _, x in seen], data["sched/cliprange"], 1e-8)


@pytest.mark.parametrize("case", range(8))
def test_orthogonal_initialization(case):
    """Singular values only: the official code orthogonalizes by SVD, torch by QR."""
    data = golden("ortho_init")
    *rest, outputs = data[f"c{case}/shape"]
    layer = load("ppo_classic").linear(int(np.prod(rest)), int(outputs), float(data[f"c{case}/scale"]))
    close(torch.linalg.svdvals(layer.weight.detach()), data[f"c{case}/sv"], 1e-5)
    assert layer.bias.abs().max() == 0


class Replay(gym.vector.VectorEnv):
    """Plays the recorded observations, rewards and episode ends of the official run."""

    num_envs, single_observation_space, single_action_space = 4, Box(-np.inf, np.inf, (3,)), Discrete(3)

    def __init__(self, data) -> None:
        self.obs = np.concatenate((data["obs"].reshape(96, 4, 3), data["last_obs"][-1:]))
        self.rewards = data["rewards"].reshape(96, 4)
        self.dones = np.concatenate((data["dones"].reshape(96, 4)[1:], data["last_dones"][-1:]))
        self.actions, self.steps = data["actions"].reshape(96, 4), 0

    def reset(self, *, seed=None, options=None):
        return self.obs[0], {}

    def step(self, actions):
        np.testing.assert_array_equal(actions, self.actions[self.steps])
        self.steps += 1
        reward, done = self.rewards[self.steps - 1], self.dones[self.steps - 1]
        return self.obs[self.steps], reward, done, np.zeros(4, bool), {}


def test_whole_training(monkeypatch, tmp_path):
    """Three iterations of train(): only environment, sampled actions, permutations and initial weights are replaced."""
    module, data, agents, updates = load("ppo_classic"), golden("learn_e2e"), [], []
    build, update, update_minibatch, losses = module.Agent, module.update, module.update_minibatch, []

    def make_agent(*spaces):
        agents.append(build(*spaces))
        set_weights(agents[0], data)
        return agents[0]

    def spy_update(agent, optimizer, batch, *rest):
        u = len(updates)
        close(batch.values.view(32, 4), data["values"][u], LOSS)
        close(-batch.log_probs.view(32, 4), data["neglogpacs"][u], LOSS)
        close(optimizer.param_groups[0]["lr"], data["lr"][u], 1e-9)
        updates.append(update(agent, optimizer, batch, *rest))
        for name, parameter in names(agent).items():
            close(to_official(name, parameter), data[f"after_update{u + 1}/{name}"], WEIGHT)
        return updates[-1]

    def spy_minibatch(agent, optimizer, batch, *rest):
        k = len(losses)
        close(batch.returns, data["mb_returns"].reshape(48, 32)[k], LOSS)
        losses.append(update_minibatch(agent, optimizer, batch, *rest))
        close(losses[-1][[module.STATS.index(name) for name in ORDER]], data["losses"].reshape(48, 5)[k], LOSS)
        return losses[-1]

    rows = data["mb_idx"].reshape(12, 128)  # official rows are env * 32 + step, ours step * 4 + env
    permutations = iter(torch.from_numpy(rows % 32 * 4 + rows // 32))
    actions = iter(torch.from_numpy(data["actions"].reshape(96, 4)))
    monkeypatch.setattr(module, "make_envs", lambda *_: Replay(data))
    monkeypatch.setattr(module, "Agent", make_agent)
    monkeypatch.setattr(module, "update", spy_update)
    monkeypatch.setattr(module, "update_minibatch", spy_minibatch)
    monkeypatch.setattr(module.Categorical, "sample", lambda *_: next(actions))
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: next(permutations))
    settings = {"num_envs": 4, "num_steps": 32, "num_minibatches": 4, "learning_rate": 4e-3, "shared_network": True}
    module.train(quick_args(module, tmp_path, iterations=3, **settings, anneal_clip=True))
    assert len(updates) == 3 and len(losses) == 48
