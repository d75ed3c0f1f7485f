"""What ppo_atari_lstm.py has of its own: the memory, its replay in training, its minibatches."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import test_atari
import torch
from checks import record
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import forward, golden, load, make_batch, quick_args, toy_envs
from test_atari import GAMES, GRADIENT, LAYERS, LOSS, NORM, ORDER, WEIGHT, close

ppo = load("ppo_atari_lstm")
LAYERS = LAYERS | {"pi/lstm": "lstm"}
GATES = [0, 1, 3, 2]  # input, forget, output, candidate in the official order; torch has the candidate third


def make_agent(actions=4):
    torch.manual_seed(0)
    return ppo.Agent(Box(0, 255, (84, 84, 1), np.uint8), Discrete(actions))


@pytest.mark.parametrize("game", GAMES)
def test_same_as_official_wrappers(game, monkeypatch):
    """Rewards, ends, lives and scores are those of the official wrappers, and so is the newest frame of their stack."""
    monkeypatch.setattr(test_atari, "ppo", ppo)
    test_atari.test_same_as_official_wrappers(game, 450)


@pytest.mark.detail(21)
def test_network():
    agent = make_agent(6)
    shapes = {name: tuple(parameter.shape) for name, parameter in agent.named_parameters() if "weight" in name}
    assert shapes == {
        "trunk.0.weight": (32, 1, 8, 8),
        "trunk.2.weight": (64, 32, 4, 4),
        "trunk.4.weight": (64, 64, 3, 3),
        "trunk.7.weight": (512, 3136),
        "lstm.weight_ih_l0": (512, 512),
        "lstm.weight_hh_l0": (512, 128),
        "policy_head.weight": (6, 128),
        "value_head.weight": (1, 128),
    }
    assert sum(isinstance(layer, torch.nn.ReLU) for layer in agent.trunk) == 4


@pytest.mark.detail(22)
def test_images_are_scaled_inside_the_network():
    agent, inputs = make_agent(), []
    obs = torch.randint(0, 256, (5, 84, 84, 1), dtype=torch.uint8)
    agent.trunk.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    agent.encoder(obs)
    assert torch.equal(inputs[0], (obs.double() / 255).float().permute(0, 3, 1, 2))


@pytest.mark.detail(32)
def test_lstm_initialization():
    """Orthogonal with gain 1; one bias of each gate is trained, the other one stays zero."""
    agent = make_agent()
    for weight in (agent.lstm.weight_ih_l0, agent.lstm.weight_hh_l0):
        values = torch.linalg.svdvals(weight.detach())
        close(values, np.ones(len(values)), 1e-5)
    assert not agent.lstm.bias_ih_l0.any() and not agent.lstm.bias_hh_l0.any()
    batch, optimizer = make_batch(ppo, agent), ppo.Adam(agent.parameters(), lr=1e-3, fused=True)
    ppo.update_minibatch(agent, optimizer, batch, torch.tensor(0.2), ppo.Args(), ppo.backward)
    assert agent.lstm.bias_ih_l0.all() and not agent.lstm.bias_hh_l0.any()


def rollouts(folder, iterations=3, **settings) -> list[tuple]:
    """Returns what update() got in a training on episodes of three steps, which span the rollouts of 16 steps."""
    batches: list = []
    undo = record(ppo, "update", batches)
    with toy_envs(ppo):
        ppo.train(quick_args(ppo, folder, iterations, learning_rate=0.0, **settings))
    undo()
    return batches


@pytest.mark.detail(33)
def test_states_are_zero_at_the_start_alone(tmp_path):
    states = [batch.states for _, _, batch, *_ in rollouts(tmp_path)]
    assert states[0].shape == (2, 2, 128)
    assert [bool(state.any()) for state in states] == [False, False, True]  # a black frame, seen first, leaves it zero


@pytest.mark.detail(34)
def test_memory_equals_a_loop_of_single_steps():
    """The state is cleared by the flag of the current observation, before the LSTM sees that observation."""
    generator = torch.Generator().manual_seed(1)
    agent, features = make_agent(), torch.randn(3, 40, 512, generator=generator)
    for share in (0.0, 0.1, 1.0):
        starts = torch.rand(3, 40, generator=generator) < share
        state = torch.randn(3, 2, 128, generator=generator)
        with torch.no_grad():
            outputs, last = agent.memory(features, starts, state)
            hidden, cell = state.unbind(1)
            for t in range(40):
                hidden, cell = (x * (1 - starts[:, t, None].float()) for x in (hidden, cell))
                gates = features[:, t] @ agent.lstm.weight_ih_l0.T + hidden @ agent.lstm.weight_hh_l0.T
                i, f, g, o = gates.chunk(4, -1)
                cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                hidden = o.sigmoid() * cell.tanh()
                close(outputs[:, t], hidden, LOSS)
            close(last, torch.stack((hidden, cell), 1), LOSS)


def test_pieces_equal_single_calls_of_the_lstm():
    """As few calls as the starts allow, and the same numbers as one call a step."""
    agent, calls = make_agent(), []
    features, state = torch.randn(2, 30, 512), torch.randn(2, 2, 128)
    starts = torch.zeros(2, 30, dtype=torch.bool)
    starts[0, [0, 7]], starts[1, [7, 20]] = True, True
    agent.lstm.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    with torch.no_grad():
        outputs, last = agent.memory(features, starts, state)
        assert calls == [7, 13, 10]
        for t in range(30):
            output, state = agent.memory(features[:, t : t + 1], starts[:, t : t + 1], state)
            close(outputs[:, t : t + 1], output, 1e-6)
    close(last, state, 1e-6)


@pytest.mark.detail(34)
def test_starts_are_those_of_the_current_observation(tmp_path):
    """The toy's observation says how many steps its episode has had: 0 wherever one starts."""
    for _, _, batch, *_ in rollouts(tmp_path):
        assert torch.equal(batch.starts, batch.obs[..., 0, 0, 0] == 0)


