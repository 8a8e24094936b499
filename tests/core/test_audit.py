"""The look at all batch norms before any is folded: epsilons, broken numbers, warnings."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, plain_norm, random_norm
from tvm_fuse.core.audit import audit_graph, compare_epsilons, mismatch
from tvm_fuse.core.epsilon import EpsilonOrigin, ExpectedEpsilon
from tvm_fuse.core.reason import Code

C = 4


def make_graph(*norms):
    """One convolution and batch norm after the other; a norm is its vectors and its epsilon."""
    g = GraphBuilder()
    y = g.input("x", (1, C, 5, 5))
    for index, (vectors, epsilon) in enumerate(norms):
        y = g.norm(g.conv2d(y, np.ones((C, C, 1, 1))), vectors, epsilon=epsilon, name=f"bn{index}")
    return g.build(y)


def reasons(found):
    return [(reason.code, reason.at) for reason in found]


SOUND = (random_norm(C), 1e-3)
CASES = {
    "none": ([], [], []),
    "sound": ([SOUND, SOUND], [], []),
    "NaN": (
        [SOUND, (plain_norm(C, gamma=np.nan), 1e-3)],
        [(Code.BN_STATISTICS_NOT_FINITE, "bn1")],
        [],
    ),
    "negative variance and infinite mean": (
        [(plain_norm(C, variance=-1, mean=np.inf), 1e-3)],
        [(Code.BN_STATISTICS_NOT_FINITE, "bn0"), (Code.BN_VARIANCE_NOT_POSITIVE, "bn0")],
        [],
    ),
    "negative epsilon": ([(random_norm(C), -1e-3)], [(Code.BN_EPSILON_INVALID, "bn0")], []),
    "infinite epsilon": ([(random_norm(C), np.inf)], [(Code.BN_EPSILON_INVALID, "bn0")], []),
    "two broken ones": (
        [(plain_norm(C, beta=np.nan), 1e-3), SOUND, (plain_norm(C, variance=0), 0.0)],
        [(Code.BN_STATISTICS_NOT_FINITE, "bn0"), (Code.BN_VARIANCE_NOT_POSITIVE, "bn2")],
        [],
    ),
    "untrained": ([(plain_norm(C), 1e-3)], [], [(Code.BN_STATISTICS_UNTRAINED, "bn0")]),
    "zero variance": ([(plain_norm(C, variance=0), 1e-3)], [], [(Code.BN_VARIANCE_ALL_ZERO, "bn0")]),
    "broken and suspicious": (
        [(plain_norm(C, gamma=np.nan), 1e-3), (plain_norm(C), 1e-3)],
        [(Code.BN_STATISTICS_NOT_FINITE, "bn0")],
        [(Code.BN_STATISTICS_UNTRAINED, "bn1")],
    ),
}


@pytest.mark.parametrize(("norms", "problems", "warnings"), CASES.values(), ids=CASES.keys())
def test_problems_and_warnings(norms, problems, warnings):
    audit = audit_graph(make_graph(*norms))
    assert reasons(audit.problems) == problems
    assert reasons(audit.warnings) == warnings


def test_parameters_that_are_no_constants_are_not_looked_at():
    g = GraphBuilder()
    gamma, beta, mean, _ = plain_norm(C, mean=np.nan)
    norm = g.norm(g.input("x", (1, C, 5, 5)), (gamma, beta, mean, g.input("variance", (C,))), name="bn")
    audit = audit_graph(g.build(norm))
    assert (audit.problems, audit.warnings) == ((), ())


# --- epsilon -------------------------------------------------------------------------------------


def expect(value, origin=EpsilonOrigin.USER):
    return ExpectedEpsilon(value, origin)


@pytest.mark.parametrize("align", [False, True], ids=["", "align"])
def test_epsilons_are_compared_by_name(align):
    graph = make_graph(SOUND, SOUND, SOUND)
    found = compare_epsilons(graph, {"bn0": expect(1e-3), "bn1": expect(1e-5)}, align=align)
    assert [str(graph.nodes[node]) for node in found] == ["bn0", "bn1", "bn2"]
    checks = list(found.values())
    assert [check.matches for check in checks] == [True, False, True]
    assert [check.used for check in checks] == [1e-3, 1e-5 if align else 1e-3, 1e-3]
    assert [check.origin for check in checks] == [EpsilonOrigin.USER] * 2 + [EpsilonOrigin.GRAPH]
    assert [check.impact is not None for check in checks] == [False, True, False]


def test_b073_a_mismatch_names_both_values_and_the_channels_it_hits():
    (check,) = compare_epsilons(make_graph(SOUND), {"bn0": expect(1e-5)}, align=False).values()
    reason = mismatch(check)
    assert (reason.code, reason.at) == (Code.BN_EPSILON_MISMATCH, "bn0")
    assert reason.wanted == "epsilon 1e-05 (user)"
    assert reason.got.startswith("0.001 in the graph; the output at one standard deviation changes by ")
    assert f"in channel {check.impact.worst[0].channel} (variance " in reason.got


def test_a_mismatch_of_parameters_that_are_broken_has_no_impact():
    graph = make_graph((plain_norm(C, variance=np.nan), 1e-3))
    (check,) = compare_epsilons(graph, {"bn0": expect(1e-5)}, align=False).values()
    assert check.impact is None
    assert mismatch(check).got == "0.001 in the graph"


def test_a_mismatch_of_parameters_that_are_no_constants_has_no_impact():
    g = GraphBuilder()
    *vectors, _ = random_norm(C)
    graph = g.build(
        g.norm(g.input("x", (1, C, 5, 5)), (*vectors, g.input("variance", (C,))), epsilon=1e-3, name="bn")
    )
    (check,) = compare_epsilons(graph, {"bn": expect(1e-5)}, align=False).values()
    assert not check.matches
    assert check.impact is None
