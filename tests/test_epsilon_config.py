"""Training configs: each form by value, and everything else refused with file, place, wanted and got."""

from __future__ import annotations

import builtins
import json

import pytest

from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.errors import MissingDependency, UsageError
from tvm_fuse.epsilon_config import read_epsilon_config


@pytest.fixture
def read(tmp_path):
    """``read(name, content)`` writes text, bytes or data as JSON, and reads it as a config."""

    def call(name, content):
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_epsilon_config(tmp_path / name)

    return call


@pytest.fixture
def refusal(read):
    """``refusal(name, content)``: the message, from behind the file."""

    def call(name, content):
        with pytest.raises(UsageError) as caught:
            read(name, content)
        file, _, message = caught.value.message.partition(f"{name}: ")
        assert file.endswith("/")
        assert "\n" not in message
        return message

    return call


# --- names and patterns --------------------------------------------------------------------------

NAMES = [
    ("c.json", '{"bn1": 1e-3, "layer4.*": 0.00001}', {"bn1": 1e-3, "layer4.*": 1e-5}),
    ("c.json", '{"bn1": "1e-3", "bn2": 0, "bn3": 1}', {"bn1": 1e-3, "bn2": 0.0, "bn3": 1.0}),
    ("c.json", '{"epsilon": {"bn1": 1e-3}}', {"bn1": 1e-3}),
    ("c.json", '{"epsilon": {"epsilon": 1e-3}}', {"epsilon": 1e-3}),
    ("c.json", '{"eps": {"*": 1e-3}}', {"*": 1e-3}),
    ("c.json", '{"epsilon": 1e-3}', {"*": 1e-3}),
    ("c.json", '{"eps": "1e-3"}', {"*": 1e-3}),
    ("c.JSON", b'\xef\xbb\xbf{"bn1": 1e-3}', {"bn1": 1e-3}),
    ("c.yaml", "bn1: 1.0e-3\nbn2: 1e-3\n'*.bn': 0.5\n", {"bn1": 1e-3, "bn2": 1e-3, "*.bn": 0.5}),
    ("c.yml", "# of the paper\nepsilon:\n  bn1: 1e-3\n", {"bn1": 1e-3}),
    ("c.yaml", "eps: 1e-5", {"*": 1e-5}),
    ("c.yaml", '{"bn1": 1e-3}', {"bn1": 1e-3}),
]


@pytest.mark.parametrize(("name", "text", "wanted"), NAMES)
def test_names_and_patterns(read, tmp_path, name, text, wanted):
    config = read(name, text)
    assert config == EpsilonConfig(wanted, names_layers=False, source=str(tmp_path / name))
    assert list(config.values) == list(wanted)  # of patterns the later wins
    assert {type(value) for value in config.values.values()} == {float}


WRONG = [
    ("c.json", "", "wanted a mapping with entries, got nothing"),
    ("c.json", " \n", "wanted a mapping with entries, got nothing"),
    ("c.yaml", "", "wanted a mapping with entries, got nothing"),
    ("c.yaml", "# nothing\n", "wanted a mapping with entries, got nothing"),
    ("c.json", "{}", "wanted a mapping with entries, got an empty mapping"),
    ("c.json", "[1e-3]", "wanted a mapping with entries, got a list"),
    ("c.json", "1e-3", "wanted a mapping with entries, got 0.001"),
    ("c.yaml", "1e-3", "wanted a mapping with entries, got '1e-3'"),
    ("c.yaml", "- bn1\n", "wanted a mapping with entries, got a list"),
    ("c.json", '{"epsilon": {}}', "epsilon: wanted a mapping with entries, got an empty mapping"),
    ("c.json", '{"epsilon": null}', "epsilon: wanted a finite number >= 0, got nothing"),
    ("c.json", '{"epsilon": {"bn1": -1e-3}}', "epsilon.bn1: wanted a finite number >= 0, got -0.001"),
    ("c.json", '{"bn1": "small"}', "bn1: wanted a finite number >= 0, got 'small'"),
    ("c.json", '{"bn1": -1e-3}', "bn1: wanted a finite number >= 0, got -0.001"),
    ("c.json", '{"bn1": NaN}', "bn1: wanted a finite number >= 0, got nan"),
    ("c.json", '{"bn1": 1e999}', "bn1: wanted a finite number >= 0, got inf"),
    ("c.yaml", "bn1: .inf", "bn1: wanted a finite number >= 0, got inf"),
    ("c.json", '{"bn1": true}', "bn1: wanted a finite number >= 0, got True"),
    ("c.json", '{"bn1": [1e-3]}', "bn1: wanted a finite number >= 0, got a list"),
    ("c.json", '{"bn1": {"eps": 1e-3}}', "bn1: wanted a finite number >= 0, got a mapping"),
    ("c.json", '{"bn1": 1e-3, "": 1e-3}', "key '': wanted a name (in quotes), got ''"),
    ("c.yaml", "1: 1e-3", "key 1: wanted a name (in quotes), got 1"),
    ("c.yaml", "? [a]\n: 1e-3", "key ['a']: wanted a name (in quotes), got a list"),
    ("c.json", '{"bn1": 1e-3, "bn1": 1e-3}', "bn1: wanted it once, got it 2 times"),
    ("c.yaml", "a:\n  bn1: 1e-3\n  bn1: 1e-3\n", "bn1: wanted it once, got it 2 times"),
    ("c.json", '{"epsilon": 1e-3, "bn1": 1e-5}', "epsilon: wanted no other key beside it, got 'bn1'"),
    ("c.json", '{"eps": 1e-3, "epsilon": 1e-3}', "epsilon: wanted no other key beside it, got 'eps'"),
    ("c.json", '{"bn1": 1e-3', "line 1, column 13: wanted JSON, got an error: "),
    ("c.json", "bn1: 1e-3", "line 1, column 1: wanted JSON, got an error: "),
    ("c.yaml", "bn1: 1e-3\n*.bn2: 1e-3\n", "line 2, column 2: wanted YAML, got an error: "),
    ("c.yaml", "bn1: &a {b: *a}", "line 1, column 6: wanted YAML, got an error: "),
    ("c.yaml", "bn1: !!python/object:os.system 1", "line 1, column 6: wanted YAML, got an error: "),
    ("c.yaml", "bn1: 1e-3\x00", "wanted YAML, got an error: "),
    ("c.json", b'{"bn\xff": 1}', "'utf-8' codec can't decode"),
    ("c.json", "[" * 100_000, "maximum recursion depth exceeded"),
    ("c.toml", "bn1 = 1e-3", "wanted a .json, .yaml or .yml file, got .toml"),
    ("config", "bn1: 1e-3", "wanted a .json, .yaml or .yml file, got no suffix"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"), WRONG, ids=[f"{row[0]} {row[1][:30]!r}" for row in WRONG]
)
def test_what_is_wrong_is_refused(refusal, name, text, message):
    found = refusal(name, text)
    assert found.startswith(message) if message.endswith((" ", "decode", "exceeded")) else found == message


def test_long_values_are_cut(refusal):
    assert len(refusal("c.json", {"bn1": "x" * 1000})) < 100
    assert refusal("c.json", json.dumps({"bn1": 1}).replace("1}", "9" * 400 + "}")).endswith("9...")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        read_epsilon_config(tmp_path / "none.json")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UsageError, match=r"folder\.yaml: Is a directory"):
        read_epsilon_config(tmp_path / "folder.yaml")


