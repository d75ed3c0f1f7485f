"""The commonest wrong form of each detail: it imports and trains, and the detail's check catches it by a number."""

import pytest
from checks import find_check
from helpers import ROOT, SCRIPTS, load, mutate, quick_args

AVERAGE = "    average([*gradients, stats])\n"
CLIP = """    # Detail 11: global gradient clipping - one norm over all parameters
    grad_norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (args.max_grad_norm / grad_norm).clamp(max=1))
"""
# detail: its wrong forms, as (text in the script, what stands there instead); a script has at least one of each
MUTATIONS = {
    "1": [  # every rollout starts anew
        ("obs[0] = obs[-1]\n", "obs[0] = torch.from_numpy(envs.reset()[0])\n"),
        ("obs[0], masks[0] = obs[-1], masks[-1]", "obs[0] = torch.from_numpy(envs.reset()[0])"),
        ("first_state = obs[-1], starts", "first_state = torch.from_numpy(envs.reset()[0]), starts"),
    ],
    "2": [
        ("int(action_space.n), 0.01)", "int(action_space.n), 1.0)"),  # the policy head like any layer
        ("int(action_space.n)), 0.01)", "int(action_space.n)), 1.0)"),
        ("action_space.shape[0], 0.01)", "action_space.shape[0], 1.0)"),
        ("int(action_space.nvec.sum()), 0.01)", "int(action_space.nvec.sum()), 1.0)"),
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
    "14": [
        ('while info["episode_frame_number"].item() == 0', "while False"),  # the emulator's own 0 to 30
        ("self.random.integers(1, 31)", "self.random.integers(0, 31)"),
    ],
    "15": [
        ('"maxpool": True', '"maxpool": False'),
        ('"frameskip": 4', '"frameskip": 3'),
        ("np.maximum(*self.screens)", "self.screens[1]"),  # the last frame alone
        ("self.emulator.act(action) for _ in range(2)", "self.emulator.act(action) for _ in range(1)"),
    ],
    "16": [
        ("terminated[i] = life_lost or game_over", "terminated[i] = game_over"),
        ("return frame, reward, life_lost or self.game_over", "return frame, reward, self.game_over"),
        (
            "if not (self.game_over or self.time_over):\n            frame, _",
            "if False:\n            frame, _",
        ),  # a new game
    ],
    "17": [
        ("self.start = [1, 2]", "self.start = [1]"),  # FIRE alone
        ("(life_lost and action > 0)", "life_lost"),  # a no-op for a life lost in the no-op
        ("for k in (1, 2)] if", "for k in (1,)] if"),
        ("[actions.index(useful[k]) for k in (1, 2)]", "[1, 2]"),  # the second of all actions, not of the game's own
    ],
    "18": [
        ("return frame[0, 0], reward", "return frame[0, 0].T, reward"),  # width before height
        ('np.einsum("ij,hij->hi", widths', 'np.einsum("ij,hij->ih", widths'),
        (
            "shares[:, used].astype(np.float32)",
            "(shares[:, used] == shares.max(1, keepdims=True)) / 2",
        ),  # unequal areas
    ],
    "19": [("rewards[i] = np.sign(reward)", "rewards[i] = reward")],
    "20": [("self.stack[i] = 0", "self.stack[i] = frame[..., None]")],  # the first frame repeated
    "21": [
        (
            "orthogonal(nn.Linear(3136, 512), math.sqrt(2)), nn.ReLU())",
            "orthogonal(nn.Linear(3136, 512), math.sqrt(2)))",
        )
    ],
    "22": [(".div_(255)", ".div_(1)")],
    "23": [("self.log_std.exp() * noise", "self.log_std.square().exp() * noise")],  # the logarithm of what?
    "24": [
        ("nn.Parameter(torch.zeros(1, action_space.shape[0]))", "nn.Buffer(torch.zeros(1, action_space.shape[0]))"),
        ("torch.zeros(1, action_space.shape[0])", "torch.full((1, action_space.shape[0]), -0.5)"),  # another start
    ],
    "25": [("0.5 * math.log(2 * math.pi)).sum(-1)", "0.5 * math.log(2 * math.pi)).mean(-1)")],
    "26": [("None if shared_network else make_trunk(obs_space.shape[0])", "None if shared_network else self.actor")],
    "27": [
        (
            ".sample(generator)\n                    next_obs",
            ".sample(generator).clamp(-1, 1)\n                    next_obs",
        )
    ],
    "28": [
        ("- stats[0]) / np.sqrt(stats[1] + 1e-8)", "- stats[0]) / (stats[1] + 1e-8)"),  # by the variance
        ("squares = var * count + np.square(x - batch_mean).sum(0) +", "squares = var * count +"),  # means alone
    ],
    "29": [
        ("return normalized.clip(-10, 10)", "return normalized"),
        ("normalized.clip(-10, 10)", "normalized.clip(-5, 5)"),
    ],
    "30": [
        ("scaled = rewards / np.sqrt", 'scaled = (rewards - self.stats["reward"][0]) / np.sqrt'),  # the mean, too
        ("self.discounted[terminated | truncated] = 0", "pass"),  # never cleared
        ("self.discounted * self.gamma + rewards", "self.discounted * 0.99 + rewards"),  # not the agent's gamma
    ],
    "31": [("scaled = scaled.clip(-10, 10)", "pass")],
    "32": [
        ("    lstm.bias_hh_l0.requires_grad_(False)\n", ""),  # torch's two biases
        ("nn.init.orthogonal_(parameter, 1.0)", "nn.init.orthogonal_(parameter, math.sqrt(2))"),  # like any layer
    ],
    "33": [(".new_zeros((num_envs, 2,", ".new_ones((num_envs, 2,")],
    "34": [
        ("(state * (1 - starts[:, begin, None, None].float())).unbind(1)", "state.unbind(1)"),  # never
        (
            "outputs.append(output)",
            "outputs.append(output * (1 - starts[:, begin:end, None].float()))",
        ),  # after the step
        (
            "starts[t + 1] = torch.from_numpy(next_obs), torch.from_numpy(dones[t])",
            "starts[t] = torch.from_numpy(next_obs), torch.from_numpy(dones[t])",
        ),  # off by one
        (
            "agent(obs[-1, :, None], starts[-1, :, None], state)[1]",
            "agent(obs[-1, :, None], starts[-1, :, None] & False, state)[1]",
        ),  # not in the bootstrap
    ],
    "35": [
        ("(x.transpose(0, 1) for x in", "(x.reshape(args.num_envs, -1, *x.shape[2:]) for x in")
    ],  # time is not first
    "36": [
        ("Batch(*steps, first_state)", "Batch(*steps, state)"),  # the states after the rollout
        ("Batch(*steps, first_state)", "Batch(*steps, torch.zeros_like(state))"),
    ],
    "37": [("squeeze(-1) * self.counts).sum(-1)", "squeeze(-1) * self.counts).mean(-1)")],
    "auxiliary 1": [("args.clip_coef * remaining if args.anneal_clip", "args.clip_coef if args.anneal_clip")],
    "auxiliary 2": [
        ("    average([*gradients, stats])\n", "    average([stats])\n"),  # every worker on its own
        (AVERAGE + CLIP, CLIP + AVERAGE),
        (  # normalized over the minibatches of all workers
            "(advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)",
            "(advantages - (x := torch.cat(exchange([advantages]))).mean()) / (x.std(correction=0) + 1e-8)",
        ),
    ],
    "auxiliary 3": [("if args.target_kl is not None and", "if args.target_kl and")],  # 0 taken for off
    "auxiliary 4": [
        ("self.counts = logits.amax(-1) > ILLEGAL", "self.counts = logits.amax(-1) > 2 * ILLEGAL"),  # all count
        ("ILLEGAL, PADDING = -1e8, -1e9", "ILLEGAL, PADDING = -1.0, -1e9"),  # only less likely
    ],
}


def cases():
    for name, script in SCRIPTS.items():
        text = (ROOT / f"{name}.py").read_text()
        for tag, forms in MUTATIONS.items():
            kind, number = ("auxiliary", tag.split()[1]) if " " in tag else ("details", tag)
            if int(number) in getattr(script, kind):
                for k, (old, new) in enumerate(forms):
                    if old in text:
                        yield name, tag, k, old, new


CASES = list(cases())


@pytest.mark.parametrize(("name", "tag", "k", "old", "new"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_mutation_is_caught(name, tag, k, old, new, tmp_path):
    mutant = mutate(name, old, new)
    args = quick_args(mutant, tmp_path)
    assert mutant.train(args)["global_step"] == args.total_timesteps  # a plausible program: it trains, without NaN
    check = find_check(name, tag)
    with pytest.raises(AssertionError):
        check(mutant, tmp_path)
    check(load(name), tmp_path)


def test_every_detail_of_every_script_has_a_mutation():
    for name, script in SCRIPTS.items():
        held = {str(n) for n in script.details} | {f"auxiliary {n}" for n in script.auxiliary}
        assert held - {tag for script_name, tag, *_ in CASES if script_name == name} == set()


def test_every_mutation_is_used():
    used = {(tag, k) for _, tag, k, *_ in CASES}
    assert used == {(tag, k) for tag, forms in MUTATIONS.items() for k in range(len(forms))}
