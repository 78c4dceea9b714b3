"""Options of an export, and the weight formats that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from ondevice.bundle_format.manifest import KEEP, MIXED
from ondevice.bundle_format.weight_format import BY_ROW, FLOAT32, INT4, INT8, MXFP4, WeightFormat
from ondevice.errors import UsageError
from ondevice_export.bit_budget import check_budget
from ondevice_export.checkpoint.directory import Checkpoint
from ondevice_export.quantize import ROUNDED

WEIGHT_FORMATS = {each.name: each for each in ROUNDED} | {"none": FLOAT32}


@dataclass(frozen=True)
class Formats:
    """Weight formats of one graph."""

    layers: WeightFormat
    """Format of the linear layers and of the per-layer embedding table."""
    head: WeightFormat
    """Format of the head, which is also the token embedding."""
    chosen: Mapping[str, WeightFormat] = field(default_factory=dict)
    """Formats of single matrices by their names in the checkpoint, in place of those above."""
    keep: bool = False
    """Whether matrices that are quantised in the checkpoint are stored as they are, if a bundle has their format; the
    others get the formats above. Those in MXFP4 are in any case, but for float32 graphs: another format of 4 bits would
    lose more, and int8 would be no better."""

    def of(self, checkpoint: Checkpoint, name: str, form: WeightFormat) -> WeightFormat:
        """The format in which a matrix of a checkpoint is stored; `form` is `layers` or `head`."""
        return self.kept(checkpoint, name) or (form if self.keep else self.chosen.get(name, form))

    def kept(self, checkpoint: Checkpoint, name: str) -> WeightFormat | None:
        """The format of a matrix that is stored as it is in the checkpoint; None for one that is rounded."""
        kept = checkpoint.kept_format(name) if self.layers.quantised else None
        return kept if self.keep or kept == MXFP4 else None


@dataclass(frozen=True)
class ExportOptions:
    """The options of `export` that decide how weights are stored.

    Attributes:
        quantize: weight format of the target: a name in WEIGHT_FORMATS, of which `none` is for float32 graphs, or
            `keep` for the checkpoint's own; None for `keep` where the target is quantised already (a GGUF file, or
            a checkpoint of one of the methods in `quantized.methods.KEPT`), and `int4` otherwise.
        head_bits: bits per weight of the tied token table, 4 or 8; None for 8. Ignored where `quantize` is `none`. With
            4 bits it has the format of the layers if they have 4 too.
        calibrate: round the matrices of 4 bits by the second moments of their inputs: of a text, of which this is the
            path, or empty for the default one, or in a GGUF importance matrix; None rounds without. Tables that are
            only looked up have no such inputs.
        bits_per_weight: the target's matrices have this number at most on average, each in a format of its own; None
            gives them the format of `quantize`.
        chosen: the formats that follow from it, by the names of the matrices in the checkpoint.
    """

    quantize: str | None = None
    head_bits: int | None = None
    calibrate: str | None = None
    bits_per_weight: float | None = None
    chosen: Mapping[str, WeightFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.bits_per_weight is not None:
            if self.quantize not in (None, MIXED) or self.head_bits is not None:
                raise UsageError("--bits-per-weight chooses the formats: leave --quantize and --head-bits out")
            check_budget(self.bits_per_weight)
        if self.quantize not in (*WEIGHT_FORMATS, KEEP, None) and self.bits_per_weight is None:
            raise UsageError(f"quantize is {self.quantize!r}: choose one of {', '.join((*WEIGHT_FORMATS, KEEP))}")
        if self.head_bits not in (4, 8, None):
            raise UsageError(f"head_bits is {self.head_bits!r}: choose 4 or 8")
        if self.head_bits is not None and self.quantize == KEEP:
            raise UsageError("--head-bits and --quantize keep contradict each other: leave one out")

    def for_target(self, *, quantised: bool) -> ExportOptions:
        """The options with `quantize` decided, once it is known whether the target's weights are quantised.

        quantised : in a GGUF file, or by one of the methods in `quantized.methods.KEPT`

        Raises:
            UsageError: `quantize` is `keep`, and they are not; or `head_bits` would change one that is kept.
        """
        if self.quantize == KEEP and not quantised:
            raise UsageError("--quantize keep is for weights that are quantised already: choose int4, int8 or none")
        if self.quantize is None and quantised and self.head_bits is not None:
            raise UsageError("quantised weights stay as they are: --head-bits needs --quantize int4 or int8")
        default = MIXED if self.bits_per_weight is not None else KEEP if quantised else "int4"
        chosen = dataclasses.replace(self, quantize=self.quantize or default)
        if self.calibrate is not None and chosen.target_formats.layers.bits != 4:
            raise UsageError("--calibrate is for rounding to 4 bits: add --quantize int4, int4-affine or int4-table")
        return chosen

    @property
    def target_formats(self) -> Formats:
        if self.quantize == KEEP:
            return Formats(INT8, INT8, keep=True)
        if self.quantize == MIXED:
            return Formats(INT4, INT8, self.chosen)
        layers = WEIGHT_FORMATS[self.quantize or "int4"]
        if not layers.quantised:
            return Formats(layers, layers)
        return Formats(layers, INT8 if self.head_bits != 4 else layers if layers.bits == 4 else INT4)

    @property
    def drafter_formats(self) -> Formats:
        """Weight formats of the drafter: its layers have at least 8 bits, which costs 1 % of a target's step.

        On the reference pair, the first drafted token agreed with the original drafter's in 78 % of drafts with int8
        layers and in 62 % with int4 layers. SmolLM2's drafter with int4-affine layers: 1.99 and 1.71 tokens a round at
        temperatures 0 and 1 on its held-out replies, 2.07 and 1.77 with int8. A step reads 0.6 of the bytes, and rounds
        of two drafts take 0.95 to 0.99 of the time (two Intel cores), so that nothing is gained beyond the noise.
        """
        target = self.target_formats
        return dataclasses.replace(target, layers=max(target.layers, INT8, key=lambda each: each.bits), chosen={})

    @property
    def tower_formats(self) -> Formats:
        """Weight formats of the vision and audio towers: layers of 8 bits with a scale per row, the rest float32."""
        return Formats(BY_ROW[8] if self.target_formats.layers.quantised else FLOAT32, FLOAT32)
