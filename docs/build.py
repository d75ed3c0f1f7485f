"""Writes the generated documentation: details.md, diffs/ and benchmarks.md. `--check` only says what is out of date.

python docs/build.py            # after a change of a script, a test or a result
python docs/build.py --diffs    # only the diffs between the scripts
"""

import argparse
import difflib
import re
import sys
from pathlib import Path

import numpy as np

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "benchmark"), str(ROOT / "tests")]

from helpers import SCRIPTS  # noqa: E402
from run import BENCHMARKS, RESULTS, read_csv  # noqa: E402

OFFICIAL = "https://github.com/openai/baselines/blob/ea25b9e8b234e6ee1bca43083f8f3cf974143998/baselines"

# tag: name, statement, place in the official code
DETAILS = {
    "1": (
        "Vectorized architecture",
        "One learner steps N environments together for T steps an iteration; episodes run on across iterations.",
        "ppo2/runner.py#L26-L42",
    ),
    "2": (
        "Orthogonal initialization",
        "Orthogonal weights, gain sqrt(2) in hidden layers, 0.01 in the policy head, 1 in the value head; biases 0.",
        "a2c/utils.py#L20-L35",
    ),
    "3": ("Adam's epsilon", "1e-5, added before the bias correction as TensorFlow does.", "ppo2/model.py#L98-L100"),
    "4": (
        "Learning rate annealing",
        "Linear, set once an iteration: full in the first, 1/iterations of it in the last.",
        "ppo2/ppo2.py#L133-L135",
    ),
    "5": (
        "Generalized advantage estimation",
        "Lambda 0.95, bootstrapped from the value after the rollout; returns are advantages plus values.",
        "ppo2/runner.py#L50-L65",
    ),
    "6": (
        "Minibatch updates",
        "Each epoch shuffles all N x T samples and visits each once, in equal minibatches.",
        "ppo2/ppo2.py#L154-L166",
    ),
    "7": (
        "Advantage normalization",
        "Per minibatch: mean 0, population standard deviation 1.",
        "ppo2/model.py#L136-L139",
    ),
    "8": (
        "Clipped surrogate objective",
        "The worse of the plain and the clipped objective for each sample.",
        "ppo2/model.py#L78-L86",
    ),
    "9": (
        "Value loss clipping",
        "The larger of the squared errors of the value and of the value clipped around the rollout's.",
        "ppo2/model.py#L68-L75",
    ),
    "10": (
        "Overall loss and entropy bonus",
        "Policy loss - c1 entropy + 0.5 value loss, where the value loss is half a mean square.",
        "ppo2/model.py#L61-L91",
    ),
    "11": (
        "Global gradient clipping",
        "The norm over all parameters together is limited to 0.5.",
        "ppo2/model.py#L102-L108",
    ),
    "12": (
        "Debug variables",
        "Losses, entropy, clip fraction, KL estimates and explained variance, averaged over all minibatches.",
        "ppo2/model.py#L87-L116",
    ),
    "13": (
        "Shared and separate networks",
        "Two layers of 64 tanh units, shared by default in the official code; separate ones learn far better.",
        "common/policies.py#L154-L166",
    ),
    "14": ("No-op reset", "1 to 30 no-ops after a real reset.", "common/atari_wrappers.py#L12-L39"),
    "15": (
        "Frame skip and maximum",
        "Each action is repeated 4 times; the observation is the maximum of the last 2 frames. Ours cuts a game "
        "after 108,000 frames, as the registry does today; the gym of then did after 400,000.",
        "common/atari_wrappers.py#L97-L123",
    ),
    "16": (
        "Episodic life",
        "A lost life ends the return, but the game goes on; only a game over resets it.",
        "common/atari_wrappers.py#L61-L95",
    ),
    "17": (
        "Fire reset",
        "Games that wait for FIRE get it, and the action after it, at each start.",
        "common/atari_wrappers.py#L41-L59",
    ),
    "18": (
        "Warp frame",
        "Gray, 84 x 84, area interpolation. Ours is gray before the maximum of two frames, the official after it.",
        "common/atari_wrappers.py#L134-L185",
    ),
    "19": ("Reward clipping", "The sign of the reward.", "common/atari_wrappers.py#L125-L131"),
    "20": (
        "Frame stack",
        "The last 4 frames, with zeros before an episode's first.",
        "common/vec_env/vec_frame_stack.py#L6-L30",
    ),
    "21": (
        "Shared Nature CNN",
        "Convolutions 32@8/4, 64@4/2, 64@3/1, 512 units, ReLU; two heads.",
        "common/models.py#L15-L26",
    ),
    "22": ("Image scaling", "Pixels to [0, 1] inside the network.", "common/models.py#L19"),
    "23": ("Normal distribution", "A diagonal Gaussian over actions.", "common/distributions.py#L102-L106"),
    "24": ("State-independent standard deviation", "A free log parameter, 0 at first.", "common/distributions.py#L104"),
    "25": (
        "Independent action components",
        "Log-probabilities and entropies are summed over components.",
        "common/distributions.py#L238-L246",
    ),
    "26": ("Separate networks", "64 x 64 tanh each for policy and value.", "common/policies.py#L154-L166"),
    "27": (
        "Action clipping",
        "The environment gets the clipped action, the update keeps the sampled one.",
        "ppo2/runner.py#L29-L31",
    ),
    "28": (
        "Observation normalization",
        "By the running mean and variance of all sub-environments together.",
        "common/vec_env/vec_normalize.py#L36-L40",
    ),
    "29": ("Observation clipping", "To [-10, 10] after normalizing.", "common/vec_env/vec_normalize.py#L39"),
    "30": (
        "Reward scaling",
        "By the standard deviation of the running discounted return; no mean is subtracted.",
        "common/vec_env/vec_normalize.py#L28-L33",
    ),
    "31": ("Reward clipping", "To [-10, 10] after scaling.", "common/vec_env/vec_normalize.py#L32"),
    "32": ("LSTM initialization", "Orthogonal with gain 1, one bias of 0.", "a2c/utils.py#L84-L86"),
    "33": ("Zero initial state", "The LSTM state of a new run is zero.", "common/models.py#L179"),
    "34": (
        "State reset",
        "The state is multiplied by 1 - done of the current observation, wherever it is used.",
        "a2c/utils.py#L90-L91",
    ),
    "35": ("Sequences in minibatches", "A minibatch is whole environments.", "ppo2/ppo2.py#L167-L180"),
    "36": ("State reconstruction", "Training replays the rollout from its initial state.", "ppo2/runner.py#L23"),
    "37": (
        "Independent discrete components",
        "One categorical a component; log-probabilities and entropies summed.",
        "common/distributions.py#L206-L222",
    ),
    "auxiliary 1": ("Clip range annealing", "In step with the learning rate; off by default.", "ppo2/ppo2.py#L137"),
    "auxiliary 2": (
        "Parallel gradient update",
        "Workers average their gradients, then clip the average.",
        "ppo2/model.py#L97-L98",
    ),
    "auxiliary 3": ("Early stopping", "No further epoch once the policy has moved target_kl away.", None),
    "auxiliary 4": (
        "Invalid action masking",
        "Illegal actions get logits of -1e8; their entropy does not count.",
        None,
    ),
}


