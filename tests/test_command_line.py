"""The scripts as a user runs them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from helpers import ROOT, SCRIPTS, load, quick_args, toy_envs, toy_id

FAST = "--total-timesteps 64 --num-envs 2 --num-steps 16 --num-minibatches 2 --eval-episodes 1"


def run(script, flags, cwd, **environment):
    """Returns exit code, stdout and stderr of a command."""
    file = script if os.sep in str(script) else ROOT / f"{script}.py"
    result = subprocess.run(
        [sys.executable, str(file), *flags.split()],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return result.returncode, result.stdout, result.stderr


# flags: what the message must name (the flag and a value that works)
BAD = {
    "--num-minibatches 7": "--num-minibatches 7.*512.*such as 1",
    "--num-minibatches 24": "--num-minibatches 24.*such as 8",
    "--num-minibatches 512": "--num-minibatches 512.*--num-minibatches 1",
    "--total-timesteps 100": "--total-timesteps 100.*512",
    "--total-timesteps -1": "--total-timesteps -1.*at least 1",
    "--num-envs 0": "--num-envs 0.*at least 1, such as 4",
    "--num-steps 0": "--num-steps 0.*at least 1",
    "--num-steps -5": "--num-steps -5.*at least 1",
    "--update-epochs 0": "--update-epochs 0.*at least 1",
    "--num-minibatches 0": "--num-minibatches 0.*at least 1",
    "--threads 0": "--threads 0.*between 1 and 1024, such as 1",
    "--threads 99999999999": "--threads 99999999999.*between 1 and 1024",
    "--seed -1": "--seed -1.*between 0 and",
    "--seed 99999999999999999999999": "--seed 9+.*between 0 and 2147483647",
    "--resume=": "--resume.*run folder",
    "--eval-episodes -1": "--eval-episodes -1.*0 or more",
    "--gamma 1.5": "--gamma 1.5.*between 0 and 1, such as 0.99",
    "--gamma nan": "--gamma nan.*between 0 and 1",
    "--gae-lambda -0.1": "--gae-lambda -0.1.*between 0 and 1",
    "--learning-rate nan": "--learning-rate nan.*finite.*such as 0.00025",
    "--learning-rate inf": "--learning-rate inf.*finite",
    "--learning-rate -1": "--learning-rate -1.*0 or more",
    "--clip-coef 0": "--clip-coef 0.*above 0",
    "--ent-coef nan": "--ent-coef nan.*finite",
    "--vf-coef inf": "--vf-coef inf.*finite",
    "--max-grad-norm 0": "--max-grad-norm 0.*above 0",
    "--target-kl -1": "--target-kl -1.*0 or more",
    "--env-id Nonsense-v0": "--env-id Nonsense-v0",
    "--env-id no_such_module:X-v0": "--env-id no_such_module:X-v0",
    "--env-id CartPole-v99": "--env-id CartPole-v99",
    "--env-id Pendulum-v1": "--env-id Pendulum-v1.*ppo_continuous.py",
    "--device cuda:99": "--device cuda:99.*--device cpu",
    "--device nonsense": "--device nonsense.*--device cpu",
    "--device hpu": "--device hpu.*--device cpu",
    "--resume nowhere": "--resume nowhere.*run folder",
    "--capture-video --eval-episodes 0": "--eval-episodes",
    "--run-dir /proc/runs": "--run-dir /proc/runs",
    "--nonsense 1": "nonsense",
    "--num-envs two": "num-envs",
}


def squeeze(text: str) -> str:
    """Undoes the line breaks and boxes of an error message."""
    return re.sub(r"[\s│]+", " ", text)


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_ends_with_one_message(flags, tmp_path, capsys, monkeypatch):
    """In process, for speed: main() as the command line calls it. Exit code 2, no traceback, nothing written."""
    module = load("ppo_classic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_classic.py", *flags.split()])
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        module.main()
    assert exit_.value.code == 2
    message = squeeze(capsys.readouterr().err)
    assert re.search(BAD[flags], message), message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", ["--num-envs 0", "--env-id Nonsense-v0"])
def test_bad_input_as_a_command(flags, tmp_path):
    code, _, errors = run("ppo_classic", flags, tmp_path)
    assert code == 2 and "Traceback" not in errors and flags.split()[1] in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "script"])
def test_bad_checkpoints_are_refused(damage, tmp_path, capsys, monkeypatch):
    module = load("ppo_classic")
    file = module.train(quick_args(module, tmp_path))["run_folder"] / "checkpoint.pt"
    content = file.read_bytes()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        torch.save({"weights": torch.ones(3)}, file)
    else:
        state = torch.load(file, weights_only=True)
        state["script"] = "ppo_other"
        state["args"]["bins"] = 11
        torch.save(state, file)
    with pytest.raises(module.UsageError, match="--resume") as error:
        module.parse_args(["--resume", str(file.parent)])
    assert ("ppo_other.py" in str(error.value)) == (damage == "script")


def test_flags_that_a_resumed_run_may_change(tmp_path):
    module = load("ppo_classic")
    folder = module.train(quick_args(module, tmp_path, seed=5))["run_folder"]
    for path in (folder, folder / "checkpoint.pt"):
        args = module.parse_args(["--resume", str(path), "--total-timesteps", "128", "--eval-episodes", "3"])
        assert (args.seed, args.total_timesteps, args.eval_episodes, args.num_steps) == (5, 128, 3, 16)
    assert module.parse_args(["--resume", str(folder), "--seed", "5"]).seed == 5  # typed, but the same
    for flags in (["--seed", "1"], ["--num-envs", "4"], ["--env-id", "CartPole-v1"], ["--learning-rate", "0.1"]):
        with pytest.raises(module.UsageError, match=f"{flags[0]}.*must stay"):
            module.parse_args(["--resume", str(folder), *flags])


def test_checkpoint_of_another_network_is_refused(tmp_path):
    module = load("ppo_classic")
    folder = module.train(quick_args(module, tmp_path))["run_folder"]
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["args"]["env_id"] = "Acrobot-v1"
    torch.save(state, folder / "checkpoint.pt")
    with pytest.raises(module.UsageError, match="another network"):
        module.train(module.parse_args(["--resume", str(folder)]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_every_flag(name, tmp_path):
    code, output, _ = run(name, "--help", tmp_path, COLUMNS="200")
    assert code == 0
    source = (ROOT / f"{name}.py").read_text()
    comments = dict(re.findall(r"^    (\w+): .* = .*?  # (.+)$", source, re.MULTILINE))
    for flag in (field.name for field in fields(load(name).Args)):
        comment = comments[flag]
        assert f"--{flag.replace('_', '-')}" in output
        assert squeeze(comment)[:30] in squeeze(output), flag


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_copied_file_trains_alone(name, tmp_path):
    """Under another name in an empty folder; the run is named after the file."""
    shutil.copy(ROOT / f"{name}.py", tmp_path / "happy.py")
    code, output, errors = run(tmp_path / "happy.py", FAST, tmp_path, PYTHONPATH="")
    assert code == 0, errors
    assert "python happy.py --resume" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert "__happy__1__" in folder.name and (folder / "checkpoint.pt").is_file()
    noise = {"__pycache__", "MUJOCO_LOG.TXT"}  # MuJoCo's own log of its warnings
    assert {path.name for path in tmp_path.iterdir()} - noise == {"happy.py", "runs"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_importing_starts_nothing(name, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}; print({name}.Args().seed)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == "1\n" and list(tmp_path.iterdir()) == []


def read_curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_curves(name, tmp_path):
    """Every curve of the interface, one point an iteration, over environment steps."""
    module = load(name)
    args = quick_args(module, tmp_path, 4, eval_episodes=2)
    with toy_envs(module):
        result = module.train(args)
    curves = read_curves(result["run_folder"])
    losses = [*module.STATS, "explained_variance"]
    expected = {f"losses/{x}" for x in losses} | {"charts/episodic_return", "charts/episodic_length"}
    assert expected | {"charts/learning_rate", "charts/SPS", "eval/episodic_return"} <= curves.keys()
    steps = [args.batch_size * k for k in range(1, 5)]
    assert [point.step for point in curves["losses/value_loss"]] == steps
    assert [point.step for point in curves["charts/SPS"]] == steps[1:]
    assert [point.value for point in curves["charts/episodic_return"]] == [3.0] * 4
    assert [point.value for point in curves["charts/episodic_length"]] == [3.0] * 4
    assert curves["eval/episodic_return"][0].value == 3.0 and result["eval_returns"] == [3.0, 3.0]


def test_run_folders_are_safe_and_never_shared(tmp_path):
    module = load("ppo_classic")
    env_id = toy_id("ppo_classic")
    folders = {module.train(quick_args(module, tmp_path, env_id=f"helpers:{env_id}"))["run_folder"] for _ in range(3)}
    assert len(folders) == 3
    for folder in folders:
        assert re.fullmatch(r"[\w.-]+", folder.name) and folder.name.startswith(
            "helpers_Toy-ppo_classic-v0__ppo_classic__1__"
        )


@pytest.mark.skipif(importlib.util.find_spec("moviepy") is None, reason="needs moviepy")
def test_video_of_the_evaluation(tmp_path):
    code, output, errors = run(
        "ppo_classic", f"{FAST} --eval-episodes 2 --capture-video", tmp_path, SDL_VIDEODRIVER="dummy"
    )
    assert code == 0, errors
    videos = sorted(tmp_path.glob("runs/*/videos/*.mp4"))
    assert len(videos) == 2 and all(video.stat().st_size > 1000 for video in videos)
    assert "evaluation: return" in output and "(2 episodes)" in output


@pytest.mark.parametrize("package", ["moviepy", "wandb"])
def test_missing_extras_are_named(package, tmp_path, monkeypatch):
    module = load("ppo_classic")
    find = importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    flag = {"moviepy": "capture_video", "wandb": "track"}[package]
    with pytest.raises(module.UsageError, match=f"pip install {package}"):
        module.train(quick_args(module, tmp_path, eval_episodes=1, **{flag: True}))
    assert list(tmp_path.iterdir()) == []


def test_video_of_an_environment_without_images(tmp_path):
    module = load("ppo_classic")
    with pytest.raises(module.UsageError, match="cannot be rendered"):
        module.train(quick_args(module, tmp_path, eval_episodes=1, capture_video=True))


def test_compile_is_refused_where_it_cannot_work(tmp_path, monkeypatch):
    module = load("ppo_classic")

    def broken(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(module.UsageError, match=r"--compile does not work here .*no compiler"):
        module.train(quick_args(module, tmp_path, compile=True))
    assert list(tmp_path.iterdir()) == []


def test_plain_progress_lines(tmp_path):
    """Not on a terminal: plain lines, no bar, the results and the next commands last."""
    code, output, errors = run("ppo_classic", FAST, tmp_path)
    assert code == 0 and errors == "" and "\r" not in output
    lines = output.splitlines()
    assert lines[0].startswith("CartPole-v1: 2 iterations of 2 x 16")
    assert lines[-4].startswith("step 64 of 64 after") and lines[-3].startswith("evaluation: return")
    assert lines[-2].startswith("curves: tensorboard --logdir runs") and "--resume runs" in lines[-1]
    code, output, errors = run("ppo_classic", lines[-1].split("ppo_classic.py ")[1], tmp_path)
    assert code == 0 and "evaluation: return" in output, errors
