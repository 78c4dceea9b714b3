"""The KL divergence of rounded weights as llama.cpp computes it, token by token, beside that of `ondevice check`.

    python -m benchmarks.llama_logits FILE.gguf [--tokens 64] [--json found.json]

The file's weights are written as F16, and from these as Q8_0 and Q4_0 by the `gguf` package, whose results are
llama.cpp's own; the token table is Q8_0 in both. The package `xllamacpp` has no perplexity tool. So its server is asked
for the whole distribution behind each token of the second half of a chunk, which takes a request of megabytes each:
hence few tokens. `ondevice` runs the same blocks on the same tokens, and both are compared with their own F16 and
float32. `benchmarks.quality --llama` compares whole texts, where llama.cpp's programs are at hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

import ondevice
from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.cli.bench.tables import table
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.quality import CHUNK, TEXT, Comparison, Quality, text_ids
from ondevice_export import export

KINDS = (Kind.F16, Kind.Q8_0, Kind.Q4_0)


def write_as(source: Path, out: Path, kind: Kind) -> None:
    """Write a GGUF file with its matrices in another type, taken of their values in F16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
            continue
        rounded = values.astype(np.float16)
        stored = Kind.Q8_0 if kind == Kind.Q4_0 and tensor.name == "token_embd.weight" else kind
        data = rounded if stored == Kind.F16 else gguf.quantize(rounded.astype(np.float32), stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_rows(model: Path, ids: list[int], first: int, vocabulary: int) -> Float32Array:
    """llama.cpp's log-probabilities behind each token from `first` on, [tokens, V], from a process of its own."""
    out = model.with_suffix(".npy")
    words = [sys.executable, "-m", "benchmarks.llama_logits", "--serve", str(model), str(out)]
    request = json.dumps([ids, first, vocabulary])
    subprocess.run(words, input=request, text=True, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows: Float32Array = np.load(out)
    return rows


def serve(model: str, out: str) -> None:
    """The process that `llama_rows` starts."""
    import os

    import xllamacpp

    ids, first, vocabulary = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, len(ids) + 8, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    rows = np.full((len(ids) - first, vocabulary), -np.inf, np.float32)
    for row in range(len(rows)):
        asked = {"prompt": ids[: first + row + 1], "n_predict": 1, "n_probs": vocabulary, "temperature": 1.0}
        answer: dict[str, Any] = server.handle_completions({**asked, "cache_prompt": True})
        for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            rows[row, each["id"]] = each["logprob"]
    np.save(out, rows)
    os._exit(0)  # the server's threads would keep the process


def own_rows(bundle: Path, engine: Any, ids: list[int], first: int) -> Float32Array:
    """The logits of a bundle behind the same tokens."""
    with ondevice.load(bundle, engine=engine) as model:
        session, rows = model.engine.open_session(), []
        for start in range(0, len(ids), 32):
            part = ids[start : start + 32]
            wanted = [row for row in range(len(part)) if start + row >= first]
            [outputs] = model.engine.forward([Rows(session, TokenTree.chain(part), wanted)])
            rows.append(outputs.logits.copy())
            session.commit(range(len(part)))
    return np.concatenate(rows)


def compared(rows: Float32Array, reference: Float32Array, following: list[int]) -> Quality:
    comparison = Comparison()
    comparison.add(_finite(rows), _finite(reference), following)
    return comparison.quality()


def _finite(rows: NDArray[np.float32]) -> Float32Array:
    return np.maximum(rows, np.float32(-200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    first, rows, found = CHUNK // 2, [], {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files = {kind: directory / f"{kind.name}.gguf" for kind in KINDS}
        for kind, file in files.items():
            write_as(arguments.source, file, kind)
        float_bundle = export(files[Kind.F16], directory / "F16", quantize="none", drafter="none")
        bundle = Bundle.open(float_bundle)
        ids = text_ids(TEXT.read_text("utf-8"), bundle, bundle)[: first + arguments.tokens + 1]
        if (begin := bundle.manifest.first_token_id) is not None:
            ids[0] = begin
        text, following = ids[:-1], ids[first + 1 :]
        vocabulary = bundle.manifest.target.vocab_size
        llama_base = llama_rows(files[Kind.F16], text, first, vocabulary)
        own_base = own_rows(float_bundle, "ort", text, first)
        for kind in KINDS[1:]:
            rounded = export(files[kind], directory / "rounded", drafter="none")
            pair = {
                "llama.cpp": compared(llama_rows(files[kind], text, first, vocabulary), llama_base, following),
                "ondevice": compared(own_rows(rounded, "simd", text, first), own_base, following),
            }
            for by, quality in pair.items():
                found[f"{kind.name}, {by}"] = quality.kl.value, quality.kl.error, quality.perplexity.value
                rows.append(
                    [kind.name, by, f"{quality.kl.value:.5f} ± {quality.kl.error:.5f}", f"{quality.same_top.value:.1%}"]
                )
                print(rows[-1], flush=True)
        between = compared(llama_base, own_base, following)
        print(f"llama.cpp in F16 against float32 here: KL {between.kl.value:.6f}, {between.tokens} tokens")
    print(table(["type", "by", "KL divergence", "same top token"], rows, left={"type", "by"}))
    if arguments.json:
        arguments.json.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:4])
    else:
        main()
