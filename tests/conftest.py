"""What all tests share: settings of hypothesis, and a closing line that says what a run did not check."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before JAX starts: the sharded demo needs eight host devices

import pytest
from hypothesis import settings

# The same examples on every run, and no verdict by the clock: the machines that run this are slow and shared.
settings.register_profile("book", derandomize=True, deadline=None)
settings.load_profile("book")

UNCHECKED = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[UNCHECKED] = []


@pytest.fixture(scope="session")
def unchecked(request):
    """unchecked(what, remedy): leave tests out because the machine lacks something, and say so at the end.

    A skip drowns among the dots. On CI, where everything can be installed, it is a failure.
    """

    def leave_out(what, remedy):
        line = f"{what}: {remedy}"
        if os.environ.get("CI"):
            pytest.fail(f"CI must check everything. {line}")
        if line not in request.config.stash[UNCHECKED]:
            request.config.stash[UNCHECKED].append(line)
        pytest.skip(line)

    return leave_out


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the outermost wrapper, so that these are the last lines
def pytest_terminal_summary(terminalreporter, config):
    result = yield
    for line in config.stash[UNCHECKED]:
        terminalreporter.write_line(f"NOT CHECKED  {line}", yellow=True, bold=True)
    return result
