"""Conversations in all the forms that clients send, and what a template is told beside them."""

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "nullable": True},
                "units": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object"}},
}

Messages = list[dict[str, Any]]


def call(name: str, arguments: Any, identity: str = "call_1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED: Messages = [{"role": "user", "content": "Will it rain in Zürich?"}]
CALLED: Messages = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I need a tool.",
        "tool_calls": [
            call("get_weather", {"city": "Zürich", "days": 3, "units": None, "deep": {"a": [1, True, "x"]}})
        ],
    },
]
ANSWERED: Messages = [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]

Conversation = tuple[Messages, dict[str, Any]]
CONVERSATIONS: dict[str, Conversation] = {
    "plain": (ASKED, {}),
    "system": ([{"role": "system", "content": " Be brief. "}, *ASKED], {}),
    "developer": ([{"role": "developer", "content": "Be brief."}, *ASKED], {}),
    "thinking": (ASKED, {"enable_thinking": True}),
    "not thinking": (ASKED, {"enable_thinking": False}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]}], {}),
    "system parts": ([{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *ASKED], {}),
    "tools": (ASKED, {"tools": [WEATHER, CLOCK]}),
    "tools and thinking": (ASKED, {"tools": [CLOCK], "enable_thinking": True}),
    "a call": (CALLED, {"tools": [WEATHER]}),
    "a result": (ANSWERED, {"tools": [WEATHER]}),
    "a result while thinking": (ANSWERED, {"tools": [WEATHER], "enable_thinking": True}),
    "a result in parts": ([*CALLED, {**ANSWERED[-1], "content": [{"type": "text", "text": "rain"}]}], {}),
    "two calls": (
        [
            *ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call("clock", {}), call("clock", None, "call_2")]},
            {"role": "tool", "tool_call_id": "call_2", "content": "12:00"},
            {"role": "tool", "tool_call_id": "call_1", "content": "13:00"},
        ],
        {"tools": [CLOCK]},
    ),
    "a result by name": ([*CALLED, {"role": "tool", "name": "get_weather", "content": "rain"}], {}),
    "it goes on": (
        [
            *ANSWERED,
            {"role": "assistant", "content": "Yes.", "reasoning": "It says rain."},
            {"role": "user", "content": "Thanks"},
        ],
        {"enable_thinking": True},
    ),
    "old thoughts": (
        [*ASKED, {"role": "assistant", "content": "Yes.", "thinking": "hm"}, *ASKED],
        {"preserve_thinking": True},
    ),
    "thoughts in the text": (
        [*ASKED, {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Yes."}, *ASKED],
        {},
    ),
}
