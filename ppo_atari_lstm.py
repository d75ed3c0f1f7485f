"""PPO for Atari games with memory: an LSTM instead of a stack of frames, exact through time.

    python ppo_atari_lstm.py                                 # Breakout, 10M steps, 8 games side by side
    python ppo_atari_lstm.py --env-id pong --bf16 --compile  # every flag: --help
    python ppo_atari_lstm.py --resume runs/RUN_FOLDER        # go on with a run, or watch it: add --capture-video

What to expect: Breakout returns 26 after the first 500k of 10M steps, ppo_atari.py with one frame 14; the official code
ends near 140 (Huang et al. 2022).

One iteration collects num_envs x num_steps transitions with the current policy, estimates advantages, and
improves policy and value function by a few epochs of minibatch gradient steps on a clipped objective
(Schulman et al. 2017). The file follows the official implementation (openai/baselines, ppo2) in every detail that
matters, each marked at its line:

     1 vectorized architecture          9 value loss clipping            18 image transformation
     2 orthogonal initialization       10 overall loss, entropy bonus    19 reward clipping
     3 Adam's epsilon                  11 global gradient clipping       21 shared Nature-CNN network
     4 learning rate annealing         12 debug variables                22 scaling of the images
     5 generalized advantages          14 no-op reset                    32 LSTM initialization
     6 minibatch updates               15 frame skipping                 33 zero initial state
     7 advantage normalization         16 episodic life                  34 state reset
     8 clipped surrogate objective     17 fire reset                     35 sequences in minibatches
     36 state reconstruction           Auxiliary: 1 clip range annealing (--anneal-clip), 3 early stopping (--target-kl)

Every spelling of a game means the same, official protocol, which is printed at the start.

Read ppo_atari.py first; what differs is the LSTM: in Agent, Batch, backward(), train() and evaluate(). Shapes:
T = num_steps, N = num_envs, of which a minibatch has n.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "gymnasium>=1.4", "ale-py>=0.12", "numpy>=2.0", "tensorboard>=2.21", "tyro>=1.0", "tqdm>=4.66",
# ]
# ///

import argparse
import contextlib
import difflib
import functools
import importlib.util
import itertools
import math
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "50000")  # torch's idle threads soon leave their cores to the emulators
import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Discrete
from torch import Generator, Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Array = np.ndarray


class UsageError(ValueError):
    """Bad input: the message names the flag and a value that would work."""


@dataclass(frozen=True)
class Args:
    env_id: str = "ALE/Breakout-v5"  # Atari game; BreakoutNoFrameskip-v4 and breakout are the same
    total_timesteps: int = 10_000_000  # environment steps in all, over all sub-environments
    learning_rate: float = 2.5e-4  # Adam's step size at the start
    num_envs: int = 8  # sub-environments stepped together (N)
    num_steps: int = 128  # steps per sub-environment and iteration (T)
    anneal_lr: bool = True  # lower the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch, each of whole sub-environments
    update_epochs: int = 4  # passes over the rollout per iteration
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.1  # clip range of the probability ratio and of the value
    clip_vloss: bool = True  # clip the value loss
    anneal_clip: bool = False  # lower clip_coef linearly to 0
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest global norm of the gradient
    target_kl: float | None = None  # stop the epochs once an epoch's mean KL exceeds this; None: off
    bootstrap_truncated: bool = False  # at time limits, bootstrap the value instead of treating them as terminal
    sticky_actions: float = 0.0  # probability that the emulator repeats the last action; 0.25 in later literature
    seed: int = 1  # seed of weights, actions, minibatches and environments
    device: str = "auto"  # auto (cuda if there, else cpu) or any torch device
    threads: int = torch.get_num_threads()  # CPU threads of torch
    bf16: bool = False  # run the CNN in bfloat16: faster on GPUs, and on CPUs with AVX-512 BF16 or AMX
    compile: bool = False  # compile the CNN and its gradient (about a minute at the start)
    track: bool = False  # log to Weights & Biases too
    capture_video: bool = False  # record the evaluation episodes
    eval_episodes: int = 10  # episodes of the evaluation after training, which waits for their ends; 0: none
    checkpoint_every: int = 100  # iterations between checkpoints; 0: only at the end
    resume: str | None = None  # run folder (or its checkpoint.pt) to continue
    run_dir: str = "runs"  # where run folders are made

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

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
        check("num_minibatches update_epochs", lambda x: x >= 1, "at least 1")
        check("threads", lambda x: 1 <= x <= 1024, "between 1 and 1024")
        check("eval_episodes checkpoint_every", lambda x: x >= 0, "0 or more")
        check("seed", lambda x: 0 <= x < 2**31, "between 0 and 2147483647")
        check("gamma gae_lambda sticky_actions", lambda x: 0 <= x <= 1, "between 0 and 1")
        check("learning_rate ent_coef vf_coef", lambda x: 0 <= x < math.inf, "a finite number, 0 or more")
        check("clip_coef max_grad_norm", lambda x: 0 < x < math.inf, "a finite number above 0")
        check("target_kl", lambda x: x is None or 0 <= x < math.inf, "a finite number, 0 or more, or None")
        batch = f"the batch of --num-envs {self.num_envs} x --num-steps {self.num_steps} = {self.batch_size}"
        if self.num_envs % self.num_minibatches:
            works = math.gcd(self.num_envs, self.num_minibatches)
            raise UsageError(
                f"--num-minibatches {self.num_minibatches}: must divide --num-envs {self.num_envs}, such as {works}, "
                "since a minibatch has whole sub-environments"
            )
        if self.norm_adv and self.minibatch_size == 1:
            raise UsageError(
                f"--num-minibatches {self.num_minibatches}: leaves one sample of {batch} in a minibatch, whose "
                "normalized advantage is 0; use --num-minibatches 1, more --num-steps, or --no-norm-adv"
            )
        if self.total_timesteps < self.batch_size:
            raise UsageError(f"--total-timesteps {self.total_timesteps}: must be at least {batch}")
        if self.capture_video and not self.eval_episodes:
            raise UsageError("--capture-video records the evaluation: --eval-episodes 0 must be at least 1")


class Atari(gym.vector.VectorEnv):
    """Games side by side, each in its emulator's own thread, as the official wrappers show them to the agent.

    Observations (N, 84, 84, 1) are uint8 and overwritten by the next step. A lost life is `terminated` for the
    agent, but the game goes on. info["episode"] has the raw score "r" and the length "l" of the games that ended, under
    the mask info["_episode"]; info["final_obs"] has their last observations.
    """

    protocol = ""

    def __init__(self, emulators: list[AtariVectorEnv]) -> None:
        self.emulators, self.num_envs = emulators, len(emulators)
        self.single_observation_space = Box(0, 255, (84, 84, 1), np.uint8)
        actions = emulators[0].ale.get_action_set()
        self.single_action_space = Discrete(len(actions))
        # Detail 17: fire reset - in games that have FIRE, a life starts with it and with the action after it
        self.start = [1, 2] if actions[1] == ale_py.Action.FIRE else []
        self.frames = np.zeros((self.num_envs, 84, 84, 1), np.uint8)
        self.scores, self.lengths, self.lives = ([0] * self.num_envs for _ in range(3))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Array, dict]:
        self.info: dict[str, Any] = {}
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        for i, emulator in enumerate(self.emulators):
            frame = self.start_game(i, *emulator.reset(seed=None if seeds[i] is None else np.array([seeds[i]])))
            self.frames[i, ..., 0] = self.start_life(i, frame[0, 0], False)
        return self.frames, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict]:
        if not all(self.single_action_space.contains(action) for action in actions):  # the emulator would never return
            raise ValueError(f"actions must be of {self.single_action_space}, not {actions}")
        for emulator, action in zip(self.emulators, actions.reshape(self.num_envs, 1)):
            emulator.send(action)
        self.info = {}
        rewards, (terminated, truncated) = np.zeros(self.num_envs), np.zeros((2, self.num_envs), bool)
        for i in range(self.num_envs):
            frame, reward, life_lost, game_over, truncated[i] = self.receive(i)
            # Detail 19: reward clipping - to the sign
            rewards[i] = np.sign(reward)
            terminated[i] = life_lost or game_over
            if terminated[i] or truncated[i]:
                frame = self.start_life(i, frame, life_lost)
            self.frames[i, ..., 0] = frame
        return self.frames, rewards, terminated, truncated, self.info

    def receive(self, i: int) -> tuple[Array, int, bool, bool, bool]:
        """Ends a step of one emulator: frame, raw reward, life lost, game over, time limit; starts the next game."""
        frame, *outcome, info = self.emulators[i].recv()
        reward, game_over, truncated, lives = (x.item() for x in (*outcome, info["lives"]))
        self.scores[i] += reward
        self.lengths[i] += 1
        # Detail 16: episodic life - the agent's episode ends with each life, the game only with the last one
        life_lost = not (game_over or truncated) and 0 < lives < self.lives[i]
        self.lives[i] = lives
        if game_over or truncated:
            episode = self.info.setdefault("episode", {"r": np.zeros(self.num_envs), "l": np.zeros(self.num_envs, int)})
            ended = self.info.setdefault("_episode", np.zeros(self.num_envs, bool))
            final_obs = self.info.setdefault("final_obs", np.zeros_like(self.frames))
            episode["r"][i], episode["l"][i], ended[i] = self.scores[i], self.lengths[i], True
            final_obs[i, ..., 0] = info["final_obs"][0, 0]
            frame = self.start_game(i, frame, info)
        return frame[0, 0], reward, life_lost, game_over, truncated

    def start_game(self, i: int, frame: Array, info: dict[str, Array]) -> Array:
        # Detail 14: no-op reset - 1 to 30 frames without action; the emulator draws from 0 to 30, so 0 is drawn again
        while info["episode_frame_number"].item() == 0:
            frame, info = self.emulators[i].reset()
        self.lives[i], self.scores[i], self.lengths[i] = info["lives"].item(), 0, 0
        return frame

    def start_life(self, i: int, frame: Array, life_lost: bool) -> Array:
        """Takes the hidden steps of one emulator: a no-op after a lost life, then the fire reset; returns the frame."""
        hidden = [0] * life_lost + self.start
        while hidden:
            self.emulators[i].send(np.array([action := hidden.pop(0)]))
            frame, _, life_lost, _, _ = self.receive(i)
            hidden[:0] = [0] * (life_lost and action > 0)  # a life lost in a no-op costs no second one
        return frame

    def close_extras(self, **kwargs: Any) -> None:
        for emulator in self.emulators:
            emulator.close()


class FilmedEmulator(AtariVectorEnv):
    """Emulator with a twin that plays the same game in color, and writes it to a video file frame by frame."""

    def __init__(self, video: Path, **options: Any) -> None:
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        super().__init__(**options)
        color = {"grayscale": False, "maxpool": False, "img_height": 210, "img_width": 160}
        self.twin = AtariVectorEnv(**options | color)
        video.parent.mkdir(parents=True, exist_ok=True)
        self.film = FFMPEG_VideoWriter(f"{video}.mp4", (160, 210), fps=15)

    def reset(self, *, seed=None, options=None):
        self.twin.reset(seed=seed)
        return super().reset(seed=seed)

    def send(self, actions: Array) -> None:
        self.twin.send(actions)
        super().send(actions)

    def recv(self):
        frame, *_, info = self.twin.recv()
        self.film.write_frame(info.get("final_obs", frame)[0, 0])
        return super().recv()

    def close_extras(self, **kwargs: Any) -> None:
        self.film.close()


def find_game(env_id: str) -> str:
    """Returns the emulator's name of a game: breakout for ALE/Breakout-v5, BreakoutNoFrameskip-v4 and breakout."""
    gym.register_envs(ale_py)
    atari = [spec for spec in gym.registry.values() if spec.entry_point == "ale_py.env:AtariEnv"]
    games = {name: spec.kwargs["game"] for spec in atari for name in (spec.id, spec.kwargs["game"])}
    if env_id not in games:
        hint = "did you mean " + " or ".join(difflib.get_close_matches(env_id, games, 3, 0)) + "?"
        if env_id in gym.registry:
            hint = "use ppo_classic.py or, for Box actions, ppo_continuous.py"
        raise UsageError(f"--env-id {env_id}: not an Atari game; {hint}")
    return games[env_id]


