"""The form of the project: tags, texts that the scripts share, dependencies, sizes, fresh documentation."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT, SCRIPTS

# Functions and classes that mean the same wherever they stand; a script may leave one out, but not change it
SHARED = {
    *("UsageError", "Categorical", "linear", "make_trunk", "Adam", "gae", "ppo_loss", "backward", "update_minibatch"),
    *("update", "spawn_seeds", "check_finite", "Run", "save_checkpoint", "load_checkpoint", "parse_args"),
    *("check_machine", "compile_backward", "main"),
}
# ... except where a detail differs
EXCEPTIONS = {
    "ppo_continuous": {"Run"},  # evaluation with the training's statistics
    "ppo_multidiscrete": {"backward"},  # masks
    "ppo_atari": {"check_machine"},  # the video needs no trial
    "ppo_atari_lstm": {"backward"},  # states
    # Averaging; curves of all levels and workers by the first worker; --init; a GPU for each worker; lost workers; Ray
    "ppo_joint": {"update_minibatch", "Run", "load_checkpoint", "parse_args", "check_machine", "main"},
}


OPTIONAL = {"wandb", "moviepy", "ray", "stable-retro"}  # imported only by those who ask for what they do


def source(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


def definitions(name: str) -> dict[str, str]:
    text = source(name)
    nodes = ast.parse(text).body
    return {
        node.name: ast.get_source_segment(text, node)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_detail_is_tagged_once(name):
    tags = re.findall(r"^ *# (Detail|Auxiliary) (\d+): \S.*", source(name), re.MULTILINE)
    assert sorted(int(n) for kind, n in tags if kind == "Detail") == sorted(SCRIPTS[name].details)
    assert sorted(int(n) for kind, n in tags if kind == "Auxiliary") == sorted(SCRIPTS[name].auxiliary)


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script.parent])
def test_shared_texts_are_the_same(name):
    parent, child = definitions(SCRIPTS[name].parent), definitions(name)
    for function in SHARED & parent.keys() & child.keys() - EXCEPTIONS.get(name, set()):
        assert child[function] == parent[function], (
            f"{function} differs between {name}.py and {SCRIPTS[name].parent}.py"
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_size(name):
    text = source(name)
    assert len(text.splitlines()) <= SCRIPTS[name].lines
    classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert classes["train"].end_lineno - classes["Agent"].lineno <= 330


@pytest.mark.parametrize("name", SCRIPTS)
def test_dependencies(name):
    """The block that lets a copied file run alone names what it imports, with the bounds of pyproject.toml."""
    text = source(name)
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)[1]
    script = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert script["requires-python"] == project["requires-python"]
    assert set(script["dependencies"]) <= set(project["dependencies"])
    imported = set()
    for node in ast.walk(ast.parse(text)):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        imported |= {module.split(".")[0].replace("_", "-") for module in modules}
    third_party = imported - {m.replace("_", "-") for m in sys.stdlib_module_names} - OPTIONAL
    named = {re.match(r"[\w-]+", dependency)[0] for dependency in script["dependencies"]}
    assert third_party - named == set() and named - third_party <= {"tensorboard", "mujoco"}
    assert not third_party & {*SCRIPTS, "helpers"}


def test_packaging():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [f"{name}.py" for name in SCRIPTS]
    assert {path.stem for path in ROOT.glob("*.py")} == set(SCRIPTS)


def test_documentation_is_fresh():
    command = [sys.executable, str(ROOT / "docs" / "build.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("file", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(file):
    text = (ROOT / file).read_text()
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [x for x in links if "://" not in x and not (ROOT / file).parent.joinpath(x).exists()]
    assert missing == []


def test_readme_has_two_setup_commands():
    text = (ROOT / "README.md").read_text()
    commands = [line for line in text.splitlines() if line.startswith("pip install")]
    assert commands[:2] == ["pip install -e . && python ppo_classic.py", 'pip install -e ".[test]" && pytest']
