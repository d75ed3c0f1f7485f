"""Joint PPO: one policy learns many levels at once, and several workers average their gradients.

    python ppo_joint.py --levels "breakout?mode=0" "breakout?mode=4"         # every flag: --help
    torchrun --nproc-per-node 2 ppo_joint.py --levels @levels.txt            # two workers; a level in each line
    torchrun --nproc-per-node 4 ppo_joint.py --resume runs/RUN_FOLDER        # with any number of workers
    python ppo_joint.py --levels @levels.txt --ray-workers 188 --ray-address auto    # on a Ray cluster
    python ppo_joint.py --levels "breakout?mode=8" --init runs/RUN_FOLDER    # what is it worth in a new level?

Workers are processes, on one machine or several: each plays levels of its own, all take the same gradient steps. This
is how PPO1 and PPO2 ran under MPI; with many levels it is Joint PPO, which won the OpenAI Retro Contest of 2018. The
contest's measure is printed at the end: the mean return of all episodes of a training that --init starts on new levels.
A level is an Atari game, a state of a stable-retro game (retro:GAME?state=STATE), or any gymnasium environment with
images and Discrete actions, such as Procgen's (module:id?name=value&...): docs/joint.md.

What to expect: the return in four modes of Breakout rises from 1 to between 8 and 12 in 300k steps, 23 minutes on a
core. In a fifth mode it then returns 28 at once; 100k steps there, in the mean of all episodes, 27.9, without it 12.0.

The file follows the official implementation (openai/baselines, ppo2) in every detail that matters, each marked at its
line:

     1 vectorized architecture          8 clipped surrogate objective    16 episodic life
     2 orthogonal initialization        9 value loss clipping            17 fire reset
     3 Adam's epsilon                  10 overall loss, entropy bonus    18 image transformation
     4 learning rate annealing         11 global gradient clipping       19 reward clipping
     5 generalized advantages          12 debug variables                20 frame stacking
     6 minibatch updates               14 no-op reset                    21 shared Nature-CNN network
     7 advantage normalization         15 frame skipping                 22 scaling of the images
     Auxiliary: 1 clip range annealing (--anneal-clip), 2 parallel gradient update, 3 early stopping (--target-kl)

Read AtariLevel, Levels and Agent, then gae() to train(). Shapes: T = num_steps, N = num_envs of one worker, B = batch.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "gymnasium>=1.4", "ale-py>=0.12", "numpy>=2.0", "tensorboard>=2.21", "tyro>=1.0", "tqdm>=4.66",
# ]
# ///

import argparse
import ast
import contextlib
import difflib
import functools
import importlib.util
import io
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl

os.environ.setdefault("GOMP_SPINCOUNT", "50000")  # torch's idle threads soon leave their cores to the emulators
import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.spaces import Box, Discrete
from torch import Generator, Tensor, distributed, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Array = np.ndarray
ATARI = ale_py.roms.get_all_rom_ids()
# What torchrun tells a worker, and train_on_ray, too: its number, how many there are, and the same on this machine
RANK, WORKERS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK, LOCAL_WORKERS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
LAUNCHED = "RANK" in os.environ
THREADS = torch.get_num_threads() if LOCAL_WORKERS == 1 else max(1, (os.cpu_count() or 1) // LOCAL_WORKERS)


class UsageError(ValueError):
    """Bad input: the message names the flag and a value that would work."""


class LostWorker(RuntimeError):
    """Another worker does not answer any more."""


@dataclass(frozen=True)
class Args:
    levels: tuple[str, ...] = ("ALE/Breakout-v5",)  # such as breakout, ALE/Pong-v5?mode=1, retro:GAME?state=..., @file
    test_levels: tuple[str, ...] = ()  # levels that are evaluated after training, too, but not trained on
    all_actions: bool = False  # all 18 actions even for one game: needed to --init it from a run on several games
    init: str | None = None  # run folder (or its checkpoint.pt) of another run whose weights are the start
    total_timesteps: int = 10_000_000  # environment steps in all, over all sub-environments of all workers
    learning_rate: float = 2.5e-4  # Adam's step size at the start
    num_envs: int = 8  # sub-environments that each worker steps together (N)
    num_steps: int = 128  # steps per sub-environment and iteration (T)
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch, of each worker's own samples
    update_epochs: int = 4  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize advantages within each minibatch of each worker
    clip_coef: float = 0.1  # clip range of the probability ratio and of the value
    clip_vloss: bool = True  # clip the value loss
    anneal_clip: bool = False  # lower clip_coef linearly to 0
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest global norm of the gradient
    target_kl: float | None = None  # stop the epochs once an epoch's mean KL exceeds this; None: off
    bootstrap_truncated: bool = False  # at time limits, bootstrap the value instead of treating them as terminal
    frame_stack: int = 4  # frames that the agent sees at once
    sticky_actions: float = 0.0  # probability that the emulator repeats the last action; 0.25 in later literature
    seed: int = 1  # seed of weights, actions, minibatches and environments
    device: str = "auto"  # auto (cuda if there, one for each worker, else cpu) or any torch device
    threads: int = THREADS  # CPU threads of torch in each worker
    bf16: bool = False  # run the CNN in bfloat16: faster on GPUs, and on CPUs with AVX-512 BF16 or AMX
    compile: bool = False  # compile the loss and its gradient (about a minute at the start)
    track: bool = False  # log to Weights & Biases too
    capture_video: bool = False  # record the evaluation episodes
    eval_episodes: int = 10  # episodes of each level in the evaluation after training; 0: none
    checkpoint_every: int = 100  # iterations between checkpoints; 0: only at the end
    resume: str | None = None  # run folder (or its checkpoint.pt) to continue; every machine must see it
    run_dir: str = "runs"  # where run folders are made
    ray_workers: int = 0  # workers that Ray starts, if torchrun does not; 0: none
    ray_address: str | None = None  # of the Ray cluster, or auto; None: a cluster of this machine alone, for this run

    @property
    def workers(self) -> int:
        return WORKERS if LAUNCHED else self.ray_workers or WORKERS

    @property
    def batch_size(self) -> int:
        return self.workers * self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.num_envs * self.num_steps // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self) -> None:
        def check(names: str, valid: Callable[[Any], bool], rule: str) -> None:
            for name in names.split():
                if not valid(value := getattr(self, name)):
                    flag, default = name.replace("_", "-"), getattr(Args, name)
                    raise UsageError(f"--{flag} {value}: must be {rule}, such as {default}")

        check("total_timesteps num_envs num_steps", lambda x: x >= 1, "at least 1")
        check("num_minibatches update_epochs frame_stack", lambda x: x >= 1, "at least 1")
        check("threads", lambda x: 1 <= x <= 1024, "between 1 and 1024")
        check("eval_episodes checkpoint_every ray_workers", lambda x: x >= 0, "0 or more")
        check("seed", lambda x: 0 <= x < 2**31, "between 0 and 2147483647")
        check("gamma gae_lambda sticky_actions", lambda x: 0 <= x <= 1, "between 0 and 1")
        check("learning_rate ent_coef vf_coef", lambda x: 0 <= x < math.inf, "a finite number, 0 or more")
        check("clip_coef max_grad_norm", lambda x: 0 < x < math.inf, "a finite number above 0")
        check("target_kl", lambda x: x is None or 0 <= x < math.inf, "a finite number, 0 or more, or None")
        samples = self.num_envs * self.num_steps
        batch = f"the batch of --num-envs {self.num_envs} x --num-steps {self.num_steps} = {samples}"
        if samples % self.num_minibatches:
            works = math.gcd(samples, self.num_minibatches)
            raise UsageError(f"--num-minibatches {self.num_minibatches}: must divide {batch}, such as {works}")
        if self.norm_adv and self.minibatch_size == 1:
            raise UsageError(
                f"--num-minibatches {self.num_minibatches}: leaves one sample of {batch} in a minibatch, whose "
                "normalized advantage is 0; use --num-minibatches 1, more --num-steps, or --no-norm-adv"
            )
        if self.total_timesteps < self.batch_size:
            raise UsageError(f"--total-timesteps {self.total_timesteps}: must be at least {self.workers} times {batch}")
        if self.ray_address and not self.ray_workers:
            raise UsageError(f"--ray-address {self.ray_address}: needs --ray-workers")
        if self.capture_video and not self.eval_episodes:
            raise UsageError("--capture-video records the evaluation: --eval-episodes 0 must be at least 1")
        for name in ("levels", "test_levels"):  # files are read once: a resumed run has the levels that they had
            object.__setattr__(self, name, read_levels(getattr(self, name)))
        if not 1 <= len(self.levels) <= self.workers * self.num_envs:
            works = math.ceil(len(self.levels) / self.workers) or 1
            hint = f"use --num-envs {works} or more workers, and at least one level"
            players = f"{self.workers} workers x --num-envs {self.num_envs}"
            raise UsageError(f"--levels: {len(self.levels)} levels, but {players} play them; {hint}")


def read_levels(levels: Sequence[str]) -> tuple[str, ...]:
    """Returns the levels, those in the lines of a file for @file."""
    try:
        lines = [
            line for x in levels for line in (Path(x[1:]).read_text("utf-8-sig").splitlines() if x[:1] == "@" else [x])
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--levels: {error}; after @ must stand a text file with a level in each line") from error
    return tuple(level for line in lines if (level := line.strip()) and not level.startswith("#"))


class AtariLevel:
    """A game in one mode and difficulty on the raw emulator, as the official wrappers show it to the agent.

    Frames are (84, 84), uint8. A lost life is `terminated` for the agent, but the game goes on. `finished` has the raw
    scores and lengths of games that ended.
    """

    def __init__(self, level: str, actions: list[ale_py.Action], sticky_actions: float, video: Path | None) -> None:
        self.game, self.options = parse_level(level)
        self.actions, useful = actions, study_game(self.game)["useful"]
        # Detail 17: fire reset - in games that have FIRE, a life starts with it and with the game's own next action
        self.start = [actions.index(useful[k]) for k in (1, 2)] if useful[1] == ale_py.Action.FIRE else []
        self.emulator = ale_py.ALEInterface()
        self.emulator.setFloat("repeat_action_probability", sticky_actions)
        self.emulator.setInt("frame_skip", 1)
        self.finished: list[tuple[int, int]] = []
        self.game_over, self.time_over = True, False
        self.film: Any = None
        if video:
            from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

            video.parent.mkdir(parents=True, exist_ok=True)
            self.film = FFMPEG_VideoWriter(f"{video}.mp4", (160, 210), fps=15)

    def reset(self, seed: int | None = None) -> Array:
        """Starts anew; no-ops and sticky actions depend on the seed. Returns the first frame."""
        self.random = np.random.default_rng(seed)
        self.emulator.setInt("random_seed", int(self.random.integers(2**31)))
        self.emulator.loadROM(cast(Path, ale_py.roms.get_rom_path(self.game)))  # now the seed counts
        for option, value in self.options.items():  # setMode, setDifficulty
            getattr(self.emulator, f"set{option.title()}")(value)
        self.game_over = True
        return self.start_episode()

    def step(self, action: int) -> tuple[Array, int, bool, bool]:
        """Returns frame, raw reward, terminated and truncated; after either, start_episode() gives the next frame."""
        lives = self.lives
        frame, reward = self.play(self.actions[action])
        # Detail 16: episodic life - the agent's episode ends with each life, the game only with the last one
        life_lost = 0 < self.lives < lives
        return frame, reward, life_lost or self.game_over, self.time_over

    def start_episode(self) -> Array:
        """Takes the hidden steps after a lost life or a finished game; returns the frame after them."""
        frame = self.start_life()
        for action in self.start:
            frame, _, *ended = self.step(action)
            if any(ended):
                frame = self.start_life()
        return frame

    def start_life(self) -> Array:
        """Goes on with a no-op, or starts a new game."""
        if not (self.game_over or self.time_over):
            frame, _ = self.play(ale_py.Action.NOOP)
            if not (self.game_over or self.time_over):
                return frame
        self.emulator.reset_game()
        # Detail 14: no-op reset - 1 to 30 frames without action
        for _ in range(self.random.integers(1, 31)):
            self.emulator.act(ale_py.Action.NOOP)
        self.score, self.length, self.lives, self.game_over, self.time_over = 0, 0, self.emulator.lives(), False, False
        self.screens = [self.emulator.getScreenGrayscale() for _ in range(2)]
        return shrink(self.screens[0])

    def play(self, action: ale_py.Action) -> tuple[Array, int]:
        """Plays an action, and books the game if it ends; returns the frame and the raw reward."""
        # Detail 15: frame skipping - an action lasts four frames, and the agent sees the maximum of the last two
        reward = sum(self.emulator.act(action) for _ in range(2))
        for screen in self.screens:
            reward += self.emulator.act(action)  # does nothing once the game is over
            self.emulator.getScreenGrayscale(screen)
        if self.film:
            self.film.write_frame(self.emulator.getScreenRGB())
        self.score, self.length, self.lives = self.score + reward, self.length + 1, self.emulator.lives()
        self.game_over, self.time_over = self.emulator.game_over(), self.length == 108_000 // 4
        if self.game_over or self.time_over:
            self.finished.append((self.score, self.length))
            self.close()
        return shrink(np.maximum(*self.screens)), reward

    def close(self) -> None:
        """Ends the film, which shows one game."""
        if self.film:
            self.film.close()
        self.film = None


class GymLevel:
    """A gymnasium environment or stable-retro game as a level; each of its episodes is a game.

    It runs in a process of its own: stable-retro allows one emulator in each, and all levels play at the same time.
    """

    def __init__(self, level: str, actions: list, sticky_actions: float, video: Path | None) -> None:
        make = functools.partial(make_game, level, actions, sticky_actions, video)
        multiprocessing.set_forkserver_preload([SCRIPT])  # loads the packages once for all
        mode = gym.vector.AutoresetMode.DISABLED  # forkserver: a fork of this process, with torch's threads, could hang
        self.env = gym.vector.AsyncVectorEnv([make], context="forkserver", autoreset_mode=mode)
        self.finished: list[tuple[float, int]] = []

    def reset(self, seed: int | None = None) -> Array:
        self.score, self.length = 0.0, 0
        return self.env.reset(seed=seed)[0][0]

    start_episode = reset

    def begin(self, action: int) -> None:
        self.env.step_async(np.array([action]))

    def step(self, action: int) -> tuple[Array, float, bool, bool]:
        """Returns what came of the action that begin() has sent: frame, raw reward, terminated and truncated."""
        (frame,), (reward,), (terminated,), (truncated,), _ = self.env.step_wait()
        self.score, self.length = self.score + float(reward), self.length + 1
        if terminated or truncated:
            self.finished.append((self.score, self.length))
        return frame, reward, terminated, truncated

    def close(self) -> None:
        self.env.close()


def make_game(level: str, actions: Sequence = (), sticky_actions: float = 0.0, video: Path | None = None) -> gym.Env:
    """Makes a gymnasium environment or stable-retro game that shows frames (84, 84), uint8. Raises UsageError."""
    if hosted := multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the main one ends it
    env: Any
    name, options = parse_level(level)
    try:
        if name.startswith("retro:"):
            env = make_retro(name.removeprefix("retro:"), actions, sticky_actions, **options)
        else:
            env = gym.make(name, **(options | {"render_mode": "rgb_array"} if video else options))
    except Exception as error:
        hint = (
            "; install it, as in pip install stable-retro, or set PYTHONPATH" if isinstance(error, ImportError) else ""
        )
        raise UsageError(f"--levels {level}: {' '.join(str(error).split())}{hint}") from error
    seen, can = env.observation_space, env.action_space
    shape = seen.shape or ()
    images = isinstance(seen, Box) and seen.dtype == np.uint8 and len(shape) > 1 and shape[2:] in ((), (1,), (3,))
    if not images or not isinstance(can, Discrete) or can.start != 0:
        hint = "use ppo_classic.py or, for Box actions, ppo_continuous.py"
        raise UsageError(f"--levels {level}: must have uint8 images and Discrete actions; {hint}")
    if video and hosted:
        env = gym.wrappers.RecordVideo(env, str(video), lambda game: game == 0, name_prefix="game", fps=15)
    return gym.wrappers.TransformObservation(env, shrink, Box(0, 255, (84, 84), np.uint8))


def make_retro(
    game: str, actions: Sequence[ale_py.Action], sticky_actions: float, state: str = "", scenario: str = "scenario"
) -> gym.Env:
    """Makes a stable-retro game with the details of Atari games; FIRE is the first button of the pad.

    The state that it starts from is one of the game's own, or a file. Raises ValueError for what is missing.
    """
    import stable_retro
    from stable_retro import data

    try:
        data.get_romfile_path(game)
    except FileNotFoundError as error:
        near = " or ".join(difflib.get_close_matches(game, data.list_games(), 3, 0))
        raise ValueError(f"no ROM; import yours for {near}: python -m stable_retro.import FOLDER") from error
    for name, known in (state, data.list_states(game)), (scenario, data.list_scenarios(game)):
        if name not in ("", *known) and not Path(name).is_file():
            raise ValueError(f"there is no {name}; the game has {' '.join(known)}")
    start: Any = str(Path(state).absolute()) if Path(state).is_file() else state or stable_retro.State.DEFAULT
    pad: Any = {"use_restricted_actions": stable_retro.Actions.ALL, "render_mode": "rgb_array"}
    env: Any = stable_retro.make(game, start, scenario=scenario, **pad)
    buttons = ["FIRE", *map(str, env.buttons[1:])]
    presses = [np.array([button in action.name for button in buttons], np.int8) for action in actions]
    env = gym.wrappers.TransformAction(env, presses.__getitem__, Discrete(max(1, len(presses))))
    env = NoopReset(gym.wrappers.StickyAction(env, sticky_actions))
    return gym.wrappers.TimeLimit(gym.wrappers.MaxAndSkipObservation(env, 4), 108_000 // 4)


class NoopReset(gym.Wrapper):
    """Starts episodes with 1 to 30 frames without action, since stable-retro itself leaves nothing to chance."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Array, dict]:
        obs, info = self.env.reset(seed=seed, options=options)
        for _ in range(self.np_random.integers(1, 31)):
            obs, _, _, _, info = self.env.step(0)
        return obs, info


