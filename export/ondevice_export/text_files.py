"""The text side of a bundle: tokenizer, templates and generation defaults, copied from the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER
from ondevice.errors import CheckpointError
from ondevice_export.json_fields import read_json
from ondevice_export.response_template import write_response_template
from ondevice_export.source import Note


def copy_text_files(source: Path, bundle: Path, note: Note) -> None:
    """Copy the text files that the checkpoint has; a bundle without a tokenizer still runs on token ids."""
    for name in (TOKENIZER, GENERATION_CONFIG, CHAT_TEMPLATE):
        if (source / name).is_file():
            shutil.copyfile(source / name, bundle / name)
    if not (bundle / TOKENIZER).exists():
        note(f"no {TOKENIZER} in the checkpoint: the bundle will take and return token ids only")
    write_response_template(source, bundle, note)
    template = None if (bundle / CHAT_TEMPLATE).exists() else _configured_template(source)
    if template is not None:
        try:
            (bundle / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{source}: the chat template holds half a surrogate pair: it is damaged") from error


def _configured_template(source: Path) -> str | None:
    """The chat template in `tokenizer_config.json`, whose field is a string or a list of named templates."""
    path = source / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):
        found = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = found[0].get("template") if found else None
    return template if isinstance(template, str) else None
