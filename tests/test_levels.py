"""Levels of ppo_joint.py that are no Atari games: any gymnasium environment with images, stable-retro, Procgen."""

import importlib.util
import subprocess
import sys

import ale_py
import numpy as np
import pytest
from atari_reference import area, gray
from helpers import ROOT, load, quick_args
from test_command_line import read_curves

ppo = load("ppo_joint")
SCREEN = "toy_levels:Screen-v0"
AIRSTRIKER = "retro:Airstriker-Genesis-v0?state=Level1"
needs_retro = pytest.mark.skipif(importlib.util.find_spec("stable_retro") is None, reason="stable_retro is missing")


def make(*levels, **settings):
    return ppo.make_envs(ppo.Args(levels=levels, **settings), levels)


def test_an_environment_as_a_level():
    """Frames, signs of rewards, raw returns, ends, and the first frame of the next episode."""
    envs = make(SCREEN, f"{SCREEN}?channels=0&length=2&cut=True", frame_stack=2)
    assert envs.single_action_space.n == 5
    obs = envs.reset(seed=[1, 2])[0].copy()
    first = [np.random.default_rng(seed).integers(100) for seed in (1, 2)]
    assert obs.shape == (2, 84, 84, 2) and not obs[..., 0].any()
    assert [set(np.unique(obs[i, ..., 1])) for i in range(2)] == [{first[0]}, {first[1]}]
    results = []
    for actions in ([1, 2], [3, 4], [0, 1]):
        obs, rewards, terminated, truncated, info = envs.step(np.array(actions))
        results.append((obs[:, 0, 0].tolist(), rewards.tolist(), terminated.tolist(), truncated.tolist(), info))
    assert [x[1] for x in results] == [[1, 1]] * 3
    assert [x[2] for x in results] == [[False, False], [False, False], [True, False]]
    assert [x[3] for x in results] == [[False, False], [False, True], [False, False]]
    assert results[0][0] == [[first[0], 101], [first[1], 102]]
    assert results[1][0][0] == [101, 103] and results[1][0][1][0] == 0
    assert results[1][4]["final_obs"][1, 0, 0].tolist() == [102, 104]
    assert results[1][4]["episode"]["r"][1] == 7.5 and results[1][4]["_episode"].tolist() == [False, True]
    assert results[2][4]["final_obs"][0, 0, 0].tolist() == [103, 100]
    assert results[2][4]["episode"]["r"][0] == 15 and results[2][4]["episode"]["l"][0] == 3
    processes = [level.env.processes[0] for level in envs.levels]
    assert all(process.is_alive() for process in processes)
    envs.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.detail(18)
@pytest.mark.parametrize("height, width", [(224, 320), (64, 64)])
def test_color_becomes_gray(height, width):
    screen = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    expected = area(height, 84) @ gray(screen) @ area(width, 84).T
    assert np.abs(ppo.shrink(screen) - expected).max() < 1.1
    assert np.array_equal(ppo.shrink(screen[..., :1]), ppo.shrink(screen[..., 0]))


def test_values_of_options():
    level = "module:Id-v0?a=3&b=easy&c=True&d=0.5&e=None&f=x=y"
    options = {"a": 3, "b": "easy", "c": True, "d": 0.5, "e": None, "f": "x=y"}
    assert ppo.parse_level(level) == ("module:Id-v0", options)


REFUSED = {
    f"{SCREEN}?channels=2": "must have uint8 images",
    f"{SCREEN}?start=1": "must have uint8 images and Discrete actions",
    f"{SCREEN}?speed=1": "unexpected keyword argument 'speed'",
    "toy_levels:Nothing-v0": "Nothing",
    "Acrobot-v1": "ppo_classic.py",
    "retro:Airstriker?state=Level1": "no ROM; import yours for Airstriker-Genesis-v0",
    "retro:SonicTheHedgehog-Genesis-v0?state=GreenHillZone.Act1": "python -m stable_retro.import FOLDER",
    "retro:Airstriker-Genesis-v0?state=Level2": "there is no Level2; the game has Level1",
    "retro:Airstriker-Genesis-v0?state=nowhere.state": "there is no nowhere.state; the game has Level1",
    "retro:Airstriker-Genesis-v0?scenario=contest": "there is no contest; the game has scenario",
    "retro:Airstriker-Genesis-v0?mode=1": "unexpected keyword argument 'mode'",
}


