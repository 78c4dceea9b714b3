"""Published models: drafts, batches, caches and engines change no token, and what surrounds a model works with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ondevice
from ondevice import Model
from tests.published_models.conftest import LoadModel, MakeBundle
from tests.server.served import serving

CODE = '''def parse_line(line):
    """Split a line into a key and a value."""
    key, _, value = line.partition("=")
    return key.strip(), value.strip()


def parse_lines(lines):
    """Parse every line into a dictionary."""
'''
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]

PROMPTS: dict[str, dict[str, Any]] = {"smollm2": {"chat": QUESTION, "code": CODE}, "gemma3": {"code": CODE}}
ORT = pytest.mark.needs("onnxruntime")
CASES = [
    *(pytest.param("simd", name, prompt) for name, prompts in PROMPTS.items() for prompt in prompts),
    *(pytest.param("ort", "smollm2", prompt, marks=ORT) for prompt in PROMPTS["smollm2"]),
    pytest.param("ort", "gemma3", "code", marks=[ORT, pytest.mark.slow]),
]


def generate(model: Model, prompt: Any, drafter: str, temperature: float, **options: Any) -> tuple[int, ...]:
    reply = model.generate(prompt, max_new_tokens=48, seed=5, drafter=drafter, temperature=temperature, **options)
    return reply.token_ids


@pytest.mark.parametrize(("engine", "name", "prompt"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(loaded: LoadModel, name: str, prompt: str, engine: str, temperature: float) -> None:
    model, text = loaded(name, engine=engine), PROMPTS[name][prompt]
    plain = generate(model, text, "none", temperature)
    assert len(plain) > 8
    for drafter in ("ngram", "auto"):
        assert generate(model, text, drafter, temperature) == plain
    forced = generate(
        model, text, "ngram", temperature, num_assistant_tokens=4, num_assistant_tokens_schedule="constant"
    )
    assert forced == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_own_layers_change_no_token(loaded: LoadModel, name: str, temperature: float) -> None:
    model = loaded(name)
    plain = generate(model, CODE, "none", temperature)
    assert generate(model, CODE, "swift", temperature) == plain


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_cache": "int8"}, {"attention": "lookup"}])
@pytest.mark.parametrize("name", PROMPTS)
def test_other_caches_and_attention(loaded: LoadModel, name: str, options: dict[str, str]) -> None:
    """After more than 2,560 tokens, where lookups begin, and past Gemma 3's window."""
    model = loaded(name, **options)
    text = "".join(f"def f_{number}(x):\n    return x * {number}\n\n\n" for number in range(170)) + "def f_170("
    assert len(model.encode(text)) > 2560
    plain = generate(model, text, "none", 1.0)
    assert generate(model, text, "auto", 1.0) == plain


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_in_one_batch_are_continued_as_alone(loaded: LoadModel, name: str, temperature: float) -> None:
    model = loaded(name)
    prompts = [CODE, CODE[: len(CODE) // 2], "The three largest cities of Japan are", "1, 2, 3, 4,"]
    alone = [generate(model, prompt, "none", temperature) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda prompt: generate(model, prompt, "auto", temperature), prompts))
    assert together == alone


def test_a_server_answers_with_the_same_text(loaded: LoadModel, published_bundle: MakeBundle) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "seed": 5}
    expected = loaded("smollm2").generate(QUESTION, max_new_tokens=32, drafter="none", **options).text
    bundle = published_bundle("smollm2", "keep")
    with serving(bundle, lambda: ondevice.load(bundle, threads=2)) as server:
        answer = server.post("/v1/chat/completions", messages=QUESTION, max_tokens=32, **options)
    assert answer.status == 200
    assert answer.body["choices"][0]["message"]["content"] == expected


def test_a_turn_ends(loaded: LoadModel) -> None:
    """The end token of SmolLM2's turns ends a reply, and the prompt is made with the file's chat template."""
    reply = loaded("smollm2").generate([{"role": "user", "content": "Hello!"}], max_new_tokens=64, temperature=0.0)
    assert reply.text.startswith("Hello!")
    assert reply.finish_reason == "stop"
    assert "<|im_end|>" not in reply.text


@pytest.mark.needs("llguidance")
def test_a_schema_is_kept(loaded: LoadModel) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    options: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    }
    model = loaded("smollm2")
    plain = model.generate(QUESTION, max_new_tokens=40, temperature=0.0, drafter="none", **options)
    assert plain.text.startswith("{")
    drafted = model.generate(QUESTION, max_new_tokens=40, temperature=0.0, **options)
    assert drafted.token_ids == plain.token_ids
