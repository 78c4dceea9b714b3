"""The text side of a bundle: tokenizer, templates and generation defaults, copied from the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, RESPONSE_TEMPLATE, TOKENIZER
from ondevice.bundle_format.manifest import SPECIAL_TOKENS
from ondevice.errors import BundleCorruptError, CheckpointError, reason, shown
from ondevice.text.reply_parser import ResponseTemplate
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.source import SPECIAL_TOKENS_MAP, TOOL_TEMPLATE, Note
from ondevice_export.response_templates import known_template


def copy_text_files(source: Path, bundle: Path, note: Note) -> None:
    """Copy the text files that the checkpoint has; a bundle without a tokenizer still runs on token ids."""
    for name in (TOKENIZER, GENERATION_CONFIG):
        if (source / name).is_file():
            shutil.copyfile(source / name, bundle / name)
    if not (bundle / TOKENIZER).exists():
        note(f"no {TOKENIZER} in the checkpoint: the bundle will take and return token ids only")
    _note_unknown_tokens(source, bundle, note)
    _write_response_template(source, bundle, note)
    template = _template(source)
    if template is not None:
        try:
            (bundle / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{source}: the chat template holds half a surrogate pair: it is damaged") from error


def _note_unknown_tokens(source: Path, bundle: Path, note: Note) -> None:
    """Name a token that stands in `tokenizer_config.json` alone, whence transformers takes it too: prompts would have
    its letters.
    """
    path, tokenizer = source / "tokenizer_config.json", read_tokenizer(bundle)
    given = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    if tokenizer is None or not isinstance(given, dict):
        return
    known = {token.content for token in tokenizer.added.values()}
    texts = [each.get("content") for each in given.values() if isinstance(each, dict)]
    unknown = [text for text in texts if isinstance(text, str) and text not in known]
    if unknown:
        note(
            f"{TOKENIZER} lacks {len(unknown)} of the tokens in tokenizer_config.json, as {shown(unknown[0])}, which "
            "will be read letter by letter: save the tokenizer with transformers, and export again"
        )


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint or a bundle; None without one, or if it is damaged, which loading reports."""
    try:
        return Tokenizer.from_file(directory / TOKENIZER)
    except BundleCorruptError:
        return None


def begin_token(source: Path, tokenizer: Tokenizer | None, configured: int | None) -> int | None:
    """The token that begins a text: the one that `tokenizer_config.json` names.

    Args:
        source: the checkpoint's directory.
        tokenizer: its tokenizer, None if there is none.
        configured: the token of the configuration, where the tokenizer names none. Of models that were trained from
            another it may be that one's.
    """
    text = special_tokens(source).get("bos_token")
    return configured if tokenizer is None or text is None else tokenizer.vocabulary.get(text, configured)


def adds_bos(source: Path, tokenizer: Tokenizer | None, bos: int | None, *, default: bool | None) -> bool:
    """Whether texts begin with the token `bos`.

    Args:
        source: the checkpoint's directory.
        tokenizer: its tokenizer, None if there is none.
        bos: the token, None if there is none.
        default: the family's rule, where `tokenizer_config.json` says nothing; None to follow `tokenizer.json`.
    """
    path = source / "tokenizer_config.json"
    said = read_json(path).get("add_bos_token") if path.is_file() else None
    said = said if isinstance(said, bool) else default
    if said is not None or bos is None or tokenizer is None:
        return bos is not None and said is not False
    try:
        return tokenizer.encode("a")[:1] == [bos]
    except BundleCorruptError:  # an encoding with this bundle reports it
        return True


def special_tokens(source: Path) -> dict[str, str | None]:
    """Texts of the special tokens that chat templates write, as `tokenizer_config.json` names them.

    There a token is a string, null, or an object with its `content`. Names that the file has not are absent. In
    checkpoints of before `added_tokens_decoder` the names of `special_tokens_map.json` count more, as in transformers.
    """
    path, older = source / "tokenizer_config.json", source / SPECIAL_TOKENS_MAP
    given = read_json(path) if path.is_file() else {}
    if "added_tokens_decoder" not in given and older.is_file():
        given |= read_json(older)
    named = {name: given[name] for name in SPECIAL_TOKENS if name in given}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is None or isinstance(text, str)}


TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<|call|>", "<|observation|>")
"""Tokens that end a turn of a chat in the templates of published models."""

_BEHIND_MESSAGES = "<|endofturn|>"


def turn_ends(source: Path, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of the tokens that end a turn in the checkpoint's chat template.

    Some checkpoints name the end of a text only in `eos_token_id`, and a reply would go on with a turn of the user.
    Where a token for the end of a turn stands after that of a message, as HyperCLOVA X's, the latter ends none.
    """
    template = _template(source)
    if template is None or tokenizer is None:
        return []
    ends = set(TURN_ENDS)
    if _BEHIND_MESSAGES in tokenizer.control_texts.values():
        ends.discard("<|im_end|>")
    return [number for number, text in tokenizer.control_texts.items() if text in ends and text in template]


def _template(source: Path) -> str | None:
    """The checkpoint's chat template; None if it has none.

    Of named ones transformers takes `tool_use` where tools are given: the two become one template. Alone it is used for
    all chats.
    """
    named = _templates_of_files(source) or _configured_templates(source)
    with_tools = named.get("tool_use")
    template = named.get("default", with_tools)
    if template != with_tools and isinstance(template, str) and isinstance(with_tools, str):
        parts = (each.removesuffix("\n") for each in (with_tools, template))  # as Jinja leaves it out at the end
        template = "{{% if tools is not none %}}{}{{% else %}}{}{{% endif %}}".format(*parts)
    return template if isinstance(template, str) else None


def _templates_of_files(source: Path) -> dict[str, str]:
    """Chat templates by name, as transformers 5 saves them; where there are files, nothing else counts."""
    paths = {"default": source / CHAT_TEMPLATE, "tool_use": source / TOOL_TEMPLATE}
    try:
        return {name: path.read_text("utf-8") for name, path in paths.items() if path.is_file()}
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source} has a chat template that cannot be read: {reason(error)}") from error


def _configured_templates(source: Path) -> dict[str, object]:
    """Chat templates by name, as older checkpoints have them in `tokenizer_config.json`: a string, or a list."""
    path = source / "tokenizer_config.json"
    given = read_json(path).get("chat_template") if path.is_file() else None
    if not isinstance(given, list):
        return {"default": given}
    return {str(each.get("name")): each.get("template") for each in given if isinstance(each, dict)}


def _write_response_template(source: Path, bundle: Path, note: Note) -> None:
    """Write the checkpoint's response template, or the known one for its control tokens, into a bundle.

    A bundle without a template returns replies as plain text.

    Args:
        source: the checkpoint's directory.
        bundle: the bundle's directory; its tokenizer, if any, has been copied already.
        note: called with a message if the template cannot be used.
    """
    tokenizer = read_tokenizer(bundle)
    if tokenizer is None:
        return
    path = source / "tokenizer_config.json"
    template = read_json(path).get("response_template") if path.is_file() else None
    template = known_template(tokenizer, _template(source) or "") if template is None else template
    if template is None:
        return
    try:
        ResponseTemplate(template, tokenizer)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        note(f"replies will be text with thoughts and calls in it: the response template is unknown ({reason(error)})")
    else:
        (bundle / RESPONSE_TEMPLATE).write_text(json.dumps(template, indent=1, ensure_ascii=True), encoding="utf-8")