@pytest.mark.detail(34)
def test_value_after_the_rollout_is_that_of_the_next_one(tmp_path):
    """Without learning, the value to bootstrap from is the first of the next rollout, at an episode's start, too."""
    calls: list = []
    undo = record(ppo, "gae", calls)
    batches = rollouts(tmp_path, 4)
    undo()
    for (_, _, _, next_value, *_), (_, _, batch, *_) in zip(calls, batches[1:]):
        close(next_value, batch.values[:, 0], 1e-6)
    assert [bool(batch.starts[0, 0]) for _, _, batch, *_ in batches[1:]] == [False, False, True]


@pytest.mark.detail(35)
def test_minibatches_are_whole_sub_environments(tmp_path):
    """Each row of a minibatch is one sub-environment's rollout, in order, beside the state it began with."""
    calls: list = []
    undo = record(ppo, "update_minibatch", calls)
    batch = rollouts(tmp_path, 2, num_envs=4, update_epochs=3)[-1][2]
    undo()
    used = []
    for _, _, minibatch, *_ in calls[-6:]:
        assert minibatch.obs.shape == (2, 16, 84, 84, 1)
        steps = minibatch.obs[..., 0, 0, 0].int() // 10
        assert torch.equal(steps, (steps[:, :1] + torch.arange(16)) % 3)
        for k, log_probs in enumerate(minibatch.log_probs):
            (row,) = (i for i in range(4) if torch.equal(log_probs, batch.log_probs[i]))
            assert torch.equal(minibatch.states[k], batch.states[row])
            used.append(row)
    assert [sorted(used[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


@pytest.mark.detail(36)
def test_replay_equals_rollout(tmp_path):
    """The first minibatch's ratio is 1 for every sample, with episodes that start inside."""
    for agent, _, batch, *_ in rollouts(tmp_path):
        assert batch.starts[:, 1:].sum() >= 2 * 4
        with torch.no_grad():
            dist, value = forward(agent, batch)
        close((dist.log_prob(batch.actions) - batch.log_probs).exp(), np.ones((2, 16)), 1e-5)
        close(value, batch.values, 1e-5)


def recipe(agent, data) -> dict[str, torch.nn.Parameter]:
    """Gives the agent the official weights; returns its parameters by their official names."""
    named, parameters = dict(agent.named_parameters()), {}
    rows = zip(*(data[f"recipe/{x}"].tolist() for x in ("names", "seeds", "scales", "shapes")))
    for i, (name, seed, scale, shape) in enumerate(rows):
        shape = tuple(map(int, shape.split("x")))
        weight = (np.random.RandomState(seed).standard_normal(shape) * scale).astype(np.float32)
        assert weight.astype(np.float64).sum() == pytest.approx(data["recipe/sum"][i], abs=1e-9)
        layer, kind = name.rsplit("/", 1)
        ours = {"w": "weight", "b": "bias", "wx": "weight_ih_l0", "wh": "weight_hh_l0"}[kind]
        ours = "bias_ih_l0" if name == "pi/lstm/b" else ours
        parameters[name] = named[f"{LAYERS[layer]}.{ours}"]
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(to_torch(name, weight))))
    return parameters


def to_torch(name: str, x: np.ndarray) -> np.ndarray:
    if name.startswith("pi/lstm"):
        return x.T.reshape(4, 128, *x.shape[:-1])[GATES].reshape(x.T.shape)
    if name == "pi/fc1/w":
        x = x.reshape(7, 7, 64, 512).transpose(2, 0, 1, 3).reshape(3136, 512)
    return x.ravel() if name.endswith("/b") else x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T


def official(name: str, x: torch.Tensor) -> np.ndarray:
    """Returns a parameter or its gradient in the official layout."""
    if name.startswith("pi/lstm"):
        return x.detach().unflatten(0, (4, 128))[GATES].flatten(0, 1).numpy().T
    return test_atari.official(name, x)


def columns(data, obs: np.ndarray) -> list[torch.Tensor]:
    """Returns the columns of a batch; the official rows are env * 8 + step, our obs (T, N, ...)."""
    flat = (data["actions"], -data["old_neglogpacs"], data["old_values"], data["returns"])
    rest = [torch.from_numpy(x).view(4, 8) for x in flat]
    cell, hidden = torch.from_numpy(data["state0"]).chunk(2, -1)
    starts = torch.from_numpy(data["dones"]).T
    return [torch.from_numpy(obs).transpose(0, 1), *rest, starts, torch.stack((hidden, cell), 1)]


@pytest.mark.detail(32)
@pytest.mark.detail(34)
@pytest.mark.detail(36)
@pytest.mark.parametrize("name", ["update_lstm", "update_cnn_lstm"])
def test_update_equals_official(name):
    """Forward pass, losses, clipped gradients and weights of three minibatches, with and without the CNN."""
    data, images = golden(name), name == "update_cnn_lstm"
    agent = make_agent(6 if images else 3)
    if images:
        pixels = np.random.RandomState(778).randint(0, 256, (32, 12, 12, 4)).repeat(7, 1).repeat(7, 2)
        assert pixels.sum() == data["obs_sum"]
        obs, agent.trunk[0] = pixels.astype(np.uint8).reshape(8, 4, 84, 84, 4), torch.nn.Conv2d(4, 32, 8, 4)
    else:
        obs, agent.encoder, agent.lstm = data["obs"].reshape(8, 4, 5), lambda obs: obs, ppo.make_lstm(5, 128)
    parameters = recipe(agent, data)
    weights = agent.lstm.parameters() if not images else agent.parameters()
    weights = [*weights, *agent.policy_head.parameters(), *agent.value_head.parameters()] if not images else [*weights]
    initial = {name: official(name, x).copy() for name, x in parameters.items()}
    batch = ppo.Batch(*columns(data, obs))

    with torch.no_grad():
        dist, value, state = agent(batch.obs, batch.starts, batch.states)
    close(-dist.log_prob(batch.actions).flatten(), data["fwd0/neglogp"], LOSS)
    close(value.flatten(), data["fwd0/value"], LOSS)
    close(dist.entropy().flatten(), data["fwd0/entropy"], LOSS)
    close(torch.cat((state[:, 1], state[:, 0]), -1), data["fwd0/final_state"], LOSS)
    acting = batch.states
    for t in range(8):  # as in a rollout, one step at a time
        with torch.no_grad():
            _, value, acting = agent(batch.obs[:, t : t + 1], batch.starts[:, t : t + 1], acting)
        close(value[:, 0], data["act/value"][t], LOSS)
        close(torch.cat((acting[:, 1], acting[:, 0]), -1), data["act/state"][t], LOSS)

    args = ppo.Args(ent_coef=float(data["ent_coef"]), clip_coef=float(data["cliprange"]))
    optimizer = ppo.Adam(weights, lr=1.0, fused=True)
    compared = 0
    for k, rows in enumerate(data["mb_envs"], 1):
        optimizer.param_groups[0]["lr"] = float(data["lr"][k - 1])
        minibatch = ppo.Batch(*(x[torch.from_numpy(rows)] for x in batch))
        stats = ppo.update_minibatch(agent, optimizer, minibatch, torch.tensor(args.clip_coef), args, ppo.backward)
        stats = dict(zip(ppo.STATS, stats.tolist(), strict=True))
        close([stats[name] for name in ORDER], data["losses"][k - 1], LOSS)
        assert stats["grad_norm"] == pytest.approx(data["gradnorm"][k - 1], rel=NORM)
        for variable, parameter in parameters.items():
            test_atari.check_statistics(data, f"grad{k}", variable, official(variable, parameter.grad), GRADIENT)
            if k in (1, 3):
                weight = official(variable, parameter)
                limit = WEIGHT if images else 1e-6
                test_atari.check_statistics(data, f"after{k}", variable, weight, limit)
                test_atari.check_statistics(data, f"delta{k}", variable, weight - initial[variable], limit)
                if not images:
                    close(weight, data[f"full_after{k}/{variable}"].reshape(weight.shape), limit)
                compared += 1
    assert compared == 2 * len(data["var_order"])


def test_state_after_the_step_is_used_at_time_limits(monkeypatch, tmp_path):
    """V(last observation) continues the episode that is cut off: it equals a replay of that episode."""
    settings = {"env_id": "pong", "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "total_timesteps": 64}
    monkeypatch.setattr(ppo, "AtariVectorEnv", functools.partial(test_atari.limited, ppo.AtariVectorEnv, 100))
    calls, batches, final, gae, step = [], [], [], ppo.gae, ppo.Atari.step

    def spy_step(envs, actions):
        result = step(envs, actions)
        final.extend(result[-1][name] for name in result[-1] if name == "final_obs")
        return result

    monkeypatch.setattr(ppo.Atari, "step", spy_step)
    monkeypatch.setattr(ppo, "gae", lambda *args: calls.append(args) or gae(*args))
    undo = record(ppo, "update", batches)
    ppo.train(ppo.Args(**settings, learning_rate=0.0, eval_episodes=0, run_dir=str(tmp_path), bootstrap_truncated=True))
    undo()
    (_, _, dones, _, final_values, _), (agent, _, batch, *_) = calls[0], batches[0]
    assert np.argwhere(dones).tolist() == [[22, 0], [22, 1]] and len(final) == 1
    obs = torch.cat((batch.obs[:, :23], torch.from_numpy(final[0]).unsqueeze(1)), 1)
    with torch.no_grad():
        value = agent(obs, torch.zeros(2, 24, dtype=torch.bool), batch.states)[1][:, -1]
    close(final_values[22], value, 1e-5)
    assert np.count_nonzero(final_values) == 2


def test_compiled_update_equals_eager(tmp_path):
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        agent = make_agent()
        batch = make_batch(ppo, agent)
        if compiled:
            ppo.compile_encoder(agent, torch.device("cpu"))
        optimizer = ppo.Adam(agent.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            stats = ppo.update_minibatch(agent, optimizer, batch, torch.tensor(0.2), ppo.Args(), ppo.backward)
        results.append((stats, torch.nn.utils.parameters_to_vector(agent.parameters()).detach(), [*agent.state_dict()]))
    close(results[1][0], results[0][0], 1e-4)
    close(results[1][1], results[0][1], 1e-4)
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize(("num_envs", "num_minibatches", "works"), [(8, 3, 1), (6, 4, 2), (2, 4, 2)])
def test_environments_that_do_not_divide_are_refused(num_envs, num_minibatches, works):
    message = f"--num-minibatches {num_minibatches}: must divide --num-envs {num_envs}, such as {works},"
    with pytest.raises(ppo.UsageError, match=message):
        ppo.Args(num_envs=num_envs, num_minibatches=num_minibatches)
    assert ppo.Args(num_envs=num_envs, num_minibatches=works).num_minibatches == works


class Recall(gym.Env):
    """The first frame is bright on one side; the fourth asks for it: 1 for the right answer, half of it by chance."""

    observation_space, action_space = Box(0, 255, (84, 84, 1), np.uint8), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.side = 0, int(self.np_random.integers(2))
        return self.frame(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == 4
        return self.frame(), float(over and action == self.side), over, False, {}

    def frame(self):
        frame = np.zeros((84, 84, 1), np.uint8)
        if self.steps == 0:
            frame[:, 42 * self.side :][:, :42] = 255
        if self.steps == 3:
            frame[20:64, 20:64] = 128
        return frame


def recall_envs(args, num_envs, video=None):
    same_step = gym.vector.AutoresetMode.SAME_STEP
    envs = RecordEpisodeStatistics(gym.vector.SyncVectorEnv([Recall] * num_envs, autoreset_mode=same_step))
    envs.protocol = "recall"
    return envs


@pytest.mark.parametrize("name", ["ppo_atari_lstm", "ppo_atari"])
def test_memory_matters(name, monkeypatch, tmp_path):
    """What was seen once is recalled later, in evaluation too; with one frame and no memory it cannot be."""
    module = load(name)
    monkeypatch.setattr(module, "make_envs", recall_envs)
    settings = {"num_envs": 8, "num_steps": 32, "learning_rate": 1e-3, "total_timesteps": 5120, "eval_episodes": 25}
    settings |= {"frame_stack": 1} if name == "ppo_atari" else {}
    results = module.train(module.Args(**settings, threads=1, device="cpu", run_dir=str(tmp_path)))
    if name == "ppo_atari_lstm":
        assert results["episodic_return"] >= 0.95 and np.mean(results["eval_returns"]) >= 0.95
    else:
        assert 0.3 <= results["episodic_return"] <= 0.7  # the mean of 100 fair coins
