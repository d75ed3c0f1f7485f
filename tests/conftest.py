"""A test that is skipped proves nothing: only what is named here may be."""

import pytest

MAY_BE_MISSING = ("gym_microrts", "stable_retro", "procgen")  # packages outside the dependencies
skipped: list[str] = []


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(name in reason for name in MAY_BE_MISSING):
            skipped.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if skipped and not hasattr(session.config, "workerinput") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for line in skipped:
        terminalreporter.write_line(f"may not be skipped: {line}", red=True)
