"""A published file, requantised: what `measure` finds is what `llama-perplexity --kl-divergence` finds.

`python -m benchmarks.quality.formats FILE.gguf --json found.json --llama PROGRAMS --types Q8_0 Q4_0` repeats the
figures of llama.cpp. The test's files, which the `gguf` package quantises, have the tensors of those of
`llama-quantize`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import ondevice
from ondevice.bundle import Bundle
from ondevice.quality import TEXT, Figure, Quality, measure, text_ids
from ondevice_export import export
from tests.fixtures.published import published
from tests.published_models.conftest import MakeBundle

pytestmark = [pytest.mark.needs("oracle"), pytest.mark.slow]


@dataclass(frozen=True)
class Printed:
    """Figures of `llama-perplexity`, with their standard errors.

    digest : sha256 of the tensors that `llama-quantize` makes of SmolLM2's file in F16
    """

    digest: str
    kl: Figure
    same_top: Figure
    perplexity: float


LLAMA = {
    "Q8_0": Printed(
        "5f009ec247233a58f62d23fd6e00b2d90531590e5c25fca86deb9dc9672ef91c",
        Figure(0.00425, 0.00005),
        Figure(0.95882, 0.00254),
        26.892571,
    ),
    "Q4_0": Printed(
        "bc5d5d574e5a330a711603563a2bfb39e48eef3c41be152766a29c055a8ca235",
        Figure(0.291142, 0.003316),
        Figure(0.69020, 0.00591),
        33.520250,
    ),
}


@pytest.mark.parametrize("kind", LLAMA)
def test_losses_are_those_of_llama_perplexity(published_bundle: MakeBundle, tmp_path: Path, kind: str) -> None:
    printed, file = LLAMA[kind], tmp_path / "file.gguf"
    _requantize(published("smollm2"), Kind[kind], file)
    assert _digest(file) == printed.digest
    found = _measure(export(file, tmp_path / "bundle"), published_bundle("smollm2", "none"))
    for own, other in ((found.kl, printed.kl), (found.same_top, printed.same_top)):
        assert abs(own.value - other.value) < other.error
        assert own.error == pytest.approx(other.error, rel=0.05)
    assert abs(found.perplexity.value - printed.perplexity) < found.perplexity.error


def _measure(bundle: Path, reference: Path) -> Quality:
    ids = text_ids(TEXT.read_text("utf-8"), Bundle.open(bundle), Bundle.open(reference))
    with ondevice.load(bundle, threads=1) as model, ondevice.load(reference, engine="ort", threads=1) as original:
        return measure(model.engine, original.engine, ids, model.manifest.first_token_id)


def _requantize(source: Path, kind: Kind, out: Path) -> None:
    """Write a file with all matrices as `llama-quantize` rounds those of its F16 copy; the token table is Q8_0."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        if tensor.tensor_type == Kind.F32:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float16).astype(np.float32)
        own = Kind.Q8_0 if tensor.name == "token_embd.weight" else kind
        writer.add_tensor(tensor.name, gguf.quantize(weights, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for tensor in sorted(gguf.GGUFReader(path).tensors, key=lambda each: each.name):
        digest.update(tensor.data.tobytes())
    return digest.hexdigest()
