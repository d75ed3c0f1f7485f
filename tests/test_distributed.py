"""Several workers of ppo_joint.py: exact averages, equal weights, and what happens when one stops or dies.

As a program it is what a worker of these tests runs: torchrun ... tests/test_distributed.py FOLDER.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from helpers import ROOT, Threads, golden, load, make_agent, make_batch, quick_args, toy_envs
from test_command_line import read_curves
from test_official_parity import ORDER, close, names, set_weights, to_official

LOSS, GRADIENT, WEIGHT = 1e-5, 1e-6, 1e-6  # largest absolute differences to the official numbers
RANK, WORKERS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def replay_official(module: ModuleType, rank: int) -> dict[str, Any]:
    """Takes the recorded gradient steps of one of the two official workers."""
    data = golden("mpi_two_workers")
    agent = load("ppo_classic").Agent(Box(-1, 1, (4,)), Discrete(2), True)
    set_weights(agent, data)
    args = module.Args(ent_coef=float(data["ent_coef"]), clip_coef=float(data["cliprange"]))
    optimizer = module.Adam(agent.parameters(), lr=1.0, fused=True)
    own = {name.removeprefix(f"w{rank}/"): x for name, x in data.items()}
    columns = own["obs"], own["actions"], -own["old_neglogpacs"], own["old_values"], own["returns"]
    batch, result = module.Batch(*map(torch.from_numpy, columns)), {"stats": []}
    for k, rows in enumerate(own["mb_idx"], 1):
        optimizer.param_groups[0]["lr"] = float(data["lr"][k - 1])
        minibatch = module.Batch(*(x[torch.from_numpy(rows)] for x in batch))
        clip_coef = torch.tensor(args.clip_coef)
        result["stats"].append(module.update_minibatch(agent, optimizer, minibatch, clip_coef, args, module.backward))
        result[f"grad{k}"] = {name: to_official(name, x.grad).copy() for name, x in names(agent).items()}
        result[f"after{k}"] = {name: to_official(name, x).copy() for name, x in names(agent).items()}
    return result


def check_official_workers(results: list[dict[str, Any]]) -> None:
    data = golden("mpi_two_workers")
    losses = (data["w0/losses"] + data["w1/losses"]) / 2
    for result in results:
        for k in range(5):
            stats = dict(zip(load("ppo_joint").STATS, result["stats"][k].tolist(), strict=True))
            close([stats[name] for name in ORDER], losses[k], LOSS)
            close(stats["grad_norm"], data["averaged_gradnorm"][k], LOSS)
        for key, limit in (("grad1", GRADIENT), ("after1", WEIGHT), ("after5", WEIGHT)):
            assert len(result[key]) == 8
            for name, x in result[key].items():
                close(x, data[f"{key}/{name}"], limit)


class Rank:
    """Everything that a worker computes for the tests, under torchrun, with one process group."""

    def __init__(self, folder: Path) -> None:
        self.module, self.folder, self.result = load("ppo_joint"), folder, {}

    def run(self) -> None:
        torch.set_num_threads(1)
        module, agent = self.module, make_agent(self.module, seed=RANK)
        first = self.weights(agent)
        module.join_workers(agent)
        self.result["broadcast"] = first, self.weights(agent)
        module.join_workers, leave = lambda agent: None, module.distributed.destroy_process_group
        module.distributed.destroy_process_group = lambda: None
        if WORKERS == 2:
            self.result["official"] = replay_official(module, RANK)
        for work in (self.gradients, self.training, self.early_stop, self.bad_number):
            work()
        torch.save(self.result, self.folder / f"{RANK}.pt")
        if WORKERS > 1:
            leave()

    def weights(self, agent) -> torch.Tensor:
        return torch.cat([x.detach().flatten() for x in agent.state_dict().values()])

    def gradients(self) -> None:
        """The gradient of a worker's own minibatch, and what update_minibatch leaves of it."""
        module, agent = self.module, make_agent(self.module)
        args = quick_args(module, self.folder, max_grad_norm=1e9, total_timesteps=1000)
        batch = make_batch(module, agent, 32)
        batch = module.Batch(*(x[8 * RANK : 8 * RANK + 8] for x in batch))
        module.backward(agent, batch, torch.tensor(0.1), args)
        own = torch.cat([p.grad.flatten() for p in agent.parameters()])
        optimizer = module.Adam(agent.parameters(), lr=0.0, fused=True)
        stats = module.update_minibatch(agent, optimizer, batch, torch.tensor(0.1), args, module.backward)
        self.result["gradients"] = own, torch.cat([p.grad.flatten() for p in agent.parameters()]), stats

    def training(self) -> None:
        """Fifty iterations with other episodes, actions and minibatches in each worker."""
        module, agents, batches, seeds = self.module, [], [], []
        build, update, make_envs = module.Agent, module.update, module.make_envs
        module.Agent = lambda *spaces: agents.append(build(*spaces)) or agents[0]
        module.update = lambda agent, _, batch, *rest: batches.append(batch) or update(agent, _, batch, *rest)
        with toy_envs(module):
            toy = module.make_envs

            def spy(*args):
                envs = toy(*args)
                reset = envs.reset
                envs.reset = lambda seed: seeds.extend(seed) or reset(seed=seed)
                return envs

            module.make_envs = spy
            settings = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "update_epochs": 1}
            args = quick_args(module, self.folder, total_timesteps=50 * 2 * 4 * WORKERS, **settings)
            outcome = module.train(args)
            module.make_envs = toy
        module.Agent, module.update, module.make_envs = build, update, make_envs
        self.result["training"] = {
            "weights": self.weights(agents[0]),
            "seeds": seeds,
            "step": outcome.get("global_step"),
        }
        self.result["training"] |= {"actions": torch.cat([batch.actions for batch in batches]), "batches": len(batches)}

    def early_stop(self) -> None:
        """The first worker's own KL says go on, the others' say stop."""
        module, agent, calls = self.module, make_agent(self.module), []

        def backward(agent, *rest):
            stats = module.backward(agent, *rest)
            stats[4] = 0.01 if RANK == 0 else 0.05
            calls.append(stats)
            return stats

        args = quick_args(module, self.folder, target_kl=0.02, total_timesteps=1000)
        optimizer = module.Adam(agent.parameters(), lr=1e-4, fused=True)
        batch, generator = make_batch(module, agent, 8), torch.Generator().manual_seed(RANK)
        stats = module.update(agent, optimizer, batch, torch.tensor(0.1), args, backward, generator)
        self.result["early stop"] = len(calls), stats[4].item()

    def bad_number(self) -> None:
        """In the third iteration one worker's loss is not a number."""
        module, original, calls = self.module, self.module.backward, []

        def backward(agent, *rest):
            stats = original(agent, *rest)
            calls.append(stats)
            if len(calls) == 3 and RANK == WORKERS - 1:
                agent.value_head.bias.grad.fill_(torch.nan)
            return stats

        module.backward = backward
        try:
            settings = {"num_steps": 4, "num_minibatches": 1, "update_epochs": 1, "checkpoint_every": 1}
            with toy_envs(module):
                module.train(quick_args(module, self.folder / "nan", total_timesteps=80 * WORKERS, **settings))
        except FloatingPointError as error:
            self.result["bad number"] = str(error), len(calls)
        module.backward = original


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What 1, 2 and 4 workers computed."""
    folder = tmp_path_factory.mktemp(f"workers-{request.param}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(request.param), str(ROOT / "tests" / "test_distributed.py"), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) | {"folder": folder} for rank in range(request.param)]


@pytest.mark.auxiliary(2)
def test_two_workers_equal_the_official_ones(ranks):
    if len(ranks) == 2:  # as many as the official run had
        check_official_workers([rank["official"] for rank in ranks])
    else:
        assert "official" not in ranks[0]


def test_official_workers_as_threads():
    """The stand-in that the mutations are tested with computes the same."""
    module = load("ppo_joint")
    check_official_workers(Threads(2).run(module, lambda rank: replay_official(module, rank)))


@pytest.mark.auxiliary(2)
def test_gradients_are_averaged(ranks):
    own, averaged, stats = zip(*(rank["gradients"] for rank in ranks))
    mean = torch.stack(own).double().mean(0)
    for x in averaged:
        close(x, mean, 1e-7)
        assert torch.equal(x, averaged[0])
    assert all(torch.equal(x, stats[0]) for x in stats)
    assert mean.abs().max() > 1e-3
    if len(ranks) > 1:
        assert (own[0] - mean).abs().max() > 1e-3  # the workers had different samples


def test_first_weights_are_those_of_the_first_worker(ranks):
    for rank in ranks:
        assert torch.equal(rank["broadcast"][1], ranks[0]["broadcast"][0])
    if len(ranks) > 1:
        assert not torch.equal(ranks[1]["broadcast"][0], ranks[0]["broadcast"][0])


def test_weights_stay_equal(ranks):
    """To the last bit after 50 iterations, with other seeds and actions in each worker."""
    training = [rank["training"] for rank in ranks]
    assert all(torch.equal(x["weights"], training[0]["weights"]) for x in training)
    assert not torch.equal(training[0]["weights"], ranks[0]["broadcast"][0])
    assert all(x["batches"] == 50 and x["actions"].shape == (50 * 8,) for x in training)
    assert training[0]["step"] == 50 * 8 * len(ranks) and all(x["step"] is None for x in training[1:])
    seeds = [seed for x in training for seed in x["seeds"]]
    assert len(set(seeds)) == len(seeds) == 2 * len(ranks)
    for a in range(len(ranks)):
        assert not any(torch.equal(training[a]["actions"], training[b]["actions"]) for b in range(a))


def test_early_stop_is_everybodys(ranks):
    """By the mean KL of 0.01 and 0.05: below 0.02 with one worker, above with more."""
    calls, kl = zip(*(rank["early stop"] for rank in ranks))
    assert set(calls) == {8 if len(ranks) == 1 else 2}
    close(kl, [0.05 - 0.04 / len(ranks)] * len(ranks), 1e-6)


def test_bad_number_stops_all_alike(ranks):
    messages, calls = zip(*(rank["bad number"] for rank in ranks))
    assert set(messages) == {"NaN or infinity in grad_norm of iteration 3"} and set(calls) == {3}
    (checkpoint,) = (ranks[0]["folder"] / "nan").glob("*/checkpoint.pt")
    assert torch.load(checkpoint, weights_only=True)["iteration"] == 2


LEVELS = ["--levels", "breakout?mode=0", "breakout?mode=4", "--num-minibatches", "2", "--update-epochs", "1"]


def start(workers: int, folder: Path, *flags: str) -> subprocess.Popen:
    command = [*TORCHRUN, str(workers), str(ROOT / "ppo_joint.py"), "--run-dir", str(folder), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def finish(process: subprocess.Popen, seconds: int = 120) -> str:
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, those that are dead but still listed excepted."""
    found = []
    for other in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{other}/stat").read_text().rsplit(")", 1)[1].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(other))
    return sorted(found)


