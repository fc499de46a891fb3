"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from localsgd_ext import build
from localsgd_ext.backends import native

from . import ranks

settings.register_profile("no deadline", deadline=None)  # how long an example takes says something about the machine only
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def native_binary() -> Path:
    """Built before any rank with a time limit has to wait for it."""
    return native.find_or_build()


ENGINES = os.environ.get("LOCALSGD_TEST_ENGINES", "native torch").split()
"""Where only another build of the native engine is to be tested, the PyTorch one need not run again."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with each engine behind backend="auto", on all ranks. A native engine that cannot be had is a
    failure."""
    if request.param == "native":
        request.getfixturevalue("native_binary")
        # By name, not "auto": a native engine that cannot be had is then an error on the ranks, too.
        ranks.environment["LOCALSGD_EXT_BUILD"] = build.make_plan(build.running_target()).flavour
    else:
        ranks.environment["LOCALSGD_EXT_BUILD"] = "off"
    yield request.param
    ranks.environment.clear()
