"""jinja2's immutable sandbox with an end: a chat template is a program from the checkpoint's author.

jinja2's sandbox keeps a template away from Python's internals, but loops in loops run for ever, and a single call can
take hours: `x.strip(y)` and `x.rfind(y)` take `len(x) * len(y)` steps. Here a template ends, whatever it contains:

1. It reaches only the methods, filters, tests and functions that are listed here by name: those that published
   templates use, and others like them whose time is linear in the size of their operands. The few with an operand that
   multiplies the time (a set of characters to strip, the precision of a number) have a limit for it. What a later
   version of Python or jinja2 adds is refused until somebody lists it.
2. No text is longer than MOST_TEXT, and all values made in a rendering together count against MOST_CHARACTERS. What is
   larger than its operands (a repeated, replaced, joined or formatted text) is counted before it is made. A list counts
   with all that it holds: `[x, x]` forty times over is small in memory, but printing it takes 2**40 steps.
3. Every iteration, call, subscript, filter, test and operator looks at the clock, so that it is looked at after each of
   these short steps.

A child process with a deadline could be killed whatever it calls. It was rejected: a frozen application would start
itself again to render its first chat, the first text of a process would wait for the start of a second one, and what is
embedded in an application must not leave processes behind. A thread or a signal cannot end a call of Python's.

As every way of making text passes here, this is also where `MarkedText` keeps its marks: operators and methods do so by
themselves, and the functions below do so in place of jinja2's.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import chain, count
from time import monotonic
from typing import Any, Literal, NoReturn

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_round, do_title, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

from ondevice.text.marked_text import METHODS, MarkedText, concatenated, joined, recased, replaced

MOST_SECONDS = 10.0
"""Longest rendering. Gemma 4's own template takes 0.0003 s per message."""

MOST_CHARACTERS = 1 << 27
"""Characters made in one rendering, with intermediate results. A context of 262,144 tokens has about 1.3 million."""

MOST_TEXT = 1 << 24
"""Characters of one text."""

MOST_PATTERN = 256
"""Characters to strip, or to search for from the end, of an attribute's path, and of a form of numbers or times."""

MOST_BITS = 1 << 14
"""Length of an integer: Python itself prints none that is longer."""

MOST_DIGITS = 100
"""Digits that a number is rounded to, and spaces that JSON is indented by."""

MOST_SOURCE = 1 << 18
"""Characters of a template: the longest known have 60,000."""

HELD = 64
"""Characters that an item of a new list counts, and each value in what is measured with all that it holds."""

PIECE = 256
"""Characters that a piece of a marked text counts."""

FILTERS = frozenset({
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "format", "groupby", "indent",
    "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim", "unique",
    "upper",
})  # fmt: skip

TESTS = frozenset({
    "!=", "<", "<=", "==", ">", ">=", "boolean", "callable", "defined", "divisibleby", "eq", "equalto", "escaped",
    "even", "false", "filter", "float", "ge", "greaterthan", "gt", "in", "integer", "iterable", "le", "lessthan",
    "lower", "lt", "mapping", "ne", "none", "number", "odd", "sameas", "sequence", "string", "test", "true",
    "undefined", "upper",
})  # fmt: skip

FUNCTIONS = frozenset({"cycler", "dict", "joiner", "namespace", "range"})
"""jinja2's own functions that a template may call; transformers adds `raise_exception` and `strftime_now`."""

ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, METHODS),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "grouper", "index", "list"})),  # two of them of the tuples of `groupby`
    (Cycler, frozenset({"current", "next", "reset"})),
    (LoopContext, frozenset({
        "changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem",
        "revindex", "revindex0",
    })),
)  # fmt: skip
"""What a template may read of a value, beside the attributes that it gave a namespace."""

_ITEMWISE = frozenset({
    "first", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "unique",
})  # fmt: skip
"""Filters that go through the items of their operand."""

_TEXTUAL = frozenset({"capitalize", "lower", "trim", "upper"})
"""Filters that call a method of their operand's text."""

_PATTERNED = frozenset({"lstrip", "rpartition", "rsplit", "rstrip", "strip"})
"""Methods whose time is the product of the lengths of the text and of their argument."""

