"""What ppo_atari.py has of its own: the official wrappers, the network on images, bfloat16, names of games, films."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from atari_reference import OfficialGame, area
from gymnasium.spaces import Box, Discrete
from helpers import ROOT, golden, load

ppo = load("ppo_atari")
GAMES = ["breakout", "pong", "space_invaders", "beam_rider", "seaquest", "ms_pacman", "freeway"]
LOSS, GRADIENT, WEIGHT = 5e-6, 1e-6, 1e-7  # largest absolute differences to the official numbers
NORM = 5e-5  # relative: torch sums the squares of 1.6 million weights in float32
ORDER = ["policy_loss", "value_loss", "entropy", "approx_kl_official", "clipfrac"]  # of the official losses
LAYERS = {"pi/c1": "trunk.0", "pi/c2": "trunk.2", "pi/c3": "trunk.4", "pi/fc1": "trunk.7"}
LAYERS |= {"pi": "policy_head", "vf": "value_head"}


def close(actual, expected, limit: float) -> None:
    np.testing.assert_allclose(actual, expected, atol=limit, rtol=0)


class Recorder:
    """Stands for an emulator; records the actions it gets and the infos it gives."""

    def __init__(self, emulator) -> None:
        self.emulator, self.actions, self.infos = emulator, [], []

    def __getattr__(self, name):
        return getattr(self.emulator, name)

    def reset(self, **options):
        result = self.emulator.reset(**options)
        self.infos.append(result[-1] | {"final_obs": None})
        return result

    def send(self, actions) -> None:
        self.actions.append(actions.item())
        self.emulator.send(actions)

    def recv(self):
        result = self.emulator.recv()
        self.infos.append(result[-1])
        return result

    def noops(self) -> list[int]:
        """Returns the number of no-ops of every game that was started, none for one that was drawn again."""
        return [info["episode_frame_number"].item() for info in self.infos if "final_obs" in info]


def make(game="breakout", num_envs=1, limit=None, monkeypatch=None, **settings):
    """Returns environments with recording emulators; `limit` replaces the time limit in frames."""
    if limit:
        make_emulator = functools.partial(limited, ppo.AtariVectorEnv, limit)
        monkeypatch.setattr(ppo, "AtariVectorEnv", make_emulator)
    envs = ppo.make_envs(ppo.Args(env_id=game, **settings), num_envs)
    envs.emulators = [Recorder(emulator) for emulator in envs.emulators]
    return envs


def limited(make_emulator, limit, **options):
    return make_emulator(**options | {"max_num_frames_per_episode": limit})


def play(envs, steps: int, seeds: list[int]) -> list[tuple]:
    """Plays random actions, which depend on the seed of each sub-environment alone; returns what each step gave."""
    draws = [np.random.default_rng(seed).integers(envs.single_action_space.n, size=steps) for seed in seeds]
    results = [(envs.reset(seed=seeds)[0].copy(),)]
    for actions in np.transpose(draws):
        obs, rewards, terminated, truncated, info = envs.step(actions)
        results.append((obs.copy(), rewards, terminated, truncated, list(envs.lives), info, actions))
    return results


def compare(game: str, steps: int) -> dict[str, float]:
    """Plays the same actions with the script and the reference; returns the differences of their pixels."""
    envs = make(game)
    (first,), *results = play(envs, steps, [7])
    noops = [count for count in envs.emulators[0].noops() if count]
    official, gray = OfficialGame(game, noops), OfficialGame(game, noops, gray_first=True)
    pixels = [difference(first, official.reset(), gray.reset())]
    games, expected_games = [], []
    for step, (obs, reward, terminated, truncated, lives, info, action) in enumerate(results):
        expected, expected_gray = official.step(action.item()), gray.step(action.item())
        outcome = (reward.item(), terminated.item(), truncated.item(), lives[0])
        assert outcome == expected[1:5], f"step {step}"
        if "episode" in info:
            assert info["_episode"].item()
            games.append((info["episode"]["r"].item(), info["episode"]["l"].item()))
        expected_games += expected.games
        pixels.append(difference(obs, expected.obs, expected_gray.obs))
    assert games == expected_games
    largest, share, gray_first = zip(*pixels)
    dones = sum(result[2].item() for result in results)
    counts = {"games": len(games), "dones": dones}
    return counts | {"largest": max(largest), "share": np.mean(share).item(), "gray first": max(gray_first)}


def difference(ours, official, gray_first) -> tuple[int, float, int]:
    """Returns the largest difference to the official pixels, the share of those off, and the largest to gray first."""
    ours, frames = ours[0].astype(int), slice(-ours.shape[-1], None)
    off = np.abs(ours - official[..., frames])
    return off.max().item(), (off > 1).mean().item(), np.abs(ours - gray_first[..., frames]).max().item()


@pytest.mark.detail(15)
@pytest.mark.detail(16)
@pytest.mark.detail(17)
@pytest.mark.detail(18)
@pytest.mark.detail(19)
@pytest.mark.detail(20)
@pytest.mark.parametrize("steps", [450, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("game", GAMES)
def test_same_as_official_wrappers(game, steps):
    """Rewards, ends, lives and scores are equal, and pixels but for the order of maximum and gray."""
    differences = compare(game, steps)
    print(game, steps, differences)
    assert differences["gray first"] <= 1  # rounding
    assert differences["largest"] <= 43
    assert differences["share"] <= 0.013
    if steps == 3000 or game in ("breakout", "ms_pacman"):
        assert differences["games"] >= 1
        assert differences["dones"] >= differences["games"]


@pytest.mark.parametrize("game", ["breakout", "freeway"])
def test_stream_depends_on_the_seed_of_the_sub_environment_alone(game):
    together = play(make(game, 3), 150, [11, 12, 13])
    alone = [play(make(game, 1), 150, [seed]) for seed in (13, 11)]
    for (first, *rest), (last, *last_rest), (expected, *expected_rest) in zip(alone[1], alone[0], together):
        assert np.array_equal(first[0], expected[0])
        assert np.array_equal(last[0], expected[2])
        if rest:
            assert [rest[i].item() for i in range(3)] == [expected_rest[i][0] for i in range(3)]
            assert [last_rest[i].item() for i in range(3)] == [expected_rest[i][2] for i in range(3)]
    assert not np.array_equal(together[100][0][0], together[100][0][1])


def test_seeds_as_in_gymnasium():
    """One seed counts up over the sub-environments, 0 is a seed like another, and None is a random one."""
    envs = make("pong", 2)

    def start(seed):
        envs.reset(seed=seed)
        return envs.emulators[0].noops()[-1], envs.emulators[1].noops()[-1]

    for seed in (0, 7):
        assert start(seed) == start([seed, seed + 1]) == start([seed, seed + 1])
    assert len({start(seed) for seed in range(8)}) > 1
    assert len({start(None) for _ in range(8)}) > 1


@pytest.mark.detail(14)
def test_noops():
    """Every number from 1 to 30 comes up about as often, and 0 is drawn again."""
    envs = make("pong")
    emulator = envs.emulators[0]
    envs.reset(seed=[3])
    for _ in range(300):
        envs.start_game(0, *emulator.reset())
        assert emulator.noops()[-1] > 0
    drawn = np.bincount(emulator.noops())
    assert len(drawn) == 31
    assert drawn[1:].sum() == 301
    assert drawn.min() >= 1 and drawn.max() <= 25  # 10 expected


@pytest.mark.detail(15)
def test_frame_skip():
    envs = make("pong")
    play(envs, 20, [1])
    frames = [info["episode_frame_number"].item() for info in envs.emulators[0].infos if info["lives"].size]
    assert set(np.diff(frames[-20:])) == {4}


@pytest.mark.detail(16)
def test_a_lost_life_is_terminal_but_the_game_goes_on():
    results = play(make("breakout"), 400, [5])[1:]
    lives = [result[4][0] for result in results]
    ends = [step for step, result in enumerate(results) if result[2].item()]
    games = [step for step, result in enumerate(results) if "episode" in result[5]]
    assert games and set(games) < set(ends)
    first_game = [step for step in ends if step <= games[0]]
    assert [lives[step] for step in first_game] == [4, 3, 2, 1, 5]
    assert not any(result[3].item() for result in results)


@pytest.mark.detail(17)
@pytest.mark.parametrize("game, start", [("breakout", [1, 2]), ("ms_pacman", []), ("freeway", [])])
def test_hidden_steps(game, start):
    """After a game over the fire reset; after a lost life a no-op before it; nothing else."""
    envs = make(game)
    (_, *results), emulator = play(envs, 700, [2]), envs.emulators[0]
    expected = list(start)
    for *_, terminated, truncated, _, info, actions in results:
        life_lost = terminated.item() and "episode" not in info
        expected += [actions.item()] + [0] * life_lost + start * (terminated.item() or truncated.item())
    assert emulator.actions == expected
    assert (game == "freeway") == (len(expected) == 700)


@pytest.mark.detail(17)
def test_fire_reset_serves_the_ball():
    """With no-ops alone, Breakout loses lives all the time: the agent never has to serve."""
    envs = make("breakout")
    envs.reset(seed=[1])
    ends = [step for step in range(200) if envs.step(np.array([0]))[2].item()]
    assert len(ends) >= 6
    assert np.diff(ends).max() <= 30


class Scripted:
    """Stands for an emulator; gives (reward, game over, lives) in turn, and starts games with 3 lives."""

    def __init__(self, *steps) -> None:
        self.steps, self.actions, self.screen = list(steps), [], np.ones((1, 1, 84, 84), np.uint8)

    def info(self, lives):
        return {"lives": np.array([lives]), "episode_frame_number": np.array([1])}

    def reset(self, seed=None):
        return self.screen, self.info(3)

    def send(self, actions) -> None:
        self.actions.append(actions.item())

    def recv(self):
        reward, over, lives = self.steps.pop(0)
        info = self.info(3 if over else lives) | ({"final_obs": self.screen} if over else {})
        return self.screen, np.array([reward]), np.array([over]), np.array([False]), info


@pytest.mark.detail(16)
@pytest.mark.detail(17)
def test_ends_within_hidden_steps():
    """A life or a game that ends in a hidden step is booked there, and the hidden steps that are left are taken."""
    envs = make("breakout")
    # reset; a step; a life lost in a step, another in FIRE after the no-op, the game in the last hidden step; a step
    start, lost = [(0, False, 3)] * 2, [(0, False, 2), (0, False, 2), (2, False, 1), (0, False, 1), (1, True, 0)]
    envs.emulators = [Scripted(*start, (5, False, 3), *lost, (7, False, 3))]
    envs.reset(seed=[0])
    outcomes = [envs.step(np.array([3])) for _ in range(3)]
    assert envs.emulators[0].actions == [1, 2, 3, 3, 0, 1, 0, 2, 3]
    assert [outcome[1].item() for outcome in outcomes] == [1, 0, 1]
    assert [outcome[2].item() for outcome in outcomes] == [False, True, False]
    assert [outcome[4].get("_episode") for outcome in outcomes] == [None, np.array([True]), None]
    assert outcomes[1][4]["episode"]["r"].item() == 8
    assert outcomes[1][4]["episode"]["l"].item() == 8  # all steps since the reset, hidden ones included
    assert envs.scores == [7] and envs.lengths == [1]


@pytest.mark.detail(17)
def test_a_life_lost_in_the_no_op():
    """It costs no second no-op: the official wrapper takes one, whatever happens in it."""
    envs = make("breakout")
    envs.emulators = [Scripted(*[(0, False, 3)] * 2, (0, False, 2), *[(0, False, 1)] * 9)]
    envs.reset(seed=[0])
    assert envs.step(np.array([3]))[2].item()
    assert envs.emulators[0].actions == [1, 2, 3, 0, 1, 2] and envs.lives == [1]


@pytest.mark.detail(16)
def test_the_last_life_ends_with_the_game():
    """Some games show 0 lives for a while; their episode ends with the game. An extra life ends none."""
    envs = make("ms_pacman")
    envs.emulators = [Scripted((0, False, 4), (0, False, 1), (0, False, 1), (0, False, 0), (0, False, 0), (0, True, 0))]
    envs.reset(seed=[0])
    ends = [envs.step(np.array([3]))[2].item() for _ in range(5)]
    assert ends == [False, True, False, False, True]
    assert envs.emulators[0].actions == [3, 3, 0, 3, 3, 3]


@pytest.mark.detail(18)
def test_image():
    """The screen right after a reset, where nothing is pooled, is ALE's gray screen averaged by area."""
    envs = make("freeway")
    obs, _ = envs.reset(seed=[1])
    game = OfficialGame("freeway", envs.emulators[0].noops(), gray_first=True)
    game.reset()
    expected = area(210, 84) @ game.ale.getScreenGrayscale() @ area(160, 84).T
    assert obs.shape[:3] == (1, 84, 84) and obs.dtype == np.uint8
    assert np.abs(obs[0, ..., -1] - expected).max() < 0.51
    assert expected.std() > 20


