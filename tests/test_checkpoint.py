"""Checkpoints, resuming and signals, in the process and as a user's commands."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import record
from helpers import ROOT, SCRIPTS, load, quick_args


def state_of(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def assert_same(a, b, path=""):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for k, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}/{k}")
    else:
        assert a == b, path


def stateless_env(module, monkeypatch):
    """Makes every episode one step of the same observation, so that a restart of the episodes changes nothing."""
    make_envs = module.make_envs

    def make(*args, **options):
        envs = make_envs(*args, **options)
        step = envs.step

        def constant_step(actions):
            obs, rewards, terminated, truncated, _ = step(actions)
            return np.ones_like(obs), np.ones_like(rewards), terminated | True, truncated & False, {}

        envs.step = constant_step
        reset = envs.reset
        envs.reset = lambda **options: (np.ones_like(reset(**options)[0]), {})
        return envs

    monkeypatch.setattr(module, "make_envs", make)


@pytest.mark.parametrize("name", SCRIPTS)
def test_resume_equals_no_pause(name, tmp_path, monkeypatch):
    """20 iterations = 10, a checkpoint and 10 more: weights, Adam, learning rate, actions and minibatches."""
    module = load(name)
    stateless_env(module, monkeypatch)
    calls: list = []
    undo = record(module, "update_minibatch", calls)
    args = quick_args(module, tmp_path, 20, checkpoint_every=10)
    whole = module.train(args)
    stop: list[int] = []
    save = module.save_checkpoint
    monkeypatch.setattr(
        module, "save_checkpoint", lambda *a, **b: (save(*a, **b), stop.append(2) if a[1] == 10 else None)
    )
    whole_calls, calls[:] = list(calls), []
    half = module.train(args, stop)
    assert half["global_step"] == 10 * args.batch_size
    rest = module.train(dataclasses.replace(args, resume=str(half["run_folder"])))
    undo()
    assert rest["run_folder"] == half["run_folder"] and rest["global_step"] == whole["global_step"]
    assert len(calls) == len(whole_calls) == 20 * args.num_minibatches * args.update_epochs
    for (_, _, a, *_), (_, _, b, *_) in zip(calls, whole_calls):
        if "states" in a._fields:  # a state that is cleared before its use does not matter
            a, b = (x._replace(states=x.states * ~x.starts[:, :1, None]) for x in (a, b))
        assert_same(tuple(a), tuple(b), "minibatch")
    a, b = state_of(whole["run_folder"]), state_of(rest["run_folder"])
    for state in (a, b):
        state["args"].pop("resume")
    assert_same(a, b)


@pytest.mark.parametrize("name", SCRIPTS)
def test_resumed_environments_start_new_streams(name, tmp_path, monkeypatch):
    module, seeds = load(name), []
    spawn = module.spawn_seeds
    monkeypatch.setattr(module, "spawn_seeds", lambda *a: seeds.append(a) or spawn(*a))
    args = quick_args(module, tmp_path, 2)
    result = module.train(args)
    longer = dataclasses.replace(args, resume=str(result["run_folder"]), total_timesteps=2 * args.total_timesteps)
    assert module.train(longer)["global_step"] == 4 * args.batch_size
    starts = [spawn(*a) for a in seeds if a[2] == module.ENVIRONMENTS]
    assert len(starts) == 2 and not set(starts[0]) & set(starts[1])


def test_learning_rate_after_a_longer_resume(tmp_path, monkeypatch):
    module, rates = load("ppo_classic"), []
    log = module.Run.log
    monkeypatch.setattr(
        module.Run, "log", lambda self, i, rate, losses: rates.append(rate) or log(self, i, rate, losses)
    )
    args = quick_args(module, tmp_path, 2, learning_rate=1.0)
    result = module.train(args)
    module.train(dataclasses.replace(args, resume=str(result["run_folder"]), total_timesteps=4 * args.batch_size))
    assert rates == [1.0, 0.5, 0.5, 0.25]  # of 2 iterations, then of 4


def test_a_finished_run_only_evaluates(tmp_path):
    module = load("ppo_classic")
    args = quick_args(module, tmp_path, 2)
    result = module.train(args)
    before = (result["run_folder"] / "checkpoint.pt").read_bytes()
    again = module.train(dataclasses.replace(args, resume=str(result["run_folder"]), eval_episodes=7))
    assert again["eval_returns"] == [3.0] * 7 and again["global_step"] == args.total_timesteps
    assert (result["run_folder"] / "checkpoint.pt").read_bytes() == before


def test_compiled_checkpoint_has_the_same_keys(tmp_path):
    module = load("ppo_classic")
    states = []
    for compiled in (False, True):
        result = module.train(quick_args(module, tmp_path, compile=compiled))
        states.append(state_of(result["run_folder"]))
    assert states[0]["agent"].keys() == states[1]["agent"].keys()
    resumed = quick_args(module, tmp_path, 3, resume=str(result["run_folder"]))
    assert module.train(resumed)["global_step"] == resumed.total_timesteps


def test_a_failing_save_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    module = load("ppo_classic")

    def half_save(state, file):
        file.write_bytes(b"half")
        raise OSError("disk full")

    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: (save if state["iteration"] < 3 else half_save)(state, file))
    with pytest.raises(OSError, match="disk full"):
        module.train(quick_args(module, tmp_path, 5, checkpoint_every=1))
    (folder,) = tmp_path.iterdir()
    assert state_of(folder)["iteration"] == 2


def start(script, tmp_path, *flags):
    """Starts a long training as a user does, and waits for its first checkpoint."""
    command = [sys.executable, str(ROOT / f"{script}.py"), "--total-timesteps", "10000000", "--checkpoint-every", "1"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "runs"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for _ in range(1200):
        if found := list(tmp_path.glob("runs/*/checkpoint.pt")):
            return process, found[0]
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError("no checkpoint within two minutes")


def members(session: int) -> list[int]:
    """Returns the live processes of a session."""
    alive = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, _, sid = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == session and state != "Z":
            alive.append(int(pid))
    return alive


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_iteration(number, tmp_path):
    """With async workers, to the whole process group, as Ctrl-C does it: a checkpoint, 128 + n, no process left."""
    process, checkpoint = start("ppo_classic", tmp_path, "--async-envs")
    send = os.killpg if number == signal.SIGINT else os.kill
    send(process.pid, number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output and "--resume" in output
    assert state_of(checkpoint.parent)["iteration"] >= 1
    for _ in range(100):
        if not members(process.pid):
            break
        time.sleep(0.1)
    assert members(process.pid) == []


def test_second_signal_ends_at_once(tmp_path):
    process, checkpoint = start("ppo_classic", tmp_path, "--num-steps", "20000")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert state_of(checkpoint.parent)["iteration"] >= 1


def test_kill_leaves_a_whole_checkpoint(tmp_path):
    """kill -9 at random moments of a training that saves all the time; what is found under the final name loads."""
    random = np.random.default_rng(0)
    flags = ("--num-steps", "8", "--num-envs", "2", "--update-epochs", "1", "--num-minibatches", "1")
    process, checkpoint = start("ppo_classic", tmp_path, *flags)
    iteration = 0
    for _ in range(3):
        time.sleep(random.uniform(0.1, 0.5))
        process.kill()
        process.communicate()
        reached = state_of(checkpoint.parent)["iteration"]
        assert reached > iteration
        iteration = reached
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "ppo_classic.py"), "--resume", str(checkpoint.parent)],
            stdout=subprocess.DEVNULL,
        )
        modified = checkpoint.stat().st_mtime_ns
        while checkpoint.stat().st_mtime_ns == modified:
            assert process.poll() is None
            time.sleep(0.05)
    process.kill()
    process.communicate()


def test_a_stop_cuts_the_evaluation_short_without_a_result(tmp_path, monkeypatch):
    """The episodes that have ended by then are the short ones: their mean would mislead."""
    module, stop = load("ppo_classic"), []
    policy, calls = module.Agent.policy, []
    args = quick_args(module, tmp_path, 2)
    folder = module.train(args)["run_folder"]
    monkeypatch.setattr(
        module.Agent, "policy", lambda *a: calls.append(a) or (len(calls) > 1 and stop.append(2)) or policy(*a)
    )
    result = module.train(dataclasses.replace(args, resume=str(folder), eval_episodes=5), stop)
    assert result["eval_returns"] == [] and len(calls) == 2


def test_a_stop_before_the_first_iteration_promises_nothing(tmp_path, capsys):
    module = load("ppo_classic")
    result = module.train(quick_args(module, tmp_path, 2), [15])
    assert result["global_step"] == 0 and "--resume" not in capsys.readouterr().out
