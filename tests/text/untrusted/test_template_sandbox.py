"""Templates that would run for ever or fill the memory end with one line, soon and in little memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ondevice import machine
from ondevice.errors import BundleCorruptError, PromptError
from ondevice.text import template_sandbox
from ondevice.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello"}]

REPEAT = "{% set n = namespace(x='ab') %}{% for a in range(60) %}"

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a search in a loop": "{% set b = range(99999)|list %}{% for i in range(99999) %}{{ i in b }}{% endfor %}",
    "a search in a filter": (
        "{% set b = range(99999)|list %}{{ range(99999)|select('in', b)|list|length }}"
    ),
}  # fmt: skip

ENORMOUS = {
    "printed in a loop": "{% for a in range(99999) %}{% for b in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
    "multiplied": "{{ 'x' * 10 ** 9 }}",
    "multiplied from the left": "{{ 10 ** 9 * 'x' }}",
    "a list multiplied": "{{ ([0] * 10 ** 9)|length }}",
    "doubled by ~": REPEAT + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by +": REPEAT + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by a block": REPEAT + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "a list of lists": REPEAT + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a tuple of tuples": REPEAT + "{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x == n.x }}",
    "a dictionary of dictionaries": REPEAT + "{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}{{ n.x }}",
    "the same by a call": REPEAT + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "the same by its items": "{% set n = namespace(x={}) %}{% for a in range(60) %}"
    "{% set n.x = {1: n.x.items(), 2: n.x.items()} %}{% endfor %}{{ n.x }}",
    "lists by a filter's default": "{% set n = namespace(x=['a', 'b']) %}{% for a in range(60) %}"
    "{% set n.x = n.x|map(attribute='q', default=n.x)|list %}{% endfor %}{{ n.x }}",
    "arguments of arguments": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1, varargs, varargs) }}{% else %}{{ varargs }}"
    "{% endif %}{% endmacro %}{{ f(0) }}",
    "variables": "".join(f"{{% set a{number} = 'x' * 10 ** 7 %}}" for number in range(50)),
    "a wide format": "{{ '{:1000000000}'.format(1) }}",
    "a wide format of a mapping": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "a wide format of safe text": "{{ ('{:1000000000}'|safe).format(1) }}",
    "one value in many fields": "{{ ('{0}' * 10 ** 6).format('x' * 10 ** 6) }}",
    "an old format": "{{ '%1000000000d' % 1 }}",
    "an old format as a filter": "{{ '%1000000000d'|format(1) }}",
    "an indent": "{{ ('x\n' * 1000)|indent(10 ** 9) }}",
    "an indent that is a text": "{{ ('x\n' * 1000)|indent('x' * 10 ** 6) }}",
    "a replacement": "{{ ('x' * 10 ** 5)|replace('x', 'y' * 10 ** 5) }}",
    "a replacement of nothing": "{{ ('x' * 10 ** 5).replace('', 'y' * 10 ** 5) }}",
    "a separator": "{{ ([0] * 10 ** 5)|join('y' * 10 ** 5) }}",
    "a separator's method": "{{ ('y' * 10 ** 5).join(['0'] * 10 ** 5) }}",
    "separators of JSON": "{{ ([1] * 10 ** 5)|tojson(separators=('x' * 10 ** 5, '')) }}",
    "a sum of lists": "{{ ([[0] * 80] * 10 ** 4)|sum(start=[])|length }}",
    "escapes of escapes": "{% set n = namespace(x='&' * 1000) %}{% for a in range(99999) %}"
    "{% set n.x = n.x|forceescape %}{% endfor %}",
}  # fmt: skip

REFUSED = {
    "a number": ("{% set n = namespace(x=3) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", "number"),
    "a power": ("{{ 10 ** (10 ** 9) }}", "number"),
    "a format with stars": ("{{ '%*d' % (10 ** 9, 1) }}", "a width that is a value"),
    "a precision with a star": ("{{ '%-5.*f' | format(10 ** 9, 1.0) }}", "a width that is a value"),
    "a star behind zeros": ("{{ '%%%00*d' % (10 ** 9, 1) }}", "a width that is a value"),
    "a star behind a sign": ("{{ '%5%%*d' % (10 ** 9, 1) }}", "a width that is a value"),
    "a star behind a name": ("{{ '%((a))*d' % {'(a)': 1} }}", "a width that is a value"),
    "a width from an argument": ("{{ '{:{}}'.format(1, 10 ** 9) }}", "a width that is a value"),
    "a width behind a brace": ("{{ '{{{:{}}}}'.format(1, 10 ** 9) }}", "a width that is a value"),
    "rounding": ("{{ 1.5|round(10 ** 9, 'ceil') }}", "rounds to 1000000000 digits"),
    "indented JSON": ("{{ [1]|tojson(indent=10 ** 9) }}", "indents by 1000000000 spaces"),
    "letters to strip": ("{{ ('a' * 10 ** 6).strip('b' * 10 ** 6 ~ 'a') }}", "more than 256 million steps"),
    "letters to trim": ("{{ ('a' * 10 ** 6)|trim('b' * 10 ** 6 ~ 'a') }}", "more than 256 million steps"),
    "a search from the end": ("{{ ('a' * 10 ** 6).rfind('b' ~ 'a' * 10 ** 5) }}", "more than 256 million steps"),
    "numbers with the same hash": (
        "{% set n = namespace(x=[]) %}{% for a in range(20000) %}{% set n.x = n.x + [a * (2 ** 61 - 1)] %}{% endfor %}"
        "{{ n.x|unique|list }}",
        "more than",
    ),
    "a form of times": ("{{ strftime_now('%Y' * 1000) }}", "a form of 2000 characters"),
    "slices": ("{% set x = 'x' * 10 ** 7 %}" + "{% set y = x[1:] %}" * 20, "more than 128 million characters"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a loop in itself": ("{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}", "recursion"),
    "a block in itself": ("{% block a %}{{ self.a() }}{% endblock %}", "recursion"),
    "padding": ("{{ 'x'.ljust(10 ** 9) }}", "attribute 'ljust'"),
    "bytes": ("{{ (1).to_bytes(10 ** 10, 'big') }}", "attribute 'to_bytes'"),
    "a division": ("{{ 1 / 0 }}", "division by zero"),
    "an overflow": ("{{ 10.0 ** 400 }}", "out of range"),
    "a loop over nothing": ("{% for x in none %}{% endfor %}", "not iterable"),
    "an attribute of nothing": ("{{ messages[9].content.split() }}", "no element 9"),
    "another template": ("{% include 'x' %}", "no loader"),
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_time_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(PromptError, match="it runs for more than"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", ENORMOUS.values(), ids=ENORMOUS)
def test_size_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 1 << 24)
    measured = machine.reset_peak_rss()
    before = machine.peak_rss_bytes()
    with pytest.raises(PromptError, match="it makes more than 16 million characters"):
        ChatTemplate(source).render(MESSAGES)
    assert not measured or machine.peak_rss_bytes() - before < 1 << 28


@pytest.mark.parametrize(("source", "words"), REFUSED.values(), ids=REFUSED)
def test_whatever_python_raises_is_one_line(source: str, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert "\n" not in str(caught.value)


def test_control_characters_of_a_template_do_not_reach_the_terminal() -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplate("{{ raise_exception('no\x1b[31m\rway\nout') }}").render(MESSAGES)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'|center(80) }}",
        "{{ 'x' ",
        "(" * 5000 + "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ 1" + "+1" * 5000 + " }}",
        " " * (1 << 21),
    ],
    ids=["a filter that was removed", "not closed", "deep", "deep loops", "a long sum", "too long"],
)
def test_what_cannot_be_compiled_is_the_bundles_fault(source: str) -> None:
    with pytest.raises(BundleCorruptError, match="the chat template is not valid Jinja") as caught:
        ChatTemplate(source).render(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.needs("oracle")
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
        "{% for a in [3, 4] if a > 3 %}{{ a }}{{ loop.length }}{% else %}none{% endfor %}",
        "{% for k, v in {'a': [1, 2]}.items() %}{{ k ~ v ~ none }}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ ['b', 'a']|sort|join('-') }}{{ [{'k': 1}]|join(', ', 'k') }}{{ ','.join(['x', 'y']) }}",
        "{{ 'aXbX'|replace('X', 'Y', 1) }}{{ 'aXbX'.replace('X', 'Y', 1) }}{{ 1|replace('1', 2) }}",
        "{{ '**%s**: 100%% *' % 'a' }}{{ '* %d' | format(7) }}",
        "{{ '%s-%03d' % ('a', 7) }}{{ '%s'|format('b') }}{{ '%s'|format((1, 2)) }}{{ '{:>5}{x}'.format(1, x=2) }}",
        "{{ 'a\nb'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent('..', blank=true) }}",
        "{{ [1, 2]|sum }}{{ [{'n': 2}, {'n': 3}]|sum(attribute='n', start=1) }}{{ 1.25|round(1) }}",
        "{% macro m(x, y='d') %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=[4]) }}",
        "{% set n = namespace(l=[], s='') %}{% for a in 'abc' %}{% set n.l = n.l + [a] %}{% endfor %}{{ n.l }}",
        "{% set (a, b), c = (1, [2]), {'x': (3,)} %}{{ a }}{{ b }}{{ c }}{{ [1] * 2 }}{{ 2 * 'x' }}{{ 2 ** 9 }}",
        "{{ {'b': [1, 'é'], 'a': none}|tojson(sort_keys=true) }}{{ [1, {'x': 2}]|tojson(indent=2) }}",
        "{{ dict([('a', 1)], b=2) }}{{ dict({'a': 1})|length }}{{ [1, 1, 'A', 'a']|unique|list }}{{ 'xaxb'[1:3] }}",
        "{% set n = namespace(center=1) %}{% set n.encode = n.center + 1 %}{{ n.encode }}{{ {'center': 3}.center }}",
        "{{ ' a '|trim }}{{ 'xyax'|trim('xy') }}{{ 'xax'.strip('x') }}{{ 5|trim }}{{ 'a,b,c'.rsplit(',', 1) }}",
        "{{ messages|map(attribute='content')|list }}{{ messages|selectattr('role', 'equalto', 'user')|list }}",
    ],
)
def test_what_templates_do_is_as_in_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([MESSAGES], chat_template=source)
    assert ChatTemplate(source).render(MESSAGES, add_generation_prompt=False) == rendered[0][0]


def test_each_rendering_has_its_own_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several threads at the same time."""
    template = ChatTemplate("{% for a in range(100) %}{{ 'x' * 400000 }}{% endfor %}")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(template.render(MESSAGES)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.append(len(template.render(MESSAGES)))
    assert found == [40_000_000] * 4


def test_no_call_takes_much_longer_than_reading_its_operands() -> None:
    """Each method, filter, test, function and operator with operands whose product takes minutes: see `template_calls`.
    It takes 20 s, the longest call 0.6 s (of processor time); without the limits `rfind` takes 10 s, `strip` minutes.
    """
    command = [sys.executable, "-m", "tests.text.untrusted.template_calls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        watch = threading.Timer(600, process.kill)
        watch.start()
        written = process.communicate()[0].splitlines()
        watch.cancel()
    assert process.returncode == 0, f"this call does not end: {written[-1:]}"
    seconds = {call: float(taken) for call, taken in (line.split("\t") for line in written)}
    assert {
        "x.strip(y) of alike and almost",
        "x|trim(y) of alike and almost",
        "x.rfind(y) of alike and almost alike",
    } <= (seconds.keys())
    assert not {call: taken for call, taken in seconds.items() if taken > 5}