def shrink(screen: Array) -> Array:
    """Returns a screen of any size, gray or RGB, as a frame (84, 84)."""
    # Detail 18: image transformation - gray, then 84 x 84 by area (official: gray after the maximum)
    weights = np.array([0.299, 0.587, 0.114] if screen.shape[2:] == (3,) else [1], np.float32)
    screen = screen.reshape(*screen.shape[:2], len(weights)) @ weights if screen.ndim == 3 else screen
    (rows, heights), (columns, widths) = map(find_shares, screen.shape)
    low = np.einsum("ij,ijw->iw", heights, screen[rows].astype(np.float32))
    return np.rint(np.einsum("ij,hij->hi", widths, low[:, columns])).astype(np.uint8)


@functools.cache
def find_shares(size: int) -> tuple[Array, Array]:
    """Returns the pixels that each of 84 new ones covers on an axis of `size`, and their shares in it: (84, 3) both."""
    start = np.arange(84)[:, None] * size  # in 84ths of a pixel, so that all is exact
    pixels = start // 84 + np.arange(size // 84 + 2)
    shares = (np.minimum(start + size, 84 * pixels + 84) - np.maximum(start, 84 * pixels)).clip(0) / size
    used = shares.any(0)
    return np.minimum(pixels, size - 1)[:, used], shares[:, used].astype(np.float32)