@pytest.mark.detail(19)
def test_rewards_are_signs_and_scores_are_raw():
    results = play(make("ms_pacman"), 700, [1])[1:]
    rewards = np.array([result[1].item() for result in results])
    assert set(rewards) == {0, 1}
    score = next(result[5]["episode"]["r"].item() for result in results if "episode" in result[5])
    assert score >= 50 and score % 10 == 0


@pytest.mark.detail(20)
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_frame_stack(frames):
    """The newest frame comes last; zeros stand before the first one of an episode, after every end."""
    results = play(make("breakout", 2, frame_stack=frames), 150, [1, 2])
    previous, ends = results[0][0], 0
    assert previous.shape == (2, 84, 84, frames)
    assert not previous[..., :-1].any() and previous[..., -1].any((1, 2)).all()
    for obs, _, terminated, *_ in results[1:]:
        for i in range(2):
            ends += terminated[i]
            expected = np.zeros_like(obs[i, ..., 1:]) if terminated[i] else previous[i, ..., 1:]
            assert np.array_equal(obs[i, ..., :-1], expected)
            assert obs[i, ..., -1].any()
        previous = obs
    assert ends >= 5


def test_time_limit(monkeypatch):
    """Truncated, not terminated, after the limit; score and length start anew, and final_obs is the last stack."""
    envs = make("pong", limit=100, monkeypatch=monkeypatch)
    results = play(envs, 100, [1])
    cuts = [step for step, result in enumerate(results) if step and result[3].item()]
    assert cuts == [23, 46, 69, 92]  # 25 steps of 4 frames, two of them the fire reset
    for step in cuts:
        previous, (obs, _, terminated, _, _, info, _) = results[step - 1][0], results[step]
        assert not terminated.item()
        assert info["episode"]["l"].item() == 25
        assert np.array_equal(info["final_obs"][0, ..., :-1], previous[0, ..., 1:])
        assert info["final_obs"][0, ..., -1].any() and not obs[0, ..., :-1].any()


