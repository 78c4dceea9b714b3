"""A real `Model` on the toy engine: bundle files on disk and all of generation except the forward's arithmetic."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from ondevice.bundle import CHAT_TEMPLATE, MANIFEST, TOKENIZER, Bundle
from ondevice.bundle_format.manifest import FileEntry, Manifest, Quantization, Source
from ondevice.generate.costs import CostsFile
from ondevice.model import Model, OpenEngine
from tests.text.templates import GEMMA
from tests.toy_engine import VOCAB, ToyEngine

TOKENS = ["<bos>", "<eos>", "<|turn>", "<turn|>", "a", "b", "c", "d", "e", " ", "\n"]
BOS, EOS = 0, 1
SPECIALS = 4
assert len(TOKENS) == VOCAB


def write_bundle(
    directory: Path,
    *,
    tokenizer: bool = True,
    template: bool = True,
    eos: tuple[int, ...] = (),
    name: str = "toy-model",
) -> Path:
    """Write a bundle directory without graphs, which the toy engine does not need; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, FileEntry] = {}
    contents = {TOKENIZER: _tokenizer().to_str() if tokenizer else None, CHAT_TEMPLATE: GEMMA if template else None}
    for file, text in contents.items():
        if text is not None:
            content = text.encode()
            (directory / file).write_bytes(content)
            files[file] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    manifest = Manifest(
        family="toy",
        name=name,
        target=ToyEngine().target,
        drafter=None,
        bos_token_id=BOS,
        eos_token_ids=eos,
        pad_token_id=None,
        quantization=Quantization("int4", 32, 8),
        sources={"target": Source("someone/toy", "abc123")},
        tools={"onnx": "1.20"},
        files=files,
    )
    (directory / MANIFEST).write_text(manifest.to_json(), "utf-8")
    return directory


def load_toy(
    bundle: str | Path, *, context_length: int | None = None, drafter: str | None = None, **_: object
) -> Model:
    """Load a bundle on the toy engine; a replacement for `ondevice.load`."""
    model = model_over(ToyEngine(context_length or 400), bundle)
    if drafter is not None:
        model.draft_with(drafter)
    return model


def model_over(
    engine: ToyEngine,
    bundle: str | Path,
    max_sequences: int = 4,
    cache_bytes: int = 1 << 30,
    costs_file: CostsFile | None = None,
    open_draft: OpenEngine | None = None,
) -> Model:
    return Model(
        Bundle.open(bundle),
        engine,
        threads=1,
        load_s=0.5,
        max_sequences=max_sequences,
        cache_bytes=cache_bytes,
        costs_file=costs_file,
        open_draft=open_draft or (lambda bundle, on_prepare: ToyEngine()),
    )


def _tokenizer() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[:SPECIALS]])
    return backend