class Levels(gym.vector.VectorEnv):
    """Levels that step together: those in this process one after the other, since an emulator keeps Python's lock.

    Observations (N, 84, 84, frames) are uint8 and overwritten by the next step. info["episode"] has the raw score "r"
    and the length "l" of the games that ended, under the mask info["_episode"], and info["final_obs"] last frames.
    """

    protocol = ""

    def __init__(self, levels: Sequence[AtariLevel | GymLevel], num_actions: int, frame_stack: int) -> None:
        self.levels, self.num_envs = levels, len(levels)
        self.single_observation_space = Box(0, 255, (84, 84, frame_stack), np.uint8)
        self.single_action_space = Discrete(num_actions)
        self.stack = np.zeros((self.num_envs, 84, 84, frame_stack), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Array, dict]:
        self.stack[:] = 0
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        for i, level in enumerate(self.levels):
            self.stack[i, ..., -1] = level.reset(seeds[i])
        return self.stack, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict]:
        actions = actions.reshape(self.num_envs)
        if not all(self.single_action_space.contains(action) for action in actions):  # none may reach an emulator
            raise ValueError(f"actions must be of {self.single_action_space}, not {actions}")
        info: dict[str, Any] = {}
        rewards, (terminated, truncated) = np.zeros(self.num_envs), np.zeros((2, self.num_envs), bool)
        # Detail 20: frame stacking - the newest frame is the last channel; a new episode starts with zeros
        pixels = self.stack.reshape(-1)
        pixels[:-1] = pixels[1:]  # each channel takes its right neighbor's bytes
        for level, action in zip(self.levels, actions):
            if isinstance(level, GymLevel):  # their processes play, while this one does
                level.begin(int(action))
        for i, level in enumerate(self.levels):
            frame, reward, terminated[i], truncated[i] = level.step(int(actions[i]))
            # Detail 19: reward clipping - to the sign
            rewards[i] = np.sign(reward)
            if terminated[i] or truncated[i]:
                final_obs = info.setdefault("final_obs", np.zeros_like(self.stack))
                final_obs[i], final_obs[i, ..., -1] = self.stack[i], frame
                frame = level.start_episode()
                self.stack[i] = 0
            self.stack[i, ..., -1] = frame
            for score, length in level.finished:
                episode = info.setdefault("episode", {"r": np.zeros(self.num_envs), "l": np.zeros(self.num_envs, int)})
                ended = info.setdefault("_episode", np.zeros(self.num_envs, bool))
                episode["r"][i], episode["l"][i], ended[i] = score, length, True
            level.finished.clear()
        return self.stack, rewards, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        for level in self.levels:
            level.close()


