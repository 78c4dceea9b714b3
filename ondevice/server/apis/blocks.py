"""Content blocks of Anthropic's and the Responses API: a request's blocks as parts, a reply as blocks. And the
pictures of tool results, for all four APIs.

Parts are those of a chat completion's message, which the text layer reads. Pictures come with a request, as base64. No
address is opened, and no file of this machine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from ondevice.errors import PromptError
from ondevice.generation import Step
from ondevice.model import Model
from ondevice.server.delivery import ResponseWriter, ServerSentEvent, new_id
from ondevice.server.replies import Choice
from ondevice.server.requests import CompletionRequest, RequestFields
from ondevice.text.media_parts import is_medium, media_in, picture_of_url
from ondevice.text.messages import ToolCall

ContentPart = dict[str, Any]


def text_part(block: RequestFields) -> ContentPart:
    """The part of a block with a `text`."""
    block.ignore("cache_control", "citations", "annotations", "logprobs")
    return {"type": "text", "text": block.text("text") or ""}


def picture_part(fields: RequestFields, name: str, url: str | None, detail: str | None = None) -> ContentPart:
    """The part of a picture.

    Args:
        fields, name: the field that an error names.
        url: a `data:` URI.
        detail: OpenAI's name of a resolution.

    Raises:
        RequestError: it is no picture in base64.
    """
    try:
        return {"type": "image", "image": picture_of_url(url, detail, "the request")}
    except PromptError as error:
        raise fields.unsupported(name, str(error)) from error


def read_parts(
    fields: RequestFields, name: str, readers: Mapping[str, Callable[[RequestFields], ContentPart]]
) -> list[ContentPart]:
    """The parts of a message: of a string, or of a list of blocks.

    Args:
        fields, name: the field that holds them.
        readers: by the `type` of a block.

    Raises:
        RequestError: a block has another type, or its reader refuses it.
    """
    if isinstance(fields.get(name), str):
        return [{"type": "text", "text": fields[name]}]
    return [readers[block.kind(readers)](block) for block in fields.objects(name)]


def content_of(parts: Iterable[ContentPart], separator: str = "") -> str | list[ContentPart]:
    """The content of a message: texts that follow each other are joined, and a message of text only is a string."""
    made: list[ContentPart] = []
    for kind, alike in groupby(parts, itemgetter("type")):
        if kind == "text":
            made.append({"type": "text", "text": separator.join(part["text"] for part in alike)})
        else:
            made += alike
    if not made:
        return ""
    return str(made[0]["text"]) if [part["type"] for part in made] == ["text"] else made


def after_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the pictures and sounds of tool results at the beginning of the user's message that follows.

    Gemma's templates write only the text of a result. Where no user's message follows, the pictures are one. Anything
    malformed is left for the text layer to report.
    """
    made: list[dict[str, Any]] = []
    shown: list[Any] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool" and (found := media_in(message)):
            shown += found
            made.append({**message, "content": _without_media(message["content"])})
            continue
        if shown and role == "user" and isinstance(content, str | list):
            said = [{"type": "text", "text": content}] if isinstance(content, str) else content
            made.append({**message, "content": [*shown, *said]})
            shown = []
            continue
        if shown and role != "tool":
            made.append({"role": "user", "content": shown})
            shown = []
        made.append(message)
    return [*made, {"role": "user", "content": shown}] if shown else made


def _without_media(content: Sequence[Any]) -> str | list[Any]:
    """The other parts of a content: one text if they are texts."""
    left = [part for part in content if not is_medium(part)]
    for part in left:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return left
    return content_of(left, "\n")


def prompt_tokens(model: Model, request: CompletionRequest) -> int:
    """The number of tokens of a request's prompt, which is a list of messages."""
    options = request.options
    prompt = model.encode(
        request.prompts[0],
        tools=options.get("tools"),
        thinking=options.get("thinking"),
        continue_final=options["continue_final"],
    )
    return len(prompt)


BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class ReplyBlock:
    """A part of a reply, as far as it is written: thoughts, text, or one tool call.

    call : if it is one
    text : the thoughts, the text, or the arguments of the call as JSON
    id : random
    is_open : whether it may get more text
    """

    kind: BlockKind
    call: ToolCall | None = None
    text: str = ""
    id: str = field(default_factory=lambda: new_id(""))
    is_open: bool = True


class BlockWriter(ResponseWriter):
    """The common part of both APIs' writers: the one reply of a response as blocks, only the last of them open."""

    def __init__(self, model: Model, name: str, choices: Sequence[Choice]) -> None:
        super().__init__(model, name, choices)
        [self.choice] = choices
        self.blocks: list[ReplyBlock] = []

    @abstractmethod
    def begun(self, block: ReplyBlock) -> Iterator[ServerSentEvent]:
        """A block without text has been added to `blocks`."""

    @abstractmethod
    def grown(self, block: ReplyBlock, text: str) -> Iterator[ServerSentEvent]:
        """The last block's text has grown by `text`."""

    @abstractmethod
    def ended(self, block: ReplyBlock) -> Iterator[ServerSentEvent]:
        """The last block is complete."""

    def step(self, choice: Choice, step: Step) -> Iterator[ServerSentEvent]:
        for part in step.parts:
            if part.reasoning:
                yield from self._add("reasoning", part.reasoning)
            if part.text:
                yield from self._add("text", part.text)
            for call in part.tool_calls:  # complete, since calls are translated from the model's own syntax
                yield from self.end_block()
                yield from self._add("call", call.as_openai()["function"]["arguments"], call)
                yield from self.end_block()

    def end_block(self) -> Iterator[ServerSentEvent]:
        """End the block that is open, if one is."""
        if self.blocks and self.blocks[-1].is_open:
            self.blocks[-1].is_open = False
            yield from self.ended(self.blocks[-1])

    def _add(self, kind: BlockKind, text: str, call: ToolCall | None = None) -> Iterator[ServerSentEvent]:
        """Add to the block that is open, after beginning one of this kind if another or none is open."""
        if not self.blocks or not self.blocks[-1].is_open or self.blocks[-1].kind != kind:
            yield from self.end_block()
            self.blocks.append(ReplyBlock(kind, call))
            yield from self.begun(self.blocks[-1])
        self.blocks[-1].text += text
        yield from self.grown(self.blocks[-1], text)
