"""Makes levels from the one state of the game that stable-retro brings along: later and later moments of Airstriker.

    pip install stable-retro==1.0.1
    python docs/examples/airstriker_states.py airstriker
    python ppo_joint.py --levels @airstriker/train.txt --test-levels @airstriker/test.txt --sticky-actions 0.25

Random play finds the way: two seconds at a time in which no life is lost, and back by two seconds wherever twenty tries
have failed. The states are two seconds apart; every third is kept for testing. A state file is the memory of the
emulator, packed with gzip, as stable-retro has them.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import stable_retro

GAME = "Airstriker-Genesis-v0"


def survive(env: stable_retro.RetroEnv, state: bytes, random: np.random.Generator) -> bytes | None:
    """Plays two seconds (of 60 frames) from a state; returns the state after them, or None if a life was lost."""
    env.initial_state = state
    env.reset()
    lives, move = set(), dict.fromkeys(("UP", "DOWN", "LEFT", "RIGHT"), 0)
    for frame in range(120):
        if frame % 8 == 0:
            move = dict(zip(move, random.integers(2, size=4)))
        pressed = move | {"B": frame // 4 % 2}
        *_, info = env.step([pressed.get(button, 0) for button in env.buttons])
        lives.add(info["lives"])
    return env.em.get_state() if len(lives) == 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the states and lists of levels are written")
    parser.add_argument("--states", type=int, default=6, help="how many")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    env = stable_retro.make(GAME, render_mode="rgb_array")
    states, failures, random = [env.initial_state], 0, np.random.default_rng(0)
    while len(states) <= args.states + 2:  # the last ones may be beyond help
        if state := survive(env, states[-1], random):
            states.append(state)
            failures = 0
        elif (failures := failures + 1) == 20 and len(states) > 1:
            states.pop()
            failures = 0
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for k in range(1, args.states + 1):
        file = args.folder / f"{2 * k}s.state"
        file.write_bytes(gzip.compress(states[k]))
        lists["train" if k % 3 else "test"].append(f"retro:{GAME}?state={file}\n")
        print(file)
    for name, levels in lists.items():
        (args.folder / f"{name}.txt").write_text("".join(levels))


if __name__ == "__main__":
    main()
