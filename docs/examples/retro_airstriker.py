"""Airstriker-v0: the Mega Drive game that stable-retro brings along, its pad as actions, MultiDiscrete([3, 3, 14]).

    pip install stable-retro==1.0.1
    PYTHONPATH=docs/examples python ppo_multidiscrete.py --env-id retro_airstriker:Airstriker-v0 --async-envs --compile

A process runs one emulator only, hence --async-envs. The emulator draws no random numbers: sticky actions make games
differ. ppo_multidiscrete.py flattens the image; a convolutional network is better suited to it.
"""

import gymnasium as gym
import numpy as np
import stable_retro
from gymnasium.spaces import Box


def shrink(image: np.ndarray) -> np.ndarray:
    """Returns the image (224, 320, 3) in gray, (28, 40) from 0 to 1: the mean of each block of 8 x 8 pixels."""
    return image.reshape(28, 8, 40, 8, 3).mean((1, 3, 4), dtype=np.float32) / 255


def make(render_mode: str | None = None) -> gym.Env:
    """Makes one game: the observation is the last 4 images, an action lasts 4 frames, the reward is the score.

    The components of an action are vertical, horizontal and buttons.
    """
    env = stable_retro.make(
        "Airstriker-Genesis-v0",
        use_restricted_actions=stable_retro.Actions.MULTI_DISCRETE,
        render_mode="rgb_array",  # the default opens a window
    )
    env = gym.wrappers.StickyAction(env, repeat_action_probability=0.25)
    env = gym.wrappers.MaxAndSkipObservation(env, skip=4)
    env = gym.wrappers.TransformObservation(env, shrink, Box(0, 1, (28, 40), np.float32))
    return gym.wrappers.FrameStackObservation(env, stack_size=4)


gym.register("Airstriker-v0", "retro_airstriker:make", max_episode_steps=4500)  # five minutes