@functools.cache
def study_game(game: str) -> dict[str, list]:
    """Returns what the emulator knows of a game: modes, difficulties, the actions that do something in it, and all."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.loadROM(cast(Path, ale_py.roms.get_rom_path(game)))
    known = {"mode": emulator.getAvailableModes(), "difficulty": emulator.getAvailableDifficulties()}
    return known | {"useful": emulator.getMinimalActionSet(), "all": emulator.getLegalActionSet()}


def find_game(level: str) -> str:
    """Returns the emulator's name, breakout for ALE/Breakout-v5, BreakoutNoFrameskip-v4 and breakout; else the id."""
    gym.register_envs(ale_py)
    atari = [spec for spec in gym.registry.values() if spec.entry_point == "ale_py.env:AtariEnv"]
    games = {name: spec.kwargs["game"] for spec in atari for name in (spec.id, spec.kwargs["game"])}
    name = level.partition("?")[0]
    if name not in games and name not in gym.registry and ":" not in name:
        hint = "did you mean " + " or ".join(difflib.get_close_matches(name, games, 3, 0)) + "?"
        raise UsageError(f"--levels {level}: not an Atari game; {hint}")
    return games.get(name, name)


@functools.cache
def parse_level(level: str) -> tuple[str, dict[str, Any]]:
    """Returns game and options, such as breakout and {"mode": 4} for breakout?mode=4. Raises UsageError."""
    game, options = find_game(level), dict(parse_qsl(level.partition("?")[2], keep_blank_values=True))
    if game not in ATARI:
        return game, {name: read_value(text) for name, text in options.items()}
    for name, value in options.items():
        if name not in ("mode", "difficulty"):
            raise UsageError(f"--levels {level}: {name} is no option; mode and difficulty are")
        if value not in (exist := [str(x) for x in study_game(game)[name]]):
            raise UsageError(f"--levels {level}: no such {name}; {game} has {' '.join(exist)}")
    return game, {name: int(value) for name, value in options.items()}


def read_value(text: str) -> Any:
    """Returns a number, True, False or None if the text is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@functools.cache
def find_actions(level: str) -> dict[str, list]:
    """Returns the actions that are "useful" in a level and "all" that are known there. Raises UsageError."""
    game = parse_level(level)[0]
    if game in ATARI:
        return study_game(game)
    env: Any = make_game(level)  # shows that it can be had
    env.close()
    numbers = [f"{k}/{env.action_space.n}" for k in range(env.action_space.n)]
    return dict.fromkeys(("useful", "all"), study_game("breakout")["all"] if game.startswith("retro:") else numbers)


def make_envs(args: Args, levels: Sequence[str], video: Path | None = None) -> Levels:
    """Makes a sub-environment for each level, which step together; films them if `video` is a name. Raises UsageError.

    They all have the action set of the run: of the only game, or what all games have in common.
    """
    games = {parse_level(level)[0]: level for level in (*args.levels, *args.test_levels)}
    known = {level: find_actions(level) for level in (*args.levels, *args.test_levels)}
    actions = known[args.levels[0]]["useful"]
    if len(games) > 1 or args.all_actions:
        actions = max((x["all"] for x in known.values()), key=len)
    for level in known:
        if missing := set(actions) - set(known[level]["all"]):
            raise UsageError(f"--levels {level}: lacks {len(missing)} of {len(actions)} actions; train it alone")
    players: list[AtariLevel | GymLevel] = []
    for i, level in enumerate(levels):
        kind = AtariLevel if parse_level(level)[0] in ATARI else GymLevel
        film = video and video.with_name(f"{video.name}-{i}")
        players.append(kind(level, actions, args.sticky_actions, film))
    envs = Levels(players, len(actions), args.frame_stack)
    atari = any(game in ATARI or game.startswith("retro:") for game in games)
    rules = (
        f"4 frames a step, at most 108,000 a game, sticky actions {args.sticky_actions}, 1 to 30 no-ops, fire reset in "
        "games with FIRE, "
    )
    names = " ".join(getattr(action, "name", action) for action in actions)
    envs.protocol = f"{rules if atari else ''}actions {names}"
    return envs


def assign_levels(args: Args, worker: int) -> list[str]:
    """Returns the levels of a worker's sub-environments: g, counted over all workers, plays levels[g % len(levels)]."""
    first = worker * args.num_envs
    return [args.levels[g % len(args.levels)] for g in range(first, first + args.num_envs)]


class Categorical:
    """Distribution over n actions, from logits (..., n)."""

    def __init__(self, logits: Tensor) -> None:
        self.log_probs = F.log_softmax(logits, -1)

    def sample(self, generator: Generator) -> Tensor:
        noise = torch.empty_like(self.log_probs).exponential_(generator=generator)
        return (self.log_probs - noise.log()).argmax(-1)  # Gumbel maximum, as the official code samples

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)