def test_time_limit_is_108_000_frames():
    options = []
    original, ppo.AtariVectorEnv = ppo.AtariVectorEnv, lambda **o: options.append(o) or original(**o)
    try:
        make("pong")
    finally:
        ppo.AtariVectorEnv = original
    assert options[0]["max_num_frames_per_episode"] == 108_000


def test_bootstrap_at_time_limits(monkeypatch, tmp_path):
    seen = []
    original = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *a: seen.append(a) or original(*a))
    monkeypatch.setattr(ppo, "AtariVectorEnv", functools.partial(limited, ppo.AtariVectorEnv, 100))
    settings = {"env_id": "pong", "num_envs": 2, "num_steps": 32, "total_timesteps": 64, "run_dir": str(tmp_path)}
    ppo.train(ppo.Args(**settings, eval_episodes=0, bootstrap_truncated=True))
    _, _, dones, _, final_values, _ = seen[0]
    assert np.argwhere(dones).tolist() == [[22, 0], [22, 1]]
    assert (final_values[22] != 0).all() and np.count_nonzero(final_values) == 2


@pytest.mark.parametrize(
    "name", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "Breakout-v4", "Breakout-v0", "breakout"]
)
def test_every_spelling_is_one_protocol(name):
    envs = make(name)
    (first,), *rest = play(envs, 60, [9])
    (expected,), *expected_rest = play(make("breakout"), 60, [9])
    assert np.array_equal(first, expected)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(rest, expected_rest))
    for part in (
        "breakout",
        "4 frames a step",
        "sticky actions 0.0",
        "1 to 30 no-ops",
        "108,000",
        "NOOP FIRE RIGHT LEFT",
    ):
        assert part in envs.protocol


