"""Steps a second of our scripts against stable-baselines3, alternating on one machine.

    python docs/benchmark/speed.py classic            # 5 alternating rounds; classic, continuous, ...
    python docs/benchmark/speed.py classic --rounds 3

Both sides have the same environment, steps, batch, epochs, network, normalization and value clipping. Start-up and
compilation do not count: the clock starts with the second iteration. stable-baselines3 gets the better of one and all
threads; it has no recurrent policy and no workers, so atari_lstm and joint are beside ppo_atari.py. Printed: each
figure, medians, and the median of the ratios within a round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = {  # script, and after - another task than its own: (arguments, the variants to time)
    "classic": ("--total-timesteps 150000", {"eager": "", "compile": "--compile"}),
    "continuous": ("--total-timesteps 40960", {"eager": "", "compile": "--compile"}),
    "multidiscrete": ("--total-timesteps 150000", {"eager": "", "compile": "--compile"}),
    "multidiscrete-halfcheetah": (
        "--env-id HalfCheetah-v5 --total-timesteps 100000",
        {"eager": "", "compile": "--compile"},
    ),
    "atari": ("--total-timesteps 13000", {"eager": "", "compile": "--compile", "bf16": "--bf16 --compile"}),
    "atari_lstm": ("--total-timesteps 13000", {"eager": ""}),
    "joint": (
        "--levels breakout --total-timesteps 13000",
        {
            "eager": "",
            "one worker": "--threads 1",
            "two workers": "-m torch.distributed.run --standalone --nproc-per-node 2 | ",
        },
    ),
}
SETTINGS = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "clip_range": 0.1, "clip_range_vf": 0.1, "ent_coef": 0.01}
PEERS: dict[str, Any] = {  # script: what stable-baselines3 needs to do the same work, or another script of ours
    "classic": {
        "make": {"env_id": "CartPole-v1", "n_envs": 4},
        "steps": 60_000,
        "model": {"policy": "MlpPolicy", "n_steps": 128, "batch_size": 128, "n_epochs": 4, "clip_range_vf": 0.2},
    },
    "continuous": {
        "make": {"env_id": "HalfCheetah-v5", "n_envs": 1},
        "normalize": True,
        "steps": 20_480,
        "model": {"policy": "MlpPolicy", "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "clip_range_vf": 0.2},
    },
    "multidiscrete": {
        "make": {"env_id": "Swimmer-v5", "n_envs": 8},
        "bins": 11,
        "steps": 60_000,
        "model": {"policy": "MlpPolicy"} | SETTINGS,
    },
    "multidiscrete-halfcheetah": {
        "make": {"env_id": "HalfCheetah-v5", "n_envs": 8},
        "bins": 11,
        "steps": 60_000,
        "model": {"policy": "MlpPolicy"} | SETTINGS,
    },
    "atari": {
        "make": {"env_id": "BreakoutNoFrameskip-v4", "n_envs": 8},
        "frames": 4,
        "steps": 8_192,
        "model": {"policy": "CnnPolicy"} | SETTINGS,
    },
    "atari_lstm": "atari",
    "joint": "atari",
}


def read_sps(folder: Path) -> float:
    """Returns the last charts/SPS of the only run in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    events = EventAccumulator(str(run))
    events.Reload()
    return events.Scalars("charts/SPS")[-1].value


def time_ours(script: str, flags: str) -> float:
    arguments, _ = OURS[script]
    launcher, _, flags = flags.rpartition(" | ")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher.split(), str(ROOT / f"ppo_{script.partition('-')[0]}.py")]
        command += [*arguments.split(), *flags.split()]
        subprocess.run([*command, "--eval-episodes", "0", "--run-dir", folder], check=True, stdout=subprocess.DEVNULL)
        return read_sps(Path(folder))


def run_peer(script: str, threads: int) -> None:
    """Trains with stable-baselines3 in this process and prints its steps a second."""
    import time

    import ale_py
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

    sys.path.insert(0, str(ROOT))
    from ppo_multidiscrete import Components

    class Clock(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.marks: list[tuple[float, int]] = []

        def _on_rollout_start(self) -> None:
            self.marks.append((time.perf_counter(), self.num_timesteps))

        def _on_step(self) -> bool:
            return True

    torch.set_num_threads(threads)
    gym.register_envs(ale_py)
    peer, clock = PEERS[script], Clock()
    if "frames" in peer:
        envs: VecEnv = VecFrameStack(make_atari_env(**peer["make"]), peer["frames"])
    else:
        wrapper = (lambda env: Components(env, peer["bins"])) if "bins" in peer else None
        envs = make_vec_env(**peer["make"], wrapper_class=wrapper)
    envs = VecNormalize(envs) if peer.get("normalize") else envs
    PPO(env=envs, device="cpu", **peer["model"]).learn(peer["steps"], callback=clock)
    (start, first), (end, last) = clock.marks[1], clock.marks[-1]
    print((last - first) / (end - start))


def time_peer(script: str, threads: int) -> float:
    if isinstance(PEERS[script], str):
        return time_ours(PEERS[script], "")
    command = [sys.executable, __file__, script, "--peer", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=OURS)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default 5)")
    parser.add_argument("--variants", nargs="*", help="which of ours to time, such as eager (default: all)")
    parser.add_argument("--peer", type=int, metavar="THREADS", help="run only stable-baselines3, with so many threads")
    args = parser.parse_args()
    if args.peer:
        return run_peer(args.script, args.peer)
    cores, peer, best = len(os.sched_getaffinity(0)), PEERS[args.script], 1
    name = f"ppo_{peer}.py" if isinstance(peer, str) else "stable-baselines3"
    if not isinstance(peer, str):
        best = max(sorted({1, cores}), key=lambda threads: time_peer(args.script, threads))
        print(f"{cores} cores; stable-baselines3 is faster with {best} thread(s)")
    variants = {name: flags for name, flags in OURS[args.script][1].items() if name in (args.variants or [name])}
    rates: dict[str, list[float]] = {variant: [] for variant in (name, *variants)}
    for number in range(args.rounds):
        rates[name].append(time_peer(args.script, best))
        for variant, flags in variants.items():
            rates[variant].append(time_ours(args.script, flags))
        figures = ", ".join(f"{variant} {values[-1]:,.0f}" for variant, values in rates.items())
        print(f"round {number + 1}: {figures}", flush=True)
    for variant, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, rates[name], strict=True))
        print(f"{variant}: median {statistics.median(values):,.0f} steps/s, {ratio:.2f} times {name}")
    return None


if __name__ == "__main__":
    main()
