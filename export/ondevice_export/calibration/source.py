"""Where the second moments of a matrix's inputs come from: a text that is run, or a published importance matrix.

An importance matrix (`llama-imatrix`, GGUF) has the sums of the squares of each matrix's inputs, the diagonal of the
moments. It gives the weights of the search for scales; there is nothing to carry errors by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ondevice.arrays import Float32Array, Int64Array
from ondevice.bundle import GGUF, TOKENIZER, Bundle
from ondevice.bundle_format.manifest import Manifest
from ondevice.bundle_format.tensor_table import EMBEDDING, MTP
from ondevice.engines.simd.layer_inputs import LayerInputs
from ondevice.engines.simd.tensor_files import UnsupportedGraphError
from ondevice.errors import CheckpointError, PromptError, UsageError
from ondevice.machine import default_threads
from ondevice.progress import Advance
from ondevice.text.prompt_file import read_text
from ondevice.text.tokenizer import Tokenizer
from ondevice_export.calibration.rounding import DAMPING, Factors, Moments, column_factors, feedback
from ondevice_export.calibration.unfinished import UnfinishedExport
from ondevice_export.gguf.architectures import MATRICES
from ondevice_export.gguf.blocks import to_float32
from ondevice_export.gguf.file import GgufFile
from ondevice_export.quantize import BLOCK

CHUNK = 512
"""Tokens of a chunk, which is one forward."""

HELD_ROWS = 4096
"""Inputs of a matrix that are held before they are added to its moments: the threads of OpenBLAS spin for some
milliseconds after a product, and forwards beside them take up to three times as long."""

TABLE_DAMPING = 0.1
"""`rounding.DAMPING` of a token table that is the head too: its rows are also looked up, and there each error counts as
it is. KL divergences with the table in 4 bits, for 0.01, 0.1, 0.3 and 1: SmolLM2-135M 0.0150, 0.0155, 0.0164, 0.0183;
the reference pair 0.0296, 0.0277, 0.0266, 0.0256; Gemma 3 270M 0.0380 for 0.01 and 0.0385 for 1."""

TEXT = Path(__file__).with_name("text.txt")
"""The text that is run by default, some 34,000 tokens: pages and code of this project, under its licence,
Apache-2.0, and two stories by Arthur Conan Doyle (1891, 1892), which are in the public domain. None of it is in
`quality.TEXT`."""


class FactorSource(Protocol):
    """Gives the factors of `feedback` for the matrices of a target.

    Attributes:
        unfinished: the directory in which the target's data file is made, so that an export that was ended can go on;
            None makes it with the bundle's other files.
    """

    @property
    def unfinished(self) -> UnfinishedExport | None: ...

    def factors(self, name: str, finish: Callable[[], None]) -> Factors | None:
        """The factors for a matrix by its name in the checkpoint, None if its inputs are not known.

        A text's are computed layer by layer: matrices of lower layers must have been asked for before, and those of
        all layers before the head's.

        Args:
            finish: waits until the matrices before this one are on the disk. It is called before a layer takes all
                cores, at whose barriers the engine's threads would wait for rounding.
        """
        ...

    def rescale(self, names: Sequence[str], finish: Callable[[], None]) -> Float32Array | None:
        """Factors for the columns of all matrices of a layer that multiply one input, None if it is not known.

        From then on `factors` takes it that the columns are multiplied by them, and the input divided.

        Args:
            names: the matrices' names in the checkpoint.
            finish: as for `factors`.
        """
        ...

    def is_written(self, name: str) -> bool:
        """Whether an export that was ended has written this tensor."""
        ...


def is_importance_matrix(source: str) -> bool:
    """Whether the path of a calibration names an importance matrix; else it is a text."""
    return source.lower().endswith(GGUF)


def calibration_text(source: str) -> str:
    """The text at a path, or the default one if it is empty.

    Raises:
        PromptError: the text cannot be read, or is empty.
    """
    text = read_text(Path(source) if source else TEXT)
    if not text.strip():
        raise PromptError(f"{source} has no text to calibrate with")
    return text


@contextmanager
def run_text(
    text: str, unfinished: UnfinishedExport, write_bundle: Callable[[Path], Bundle], advance: Advance, share: int
) -> Iterator[FactorSource]:
    """Open a bundle of the model that runs a text.

    Args:
        text: the text.
        unfinished: the export's directory.
        write_bundle: writes a bundle of the model, which has `share` weights, into a directory, and opens it.
        advance, share: `advance` is called with parts of `share` while the text is run.

    Raises:
        UsageError: the model has no tokenizer to read the text with, or the simd engine cannot run it.
    """
    place = unfinished.directory / "int8"
    if unfinished.layers:
        bundle = Bundle.open(place)
        advance(share)
    else:
        bundle = write_bundle(place)
    path = bundle.file(TOKENIZER)
    if path is None:
        raise UsageError("--calibrate runs a text, and the model has no tokenizer to read it with")
    ids = Tokenizer.from_file(path, bundle.manifest.first_token_id).encode(text, parse_special=False)
    chunks = chunks_of(ids, bundle.manifest)
    try:
        run = LayerInputs(bundle, chunks, default_threads(), unfinished.directory, unfinished.layers)
    except UnsupportedGraphError as error:
        without = "--calibrate FILE.gguf, an importance matrix of llama-imatrix, needs no run"
        raise UsageError(f"--calibrate cannot run a text through this model ({error.reason}): {without}") from error
    with closing(run):
        yield TextCalibration(run, unfinished, advance, share)


def chunks_of(token_ids: Sequence[int], manifest: Manifest) -> list[Int64Array]:
    """A text in chunks of one size, each a sequence of its own; what is left after the last one is not used."""
    size = min(CHUNK, manifest.target.context_length, len(token_ids))
    chunks = np.array(token_ids[: len(token_ids) // size * size], np.int64).reshape(-1, size)
    if manifest.first_token_id is not None:
        chunks[:, 0] = manifest.first_token_id
    return list(chunks)


class TextCalibration:
    """The second moments of a text that runs through the layers of a bundle."""

    def __init__(self, run: LayerInputs, unfinished: UnfinishedExport, advance: Advance, share: int) -> None:
        """`advance` is called with parts of `share`, as chunks are run."""
        self.unfinished = unfinished
        self._run = run
        per_chunk = round(share / (run.layers * len(run.hidden)))
        self._after_chunk = partial(advance, per_chunk)
        self._begun = self._done = unfinished.layers
        """Layers that were complete at the beginning, and layers that the text has passed."""
        advance(per_chunk * self._done * len(run.hidden))
        self._held: dict[tuple[str, ...], list[Float32Array]] = {}
        self._moments: dict[str, Moments] = {}
        self._factors: dict[int, Factors] = {}

    def factors(self, name: str, finish: Callable[[], None]) -> Factors | None:
        moments = self._moments_of(name, finish)
        if moments is None:
            return None
        known = self._factors.get(id(moments))
        if known is None:
            damping = TABLE_DAMPING if f"{self._place(name)[1]}.weight" == EMBEDDING else DAMPING
            known = self._factors[id(moments)] = feedback(moments, damping)
        return known

    def rescale(self, names: Sequence[str], finish: Callable[[], None]) -> Float32Array | None:
        moments = self._moments_of(names[0], finish)
        if moments is None:
            return None
        factors = column_factors(moments)
        self._moments.update(dict.fromkeys([self._place(name)[1] for name in names], moments.divided(factors)))
        return factors

    def is_written(self, name: str) -> bool:
        layer = _layer_of(name)
        return layer is not None and layer < self._begun

    def _place(self, name: str) -> tuple[int | None, str]:
        """A matrix's layer, after all layers for the head, and its name within it; None if its inputs are not run."""
        layer, inner = _layer_of(name), name.removesuffix(".weight")
        if layer is not None:
            return layer, _inner_name(inner, layer)
        is_head = inner.endswith(self._run.head)
        return (self._run.layers, self._run.head) if is_head else (None, inner)

    def _moments_of(self, name: str, finish: Callable[[], None]) -> Moments | None:
        """The moments of a matrix's inputs. The text is run up to its layer, of which all moments are kept."""
        layer, inner = self._place(name)
        if layer is None:
            return None
        while self._done <= layer:
            finish()
            if self._done > self._begun:
                self._run.save(self._done)
                self.unfinished.save(self._done)
            self._moments, self._factors = {}, {}
            self._run.run(self._done, self._hold, self._after_chunk)
            self._add_held()
            sums = [np.diagonal(block) for moments in self._moments.values() for block in moments.blocks]
            if not all(np.isfinite(squares).all() for squares in sums):
                raise CheckpointError(
                    f"the text has states that are NaN or infinite in layer {self._done}: "
                    "the weights are damaged, or too large for --calibrate"
                )
            self._done += 1
        return self._moments.get(inner)

    def _hold(self, names: Sequence[str], inputs: Float32Array) -> None:
        held = self._held.setdefault(tuple(names), [])
        if sum(map(len, held)) >= HELD_ROWS:
            self._add_held()
            held = self._held.setdefault(tuple(names), [])
        held.append(inputs)

    def _add_held(self) -> None:
        for names, held in self._held.items():
            moments = self._moments.get(names[0]) or Moments.zeros(held[0].shape[1])
            for inputs in held:
                moments.add(inputs)
            self._moments.update(dict.fromkeys(names, moments))
        self._held = {}


