"""Runs the benchmark: a list of trainings, each kept as one CSV under docs/benchmark/results/.

    python docs/benchmark/run.py --list               # what there is, and what is done
    python docs/benchmark/run.py cartpole acrobot     # the missing seeds of these, one after another
    python docs/benchmark/run.py --run-dir ~/runs ... # keep run folders there; an interrupted training is resumed

A run whose CSV exists is not done again. The head of a CSV (lines that start with #) names script, flags, seed, steps,
evaluation, versions, commit and machine; its rows are the step, the mean return of the episodes that ended since the
row before, and the seconds of training until then (pauses left out). In a joint training these are the episodes of all
levels, and a column for each level follows: nan where none of its episodes ended.
"""

import argparse
import csv
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
ROWS = 200  # rows of a CSV, at most
PAUSE = 120.0  # seconds between two points of a curve that count as a pause


@dataclass(frozen=True)
class Benchmark:
    script: str
    flags: str
    seeds: int
    stop_at: int | None = None  # steps after which a longer schedule is stopped
    path: str | None = None  # folder that the environment is imported from (PYTHONPATH)
    workers: int = 1  # processes that torchrun starts
    init: str | None = None  # benchmark whose run, with the same seed, has the weights to start from
    prepare: str | None = None  # command that makes the levels first, in the folder where run folders are kept


JOINT = '--levels "breakout?mode=0" "breakout?mode=4" "breakout?mode=8" "breakout?mode=12" --num-envs 4'
UNSEEN = '--levels "breakout?mode=16" --total-timesteps 100000'
COINRUN = "procgen_levels:Procgen/coinrun-v0"
MICRORTS = "--env-id microrts:MicroRTS-v0 --total-timesteps 150000"
BENCHMARKS = {
    "cartpole": Benchmark("ppo_classic", "--env-id CartPole-v1 --compile", 5),
    "acrobot": Benchmark("ppo_classic", "--env-id Acrobot-v1 --compile", 5),
    "halfcheetah": Benchmark("ppo_continuous", "--env-id HalfCheetah-v4 --compile", 2),
    "hopper": Benchmark("ppo_continuous", "--env-id Hopper-v4 --compile", 2),
    "walker2d": Benchmark("ppo_continuous", "--env-id Walker2d-v4 --compile", 2),
    "bins": Benchmark("ppo_multidiscrete", "--env-id Swimmer-v5 --total-timesteps 500000", 2),
    "no-bins": Benchmark("ppo_continuous", "--env-id Swimmer-v5 --total-timesteps 500000 --compile", 2),
    "breakout": Benchmark("ppo_atari", "--env-id breakout --compile", 1, stop_at=1_000_000),
    "breakout-bf16": Benchmark("ppo_atari", "--env-id breakout --bf16 --compile", 2, stop_at=1_000_000),
    "pong": Benchmark("ppo_atari", "--env-id pong --compile", 1, stop_at=1_000_000),
    "breakout-1-frame": Benchmark("ppo_atari", "--env-id breakout --frame-stack 1 --compile", 1, stop_at=500_000),
    "breakout-lstm": Benchmark("ppo_atari_lstm", "--env-id breakout --compile", 1, stop_at=500_000),
    "microrts": Benchmark("ppo_multidiscrete", f"{MICRORTS} --compile", 1, path="docs/examples"),
    "microrts-unmasked": Benchmark(
        "ppo_multidiscrete", f"{MICRORTS} --no-mask-actions --compile", 1, path="docs/examples"
    ),
    "joint": Benchmark(
        "ppo_joint", f'{JOINT} --total-timesteps 300000 --test-levels "breakout?mode=16" --compile', 1, workers=2
    ),
    "joint-init": Benchmark("ppo_joint", f"{UNSEEN} --compile", 1, init="joint"),
    "joint-scratch": Benchmark("ppo_joint", f"{UNSEEN} --compile", 1),
    "airstriker": Benchmark(
        "ppo_joint",
        "--levels @airstriker/train.txt --test-levels @airstriker/test.txt --sticky-actions 0.25 "
        "--total-timesteps 150000 --compile",
        1,
        prepare="docs/examples/airstriker_states.py airstriker",
    ),
    "procgen": Benchmark(
        "ppo_joint",
        f'--levels "{COINRUN}?num_levels=200&distribution_mode=easy" '
        f'--test-levels "{COINRUN}?start_level=200&num_levels=0&distribution_mode=easy" '
        "--learning-rate 5e-4 --gamma 0.999 --total-timesteps 200000 --compile",
        1,
        path="docs/examples",
    ),
}


