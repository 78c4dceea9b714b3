"""Intrinsics: functions that emit LLVM code where a kernel calls them, and the one that reads a step of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import count, islice
from typing import Any

from llvmlite import ir
from numba import extending, types

from ondevice.engines.simd.kernels.contract.steps import field_types

I64 = ir.IntType(64)

LITERAL = object()
"""In the signature of an intrinsic: an integer that is constant when a kernel is compiled; the emitter gets an int."""


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's decorator of the same name; integers that are constant when a kernel is compiled arrive as literals."""
    return extending.intrinsic(prefer_literal=True)(function)


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that emits LLVM code.

    Args:
        result: the numba type of the result; `types.void` for none.
        arguments: the numba types of the arguments, to which numba converts what a kernel passes; LITERAL for an
            integer that must be constant when the kernel is compiled.

    The decorated function gets an llvmlite builder and a value per argument, and returns the result's value:

        @emits(types.float32, types.int64)
        def read_f32(builder, address):
            return builder.load(builder.inttoptr(address, POINTER), typ=F32, align=4)
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(typing: Any, *given: Any) -> Any:
            kinds = [own if wanted is LITERAL else wanted for own, wanted in zip(given, arguments, strict=True)]

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                pairs = zip(kinds, arguments, values, strict=True)
                made = emit(
                    builder, *(own.literal_value if wanted is LITERAL else value for own, wanted, value in pairs)
                )
                return context.get_dummy_value() if made is None else made

            return result(*kinds), generate

        return intrinsic(typed)

    return decorate


@intrinsic
def read_step(typing: Any, layout: Any, row: Any) -> Any:
    """In kernels, `read_step(layout, row)`: the fields of a step in row int64[WIDTH], whose kind must be `layout`'s."""
    kinds = [types.int64 if kind is int else _tuple_type(kind) for kind in field_types(layout.instance_class)]
    fields = types.BaseTuple.from_types(kinds, layout.instance_class)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(row)(context, builder, values[1]).data
        places = (context.get_constant(types.intp, place) for place in count(1))
        numbers = (builder.load(builder.gep(data, [place], source_etype=I64), typ=I64) for place in places)

        def read(kind: Any) -> Any:
            single = kind == types.int64
            return next(numbers) if single else context.make_tuple(builder, kind, list(islice(numbers, len(kind))))

        return context.make_tuple(builder, fields, [read(kind) for kind in kinds])

    return fields(layout, row), generate


def _tuple_type(kind: Any) -> Any:
    return types.NamedUniTuple(types.int64, len(kind._fields), kind)  # type: ignore[no-untyped-call]
