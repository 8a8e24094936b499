"""Manifests: what is in them, to JSON and back, damaged ones, and where two of them differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from tests.support.graphs import GraphBuilder, random_norm
from tvm_fuse.core.affine import plan_affine_folds
from tvm_fuse.core.audit import compare_epsilons
from tvm_fuse.core.epsilon import EpsilonOrigin, ExpectedEpsilon
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.graph import digest
from tvm_fuse.core.manifest import (
    FILE_NAME,
    SCHEMA,
    Source,
    first_difference,
    from_json,
    hash_files,
    make_manifest,
    read_folder,
    to_json,
)

VERSIONS = {"tvm-fuse": "1.2.3", "numpy": "1.26", "onnx": "1.17"}


def make_graph(epsilon=1e-3, late=1e-5):
    """conv -> bn folds, conv -> multiply -> add folds as a run, relu -> late bn stays."""
    g = GraphBuilder("float32")
    x = g.input("x", (1, 4, 5, 5))
    weights = [random_norm(4, seed).gamma.reshape(4, 1, 1, 1).repeat(4, 1) for seed in (1, 2)]
    convs = [g.conv2d(x, w.astype("float32"), name=f"conv{i}") for i, w in enumerate(weights)]
    norm = g.norm(convs[0], random_norm(4, dtype="float32"), epsilon=epsilon, name="bn")
    run = g.add(g.multiply(convs[1], 2.0), 0.5)
    late = g.norm(g.relu(norm), random_norm(4, dtype="float32"), epsilon=late, name="late")
    return g.build(norm, run, late)


def manifest_of(graph, expected=()):
    folds, decisions = plan_folds(graph)
    runs, _ = plan_affine_folds(graph)
    checks = compare_epsilons(graph, dict(expected), align=False).values()
    left = [decision for decision in decisions if not decision.applied]
    return make_manifest(Source("m.onnx", "ab" * 32), VERSIONS, checks, folds, runs, left, ["y", "z"])


@pytest.fixture
def manifest():
    return manifest_of(make_graph(), {"bn": ExpectedEpsilon(1e-3, EpsilonOrigin.SOURCE_ATTRIBUTE)})


# --- what is in it ---------------------------------------------------------------------------------


def test_b121_every_batch_norm_and_where_it_went(manifest):
    (norm,) = manifest.batch_norms
    assert (norm.name, norm.epsilon, norm.epsilon_origin) == ("bn", 1e-3, "source attribute")
    assert norm.direction == "before"
    assert norm.variance_min == pytest.approx(random_norm(4, dtype="float32").variance.min())
    assert [layer.name for layer in norm.layers] == ["conv0"]
    (run,) = manifest.scale_shifts
    assert (run.operators, run.direction) == (("multiply", "add"), "before")
    assert [layer.name for layer in run.layers] == ["conv1"]
    (left,) = manifest.left_alone
    assert (left.name, left.epsilon, left.code) == ("late", 1e-5, "bn-after-activation")
    assert left.reason.startswith("bn-after-activation at late: wanted ")
    assert manifest.outputs == ("y", "z")


def test_b074_versions_and_digests(manifest):
    assert manifest.versions == VERSIONS
    graph = make_graph()
    (record,) = plan_folds(graph)[0]
    (edit,) = record.edit.layers
    (layer,) = manifest.batch_norms[0].layers
    assert layer.weight_before == digest(graph.constants[graph.nodes[edit.anchor].inputs[1]])
    assert layer.weight_after == digest(edit.weight)
    assert 0 < layer.weight_error < 1e-6
    assert 0 < layer.bias_error < 1e-6


def test_epsilons_of_all_batch_norms(manifest):
    assert manifest.epsilon == {"bn": 1e-3, "late": 1e-5}


@pytest.mark.parametrize("epsilon", [float("inf"), float("nan"), -float("inf")])
def test_an_epsilon_that_is_no_number_is_left_out(epsilon):
    g = GraphBuilder()
    x = g.input("x", (1, 4, 5, 5))
    norm = g.norm(x, (g.input("gamma", (4,)), *random_norm(4)[1:]), epsilon=epsilon, name="bn")
    found = manifest_of(g.build(norm))
    assert [(left.name, left.epsilon) for left in found.left_alone] == [("bn", None)]
    assert found.epsilon == {}
    assert from_json(to_json(found), "here") == found


# --- JSON ----------------------------------------------------------------------------------------


def test_there_and_back(manifest, tmp_path):
    text = to_json(manifest)
    assert from_json(text, "here") == from_json(text.encode(), "here") == manifest
    assert to_json(from_json(text, "here")) == text
    assert json.loads(text)["schema"] == SCHEMA
    (tmp_path / FILE_NAME).write_text(text)
    assert read_folder(tmp_path) == manifest


def test_whole_numbers_are_numbers(manifest):
    document = json.loads(to_json(manifest))
    document["batch_norms"][0]["epsilon"] = 0
    assert from_json(json.dumps(document), "here").batch_norms[0].epsilon == 0.0


def change(*path, value):
    def apply(document):
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return apply


def remove(*path):
    def apply(document):
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return apply


DAMAGED = {
    "no source": remove("source"),
    "source is text": change("source", value="m.onnx"),
    "no hash": remove("source", "sha256"),
    "versions is a list": change("versions", value=[]),
    "version is a number": change("versions", "numpy", value=1.26),
    "batch norms is a number": change("batch_norms", value=3),
    "batch norm is a number": change("batch_norms", 0, value=3),
    "batch norm is null": change("batch_norms", 0, value=None),
    "no epsilon": remove("batch_norms", 0, "epsilon"),
    "epsilon is text": change("batch_norms", 0, "epsilon", value="1e-3"),
    "name is a number": change("batch_norms", 0, "name", value=7),
    "layer is text": change("batch_norms", 0, "layers", 0, value="conv0"),
    "digest is a number": change("batch_norms", 0, "layers", 0, "weight_after", value=7),
    "bias is a number": change("batch_norms", 0, "layers", 0, "had_bias", value=7),
    "operator is a number": change("scale_shifts", 0, "operators", 0, value=7),
    "left alone has no code": remove("left_alone", 0, "code"),
    "outputs is null": change("outputs", value=None),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_manifest_is_named(manifest, damage):
    document = json.loads(to_json(manifest))
    damage(document)
    with pytest.raises(ModelError, match=r"^here: the manifest is damaged: ") as caught:
        from_json(json.dumps(document), "here")
    assert "tvm-fuse fold" in caught.value.hint


@pytest.mark.parametrize("text", ["", "hello", "3", "null", "[]", "{}", '"schema"', b"\xff\xfe\x00"])
def test_what_is_no_manifest(text):
    with pytest.raises(ModelError, match=r"^here: not a manifest of tvm-fuse: "):
        from_json(text, "here")


@pytest.mark.parametrize("schema", [None, {"name": "tvm-fuse/manifest", "version": 2}, {"name": "other"}])
def test_another_version_is_told(schema):
    with pytest.raises(ModelError, match=r"^here: the manifest is .*; wanted "):
        from_json(json.dumps({"schema": schema}), "here")


def test_a_folder_without_a_manifest(tmp_path):
    with pytest.raises(UsageError, match=r"no manifest\.json in it"):
        read_folder(tmp_path)


# --- hashes --------------------------------------------------------------------------------------


def test_hash_over_files_in_order(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a" * 3_000_000)
    two.write_bytes(b"b")
    assert hash_files([one, two]) == hashlib.sha256(b"a" * 3_000_000 + b"b").hexdigest()
    assert hash_files([two, one]) != hash_files([one, two])


def test_hash_of_what_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match=f"{path} cannot be read"):
            hash_files([path])


# --- differences -----------------------------------------------------------------------------------


def test_equal_manifests_do_not_differ(manifest):
    assert first_difference(manifest, manifest_of(make_graph())) == ""


def test_source_versions_and_origins_are_no_difference(manifest):
    norm = replace(manifest.batch_norms[0], epsilon_origin="user")
    other = replace(manifest, source=Source("other", ""), versions={}, batch_norms=(norm,))
    assert first_difference(manifest, other) == ""


def test_the_last_digits_of_a_bound_are_no_difference(manifest):
    (norm,) = manifest.batch_norms
    (layer,) = norm.layers
    for factor, differs in ((1 + 1e-12, False), (1.001, True)):
        layers = (replace(layer, weight_error=layer.weight_error * factor),)
        other = replace(manifest, batch_norms=(replace(norm, layers=layers),))
        assert bool(first_difference(other, manifest)) is differs


DIFFERENT = {
    "name": (
        change("batch_norms", 0, "name", value="bn2"),
        "batch_norms[0] (bn).name: wanted 'bn', got 'bn2'",
    ),
    "epsilon": (
        change("batch_norms", 0, "epsilon", value=1e-5),
        "batch_norms[0] (bn).epsilon: wanted 0.001, got 1e-05",
    ),
    "digest": (
        change("batch_norms", 0, "layers", 0, "weight_after", value="00"),
        "batch_norms[0] (bn).layers[0] (conv0).weight_after: wanted ",
    ),
    "bias": (
        change("batch_norms", 0, "layers", 0, "had_bias", value=True),
        "(conv0).had_bias: wanted False, got True",
    ),
    "batch norms": (change("batch_norms", value=[]), "batch_norms: wanted 1 entries, got 0 entries"),
    "runs": (change("scale_shifts", 0, "operators", value=["add"]), "scale_shifts[0].operators: wanted 2"),
    "code": (change("left_alone", 0, "code", value="x"), "left_alone[0] (late).code: wanted "),
    "no epsilon": (change("left_alone", 0, "epsilon", value=None), "epsilon: wanted 1e-05, got None"),
    "outputs": (change("outputs", 1, value="y"), "outputs[1]: wanted 'z', got 'y'"),
}


@pytest.mark.parametrize(("tamper", "part"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_difference_is_named_with_both_values(manifest, tamper, part):
    document = json.loads(to_json(manifest))
    tamper(document)
    assert part in first_difference(from_json(json.dumps(document), "here"), manifest)