def orthogonal(layer: Any, gain: float) -> nn.Module:
    # Detail 2: orthogonal weights and zero biases - gain sqrt(2) in hidden layers, 0.01 for the policy, 1 for the value
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function of stacked frames (B, 84, 84, frames), uint8."""

    def __init__(self, obs_space: Box, action_space: Discrete, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        # Detail 21: shared Nature-CNN network - one trunk for policy and value (Mnih et al. 2015)
        layers = [nn.Conv2d(obs_space.shape[2], 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)]
        trunk = [layer for conv in layers for layer in (orthogonal(conv, math.sqrt(2)), nn.ReLU())]
        self.trunk = nn.Sequential(*trunk, nn.Flatten(), orthogonal(nn.Linear(3136, 512), math.sqrt(2)), nn.ReLU())
        self.policy_head = orthogonal(nn.Linear(512, int(action_space.n)), 0.01)
        self.value_head = orthogonal(nn.Linear(512, 1), 1.0)

    def encoder(self, obs: Tensor) -> Tensor:
        """Returns the features (B, 512), float32."""
        # Detail 22: scaling of the images - to [0, 1], inside the network, so that all else handles bytes
        images = obs.to(torch.float32, copy=True).div_(255).permute(0, 3, 1, 2)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            return self.trunk(images).float()

    def policy(self, obs: Tensor) -> Categorical:
        return Categorical(self.policy_head(self.encoder(obs)))

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Returns the action distribution and the value (B,)."""
        features = self.encoder(obs)
        return Categorical(self.policy_head(features)), self.value_head(features).squeeze(-1)


class Adam(torch.optim.Adam):
    """Adam as TensorFlow computes it: with epsilon added before the bias correction, not after it as in torch."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            # Detail 3: Adam's epsilon of 1e-5 - in torch's terms 1e-5 / sqrt(1 - beta2^t), 3.2e-4 in the first step t
            group["eps"] = 1e-5 / math.sqrt(1 - group["betas"][1] ** group["steps"])
        return super().step(closure)


class Batch(NamedTuple):
    """Samples of a rollout; the first axis is the one that is shuffled."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    returns: Tensor


def gae(rewards: Array, values: Array, dones: Array, next_value: Array, final_values: Array, args: Args) -> Array:
    """Returns the advantages (T, N) of a rollout (Schulman et al. 2015, High-dimensional continuous control using GAE).

    dones (T, N): whether the step ended an episode. next_value (N,): value of the observation after the rollout.
    final_values (T, N): value to bootstrap from where an episode ended; the official code has 0 everywhere.
    """
    # Detail 5: generalized advantage estimation - the sum of (gamma lambda)^k delta_(t+k), cut where an episode ends
    next_values = np.where(dones, final_values, np.concatenate((values[1:], next_value[None])))
    deltas = rewards.astype(np.float64) + args.gamma * next_values - values
    decay = args.gamma * args.gae_lambda * (1.0 - dones)
    advantages, advantage = np.empty_like(values), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = advantage = deltas[t] + decay[t] * advantage
    return advantages


STATS = "value_loss policy_loss entropy old_approx_kl approx_kl approx_kl_official clipfrac grad_norm".split()


def ppo_loss(dist: Any, value: Tensor, batch: Batch, clip_coef: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """Returns the loss of a minibatch and the first seven of STATS (7,)."""
    advantages = batch.returns - batch.values
    if args.norm_adv:
        # Detail 7: advantages normalized per minibatch - with the population standard deviation, as numpy's
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)

    # Detail 8: clipped surrogate objective - the pessimistic of the two (Schulman et al. 2017, equation 7)
    log_ratio = dist.log_prob(batch.actions) - batch.log_probs
    ratio = log_ratio.exp()
    policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()

    value_loss = (value - batch.returns).square()
    if args.clip_vloss:
        # Detail 9: value loss clipped like the policy's - around the rollout's value, by the same coefficient
        clipped = batch.values + (value - batch.values).clamp(-clip_coef, clip_coef)
        value_loss = torch.max(value_loss, (clipped - batch.returns).square())
    value_loss = 0.5 * value_loss.mean()

    # Detail 10: overall loss and entropy bonus - one loss, so one optimizer, for policy and value
    entropy = dist.entropy().mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    with torch.no_grad():
        # Detail 12: debug variables - the KL estimators k1, k3 (joschu.net/blog/kl-approx) and the official k2
        kls = -log_ratio.mean(), (ratio - 1 - log_ratio).mean(), 0.5 * log_ratio.square().mean()
        clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
        return loss, torch.stack((value_loss, policy_loss, entropy, *kls, clipfrac))


def backward(agent: Agent, batch: Batch, clip_coef: Tensor, args: Args) -> Tensor:
    """Leaves the gradient of the minibatch's loss in the parameters; returns the first seven of STATS (7,)."""
    dist, value = agent(batch.obs)
    loss, stats = ppo_loss(dist, value, batch, clip_coef, args)
    loss.backward()
    return stats


def average(tensors: list[Tensor]) -> None:
    """Replaces each tensor by its mean over all workers, in one message."""
    if not distributed.is_initialized():
        return
    flat = torch.cat([x.flatten() for x in tensors])
    with watch_workers():
        distributed.all_reduce(flat)
    parts = (flat / distributed.get_world_size()).split([x.numel() for x in tensors])
    torch._foreach_copy_(tensors, [part.view(x.shape) for part, x in zip(parts, tensors)])


def update_minibatch(
    agent: Agent, optimizer: Adam, batch: Batch, clip_coef: Tensor, args: Args, backward: Callable
) -> Tensor:
    """Takes one gradient step; returns STATS (8,)."""
    optimizer.zero_grad()
    stats = backward(agent, batch, clip_coef, args)
    gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    # Auxiliary 2: parallel gradient update - the mean over all workers, before the clip; so is KL, and all stop alike
    average([*gradients, stats])
    # Detail 11: global gradient clipping - one norm over all parameters
    grad_norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (args.max_grad_norm / grad_norm).clamp(max=1))
    optimizer.step()
    return torch.cat((stats, grad_norm.view(1)))


