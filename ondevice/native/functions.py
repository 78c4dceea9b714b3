"""Functions that are compiled: `kernel` marks one for numba, `entry` makes one callable from Python.

Neither imports numba. All entries, and the kernels that they call, are compiled into the kernel library (`builder`); at
run time an entry calls its C function there with ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ondevice.arrays import Int64Array
from ondevice.errors import OndeviceError
from ondevice.forks import ReentrantLock
from ondevice.native import library
from ondevice.native.sets import PARTS, SETS

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

FAILED = -(1 << 63)
"""Result of a C function whose kernel raised an exception."""

ENTRIES: dict[str, Entry[..., Any]] = {}
"""Every entry by its name, once the module that declares it is imported."""


class Kernel:
    """A function that numba compiles where a kernel or an entry calls it, without fastmath.

    Without fastmath because a sum must be the same bits in every forward, and masked logits are -inf. Called from
    Python, as tests and benchmarks do, it is compiled for this process.
    """

    options: ClassVar[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "_nrt": False}
    """Options of `numba.njit`, to which `builder` adds. Without numba's runtime (`_nrt`), a kernel that allocates
    memory does not compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function

    @cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher of the function."""
        import numba

        target = SETS[library.choice().set]  # as in the library
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = target.cpu, target.features  # type: ignore[attr-defined]
        return numba.njit(**self.options)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        """numba's protocol for objects that compiled functions refer to."""
        return self.dispatcher._numba_type_

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)


def kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Make a `Kernel` of a module-level function. Types of arguments are for readers: numba converts numbers."""
    return cast(Callable[..., Result], Kernel(function))


class Parameter(NamedTuple):
    """A parameter of an entry: an array with its number of dimensions, or a number, which has none."""

    dtype: np.dtype[Any]
    dims: int

    def c_types(self) -> list[str]:
        """The parameters of the C function that stand for this one: "i64", or "f32" or "f64" for a float."""
        if self.dims:
            return ["i64"] * (1 + self.dims)
        return [f"f{8 * self.dtype.itemsize}" if self.dtype.kind == "f" else "i64"]


class Entry(Generic[Parameters, Result]):
    """A compiled function that Python calls.

    Its C function takes numbers as they are; an array, which is contiguous, as its address and the length of each
    dimension, all int64. It returns int64: the result, 0 for none. An entry `by_record` takes the address of all these,
    8 bytes each: kernels that were compiled without it can call it.

    Attributes:
        name: name of the function, unique among all entries.
        source: module that has the kernel of this name.
        part: name of the part of the library that holds it, one of PARTS.
        parameters: types of the parameters.
        by_record: whether the C function takes the address of its arguments.
    """

    def __init__(
        self,
        declared: Callable[Parameters, Result],
        part: str,
        parameters: str,
        source: str | None,
        *,
        by_record: bool = False,
    ) -> None:
        assert part in PARTS, part
        self.name, self.part, self.by_record = declared.__name__, part, by_record
        self.source = declared.__module__ if source is None else source
        self.parameters = tuple(map(_parameter, parameters.split()))
        self._kernel = Kernel(declared) if source is None else None
        functools.update_wrapper(self, declared)
        ENTRIES[self.name] = self

    @property
    def symbol(self) -> str:
        """The name of the C function."""
        return f"ondevice_{self.name}"

    @property
    def kernel(self) -> Kernel:
        """The function as numba compiles it. Where another module has it, this imports that module, and numba."""
        if self._kernel is None:
            self._kernel = getattr(import_module(self.source), self.name)
        return self._kernel

    @property
    def _numba_type_(self) -> Any:
        """numba's protocol: a kernel can call an entry."""
        return self.kernel._numba_type_

    @cached_property
    def function(self) -> Callable[..., int]:
        """The C function. A part of the library that is missing is built first: that takes seconds."""
        c_types = [_C_TYPES[name] for parameter in self.parameters for name in parameter.c_types()]
        return ctypes.CFUNCTYPE(ctypes.c_int64, *([ctypes.c_int64] if self.by_record else c_types))(self.address)

    @cached_property
    def address(self) -> int:
        """The address of the C function."""
        with _LOADING.lock:
            return _loaded(self.part)(self.symbol)

    def __call__(self, *args: Parameters.args, **none: Parameters.kwargs) -> Result:
        """Call the C function. All arguments are given by their position.

        Raises:
            TypeError: an array has another type than declared, or is not contiguous.
            RuntimeError: the kernel failed.
        """
        if self.by_record:
            record = self.record(*args, **none)  # referred to until the call returns
            result = self.function(address_of(record))
        else:
            result = self.function(*self._c_arguments(args))
        if result == FAILED:
            raise RuntimeError(f"the kernel {self.name} failed")
        return cast(Result, result)

    def record(self, *args: Parameters.args, **none: Parameters.kwargs) -> Int64Array:
        """The record of these arguments, for an entry `by_record`. The caller keeps their arrays alive.

        Raises:
            TypeError: as for a call.
        """
        given = self._c_arguments(args)
        kinds = [name for parameter in self.parameters for name in parameter.c_types()]
        record = np.zeros(len(given), np.int64)
        for place, (kind, value) in enumerate(zip(kinds, given, strict=True)):
            record[place : place + 1].view(_DTYPES[kind])[0] = value
        return record

    def _c_arguments(self, args: Sequence[Any]) -> list[Any]:
        given: list[Any] = []
        for (dtype, dims), value in zip(self.parameters, args, strict=True):
            if not dims:
                given.append(value)
                continue
            if value.dtype != dtype or value.ndim != dims:
                raise TypeError(f"{self.name} takes {dims} dimensions of {dtype}, not {value.ndim} of {value.dtype}")
            given.append(address_of(value))
            given += value.shape
        return given


