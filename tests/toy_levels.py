"""Screen-v0: an environment with images, that ppo_joint.py plays in a process of its own."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Screen(gym.Env):
    """Episodes of `length` steps; the image (height, width, channels) has the seed, then the last action plus 100.

    Step number `fail`, counted over all episodes, raises an error.
    """

    def __init__(
        self, height=64, width=96, channels=3, length=3, actions=5, start=0, cut=False, fail=0, render_mode=None
    ):
        shape = (height, width, channels) if channels else (height, width)
        self.observation_space, self.action_space = Box(0, 255, shape, np.uint8), Discrete(actions, start=start)
        self.length, self.cut, self.fail, self.render_mode = length, cut, fail, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show(self.np_random.integers(100)), {}

    def step(self, action):
        self.steps += 1
        self.fail -= 1
        if self.fail == 0:
            raise ArithmeticError("the screen is broken")
        over = self.steps == self.length
        return self.show(100 + action), 2.5 * self.steps, over and not self.cut, over and self.cut, {}

    def show(self, value):
        return np.full(self.observation_space.shape, value, np.uint8)


gym.register("Screen-v0", "toy_levels:Screen")
