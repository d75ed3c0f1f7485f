"""What ppo_joint.py has of its own: levels on the raw emulator as the official wrappers show them, who plays them."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import ale_py
import numpy as np
import pytest
import torch
from atari_reference import OfficialGame, area, gray
from helpers import ROOT, load, quick_args
from test_command_line import read_curves

ppo = load("ppo_joint")
BREAKOUT = "breakout?mode=4&difficulty=1"


class Recorder:
    """Stands for the emulator of a level; records the actions that it gets, "reset" for a new game."""

    def __init__(self, emulator) -> None:
        self.emulator, self.calls = emulator, []

    def __getattr__(self, name):
        return getattr(self.emulator, name)

    def reset_game(self) -> None:
        self.calls.append("reset")
        self.emulator.reset_game()

    def act(self, action) -> int:
        self.calls.append(action.name)
        return self.emulator.act(action)


def make(*levels, num_envs=None, **settings):
    """Returns environments of these levels, one each, with recording emulators."""
    args = ppo.Args(levels=levels, **settings)
    envs = ppo.make_envs(args, levels * (num_envs or 1))
    for level in envs.levels:
        level.emulator = Recorder(level.emulator)
    return envs


def play(envs, steps: int, seeds: list[int]) -> list[tuple]:
    """Plays random actions, which depend on the seed of each sub-environment alone; returns what each step gave."""
    draws = [np.random.default_rng(seed).integers(envs.single_action_space.n, size=steps) for seed in seeds]
    results = [(envs.reset(seed=seeds)[0].copy(),)]
    for actions in np.transpose(draws):
        obs, rewards, terminated, truncated, info = envs.step(actions)
        lives = [level.lives for level in envs.levels]
        results.append((obs.copy(), rewards, terminated, truncated, lives, info, actions))
    return results


def noops(calls: list[str]) -> list[int]:
    """Returns the numbers of no-ops at the starts of the games; the actions after them must not begin with one."""
    games = " ".join(calls).split("reset")[1:]
    return [len(re.match(r"( NOOP)*", game)[0]) // len(" NOOP") for game in games]


def official(level: str, counts, **options) -> OfficialGame:
    game, options_of_level = ppo.parse_level(level)
    reference = OfficialGame(game, counts, **options)
    if "mode" in options_of_level:
        reference.ale.setMode(options_of_level["mode"])
    if "difficulty" in options_of_level:
        reference.ale.setDifficulty(options_of_level["difficulty"])
    return reference


def counts_of(seed: int):
    """The numbers of no-ops that a level draws; test_noops proves that it takes them."""
    random = np.random.default_rng(seed)
    random.integers(2**31)  # the emulator's seed
    while True:
        yield random.integers(1, 31)


@pytest.mark.detail(15)
@pytest.mark.detail(16)
@pytest.mark.detail(17)
@pytest.mark.detail(18)
@pytest.mark.detail(19)
@pytest.mark.detail(20)
@pytest.mark.parametrize(
    "level",
    [BREAKOUT, "pong?mode=1&difficulty=3", "ms_pacman?mode=2", "freeway?mode=3&difficulty=1", "beam_rider", "seaquest"],
)
def test_same_as_official_wrappers(level):
    """Rewards, ends, lives and scores are equal, and pixels but for the order of maximum and gray."""
    envs, steps = make(level), 500 if level == BREAKOUT else 250
    (first,), *results = play(envs, steps, [7])
    exact, gray_first = official(level, counts_of(7)), official(level, counts_of(7), gray_first=True)
    pixels = [difference(first, exact.reset(), gray_first.reset())]
    games, expected_games = [], []
    for step, (obs, reward, terminated, truncated, lives, info, action) in enumerate(results):
        expected, expected_gray = exact.step(action.item()), gray_first.step(action.item())
        assert (reward.item(), terminated.item(), truncated.item(), lives[0]) == expected[1:5], f"step {step}"
        if "episode" in info:
            assert info["_episode"].item()
            games.append((info["episode"]["r"].item(), info["episode"]["l"].item()))
        expected_games += expected.games
        pixels.append(difference(obs, expected.obs, expected_gray.obs))
    assert games == expected_games
    largest, share, largest_gray_first = zip(*pixels)
    assert max(largest_gray_first) <= 1  # rounding
    assert max(largest) <= 43
    assert np.mean(share) <= 0.02  # 0.018 in the dense traffic of this Freeway
    if steps == 500:
        assert len(games) >= 1 and sum(result[2].item() for result in results) > len(games)


def difference(ours, exact, gray_first) -> tuple[int, float, int]:
    """Returns the largest difference to the official pixels, the share of those off, and the largest to gray first."""
    off = np.abs(ours[0].astype(int) - exact)
    return off.max().item(), (off > 1).mean().item(), np.abs(ours[0].astype(int) - gray_first).max().item()


def test_stream_depends_on_the_seed_of_the_sub_environment_alone():
    levels = (BREAKOUT, "pong", "breakout")
    settings = {"all_actions": True}
    together = play(make(*levels, **settings), 100, [11, 12, 13])
    for i, seed in enumerate((11, 12, 13)):
        alone = play(make(levels[i], **settings), 100, [seed])
        assert all(np.array_equal(a[0][0], b[0][i]) for a, b in zip(alone, together))
        assert [[x.item() for x in a[1:4]] for a in alone[1:]] == [[x[i].item() for x in b[1:4]] for b in together[1:]]
    other = play(make(levels[0], **settings), 100, [14])
    assert not np.array_equal(other[50][0][0], together[50][0][0])


@pytest.mark.detail(14)
def test_noops():
    """Every number from 1 to 30 comes up about as often; the level draws it from its own stream."""
    envs = make("pong")
    envs.reset(seed=[3])
    level = envs.levels[0]
    for _ in range(300):
        level.game_over = True
        level.start_episode()
    drawn = noops(level.emulator.calls)
    assert drawn == [count for count, _ in zip(counts_of(3), range(301))]
    assert min(drawn) == 1 and max(drawn) == 30
    assert np.bincount(drawn)[1:].min() >= 1 and np.bincount(drawn).max() <= 25  # 10 expected


@pytest.mark.detail(15)
def test_frame_skip():
    """Four frames an action, and a frame that is the maximum of the last two screens."""
    envs = make("pong")
    play(envs, 60, [1])
    level, recorder = envs.levels[0], envs.levels[0].emulator
    before, screens = recorder.getEpisodeFrameNumber(), []
    act = recorder.emulator.act

    class Filmed:
        def __getattr__(self, name):
            return getattr(recorder.emulator, name)

        def act(self, action):
            reward = act(action)
            screens.append(recorder.emulator.getScreenGrayscale())
            return reward

    level.emulator = Filmed()
    frame, _ = level.play(ale_py.Action.UP)
    assert recorder.getEpisodeFrameNumber() - before == len(screens) == 4
    assert np.array_equal(frame, ppo.shrink(np.maximum(screens[2], screens[3])))
    assert not np.array_equal(frame, ppo.shrink(screens[3])) and not np.array_equal(frame, ppo.shrink(screens[2]))


@pytest.mark.detail(16)
def test_a_lost_life_is_terminal_but_the_game_goes_on():
    results = play(make("breakout"), 400, [5])[1:]
    lives = [result[4][0] for result in results]
    ends = [step for step, result in enumerate(results) if result[2].item()]
    games = [step for step, result in enumerate(results) if "episode" in result[5]]
    assert games and set(games) < set(ends)
    assert [lives[step] for step in ends if step <= games[0]] == [4, 3, 2, 1, 5]
    assert not any(result[3].item() for result in results)


@pytest.mark.detail(17)
@pytest.mark.parametrize("all_actions", [False, True])
@pytest.mark.parametrize(
    "game, start", [("breakout", ["FIRE", "RIGHT"]), ("beam_rider", ["FIRE", "UP"]), ("freeway", [])]
)
def test_hidden_steps(game, start, all_actions):
    """After a game over the fire reset, by name in every action set; after a lost life a no-op before it."""
    envs = make(game, all_actions=all_actions)
    _, *results = play(envs, 300, [2])
    names = [action.name for action in ppo.study_game(game)["all" if all_actions else "useful"]]
    expected = [*start]
    for *_, terminated, _, _, info, actions in results:
        lost = ["NOOP"] * bool(terminated.item() and "episode" not in info)
        expected += [names[actions.item()], *lost, *(start if terminated.item() else [])]
    calls = envs.levels[0].emulator.calls
    taken = " ".join(calls) + " "
    for count in noops(calls):
        taken = taken.replace("reset " + "NOOP " * count, "", 1)
    assert taken.split() == [name for name in expected for _ in range(4)]
    assert game != "breakout" or len(expected) > 2 + 300 + 3 * 3  # lives were lost, too


@pytest.mark.detail(17)
def test_fire_reset_serves_the_ball():
    """With no-ops alone, Breakout loses lives all the time: the agent never has to serve."""
    envs = make(BREAKOUT, "pong")
    envs.reset(seed=[1, 2])
    ends = [step for step in range(150) if envs.step(np.array([0, 0]))[2][0]]
    assert len(ends) >= 4
    assert np.diff(ends).max() <= 30


class Scripted:
    """Stands for an emulator; each action of four frames gives (reward, game over, lives) in turn."""

    def __init__(self, *steps) -> None:
        self.steps, self.calls, self.frames, self.outcome = list(steps), [], 0, (0, False, 3)

    def __getattr__(self, name):
        return lambda *_: None

    def reset_game(self):
        self.calls.append("reset")
        self.outcome, self.frames = (0, False, 3), 0

    def act(self, action):
        if self.calls[-1] == "reset" and action == ale_py.Action.NOOP:
            return 0  # no-ops at the start
        self.frames += 1
        if self.frames % 4 != 1:
            return 0
        self.calls.append(action.name)
        self.outcome = self.steps.pop(0)
        return self.outcome[0]

    def game_over(self):
        return self.outcome[1]

    def lives(self):
        return self.outcome[2]

    def getScreenGrayscale(self, *_):
        return np.ones((210, 160), np.uint8)


@pytest.mark.detail(16)
@pytest.mark.detail(17)
def test_ends_within_hidden_steps():
    """A life or a game that ends in a hidden step is booked there, and the hidden steps that are left are taken."""
    envs = make("breakout")
    start, lost = [(0, False, 3)] * 2, [(0, False, 2), (0, False, 2), (2, False, 1), (0, False, 1), (1, True, 0)]
    envs.levels[0].emulator = emulator = Scripted(*start, (5, False, 3), *lost, (7, False, 3))
    envs.reset(seed=[0])
    outcomes = [envs.step(np.array([3])) for _ in range(3)]
    expected = "reset FIRE RIGHT LEFT LEFT NOOP FIRE NOOP RIGHT reset LEFT"
    assert " ".join(emulator.calls) == expected
    assert [outcome[1].item() for outcome in outcomes] == [1, 0, 1]
    assert [outcome[2].item() for outcome in outcomes] == [False, True, False]
    assert ["_episode" in outcome[4] for outcome in outcomes] == [False, True, False]
    assert outcomes[1][4]["episode"]["r"].item() == 8
    assert outcomes[1][4]["episode"]["l"].item() == 8  # all steps since the reset, hidden ones included
    assert envs.levels[0].score == 7 and envs.levels[0].length == 1


@pytest.mark.detail(16)
def test_the_last_life_ends_with_the_game():
    """Some games show 0 lives for a while; their episode ends with the game. An extra life ends none."""
    envs = make("ms_pacman")
    steps = (0, False, 4), (0, False, 1), (0, False, 1), (0, False, 0), (0, False, 0), (0, True, 0)
    envs.levels[0].emulator = Scripted(*steps)
    envs.reset(seed=[0])
    assert [envs.step(np.array([3]))[2].item() for _ in range(5)] == [False, True, False, False, True]


@pytest.mark.detail(18)
@pytest.mark.parametrize("level", ["freeway?mode=1", "ms_pacman?mode=3"])  # without FIRE
def test_image(level):
    """The screen right after a reset, where nothing is pooled, is ALE's gray screen averaged by area."""
    envs = make(level)
    obs, _ = envs.reset(seed=[1])
    screen = envs.levels[0].screens[0]
    expected = area(210, 84) @ screen @ area(160, 84).T
    assert obs.shape == (1, 84, 84, 4) and obs.dtype == np.uint8
    assert np.abs(obs[0, ..., -1] - expected).max() < 0.51
    assert expected.std() > 10
    assert np.abs(gray(envs.levels[0].emulator.getScreenRGB()).astype(int) - screen).max() <= 1