@pytest.mark.parametrize(
    "name, words",
    [
        ("ALE/PongNoFrameskip-v4", "PongNoFrameskip-v4"),
        ("Pong-v5", "ALE/Pong-v5"),
        ("Pong", "pong"),
        ("", "did you mean"),
        ("CartPole-v1", "ppo_classic.py"),
        ("HalfCheetah-v5", "ppo_continuous.py"),
    ],
)
def test_other_names_are_refused(name, words):
    with pytest.raises(ppo.UsageError, match="--env-id") as error:
        ppo.find_game(name)
    assert words in str(error.value)


@pytest.mark.parametrize("actions", [[4], [-1], [99], [0, 0], [1.5]])
def test_illegal_actions_never_reach_the_emulator(actions):
    envs = make("breakout")
    envs.reset(seed=[1])
    sent = len(envs.emulators[0].actions)
    with pytest.raises(ValueError):
        envs.step(np.array(actions))
    assert len(envs.emulators[0].actions) == sent
    assert envs.step(np.array([3]))[0].shape == (1, 84, 84, 4)  # still alive


def test_sticky_actions():
    """An agent that alternates two actions sees other frames with sticky actions; the seed decides which."""
    runs = []
    for probability, seed in ((0.0, 1), (0.25, 1), (0.25, 1), (0.25, 2)):
        envs = make("breakout", sticky_actions=probability)
        envs.reset(seed=[seed])
        runs.append(np.stack([envs.step(np.array([2 + step % 2]))[0].copy() for step in range(40)]))
    assert not np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[1], runs[2])
    assert not np.array_equal(runs[1], runs[3])