def line_of(pattern: str, file: Path) -> int | None:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if re.search(pattern, line):
            return number
    return None


def test_of(tag: str) -> str:
    kind, number = ("auxiliary", tag.split()[1]) if " " in tag else ("detail", tag)
    patterns = rf'^@check\("{tag}"\)', rf"^@pytest\.mark\.{kind}\({number}\)"
    for file in [ROOT / "tests" / "checks.py", *sorted((ROOT / "tests").glob("test_*.py"))]:
        for pattern in patterns:
            if line := line_of(pattern, file):
                return f"[{file.name}:{line}](../tests/{file.name}#L{line})"
    return ""


def details_page() -> str:
    rows = []
    for tag, (name, statement, place) in DETAILS.items():
        lines = []
        for script in SCRIPTS:
            if line := line_of(
                rf"# {'Detail ' + tag if ' ' not in tag else tag.capitalize()}: ", ROOT / f"{script}.py"
            ):
                lines.append(f"[{script}:{line}](../{script}.py#L{line})")
        official = f"[{place.split('#')[0]}]({OFFICIAL}/{place})" if place else "not in the official code"
        rows.append(f"| {tag} | {name} | {statement} | {official} | {', '.join(lines)} | {test_of(tag)} |")
    return (
        "# The 37 details of PPO, and four auxiliary ones\n\n"
        "After [The 37 Implementation Details of Proximal Policy Optimization]"
        "(https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/)\n"
        "(Huang et al. 2022), checked against the official code at one commit. 1-13 are the core, 14-22 Atari,\n"
        "23-31 continuous actions, 32-36 LSTM, 37 MultiDiscrete. Each line of ours is marked in the scripts; each\n"
        "test fails for the detail's commonest wrong form ([test_mutations.py](../tests/test_mutations.py)).\n\n"
        "| | name | statement | official code | ours | test |\n| --- | --- | --- | --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


def diff_page(child: str, parent: str) -> str:
    a, b = ((ROOT / f"{name}.py").read_text().splitlines(keepends=True) for name in (parent, child))
    diff = list(difflib.unified_diff(a, b, f"{parent}.py", f"{child}.py", n=2))
    added = sum(line.startswith("+") for line in diff) - 1
    removed = sum(line.startswith("-") for line in diff) - 1
    return (
        f"# From {parent}.py to {child}.py\n\n{added} lines come, {removed} go; all else is the same text.\n\n"
        f"```diff\n{''.join(diff)}```\n"
    )


def interquartile_mean(x: np.ndarray) -> float:
    x, cut = np.sort(x), len(x) // 4
    return float(x[cut : len(x) - cut].mean())


def ends(curve: np.ndarray) -> tuple[float, float]:
    """Returns the mean of the first and of the last twentieth of a curve, without its gaps."""
    curve = curve[~np.isnan(curve)]
    few = max(1, len(curve) // 20)
    return curve[:few].mean(), curve[-few:].mean()


def benchmarks_page() -> str:
    rows, levels = [], []
    for name, benchmark in BENCHMARKS.items():
        named = [RESULTS / f"{name}-{seed}.csv" for seed in range(1, benchmark.seeds + 1)]
        files = [file for file in named if file.exists()]
        if not files:
            continue
        heads, curves = zip(*map(read_csv, files))
        last = np.array([ends(curve["return"])[1] for curve in curves])
        evaluations = [float(head["evaluation"]) for head in heads if "evaluation" in head]
        scores = np.array(evaluations if len(evaluations) == len(heads) else last)
        minutes = np.median([curve["seconds"][-1] / 60 for curve in curves])
        cores = "/".join(sorted({number for head in heads for number in re.findall(r"(\d+) cores", head["machine"])}))
        launcher = f"PYTHONPATH={benchmark.path} python" if benchmark.path else "python"
        launcher = f"torchrun --nproc-per-node {benchmark.workers}" if benchmark.workers > 1 else launcher
        prepare = f"python {benchmark.prepare} && " if benchmark.prepare else ""
        init = f" --init RUN_FOLDER_OF_{benchmark.init}" if benchmark.init else ""
        stopped = ", stopped early" if benchmark.stop_at else ""
        rows.append(
            f"| {name} | `{prepare}{launcher} {benchmark.script}.py {benchmark.flags}{init}` "
            f"| {int(heads[0]['steps']):,}{stopped} | {len(heads)} | {interquartile_mean(scores):.1f} "
            f"| {', '.join(f'{x:.1f}' for x in scores)} | {last.mean():.1f} +- {last.std():.1f} "
            f"| {minutes:.1f} | {cores} |"
        )
        for file, head, curve in zip(files, heads, curves):
            for level in [name for name in curve if name not in ("step", "return", "seconds")]:
                first, end = ends(curve[level])
                played = head.get(f"evaluation of {level}", "-")
                levels.append(f"| {file.stem} | {level} | {first:.1f} | {end:.1f} | {played} |")
            tested = [name for name in head if name.startswith("evaluation of ") and name[14:] not in curve]
            levels += [f"| {file.stem} | {name[14:]} (not trained on) | - | - | {head[name]} |" for name in tested]
    return (
        "# Benchmarks\n\n"
        "Every row comes from the CSVs in [benchmark/results](benchmark/results), written by\n"
        "[run.py](benchmark/run.py); their heads name versions, commit and machine. Scores are the evaluation after\n"
        "training (else the end of the curve), one a seed; IQM is their interquartile mean; the end of the curve is\n"
        "its last twentieth, mean +- population standard deviation over seeds; minutes are medians, on cores that\n"
        "were shared with other work. A run that was stopped early has the learning rate schedule of all its steps.\n\n"
        "| name | command | steps | seeds | IQM | scores | end of the curve | minutes | cores |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
        "## Joint trainings, level by level\n\n"
        "The first and the last twentieth of the curve, and the evaluation after training.\n\n"
        "| run | level | first | last | evaluation |\n"
        "| --- | --- | --- | --- | --- |\n" + "\n".join(levels) + "\n"
    )


def pages(only_diffs: bool = False) -> dict[Path, str]:
    result = {DOCS / "diffs" / f"{name}.md": diff_page(name, s.parent) for name, s in SCRIPTS.items() if s.parent}
    if not only_diffs:
        result |= {DOCS / "details.md": details_page(), DOCS / "benchmarks.md": benchmarks_page()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffs", action="store_true", help="write only the diffs between the scripts")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    args = parser.parse_args()
    stale = [file for file, text in pages(args.diffs).items() if not file.exists() or file.read_text() != text]
    for file in stale:
        print(f"{'out of date' if args.check else 'written'}: {file.relative_to(ROOT)}")
        if not args.check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(pages()[file])
    if args.check and stale:
        sys.exit("run python docs/build.py")


if __name__ == "__main__":
    main()