def address_of(array: NDArray[Any]) -> int:
    """The address of a contiguous array.

    Raises:
        TypeError: the array is not contiguous.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, array)))  # 0.3 us; `array.ctypes.data` takes 0.9 us
    except (TypeError, ValueError, BufferError):  # not contiguous, empty, or read-only
        if not array.flags.c_contiguous:
            raise TypeError("a kernel takes contiguous arrays only") from None
        return int(array.ctypes.data)


def entry(
    part: str, parameters: str, source: str | None = None, *, by_record: bool = False
) -> Callable[[Callable[Parameters, Result]], Entry[Parameters, Result]]:
    """Decorator: makes an `Entry` of a module-level function.

    The function is the kernel itself; or, with a `source`, its declaration in a module that can be imported without
    numba, where the kernel needs a module that cannot.

    part : name of one of PARTS
    parameters : their types, such as "f32[] i64[,] f64 i64": bits of a float, int or unsigned, and dimensions
    source : the module that has the kernel of this name; None for the function itself
    by_record : whether its C function takes the address of its arguments: see `Entry`
    """
    return lambda declared: Entry(declared, part, parameters, source, by_record=by_record)


_TYPE = re.compile(r"(?P<kind>[fiu])(?P<bits>8|16|32|64)(?P<dims>\[,*\])?")


def _parameter(text: str) -> Parameter:
    match = _TYPE.fullmatch(text)
    assert match is not None, text
    dtype = np.dtype(f"{match['kind']}{int(match['bits']) // 8}")
    return Parameter(dtype, match["dims"].count(",") + 1 if match["dims"] else 0)


# Loading.

_C_TYPES: dict[str, Any] = {"i64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double}
_DTYPES: dict[str, Any] = {"i64": np.int64, "f32": np.float32, "f64": np.float64}

_LOADING = ReentrantLock()
"""Held while a part is built or loaded."""


@cache
def _loaded(part: str) -> Callable[[str], int]:
    """Load the file that holds a part, which is built first if it is missing; a function from symbols to addresses."""
    found = library.find(part)
    if found is None:
        from ondevice.native.building import build_now

        build_now(part)
        found = library.find(part)
    if found is None:
        raise OndeviceError(f"the kernels that were just built are gone from {library.code_directory()}: start again")
    return found