@pytest.mark.parametrize("level", REFUSED)
@pytest.mark.parametrize("setting", ["env_id", "test_levels"])
def test_what_can_not_be_had_is_refused(level, setting, tmp_path):
    if level.startswith("retro:"):
        pytest.importorskip("stable_retro")
    with pytest.raises(ppo.UsageError, match="--levels") as error:
        ppo.train(quick_args(ppo, tmp_path, **{setting: level if setting == "env_id" else (level,)}))
    assert REFUSED[level] in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [f"{SCREEN}?actions=7", "breakout"])
def test_other_actions_are_refused(other):
    with pytest.raises(ppo.UsageError, match=r"--levels .*: lacks \d+ of \d+ actions; train it alone"):
        make(SCREEN, other)


@needs_retro
def test_retro_plays_with_atari():
    """One action set of 18; the other level's stream is the same as alone."""
    envs, alone = make(AIRSTRIKER, "breakout"), make("breakout", all_actions=True)
    assert envs.single_action_space.n == alone.single_action_space.n == 18
    obs, expected = envs.reset(seed=[1, 2])[0], alone.reset(seed=[2])[0]
    for action in range(18):
        assert np.array_equal(obs[1], expected[0]) and obs[0, ..., -1].std() > 1
        obs, expected = envs.step(np.array([action, action]))[0], alone.step(np.array([action]))[0]
    envs.close()


@needs_retro
@pytest.mark.parametrize("sticky_actions", [0.0, 0.25])
def test_retro_depends_on_the_seed_alone(sticky_actions):
    """No-ops and sticky actions make games differ; an episode ends after three lives, with its raw score."""
    plays = []
    for seeds in ([1, 2], [1, 1]):
        envs = make(AIRSTRIKER, AIRSTRIKER, sticky_actions=sticky_actions)
        draws, frames, games, signs = np.random.default_rng(0), [envs.reset(seed=seeds)[0].copy()], [], np.zeros(2)
        for _ in range(600):
            obs, rewards, _, truncated, info = envs.step(draws.integers(18, size=1).repeat(2))
            frames.append(obs[..., -1].copy())
            signs += rewards * (not games)
            assert not truncated.any() and set(rewards) <= {-1, 0, 1}
            if "episode" in info:
                games.append((info["episode"]["r"].tolist(), info["episode"]["l"].tolist()))
        envs.close()
        assert games and signs.max() >= 1 and max(games[0][0]) >= 10 * signs.max() > 0
        plays.append(np.stack(frames[1:]))
    first, same = plays
    assert np.array_equal(first[:, 0], same[:, 0]) and np.array_equal(same[:, 0], same[:, 1])
    assert not np.array_equal(first[:, 0], first[:, 1])


def fake_game(monkeypatch):
    """Puts a machine that records what it gets in place of stable-retro's; returns its records."""
    import stable_retro

    calls = []

    class Game(ppo.gym.Env):
        observation_space, action_space = ppo.Box(0, 255, (8, 8, 3), np.uint8), ppo.gym.spaces.MultiBinary(8)
        buttons = ("B", None, "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT")
        render_mode = "rgb_array"

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            calls.append("reset")
            return np.zeros((8, 8, 3), np.uint8), {}

        def step(self, action):
            calls.append([name for name, pressed in zip(self.buttons, action, strict=True) if pressed])
            return np.full((8, 8, 3), len(calls) % 200, np.uint8), 3.0, False, False, {}

    monkeypatch.setattr(stable_retro, "make", lambda *args, **options: calls.append((args, options)) or Game())
    return calls