def update(
    agent: Agent, optimizer: Adam, batch: Batch, clip_coef: Tensor, args: Args, backward: Callable, generator: Generator
) -> Tensor:
    """Runs the epochs of minibatch updates on a rollout; returns the mean of STATS over all minibatches (8,)."""
    stats: list[Tensor] = []
    for _ in range(args.update_epochs):
        # Detail 6: minibatch updates - shuffled anew in each epoch, every sample used once in each
        rows = torch.randperm(len(batch.obs), generator=generator, device=generator.device)
        for minibatch in rows.split(len(rows) // args.num_minibatches):
            samples = Batch(*(x.index_select(0, minibatch) for x in batch))  # faster than x[minibatch]
            stats.append(update_minibatch(agent, optimizer, samples, clip_coef, args, backward))
        # Auxiliary 3: early stopping - no further epoch once the policy has moved target_kl away, by the mean of k3
        if args.target_kl is not None and torch.stack(stats[-args.num_minibatches :])[:, 4].mean() > args.target_kl:
            break
    return torch.stack(stats).mean(0)


def train(args: Args, stop: Sequence[int] = ()) -> dict[str, Any]:
    """Trains, evaluates and returns the results: run_folder, global_step, episodic_return, eval_returns, evaluation.

    Once `stop` of any worker is not empty, all finish the iteration, a checkpoint is written, and the evaluation left
    out. Raises UsageError for bad input, before anything is written, and on all workers FloatingPointError for NaN or
    infinity, or LostWorker. Only the first one writes, prints and has results.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = check_machine(args)
    envs: Any = make_envs(args, assign_levels(args, RANK))
    print(envs.protocol)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args.bf16).to(device)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    parts: dict[str, Any] = {"agent": agent, "optimizer": optimizer}
    resumed = load_checkpoint(args.resume, **parts) if args.resume else {}
    if args.init and not resumed:
        load_checkpoint(args.init, "init", agent=agent)
    iteration = resumed.get("global_step", 0) // args.batch_size  # the number of workers may have changed
    gradient = compile_backward(device) if args.compile else backward
    generator = Generator(device)

    shape = (args.num_steps + 1, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(shape, dtype=torch.uint8, device=device)
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64, device=device)
    log_probs, values = torch.zeros((2, args.num_steps, args.num_envs), device=device)
    rewards = np.zeros((args.num_steps, args.num_envs), np.float32)
    dones = np.zeros((args.num_steps, args.num_envs), bool)
    seeds = spawn_seeds(args.seed, iteration, ENVIRONMENTS, WORKERS * args.num_envs)
    obs[-1] = torch.from_numpy(envs.reset(seed=seeds[RANK * args.num_envs :][: args.num_envs])[0])

    join_workers(agent)
    with Run(args, envs, resumed.get("folder"), iteration, parts) as run:
        while not (stopped := exchange(list(stop))) and iteration < args.num_iterations:
            # Random numbers depend on seed and iteration alone: a resumed run draws what it would have drawn.
            # Each worker has its own, for the minibatches, too; the official workers shuffle alike by accident
            generator.manual_seed(spawn_seeds(args.seed, iteration, SAMPLES, WORKERS)[RANK])
            # Detail 4: Adam learning rate annealing - full in the first iteration, 1/num_iterations of it in the last
            remaining = 1 - iteration / args.num_iterations
            learning_rate = args.learning_rate * remaining if args.anneal_lr else args.learning_rate
            optimizer.param_groups[0]["lr"] = learning_rate
            # Auxiliary 1: clip range annealing - in step with the learning rate
            clip_coef = torch.tensor(args.clip_coef * remaining if args.anneal_clip else args.clip_coef, device=device)

            # Detail 1: vectorized architecture - N environments step together, and their episodes span rollouts
            obs[0] = obs[-1]
            final_values = np.zeros_like(rewards)
            with torch.inference_mode():
                for t in range(args.num_steps):
                    dist, values[t] = agent(obs[t])
                    actions[t] = action = dist.sample(generator)
                    log_probs[t] = dist.log_prob(action)
                    next_obs, rewards[t], terminated, truncated, info = envs.step(action.cpu().numpy())
                    obs[t + 1] = torch.from_numpy(next_obs)
                    dones[t] = terminated | truncated
                    if "episode" in info:
                        run.count_episodes(info)
                    if args.bootstrap_truncated and (cut := truncated & ~terminated).any():
                        final_obs = torch.from_numpy(np.stack(info["final_obs"][cut])).to(obs)
                        final_values[t, cut] = agent(final_obs)[1].cpu().numpy()
                next_value = agent(obs[-1])[1].cpu().numpy()

            advantages = gae(rewards, values.cpu().numpy(), dones, next_value, final_values, args)
            returns = values + torch.from_numpy(advantages).to(device)
            batch = Batch(*(x.flatten(0, 1) for x in (obs[:-1], actions, log_probs, values, returns)))

            losses = dict(zip(STATS, update(agent, optimizer, batch, clip_coef, args, gradient, generator).tolist()))
            iteration += 1
            if bad := [name for name, value in losses.items() if not math.isfinite(value)]:
                raise FloatingPointError(f"NaN or infinity in {', '.join(bad)} of iteration {iteration}")
            explained = (1 - (returns - values).var() / returns.var()).item()
            losses["explained_variance"] = np.mean(exchange([explained]))
            run.log(iteration, learning_rate, losses)
            if iteration % (args.checkpoint_every or math.inf) == 0:
                run.save(iteration)
        if iteration * args.batch_size > resumed.get("global_step", 0):  # after the loop: no signal falls between
            run.save(iteration)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return run.finish(agent, iteration, stopped or stop)


def evaluate(
    agent: Agent, args: Args, level: str, seeds: list[int], stop: Sequence[int], video: Path | None = None
) -> list[float]:
    """Plays one episode per seed, side by side, with sampled actions; returns the returns of those that ended.

    One each, so that short episodes do not count more often than long ones. Ends early once `stop` is not empty.
    """
    device = next(agent.parameters()).device
    generator = Generator(device).manual_seed(seeds[0])
    envs: Any = make_envs(args, [level] * len(seeds), video)
    obs, _ = envs.reset(seed=seeds)
    returns: dict[int, float] = {}
    while len(returns) < len(seeds) and not stop:
        with torch.inference_mode():
            action = agent.policy(torch.from_numpy(obs).to(device, torch.float32)).sample(generator)
        obs, _, _, _, info = envs.step(action.cpu().numpy())
        if "episode" in info:
            returns = {int(i): float(info["episode"]["r"][i]) for i in np.flatnonzero(info["_episode"])} | returns
    envs.close()
    return [returns[i] for i in sorted(returns)]


ENVIRONMENTS, SAMPLES, EVALUATION = range(3)  # streams of random numbers
SCRIPT = Path(globals().get("__file__", "ppo_joint.py")).stem


def spawn_seeds(seed: int, iteration: int, stream: int, count: int) -> list[int]:
    """Returns `count` independent seeds below 2**31; another seed, iteration or stream gives others."""
    return (np.random.SeedSequence((seed, iteration, stream)).generate_state(count) >> 1).tolist()


def join_workers(agent: nn.Module) -> None:
    """Makes one process group of all workers, where there are several, and the first one's weights those of all."""
    if WORKERS == 1:
        return
    device = next(agent.parameters()).device
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    with watch_workers():  # a dead process is noticed at once, a dead machine or line after the timeout
        distributed.init_process_group(backend, rank=RANK, world_size=WORKERS, timeout=timedelta(seconds=60))
        for x in agent.state_dict().values():
            distributed.broadcast(x, 0)


@contextlib.contextmanager
def watch_workers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostWorker(str(error).split(". ")[0]) from error


def exchange(values: list) -> list:
    """Returns the values of all workers, in the order of their numbers. All must call it."""
    lists: list = [values]
    if distributed.is_initialized():
        lists *= distributed.get_world_size()
        with watch_workers():
            distributed.all_gather_object(lists, values)
    return [value for values in lists for value in values]


class Run:
    """Run folder, TensorBoard events and progress of one training; only the first worker has them."""

    def __init__(self, args: Args, envs: Any, folder: Path | None, iteration: int, parts: dict[str, Any]) -> None:
        self.args, self.envs, self.iteration, self.parts = args, envs, iteration, parts
        self.levels = assign_levels(args, RANK)
        self.ended: list[tuple[str, float, int]] = []  # level, return, length: episodes that ended in this iteration
        self.returns: dict[str, list[float]] = defaultdict(list)  # of all episodes, by level
        if RANK:
            return
        name = args.levels[0] + (f"-and-{len(args.levels) - 1}-more" if args.levels[1:] else "")
        name = f"{name}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9}"
        safe_name = re.sub(r"[^\w.-]+", "_", name)  # every file system takes it
        self.folder = folder or Path(args.run_dir).expanduser() / safe_name
        try:
            self.folder.mkdir(parents=True, exist_ok=folder is not None)  # a new run never shares a folder
        except OSError as error:
            raise UsageError(f"--run-dir {args.run_dir}: {error}; name a folder that can be written") from error
        step, self.total = iteration * args.batch_size, args.num_iterations * args.batch_size
        if args.track:
            import wandb

            wandb.init(project="ppo", id=self.folder.name, resume="allow", config=asdict(args), sync_tensorboard=True)
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)
        self.writer.add_text("args", "\n".join(f"    {name}: {value}" for name, value in asdict(args).items()), step)
        size = f"{args.num_iterations:,} iterations of {args.num_envs} x {args.num_steps} in {WORKERS} workers"
        print(f"{size}, in {self.folder}; worker.sub-environment that play a level:")
        for level in dict.fromkeys(args.levels):
            places = [f"{w}.{i}" for w in range(WORKERS) for i, x in enumerate(assign_levels(args, w)) if x == level]
            print(f"  {level}: {' '.join(places)}")
        if args.resume:
            print(f"continuing after step {step:,}; the environments start new episodes")
        self.bar = tqdm(
            total=self.total, initial=step, unit=" steps", unit_scale=True, dynamic_ncols=True, disable=None
        )
        self.started = self.printed = time.perf_counter()
        self.first: tuple[int, float] | None = None  # step and time after the first iteration: SPS counts from there

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.envs.close()
        if not RANK:
            self.bar.close()
            self.writer.close()
            if isinstance(error, LostWorker):  # the gradient steps so far were taken by all
                self.save(self.iteration)

    def save(self, iteration: int) -> None:
        if not RANK:
            save_checkpoint(self.folder, iteration, self.args, **self.parts)

    def count_episodes(self, info: dict[str, Any]) -> None:
        for i in np.flatnonzero(info["_episode"]):
            self.ended.append((self.levels[i], info["episode"]["r"][i].item(), info["episode"]["l"][i].item()))

    def recent_return(self) -> float:
        """Returns the mean over levels of the mean return of the last 100 episodes."""
        return float(np.mean([np.mean(x[-100:]) for x in self.returns.values()])) if self.returns else math.nan

    def log(self, iteration: int, learning_rate: float, losses: dict[str, float]) -> None:
        """Writes one point of every curve and shows the progress, with the episodes of all workers."""
        episodes, self.ended, self.iteration = exchange(self.ended), [], iteration
        if RANK:
            return
        step, now = iteration * self.args.batch_size, time.perf_counter()
        self.first = self.first or (step, now)
        sps = (step - self.first[0]) / max(now - self.first[1], 1e-9)
        scalars = {"charts/learning_rate": learning_rate} | {f"losses/{name}": x for name, x in losses.items()}
        if sps:
            scalars["charts/SPS"] = sps
        if episodes:
            levels, returns, lengths = zip(*episodes)
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(returns), np.mean(lengths)
            for level in dict.fromkeys(levels):
                new = [x for name, x, _ in episodes if name == level]
                scalars[f"charts/episodic_return/{level}"] = np.mean(new)
                self.returns[level] += new
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        state = f"return {self.recent_return():.1f}" if self.returns else "no episode has ended"
        self.bar.set_postfix_str(state, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and sps and now - self.printed > 5:
            self.printed = now
            print(f"step {step:,}, {state}, {sps:,.0f} steps/s, {(self.total - step) / sps:,.0f} s left", flush=True)

    def finish(self, agent: Agent, iteration: int, stop: Sequence[int]) -> dict[str, Any]:
        """Evaluates the agent on all levels, prints the results and returns them."""
        if RANK:
            return {}
        self.bar.close()
        args, step, evaluation = self.args, iteration * self.args.batch_size, {}
        seeds = spawn_seeds(args.seed, iteration, EVALUATION, 0 if stop else args.eval_episodes)
        for level in dict.fromkeys((*args.levels, *args.test_levels) if seeds else ()):
            name = re.sub(r"[^\w.-]+", "_", f"{level}-step-{step}")
            film = self.folder / "videos" / name if args.capture_video else None
            evaluation[level] = evaluate(agent, args, level, seeds, stop, film)
        if stop:
            evaluation = {}  # cut short: the longest episodes are missing
        print(f"step {step:,} of {self.total:,} after {time.perf_counter() - self.started:,.0f} s")
        for level, x in self.returns.items():
            print(f"{level}: return {np.mean(x[-100:]):.1f} (last {len(x[-100:])} episodes)")
        if episodes := [x for returns in self.returns.values() for x in returns]:
            print(f"return {np.mean(episodes):.2f} in the mean of all {len(episodes)} episodes")
        for level, x in evaluation.items():
            self.writer.add_scalar(f"eval/episodic_return/{level}", np.mean(x), step)
            print(f"evaluation of {level}: return {np.mean(x):.1f} +- {np.std(x):.1f} ({len(x)} episodes)")
        if returns := [x for level, returns in evaluation.items() if level in args.levels for x in returns]:
            self.writer.add_scalar("eval/episodic_return", np.mean(returns), step)
            print(f"evaluation: return {np.mean(returns):.1f} in the levels of the training")
        print(f"curves: tensorboard --logdir {self.folder.parent}")
        if (self.folder / "checkpoint.pt").exists():
            print(f"watch or go on: python {SCRIPT}.py --resume {self.folder}")
        results = {"run_folder": self.folder, "global_step": step, "eval_returns": returns}
        return results | {"episodic_return": self.recent_return(), "evaluation": evaluation}


def save_checkpoint(folder: Path, iteration: int, args: Args, **parts: Any) -> None:
    """Writes checkpoint.pt whole or not at all; it holds tensors and plain values only."""
    state = {"script": SCRIPT, "args": asdict(args), "iteration": iteration, "global_step": iteration * args.batch_size}
    state |= {name: part.state_dict() for name, part in parts.items()}
    part = folder / f"checkpoint.pt.{os.getpid()}"
    torch.save(state, part)
    os.replace(part, folder / "checkpoint.pt")


def load_checkpoint(path: str, flag: str = "resume", **parts: Any) -> dict[str, Any]:
    """Returns the checkpoint of a run folder; restores the parts that are given. Raises UsageError."""
    file = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UsageError(f"--{flag} {path}: no checkpoint.pt; name a run folder, such as runs/RUN_FOLDER")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True) | {"folder": file.parent}
        script, flags = state["script"], state["args"].keys()
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:
        hint = "; after a run on several games, --all-actions" if flag == "init" else ""
        raise UsageError(
            f"--{flag} {path}: damaged, or of another network ({type(error).__name__}: {error}){hint}"
        ) from error
    if flag == "resume" and flags != {field.name for field in fields(Args)}:
        raise UsageError(f"--resume {path}: {script}.py wrote this checkpoint, and its flags differ; resume it there")
    return state


