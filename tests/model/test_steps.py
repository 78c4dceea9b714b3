"""Steps of a reply, made of rounds without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ondevice.generate.stats import Round, Stats
from ondevice.generation import steps
from ondevice.text.reply_parser import ReplyParser, ResponseTemplate
from ondevice.text.reply_stream import ReplyStream
from ondevice_export.response_templates import GEMMA_4
from tests.text.tokenizers_made import gemma_chat

TOKENIZER = gemma_chat()
CALL = "<|tool_call>call:f{}<tool_call|>"


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_parts_have_the_order_in_which_they_were_written(length: int) -> None:
    """However many tokens a round has: the blocks of a response would depend on drafts otherwise."""
    ids = TOKENIZER.encode(f"ab<|channel>thought\nfox<channel|>b{CALL}{CALL}a", add_special_tokens=False)
    rounds = [Round(tuple(ids[at : at + length])) for at in range(0, len(ids), length)]
    rounds[-1] = replace(rounds[-1], finish_reason="stop")
    stream = ReplyStream(TOKENIZER, parser=ReplyParser(ResponseTemplate(GEMMA_4, TOKENIZER)))
    written: list[str] = []
    for step in steps((each for each in rounds), stream, Stats(), lambda: None):
        for part in step.parts:
            for kind, found in (("thought", part.reasoning), ("text", part.text), ("call", part.tool_calls)):
                if found and written[-1:] != [kind]:
                    written.append(kind)
        assert step.text == "".join(part.text for part in step.parts)
        assert step.reasoning == "".join(part.reasoning for part in step.parts)
        assert step.tool_calls == tuple(call for part in step.parts for call in part.tool_calls)
    assert written == ["text", "thought", "text", "call", "text"]
