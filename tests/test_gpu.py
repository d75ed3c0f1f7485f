"""What only a GPU can show."""

import dataclasses

import pytest
import torch
from helpers import SCRIPTS, forward, load, make_agent, make_batch, quick_args

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_agree_with_the_cpu(name, tmp_path):
    module = load(name)
    agent, args = make_agent(module), quick_args(module, tmp_path)
    batch = make_batch(module, agent)
    results = []
    for device in ("cpu", "cuda"):
        there = module.Batch(*(x.to(device) for x in batch))
        results.append(module.backward(agent.to(device), there, torch.tensor(0.2, device=device), args).cpu())
        agent.zero_grad()
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_training_and_checkpoints_move_between_devices(name, compiled, tmp_path):
    module = load(name)
    result = module.train(quick_args(module, tmp_path, device="cuda", compile=compiled))
    args = quick_args(module, tmp_path, 4, device="cpu", resume=str(result["run_folder"]))
    assert module.train(args)["global_step"] == args.total_timesteps
    back = dataclasses.replace(args, device="cuda", total_timesteps=2 * args.total_timesteps)
    assert module.train(back)["global_step"] == back.total_timesteps


@pytest.mark.parametrize("name", SCRIPTS)
def test_samples_differ_from_call_to_call(name):
    module = load(name)
    agent = make_agent(module).to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    batch = module.Batch(*(x.to("cuda") for x in make_batch(module, make_agent(module))))
    samples = {tuple(forward(agent, batch)[0].sample(generator).flatten().tolist()) for _ in range(100)}
    assert len(samples) == 100
