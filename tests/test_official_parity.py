"""The scripts' own functions against numbers that the official implementation produced (golden/README.md)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import SCRIPTS, golden, load

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


@pytest.mark.parametrize("case", "abc")
@pytest.mark.parametrize("script", SCRIPTS)
def test_gae(script, case):
    module, data = load(script), golden("gae")
    get = lambda name: data[f"{case}/{name}"]
    ended = np.concatenate((get("dones")[1:], get("last_dones")[None]))  # official: whether obs[t] starts an episode
    args = SimpleNamespace(gamma=float(get("gamma")), gae_lambda=float(get("lam")))
    final_values = np.zeros_like(get("rewards"))
    advantages = module.gae(get("rewards"), get("values"), ended, get("last_values"), final_values, args)
    np.testing.assert_array_equal(advantages, get("advantages"))
    np.testing.assert_array_equal(advantages + get("values"), get("returns"))


def replay(script, data, agent, compiled=False):
    """Runs the recorded minibatches; yields index, STATS and the clipped gradients after each."""
    module = load(script)
    args = module.Args(ent_coef=float(data["ent_coef"]), clip_coef=float(data["cliprange"]))
    optimizer = module.Adam(agent.parameters(), lr=1.0, fused=True)
    backward = module.compile_backward(torch.device("cpu")) if compiled else module.backward
    batch = module.Batch(
        *(torch.from_numpy(x) for x in (data["obs"], data["actions"], -data["old_neglogpacs"], data["old_values"], data["returns"]))
    )
    for k, rows in enumerate(data["mb_idx"]):
        optimizer.param_groups[0]["lr"] = float(data["lr"][k])
        minibatch = module.Batch(*(x[torch.from_numpy(rows)] for x in batch))
        stats = module.update_minibatch(agent, optimizer, minibatch, torch.tensor(args.clip_coef), args, backward)
        yield k, dict(zip(module.STATS, stats.tolist(), strict=True))


def check_update(script, data, agent) -> None:
    set_weights(agent, data)
    with torch.no_grad():
        dist, value = agent(torch.from_numpy(data["obs"]))
        np.testing.assert_allclose(-dist.log_prob(torch.from_numpy(data["actions"])), data["fwd0/neglogp"], atol=LOSS, rtol=0)
        np.testing.assert_allclose(value, data["fwd0/value"], atol=LOSS, rtol=0)
        np.testing.assert_allclose(dist.entropy(), data["fwd0/entropy"], atol=LOSS, rtol=0)
    for k, stats in replay(script, data, agent):
        np.testing.assert_allclose([stats[name] for name in ORDER], data["losses"][k], atol=LOSS, rtol=0)
        assert stats["grad_norm"] == pytest.approx(float(data["gradnorm"][k]), abs=LOSS)
        for name, parameter in names(agent).items():
            if f"grad{k + 1}/{name}" in data:
                gradient = to_official(name, parameter.grad)
                np.testing.assert_allclose(gradient, data[f"grad{k + 1}/{name}"], atol=GRADIENT, rtol=0)
            if f"after{k + 1}/{name}" in data:
                weight = to_official(name, parameter)
                np.testing.assert_allclose(weight, data[f"after{k + 1}/{name}"], atol=WEIGHT, rtol=0)
    assert f"after{k + 1}/pi/w" in data  # the weights after the last minibatch were among those compared


@pytest.mark.parametrize("shared", [False, True], ids=["copy", "shared"])
def test_update_discrete(shared):
    data = golden(f"update_discrete_mlp_{'shared' if shared else 'copy'}")
    agent = load("ppo_classic").Agent(Box(-1, 1, (4,)), Discrete(2), shared)
    check_update("ppo_classic", data, agent)