@needs_retro
def test_retro_details(monkeypatch, tmp_path):
    """1 to 30 no-ops, four frames a step, the maximum of the last two, 108,000 frames at most; the pad by name."""
    calls = fake_game(monkeypatch)
    actions = ppo.study_game("breakout")["all"]
    state = tmp_path / "later.state"
    state.touch()
    game = ppo.make_retro("Airstriker-Genesis-v0", actions, 0.0, state=str(state))
    assert calls.pop()[0] == ("Airstriker-Genesis-v0", str(state))
    counts = []
    for seed in range(60):
        game.reset(seed=seed)
        counts.append(len(calls) - 1)
        assert calls[0] == "reset" and calls[1:] == [[]] * counts[-1]
        calls.clear()
    assert min(counts) >= 1 and max(counts) <= 30 and len(set(counts)) > 20
    for number, action in enumerate(actions):
        obs, reward, *ended, _ = game.step(number)
        pressed = [name for name in ("UP", "DOWN", "LEFT", "RIGHT") if name in action.name]
        assert calls[-4:] == [["B"] * ("FIRE" in action.name) + pressed] * 4
        assert reward == 12 and not any(ended)
    assert actions[17] == ale_py.Action.DOWNLEFTFIRE and calls[-1] == ["B", "DOWN", "LEFT"]
    assert obs.max() == len(calls) % 200
    game._elapsed_steps = 26_998
    assert [game.step(0)[3] for _ in range(2)] == [False, True]


@needs_retro
def test_retro_sticky_actions(monkeypatch):
    calls = fake_game(monkeypatch)
    game = ppo.make_retro("Airstriker-Genesis-v0", ppo.study_game("breakout")["all"], 0.25)
    game.reset(seed=1)
    calls.clear()
    for step in range(1000):
        game.step(1 + step % 2)  # FIRE and UP
    wrong = np.mean([call != (["UP"] if k // 4 % 2 else ["B"]) for k, call in enumerate(calls)])
    assert 0.05 < wrong < 0.11  # a quarter of the first frames, a sixteenth of the second, ...: 1/12 in all


def run(tmp_path, *flags, path=ROOT / "docs" / "examples"):
    environment = {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    size = ["--num-envs", "2", "--num-steps", "16", "--total-timesteps", "96", "--eval-episodes", "1"]
    command = [sys.executable, str(ROOT / "ppo_joint.py"), *size, *flags]
    pipes = {"capture_output": True, "text": True, "timeout": 400, "check": False}
    result = subprocess.run(command, cwd=tmp_path, env=ppo.os.environ | environment, **pipes)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_training_and_film(tmp_path):
    """Curves of each level, evaluation on another one; the film shows nothing of the frames' size."""
    levels = [f"{SCREEN}?length=3", f"{SCREEN}?length=5"]
    output = run(tmp_path, "--levels", *levels, "--test-levels", f"{SCREEN}?length=4", path=ROOT / "tests")
    (folder,) = (tmp_path / "runs").iterdir()
    curves = read_curves(folder)
    assert [point.value for point in curves[f"charts/episodic_return/{levels[0]}"]] == [15.0] * 3
    assert [point.value for point in curves[f"charts/episodic_return/{levels[1]}"]] == [37.5] * 3
    assert f"evaluation of {SCREEN}?length=4: return 25.0 +- 0.0 (1 episodes)" in output


@needs_retro
def test_retro_film(tmp_path):
    run(tmp_path, "--levels", AIRSTRIKER, "--capture-video")
    (film,) = tmp_path.glob("runs/*/videos/**/*.mp4")
    from moviepy import VideoFileClip

    with VideoFileClip(str(film)) as clip:
        assert clip.size == [320, 224] and clip.fps == 15 and clip.n_frames >= 50
