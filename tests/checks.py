"""One check per detail: passes for the scripts (test_details.py), fails for their mutants (test_mutations.py).

Each takes a script as a module and an empty folder, and asserts on numbers. Details of one script alone have their
tests in that script's file; they are borrowed here for the mutations.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Threads, Toy, forward, golden, make_agent, make_batch, quick_args, toy_envs

CHECKS: dict[str, Callable[[ModuleType, Path], None]] = {}


def check(tag: str):
    def register(function):
        CHECKS[tag] = function
        return function

    return register


def record(module: ModuleType, name: str, calls: list) -> Callable:
    """Wraps a function of the module so that its arguments are recorded, batches copied; returns what undoes it."""
    function = getattr(module, name)

    def recorder(*args, **options):
        calls.append([module.Batch(*(x.clone() for x in a)) if isinstance(a, module.Batch) else a for a in args])
        return function(*args, **options)

    setattr(module, name, recorder)
    return lambda: setattr(module, name, function)


def expected_loss(dist, value, batch, clip: float, args) -> tuple[float, list[float]]:
    """The loss and statistics of a minibatch by the papers' formulas, in float64 numpy."""
    to64 = lambda x: x.detach().numpy().astype(np.float64)
    new, old = to64(dist.log_prob(batch.actions)), to64(batch.log_probs)
    value, values, returns = to64(value), to64(batch.values), to64(batch.returns)
    advantages = returns - values
    if args.norm_adv:
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages) + 1e-8)
    ratio = np.exp(new - old)
    policy_loss = -np.mean(np.minimum(ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages))
    errors = (value - returns) ** 2
    if args.clip_vloss:
        errors = np.maximum(errors, (values + np.clip(value - values, -clip, clip) - returns) ** 2)
    value_loss, entropy = np.mean(errors) / 2, np.mean(to64(dist.entropy()))
    kls = [np.mean(old - new), np.mean(ratio - 1 - (new - old)), np.mean((new - old) ** 2) / 2]
    stats = [value_loss, policy_loss, entropy, *kls, np.mean(np.abs(ratio - 1) > clip)]
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, stats


def loss_case(module: ModuleType, **changes):
    """Returns the script's loss and statistics of a minibatch, and the expected ones."""
    agent = make_agent(module)
    batch = make_batch(module, agent)
    args = SimpleNamespace(**{"norm_adv": True, "clip_vloss": True, "ent_coef": 0.1, "vf_coef": 0.5, **changes})
    dist, value = forward(agent, batch)
    loss, stats = module.ppo_loss(dist, value, batch, torch.tensor(0.2), args)
    expected, expected_stats = expected_loss(dist, value, batch, 0.2, args)
    return loss.item(), dict(zip(module.STATS, stats.tolist())), expected, dict(zip(module.STATS, expected_stats))


@check("1")
def vectorized(module, folder):
    Toy.resets = 0
    args = quick_args(module, folder, iterations=3, num_steps=16)
    with toy_envs(module):
        module.train(args)
    # N sub-environments for 48 steps in episodes of 3: one reset at the start and one after each episode
    assert Toy.resets == args.num_envs * (1 + 48 // 3)


@check("2")
def initialization(module, folder):
    agent = make_agent(module)
    gains = {"policy_head": 0.01, "value_head": 1.0}
    for name, parameter in agent.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif name.endswith("weight"):
            singular = torch.linalg.svdvals(parameter.detach().flatten(1))
            gain = gains.get(name.split(".")[0], np.sqrt(2))
            np.testing.assert_allclose(singular, np.full(len(singular), gain), rtol=1e-4, err_msg=name)


@check("3")
def adam_epsilon(module, folder):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = module.Adam([parameter], lr=0.1, fused=True)
    m, v, expected = np.zeros(3), np.zeros(3), np.zeros(3)
    for step in range(1, 6):
        gradient = np.array([1e-6, -1e-4, 1.0]) * step
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected -= 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 1e-5)
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        np.testing.assert_allclose(parameter.detach(), expected, rtol=1e-4)


