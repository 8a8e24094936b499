"""Options: each is parsed into a value, or refused with exit code 2. Needs no TVM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_fuse.cli.args import make_parser, to_mapping
from tvm_fuse.core.errors import UsageError


def parse(*argv):
    return make_parser().parse_args(["run", "m.onnx", *argv])


def test_defaults():
    args = parse()
    assert (args.model, args.target, args.seed) == (Path("m.onnx"), "llvm", 0)
    assert (args.shape, args.epsilon, args.atol, args.rtol) == ([], [], None, None)
    assert (args.align_epsilon, args.no_latency, args.json) == (False, False, False)
    assert (args.params, args.output, args.epsilon_config) == (None, None, None)


@pytest.mark.parametrize(
    ("option", "text", "wanted"),
    [
        ("shape", "x=1x3x4", [("x", (1, 3, 4))]),
        ("shape", "x=1X3,4", [("x", (1, 3, 4))]),
        ("shape", "x=7", [("x", (7,))]),
        ("shape", "a=b:0=2x3", [("a=b:0", (2, 3))]),
        ("shape", "in put=2", [("in put", (2,))]),
        ("epsilon", "bn=1e-3", [("bn", 1e-3)]),
        ("epsilon", "*=0", [("*", 0.0)]),
        ("epsilon", "a=b/bn=.5", [("a=b/bn", 0.5)]),
        ("atol", "1e-4", 1e-4),
        ("rtol", "0", 0.0),
        ("seed", "12", 12),
        ("output", "d", Path("d")),
        ("params", "p", Path("p")),
        ("epsilon-config", "train.yaml", Path("train.yaml")),
        ("target", "cuda -arch=sm_86", "cuda -arch=sm_86"),
    ],
)
def test_values(option, text, wanted):
    name = option.replace("-", "_")
    assert getattr(parse(f"--{option}", text), name) == wanted
    assert getattr(parse(f"--{option}={text}"), name) == wanted


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        (
            "shape",
            ["", "x", "x=", "=1x3", "1x3", "x=1x", "x=1xx3", "x=0x3", "x=-1x3", "x=1.5", "x=?x3", "x=1x²"],
        ),
        ("epsilon", ["", "bn", "bn=", "=1e-3", "bn=small", "bn=-1e-3", "bn=nan", "bn=inf", "1e-3"]),
        ("atol", ["", "small", "-1", "nan", "inf", "1e-3x"]),
        ("rtol", ["-1e-9", "nan"]),
        ("seed", ["", "-1", "1.5", "one", "²"]),
    ],
)
def test_wrong_values_are_refused_with_the_option_and_the_value(option, texts, capsys):
    for text in texts:
        with pytest.raises(SystemExit) as caught:
            parse(f"--{option}={text}")
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"--{option}" in err
        assert repr(text) in err or "wanted" in err


def test_repeated_options_are_collected():
    args = parse("--shape", "x=1", "--shape", "y=2x2", "--epsilon", "a=1", "--epsilon", "b=2")
    assert to_mapping(args.shape, "--shape") == {"x": (1,), "y": (2, 2)}
    assert to_mapping(args.epsilon, "--epsilon") == {"a": 1.0, "b": 2.0}
    assert to_mapping([], "--shape") == {}


def test_a_name_given_twice_is_an_error_even_with_the_same_value():
    with pytest.raises(UsageError, match=r"--shape x="):
        to_mapping([("x", (1,)), ("y", (1,)), ("x", (1,))], "--shape")
