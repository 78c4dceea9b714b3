"""Commands on the reference pair, the bundle that ships with the repository."""

import io
import json
import sys

import pytest

from ondevice.cli.main import main

PROMPT = 'def is_prime(n):\n    """Return'


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_generate(run, reference_bundle):
    code, out, err = run("generate", reference_bundle, PROMPT, "--temperature", 0, "--max-new-tokens", 40, "--compare")
    assert code == 0
    assert out.strip()
    assert "tokens equal" in err


def test_ids_and_text_give_the_same(run, reference_bundle):
    words = ["--temperature", "0", "--max-new-tokens", "10", "--json"]
    _, out, _ = run("generate", reference_bundle, PROMPT, *words)
    from ondevice.text.tokenizer import Tokenizer

    ids = Tokenizer.from_file(reference_bundle / "tokenizer.json", 2).encode(PROMPT)
    assert ids[0] == 2
    _, by_ids, _ = run("generate", reference_bundle, "--ids", ",".join(map(str, ids)), *words)
    assert json.loads(by_ids)["token_ids"] == json.loads(out)["token_ids"]


def test_chat(run, reference_bundle, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n/stats\nagain\n"), "utf-8"))
    code, _, err = run("chat", reference_bundle, "--max-new-tokens", 8)
    assert code == 0
    assert "tokens/s" in err


def test_bench(run, reference_bundle):
    words = ["--drafts", "--limit", 2, "--max-new-tokens", 16, "--lengths", "2,auto", "--temperature", 0.8]
    code, out, _ = run("bench", reference_bundle, *words)
    assert code == 0
    assert "| mtp+ngram " in out


def test_info(run, reference_bundle):
    code, out, _ = run("info", reference_bundle, "--verify-hashes")
    assert code == 0
    assert "every file is as exported" in out
