"""A bundle with Gemma 4's chat format, and a logits processor that makes a model write a given text.

The weights are the reference pair's, the tokenizer has Gemma's control tokens: the model's own replies are noise.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, MANIFEST, RESPONSE_TEMPLATE, TOKENIZER, Bundle, sha256
from ondevice.bundle_format.manifest import FileEntry
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.response_templates import GEMMA_4 as GEMMA_4_RESPONSES
from tests.text.templates import GEMMA_4
from tests.text.tokenizers_made import gemma_chat

ENDS = ("<eos>", "<turn|>", "<|tool_response>")


def write_chat_bundle(reference: Path, directory: Path, **config: Any) -> Path:
    """Write the chat bundle.

    Args:
        reference: the reference pair's bundle, whose graphs and weights are used.
        directory: the directory to write.
        config: additional fields of generation_config.json.
    """
    shutil.copytree(reference, directory)
    tokenizer = gemma_chat()
    ids = {text: token_id for token_id, text in tokenizer.control_texts.items()}
    contents = {
        TOKENIZER: tokenizer._backend.to_str(),
        CHAT_TEMPLATE: GEMMA_4,
        RESPONSE_TEMPLATE: json.dumps(GEMMA_4_RESPONSES),
        GENERATION_CONFIG: json.dumps({"eos_token_id": [ids[text] for text in ENDS], **config}),
    }
    for name, content in contents.items():
        (directory / name).write_text(content, "utf-8")
    manifest = Bundle.open(reference).manifest
    files = {name: FileEntry((directory / name).stat().st_size, sha256(directory / name))
             for name in {*manifest.files, *contents}}  # fmt: skip
    changed = dataclasses.replace(
        manifest, files=files, bos_token_id=ids["<bos>"], eos_token_ids=(ids["<eos>"],), pad_token_id=ids["<pad>"]
    )
    (directory / MANIFEST).write_text(changed.to_json(), "utf-8")
    return directory


class Script:
    """A logits processor that forces a model to write exactly this text, control tokens included."""

    def __init__(self, text: str, prompt_tokens: int, tokenizer: Tokenizer | None = None) -> None:
        self.token_ids = (tokenizer or gemma_chat()).encode(text, add_special_tokens=False)
        self._prompt_tokens = prompt_tokens

    def __call__(self, logits: NDArray[np.float32], context: Sequence[int]) -> NDArray[np.float32]:
        at = len(context) - self._prompt_tokens
        logits[:] = -np.inf
        logits[self.token_ids[min(at, len(self.token_ids) - 1)]] = 0.0
        return logits
