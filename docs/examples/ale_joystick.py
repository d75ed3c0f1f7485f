"""Joystick/GAME-v5: the Atari games with the joystick itself as the action, MultiDiscrete([3, 3, 2]), seen from memory.

    PYTHONPATH=docs/examples python ppo_multidiscrete.py --env-id ale_joystick:Joystick/Boxing-v5 --compile

The 18 actions of the emulator are all positions of a joystick with one button: left, middle or right; up, middle or
down; button free or pressed. Every game of ale-py is there, under its own name.
"""

import ale_py
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete

NAMES = [[[y + x + fire for fire in ("", "FIRE")] for y in ("UP", "", "DOWN")] for x in ("LEFT", "", "RIGHT")]


class Joystick(gym.ActionWrapper):
    """Takes (horizontal, vertical, button) instead of one of the 18 actions."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        numbers = {name: action.value for name, action in ale_py.Action.__members__.items()} | {"": 0}
        self.numbers = np.vectorize(numbers.get)(NAMES)
        self.action_space = MultiDiscrete(self.numbers.shape)

    def action(self, action):
        return self.numbers[tuple(action)]


def make(game: str, render_mode: str | None = None) -> gym.Env:
    """Makes a game: the observation is its 128 bytes of memory, scaled to [0, 1]; the reward is its points."""
    env = gym.make(f"ALE/{game}-v5", obs_type="ram", full_action_space=True, render_mode=render_mode)
    env = gym.wrappers.TransformObservation(env, lambda ram: ram / np.float32(255), Box(0, 1, (128,), np.float32))
    return Joystick(env)


for game in [name[4:-3] for name in gym.registry if name.startswith("ALE/") and name.endswith("-v5")]:
    gym.register(f"Joystick/{game}-v5", "ale_joystick:make", kwargs={"game": game})
