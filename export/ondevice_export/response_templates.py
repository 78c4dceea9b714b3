"""How to read replies of published models: response templates for checkpoints that have none of their own.

A template is chosen by the tokenizer's control tokens, and where several models have the same by the chat template, in
the order of `TEMPLATES`. `ondevice.text.reply_parser` says what its fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ondevice.text.tokenizer import Tokenizer


class Known(NamedTuple):
    """A response template, the control tokens that a tokenizer needs for it, and a text that the chat template has."""

    needed: tuple[str, ...]
    template: Mapping[str, Any]
    written: str = ""


GEMMA_4: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
    },
}
"""From transformers 5.22.2 (`_RESPONSE_TEMPLATE_FALLBACKS` in cli/serving/utils.py). One difference: function names may
contain dots and dashes, which OpenAI allows and `\\w+` does not.
"""

_QWEN_2: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "tagged_calls",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"close": ["<|im_end|>", "<|endoftext|>"], "content": "text"},
    },
}
"""Qwen2.5, whose calls are JSON, and Qwen3-Coder, whose calls are between tags: their control tokens are the same. From
the same place, without thoughts; there calls are JSON alone.
"""

_QWEN_3 = {
    **_QWEN_2,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        **_QWEN_2["fields"],
    },
}
"""Qwen3, and Qwen3.5 and 3.6, whose calls are between tags."""

_LFM_2 = {
    **_QWEN_3,
    "fields": {
        **_QWEN_3["fields"],
        "tool_calls": {
            **_QWEN_3["fields"]["tool_calls"],
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python_calls",
        },
    },
}
"""LFM2 and LFM2.5, whose calls are a list as in Python, or one of objects where a system message asks for JSON. Where
the tokenizer has no control tokens for thoughts, letters enclose them.
"""

_LLAMA_3: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?:<\|python_tag\|>\{|\{)"
            r'(?:"type": "function", )?"name": "(?P<name>[\w.-]+)", "parameters": ',
            "close_pattern": r"\}(?:<\|eot_id\|>|<\|eom_id\|>)",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<|eot_id|>", "<|eom_id|>"], "content": "text"},
    },
}
"""Llama 3.1 to 3.3, whose template asks for a call as `{"name": NAME, "parameters": {...}}` and nothing else. Only the
end of the turn is a control token, so an answer that ends with such an object is a call too.
"""

_MISTRAL_3: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["[/INST]", "[/TOOL_RESULTS]"],
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"close": ["</s>"], "content": "text"},
    },
}
"""Mistral's tokenizers of version 3 to 7, as of Mistral 7B v0.3, Nemo and Ministral 8B: all calls are one list, to the
end of the reply.
"""

_MISTRAL_11: dict[str, Any] = {
    **_MISTRAL_3,
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+|)\[ARGS\]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": _MISTRAL_3["fields"]["content"],
    },
}
"""Version 11 and later, as of Devstral Small: a call is a name and arguments, and ends where the next begins."""

_MISTRAL_THINKING = {
    **_MISTRAL_11,
    "fields": {
        "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
        **_MISTRAL_11["fields"],
    },
}

_DEEPSEEK_R1: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": ["<｜end▁of▁sentence｜>"], "content": "text"},
    },
}
"""DeepSeek R1 and the Qwen and Llama models that learnt from it. Their templates declare no tools."""

_BEHIND_A_MESSAGE = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|endoftext|>"]

_HEADER = r"\s\w/?!\u2013\u2014"
"""Characters of a header after its channel. Sampled at temperature 1, gpt-oss also writes `commentary?` and dashes."""

_HARMONY: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": rf"analysis[{_HEADER}<\|constrain\|>-]*<\|message\|>",
            "close": _BEHIND_A_MESSAGE,
            "repeats": True,
            "join": "\n\n",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r" to=(?:functions\.|)(?P<name>[\w.-]+)"
            rf"[{_HEADER}<\|channel\|><\|constrain\|>-]*<\|message\|>",
            "close": _BEHIND_A_MESSAGE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open": "<|message|>",
            "close": _BEHIND_A_MESSAGE,
            "repeats": True,
            "join": "\n\n",
            "content": "text",
        },
    },
}
"""gpt-oss, whose replies are several messages, each with a header up to `<|message|>`: `<|channel|>analysis`, with
thoughts; with a recipient, ` to=functions.NAME` before or after the channel, a call; any other, text for the user.
"""

_SEED_OSS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<seed:bos>assistant\n",
    "fields": {
        "reasoning_content": {
            "open": ["<seed:think>", "<seed:think><seed:cot_budget_reflect>"],
            "close": ["</seed:think>", "</seed:cot_budget_reflect></seed:think>"],
            "content": "text",
        },
        "tool_calls": {
            **_QWEN_2["fields"]["tool_calls"],
            "open": "<seed:tool_call>",
            "close": "</seed:tool_call>",
        },
        "content": {"close": ["<seed:eos>"], "content": "text"},
    },
}
"""Seed-OSS. In its thoughts it says, between marks, how much of its budget is left."""

_EXAONE_4 = {
    **_QWEN_3,
    "start_anchor": "[|assistant|]\n",
    "fields": {**_QWEN_3["fields"], "content": {"close": ["[|endofturn|]"], "content": "text"}},
}

_GRANITE_4 = {
    **_QWEN_3,
    "start_anchor": "<|start_of_role|>assistant<|end_of_role|>",
    "fields": {**_QWEN_3["fields"], "content": {"close": ["<|end_of_text|>"], "content": "text"}},
}

_GRANITE_3: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|start_of_role\|>assistant[^<\|end_of_role\|>]*<\|end_of_role\|>",
    "fields": {
        "tool_calls": {**_MISTRAL_3["fields"]["tool_calls"], "open": "<|tool_call|>"},
        "content": {"close": ["<|end_of_text|>"], "content": "text"},
    },
}
"""Granite 3.0 to 3.3: all calls are one list, to the end of the reply. After the role, prompts may ask for citations
or for a length.
"""

_GRANITE_32 = {
    **_GRANITE_3,
    "fields": {
        "reasoning_content": {
            "open_pattern": "Here(?: is|'s) my thought process:",
            "close_pattern": "Here(?: is|'s) my response:",
            "content": "text",
        },
        **_GRANITE_3["fields"],
    },
}
"""Both spellings are those of vLLM's parser."""