def state_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_one_folder_with_everything_in_it(tmp_path):
    """Two workers write as one, with the steps and episodes of both; one worker goes on with their run."""
    size = ["--num-envs", "2", "--num-steps", "64", "--total-timesteps", "1024", "--eval-episodes", "0"]
    output = finish(process := start(2, tmp_path, *LEVELS, *size))
    assert process.returncode == 0, output
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("events*"))) == 1
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"events", "checkpoint"}
    for line in ("4 iterations of 2 x 64 in 2 workers", "breakout?mode=0: 0.0 1.0", "breakout?mode=4: 0.1 1.1"):
        assert output.count(line) == 1, output
    curves = read_curves(folder)
    assert [point.step for point in curves["losses/value_loss"]] == [256, 512, 768, 1024]
    assert {"charts/episodic_return/breakout?mode=0", "charts/episodic_return/breakout?mode=4"} <= curves.keys()
    assert state_of(folder)["global_step"] == 1024 and state_of(folder)["iteration"] == 4

    command = [sys.executable, str(ROOT / "ppo_joint.py"), "--resume", str(folder), "--total-timesteps", "1280"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "continuing after step 1,024" in result.stdout and "breakout?mode=0: 0.0\n" in result.stdout
    assert [point.step for point in read_curves(folder)["losses/value_loss"]] == [256, 512, 768, 1024, 1152, 1280]
    assert state_of(folder)["global_step"] == 1280 and state_of(folder)["iteration"] == 10


def wait_for_checkpoint(process: subprocess.Popen, folder: Path) -> Path:
    for _ in range(900):
        if found := list(folder.glob("*/checkpoint.pt")):
            return found[0].parent
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.kill()
    raise AssertionError("no checkpoint within 90 seconds")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["kill the first", "kill the second", "Ctrl-C"])