class ImportanceMatrix:
    """A GGUF importance matrix."""

    unfinished = None

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: it is not a GGUF file, or one of something else.
        """
        self._file = GgufFile(path)
        if str(self._file.metadata.get("general.type")) != "imatrix":
            self._file.close()
            raise CheckpointError(
                f"{path} is not an importance matrix: --calibrate takes one of llama-imatrix, or a text"
            )
        self._columns: dict[str, Float32Array] = {}

    def close(self) -> None:
        self._file.close()

    def factors(self, name: str, finish: Callable[[], None] = lambda: None) -> Factors | None:
        moments = self._moments(name)
        if moments is None:
            return None
        columns = self._columns.get(name)
        return feedback(moments if columns is None else moments.divided(columns))

    def rescale(self, names: Sequence[str], finish: Callable[[], None]) -> Float32Array | None:
        moments = self._moments(names[0])
        if moments is None:
            return None
        factors = column_factors(moments)
        self._columns.update(dict.fromkeys(names, factors))
        return factors

    def is_written(self, name: str) -> bool:
        return False

    def _moments(self, name: str) -> Moments | None:
        layer = _layer_of(name)
        place = None if layer is None else MATRICES.get(_inner_name(name, layer))
        entry = self._file.entries.get(f"blk.{layer}.{place}.in_sum2")
        if entry is None:
            return None
        sums = to_float32(self._file.read_rows(entry, 0, entry.rows), entry.kind).sum(0)  # over experts
        if not (np.isfinite(sums).all() and (sums >= 0).all() and len(sums) % BLOCK == 0):
            raise CheckpointError(f"{self._file.path}: {entry.name} holds no sums of squares: download it again")
        return Moments(tuple(np.diag(part) for part in sums.reshape(-1, BLOCK)))


def _inner_name(name: str, layer: int) -> str:
    """A tensor's name within its layer."""
    return name.split(f"layers.{layer}.", 1)[1]


def _layer_of(name: str) -> int | None:
    """The layer that a tensor's name in a checkpoint tells; None for an MTP layer, through which no text is run."""
    words = [] if name.startswith(MTP) else name.split(".")
    places = [index for index, word in enumerate(words[:-1]) if word == "layers" and words[index + 1].isdecimal()]
    return int(words[places[-1] + 1]) if places else None
