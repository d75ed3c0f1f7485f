"""The official Atari wrappers written plainly on the raw emulator, one game at a time: what ppo_atari.py must equal.

Read from baselines/common/atari_wrappers.py and vec_env/vec_frame_stack.py. One rule is stable-baselines3's, where the
official code steps a finished game: a no-op that ends the game is followed by a real reset.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import ale_py
import numpy as np

NOOP, FIRE = 0, 1


@functools.cache
def area(size: int, new_size: int) -> np.ndarray:
    """Returns the weights (new_size, size) that average an axis by area."""
    edges = np.linspace(0, size, new_size + 1)
    low, high = np.maximum(edges[:-1, None], np.arange(size)), np.minimum(edges[1:, None], np.arange(size) + 1)
    return np.maximum(high - low, 0) * new_size / size


def gray(screen: np.ndarray) -> np.ndarray:
    """Turns colors (height, width, 3) gray by OpenCV's fixed-point weights."""
    red, green, blue = np.moveaxis(screen.astype(np.int64), -1, 0)
    return ((9798 * red + 19235 * green + 3735 * blue + 16384) >> 15).astype(np.uint8)


class Step(NamedTuple):
    """What the agent gets from one action, and the games that ended meanwhile as (raw score, length)."""

    obs: np.ndarray  # (84, 84, frames)
    reward: float
    terminated: bool
    truncated: bool
    lives: int
    games: list[tuple[int, int]]


class OfficialGame:
    """One game behind NoopReset, MaxAndSkip, EpisodicLife, FireReset, WarpFrame, ClipReward and VecFrameStack.

    noops: the number of no-ops of each game. With `gray_first`, the maximum of two frames is taken of gray ones.
    """

    def __init__(
        self, game: str, noops: Iterable[int], frames: int = 4, limit: int = 108_000, gray_first=False
    ) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.setInt("frame_skip", 1)
        self.ale.loadROM(ale_py.roms.get_rom_path(game))
        self.actions = self.ale.getMinimalActionSet()
        self.fire = ale_py.Action.FIRE in self.actions
        self.noops, self.limit, self.gray_first = iter(noops), limit, gray_first
        self.stack = np.zeros((84, 84, frames), np.uint8)
        self.games: list[tuple[int, int]] = []

    def screen(self) -> np.ndarray:
        return self.ale.getScreenGrayscale() if self.gray_first else self.ale.getScreenRGB()

    def new_game(self) -> np.ndarray:
        self.ale.reset_game()
        for _ in range(next(self.noops)):
            self.ale.act(self.actions[NOOP])
        self.frame, self.score, self.length = 0, 0, 0
        self.last_two = [self.screen()] * 2
        return self.screen()

    def skip(self, action: int) -> tuple[np.ndarray, int, bool, bool]:
        """Four frames of one action: maximum of the last two, sum of rewards, game over, time limit."""
        reward = 0
        for repeat in range(4):
            reward += self.ale.act(self.actions[action])
            if repeat >= 2:
                self.last_two[repeat - 2] = self.screen()
            self.frame += 1
            over, cut = self.ale.game_over(), self.frame >= self.limit
            if over or cut:
                break
        self.score, self.length = self.score + reward, self.length + 1
        if over or cut:
            self.games.append((self.score, self.length))
        return np.max(self.last_two, 0), reward, over, cut

    def live(self, action: int) -> tuple[np.ndarray, int, bool, bool]:
        """One step of EpisodicLife: `terminated` with a life, too."""
        screen, reward, over, cut = self.skip(action)
        self.finished = over or cut
        lives = self.ale.lives()
        lost = 0 < lives < self.lives
        self.lives = lives
        return screen, reward, over or lost, cut

    def next_life(self) -> np.ndarray:
        if self.finished:
            screen = self.new_game()
        else:
            screen, _, over, cut = self.skip(NOOP)
            if over or cut:
                screen = self.new_game()
        self.lives = self.ale.lives()
        return screen

    def next_episode(self) -> np.ndarray:
        """One reset of FireReset."""
        screen = self.next_life()
        for action in (FIRE, 2) if self.fire else ():
            screen, _, terminated, truncated = self.live(action)
            if terminated or truncated:
                self.next_life()
        return screen

    def observe(self, screen: np.ndarray, clear: bool) -> np.ndarray:
        image = screen if self.gray_first else gray(screen)
        small = area(len(image), 84) @ image.squeeze() @ area(image.shape[1], 84).T
        self.stack = np.zeros_like(self.stack) if clear else np.roll(self.stack, -1, axis=-1)
        self.stack[..., -1] = small.astype(np.float32).round()
        return self.stack.copy()

    def reset(self) -> np.ndarray:
        self.finished = True
        return self.observe(self.next_episode(), True)

    def step(self, action: int) -> Step:
        self.games = []
        screen, reward, terminated, truncated = self.live(action)
        done = terminated or truncated
        if done:
            screen = self.next_episode()
        obs = self.observe(screen, done)
        return Step(obs, float(np.sign(reward)), terminated, truncated, self.lives, self.games)
