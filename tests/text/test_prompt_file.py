import io
import os
import re
from pathlib import Path

import pytest

from ondevice.errors import PromptError
from ondevice.text import prompt_file
from ondevice.text.prompt_file import BUILT_IN, load_prompts, read_lines, read_text


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "prompts"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.skipif(os.name == "nt", reason="Windows has no /dev/zero")
def test_a_file_without_an_end_is_not_read_into_memory(monkeypatch, write):
    """Such as /dev/zero: the limit is what is read of it."""
    monkeypatch.setattr(prompt_file, "MAX_TEXT_BYTES", 1 << 20)
    for path in (Path("/dev/zero"), write(bytes((1 << 20) + 1))):
        with pytest.raises(PromptError, match=f"^{re.escape(str(path))} is longer than 1 MB$"):
            read_text(path)
    assert read_text(write(b"x" * (1 << 20))) == "x" * (1 << 20)


def test_a_line_without_an_end_is_not_read_into_memory(monkeypatch):
    monkeypatch.setattr(prompt_file, "MAX_TEXT_BYTES", 4)
    lines = read_lines(io.BytesIO(b"abc\nabcd\n"), "standard input")
    assert next(lines) == b"abc\n"
    with pytest.raises(PromptError, match="standard input line 2 is longer than 0 MB"):
        next(lines)


def test_built_in_prompts_need_no_file():
    assert load_prompts(None, None, as_chat=True) == list(BUILT_IN)
    assert load_prompts(None, 2, as_chat=True) == list(BUILT_IN[:2])


def test_humaneval(write):
    path = write('{"task_id": "a/0", "prompt": "def f():\\n"}\n\n{"prompt": "x\\u2028y"}\n')
    assert load_prompts(path, None, as_chat=True) == ["def f():", "x\u2028y"]


def test_a_line_ends_only_at_a_line_feed(write):
    path = write('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\r\n')
    assert load_prompts(path, None, as_chat=False) == ["a\u2028b\x85c", "d"]


def test_spec_bench(write):
    path = write('{"question_id": 81, "turns": ["first", "second"]}\n')
    assert load_prompts(path, None, as_chat=True) == [[{"role": "user", "content": "first"}]]
    assert load_prompts(path, None, as_chat=False) == ["first"]


def test_plain_lines(write):
    assert load_prompts(write("one\r\n\n two \n{three}\n"), None, as_chat=True) == ["one", " two ", "{three}"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("\n \n", "holds no prompts"),
        (b"ab\xff\n", "not UTF-8 text .byte 2."),
        ('{"prompt": "a"}\nplain\n', "line 2 is not valid JSON"),
        ('{"prompt": ' + "[" * 100_000, "line 1 is not valid JSON"),
        ('{"text": "a"}\n', "line 1 is no prompt"),
        ('{"prompt": ""}\n', "line 1 is no prompt"),
        ('{"turns": []}\n', "line 1 is no prompt"),
        ('{"prompt": "a"}\n[1]\n', "line 2 is no prompt"),
    ],
)
def test_another_form_is_one_clear_error(write, content, complaint):
    with pytest.raises(PromptError, match=complaint) as caught:
        load_prompts(write(content), None, as_chat=True)
    assert "\n" not in str(caught.value)