def parse_args(argv: list[str] | None = None) -> Args:
    """Reads the command line; with --resume on top of the run's own flags, most of which must stay as they are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    resume = parser.parse_known_args(argv)[0].resume
    if resume is None:
        return tyro.cli(Args, args=argv, description=__doc__)
    saved = Args.__new__(Args)  # unchecked: another number of workers may need other flags
    vars(saved).update(load_checkpoint(resume)["args"])
    args = tyro.cli(Args, args=argv, default=saved)
    free = "resume total_timesteps device threads compile track capture_video eval_episodes checkpoint_every".split()
    free += ["ray_workers", "ray_address"]
    for name, value in asdict(saved).items():
        if name not in free and getattr(args, name) != value:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(args, name)}: must stay {value}, as in the run that is resumed")
    return args


def check_machine(args: Args) -> torch.device:
    """Returns the device; raises UsageError for what this machine lacks, before anything is written."""
    if args.workers != WORKERS:
        raise UsageError(f"--ray-workers {args.ray_workers}: only the command line starts workers, train() is one")
    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    name = f"cuda:{LOCAL_RANK}" if name == "cuda" and WORKERS > 1 else name  # one for each worker
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {args.device}: not available here ({reason}); use --device cpu") from error
    for flag, package in {"track": "wandb", "capture_video": "moviepy"}.items():
        if getattr(args, flag) and importlib.util.find_spec(package) is None:
            raise UsageError(f"--{flag.replace('_', '-')} needs {package}: pip install {package}")
    return torch.device(name)


def compile_backward(device: torch.device) -> Callable:
    """Returns backward() compiled into one graph. Raises UsageError where this machine cannot."""
    try:
        torch._dynamo.config.trace_autograd_ops = True  # the graph includes loss.backward(); torch has it since 2.11
        torch.compile(torch.sin, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:
        raise UsageError(f"--compile does not work here ({str(error).splitlines()[0]}); run without it") from error
    if device.type == "cpu":
        return torch.compile(backward, fullgraph=True, options={"cpp_wrapper": True})
    return torch.compile(backward, fullgraph=True, mode="reduce-overhead")


def train_on_ray(args: Args, argv: Sequence[str], stop: list[int]) -> tuple[int, str]:
    """Lets Ray start the workers, where torchrun would; returns what work() does in the first. Raises UsageError."""
    if args.ray_address is None:  # nothing in the home folder, no use of the network
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray-workers needs ray: pip install ray")
    ray: Any = importlib.import_module("ray")

    class Worker:  # in a function: so Ray sends its text, and the script is imported once RANK and the like are known
        def __init__(self) -> None:
            self.stop, self.output, self.heard = list[int](), io.StringIO(), 0

        def find_place(self) -> tuple[str, int]:
            with socket.socket() as free:
                free.bind(("", 0))
                return ray.util.get_node_ip_address(), free.getsockname()[1]

        def work(self, variables: dict[str, Any], folder: str, script: Path, argv: Sequence[str]) -> tuple[int, str]:
            os.environ.update({name: str(value) for name, value in variables.items()})
            os.chdir(folder)
            sys.path.insert(0, str(script.parent))
            with contextlib.redirect_stdout(self.output), contextlib.redirect_stderr(self.output):
                return importlib.import_module(script.stem).work(argv, self.stop)

        def talk(self, stop: list[int]) -> str:
            self.stop[:] = stop
            news = self.output.getvalue()[self.heard :]
            self.heard += len(news)
            return news

    # Without these, Ray gives its workers a low priority, and its object store a third of the memory
    local = {"_system_config": {"worker_niceness": 0}, "object_store_memory": 10**8, "include_dashboard": False}
    try:
        host, _, port = (args.ray_address or "").rpartition("/")[2].rpartition(":")
        if host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        options = {} if args.ray_address else local
        ray.init(args.ray_address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, ValueError, RuntimeError) as error:
        hint = "start one with ray start --head, or leave the flag out"
        raise UsageError(f"--ray-address {args.ray_address}: no cluster answers ({error}); {hint}") from error
    listen(stop)  # Ray listens itself by now
    try:
        cluster, count = ray.cluster_resources(), args.ray_workers
        share = {"num_cpus": min(1, int(1e4 * cluster["CPU"] / count) / 1e4), "max_concurrency": 2}
        share["num_gpus"] = int(cluster.get("GPU", 0) >= count)
        workers = [ray.remote(Worker).options(**share).remote() for _ in range(count)]
        hosts, ports = zip(*ray.get([worker.find_place.remote() for worker in workers], timeout=300))
        results = []
        for rank, worker in enumerate(workers):  # Ray shows each its own GPU only, as number 0
            variables = {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": hosts.count(hosts[rank])}
            variables |= {"WORLD_SIZE": count, "MASTER_ADDR": hosts[0], "MASTER_PORT": ports[0]}
            results.append(worker.work.remote(variables, os.getcwd(), Path(__file__).absolute(), argv))
        while True:
            ended = ray.wait(results, num_returns=count, timeout=1)[0]
            print(ray.get(workers[0].talk.remote(stop)), end="", flush=True)
            if results[0] in ended:
                with contextlib.suppress(ray.exceptions.RayActorError):  # of a lost worker: the first one reports it
                    ray.get(ended)  # raises another's error
                return ray.get(results[0])
            for worker in (worker for worker, result in zip(workers, results) if result in ended):
                ray.kill(worker)  # so that the others notice, if it has failed
    except ray.exceptions.GetTimeoutError as error:
        raise UsageError(f"--ray-workers {args.ray_workers}: the cluster has not started them in 5 minutes") from error
    except ray.exceptions.RayActorError as error:
        return 1, f"error: the first worker is lost, the run ends here: {str(error).splitlines()[0]}"
    finally:
        ray.shutdown()


def listen(stop: list[int]) -> None:
    """Appends the number of a signal to `stop`; a second signal exits at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os._exit(128 + number) if stop else stop.append(number))


def work(argv: Sequence[str], stop: list[int]) -> tuple[int, str]:
    """Does what the command line says; returns the exit code and, in case of an error, its message."""
    try:
        with contextlib.redirect_stderr(sys.stdout if RANK else sys.stderr):
            args = parse_args(list(argv))
        if args.ray_workers and not LAUNCHED:
            return train_on_ray(args, argv, stop)
        train(args, stop)
    except UsageError as error:
        return 2, "" if RANK else f"error: {error}"
    except FloatingPointError as error:
        return 1, "" if RANK else f"error: {error}; the last checkpoint is as it was"
    except LostWorker as error:
        return 1, f"error: worker {RANK} has lost another one, the run ends here: {error}"
    return 128 + stop[0] if stop else 0, ""


def main() -> None:
    stop: list[int] = []
    listen(stop)
    if RANK:  # the first worker speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    code, message = work(sys.argv[1:], stop)
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