_LINES = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Where `splitlines` splits."""

_PERCENT = re.compile(r"%(?:\((\w+)\))?([-+ #0]*\d{0,3}(?:\.\d{0,3})?)([diouxXeEfFgGcrsa%]?)")
"""A field of an old format: name, flags with width and precision, conversion."""

_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(TemplateRuntimeError):
    """A template that runs too long, or makes too much."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end. Compile with `compiled`, render with `rendered`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_text)
        self._left = _Allowance()
        self.globals = {name: function for name, function in self.globals.items() if name in FUNCTIONS}
        self.globals |= {"dict": self._dict, "namespace": _OpaqueNamespace}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        own = {
            "format": self._percent,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "safe": _text,
            "string": _text,
            "sum": self._sum,
            "title": _title,
            "tojson": self._to_json,
        }  # fmt: skip  `safe` text is not told apart: adding to it does not escape for HTML, as it does in transformers
        self.filters = {name: self._limited(name, own.get(name, self.filters[name])) for name in FILTERS}
        self.tests = {name: self._limited(name, self.tests[name]) for name in TESTS}

    def compiled(self, source: str) -> tuple[Template, list[str]]:
        """A template of Jinja text, with the counting of loops, `~`, lists and slices put into it, and all texts that
        it can write by itself.

        Raises:
            TemplateError: it is no valid Jinja, or too long.
        """
        if len(source) > MOST_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {MOST_SOURCE}")
        self._left.restart()  # filters of constants run now
        tree = self.parse(source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        template: Template = self.from_string(_Counting().visit(tree))
        return template, texts

    def rendered(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of a template, with marks, within a new allowance of time and characters.

        Raises:
            Exception: whatever a template can make Python raise; TemplateLimitError for its limits.
        """
        self._left.restart()
        self._weight(variables)
        return template.render(variables)

    # Calls that `_Counting` puts into templates.

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Items of a loop. Those of a text are new."""
        cost = _piece(items) if isinstance(items, str) else 0
        for item in items:
            self._left.spend(cost)
            yield item

    def concatenate(self, *parts: Any) -> str:
        """`a ~ b`"""
        return self.concat(map(_text, parts))

    def made(self, value: Any) -> Any:
        """Count a value that the template has made, and return it."""
        if isinstance(value, str):
            self._check_text(len(value))
            self._left.spend(len(value) + (HELD * len(value.bounds) if isinstance(value, MarkedText) else 0))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, list | tuple | dict):
            self._weight(value)
            self._left.spend(HELD * len(value))
        return value

    def concat(self, pieces: Iterable[str]) -> str:
        """One text of pieces, counted one by one: the results of macros, blocks and the whole template."""
        return concatenated(self._counted(pieces))

    def _counted(self, pieces: Iterable[str], between: int = 0) -> Iterator[str]:
        """The pieces of a text, between any two of which lie as many characters."""
        length = -between
        for piece in pieces:
            length += len(piece) + between
            self._check_text(length)
            yield self.made(piece)

    # Hooks of jinja2's sandbox.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in ATTRIBUTES)

    def wrap_str_format(self, value: Any) -> None:
        """No wrapper: `is_safe_attribute` is asked about `format` and `format_map` too, and `call` formats."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._left.spend()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template: of a macro, a method, a function."""
        self._left.spend()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if owner is self and name in ("each", "concatenate", "made"):
            return obj(*args)
        named = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        if isinstance(owner, str):
            return self.made(self._called(owner, name, args, named))
        if isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):
            self.made([args, named])  # it reads them as `varargs` and `kwargs`
        if isinstance(obj, LoopContext) and args:
            args = (self.each(args[0]), *args[1:])
        return self.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._left.spend(self._repeated(left, right) + self._repeated(right, left))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            return self._filled(left, right)
        return self.made(super().call_binop(context, operator, left, right))

    # Methods of texts.

    def _called(self, text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a method of a text returns."""
        if name in _PATTERNED:
            _check_pattern(*args, *kwargs.values())
        if name == "splitlines":
            self._left.check(_piece(text) * sum(map(text.count, _LINES)))
        if name in ("split", "rsplit"):
            return self._split(name, text, *args, **kwargs)
        own: dict[str, Callable[..., str]] = {
            "format": self._format, "join": self._join_by, "replace": self._replace,
        }  # fmt: skip
        return own[name](text, *args, **kwargs) if name in own else getattr(text, name)(*args, **kwargs)

    def _split(self, name: str, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        most = self._left.characters // _piece(text)
        pieces: list[str] = getattr(text, name)(sep, maxsplit if 0 <= maxsplit <= most else most)
        self._left.check(_piece(text) * len(pieces))
        return pieces

    def _join_by(self, separator: str, items: Iterable[Any], /) -> str:
        return self._join(items, separator)

    def _join(self, items: Iterable[Any], separator: Any = "", attribute: str | int | None = None) -> str:
        between = _text(separator)
        return joined(between, self._counted(map(_text, self._read(items, attribute)), len(between)))

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        whole, gone, added = _text(text), _text(old), _text(new)
        times = whole.count(gone)
        self._check_text(times * max(len(added) - len(gone), 0))
        self._left.check(_piece(whole) * times if isinstance(whole, MarkedText) else 0)
        return replaced(whole, gone, added, -1 if count is None else count)

    def _format(self, form: str, /, *args: Any, **kwargs: Any) -> str:
        """`form.format(...)`"""
        formatter, numbers = SandboxedFormatter(self), count()

        def pieces() -> Iterator[str]:
            for literal, field, spec, conversion in formatter.parse(form):
                yield literal
                if field is None:
                    continue
                if spec and (len(spec) > MOST_PATTERN or re.search(r"\d{4}|\{", spec)):
                    raise TemplateLimitError(f"it formats with a width that is a value or too large: {spec:.60}")
                name = f"{next(numbers)}{field}" if not field or field[0] in ".[" else field
                value, _ = formatter.get_field(name, args, kwargs)
                if isinstance(value, str) and not spec and conversion is None:
                    yield value
                else:
                    yield _like(format(_plain(formatter.convert_field(value, conversion)), spec or ""), value)

        return _like(self.concat(pieces()), form)

    def _percent(self, form: Any, /, *args: Any, **kwargs: Any) -> str:
        """`form | format(...)`"""
        return self._filled(_text(form), kwargs or args)

    def _filled(self, form: str, values: Any) -> str:
        """`form % values`"""
        left = iter(values if isinstance(values, tuple) else (values,))

        def pieces() -> Iterator[str]:
            place = 0
            for field in _PERCENT.finditer(form):
                yield form[place : field.start()]
                place = field.end()
                name, flags, conversion = field.groups()
                if not conversion:
                    raise TemplateLimitError(f"it formats with a width that is a value or too large: {field[0]:.60}")
                if conversion == "%":
                    yield "%"
                    continue
                value = values[name] if name else next(left, self)
                if value is self:
                    raise TypeError("not enough arguments for format string")
                plain = conversion == "s" and not flags
                yield _text(value) if plain else _like(f"%{flags}{conversion}" % (_plain(value),), value)
            yield form[place:]

        made = self.concat(pieces())
        if not isinstance(values, Mapping) and next(left, self) is not self:
            raise TypeError("not all arguments converted during string formatting")
        return made

    # Filters whose result can be larger than their operands, or that take a number for a size.

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        whole, space = _text(text) + "\n", width if isinstance(width, str) else " " * min(width, MOST_TEXT)
        ends = sum(map(whole.count, _LINES))
        self._check_text(len(whole) + ends * len(space))
        self._left.check(_piece(whole) * ends)
        lines = whole.splitlines()
        indented = [line if not number or not (line or blank) else space + line for number, line in enumerate(lines)]
        return (space if first else "") + joined("\n", indented)

    def _round(self, value: Any, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> Any:
        if abs(precision) > MOST_DIGITS:
            raise TemplateLimitError(f"it rounds to {precision} digits")
        return do_round(value, precision, method)

    def _sum(self, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        for item in self._read(items, attribute):
            start = self.made(start + item)
        return start

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        """JSON of a value. Jinja's own filter escapes `<` and `&` for HTML; a model must see them as they are."""
        if indent is not None and indent > MOST_DIGITS:
            raise TemplateLimitError(f"it indents by {indent} spaces")
        self._weight(value)
        _check_pattern(*(options.get("separators") or ()))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options)
        # The encoder in C makes the whole text at once, which without indents is not much larger than the value.
        pieces = [encoder.encode(value)] if indent is None else encoder.iterencode(value)
        return _like(self.concat(pieces), value)

    def _dict(self, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """`dict(...)`, item by item: keys with equal hashes take the square of their number."""
        made: dict[Any, Any] = {}
        for key, value in chain(*(self.each(each.items() if isinstance(each, dict) else each) for each in args)):
            made[key] = value
        return made | kwargs

    def _limited(self, name: str, function: Any) -> Callable[..., Any]:
        """A filter or test whose arguments have limits and whose result counts."""
        place = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the operand, behind jinja2's own argument

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._left.spend()
            given = list(args)
            if name in _ITEMWISE or name in _TEXTUAL:
                _check_pattern(*given[place + 1 : place + 2], kwargs.get("attribute"), kwargs.get("chars"))
                operand = given[place]
                given[place] = _text(operand) if name in _TEXTUAL else self.each(operand) if operand else operand
            return self.made(function(*given, **kwargs))

        return call

    def _read(self, items: Iterable[Any], attribute: str | int | None) -> Iterator[Any]:
        """The items, or an attribute of each."""
        _check_pattern(attribute)
        return self.each(items) if attribute is None else map(make_attrgetter(self, attribute), self.each(items))

    def _repeated(self, value: Any, times: Any) -> int:
        """Characters of `value * times`, where that repeats something."""
        if not isinstance(times, int) or not isinstance(value, str | list | tuple):
            return 0
        length = max(times, 0) * len(value)
        if isinstance(value, str):
            self._check_text(length)
        return length * (1 if isinstance(value, str) else HELD)

    def _check_text(self, length: int) -> None:
        if length > MOST_TEXT:
            raise TemplateLimitError(f"it makes a text of more than {MOST_TEXT >> 20} million characters")

    def _weight(self, value: Any) -> None:
        """Check the size of a value with all that it holds; what it holds twice counts twice."""
        most, total, left = self._left.characters, 0, [value]
        while left:
            held = left.pop()
            total += HELD
            if isinstance(held, str):
                self._check_text(len(held))
                total += len(held)
            elif isinstance(held, int):
                total += held.bit_length()
            elif isinstance(held, dict):
                left += held
                left += held.values()
            elif isinstance(held, _SEQUENCES):
                left += held
            if total > most:
                self._left.check(total)


class _Allowance(threading.local):
    """Characters and time that the rendering of a thread may still use."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.characters, self._deadline = MOST_CHARACTERS, monotonic() + MOST_SECONDS

    def check(self, characters: int) -> None:
        if characters > self.characters:
            raise TemplateLimitError(f"it makes more than {MOST_CHARACTERS >> 20} million characters")

    def spend(self, characters: int = 0) -> None:
        """Count characters that were made, or will be, and look at the clock.

        Raises:
            TemplateLimitError: the rendering made too much, or takes too long.
        """
        self.check(characters)
        self.characters -= characters
        if monotonic() > self._deadline:
            raise TemplateLimitError(f"it runs for more than {MOST_SECONDS:.0f} s")


class _Counting(NodeTransformer):
    """Puts calls of the environment's methods into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  jinja2's own names
        self.generic_visit(node)
        node.iter = _method("each", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _method("concatenate", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _method("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") == "store"
        is_flat = all(isinstance(each, nodes.Const) for each in node.iter_child_nodes())
        return node if is_target or is_flat else _method("made", node)

    visit_Dict = visit_Tuple = visit_List  # noqa: N815


class _Generation(Extension):
    """`{% generation %}`, around what the model wrote: transformers' mark for training, nothing when a chat is read."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _OpaqueNamespace(Namespace):
    """Namespaces may hold each other: printing them whole would take as long as printing a list of lists of lists."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _method(name: str, *args: Any) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _values(value: Any) -> Iterator[Any]:
    """A value and all that it holds."""
    left = [value]
    while left:
        held = left.pop()
        yield held
        if isinstance(held, dict):
            left += held.items()
        elif isinstance(held, _SEQUENCES):
            left += held


def _text(value: Any) -> str:
    """A value as it is printed."""
    return value if isinstance(value, str) else _like(str(value), getattr(value, "__self__", value))


def _plain(value: Any) -> Any:
    return str.__str__(value) if isinstance(value, str) else value


def _like(text: str, source: Any) -> str:
    """A text that was made of a value: untrusted if that is, or holds untrusted text."""
    untrusted = (isinstance(each, MarkedText) and each.bounds for each in _values(source))
    return MarkedText(text) if not isinstance(source, int | None) and any(untrusted) else text


def _title(value: Any) -> str:
    text = _text(value)
    return recased(text, do_title(_plain(text)))


def _piece(text: str) -> int:
    return PIECE if isinstance(text, MarkedText) else HELD


def _check_pattern(*patterns: Any) -> None:
    for each in patterns:
        if isinstance(each, str) and len(each) > MOST_PATTERN:
            raise TemplateLimitError(f"it passes a text of more than {MOST_PATTERN} characters for letters or a name")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    _check_pattern(form)
    return datetime.now().strftime(form)


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateLimitError("it computes with a number that is too long")