@pytest.mark.detail(18)
@pytest.mark.parametrize("height, width", [(210, 160), (250, 160), (224, 320), (64, 64), (84, 84)])
def test_frames_of_any_size(height, width):
    """Noise, where every share of every pixel counts; equal to the average by area but for the rounding of halves."""
    screen = np.random.default_rng(0).integers(0, 256, (height, width), np.uint8)
    expected = area(height, 84) @ screen @ area(width, 84).T
    assert np.abs(ppo.shrink(screen) - expected).max() < 0.501
    assert ppo.shrink(screen).shape == (84, 84)


@pytest.mark.detail(19)
def test_rewards_are_signs_and_scores_are_raw():
    results = play(envs := make("ms_pacman?mode=2"), 300, [7])[1:]
    rewards = np.array([result[1].item() for result in results])
    assert set(rewards) == {0, 1}
    score = envs.levels[0].score
    assert score >= 10 * rewards.sum() >= 50 and score % 10 == 0


@pytest.mark.detail(20)
@pytest.mark.parametrize("frames", [1, 4])
def test_frame_stack(frames):
    """The newest frame comes last; zeros stand before the first one of an episode, after every end."""
    results = play(make("breakout", BREAKOUT, frame_stack=frames), 150, [1, 2])
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


def test_time_limit():
    """Truncated, not terminated, after 108,000 frames; score and length start anew; final_obs is the last stack."""
    envs = make("pong")
    envs.reset(seed=[1])
    level = envs.levels[0]
    level.length = 108_000 // 4 - 2
    first = envs.step(np.array([0]))
    kept = first[0].copy()
    assert not first[3].item()
    obs, _, terminated, truncated, info = envs.step(np.array([0]))
    assert truncated.item() and not terminated.item()
    assert info["episode"]["l"].item() == 27_000 and level.length == 2  # the fire reset of the next game
    assert np.array_equal(info["final_obs"][0, ..., :-1], kept[0, ..., 1:])
    assert info["final_obs"][0, ..., -1].any() and not obs[0, ..., :-1].any()


