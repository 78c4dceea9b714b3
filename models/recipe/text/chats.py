"""Conversations made from source files: functions to write, complete and explain, JSON, thoughts, tool calls."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from text.corpus import Module, parse, path_hash

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
MARKS = ("<|", "|>", "<bos>", "<eos>")  # text that contains one of these is not used: it could end a turn
FUNCTION_LINES = 3, 60
LITERAL_CHARACTERS, LITERAL_LINES = (30, 600), 20
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's form, and the template's other variables."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False


class Template:
    """The pair's chat template, rendered as transformers does."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string(TEMPLATE_FILE.read_text())

    def render(self, chat: Chat, *, prompt: bool = False) -> str:
        """The text of a conversation, beginning with `<bos>`; `prompt` opens the model's turn at its end."""
        return self.template.render(
            bos_token="<bos>",
            messages=list(chat.messages),
            tools=list(chat.tools),
            enable_thinking=chat.thinking,
            add_generation_prompt=prompt,
        )


def question(text: str) -> Chat:
    """A conversation before its first answer."""
    return Chat(({"role": "user", "content": text},))


def exchange(asked: str, answered: str, thought: str = "") -> Chat:
    """One question and one answer, with a thought before it when there is one."""
    answer = {"role": "assistant", "content": answered}
    if thought:
        answer["reasoning_content"] = thought
    return Chat(({"role": "user", "content": asked}, answer), thinking=bool(thought))


def chats(module: Module) -> Iterator[Chat]:
    """All conversations made from a module."""
    tree = parse(module.text)
    if tree is None or any(mark in module.text for mark in MARKS):
        return
    lines = module.text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from function_chats(node, lines)
            yield from tool_chats(node)
        elif isinstance(node, ast.Dict | ast.List):
            yield from json_chats(node)


def function_chats(node: ast.FunctionDef, lines: list[str]) -> Iterator[Chat]:
    """Write a function, complete it, say what it does: for functions with a docstring."""
    if node.end_lineno is None or len(node.body) < 2:
        return
    summary = summary_of(node)
    code = dedent(lines[node.lineno - 1 : node.end_lineno], node.col_offset)
    if not summary or not FUNCTION_LINES[0] <= len(code) <= FUNCTION_LINES[1]:
        return
    signature = f"{node.name}({ast.unparse(node.args)})"
    docstring_end = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
    bare = [*code[: node.body[0].lineno - node.lineno], *code[docstring_end:]]
    turn = path_hash(f"{signature}{summary}") % 4  # which of the other kinds of conversation this function is used for
    thought = f"I have to write `{node.name}`. {arguments_in_words(node)} {summary}"
    yield exchange(f"Write a Python function `{signature}`: {summary}", fence(code), thought if turn == 0 else "")
    if turn == 1:
        yield exchange(f"Complete this function:\n{fence(code[:docstring_end])}", fence(code))
    if turn == 2:
        yield exchange(f"What does this function do?\n{fence(bare)}", summary)


def tool_chats(node: ast.FunctionDef) -> Iterator[Chat]:
    """A call of the function as a tool, with values from its own defaults, and its result."""
    summary = summary_of(node)
    plain_arguments = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
    defaults = node.args.defaults[-len(plain_arguments) :] if plain_arguments else []
    given = dict(zip(plain_arguments[len(plain_arguments) - len(defaults) :], map(literal, defaults), strict=True))
    arguments = {argument.arg: value for argument, value in given.items() if isinstance(value, str | int | float)}
    if not summary or not arguments or node.args.vararg or len(plain_arguments) > 5:
        return
    properties = {
        name: {"type": TYPES[type(value).__name__], "description": name.replace("_", " ")}
        for name, value in arguments.items()
    }
    function = {
        "name": node.name,
        "description": summary,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
    wanted = " and ".join(f"{name} = {json.dumps(value)}" for name, value in arguments.items())
    call = {"id": "0", "type": "function", "function": {"name": node.name, "arguments": arguments}}
    result = next(iter(arguments.values()))
    yield Chat(
        (
            {"role": "user", "content": f"{summary} Use {wanted}."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "0", "content": {"value": result}},
            {"role": "assistant", "content": f"`{node.name}` returned {json.dumps(result)}."},
        ),
        tools=({"type": "function", "function": function},),
    )


def json_chats(node: ast.Dict | ast.List) -> Iterator[Chat]:
    """A literal of the source written as JSON, and JSON read back."""
    if (node.end_lineno or node.lineno) - node.lineno > LITERAL_LINES:  # a table, and long to evaluate
        return
    value = literal(node)
    source = ast.unparse(node) if value else ""
    if not LITERAL_CHARACTERS[0] <= len(source) <= LITERAL_CHARACTERS[1]:
        return
    try:
        text = json.dumps(value, indent=2 if len(source) > 80 else None)
    except (TypeError, ValueError):
        return
    if json.loads(text) != value:  # JSON changes tuples, and keys that are numbers
        return
    if path_hash(source) % 2:
        yield exchange(f"Write this as JSON: `{source}`", text)
    else:
        yield exchange(f"Write this JSON as a Python literal:\n{text}", fence([source]))


def summary_of(node: ast.FunctionDef) -> str:
    """The first line of a function's docstring."""
    return (ast.get_docstring(node) or "").split("\n")[0].strip()


def arguments_in_words(node: ast.FunctionDef) -> str:
    """The beginning of a thought: the function's arguments in words."""
    names = [f"`{argument.arg}`" for argument in node.args.args if argument.arg not in ("self", "cls")]
    return f"It takes {' and '.join(names)}." if names else "It takes no arguments."


def literal(node: ast.expr) -> Any:
    """The value of a literal; None for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def dedent(lines: list[str], columns: int) -> list[str]:
    """Lines without the function's own indentation."""
    return [line[columns:] if line[:columns].isspace() or not columns else line for line in lines]


def fence(code: list[str]) -> str:
    """A Markdown code block."""
    return "```python\n" + "\n".join(code) + "\n```"
