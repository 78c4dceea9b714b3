import re
from datetime import datetime
from typing import Any

import pytest

from ondevice.errors import BundleCorruptError, PromptError
from ondevice.text.chat_template import ChatTemplate
from tests.text.templates import GEMMA, MISTRAL, THINKING, TRAINED

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " <b>Hi</b> & 'bye' "},
    {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Hello"},
    {"role": "user", "content": "Ünïcode?", "tools": [{"name": "<a>", "text": "ü"}]},
]


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("source", [GEMMA, THINKING, TRAINED])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_it_renders_as_transformers_does(source, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=add_generation_prompt, bos_token="<bos>"
    )
    template = ChatTemplate(source, {"bos_token": "<bos>"})
    assert template.render(CHAT, add_generation_prompt=add_generation_prompt) == rendered[0][0]


def test_the_template_decides_about_old_thoughts():
    text = ChatTemplate(THINKING).render(CHAT)
    assert "hm" not in text
    assert "Hello" in text


def test_what_is_not_given_is_none():
    assert ChatTemplate("{{ tools is none and documents is none }}").render(CHAT) == "True"


def test_the_clock_is_there():
    before = datetime.now()
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render(CHAT)
    assert rendered in {str(time.year) for time in (before, datetime.now())}


def test_a_template_may_refuse():
    refusing = "{%- if messages | length > 4 %}{{ raise_exception('one question at a time') }}{%- endif %}" + THINKING
    assert ChatTemplate(refusing).render(CHAT) == ChatTemplate(THINKING).render(CHAT)
    with pytest.raises(PromptError, match="one question at a time"):
        ChatTemplate(refusing).render([*CHAT, CHAT[1]])


def test_a_later_system_message_is_joined_to_the_first_where_the_template_refuses_it():
    later = {"role": "system", "content": "more"}
    joined = [{**CHAT[0], "content": f"{CHAT[0]['content']}\nmore"}, *CHAT[1:]]
    assert ChatTemplate(THINKING).render([*CHAT, later]) == ChatTemplate(THINKING).render(joined)


def test_ids_of_calls_are_short_where_the_template_wants_it():
    """A call and its result have the same id still, and one that is short already stays."""
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"})
    function = {"name": "f", "arguments": {"a": 1}}
    ids = ("call_0123456789abcdef01234567", "123456789", "call_123")
    calls = [{"id": each, "type": "function", "function": function} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": str(place)} for place, each in enumerate(ids)]
    asked, called = {"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}
    text = template.render([asked, called, *results])
    written, answered = (re.findall(rf'"{name}": "(\w{{9}})"', text) for name in ("id", "call_id"))
    assert written == answered
    assert len(set(written)) == 3
    assert written[1] == "123456789"


SINGLE_CALLS = """\
{%- for message in messages %}
    {%- if message.tool_calls and message.tool_calls | length > 1 %}
        {{- raise_exception("one call at a time") }}
    {%- elif message.tool_calls %}
        {{- "[" + message.content + message.tool_calls[0].function.name + "]" }}
    {%- else %}
        {{- "(" + message.content + ")" }}
    {%- endif %}
{%- endfor %}
"""
"""As Llama 3's."""


def test_calls_come_one_by_one_where_the_template_wants_it():
    """Each with its results; one that answers none of them, or says not which, stays after them."""
    template = ChatTemplate(SINGLE_CALLS)
    calls = [{"id": each, "type": "function", "function": {"name": each, "arguments": {}}} for each in "abc"]
    results = [{"role": "tool", "tool_call_id": each, "content": each.upper()} for each in ("c", "a", "z", "a")]
    asked, called = {"role": "user", "content": "go"}, {"role": "assistant", "content": "so ", "tool_calls": calls}
    unnamed = {"role": "tool", "content": "?"}
    assert template.render([asked, called, *results, unnamed, asked]) == "(go)[so a](A)(A)[b][c](C)(Z)(?)(go)"
    assert template.render([asked, {**called, "tool_calls": calls[:1]}, *results]) == "(go)[so a](C)(A)(Z)(A)"


def test_results_without_ids_belong_to_calls_of_their_names_or_come_in_order():
    template = ChatTemplate(SINGLE_CALLS)
    functions = [{"name": each, "arguments": {}} for each in "abaa"]
    asked, calls = {"role": "user", "content": "go"}, [{"function": each} for each in functions]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    named = [{"role": "tool", "name": each[0].lower(), "content": each} for each in ("B", "A1", "A2")]
    unnamed = [{"role": "tool", "content": each} for each in "12"]
    assert template.render([asked, called, *named]) == "(go)[a](A1)[b](B)[a](A2)[a]"
    assert template.render([asked, called, *unnamed]) == "(go)[a](1)[b](2)[a][a]"
    assert template.render([asked, called, named[0], *unnamed]) == "(go)[a](1)[b](B)[a](2)[a]"
    known = {**called, "tool_calls": [{**each, "id": f"id{place}"} for place, each in enumerate(calls)]}
    by_id = {"role": "tool", "tool_call_id": "id2", "name": "a", "content": "2"}
    assert template.render([asked, known, *named, by_id]) == "(go)[a](A1)[b](B)[a](A2)(2)[a]"
    assert template.render([asked, known, by_id, *named]) == "(go)[a](A1)[b](B)[a](2)[a](A2)"


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_can_do_no_harm(source):
    with pytest.raises(PromptError, match="refuses"):
        ChatTemplate(source).render(CHAT)


def test_broken_jinja_is_the_bundles_fault(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_text("hello\n{% if %}", "utf-8")
    template = ChatTemplate.from_file(path)
    for _ in range(2):
        with pytest.raises(BundleCorruptError, match="line 2"):
            template.render(CHAT)
    with pytest.raises(BundleCorruptError, match="cannot read"):
        ChatTemplate.from_file(tmp_path / "none.jinja")