@pytest.mark.parametrize("name", ["ALE/Breakout-v5", "BreakoutNoFrameskip-v4", "Breakout-v4", "Breakout-v0"])
def test_every_spelling_is_one_protocol(name):
    assert ppo.parse_level(f"{name}?mode=4&difficulty=1") == ppo.parse_level(BREAKOUT)
    (first,), *rest = play(make(f"{name}?mode=8"), 30, [9])
    (expected,), *expected_rest = play(make("breakout?mode=8"), 30, [9])
    assert np.array_equal(first, expected)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(rest, expected_rest))


def test_modes_and_difficulties_are_other_games():
    frames = [play(make(level), 60, [4]) for level in ("breakout", "breakout?mode=0", "breakout?mode=12")]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(frames[0], frames[1]))
    assert not np.array_equal(frames[0][40][0], frames[2][40][0])
    easy, hard = (play(make(f"freeway?difficulty={k}"), 60, [4]) for k in (0, 1))
    assert not all(np.array_equal(a[0], b[0]) for a, b in zip(easy, hard))


REFUSED = {
    "ALE/PongNoFrameskip-v4": "PongNoFrameskip-v4",
    "Pong-v5": "ALE/Pong-v5",
    "": "at least one level",
    "Pong": "did you mean pong",
    "CartPole-v1": "ppo_classic.py",
    "HalfCheetah-v5": "ppo_continuous.py",
    "HalfCheetah-v5?mode=1": "unexpected keyword argument 'mode'",
    "nowhere:Nothing-v0": "No module named 'nowhere'",
    "breakout?mode=3": "no such mode; breakout has 0 4 8 12 16 20 24 28 32 36 40 44",
    "ALE/Pong-v5?difficulty=4": "no such difficulty; pong has 0 1 2 3",
    "pong?mode=one": "pong has 0 1",
    "pong?mode": "pong has 0 1",
    "pong?frameskip=2": "frameskip is no option; mode and difficulty are",
}


