"""Delimiters in text that is still coming in."""

import re

import pytest

from ondevice.text.reply_parser import Delimiter, literals

PATTERNS = [
    "abc",
    "a|abc",
    "ab*c",
    r"\s*(?:<x>|<yy>)",
    r"<call:(?P<name>\w+)",
    r"a[^b\]]+b?c",
    "(?:ab|c)?d",
    "(?:ab)+d",
    r"x{2,3}y",
    ".z",
]
TEXTS = ["abc", "aab abbbc", "  <x>  <yy", "<call:get_it{<call:f", "acc abcc", "ababcd", "xxxxy xy", "\nz .z", "<y <x>"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_held_is_all_that_may_become_a_match(pattern, text):
    """Any match that only more text makes begins at what is held, or later."""
    delimiter = Delimiter(pattern)
    for end in range(len(text)):
        held = delimiter.held(text[:end], 0)
        for found in re.compile(pattern, re.DOTALL).finditer(text):
            if found.start() < end < found.end():
                assert held <= found.start()


@pytest.mark.parametrize(
    ("pattern", "text", "held"),
    [
        ("abc", "xab", 1),
        ("abc", "abc", 3),  # it is there, and cannot change
        ("abc", "abx", 3),
        ("a|abc", "xa", 1),
        (r"c(?P<name>\w+)", "cde", 0),  # it may go on
        (r"c(?P<name>\w+)", "cde{", 4),
        (r"\s*<x>", "a  ", 1),
    ],
)
def test_what_waits(pattern, text, held):
    assert Delimiter(pattern).held(text, 0) == held


def test_literals_are_taken_as_they_are_the_longest_first():
    place = Delimiter(literals(["<|", "<|a.b"])).find("x<|a.b", 0)
    assert place is not None
    assert place.span() == (1, 6)
    assert Delimiter(literals(["a.b"])).find("axb", 0) is None


def test_what_is_too_long_is_no_delimiter():
    delimiter = Delimiter(r"<\w+>")
    text = "<" + "a" * 1000
    assert delimiter.held(text, 0) == len(text)
    assert delimiter.held(text[:200], 0) == 0


def test_groups():
    place = Delimiter(r"call:(?P<name>\w+)").find("call:f{", 0)
    assert place is not None
    assert place.groupdict() == {"name": "f"}


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "(?=a)",
        "a*",
        "^a",
        "a$",
        r"\bx",
        r"(a)\1",
        "(?=a)b",
        "(?:a+)+b",
        "(?i)a",
        "a++b",
        r"a\Z",
        "[",
        "x{2}{3}",
        "a*b*c*d*e",
        "(?:.|..)*!",
        "(?:a|b)+c",
        "((?:a|b)c){2}",
    ],
)
def test_what_is_not_understood_or_could_take_for_ever(pattern):
    with pytest.raises(ValueError, match="pattern"):
        Delimiter(pattern)
