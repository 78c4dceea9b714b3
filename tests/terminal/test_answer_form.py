"""`ondevice generate --json-schema FILE` and what else an answer may have to be."""

import json

import pytest

from ondevice.terminal.main import main
from tests.conftest import ROOT

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}
pytestmark = pytest.mark.needs("llguidance")


@pytest.fixture
def generate(capsys, reference_bundle):
    """The command on the reference pair: the toy of the other commands has a tokenizer that no grammar can use."""

    def call(*words):
        code = main(["generate", str(reference_bundle), "x = ", "--max-new-tokens", "40", "--threads", "1", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--json-schema", "schema.json"], ['{"a": "b"}', '{"a": "c"}']),
        (["--regex", "ab|cd"], ["ab", "cd"]),
        (["--choice", "yes, sir", "--choice", "no"], ["yes, sir", "no"]),
        (["--lark", "form.lark"], ["c", "d"]),
    ],
    ids=lambda value: value[0],
)
def test_an_answer_has_the_form(generate, tmp_path, monkeypatch, words, texts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "form.lark").write_text('start: "c" | "d"')
    code, out, _ = generate(*words)
    assert code == 0
    assert out.removesuffix("\n") in texts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json-schema", "gone.json"], "gone.json"),
        (["--json-schema", str(ROOT / "README.md")], "is not valid JSON"),
        (["--regex", "("], "this grammar cannot be compiled: "),
        (["--json-object", "--regex", "a"], "not allowed with"),
        (["--tool-choice", "auto"], "tool_choice='auto' needs tools"),
        (["--tool-choice", "clock"], "names the function 'clock', and these are declared: none"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(generate, words, said):
    code, out, err = generate(*words)
    assert (code, out) == (2, "")
    assert said in err.strip().splitlines()[-1]