def test_yaml_without_pyyaml(read, monkeypatch):
    load = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "yaml":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert read("c.json", {"bn1": 1e-3}).values == {"bn1": 1e-3}
    with pytest.raises(MissingDependency, match="PyYAML") as caught:
        read("c.yaml", "bn1: 1e-3")
    assert "pip install PyYAML" in caught.value.hint


# --- Keras ---------------------------------------------------------------------------------------


def layer(class_name, **config):
    return {"module": "keras.layers", "class_name": class_name, "config": config, "inbound_nodes": []}


def batch_norm(name, epsilon=1e-3, class_name="BatchNormalization"):
    initializer = {"class_name": "Zeros", "config": {}}
    return layer(
        class_name, name=name, axis=[3], momentum=0.99, epsilon=epsilon, beta_initializer=initializer
    )


def model(*layers, class_name="Functional", **more):
    return {"class_name": class_name, "config": {"name": "model", "layers": list(layers)}, **more}


def test_keras_model(read, tmp_path):
    document = model(
        layer("InputLayer", name="x"),
        layer("Conv2D", name="conv", filters=4),
        batch_norm("bn1", 1e-3),
        model(batch_norm("bn2", 1e-5), model(batch_norm("bn3", 2e-5)), class_name="Sequential"),
        layer("TimeDistributed", name="each", layer=batch_norm("bn4", 3e-5)),
        batch_norm("bn5", 4e-5, "SyncBatchNormalization"),
        layer("LayerNormalization", name="ln", epsilon=0.1),
        keras_version="2.15.0",
        backend="tensorflow",
    )
    wanted = {"bn1": 1e-3, "bn2": 1e-5, "bn3": 2e-5, "bn4": 3e-5, "bn5": 4e-5}
    path = str(tmp_path / "model.json")
    assert read("model.json", document) == EpsilonConfig(wanted, names_layers=True, source=path)
    assert read("model.yaml", json.dumps(document)).values == wanted  # JSON is YAML


@pytest.mark.parametrize(
    "document",
    [
        {"name": "model", "layers": [batch_norm("bn1")]},  # model.get_config()
        {"class_name": "Sequential", "config": [batch_norm("bn1")]},  # of Keras 1 and early 2
        model(batch_norm("bn1"), model(batch_norm("bn1"))),  # one name twice, and one epsilon
        model(batch_norm("bn1", "1e-3")),
    ],
)
def test_other_forms_of_a_keras_model(read, document):
    config = read("model.json", document)
    assert (config.values, config.names_layers) == ({"bn1": 1e-3}, True)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (model(), "layers: wanted at least one BatchNormalization, got none"),
        (model(layer("Conv2D", name="c")), "layers: wanted at least one BatchNormalization, got none"),
        (
            model(layer("InputLayer"), batch_norm("bn1", -1e-3)),
            "config.layers[1].config.epsilon: wanted a finite number >= 0, got -0.001",
        ),
        (
            model(model(batch_norm("bn1", None))),
            "config.layers[0].config.layers[0].config.epsilon: wanted a finite number >= 0, got nothing",
        ),
        (
            {"layers": [batch_norm(None)]},
            "layers[0].config.name: wanted the name of the layer, got nothing",
        ),
        (
            {"layers": [{"class_name": "BatchNormalization"}]},
            "layers[0].config: wanted a mapping with entries, got nothing",
        ),
        (
            model(batch_norm("bn1", 1e-3), model(batch_norm("bn1", 1e-5))),
            "config.layers[1].config.layers[0].config.epsilon: wanted 0.001, as of another 'bn1', got 1e-05",
        ),
    ],
)
def test_keras_models_that_are_wrong_are_refused(refusal, document, message):
    assert refusal("model.json", document) == message