_GRANITE_33 = {
    **_GRANITE_3,
    "fields": {
        "reasoning_content": {
            "open": "<think>",
            "close_pattern": r"</think>(?:\s*<response>|)",
            "content": "text",
        },
        **_GRANITE_3["fields"],
        "content": {"close_pattern": r"(?:</response>\s*|)<\|end_of_text\|>", "content": "text"},
    },
}
"""Letters enclose thoughts, and the answer after them."""

_BEHIND_GLM = ["<|user|>", "<|observation|>", "<|endoftext|>", "<|assistant|>"]

_GLM_4: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open_pattern": r"\n?<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"(?P<name>[\w.-]+) ?\n",
            "close": _BEHIND_GLM,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"open": "\n", "close": _BEHIND_GLM, "repeats": True, "join": "\n\n", "content": "text"},
    },
}
"""GLM-4-0414 and GLM-Z1, GLM-4-9B and GLM-Edge. What stands before the first line break tells the kind of a message:
the name of a function, whose arguments follow, or nothing. GLM-Z1 thinks first, which its prompts begin.
"""

_BEHIND_CLOVA = r"(?:<\|im_end\|>|<\|endofturn\|>|<\|stop\|>)\n?"

_HYPERCLOVA: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "reasoning_content": {
            "open": "/think\n",
            "close_pattern": _BEHIND_CLOVA,
            "repeats": True,
            "join": "\n\n",
            "content": "text",
        },
        "tool_calls": {
            **_MISTRAL_3["fields"]["tool_calls"],
            "open": " -> tool/function_call\n",
            "close_pattern": _BEHIND_CLOVA,
            "repeats": True,
        },
        "content": {
            "open": "\n",
            "close_pattern": _BEHIND_CLOVA,
            "repeats": True,
            "join": "\n\n",
            "content": "text",
        },
    },
}
"""HyperCLOVA X SEED Think 14B, whose replies are several messages: thoughts, an answer and a list of calls, told by
what stands after the role.
"""

TEMPLATES = (
    Known(("<|start|>", "<|channel|>", "<|message|>", "<|call|>"), _HARMONY),
    Known(("<|turn>", "<|channel>", "<|tool_call>"), GEMMA_4),
    Known(("<|im_start|>", "<|im_end|>", "<|endofturn|>", "<|stop|>"), _HYPERCLOVA),
    Known(("<|im_start|>", "<|im_end|>", "<tool_call>", "<think>"), _QWEN_3),
    Known(("<|im_start|>", "<|im_end|>", "<tool_call>"), _QWEN_2),
    Known(("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"), _LFM_2),
    Known(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA_3),
    Known(("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"), _DEEPSEEK_R1),
    Known(("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]"), _MISTRAL_THINKING),
    Known(("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"), _MISTRAL_11),
    Known(("[INST]", "[/INST]", "[TOOL_CALLS]"), _MISTRAL_3),
    Known(("<seed:bos>", "<seed:eos>", "<seed:think>", "<seed:tool_call>"), _SEED_OSS),
    Known(("[|assistant|]", "[|endofturn|]", "[|tool|]"), _EXAONE_4),
    Known(("<|start_of_role|>", "<|end_of_role|>", "<tool_call>"), _GRANITE_4),
    Known(("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), _GRANITE_32, "Here is my thought process:"),
    Known(("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), _GRANITE_33, "<response></response>"),
    Known(("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), _GRANITE_3),
    Known(("[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>"), _GLM_4),
)


def known_template(tokenizer: Tokenizer, chat_template: str = "") -> Mapping[str, Any] | None:
    """The template for a tokenizer's control tokens; None if its replies are plain text.

    Args:
        chat_template: its source, for models whose control tokens are the same.
    """
    texts = set(tokenizer.control_texts.values())
    fits = (each for each in TEMPLATES if texts.issuperset(each.needed) and each.written in chat_template)
    return next((known.template for known in fits), None)
