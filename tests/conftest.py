"""Test groups: what a test needs is its marker; what is missing here skips it, and says so.

``--require relay,cuda_codegen`` turns the skips of these groups into failures, so that a
green run cannot hide an absent TVM. The run ends with a count for each group.

Under pytest-xdist (``make test``) tests run in workers: each report carries its groups to the process that
counts, and each worker's counts of what it collected follow in the end.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter

import pytest

from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.doctor import count_gpus
from tvm_fuse.relay.compat import load_tvm

pytest_plugins = ["tests.support.golden"]

GROUPS = ("relay", "cuda_codegen", "torch", "gpu", "slow")
COLLECTED: pytest.StashKey[Counter] = pytest.StashKey()
OUTCOMES: pytest.StashKey[dict] = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption(
        "--require",
        default="",
        metavar="GROUP[,GROUP]",
        help=f"fail when a test of these groups is skipped, or when there is none ({', '.join(GROUPS)})",
    )


def pytest_configure(config):
    unknown = set(required_groups(config)) - set(GROUPS)
    if unknown:
        raise pytest.UsageError(f"--require: unknown group {', '.join(sorted(unknown))}; known: {GROUPS}")
    config.stash[COLLECTED] = Counter()
    config.stash[OUTCOMES] = {}
    if not is_worker(config):
        config.pluginmanager.register(Counting(config))


def required_groups(config):
    return tuple(filter(None, config.getoption("--require").split(",")))


def groups_of(item):
    return tuple(group for group in GROUPS if item.get_closest_marker(group)) or ("no TVM needed",)


@functools.cache
def missing_for(group):
    """What this machine lacks for a group; empty when it has everything."""
    if group in {"relay", "cuda_codegen"}:
        try:
            tvm = load_tvm()
        except MissingDependency as error:
            return str(error)
        if group == "cuda_codegen" and tvm.get_global_func("target.build.cuda", allow_missing=True) is None:
            return "this TVM was built without CUDA code generation"
    if group == "torch" and importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if group == "gpu" and count_gpus() == 0:
        return "no NVIDIA GPU is visible"
    return ""


@pytest.hookimpl(tryfirst=True)  # before -m deselects: a required group must exist at all
def pytest_collection_modifyitems(config, items):
    for item in items:
        config.stash[COLLECTED].update(groups_of(item))


def pytest_runtest_setup(item):
    for group in groups_of(item):
        if missing_for(group):
            pytest.skip(f"{group}: {missing_for(group)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    required = set(required_groups(item.config)) & set(groups_of(item))
    may_skip = any(missing_for(group) for group in set(groups_of(item)) - required)
    if report.skipped and required and not may_skip and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but --require {','.join(sorted(required))}: {call.excinfo.value}"
    report.groups = groups_of(item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped and required_groups(collector.config):  # a whole file: its groups are unknown
        report.outcome = "failed"
        report.longrepr = f"a whole file was skipped under --require: {report.longrepr}"
    return report


class Counting:
    """What the process that reports counts: its own tests, or those of its workers."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        outcomes = self.config.stash[OUTCOMES]
        worst = outcomes.get(report.nodeid, (None, "passed"))[1]
        groups = getattr(report, "groups", ("no TVM needed",))  # a worker that died reports for its test
        outcomes[report.nodeid] = (groups, report.outcome if worst == "passed" else worst)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        collected = getattr(node, "workeroutput", {}).get("collected", {})  # each worker collects all tests
        self.config.stash[COLLECTED] |= Counter(collected)


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if is_worker(config):
        config.workeroutput["collected"] = dict(config.stash[COLLECTED])
    elif exitstatus == pytest.ExitCode.OK and absent_groups(config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_worker(config):
    """Whether this process runs tests for another one."""
    return hasattr(config, "workerinput")


def absent_groups(config):
    return [group for group in required_groups(config) if not config.stash[COLLECTED][group]]


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("groups")
    for name in (*GROUPS, "no TVM needed"):
        counts = Counter(outcome for groups, outcome in config.stash[OUTCOMES].values() if name in groups)
        line = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        terminalreporter.write_line(f"{name:14} {line}")
    for group in absent_groups(config):
        terminalreporter.write_line(f"--require {group}: there is no test of this group", red=True)