def test_the_end_of_one_is_the_end_of_all(what, tmp_path):
    """Within a minute: a message, an exit code that is not 0, a checkpoint that loads, and no process left."""
    size = ["--num-envs", "1", "--num-steps", "32", "--checkpoint-every", "1" if what == "kill the first" else "0"]
    process = start(2, tmp_path, *LEVELS, *size)
    if what == "kill the first":
        wait_for_checkpoint(process, tmp_path)
    else:  # the checkpoint must come from the end
        for _ in range(900):
            if len(curves := list(tmp_path.glob("*/events*"))) and curves[0].stat().st_size > 2000:
                break
            time.sleep(0.1)
    workers = children(process.pid)
    assert len(workers) == 2
    begin = time.monotonic()
    if what == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        rank = {int(re.search(r"\x00RANK=(\d)", Path(f"/proc/{pid}/environ").read_text())[1]): pid for pid in workers}
        os.kill(rank[0 if what == "kill the first" else 1], signal.SIGKILL)
    output = finish(process, 60)
    assert time.monotonic() - begin < 60
    assert process.returncode != 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    (folder,) = tmp_path.iterdir()
    assert state_of(folder)["iteration"] >= 1
    if what == "Ctrl-C":
        assert re.search(rf"step {state_of(folder)['global_step']:,} of .* after", output) and "--resume" in output
    else:
        survivor = 1 if what == "kill the first" else 0
        assert f"error: worker {survivor} has lost another one" in output
    load("ppo_joint").load_checkpoint(str(folder), agent=make_agent(load("ppo_joint")))


def test_bad_input_is_reported_once(tmp_path):
    """Before and after the workers meet."""
    (tmp_path / "file").touch()
    output = finish(process := start(2, tmp_path / "file", *LEVELS, "--num-envs", "1"))
    assert process.returncode != 0 and output.count("error: --run-dir") == 1, output
    output = finish(process := start(2, tmp_path, "--levels", "breakout?mode=3"))
    assert process.returncode != 0 and output.count("error: --levels breakout?mode=3") == 1, output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    Rank(Path(sys.argv[1])).run()