@check("4")
def learning_rate(module, folder):
    rates, update = [], module.update

    def spy(agent, optimizer, *rest):
        rates.append(optimizer.param_groups[0]["lr"])
        return update(agent, optimizer, *rest)

    module.update = spy
    module.train(quick_args(module, folder, iterations=4, learning_rate=1e-3))
    module.update = update
    np.testing.assert_allclose(rates, [1e-3, 0.75e-3, 0.5e-3, 0.25e-3], rtol=1e-12)


@check("5")
def advantages(module, folder):
    for case in "abc":
        data = {name[2:]: x for name, x in golden("gae").items() if name[0] == case}
        ended = np.concatenate((data["dones"][1:], data["last_dones"][None]))  # official: whether obs[t] starts one
        args = SimpleNamespace(gamma=float(data["gamma"]), gae_lambda=float(data["lam"]))
        final_values = np.zeros_like(data["rewards"])
        result = module.gae(data["rewards"], data["values"], ended, data["last_values"], final_values, args)
        np.testing.assert_array_equal(result, data["advantages"])
        np.testing.assert_array_equal(result + data["values"], data["returns"])


@check("6")
def minibatches(module, folder):
    agent = make_agent(module)
    batch = make_batch(module, agent, size=64)
    batch = batch._replace(returns=torch.arange(64.0).view_as(batch.returns))
    args, calls = quick_args(module, folder, update_epochs=3, num_envs=4, num_minibatches=4), []
    undo = record(module, "update_minibatch", calls)
    optimizer, generator = module.Adam(agent.parameters(), lr=0.0, fused=True), torch.Generator().manual_seed(0)
    module.update(agent, optimizer, batch, torch.tensor(0.2), args, module.backward, generator)
    undo()
    rows = np.array([call[2].returns.int().flatten().tolist() for call in calls])
    assert rows.shape == (12, 16)
    epochs = rows.reshape(3, 64)
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs.tolist())  # each sample once an epoch
    assert len({tuple(epoch) for epoch in epochs.tolist()} | {tuple(range(64))}) == 4  # in another order each time


@check("7")
def advantage_normalization(module, folder):
    _, stats, _, expected = loss_case(module)
    assert stats["policy_loss"] == pytest.approx(expected["policy_loss"], abs=2e-6)
    _, stats, _, expected = loss_case(module, norm_adv=False)
    assert stats["policy_loss"] == pytest.approx(expected["policy_loss"], abs=2e-6)


@check("8")
def clipped_objective(module, folder):
    _, stats, _, expected = loss_case(module)
    assert expected["clipfrac"] > 0.3  # the clip acts
    assert stats["policy_loss"] == pytest.approx(expected["policy_loss"], abs=2e-6)


@check("9")
def value_clipping(module, folder):
    for clip_vloss in (True, False):
        _, stats, _, expected = loss_case(module, clip_vloss=clip_vloss)
        assert stats["value_loss"] == pytest.approx(expected["value_loss"], abs=2e-6)


@check("10")
def overall_loss(module, folder):
    loss, stats, expected, expected_stats = loss_case(module)
    assert loss == pytest.approx(expected, abs=2e-6)
    assert stats["entropy"] == pytest.approx(expected_stats["entropy"], abs=2e-6)


@check("11")
def gradient_clipping(module, folder):
    for limit in (1e-3, 1e3):
        agent = make_agent(module)
        batch = make_batch(module, agent)
        args = quick_args(module, folder, max_grad_norm=limit)
        module.backward(agent, batch, torch.tensor(0.2), args)
        parameters = [p for p in agent.parameters() if p.requires_grad]
        raw = [p.grad.clone() for p in parameters]
        norm = torch.stack([g.norm() for g in raw]).norm().item()
        optimizer = module.Adam(agent.parameters(), lr=0.0, fused=True)
        stats = module.update_minibatch(agent, optimizer, batch, torch.tensor(0.2), args, module.backward)
        assert stats[-1].item() == pytest.approx(norm, rel=1e-5)  # logged: before the clip
        for gradient, p in zip(raw, parameters):
            torch.testing.assert_close(p.grad, gradient * min(1.0, limit / norm), rtol=1e-5, atol=1e-9)


