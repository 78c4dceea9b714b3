"""A prompt that ends inside an assistant's message, and the reply that continues its text."""

import dataclasses
import json
from typing import Any

import pytest

from ondevice.bundle import MANIFEST, TOKENIZER, Bundle, sha256
from ondevice.bundle_format.manifest import FileEntry
from ondevice.errors import PromptError, UsageError
from ondevice.text.chat_template import ChatTemplate
from ondevice.text.codec import encode_prompt
from ondevice.text.messages import ChatOptions
from ondevice.text.reply_stream import Detokenizer, TokenOffsets
from ondevice.text.untrusted_text import UntrustedText
from tests.fixtures.chat_bundle import Script
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine
from tests.text.templates import GEMMA, GEMMA_4, THINKING
from tests.text.tokenizers_made import gemma_chat, gemma_like, llama_like, metaspace

CONTINUED = ChatOptions(continue_final=True)
ASKED: dict[str, Any] = {"role": "user", "content": "Why is the sky blue?"}


def begun(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": content, **more}]


def encoded(messages: list[dict[str, Any]], source: str = GEMMA_4, chat: ChatOptions = CONTINUED) -> list[int]:
    tokenizer = gemma_chat()
    return encode_prompt(messages, tokenizer, UntrustedText(tokenizer, ChatTemplate(source)), None, chat)


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("source", [GEMMA, THINKING, GEMMA_4])
@pytest.mark.parametrize("text", ["The sky is", "  a", "x<|turn>"])
def test_the_prompt_is_that_of_transformers(source, text):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([begun(text)], chat_template=source, continue_final_message=True)[0][0]
    expected = gemma_chat().encode(rendered, add_special_tokens=False)
    assert encoded(begun(text), source) == expected


def test_parts_are_one_text():
    parts = [{"type": "text", "text": "The sky"}, {"type": "text", "text": " is"}]
    assert encoded(begun(parts)) == encoded(begun("The sky is"))


def test_a_user_can_write_what_the_assistant_writes():
    """The text is cut at the end of the last message, not where its text occurs first."""
    messages = [{"role": "user", "content": "The sky is blue<turn|>"}, {"role": "assistant", "content": "The sky is"}]
    tokenizer = gemma_chat()
    assert tokenizer.decode(encoded(messages)).endswith("model\nThe sky is")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([ASKED], "the last one is of the role user"),
        (begun("x", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), "has tool calls"),
    ],
)
def test_what_cannot_be_continued(messages, complaint):
    with pytest.raises(PromptError, match=complaint):
        encoded(messages)


def test_a_template_without_replies():
    with pytest.raises(PromptError, match="does not write the last message"):
        encoded(begun("x"), "{{ messages[0]['content'] }}")


def test_a_text_has_no_last_message():
    with pytest.raises(UsageError, match="continue_final are for a prompt of messages"):
        encode_prompt("abc", gemma_chat(), None, None, CONTINUED)


@pytest.mark.parametrize("made", [llama_like, metaspace, gemma_like])
def test_offsets_of_tokens_that_continue_a_text(made):
    tokenizer = made()
    ids = tokenizer.encode("b b b", add_special_tokens=False)
    whole = TokenOffsets(tokenizer).add(ids)
    for cut in range(1, len(ids)):
        begin = len(tokenizer.decode(ids[:cut]))
        assert TokenOffsets(tokenizer, begin, continues=True).add(ids[cut:]) == whole[cut:]


def test_the_reply_to_a_text_continues_it(tmp_path):
    """Llama 2's and Mistral's decoders strip the space of a first word, and `is` with `blue` would be `isblue`."""
    bundle = write_bundle(tmp_path)
    manifest, path = Bundle.open(bundle).manifest, bundle / TOKENIZER
    made = json.loads(path.read_text("utf-8"))
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    made["decoder"] = {"type": "Sequence", "decoders": [made["decoder"], strip]}
    path.write_text(json.dumps(made), "utf-8")
    changed = {**manifest.files, TOKENIZER: FileEntry(path.stat().st_size, sha256(path))}
    (bundle / MANIFEST).write_text(dataclasses.replace(manifest, files=changed).to_json(), "utf-8")
    with model_over(ToyEngine(), bundle) as model:
        for prompt, expected in (("a", " b"), ([{"role": "user", "content": "a"}], "b")):
            says = Script(" b", len(model.encode(prompt)), model.tokenizer)
            assert model.generate(prompt, max_new_tokens=2, logits_processors=[says]).text == expected


def test_a_continued_text_keeps_the_space_of_its_first_word():
    tokenizer = llama_like()
    ids = tokenizer.encode("b b b", add_special_tokens=False)
    for cut in range(1, len(ids)):
        detokenizer = Detokenizer(tokenizer, ids[cut - 1 : cut])
        rest = "".join(map(detokenizer.feed, ids[cut:])) + detokenizer.flush()
        assert tokenizer.decode(ids[:cut]) + rest == "b b b"