def make_agent(actions=4, bf16=False, frames=4):
    torch.manual_seed(0)
    return ppo.Agent(Box(0, 255, (84, 84, frames), np.uint8), Discrete(actions), bf16)


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 84, 84, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.detail(21)
def test_network():
    agent = make_agent(6)
    shapes = {name: tuple(parameter.shape) for name, parameter in agent.named_parameters() if "weight" in name}
    assert shapes == {
        "trunk.0.weight": (32, 4, 8, 8),
        "trunk.2.weight": (64, 32, 4, 4),
        "trunk.4.weight": (64, 64, 3, 3),
        "trunk.7.weight": (512, 3136),
        "policy_head.weight": (6, 512),
        "value_head.weight": (1, 512),
    }
    strides = [layer.stride for layer in agent.trunk if isinstance(layer, torch.nn.Conv2d)]
    assert strides == [(4, 4), (2, 2), (1, 1)]
    assert sum(isinstance(layer, torch.nn.ReLU) for layer in agent.trunk) == 4
    gains = {"policy_head": 0.01, "value_head": 1.0}
    for name, parameter in agent.named_parameters():
        layer, kind = name.rsplit(".", 1)
        if kind == "bias":
            assert not parameter.any()
        else:  # orthogonal: all singular values are the gain
            values = torch.linalg.svdvals(parameter.detach().flatten(1))
            close(values, np.full(len(values), gains.get(layer, np.sqrt(2))), 1e-5)
    dist, value = agent(images(3))
    assert dist.log_probs.shape == (3, 6) and value.shape == (3,)


@pytest.mark.detail(22)
def test_images_are_scaled_inside_the_network():
    agent, obs = make_agent(), images(5)
    copy = obs.clone()
    inputs = []
    agent.trunk.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    features = agent.encoder(obs)
    assert torch.equal(inputs[0], (obs.double() / 255).float().permute(0, 3, 1, 2))
    assert torch.equal(obs, copy)
    as_float = obs.float()
    assert torch.equal(agent.encoder(as_float), features)  # evaluate() gives it floats
    assert torch.equal(as_float, copy.float())
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)


def official(name: str, x: torch.Tensor) -> np.ndarray:
    """Returns a parameter or its gradient in the official layout."""
    x = x.detach()
    if name == "pi/fc1/w":
        x = x.reshape(512, 64, 7, 7).permute(2, 3, 1, 0).reshape(3136, 512)
    elif name.endswith("/w"):
        x = x.permute(2, 3, 1, 0) if x.dim() == 4 else x.T
    return x.numpy()


def load_recipe(agent, data) -> dict[str, torch.nn.Parameter]:
    """Gives the agent the official weights; returns its parameters by their official names."""
    parameters, named = {}, dict(agent.named_parameters())
    rows = zip(*(data[f"recipe/{x}"].tolist() for x in ("names", "seeds", "scales", "shapes")))
    for i, (name, seed, scale, shape) in enumerate(rows):
        shape = tuple(map(int, shape.split("x")))
        weight = (np.random.RandomState(seed).standard_normal(shape) * scale).astype(np.float32)
        assert weight.astype(np.float64).sum() == pytest.approx(data["recipe/sum"][i], abs=1e-9)
        if name == "pi/fc1/w":
            weight = weight.reshape(7, 7, 64, 512).transpose(2, 0, 1, 3).reshape(3136, 512)
        weight = (
            weight.ravel() if name.endswith("/b") else weight.transpose(3, 2, 0, 1) if weight.ndim == 4 else weight.T
        )
        layer, kind = name.rsplit("/", 1)
        parameters[name] = named[f"{LAYERS[layer]}.{'weight' if kind == 'w' else 'bias'}"]
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(weight)))
    return parameters


