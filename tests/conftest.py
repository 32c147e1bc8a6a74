"""Settings shared by all tests."""

from __future__ import annotations

import os
import time
from collections.abc import Generator

import hypothesis
import pytest

# A test decides its backend itself; what the shell says must not leak in.
os.environ.pop("ANYMAMBA_BACKEND", None)

NOT_BEGUN = "not begun: the time that --minutes allows is up"
_BEGAN = pytest.StashKey[float]()

hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("brief", max_examples=6, deadline=None, derandomize=True)  # the Windows laboratory
hypothesis.settings.register_profile("thorough", max_examples=400, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu too")
    parser.addoption("--minutes", type=float, metavar="N", help="begin no test after N minutes; the rest is skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_BEGAN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.stash[_BEGAN] > 60 * minutes:
        pytest.skip(NOT_BEGUN)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker in ("slow", "gpu"):
        if not config.getoption(f"--{marker}"):
            skip = pytest.mark.skip(reason=f"marked {marker}; run with --{marker}")
            for item in items:
                if marker in item.keywords:
                    item.add_marker(skip)


@pytest.fixture(autouse=True)
def _home_as_it_was() -> Generator[None, None, None]:
    """Take back what importing a port in this process has set (see tests/windows/test_windows_home.py)."""
    before = {name: os.environ.get(name) for name in ("HOME", "TRITON_CACHE_DIR")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# torch's own words when torch.compile does not exist for this system or Python in this release of torch.
_NO_COMPILE = ("Windows not yet supported for torch.compile", "Dynamo is not supported on Python")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip where torch itself refuses to compile; any other error of a compiled function stays an error."""
    try:
        return (yield)
    except RuntimeError as error:
        if str(error).startswith(_NO_COMPILE):
            import torch

            pytest.skip(f"torch {torch.__version__} says: {error}")
        raise
