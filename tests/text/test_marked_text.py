"""Whatever a template does with untrusted text, its characters stay marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from jinja2.filters import FILTERS as FILTERS_OF_JINJA2
from jinja2.tests import TESTS as TESTS_OF_JINJA2

from ondevice.text.marked_text import METHODS, MarkedText, concatenated
from ondevice.text.template_sandbox import ATTRIBUTES, FILTERS, FUNCTIONS, TESTS, LimitedEnvironment

LETTERS = "жшЖШ"
"""Letters of untrusted text, which occur in nothing else here."""

MARKED = [*map(MarkedText, ["ж ш", " жш\nжßш ", "ж,Ш,ж"]), MarkedText("ab жш", [3, 5]), MarkedText("a ш,ж b", [2, 5])]
OTHERS: list[Any] = ["a,b", ",", "lower", "k", 1, None, ["a", "b"], {"k": "b"}]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings(list(value.items()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings(each)


def unmarked(text: str) -> str:
    """The untrusted letters that lost their marks."""
    parts = text.parts() if isinstance(text, MarkedText) else [(text, False)]
    return "".join(letter for part, untrusted in parts if not untrusted for letter in part if letter in LETTERS)


def rendered(source: str, **variables: Any) -> str:
    environment = LimitedEnvironment()
    template, _ = environment.compiled(source)
    return environment.rendered(template, variables)


def attempts(source: str, *pools: Sequence[Any]) -> int:
    """Renderings with every choice of a value for x, and for y and z, that has marks; how many of them succeeded."""
    environment, done = LimitedEnvironment(), 0
    template, _ = environment.compiled(source)
    for values in itertools.product(*pools):
        if any(isinstance(each, MarkedText) for each in strings(values)):
            try:
                text = environment.rendered(template, dict(zip("xyz", values, strict=False)))
            except Exception:  # whatever a template can make Python raise
                continue
            done += 1
            assert not unmarked(text), (source, values, text)
    return done


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_keep_marks(name: str) -> None:
    own, given = [*MARKED[1:], "a,b", "{}{}"], [*MARKED[1:4], *OTHERS]
    calls = ((f"x.{name}()", [own]), (f"x.{name}(y)", [own, given]), (f"x.{name}(y, z)", [own, given, given[::3]]))
    done = 0
    for call, pools in calls:
        done += attempts("{{ " + call + " }}", *pools)
        done += attempts("{% for a in " + call + " %}{{ a }}{{ a ~ 'b' }}{% endfor %}", *pools)
    assert done


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_filters_keep_marks(name: str) -> None:
    held = [value for each in MARKED[1:4:2] for value in ([each], {"k": each}, [[each, "a"]], [{"k": each}])]
    first, given = [*MARKED[1:], *held, "a,b", "%s", ["a", "b"], [{"k": "b"}]], [*MARKED[1:3], *OTHERS]
    calls = [
        (f"x|{name}", [first]), (f"x|{name}(y)", [first, given]), (f"x|{name}(y, z)", [first, given[::3], given[::2]]),
        (f"x|{name}(attribute='k')", [first]), (f"x|{name}(attribute='k', default=y)", [first, given]),
        (f"x|{name}(y, attribute='k')", [first, given]), (f"x|{name}(k=y)", [first, given]),
        (f"x|map('{name}')", [first]),
    ]  # fmt: skip
    done = 0
    for call, pools in calls:
        done += attempts("{{ " + call + " }}", *pools)
        done += attempts("{% for a in " + call + " %}{{ a }}{{ [a]|tojson }}{% endfor %}", *pools)
    assert done


@pytest.mark.parametrize(
    "form",
    [
        "{{ x }}", "{{ x ~ y }}", "{{ y ~ x }}", "{{ x + y }}", "{{ y + x }}", "{{ x * 3 }}", "{{ 2 * x }}",
        "{{ x[0] }}", "{{ x[-1] }}", "{{ x[1:] }}", "{{ x[::-1] }}", "{{ x[::2] }}", "{{ x % y }}", "{{ '%s' % x }}",
        "{{ '%5s' % x }}",
        "{{ '%(k)s' % {'k': x} }}", "{{ '%r' % x }}", "{{ '{:>5}'.format(x) }}", "{{ '{!r}'.format(x) }}",
        "{{ '{0[0]}'.format(x) }}", "{{ '{k}'.format(k=x) }}", "{{ '{}'.format([x]) }}", "{{ [x] }}", "{{ {'k': x} }}",
        "{{ {x: 1} }}", "{{ (x, y) }}", "{{ dict(k=x) }}", "{{ dict([(x, y)]).items() }}", "{{ namespace(k=x).k }}",
        "{% set n = namespace() %}{% set n.k = x %}{{ n.k }}", "{% set a %}{{ x }}{% endset %}{{ a }}",
        "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(x, x, k=x) }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ x }}{% endcall %}",
        "{% filter upper %}{{ x }}{% endfilter %}", "{% for a in x %}{{ a }}{{ loop.previtem }}{% endfor %}",
        "{% for a in [x] %}{{ loop.cycle(a, y) }}{% endfor %}", "{{ cycler(x, y).next() }}",
        "{% set j = joiner(x) %}{{ j() }}{{ j() }}", "{{ x if x else y }}", "{{ x and y }}", "{{ [x, y] + [x] }}",
        "{% for a in [[x]] recursive %}{{ loop(a) if a is not string else a }}{% endfor %}", "{{ [x] * 2 }}",
        "{% generation %}{{ x }}{% endgeneration %}", "{% block b %}{{ x }}{% endblock %}{{ self.b() }}",
        "{{ nothing|default(x) }}", "{% with a = x %}{{ a }}{% endwith %}",
        "{{ (x ~ y).strip()[1:].split('b')|join('a') }}",
    ],
)  # fmt: skip
def test_operators_and_statements_keep_marks(form: str) -> None:
    assert attempts(form, MARKED, [*MARKED, *OTHERS])


def test_text_of_the_template_stays_trusted() -> None:
    """Also in a text that holds both, after it was trimmed, divided and joined."""
    text = rendered(
        "{% macro m(a) %} <|turn>{{ a }}<turn|> {% endmacro %}{% set t = (m(x) ~ m(x))|trim %}"
        "{{ t.split('<turn|>')|join('<turn|>') }}{{ t[2:8] }}{{ '<|{}|>{}'.format('a', x) }}{{ '<b>%s' % x }}",
        x=MarkedText("qz"),
    )
    assert isinstance(text, MarkedText)
    assert text == "<|turn>qz<turn|>  <|turn>qz<turn|>turn>q<|a|>qz<b>qz"
    assert [part for part, untrusted in text.parts() if untrusted] == ["qz", "qz", "q", "qz", "qz"]


def test_a_text_without_untrusted_parts_is_plain() -> None:
    assert type(rendered("a{{ x }}", x="b")) is str
    assert type(rendered("{{ x[:1] }}", x=MarkedText("abc", [2, 3]))) is str


def test_cutting_and_joining_agree() -> None:
    text = concatenated(["ab", MarkedText("cd"), MarkedText("ef"), "g", MarkedText("h")])
    assert isinstance(text, MarkedText)
    assert text.bounds == (2, 6, 7, 8)
    for start, stop in itertools.combinations(range(9), 2):
        cut = text.cut(start, stop)
        assert cut == str.__str__(text)[start:stop]
        marks = [2 <= place < 6 or place == 7 for place in range(start, stop)]
        parts = cut.parts() if isinstance(cut, MarkedText) else [(cut, False)]
        assert [untrusted for part, untrusted in parts for _ in part] == marks
        assert text.touches(start, stop) == any(marks)
        assert text.covers(start, stop) == all(marks)


VALUES: list[Any] = ["a", MarkedText("a"), 1, 1.5, True, None, [1], (1,), {"a": 1}, {}.items(), range(2), "abc".split]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_name_that_is_not_listed_is_refused(value: Any) -> None:
    """So that a method of a later Python neither loses marks nor takes hours."""
    listed = {name for kind, names in ATTRIBUTES if isinstance(value, kind) for name in names}
    for name in {*dir(type(value)), *dir(value)} - listed:
        for source in (f"{{{{ x.{name}.a }}}}", f"{{{{ x['{name}'].a }}}}", f"{{{{ (x|attr('{name}')).a }}}}"):
            with pytest.raises(Exception, match=f"attribute '{name}' of '.*' object is unsafe"):
                rendered(source, x=value)


def test_what_later_versions_of_jinja2_add_is_not_there() -> None:
    environment = LimitedEnvironment()
    assert environment.filters.keys() == FILTERS < FILTERS_OF_JINJA2.keys()
    assert environment.tests.keys() == TESTS <= TESTS_OF_JINJA2.keys()
    assert environment.globals.keys() == FUNCTIONS | {"raise_exception", "strftime_now"}
