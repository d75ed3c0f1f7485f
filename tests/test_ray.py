"""Workers of ppo_joint.py that Ray starts: as torchrun's to the last bit, and nothing is left when they end."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from helpers import ROOT, load, make_agent
from test_distributed import LEVELS, TORCHRUN, finish, state_of

ppo = load("ppo_joint")
SCRIPT = str(ROOT / "ppo_joint.py")
SMALL = ["--num-envs", "2", "--num-steps", "16", "--eval-episodes", "0"]


class Cluster:
    """A run with two Ray workers; all its processes, Ray's included, bear a mark in their environment."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.home, self.runs, self.mark = folder / "home", folder / "runs", f"MARK={uuid.uuid4()}".encode()
        self.home.mkdir()
        name, _, value = self.mark.decode().partition("=")
        environment = os.environ | {"HOME": str(self.home), "OMP_NUM_THREADS": "1", name: value}
        command = [sys.executable, SCRIPT, "--run-dir", str(self.runs), "--ray-workers", "2", *LEVELS, *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def finish(self, code: int) -> tuple[str, str]:
        """Waits for the end; checks the exit code, and that no process and nothing in the home folder is left."""
        output, errors = self.process.communicate(timeout=180)
        assert self.process.returncode == code, output + errors
        for _ in range(50):
            if not (left := self.processes()):
                break
            time.sleep(0.1)
        assert left == []
        assert list(self.home.iterdir()) == []
        return output, errors

    def processes(self) -> list[Path]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (folder / "environ").read_bytes():
                    found.append(folder)
            except OSError:
                continue
        return found

    def workers(self) -> dict[bool, int]:
        """Returns the process of the first worker, whose number the file of curves bears, under True; and the other."""
        (curves,) = self.runs.glob("*/events*")
        workers = [x.name for x in self.processes() if b"ray::Worker" in (x / "cmdline").read_bytes()]
        found = {worker in curves.name.split("."): int(worker) for worker in workers}
        assert len(workers) == len(found) == 2
        return found

    def wait_for_steps(self) -> None:
        """Returns when the run has a checkpoint."""
        for _ in range(1200):
            if list(self.runs.glob("*/checkpoint.pt")):
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError("no checkpoint within two minutes")


def test_equal_to_torchrun(tmp_path):
    """Weights and optimizer after five iterations."""
    size = [*SMALL, "--total-timesteps", "320"]
    output, errors = Cluster(tmp_path, *size).finish(0)
    assert errors == ""
    for line in ("5 iterations of 2 x 16 in 2 workers", "breakout?mode=0: 0.0 1.0", "step 320 of 320", "--resume"):
        assert output.count(line) == 1, output
    command = [*TORCHRUN, "2", SCRIPT, "--run-dir", str(tmp_path / "torchrun"), *LEVELS, *size]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    output = finish(process)
    assert process.returncode == 0, output
    (ray,), (other,) = (map(state_of, (tmp_path / name).iterdir()) for name in ("runs", "torchrun"))
    assert ray["iteration"] == other["iteration"] == 5
    assert all(torch.equal(ray["agent"][name], other["agent"][name]) for name in other["agent"])
    moments = [[x for p in state["optimizer"]["state"].values() for x in p.values()] for state in (ray, other)]
    assert len(moments[0]) > 10 and all(map(torch.equal, *moments))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["Ctrl-C", "SIGTERM", "kill the first", "kill the second"])
def test_the_end_of_one_is_the_end_of_all(what, tmp_path):
    """Within a minute: a message, torchrun's exit code, a checkpoint that loads."""
    cluster = Cluster(tmp_path, *SMALL, "--checkpoint-every", "1")
    cluster.wait_for_steps()
    begin = time.monotonic()
    if what == "Ctrl-C":  # a terminal sends it to all processes of the command
        os.killpg(cluster.process.pid, signal.SIGINT)
    elif what == "SIGTERM":
        cluster.process.terminate()
    else:
        os.kill(cluster.workers()[what == "kill the first"], signal.SIGKILL)
    output, errors = cluster.finish({"Ctrl-C": 130, "SIGTERM": 143}.get(what, 1))
    assert time.monotonic() - begin < 60
    (folder,) = cluster.runs.iterdir()
    state = ppo.load_checkpoint(str(folder), agent=make_agent(ppo))
    assert state["iteration"] >= 1
    if what.startswith("kill"):
        lost = "the first worker is lost" if what == "kill the first" else "worker 0 has lost another one"
        assert errors.startswith("error: " + lost) and errors.count("\n") == 1
    else:
        assert f"step {state['global_step']:,} of" in output and errors == ""


def test_bad_input_is_reported_once(tmp_path):
    cluster = Cluster(tmp_path, "--num-envs", "2", "--levels", "breakout?mode=3")
    output, errors = cluster.finish(2)
    assert errors.startswith("error: --levels breakout?mode=3: no such mode") and errors.count("\n") == 1
    assert output == "" and not cluster.runs.exists()


def test_error_of_another_worker_is_shown(tmp_path, monkeypatch):
    """The second worker's level fails; the first one saves what there is."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    levels = ["--levels", "toy_levels:Screen-v0", "toy_levels:Screen-v0?fail=20"]
    cluster = Cluster(tmp_path, "--num-envs", "1", "--num-steps", "16", *levels)
    _, errors = cluster.finish(1)
    assert "ArithmeticError: the screen is broken" in errors
    (folder,) = cluster.runs.iterdir()
    assert state_of(folder)["iteration"] == 1


def test_levels_are_counted_over_ray_workers():
    """The process that starts the workers judges the flags as they do."""
    args = ppo.Args(levels=tuple("abcd"), num_envs=2, ray_workers=2, num_steps=4)
    assert args.batch_size == 16
    with pytest.raises(ppo.UsageError, match=r"4 levels, but 3 workers x --num-envs 1 play them; use --num-envs 2"):
        ppo.Args(levels=tuple("abcd"), num_envs=1, ray_workers=3)
    with pytest.raises(ppo.UsageError, match="--ray-workers -1: must be 0 or more"):
        ppo.Args(ray_workers=-1)


def test_without_ray(monkeypatch):
    monkeypatch.setattr(ppo.importlib.util, "find_spec", lambda name: None)
    code, message = ppo.work(["--ray-workers", "2"], [])
    assert code == 2 and message == "error: --ray-workers needs ray: pip install ray"


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:port"])
def test_without_a_cluster(address, monkeypatch):
    """The message comes within seconds; that nothing runs here which auto could find is played."""

    def find_nothing(*args, **kwargs):
        raise ConnectionError("Could not find any running Ray instance")

    if address == "auto":
        monkeypatch.setattr("ray.init", find_nothing)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = address.format(port=closed.getsockname()[1])
        begin = time.monotonic()
        code, message = ppo.work(["--ray-workers", "2", "--ray-address", address], [])
    assert code == 2 and time.monotonic() - begin < 30
    assert message.startswith(f"error: --ray-address {address}: no cluster answers")
    assert "ray start --head" in message and "\n" not in message