def read_events(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the mean returns of a run's evaluation, by name, and its columns: step, return, seconds, levels."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if "/episodic_return" in tag}
    points = curves.pop("charts/episodic_return")
    gaps = np.diff([point.wall_time for point in points], prepend=points[0].wall_time)
    columns = {
        "step": np.array([point.step for point in points]),
        "return": np.array([point.value for point in points]),
        "seconds": np.cumsum(np.where(gaps < PAUSE, gaps, 0.0)),
    }
    evaluation = {}
    for tag, curve in curves.items():
        kind, _, level = tag.split("/", 2) if tag.count("/") > 1 else (*tag.split("/"), "")
        if kind == "eval":
            evaluation[f"evaluation of {level}" if level else "evaluation"] = f"{curve[-1].value:.2f}"
        else:
            columns[level] = np.full(len(points), np.nan)
            columns[level][np.searchsorted(columns["step"], [point.step for point in curve])] = [x.value for x in curve]
    return evaluation, columns


def write_csv(file: Path, head: dict[str, object], columns: dict[str, np.ndarray]) -> None:
    with file.open("w", newline="") as stream:
        stream.writelines(f"# {name}: {value}\n" for name, value in head.items())
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        steps, returns, seconds, *levels = columns.values()
        for part in np.array_split(np.arange(len(steps)), min(ROWS, len(steps))):
            ended = [level[part][~np.isnan(level[part])] for level in (returns, *levels)]
            mean, *means = (f"{x.mean() if len(x) else np.nan:.2f}" for x in ended)
            writer.writerow((steps[part[-1]], mean, f"{seconds[part[-1]]:.1f}", *means))


def read_csv(file: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Returns the head and the columns of a result."""
    lines = file.read_text().splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("#"))
    names, *rows = csv.reader(lines[len(head) :])
    return head, dict(zip(names, np.array(rows, float).T))


def run(name: str, seed: int, run_dir: Path) -> None:
    """Trains one seed of a benchmark, or goes on with it, and writes its CSV."""
    benchmark, parent = BENCHMARKS[name], run_dir / f"{name}-{seed}"
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {benchmark.workers}".split()
    command = [sys.executable, "-u", *(launcher if benchmark.workers > 1 else []), str(ROOT / f"{benchmark.script}.py")]
    checkpoints = sorted(parent.glob("*/checkpoint.pt"))
    if checkpoints:
        command += ["--resume", str(checkpoints[-1].parent)]
    else:
        command += [*shlex.split(benchmark.flags), "--seed", str(seed), "--run-dir", str(parent)]
        if benchmark.init:
            command += ["--init", str(max(run_dir.glob(f"{benchmark.init}-{seed}/*/checkpoint.pt")))]
    run_dir.mkdir(parents=True, exist_ok=True)
    if benchmark.prepare:
        tool, *arguments = benchmark.prepare.split()
        subprocess.run([sys.executable, str(ROOT / tool), *arguments], cwd=run_dir, check=True)
    print(" ".join(command[2:]), flush=True)
    environment = os.environ | ({"PYTHONPATH": str(ROOT / benchmark.path)} if benchmark.path else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=run_dir)
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {name}-{seed}: {line}", end="", flush=True)
        match = re.match(r"step ([\d,]+)", line)
        if benchmark.stop_at and match and int(match[1].replace(",", "")) >= benchmark.stop_at:
            process.send_signal(signal.SIGINT)
            benchmark = Benchmark(benchmark.script, benchmark.flags, benchmark.seeds)
    stopped = BENCHMARKS[name].stop_at is not None and process.wait() == 128 + signal.SIGINT
    if process.wait() != 0 and not stopped:
        raise SystemExit(f"{name}-{seed} ended with exit code {process.returncode}")
    evaluation, columns = read_events(max(parent.glob("*/checkpoint.pt")).parent)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    head: dict[str, Any] = {
        "script": benchmark.script,
        "flags": benchmark.flags,
        "seed": seed,
        "steps": columns["step"][-1],
    } | evaluation
    packages = ("torch", "gymnasium", "ale-py", "mujoco", "numpy")
    head["versions"] = ", ".join(f"{package} {version(package)}" for package in packages)
    head |= {"python": platform.python_version(), "commit": commit.strip()}
    head["machine"] = f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, shared with other work"
    write_csv(RESULTS / f"{name}-{seed}.csv", head, columns)


def cpu_name() -> str:
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    return match[1] if match else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and leave")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "benchmark", help="where run folders are kept")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name in args.names or BENCHMARKS:
        for seed in range(1, BENCHMARKS[name].seeds + 1):
            done = (RESULTS / f"{name}-{seed}.csv").exists()
            if args.list:
                print(f"{name}-{seed}: {'done' if done else 'missing'}")
            elif not done:
                run(name, seed, args.run_dir.resolve())


if __name__ == "__main__":
    main()