def make_envs(args: Args, num_envs: int, video: Path | None = None) -> Atari:
    """Makes `num_envs` sub-environments that step together, and films them if `video` is a name. Raises UsageError."""
    game = find_game(args.env_id)
    # Detail 15: frame skipping - an action lasts four frames, and the agent sees the maximum of the last two
    options: dict[str, Any] = {"game": game, "num_envs": 1, "num_threads": 1, "frameskip": 4, "maxpool": True}
    # Detail 18: image transformation - gray, then 84 x 84 by area (official: gray after the maximum)
    options |= {"grayscale": True, "img_height": 84, "img_width": 84, "stack_num": 1}
    options |= {"max_num_frames_per_episode": 108_000, "repeat_action_probability": args.sticky_actions, "noop_max": 31}
    options |= {"reward_clipping": False, "use_fire_reset": False, "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    make = functools.partial(FilmedEmulator, video) if video else AtariVectorEnv
    envs = Atari([make(**options) for _ in range(num_envs)])
    actions = " ".join(action.name for action in envs.emulators[0].ale.get_action_set())
    envs.protocol = (
        f"{game}: 4 frames a step, at most 108,000 a game, sticky actions {args.sticky_actions}, 1 to 30 no-ops, "
        f"{'fire' if envs.start else 'no fire'} reset, actions {actions}"
    )
    return envs


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


def make_lstm(inputs: int, units: int) -> nn.LSTM:
    # Detail 32: LSTM initialization - orthogonal weights with gain 1; one bias, zero, while torch would train two
    lstm = nn.LSTM(inputs, units, batch_first=True)
    for name, parameter in lstm.named_parameters():
        nn.init.zeros_(parameter) if name.startswith("bias") else nn.init.orthogonal_(parameter, 1.0)
    lstm.bias_hh_l0.requires_grad_(False)
    return lstm


class Agent(nn.Module):
    """Policy and value function of sequences of frames (n, T, 84, 84, 1), uint8, with a memory of what came before."""

    def __init__(self, obs_space: Box, action_space: Discrete, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        # Detail 21: shared Nature-CNN network - one trunk for policy and value (Mnih et al. 2015)
        layers = [nn.Conv2d(obs_space.shape[2], 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)]
        trunk = [layer for conv in layers for layer in (orthogonal(conv, math.sqrt(2)), nn.ReLU())]
        self.trunk = nn.Sequential(*trunk, nn.Flatten(), orthogonal(nn.Linear(3136, 512), math.sqrt(2)), nn.ReLU())
        self.lstm = make_lstm(512, 128)
        self.policy_head = orthogonal(nn.Linear(128, int(action_space.n)), 0.01)
        self.value_head = orthogonal(nn.Linear(128, 1), 1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        # Detail 33: zero initial state - of both the hidden and the cell state (n, 2, 128)
        return next(self.parameters()).new_zeros((num_envs, 2, self.lstm.hidden_size))

    def encoder(self, obs: Tensor) -> Tensor:
        """Returns the features (B, 512), float32."""
        # Detail 22: scaling of the images - to [0, 1], inside the network, so that all else handles bytes
        images = obs.to(torch.float32, copy=True).div_(255).permute(0, 3, 1, 2)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            return self.trunk(images).float()

    def memory(self, features: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the LSTM over (n, T, 512): as many steps in one call as there are before an episode starts."""
        changes = (starts[:, 1:].any(0).nonzero().flatten() + 1).tolist()
        outputs = []
        for begin, end in itertools.pairwise([0, *changes, starts.shape[1]]):
            # Detail 34: state reset - by the flag of the current observation, before the LSTM sees it
            hidden, cell = (state * (1 - starts[:, begin, None, None].float())).unbind(1)
            output, (hidden, cell) = self.lstm(features[:, begin:end], (hidden[None], cell[None]))
            outputs.append(output)
            state = torch.stack((hidden[0], cell[0]), 1)
        return torch.cat(outputs, 1), state

    def forward(self, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Categorical, Tensor, Tensor]:
        """Returns the action distribution (n, T), the value (n, T) and the new state (n, 2, 128).

        starts (n, T): whether an episode starts with the observation. state (n, 2, 128): after the step before.
        """
        features = self.encoder(obs.flatten(0, 1)).unflatten(0, starts.shape)
        features, state = self.memory(features, starts, state)
        return Categorical(self.policy_head(features)), self.value_head(features).squeeze(-1), state


class Adam(torch.optim.Adam):
    """Adam as TensorFlow computes it: with epsilon added before the bias correction, not after it as in torch."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            # Detail 3: Adam's epsilon of 1e-5 - in torch's terms 1e-5 / sqrt(1 - beta2^t), 3.2e-4 in the first step t
            group["eps"] = 1e-5 / math.sqrt(1 - group["betas"][1] ** group["steps"])
        return super().step(closure)


class Batch(NamedTuple):
    """Samples of a rollout (N, T, ...) and the LSTM's states before it (N, 2, 128); the first axis is shuffled."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    returns: Tensor
    starts: Tensor
    states: Tensor


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
    # Detail 36: state reconstruction - each update replays the rollout from the states that it began with
    dist, value, _ = agent(batch.obs, batch.starts, batch.states)
    loss, stats = ppo_loss(dist, value, batch, clip_coef, args)
    loss.backward()
    return stats


def update_minibatch(
    agent: Agent, optimizer: Adam, batch: Batch, clip_coef: Tensor, args: Args, backward: Callable
) -> Tensor:
    """Takes one gradient step; returns STATS (8,)."""
    optimizer.zero_grad()
    stats = backward(agent, batch, clip_coef, args)
    # Detail 11: global gradient clipping - one norm over all parameters
    gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
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
    """Trains, evaluates and returns the results: run_folder, global_step, episodic_return, eval_returns.

    Once `stop` is not empty, the iteration is finished, a checkpoint written, and the evaluation left out. Raises
    UsageError for bad input, before anything is written, and FloatingPointError for NaN or infinity.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = check_machine(args)
    envs: Any = make_envs(args, args.num_envs)
    print(envs.protocol)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args.bf16).to(device)
    optimizer = Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    parts = {"agent": agent, "optimizer": optimizer}
    resumed = load_checkpoint(args.resume, **parts) if args.resume else {}
    iteration = resumed.get("iteration", 0)
    if args.compile:
        compile_encoder(agent, device)
    generator = Generator(device)

    shape = (args.num_steps + 1, args.num_envs, *envs.single_observation_space.shape)
    obs = torch.zeros(shape, dtype=torch.uint8, device=device)
    actions = torch.zeros((args.num_steps, args.num_envs), dtype=torch.int64, device=device)
    log_probs, values = torch.zeros((2, args.num_steps, args.num_envs), device=device)
    rewards = np.zeros((args.num_steps, args.num_envs), np.float32)
    dones = np.zeros((args.num_steps, args.num_envs), bool)
    starts = torch.ones((args.num_steps + 1, args.num_envs), dtype=torch.bool, device=device)  # obs begins an episode
    state = agent.initial_state(args.num_envs)
    obs[-1] = torch.from_numpy(envs.reset(seed=spawn_seeds(args.seed, iteration, ENVIRONMENTS, args.num_envs))[0])

    with contextlib.closing(Run(args, envs, resumed.get("folder"), iteration)) as run:
        while iteration < args.num_iterations and not stop:
            # Random numbers depend on seed and iteration alone: a resumed run draws what it would have drawn
            generator.manual_seed(spawn_seeds(args.seed, iteration, SAMPLES, 1)[0])
            # Detail 4: Adam learning rate annealing - full in the first iteration, 1/num_iterations of it in the last
            remaining = 1 - iteration / args.num_iterations
            learning_rate = args.learning_rate * remaining if args.anneal_lr else args.learning_rate
            optimizer.param_groups[0]["lr"] = learning_rate
            # Auxiliary 1: clip range annealing - in step with the learning rate
            clip_coef = torch.tensor(args.clip_coef * remaining if args.anneal_clip else args.clip_coef, device=device)

            # Detail 1: vectorized architecture - N environments step together, and their episodes span rollouts
            obs[0], starts[0], first_state = obs[-1], starts[-1], state
            final_values = np.zeros_like(rewards)
            with torch.inference_mode():
                for t in range(args.num_steps):
                    dist, value, state = agent(obs[t, :, None], starts[t, :, None], state)
                    action = dist.sample(generator)
                    actions[t], log_probs[t], values[t] = action[:, 0], dist.log_prob(action)[:, 0], value[:, 0]
                    next_obs, rewards[t], terminated, truncated, info = envs.step(actions[t].cpu().numpy())
                    dones[t] = terminated | truncated
                    obs[t + 1], starts[t + 1] = torch.from_numpy(next_obs), torch.from_numpy(dones[t])
                    if "episode" in info:
                        run.count_episodes(info)
                    if args.bootstrap_truncated and (cut := truncated & ~terminated).any():
                        final_obs = torch.from_numpy(np.stack(info["final_obs"][cut])).to(obs).unsqueeze(1)
                        going_on = torch.zeros_like(starts[0, cut, None])
                        final_values[t, cut] = agent(final_obs, going_on, state[cut])[1][:, 0].cpu().numpy()
                next_value = agent(obs[-1, :, None], starts[-1, :, None], state)[1][:, 0].cpu().numpy()
            check_finite(iteration * args.num_steps, value=values, reward=rewards, final_value=final_values)

            advantages = gae(rewards, values.cpu().numpy(), dones, next_value, final_values, args)
            returns = values + torch.from_numpy(advantages).to(device)
            # Detail 35: sequences in minibatches - the first axis, which is shuffled, is that of the sub-environments
            steps = (x.transpose(0, 1) for x in (obs[:-1], actions, log_probs, values, returns, starts[:-1]))
            batch = Batch(*steps, first_state)  # type: ignore[call-arg]

            losses = dict(zip(STATS, update(agent, optimizer, batch, clip_coef, args, backward, generator).tolist()))
            iteration += 1
            if bad := [name for name, value in losses.items() if not math.isfinite(value)]:
                raise FloatingPointError(f"NaN or infinity in {', '.join(bad)} of iteration {iteration}")
            losses["explained_variance"] = (1 - (returns - values).var() / returns.var()).item()
            run.log(iteration, learning_rate, losses)
            if iteration % (args.checkpoint_every or math.inf) == 0:
                save_checkpoint(run.folder, iteration, args, **parts)
        if iteration > resumed.get("iteration", 0):  # after the loop, so that no signal falls between test and save
            save_checkpoint(run.folder, iteration, args, **parts)
        return run.finish(agent, iteration, stop)


def evaluate(agent: Agent, args: Args, seeds: list[int], stop: Sequence[int], video: Path | None = None) -> list[float]:
    """Plays one episode per seed, side by side, with sampled actions; returns the returns of those that ended.

    One each, so that short episodes do not count more often than long ones. Ends early once `stop` is not empty.
    """
    device = next(agent.parameters()).device
    generator = Generator(device).manual_seed(seeds[0])
    envs: Any = make_envs(args, len(seeds), video)
    obs, _ = envs.reset(seed=seeds)
    starts, state = np.zeros(len(seeds), bool), agent.initial_state(len(seeds))
    returns: dict[int, float] = {}
    while len(returns) < len(seeds) and not stop:
        with torch.inference_mode():
            inputs = (torch.from_numpy(x).to(device).unsqueeze(1) for x in (obs, starts))
            dist, _, state = agent(*inputs, state)
            action = dist.sample(generator).squeeze(1)
        obs, _, terminated, truncated, info = envs.step(action.cpu().numpy())
        starts = terminated | truncated
        if "episode" in info:
            returns = {int(i): float(info["episode"]["r"][i]) for i in np.flatnonzero(info["_episode"])} | returns
    envs.close()
    return [returns[i] for i in sorted(returns)]


ENVIRONMENTS, SAMPLES, EVALUATION = range(3)  # streams of random numbers
SCRIPT = Path(globals().get("__file__", "ppo_atari_lstm.py")).stem


def spawn_seeds(seed: int, iteration: int, stream: int, count: int) -> list[int]:
    """Returns `count` independent seeds below 2**31; another seed, iteration or stream gives others."""
    return (np.random.SeedSequence((seed, iteration, stream)).generate_state(count) >> 1).tolist()


def check_finite(first_step: int, **rollout: Tensor | Array) -> None:
    """Raises FloatingPointError at the first NaN or infinity of a rollout (T, N, ...), before it is learned from."""
    for name, x in rollout.items():
        bad = ~torch.as_tensor(x).isfinite()
        if bad.any():
            t, index = bad.nonzero()[0, :2].tolist()
            raise FloatingPointError(
                f"NaN or infinity in the {name} of sub-environment {index} at step {first_step + t}"
            )


class Run:
    """Run folder, TensorBoard events and progress of one training."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv, folder: Path | None, iteration: int) -> None:
        name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9}"
        safe_name = re.sub(r"[^\w.-]+", "_", name)  # every file system takes it
        self.args, self.envs, self.folder = args, envs, folder or Path(args.run_dir).expanduser() / safe_name
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
        print(
            f"{args.env_id}: {args.num_iterations:,} iterations of {args.num_envs} x {args.num_steps}, in {self.folder}"
        )
        if args.resume:
            print(f"continuing after step {step:,}; the environments start new episodes")
        self.bar = tqdm(
            total=self.total, initial=step, unit=" steps", unit_scale=True, dynamic_ncols=True, disable=None
        )
        self.ended: list[tuple[float, int]] = []  # return and length of the episodes that ended in this iteration
        self.recent: deque[float] = deque(maxlen=100)  # returns of the last episodes
        self.started = self.printed = time.perf_counter()
        self.first: tuple[int, float] | None = None  # step and time after the first iteration: SPS counts from there

    def close(self) -> None:
        self.bar.close()
        self.writer.close()
        self.envs.close()

    def count_episodes(self, info: dict[str, Any]) -> None:
        ended, episode = info["_episode"], info["episode"]
        self.ended += zip(episode["r"][ended].tolist(), episode["l"][ended].tolist())

    def log(self, iteration: int, learning_rate: float, losses: dict[str, float]) -> None:
        """Writes one point of every curve and shows the progress."""
        step, now = iteration * self.args.batch_size, time.perf_counter()
        self.first = self.first or (step, now)
        sps = (step - self.first[0]) / max(now - self.first[1], 1e-9)
        scalars = {"charts/learning_rate": learning_rate} | {f"losses/{name}": x for name, x in losses.items()}
        if sps:
            scalars["charts/SPS"] = sps
        if self.ended:
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(self.ended, 0)
            self.recent.extend(episode[0] for episode in self.ended)
            self.ended.clear()
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        state = f"return {np.mean(self.recent):.1f}" if self.recent else "no episode has ended"
        self.bar.set_postfix_str(state, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and sps and now - self.printed > 5:
            self.printed = now
            print(f"step {step:,}, {state}, {sps:,.0f} steps/s, {(self.total - step) / sps:,.0f} s left", flush=True)

    def finish(self, agent: Agent, iteration: int, stop: Sequence[int]) -> dict[str, Any]:
        """Evaluates the agent, prints the results and returns them."""
        self.bar.close()
        args, step, returns = self.args, iteration * self.args.batch_size, []
        seeds = spawn_seeds(args.seed, iteration, EVALUATION, 0 if stop else args.eval_episodes)
        if args.capture_video:  # one at a time: each has a file of its own
            for number, seed in enumerate(seeds, 1):
                returns += evaluate(agent, args, [seed], stop, self.folder / "videos" / f"step-{step}-{number}")
        elif seeds:
            returns = evaluate(agent, args, seeds, stop)
        if stop:
            returns = []  # cut short: the longest episodes are missing
        training_return = float(np.mean(self.recent)) if self.recent else math.nan
        state = f", return {training_return:.1f} (last {len(self.recent)} episodes)" if self.recent else ""
        print(f"step {step:,} of {self.total:,} after {time.perf_counter() - self.started:,.0f} s{state}")
        if returns:
            self.writer.add_scalar("eval/episodic_return", np.mean(returns), step)
            print(f"evaluation: return {np.mean(returns):.1f} +- {np.std(returns):.1f} ({len(returns)} episodes)")
        print(f"curves: tensorboard --logdir {self.folder.parent}")
        if (self.folder / "checkpoint.pt").exists():
            print(f"watch or go on: python {SCRIPT}.py --resume {self.folder}")
        results = {"run_folder": self.folder, "global_step": step, "eval_returns": returns}
        return results | {"episodic_return": training_return}


def save_checkpoint(folder: Path, iteration: int, args: Args, **parts: Any) -> None:
    """Writes checkpoint.pt whole or not at all; it holds tensors and plain values only."""
    state = {"script": SCRIPT, "args": asdict(args), "iteration": iteration, "global_step": iteration * args.batch_size}
    state |= {name: part.state_dict() for name, part in parts.items()}
    part = folder / f"checkpoint.pt.{os.getpid()}"
    torch.save(state, part)
    os.replace(part, folder / "checkpoint.pt")


def load_checkpoint(resume: str, **parts: Any) -> dict[str, Any]:
    """Returns the checkpoint of a run folder; restores the parts that are given. Raises UsageError."""
    file = Path(resume, "checkpoint.pt") if Path(resume).is_dir() else Path(resume)
    if not file.is_file():
        raise UsageError(f"--resume {resume}: no checkpoint.pt; name a run folder, such as runs/RUN_FOLDER")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True) | {"folder": file.parent}
        script, flags = state["script"], state["args"].keys()
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except Exception as error:
        raise UsageError(
            f"--resume {resume}: damaged, or of another network ({type(error).__name__}: {error})"
        ) from error
    if flags != {field.name for field in fields(Args)}:
        raise UsageError(f"--resume {resume}: {script}.py wrote this checkpoint, and its flags differ; resume it there")
    return state


def parse_args(argv: list[str] | None = None) -> Args:
    """Reads the command line; with --resume on top of the run's own flags, most of which must stay as they are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    resume = parser.parse_known_args(argv)[0].resume
    if resume is None:
        return tyro.cli(Args, args=argv, description=__doc__)
    saved = Args(**load_checkpoint(resume)["args"])
    args = tyro.cli(Args, args=argv, default=saved)
    free = "resume total_timesteps device threads compile track capture_video eval_episodes checkpoint_every".split()
    for name, value in asdict(saved).items():
        if name not in free and getattr(args, name) != value:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(args, name)}: must stay {value}, as in the run that is resumed")
    return args


def check_machine(args: Args) -> torch.device:
    """Returns the device; raises UsageError for what this machine lacks, before anything is written."""
    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {args.device}: not available here ({reason}); use --device cpu") from error
    for flag, package in {"track": "wandb", "capture_video": "moviepy"}.items():
        if getattr(args, flag) and importlib.util.find_spec(package) is None:
            raise UsageError(f"--{flag.replace('_', '-')} needs {package}: pip install {package}")
    return torch.device(name)


def compile_encoder(agent: Agent, device: torch.device) -> None:
    """Compiles the agent's CNN and its gradient; the LSTM is a kernel of its own. Raises UsageError."""
    try:
        torch.compile(torch.sin, fullgraph=True)(torch.ones(8, device=device))
    except Exception as error:
        raise UsageError(f"--compile does not work here ({str(error).splitlines()[0]}); run without it") from error
    options: dict[str, Any] = (
        {"options": {"cpp_wrapper": True}} if device.type == "cpu" else {"mode": "reduce-overhead"}
    )
    eager, compiled = agent.encoder, torch.compile(agent.encoder, fullgraph=True, **options)
    agent.encoder = lambda obs: compiled(obs) if torch.is_grad_enabled() else eager(obs)  # type: ignore[method-assign]


def main() -> None:
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # a second signal exits at once
        signal.signal(number, lambda number, _: os._exit(128 + number) if stop else stop.append(number))
    try:
        train(parse_args(), stop)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except FloatingPointError as error:
        print(f"error: {error}; the last checkpoint is as it was", file=sys.stderr)
        sys.exit(1)
    if stop:
        sys.exit(128 + stop[0])


if __name__ == "__main__":
    main()
