"""The compiled grammars' tokenizer, with Gemma's control tokens."""

from __future__ import annotations

import pytest

from ondevice.grammar.matcher import Compiler
from tests.grammar.walks import compiler
from tests.text.tokenizers_made import gemma_chat


@pytest.fixture(scope="module")
def made() -> Compiler:
    return compiler(gemma_chat())