@pytest.mark.parametrize("level", REFUSED)
def test_what_can_not_be_had_is_refused(level, tmp_path):
    with pytest.raises(ppo.UsageError, match="--levels") as error:
        ppo.train(quick_args(ppo, tmp_path, env_id=level))
    assert REFUSED[level] in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_one_action_set():
    """That of the only game, whatever its modes; all 18 for several games, --test-levels included; in one order."""
    names = [action.name for action in ppo.study_game("breakout")["all"]]
    assert len(names) == 18 and names[:6] == ["NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN"]
    assert make("breakout", BREAKOUT).single_action_space.n == 4
    assert make("breakout", BREAKOUT, all_actions=True).single_action_space.n == 18
    assert make("skiing").single_action_space.n == 3
    mixed = make("breakout", "pong", "ms_pacman")
    assert mixed.single_action_space.n == 18
    assert [[action.name for action in level.actions] for level in mixed.levels] == [names] * 3
    assert [level.start for level in mixed.levels] == [[1, 3], [1, 3], []]  # RIGHT in breakout and pong, by name
    assert make("breakout", test_levels=("pong",)).single_action_space.n == 18
    with pytest.raises(ppo.UsageError, match=r"--levels skiing: lacks 9 of 18 actions"):
        make("pong", "skiing")


