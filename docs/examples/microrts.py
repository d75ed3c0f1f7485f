"""MicroRTS-v0: a real-time strategy game on an 8x8 map, one unit order for each of the 64 cells, with action masks.

    pip install jpype1 pillow                                    # and Java: apt-get install default-jre-headless
    pip install --no-deps --ignore-requires-python gym-microrts==0.6.0
    PYTHONPATH=docs/examples python ppo_multidiscrete.py --env-id microrts:MicroRTS-v0 --compile

gym-microrts requires an old Python and an old gym (hence the two options), but uses nothing of gym except its spaces,
which gymnasium has too. It runs in one Java machine per process, which starts with the first environment, serves all of
them, and ends with the process: closing an environment leaves it running, since it cannot start a second time. Java
draws its own random numbers: the opponent does not follow the seed.
"""

import os
import sys

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete

os.environ.setdefault("JAVA_TOOL_OPTIONS", "-Xrs")  # leave Ctrl-C and SIGTERM to Python, which saves a checkpoint
sys.modules.setdefault("gym", gym)  # for gym-microrts
from gym_microrts import microrts_ai  # noqa: E402
from gym_microrts.envs.vec_env import MicroRTSGridModeVecEnv  # noqa: E402


class MicroRTS(gym.Env):
    """One game against a scripted opponent; the reward is shaped (win, harvest, workers, buildings, attacks, fighters).

    Observation: 27 planes (height, width, 27). Action: 7 components for each cell, row by row (order; direction to
    move, harvest, return, produce; unit type; target of an attack). info["action_mask"] has 78 choices for each cell; a
    cell without a unit that waits for an order has no legal one. A game ends at max_steps at the latest.
    """

    metadata = gym.Env.metadata | {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        map_path: str = "maps/8x8/basesWorkers8x8.xml",
        opponent: str = "randomBiasedAI",
        max_steps: int = 400,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self.game = MicroRTSGridModeVecEnv(
            num_selfplay_envs=0,
            num_bot_envs=1,
            max_steps=max_steps,
            ai2s=[getattr(microrts_ai, opponent)],
            map_paths=[map_path],
            reward_weight=np.array([10.0, 1.0, 1.0, 0.2, 1.0, 4.0]),
        )
        cells = self.game.height * self.game.width
        self.observation_space = Box(0, 1, self.game.observation_space.shape, np.int32)
        self.action_space = MultiDiscrete(np.tile(self.game.action_space_dims, cells))
        self.fresh = False  # whether the game has just restarted by itself, as it does at its end

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs = self.obs if self.fresh else self.game.reset()[0]
        self.fresh = False
        return obs, self.info()

    def step(self, action):
        obs, reward, done, _ = self.game.step(action[None])
        self.obs, self.fresh = obs[0], bool(done[0])  # after the end it is the next game's first observation
        return obs[0], float(reward[0]), self.fresh, False, {} if self.fresh else self.info()

    def info(self):
        return {"action_mask": self.game.get_action_mask()[0].ravel()}  # the game must be asked before every step

    def render(self):
        return self.game.render("rgb_array")


gym.register("MicroRTS-v0", "microrts:MicroRTS")