def statistics(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    projection = np.cos(np.arange(x.size)) @ x.ravel()
    return np.array([x.mean(), x.std(), np.linalg.norm(x), projection])


def check_statistics(data, key: str, name: str, x: np.ndarray, limit: float) -> None:
    flat = x.ravel()
    close(flat[:64], data[f"{key}/first64/{name}"], limit)
    close(flat[np.arange(min(64, x.size)) * max(1, x.size // 64)], data[f"{key}/stride64/{name}"], limit)
    close(statistics(x)[:2], data[f"{key}/stats/{name}"][:2], limit)


@pytest.mark.detail(21)
@pytest.mark.detail(22)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_update_equals_official(compiled):
    """Forward pass, losses, clipped gradients and weights of three minibatches of 16 images."""
    data, agent = golden("update_cnn"), make_agent(6)
    parameters = load_recipe(agent, data)
    initial = {name: official(name, x).copy() for name, x in parameters.items()}
    pixels = np.random.RandomState(777).randint(0, 256, (48, 12, 12, 4)).repeat(7, 1).repeat(7, 2).astype(np.uint8)
    assert pixels.sum() == data["obs_sum"]
    columns = pixels, data["actions"], -data["old_neglogpacs"], data["old_values"], data["returns"]
    batch = ppo.Batch(*map(torch.from_numpy, columns))
    with torch.no_grad():
        dist, value = agent(batch.obs)
    close(-dist.log_prob(batch.actions), data["fwd0/neglogp"], LOSS)
    close(value, data["fwd0/value"], LOSS)
    close(dist.entropy(), data["fwd0/entropy"], LOSS)
    args = ppo.Args(ent_coef=float(data["ent_coef"]), clip_coef=float(data["cliprange"]))
    optimizer = ppo.Adam(agent.parameters(), lr=1.0, fused=True)
    backward = ppo.compile_backward(torch.device("cpu")) if compiled else ppo.backward
    for k, rows in enumerate(data["mb_idx"], 1):
        optimizer.param_groups[0]["lr"] = float(data["lr"][k - 1])
        minibatch = ppo.Batch(*(x[torch.from_numpy(rows)] for x in batch))
        stats = ppo.update_minibatch(agent, optimizer, minibatch, torch.tensor(args.clip_coef), args, backward)
        stats = dict(zip(ppo.STATS, stats.tolist(), strict=True))
        close([stats[name] for name in ORDER], data["losses"][k - 1], LOSS)
        assert stats["grad_norm"] == pytest.approx(data["gradnorm"][k - 1], rel=NORM)
        for name, parameter in parameters.items():
            check_statistics(data, f"grad{k}", name, official(name, parameter.grad), GRADIENT)
            if k in (1, 3):
                weight = official(name, parameter)
                check_statistics(data, f"after{k}", name, weight, WEIGHT)
                check_statistics(data, f"delta{k}", name, weight - initial[name], WEIGHT)


def test_bf16_keeps_losses_and_weights_in_float32():
    results, outputs = [], []
    for bf16 in (False, True):
        agent, obs = make_agent(bf16=bf16), images(32)
        agent.trunk.register_forward_hook(lambda module, args, output: outputs.append(output.dtype))
        optimizer = ppo.Adam(agent.parameters(), lr=2.5e-4, fused=True)
        dist, value = agent(obs)
        assert outputs[-1] == (torch.bfloat16 if bf16 else torch.float32)
        assert dist.log_probs.dtype == value.dtype == torch.float32
        actions = torch.arange(32) % 4
        batch = ppo.Batch(obs, actions, dist.log_prob(actions).detach(), value.detach(), value.detach() + actions)
        stats = ppo.update_minibatch(agent, optimizer, batch, torch.tensor(0.1), ppo.Args(bf16=bf16), ppo.backward)
        assert stats.dtype == torch.float32
        for parameter in agent.parameters():
            state = optimizer.state[parameter]
            assert {parameter.dtype, parameter.grad.dtype, state["exp_avg"].dtype} == {torch.float32}
        results.append(torch.cat([stats, torch.cat([p.detach().flatten() for p in agent.parameters()])]))
    assert not torch.equal(*results)
    close(results[0][:7], results[1][:7], 0.05)
    close(results[1][7] / results[0][7], 1, 0.01)  # the gradient's norm, 17: bfloat16 rounds by up to 0.4 %
    close(results[0][8:], results[1][8:], 6e-4)  # at most the two first steps of 2.5e-4 apart


def test_training_stores_bytes_and_repeats_itself(monkeypatch, tmp_path):
    seen = []
    original = ppo.update

    def spy(agent, optimizer, batch, *rest):
        seen.append(batch)
        return original(agent, optimizer, batch, *rest)

    monkeypatch.setattr(ppo, "update", spy)
    settings = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1, "total_timesteps": 64}
    args = ppo.Args(**settings, eval_episodes=0, run_dir=str(tmp_path), threads=1, device="cpu")
    results = [ppo.train(args) for _ in range(2)]
    states = [torch.load(result["run_folder"] / "checkpoint.pt", weights_only=True) for result in results]
    assert all(torch.equal(states[0]["agent"][name], states[1]["agent"][name]) for name in states[0]["agent"])
    assert seen[0].obs.dtype == torch.uint8 and seen[0].obs.shape == (32, 84, 84, 4)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[2]))
    assert states[0]["global_step"] == 64


def test_stored_log_probs_and_values_are_of_the_policy_that_acted(monkeypatch, tmp_path):
    checked = []

    def spy(agent, optimizer, batch, *rest):
        with torch.no_grad():
            dist, value = agent(batch.obs)
        close(dist.log_prob(batch.actions), batch.log_probs, 1e-5)
        close(value, batch.values, 1e-5)
        checked.append(len(batch.obs))
        return torch.zeros(len(ppo.STATS))

    monkeypatch.setattr(ppo, "update", spy)
    settings = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "eval_episodes": 0}
    ppo.train(ppo.Args(**settings, run_dir=str(tmp_path), device="cpu"))
    assert checked == [32, 32]