@pytest.mark.parametrize("actions", [[18], [-1], [99], [0, 0], [1.5]])
def test_illegal_actions_never_reach_the_emulator(actions):
    envs = make("breakout", all_actions=True)
    envs.reset(seed=[1])
    sent = len(envs.levels[0].emulator.calls)
    with pytest.raises(ValueError):
        envs.step(np.array(actions))
    assert len(envs.levels[0].emulator.calls) == sent


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


def test_who_plays_what(monkeypatch):
    """Five levels on 2 workers x 4 sub-environments: the number over all workers decides."""
    monkeypatch.setattr(ppo, "WORKERS", 2)
    args = ppo.Args(levels=("a", "b", "c", "d", "e"), num_envs=4)
    assert [ppo.assign_levels(args, worker) for worker in range(2)] == [["a", "b", "c", "d"], ["e", "a", "b", "c"]]
    assert args.batch_size == 2 * 4 * 128 and args.num_iterations == 10_000_000 // 1024 and args.minibatch_size == 128
    with pytest.raises(
        ppo.UsageError, match=r"9 levels, but 2 workers x --num-envs 4 play them; use --num-envs 5 or more workers"
    ):
        ppo.Args(levels=tuple("abcdefghi"), num_envs=4)


def test_levels_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "levels.txt").write_text("\ufeffbreakout?mode=0\n# two\n  # modes\n\n  breakout?mode=4  \n", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert ppo.Args(levels=("@levels.txt", "pong")).levels == ("breakout?mode=0", "breakout?mode=4", "pong")
    with pytest.raises(ppo.UsageError, match=r"nowhere.txt.*a level in each line"):
        ppo.Args(levels=("@nowhere.txt",))
    with pytest.raises(ppo.UsageError, match="--levels: 0 levels"):
        ppo.Args(levels=())


def test_curves_and_evaluation_of_every_level(tmp_path):
    """Raw scores of each level, their mean, and the mean over all episodes; levels that are only tested, too."""
    levels, test_levels = ("breakout?mode=0", BREAKOUT), ("breakout?mode=8",)
    settings = {"levels": levels, "test_levels": test_levels, "num_envs": 2, "num_steps": 64, "total_timesteps": 768}
    settings |= {"update_epochs": 1, "eval_episodes": 2, "run_dir": str(tmp_path), "device": "cpu"}
    result = ppo.train(ppo.Args(**settings))
    curves = read_curves(result["run_folder"])
    means = {name: [point.value for point in curve] for name, curve in curves.items()}
    for level in levels:
        assert means[f"charts/episodic_return/{level}"], level
        assert means[f"eval/episodic_return/{level}"] == [pytest.approx(np.mean(result["evaluation"][level]))]
    assert f"charts/episodic_return/{test_levels[0]}" not in means
    assert list(result["evaluation"]) == [*levels, *test_levels]
    assert all(len(returns) == 2 for returns in result["evaluation"].values())
    assert result["eval_returns"] == [x for level in levels for x in result["evaluation"][level]]
    assert means["eval/episodic_return"] == [pytest.approx(np.mean(result["eval_returns"]))]


def test_mean_of_all_episodes(tmp_path, capsys):
    run = ppo.Run(quick_args(ppo, tmp_path, levels=("a", "b")), ppo.gym.vector.VectorEnv(), None, 0, {})
    run.ended = [("a", 1.0, 3), ("b", 5.0, 5)]
    run.log(1, 0.1, {})
    run.ended = [("a", 3.0, 3)] * 100
    run.log(2, 0.1, {})
    assert run.recent_return() == (3 + 5) / 2  # the mean over levels of the last 100 episodes
    result = run.finish(None, 2, ())
    run.writer.flush()
    assert "return 3.00 in the mean of all 102 episodes" in capsys.readouterr().out
    assert result["episodic_return"] == 4.0
    curves = read_curves(run.folder)
    assert [point.value for point in curves["charts/episodic_return/a"]] == [1, 3]
    assert [point.value for point in curves["charts/episodic_return/b"]] == [5]
    assert [point.value for point in curves["charts/episodic_return"]] == [3, 3]


def test_init(tmp_path):
    """Another run's weights, a fresh optimizer, from step 0; another network is refused, with what would help."""
    first = ppo.train(quick_args(ppo, tmp_path, num_steps=4, num_minibatches=2))["run_folder"]
    old = torch.load(first / "checkpoint.pt", weights_only=True)
    changes = {"env_id": "breakout?mode=8", "num_steps": 4, "learning_rate": 0.0}
    result = ppo.train(quick_args(ppo, tmp_path, init=str(first), **changes))
    new = torch.load(result["run_folder"] / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(old["agent"][name], new["agent"][name]) for name in old["agent"])
    assert new["global_step"] == 16 and new["args"]["init"] == str(first)
    steps = {state["optimizer"]["param_groups"][0]["steps"] for state in (old, new)}
    assert steps == {2 * 4 * 2}  # both took as many: the second did not go on counting
    with pytest.raises(ppo.UsageError, match=f"(?s)--init {first}: .*another network.*--all-actions"):
        ppo.train(quick_args(ppo, tmp_path, env_id="pong", num_steps=4, init=str(first)))
    with pytest.raises(ppo.UsageError, match="--init nowhere: no checkpoint"):
        ppo.train(quick_args(ppo, tmp_path, init="nowhere"))


def test_resume_with_another_number_of_workers(tmp_path, monkeypatch):
    """Steps count, not iterations: 4 iterations of one worker are 2 of two."""
    args = quick_args(ppo, tmp_path, 4, num_steps=4)
    folder = ppo.train(args)["run_folder"]
    iterations = []
    monkeypatch.setattr(ppo, "WORKERS", 2)
    monkeypatch.setattr(ppo, "join_workers", lambda agent: None)
    log = ppo.Run.log
    monkeypatch.setattr(ppo.Run, "log", lambda self, i, *rest: iterations.append(i) or log(self, i, *rest))
    result = ppo.train(dataclasses.replace(args, resume=str(folder), total_timesteps=2 * args.total_timesteps))
    assert iterations == [3, 4] and result["global_step"] == 64


def test_resume_is_judged_by_the_workers_of_now(tmp_path, monkeypatch, capsys):
    """Not what was right for the workers of then counts, but the command line of now."""
    folder = ppo.train(quick_args(ppo, tmp_path, 4, num_steps=4))["run_folder"]
    monkeypatch.setattr(ppo, "WORKERS", 8)
    with pytest.raises(SystemExit):
        ppo.parse_args(["--resume", str(folder)])
    assert "--total-timesteps 32: must be at least 8 times" in capsys.readouterr().err
    args = ppo.parse_args(["--resume", str(folder), "--total-timesteps", "1280"])
    assert (args.total_timesteps, args.num_steps, args.num_iterations) == (1280, 4, 20)


def test_ray_is_for_the_command_line(tmp_path):
    with pytest.raises(ppo.UsageError, match=r"--ray-workers 2: only the command line starts workers"):
        ppo.train(quick_args(ppo, tmp_path, ray_workers=2, total_timesteps=4096))
    with pytest.raises(ppo.UsageError, match=r"--ray-address auto: needs --ray-workers"):
        ppo.Args(ray_address="auto")
    assert list(tmp_path.iterdir()) == []


def test_video_shows_one_game_in_color(tmp_path):
    from moviepy import VideoFileClip

    args, agent = ppo.Args(levels=(BREAKOUT,)), ppo.Agent(ppo.Box(0, 255, (84, 84, 4), np.uint8), ppo.Discrete(4))
    plain = ppo.evaluate(agent, args, BREAKOUT, [5, 6], ())
    film = tmp_path / "videos" / "game"
    assert ppo.evaluate(agent, args, BREAKOUT, [5, 6], (), film) == plain  # the camera changes nothing
    assert sorted(path.name for path in film.parent.iterdir()) == ["game-0.mp4", "game-1.mp4"]
    with VideoFileClip(f"{film}-0.mp4") as clip:
        assert clip.size == [160, 210] and clip.fps == 15 and clip.n_frames >= 50
        frames = np.stack([clip.get_frame(second) for second in (1, 3)]).astype(int)
    assert np.abs(frames[..., 0] - frames[..., 2]).max() > 50  # red is not blue
    assert (frames[0] != frames[1]).any()


def test_help_is_for_a_worker(tmp_path):
    command = [sys.executable, str(ROOT / "ppo_joint.py"), "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    words = re.sub(r"[\s│]+", " ", result.stdout)
    assert "sub-environments that each worker steps together" in words and "of all workers" in words
    assert list(Path(tmp_path).iterdir()) == []
