"""The commonest wrong form of each detail: it imports and trains, and the detail's check catches it by a number."""

import math

import pytest
from checks import CHECKS
from helpers import SCRIPTS, load, mutate, quick_args

# detail: its wrong forms, as (text in the script, what stands there instead)
MUTATIONS = {
    "1": [("obs[0] = obs[-1]\n", "obs[0] = torch.from_numpy(envs.reset()[0])\n")],  # every rollout starts anew
    "2": [
        ("int(action_space.n), 0.01)", "int(action_space.n), 1.0)"),  # the policy head like any layer
        ("nn.init.orthogonal_(layer.weight, gain)", "nn.init.xavier_uniform_(layer.weight, gain)"),
        ("    nn.init.zeros_(layer.bias)\n", ""),  # torch's default biases
    ],
    "3": [
        ('1e-5 / math.sqrt(1 - group["betas"][1] ** group["steps"])', "1e-5"),  # torch's meaning of epsilon
        ('1e-5 / math.sqrt(1 - group["betas"][1] ** group["steps"])', "1e-8"),  # torch's default
    ],
    "4": [("remaining = 1 - iteration /", "remaining = 1 - (iteration + 1) /")],  # the last iteration learns nothing
    "5": [
        ("np.where(dones, final_values,", "np.where(np.roll(dones, 1, 0), final_values,"),  # the flags of step t - 1
        ("* (1.0 - dones)", "* np.ones_like(rewards)"),  # the sum runs on into the next episode
    ],
    "6": [
        ("torch.randperm(len(batch.obs),", "torch.randint(len(batch.obs), (len(batch.obs),),"),  # with replacement
        (
            "torch.randperm(len(batch.obs), generator=generator, device=generator.device)",
            "torch.arange(len(batch.obs))",
        ),
    ],
    "7": [("advantages.std(correction=0)", "advantages.std()")],  # torch's default is the sample's
    "8": [("policy_loss = torch.max(", "policy_loss = torch.min(")],  # the optimistic of the two
    "9": [("value_loss = torch.max(value_loss, ", "value_loss = torch.min(value_loss, ")],
    "10": [("value_loss = 0.5 * value_loss.mean()", "value_loss = value_loss.mean()")],  # half is missing
    "11": [  # each parameter on its own
        (
            "(args.max_grad_norm / grad_norm).clamp(max=1))",
            "[(args.max_grad_norm / g.norm()).clamp(max=1) for g in gradients])",
        )
    ],
    "12": [
        ("0.5 * log_ratio.square().mean()", "-log_ratio.mean()"),  # the blog's reading of the official KL
        ("return torch.stack(stats).mean(0)", "return stats[-1]"),  # only the last minibatch
    ],
    "13": [("None if shared_network else make_trunk(obs_space.shape[0])", "None")],  # always shared
    "auxiliary 1": [("args.clip_coef * remaining if args.anneal_clip", "args.clip_coef if args.anneal_clip")],
    "auxiliary 3": [("if args.target_kl is not None and", "if args.target_kl and")],  # 0 taken for off
}


def cases():
    for name, script in SCRIPTS.items():
        for tag, forms in MUTATIONS.items():
            kind, number = ("auxiliary", tag.split()[1]) if " " in tag else ("details", tag)
            if int(number) in getattr(script, kind):
                for k, (old, new) in enumerate(forms):
                    yield pytest.param(name, tag, old, new, id=f"{name}-{tag.replace(' ', '-')}-{k}")


@pytest.mark.parametrize(("name", "tag", "old", "new"), list(cases()))
def test_mutation_is_caught(name, tag, old, new, tmp_path):
    mutant = mutate(name, old, new)
    results = mutant.train(quick_args(mutant, tmp_path))  # it is a plausible program: it trains
    assert results["global_step"] > 0 and math.isfinite(results["episodic_return"])
    with pytest.raises(AssertionError):
        CHECKS[tag](mutant, tmp_path)
    CHECKS[tag](load(name), tmp_path)


def test_every_detail_of_every_script_has_a_mutation():
    for script in SCRIPTS.values():
        assert {str(n) for n in script.details} | {f"auxiliary {n}" for n in script.auxiliary} <= MUTATIONS.keys()
