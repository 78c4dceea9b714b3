"""jinja2's immutable sandbox with limits of time and size: a chat template is a program from the checkpoint's author.

jinja2's sandbox keeps a template away from Python's internals, but nested loops, a macro that calls itself twice or a
string multiplied with itself run for ever or fill the memory. So:

1. Every iteration, call, subscript, filter, test and operator looks at the clock.
2. Every value that the template makes counts against a number of characters. Operations whose result can be larger
   than their operands (multiplication, formatting, joining, indenting, replacing) are counted before they run.
3. A list counts with all that it holds. `[x, x]` forty times over is small in memory, but printing or comparing it
   takes 2**40 steps.
4. A call whose time can be the product of two sizes runs only if the product is at most MAX_STEPS: a method of a text
   with another text (`x.strip(y)` and `x.rfind(y)` take up to `len(x) * len(y)` steps), and a set of values of which
   many have the same hash.

So each single step is short, and there is a look at the clock between any two.

A child process with a deadline could be killed in the middle of a call. It was rejected: a frozen desktop application
has no interpreter to start, and every chat would wait for it. A thread or a signal cannot end a call of Python's.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from time import monotonic
from typing import Any, Literal, NoReturn

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_indent, do_round, do_unique, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
"""Longest rendering. Gemma 4's own template takes 0.0003 s per message."""

MAX_CHARACTERS = 1 << 27
"""Characters made in one rendering, with intermediate results. A context of 262,144 tokens has about 1.3 million."""

MAX_STEPS = 1 << 28
"""Product of two sizes in one call, which takes under a second."""

MAX_BITS = 1 << 14
"""Length of an integer: Python itself prints none that is longer."""

MAX_DIGITS = 100
"""Digits that a number is rounded to, spaces that JSON is indented by, and characters of a form of times."""

MAX_SOURCE = 1 << 18
"""Characters of a template: the longest known have 60,000."""

ITEM, HELD = 16, 64
"""Characters that an item of a new list counts, and a value inside a list that is measured with all that it holds."""

REMOVED_FILTERS = ("batch", "center", "pprint", "slice", "striptags", "urlize", "wordwrap")
"""Filters for web pages whose results are as large as an argument says, or whose time is quadratic."""

REMOVED_METHODS = frozenset({
    "center", "encode", "expandtabs", "from_bytes", "fromkeys", "isdisjoint", "ljust", "maketrans", "rjust",
    "striptags", "to_bytes", "translate", "zfill",
})  # fmt: skip
"""The same among the methods of texts, numbers, dictionaries and their views."""

FIELD = re.compile(r"(?s)(?P<star>%(?:\(|[-+ #0]*+(?:\d*+\.)?+\*))|%[-+ #0]*+\d*+(?:\.\d*+)?+[hlL]?.")
"""A field of `%`, as Python reads them; `star`: its width or precision is a star, or may be one after a name."""

SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that jinja2 adds to a call inside a loop or a block: the variables there."""

SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(TemplateRuntimeError):
    """A template that runs too long, or makes too much."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with transformers' options and functions, whose templates end. Compile with `compiled`; call `restart`
    before each rendering.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self._left = _Allowance()
        del self.globals["lipsum"]
        self.globals |= {"dict": _dict, "raise_exception": _refuse, "strftime_now": _now}
        self.globals["namespace"] = _OpaqueNamespace
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {name: self._limited(function) for name, function in self.filters.items()}
        self.filters |= {
            "format": self._format, "indent": self._indent, "join": self._join, "replace": self._replace,
            "round": self._round, "sum": self._sum, "tojson": self._to_json, "trim": self._trim,
            "unique": self._limited(self._unique),
        }  # fmt: skip
        self.tests |= {name: self._limited(function) for name, function in self.tests.items()}

    def restart(self) -> None:
        """Begin a new allowance of time and characters for this thread."""
        self._left.restart()

    def compiled(self, source: str) -> Template:
        """A template of Jinja text, with the counting of loops, `~` and lists put into it.

        Raises:
            TemplateError: it is no valid Jinja, or too long.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {MAX_SOURCE}")
        self.restart()  # filters of constants run now
        template: Template = self.from_string(_Counting().visit(self.parse(source)))
        return template

    # Calls that `_Counting` puts into templates.

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Items of a loop."""
        for item in items:
            self._left.spend()
            yield item

    def concatenate(self, *parts: Any) -> str:
        """`a ~ b`"""
        return self.concat(map(str, parts))

    def made(self, value: Any) -> Any:
        """Count a value that the template has made, and return it."""
        if isinstance(value, str):
            self._left.spend(len(value))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, list | tuple | dict):
            self._weight(value)
            self._left.spend(ITEM * len(value))
        elif isinstance(value, Iterator):
            return map(self.made, value)
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """One text of pieces, counted one by one: the results of macros, blocks and the whole template."""
        return "".join(map(self.made, pieces))

    # Hooks of jinja2's sandbox.

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template: of a macro, a method, a global function."""
        self._left.spend()
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if owner is self:
            return obj(*args)
        named = {name: value for name, value in kwargs.items() if name not in SCOPES}
        if isinstance(owner, str):
            if name == "join":
                return self._join(args[0] if args else (), owner)
            if name == "replace":
                return self._replace(owner, *args, **named)
            if name in ("format", "format_map"):
                if re.search(r"\{[^{}]*\{", owner.replace("{{", "")):
                    raise TemplateLimitError("it formats with a width that is a value")
                self._spend_format(owner, "{", [args, named])
            else:
                _check_steps(len(owner), max((len(given) for given in args if isinstance(given, str)), default=0))
        if isinstance(obj, Macro):
            self.made([args, named])  # the macro sees them as `varargs` and `kwargs`
        return self.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._left.spend(_repeated(left, right) + _repeated(right, left))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`, and each part of the path of a filter's `attribute`."""
        self._left.spend()
        value = super().getitem(obj, argument)
        return self.made(value) if isinstance(obj, Namespace) else value  # a list counts the namespaces in it, no more

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in REMOVED_METHODS and not isinstance(obj, Namespace):  # whose attributes are the template's own
            return False
        return super().is_safe_attribute(obj, attr, value)

    # Filters whose time or result can be larger than their operands, or that take a number for a size.

    def _format(self, form: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_percent(str(form), kwargs or args)
        return self.made(str(form) % (kwargs or args))

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        lines = str(text).count("\n") + 2
        self._left.spend(lines * (len(width) if isinstance(width, str) else width))
        return self.made(do_indent(str(text), width, first, blank))

    def _join(self, items: Iterable[Any], separator: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        separated = itertools.chain.from_iterable((str(separator), str(item)) for item in items)
        return self.concat(itertools.islice(separated, 1, None))

    def _trim(self, text: Any, characters: Any = None) -> Any:
        whole, stripped = str(text), None if characters is None else str(characters)
        _check_steps(len(whole), len(stripped or ""))
        return self.made(whole.strip(stripped))

    def _unique(self, items: Iterable[Any], case_sensitive: bool = False, attribute: str | int | None = None) -> Any:
        every = [*items]
        _check_hashes(every if attribute is None else map(make_attrgetter(self, attribute), every))
        return do_unique(self, every, case_sensitive, attribute)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        whole, added = str(text), str(new)
        self._left.spend(len(whole) + whole.count(str(old)) * len(added))
        return whole.replace(str(old), added, -1 if count is None else count)

    def _round(self, value: Any, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> Any:
        if abs(precision) > MAX_DIGITS:
            raise TemplateLimitError(f"it rounds to {precision} digits")
        return self.made(do_round(value, precision, method))

    def _sum(self, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        for item in items if attribute is None else map(make_attrgetter(self, attribute), items):
            start = self.made(start + item)
        return start

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        """JSON of a value. Jinja's own filter escapes `<` and `&` for HTML; a model must see them as they are."""
        if indent is not None and indent > MAX_DIGITS:
            raise TemplateLimitError(f"it indents by {indent} spaces")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options)
        return self.concat(encoder.iterencode(value))

    def _limited(self, function: Any) -> Callable[..., Any]:
        """A filter or test whose result counts, also the items of one that is made while it is read."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._left.spend()
            return self.made(function(*args, **kwargs))

        return call

    def _check_percent(self, form: str, values: Any) -> None:
        if "*" in form and any(field["star"] for field in FIELD.finditer(form)):
            raise TemplateLimitError("it formats with a width that is a value")
        self._spend_format(form, "%", values)

    def _spend_format(self, form: str, sign: str, values: Any) -> None:
        """Count a formatted text before it is made: each field is as wide as `form` says, and may show all values."""
        widths = sum(int(digits) if len(digits) < 10 else 10 * MAX_CHARACTERS for digits in re.findall(r"\d+", form))
        self._left.spend(widths + form.count(sign) * self._weight(values))

    def _weight(self, value: Any) -> int:
        """Characters of a value and of all that it holds; what it holds twice counts twice."""
        total, left = 0, [value]
        while left:
            held = left.pop()
            total += HELD
            if isinstance(held, str):
                total += len(held)
            elif isinstance(held, SEQUENCES):
                left += held
            elif isinstance(held, int):
                total += held.bit_length()
            elif isinstance(held, Mapping):
                left += held.items()
            self._left.check(total)
        return total


class _Allowance(threading.local):
    """Characters and time that the rendering of a thread may still use."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._characters, self._deadline = MAX_CHARACTERS, monotonic() + MAX_SECONDS

    def check(self, characters: int) -> None:
        if characters > self._characters:
            raise TemplateLimitError(f"it makes more than {MAX_CHARACTERS >> 20} million characters")

    def spend(self, characters: int = 0) -> None:
        """Count characters that were made, or will be, and look at the clock.

        Raises:
            TemplateLimitError: the rendering made too much, or takes too long.
        """
        self.check(characters)
        self._characters -= characters
        if monotonic() > self._deadline:
            raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:.0f} s")


class _Generation(Extension):
    """`{% generation %}`, which marks the model's own text for training: its contents, in a scope of their own."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Counting(NodeTransformer):
    """Puts calls of the environment's methods into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  jinja2's own names
        self.generic_visit(node)
        node.iter = _method("each", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _method("concatenate", *node.nodes)

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") == "store"
        is_flat = all(isinstance(each, nodes.Const) for each in node.iter_child_nodes())
        return node if is_target or is_flat else _method("made", node)

    visit_Dict = visit_Tuple = visit_List  # noqa: N815

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, int):
            _check_bits(node.value.bit_length())
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _method("made", node) if isinstance(node.arg, nodes.Slice) else node


class _OpaqueNamespace(Namespace):
    """Namespaces may hold each other: printing them whole would take as long as printing a list of lists of lists."""

    def __init__(self, items: Any = (), /, **named: Any) -> None:
        super().__init__(_dict(items, **named))

    def __repr__(self) -> str:
        return "<Namespace>"


def _method(name: str, *args: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError("it computes with a number that is too long")


def _check_steps(size: int, times: int) -> None:
    if size * times > MAX_STEPS:
        raise TemplateLimitError(f"it calls something that takes more than {MAX_STEPS >> 20} million steps")


def _check_hashes(keys: Iterable[Any]) -> None:
    """Refuse keys of which so many have the same hash that finding each among the others takes too long."""
    alike = Counter(map(hash, keys))
    _check_steps(alike.total(), max(alike.values(), default=0))


def _dict(items: Any = (), /, **named: Any) -> dict[Any, Any]:
    pairs = [*(items.items() if isinstance(items, Mapping) else items)]
    _check_hashes(key for key, _ in pairs)
    return dict(pairs, **named)


def _now(form: str) -> str:
    if len(form) > MAX_DIGITS:
        raise TemplateLimitError(f"it writes the time in a form of {len(form)} characters")
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _repeated(value: Any, times: Any) -> int:
    """Characters of `value * times`, where that repeats something."""
    if not isinstance(times, int) or not isinstance(value, str | bytes | list | tuple):
        return 0
    return max(times, 0) * len(value) * (1 if isinstance(value, str | bytes) else ITEM)
