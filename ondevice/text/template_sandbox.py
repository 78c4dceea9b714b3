"""A Jinja sandbox with limits of time and size: a chat template is a program of whoever made the checkpoint.

jinja2's own sandbox keeps a template away from Python's internals, but a nested loop, a macro that calls itself twice
or a string multiplied with itself run for ever or fill the memory. No thread or signal watches a rendering here.
Instead:

1. Every iteration, call, filter, test and operator looks at the clock.
2. Everything that is made counts against an allowance of characters. What can make more than it was given
   (multiplication, padding, joining, formatting) is counted before it is made.
3. A list in a list is measured with all that it holds. `[x, x]` forty times over is small in memory, but to print or
   compare it takes 2**40 steps.

So each single step is short, and there is a look at the clock between any two.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

from jinja2 import Template, nodes
from jinja2.filters import do_indent, do_round, make_attrgetter
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ondevice.text.allowance import HELD, ITEM, Allowance, TemplateLimitError, check_bits, numbers, repeated, weight

MOST_DIGITS = 100
"""Of a rounded number, and of spaces that JSON is indented by."""

MOST_SOURCE = 1 << 20
"""Characters of a template: the longest known have 60,000."""

REMOVED_FILTERS = ("batch", "center", "pprint", "slice", "urlize", "wordwrap")
"""For web pages. Their results are as large as an argument says, or take time that grows with the square of a text."""

REMOVED_METHODS = frozenset({
    "center", "encode", "expandtabs", "from_bytes", "ljust", "maketrans", "rjust", "to_bytes", "translate", "zfill",
})  # fmt: skip
"""The same among the methods of strings and numbers."""


class _Current(threading.local):
    """The allowance of the rendering that a thread is at. A template that is compiled has one too: filters of
    constants run then.
    """

    def __init__(self) -> None:
        self.allowance = Allowance()


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates come to an end. Compile with `compiled`, and render within `limits`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        """
        Args:
            options: of jinja2's Environment.
        """
        super().__init__(**options)
        self._current = _Current()
        self.globals["namespace"] = _OpaqueNamespace
        del self.globals["lipsum"]
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {name: self._limited(function) for name, function in self.filters.items()}
        self.filters |= {
            "format": self._format, "indent": self._indent, "join": self._join, "replace": self._replace,
            "round": self._round, "sum": self._sum, "tojson": self._to_json,
        }  # fmt: skip
        self.tests |= {name: self._limited(function) for name, function in self.tests.items()}

    @contextmanager
    def limits(self) -> Iterator[Allowance]:
        """Within the block, what this thread renders counts against a new allowance."""
        outer = self._current.allowance
        self._current.allowance = Allowance()
        try:
            yield self._current.allowance
        finally:
            self._current.allowance = outer

    def compiled(self, source: str) -> Template:
        """A template of Jinja text, with the counting of loops, `~` and lists put into it.

        Raises:
            TemplateError: it is no valid Jinja, or too long.
        """
        if len(source) > MOST_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {MOST_SOURCE}")
        with self.limits():
            template: Template = self.from_string(_Counting().visit(self.parse(source)))
        return template

    # What `_Counting` puts into templates.

    def each(self, items: Iterable[Any]) -> Iterable[Any]:
        """What a loop goes through. One with a size keeps it, for `loop.length`."""
        return _SizedLoop(items, self._spend) if isinstance(items, Sized) else _loop(items, self._spend)

    def concatenate(self, *parts: Any) -> str:
        """`a ~ b`"""
        return self.concat(map(str, parts))

    def nest(self, value: Any) -> Any:
        """A list, tuple or dictionary that the template writes down."""
        return self._counted(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """Pieces of text in one, counted one by one: what macros, blocks and the whole template return."""
        kept = []
        for piece in pieces:
            self._spend(len(piece))
            kept.append(piece)
        return "".join(kept)

    # What jinja2's sandbox asks.

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes: of a macro, a method, a global function."""
        self._spend(0)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if owner is self:
            return obj(*args)
        if isinstance(owner, str) and name in ("join", "replace"):
            return (
                self._join(args[0] if args else (), owner) if name == "join" else self._replace(owner, *args, **kwargs)
            )
        if isinstance(obj, Macro):
            self._counted([args, kwargs])  # as it may see them: `varargs` and `kwargs`
        return self._counted(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self._spend(repeated(left, right) + repeated(right, left))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return self._counted(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in REMOVED_METHODS and isinstance(obj, str | bytes | int):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, counted field by field."""
        if super().wrap_str_format(value) is None:
            return None
        form, takes_mapping = value.__self__, value.__name__ == "format_map"

        def call(*args: Any, **kwargs: Any) -> Any:
            given, named = ((), args[0]) if takes_mapping else (args, kwargs)
            return _CountingFormatter(self).vformat(form, given, named)

        return call

    # Filters that can make more than they were given, or take a number for a size.

    def _format(self, form: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_format(str(form), kwargs or args)
        return self._counted(str(form) % (kwargs or args))

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        lines = str(text).count("\n") + 2
        self._spend(lines * (len(width) if isinstance(width, str) else width))
        return self._counted(do_indent(str(text), width, first, blank))

    def _join(self, items: Iterable[Any], separator: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        separated = itertools.chain.from_iterable((str(separator), str(item)) for item in self.each(items))
        return self.concat(itertools.islice(separated, 1, None))

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        whole, added = str(text), str(new)
        self._spend(len(whole) + whole.count(str(old)) * len(added))
        return whole.replace(str(old), added, -1 if count is None else count)

    def _round(self, value: Any, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> Any:
        if abs(precision) > MOST_DIGITS:
            raise TemplateLimitError(f"it rounds to {precision} digits")
        return self._counted(do_round(value, precision, method))

    def _sum(self, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        for item in self.each(items if attribute is None else map(make_attrgetter(self, attribute), items)):
            start = self._counted(start + item)
        return start

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter escapes `<` and `&` for HTML; a model must see them as they are."""
        size = self._weight(value) // HELD * sum(map(len, separators or ()))
        if indent is not None and indent > MOST_DIGITS:
            raise TemplateLimitError(f"it indents by {indent} spaces")
        self._spend(size)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return str(self._counted(encoder.encode(value))) if indent is None else self.concat(encoder.iterencode(value))

    def _limited(self, function: Any) -> Callable[..., Any]:
        """A filter or test whose result counts."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._spend(0)
            return self._counted(function(*args, **kwargs))

        return call

    def _spend(self, characters: int) -> None:
        self._current.allowance.spend(characters)

    def _weight(self, value: Any) -> int:
        return weight(value, self._current.allowance.characters)

    def _counted(self, value: Any) -> Any:
        """A value that the template has made."""
        if isinstance(value, str):
            self._spend(len(value))
        elif isinstance(value, int):
            check_bits(value.bit_length())
        elif isinstance(value, list | tuple | dict):
            self._weight(value)
            self._spend(ITEM * len(value))
        return value

    def _check_format(self, form: str, values: Any) -> None:
        """Count `form % values` before it is made: each field is as wide as it says, and may show all values."""
        if "*" in form:
            raise TemplateLimitError("it formats with a width that is a value")
        self._spend(numbers(form) + form.count("%") * self._weight(values))


class _Counting(NodeTransformer):
    """Puts calls of the environment's methods into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  jinja2's own names
        self.generic_visit(node)
        node.iter = _method("each", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _method("concatenate", node.nodes)

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") == "store"
        is_flat = all(isinstance(each, nodes.Const) for each in node.iter_child_nodes())
        return node if is_target or is_flat else _method("nest", [node])

    visit_Dict = visit_Tuple = visit_List  # noqa: N815


def _method(name: str, args: Sequence[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


class _OpaqueNamespace(Namespace):
    """Namespaces may hold each other: to print them whole would take as long as a list in a list in a list."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _SizedLoop:
    def __init__(self, items: Any, spend: Callable[[int], None]) -> None:
        self._items = items
        self._spend = spend

    def __iter__(self) -> Iterator[Any]:
        return _loop(self._items, self._spend)

    def __len__(self) -> int:
        return len(self._items)


def _loop(items: Iterable[Any], spend: Callable[[int], None]) -> Iterator[Any]:
    for item in items:
        spend(0)
        yield item


class _CountingFormatter(SandboxedFormatter):
    _env: LimitedEnvironment

    def format_field(self, value: Any, format_spec: str) -> str:
        self._env._spend(numbers(format_spec))
        return str(self._env._counted(super().format_field(value, format_spec)))