@check("12")
def debug_variables(module, folder):
    _, stats, _, expected = loss_case(module)
    for name in expected:
        assert stats[name] == pytest.approx(expected[name], abs=5e-6), name
    agent = make_agent(module)
    batch = make_batch(module, agent)
    args, calls = quick_args(module, folder, num_minibatches=2, update_epochs=2), []
    minibatch = module.update_minibatch
    module.update_minibatch = lambda *a: calls.append(minibatch(*a)) or calls[-1]
    optimizer = module.Adam(agent.parameters(), lr=1e-3, fused=True)
    mean = module.update(agent, optimizer, batch, torch.tensor(0.2), args, module.backward, torch.Generator())
    module.update_minibatch = minibatch
    assert len(calls) == 4
    torch.testing.assert_close(mean, torch.stack(calls).mean(0))  # over all minibatches


@check("13")
def separate_networks(module, folder):
    agent = make_agent(module)
    agent(torch.randn(8, 2))[1].sum().backward()
    reached = {name.split(".")[0] for name, p in agent.named_parameters() if p.grad is not None}
    assert reached == {"critic", "value_head"}  # the value's gradient leaves the policy alone
    shared = make_agent(module, shared_network=True)
    shared(torch.randn(8, 2))[1].sum().backward()
    assert {name.split(".")[0] for name, p in shared.named_parameters() if p.grad is not None} == {
        "actor",
        "value_head",
    }


@check("auxiliary 1")
def clip_annealing(module, folder):
    for anneal, expected in ((True, [0.2, 0.15, 0.1, 0.05]), (False, [0.2] * 4)):
        calls: list = []
        undo = record(module, "update", calls)
        module.train(quick_args(module, folder, iterations=4, clip_coef=0.2, anneal_clip=anneal))
        undo()
        np.testing.assert_allclose([float(call[3]) for call in calls], expected, rtol=1e-6)


@check("auxiliary 2")
def parallel_update(module, folder):
    """Five minibatches of two official workers: the mean of their losses, the averaged gradients, the weights."""
    workers = importlib.import_module("test_distributed")
    workers.check_official_workers(Threads(2).run(module, lambda rank: workers.replay_official(module, rank)))


@check("auxiliary 3")
def early_stopping(module, folder):
    for target, epochs in ((0.0, 1), (1e9, 4), (None, 4)):
        agent, calls = make_agent(module), []
        batch = make_batch(module, agent)
        args = quick_args(module, folder, target_kl=target, num_minibatches=2, update_epochs=4)
        undo = record(module, "update_minibatch", calls)
        optimizer = module.Adam(agent.parameters(), lr=1e-3, fused=True)
        module.update(agent, optimizer, batch, torch.tensor(0.2), args, module.backward, torch.Generator())
        undo()
        assert len(calls) == 2 * epochs, target


FOLDER = object()  # stands for the empty folder that a check gets


def borrow(file: str, *tests: tuple) -> Callable[[ModuleType, Path], None]:
    """Makes a check of tests in a script's own file: (name, arguments...)."""

    def run(module, folder):
        tests_module = importlib.import_module(file)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tests_module, "ppo", module)
            for name, *arguments in tests:
                getattr(tests_module, name)(*(folder if x is FOLDER else x for x in arguments))

    return run


def stored_actions(module, folder):
    """The rollout keeps the sampled actions, some of them out of bounds; the environment gets them clipped."""
    batches: list = []
    undo = record(module, "update", batches)
    module.train(
        quick_args(module, folder, 1, num_steps=64, learning_rate=0.0)
    )  # the toy refuses what is out of bounds
    undo()
    actions = batches[0][2].actions
    assert 0.8 < actions.std() < 1.2 and (actions.abs() > 1).float().mean() > 0.2


