"""Every detail is proved for every script that holds it, by its check (checks.py) or by a test of its own."""

import re

import pytest
from checks import CHECKS
from helpers import ROOT, SCRIPTS, load


def cases():
    for name, script in SCRIPTS.items():
        for tag in [*map(str, sorted(script.details)), *(f"auxiliary {n}" for n in sorted(script.auxiliary))]:
            if tag in CHECKS:
                yield pytest.param(name, tag, id=f"{name}-{tag.replace(' ', '-')}")


@pytest.mark.parametrize(("name", "tag"), list(cases()))
def test_detail(name, tag, tmp_path):
    CHECKS[tag](load(name), tmp_path)


def test_no_detail_is_without_a_test():
    proved = set(CHECKS)
    for file in (ROOT / "tests").glob("test_*.py"):
        for kind, number in re.findall(r"@pytest\.mark\.(detail|auxiliary)\((\d+)\)", file.read_text()):
            proved.add(number if kind == "detail" else f"auxiliary {number}")
    held = {str(n) for script in SCRIPTS.values() for n in script.details}
    held |= {f"auxiliary {n}" for script in SCRIPTS.values() for n in script.auxiliary}
    assert held - proved == set()
