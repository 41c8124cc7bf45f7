"""Settings that every test shares: few threads, fixed seeds, and honest skips for what this machine cannot do."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any

# Before numpy or torch is imported: tests run several processes on few cores, and one thread each is also reproducible.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
# Ray reports usage over the network unless told not to.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MPLBACKEND", "Agg")
# A job that a shell runs in the background ignores Ctrl-C and hands that down; tests send it to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The day on which cases take turns: set before workers start, which may do so after midnight.
DAY = int(os.environ.setdefault("HYBRIDEP_TEST_DAY", str(date.today().toordinal())))

import hypothesis
import numpy as np
import pytest

from planner.clock import timed_by

SEED = 20260101

hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every run and in any order of tests."""
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture(autouse=True, scope="session")
def _limits_count_computation() -> Iterator[None]:
    """The planner's time limits: what a plan is must not depend on what else the machine does."""
    with timed_by(time.process_time):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator of the test's own."""
    return np.random.default_rng(SEED)


@functools.cache
def _why_no_lab() -> str | None:
    from hybridep.launch.lab import probe_lab

    return probe_lab()


# Tests that start ranks, Ray nodes, emulated datacenters or commands. They run one after the other on one worker: two at a
# time would fight for the processors, and what they wait for has time limits.
_STARTING_PROCESSES = (
    "tests/cli/test_train.py",
    "tests/cross/test_memory_as_planned.py",
    "tests/launch/",
    "tests/runtime/codecs/test_emulated_sites.py",
    "tests/runtime/test_",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``pytest -n``: whole files, so that what a file prepares is prepared once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(_STARTING_PROCESSES) else super()._split_scope(nodeid)

    # Files in their order: sorted by their number of tests, few long tests would come last.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="Also the cases whose turn is on another day (marker `turns`).")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of cases that take turns, those whose day it is; all that are asked for by name. First come those that start processes:
    one worker has enough to do with them, while another one compiles what both need later."""
    items.sort(key=lambda item: not item.nodeid.startswith(_STARTING_PROCESSES))
    if config.option.every or config.option.keyword or any("::" in argument for argument in config.args):
        return
    kept, others, seen = list[pytest.Item](), list[pytest.Item](), Counter[tuple[str, int]]()
    for item in items:
        mark = item.get_closest_marker("turns")
        if mark is None:
            kept.append(item)
            continue
        # A file's cases that follow each other have different days; so have those of different files.
        file, days = item.nodeid.split("::")[0], mark.args[0]
        place = seen[file, days] + zlib.crc32(file.encode())
        seen[file, days] += 1
        (kept if (DAY + place) % days == 0 else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what needs a CUDA device or network namespaces where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    if item.get_closest_marker("lab") is not None:
        reason = _why_no_lab()
        if reason is not None:
            pytest.skip(f"no lab here: {reason}")