def find_check(name: str, tag: str) -> Callable[[ModuleType, Path], None]:
    """Returns the check of a detail for a script: its own, where it has one."""
    return (CHECKS | BORROWED | OWN.get(name, {}))[tag]


BORROWED = {
    "23": borrow("test_continuous", ("test_samples",)),
    "24": borrow("test_continuous", ("test_log_std",)),
    "25": borrow("test_continuous", ("test_distribution_equals_torch", (4, 3))),
    "26": borrow("test_continuous", ("test_separate_networks",)),
    "27": stored_actions,
    "28": borrow("test_continuous", ("test_normalizer",)),
    "29": borrow("test_continuous", ("test_normalizer",)),
    "30": borrow("test_continuous", ("test_normalizer",), ("test_scaled_and_clipped_rewards", 0.5)),
    "31": borrow("test_continuous", ("test_normalizer",)),
    "14": borrow("test_atari", ("test_noops",)),
    "15": borrow("test_atari", ("test_frame_skip",), ("test_same_as_official_wrappers", "pong", 300)),
    "16": borrow("test_atari", ("test_a_lost_life_is_terminal_but_the_game_goes_on",)),
    "17": borrow("test_atari", ("test_hidden_steps", "breakout", [1, 2]), ("test_a_life_lost_in_the_no_op",)),
    "18": borrow("test_atari", ("test_image",), ("test_same_as_official_wrappers", "pong", 300)),
    "19": borrow("test_atari", ("test_rewards_are_signs_and_scores_are_raw",)),
    "20": borrow("test_atari", ("test_frame_stack", 4)),
    "21": borrow("test_atari", ("test_network",)),
    "22": borrow("test_atari", ("test_images_are_scaled_inside_the_network",)),
    "37": borrow("test_multidiscrete", ("test_zero_logits",)),
    "auxiliary 4": borrow(
        "test_multidiscrete",
        ("test_component_without_legal_choice_counts_for_nothing",),
        ("test_illegal_choices_are_never_sampled_and_have_no_gradient", np.array([3, 2, 4])),
    ),
}

OWN = {
    "ppo_atari_lstm": {
        "21": borrow("test_atari_lstm", ("test_network",)),
        "22": borrow("test_atari_lstm", ("test_images_are_scaled_inside_the_network",)),
        "32": borrow("test_atari_lstm", ("test_lstm_initialization",)),
        "33": borrow("test_atari_lstm", ("test_states_are_zero_at_the_start_alone", FOLDER)),
        "34": borrow(
            "test_atari_lstm",
            ("test_memory_equals_a_loop_of_single_steps",),
            ("test_starts_are_those_of_the_current_observation", FOLDER),
            ("test_value_after_the_rollout_is_that_of_the_next_one", FOLDER),
        ),
        "35": borrow("test_atari_lstm", ("test_minibatches_are_whole_sub_environments", FOLDER)),
        "36": borrow("test_atari_lstm", ("test_replay_equals_rollout", FOLDER)),
    },
    "ppo_joint": {
        "14": borrow("test_joint", ("test_noops",)),
        "15": borrow(
            "test_joint", ("test_frame_skip",), ("test_same_as_official_wrappers", "pong?mode=1&difficulty=3")
        ),
        "16": borrow("test_joint", ("test_a_lost_life_is_terminal_but_the_game_goes_on",)),
        "17": borrow("test_joint", ("test_hidden_steps", "breakout", ["FIRE", "RIGHT"], True)),
        "18": borrow("test_joint", ("test_image", "freeway?mode=1"), ("test_frames_of_any_size", 210, 160)),
        "19": borrow("test_joint", ("test_rewards_are_signs_and_scores_are_raw",)),
        "20": borrow("test_joint", ("test_frame_stack", 4)),
    },
}
