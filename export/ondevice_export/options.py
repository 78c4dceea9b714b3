"""What an export can be told."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.errors import UsageError

WEIGHT_BITS = {"int4": 4, "int8": 8, "none": 32}


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`.

    Attributes:
        drafter: `auto`, `none` or a source.
        quantize: `int4`, `int8`, or `none` for float32 graphs.
        head_bits: 4 or 8, the width of the tied token table; without meaning where `quantize` is `none`.
        revision: of the target on the hub.
    """

    drafter: str = "auto"
    quantize: str = "int4"
    head_bits: int = 8
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.quantize not in WEIGHT_BITS:
            raise UsageError(f"quantize is {self.quantize!r}: choose one of {', '.join(WEIGHT_BITS)}")
        if self.head_bits not in (4, 8):
            raise UsageError(f"head_bits is {self.head_bits!r}: choose 4 or 8")

    @property
    def weight_bits(self) -> int:
        return WEIGHT_BITS[self.quantize]

    @property
    def table_bits(self) -> int:
        return 32 if self.quantize == "none" else self.head_bits
