import pytest

from ondevice.errors import PromptError
from ondevice.text.prompt_file import BUILT_IN, load_prompts


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "prompts"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


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
