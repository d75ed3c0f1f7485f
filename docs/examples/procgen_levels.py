"""Procgen/GAME-v0: the sixteen games of Procgen, whose levels grow from seeds, as levels of ppo_joint.py.

    pip install --no-deps procgen2==0.10.7 gym3==0.3.3
    pip install cffi filelock cloudpickle glfw moderngl imageio imageio-ffmpeg
    PYTHONPATH=docs/examples python ppo_joint.py --compile \\
        --levels "procgen_levels:Procgen/coinrun-v0?num_levels=200&distribution_mode=easy" \\
        --test-levels "procgen_levels:Procgen/coinrun-v0?start_level=200&num_levels=0&distribution_mode=easy"

The packages ask for an old numpy in vain (hence --no-deps), and for gym's registry, which gymnasium has too. Options
are Procgen's own: an episode plays one of the num_levels seeds from start_level on (0: all of them).
"""

import sys

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

for name in ("gymnasium", "gymnasium.envs", "gymnasium.envs.registration"):
    sys.modules.setdefault(name.replace("gymnasium", "gym"), sys.modules[name])
from procgen import ProcgenGym3Env  # noqa: E402
from procgen.env import ENV_NAMES  # noqa: E402


class Procgen(gym.Env):
    """One game: images (64, 64, 3), 15 actions; info["level_seed"] is the seed of the level.

    After an episode Procgen goes on by itself: what it shows then is the next one. The last image of an episode is
    therefore never seen, and the one before is returned in its place. A time limit ends an episode like a failure.
    """

    metadata = gym.Env.metadata | {"render_modes": ["rgb_array"], "render_fps": 15}
    observation_space, action_space = Box(0, 255, (64, 64, 3), np.uint8), Discrete(15)

    def __init__(self, game: str, render_mode: str | None = None, **options) -> None:
        self.options = {"num": 1, "env_name": game, "num_threads": 0, "render_mode": render_mode} | options
        self.render_mode = render_mode
        self.start()

    def start(self) -> None:
        self.game = ProcgenGym3Env(rand_seed=int(self.np_random.integers(2**31)), **self.options)
        self.fresh = True  # at the start of an episode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None or not self.fresh:
            self.start()
        self.look()
        return self.image, self.info

    def step(self, action):
        self.game.act(np.array([action]))
        reward, _, first = self.game.observe()
        self.fresh = bool(first[0])
        if not self.fresh:
            self.look()
        return self.image, float(reward[0]), self.fresh, False, self.info

    def look(self) -> None:
        info = self.game.get_info()[0]
        self.image, self.fresh = self.game.observe()[1]["rgb"][0].copy(), False
        self.info, self.picture = {"level_seed": int(info["level_seed"])}, info.get("rgb")

    def render(self):
        return self.picture


for game in ENV_NAMES:
    gym.register(f"Procgen/{game}-v0", "procgen_levels:Procgen", kwargs={"game": game})