def test_evaluation_plays_whole_games():
    """Returns are raw scores: those of a replay of the sampled actions."""
    agent, recorders = make_agent(), []
    original = ppo.make_envs

    def spy(args, num_envs, video=None):
        envs = original(args, num_envs, video)
        envs.emulators = [Recorder(emulator) for emulator in envs.emulators]
        recorders.append(envs.emulators)
        return envs

    ppo.make_envs = spy
    try:
        returns = ppo.evaluate(agent, ppo.Args(env_id="breakout"), [5, 6], ())
    finally:
        ppo.make_envs = original
    assert len(returns) == 2
    scores = []
    for emulator in recorders[0]:
        game, score = OfficialGame("breakout", [count for count in emulator.noops() if count]), 0
        game.new_game()
        for action in emulator.actions:
            _, reward, over, _ = game.skip(action)
            score += reward
            if over:
                break
        scores.append(score)
    assert sorted(returns) == sorted(scores)


def test_video_shows_the_whole_game_in_color(tmp_path):
    from moviepy import VideoFileClip

    args = ppo.Args(env_id="breakout")
    agent = make_agent()
    plain = ppo.evaluate(agent, args, [5], ())
    assert ppo.evaluate(agent, args, [5], (), tmp_path / "videos" / "game") == plain  # the camera changes nothing
    with VideoFileClip(str(tmp_path / "videos" / "game.mp4")) as clip:
        assert clip.size == [160, 210]
        assert clip.fps == 15
        assert clip.n_frames >= 100
        frames = np.stack([clip.get_frame(second) for second in (1, 3)]).astype(int)
    assert np.abs(frames[..., 0] - frames[..., 2]).max() > 50  # red is not blue
    assert (frames[0] != frames[1]).any()


def test_checkpoint_of_another_game_is_refused(tmp_path):
    settings = {"num_envs": 2, "num_steps": 4, "total_timesteps": 8, "eval_episodes": 0, "run_dir": str(tmp_path)}
    folder = ppo.train(ppo.Args(env_id="pong", **settings))["run_folder"]
    with pytest.raises(ppo.UsageError, match="another network"):
        ppo.load_checkpoint(str(folder), agent=make_agent(4))
    command = [sys.executable, str(ROOT / "ppo_atari.py"), "--resume", str(folder), "--env-id", "breakout"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and "--env-id breakout: must stay pong" in result.stderr
