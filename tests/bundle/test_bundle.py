"""Opening a bundle: everything that can be wrong with one is said in one line, before a byte of it is trusted."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle import MANIFEST, Bundle, sha256
from ondevice.bundle_format.decoder import ShortConvolution, rotary_numbers
from ondevice.bundle_format.manifest import FileEntry, Manifest, Quantization, Source
from ondevice.bundle_format.model_config import HeadsEntry, ShortlistEntry, Target
from ondevice.bundle_format.tensor_table import target_shapes
from ondevice.bundle_format.vision import VisionEntry
from ondevice.engines.simd.tensor_files import TensorFiles
from ondevice.errors import BundleCorruptError, BundleError, BundleNotFoundError, UnsupportedBundleError
from tests.fixtures.decoders_made import layer

PAYLOAD = b"weights" * 100


def manifest(**changes: Any) -> Manifest:
    sliding: dict[str, Any] = {"window": 16, "heads": 2, "head_dim": 32, "width": 96, "rotary": 0}
    full = {**sliding, "window": None, "head_dim": 64, "rotary": 1}
    own = layer(**sliding), layer(**full)
    made = Manifest(
        family="gemma4",
        name="tiny",
        target=Target(
            graph="target.onnx",
            hidden_size=64,
            norm_eps=1e-6,
            rotary=((1.0,) * 16, (0.5,) * 32),
            vocab_size=256,
            context_length=128,
            embedding_factor=8.0,
            softcap=30.0,
            tied=True,
            layers=(*own, *(layer(**sizes, kv_source=source) for source, sizes in enumerate((sliding, full)))),
        ),
        drafter=None,
        bos_token_id=2,
        eos_token_ids=(1,),
        pad_token_id=0,
        quantization=Quantization("int4", 32, 8),
        sources={"target": Source("made/here")},
        tools={"ondevice": "0"},
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A directory that passes every check; its graph is no graph, which nothing here looks at."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "target.onnx").write_bytes(PAYLOAD)
    entry = FileEntry(len(PAYLOAD), sha256(path / "target.onnx"))
    (path / MANIFEST).write_text(manifest(files={"target.onnx": entry}).to_json())
    return path


def edit(bundle: Path, change: object) -> None:
    data = json.loads((bundle / MANIFEST).read_text())
    change(data)  # type: ignore[operator]
    (bundle / MANIFEST).write_text(json.dumps(data))


def test_what_is_written_is_read_back(bundle: Path) -> None:
    opened = Bundle.open(bundle, verify_hashes=True)
    assert opened.manifest == Manifest.from_json(opened.manifest.to_json())
    assert opened.manifest.target.kv_layers() == [0, 1]
    assert opened.graph("target.onnx") == bundle / "target.onnx"
    assert opened.file("tokenizer.json") is None


def test_a_name_is_looked_up_under_the_model_home(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(bundle.parent))
    monkeypatch.chdir("/")
    assert Bundle.open("tiny").path == bundle


@pytest.mark.parametrize("location", ["nowhere", "../tiny", "tiny/target.onnx"])
def test_no_bundle_there(location: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(bundle.parent / "home"))
    monkeypatch.chdir(bundle.parent if location.startswith("tiny") else bundle.parent.parent)
    with pytest.raises(BundleNotFoundError, match="ondevice export") as caught:
        Bundle.open(location)
    assert isinstance(caught.value, FileNotFoundError)
    assert "\n" not in str(caught.value)


def test_a_missing_file(bundle: Path) -> None:
    (bundle / "target.onnx").unlink()
    with pytest.raises(BundleCorruptError, match=r"target\.onnx is missing"):
        Bundle.open(bundle)


def test_a_truncated_file(bundle: Path) -> None:
    (bundle / "target.onnx").write_bytes(PAYLOAD[:-1])
    with pytest.raises(BundleCorruptError, match=f"{len(PAYLOAD) - 1} bytes instead of {len(PAYLOAD)}"):
        Bundle.open(bundle)


def test_a_flipped_bit_shows_when_hashes_are_verified(bundle: Path) -> None:
    (bundle / "target.onnx").write_bytes(bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:])
    Bundle.open(bundle)
    with pytest.raises(BundleCorruptError, match="sha256"):
        Bundle.open(bundle, verify_hashes=True)


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "..\\outside.bin"])
def test_a_path_that_leaves_the_directory(name: str, bundle: Path) -> None:
    (bundle.parent / "outside.bin").write_bytes(b"x")
    edit(bundle, lambda data: data["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    with pytest.raises(BundleCorruptError, match="outside the bundle"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", ["target\0.onnx", "target\n.onnx", "\udc80", "circle", "x" * 5000])
def test_a_name_that_is_none(name: str, bundle: Path) -> None:
    (bundle / "circle").symlink_to(bundle / "circle")
    edit(bundle, lambda data: data["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    with pytest.raises(BundleCorruptError) as caught:
        Bundle.open(bundle)
    assert "\n" not in str(caught.value)


def test_an_edited_manifest_shows_when_hashes_are_verified(bundle: Path) -> None:
    """No engine can compare these fields with the graphs; a bundle that was edited on purpose can be used."""
    edit(bundle, lambda data: data["target"].update(softcap=8.0))
    Bundle.open(bundle)
    with pytest.raises(BundleCorruptError, match=r"bundle\.json was altered"):
        Bundle.open(bundle, verify_hashes=True)


def test_a_manifest_that_is_only_laid_out_otherwise(bundle: Path) -> None:
    edit(bundle, lambda data: None)
    Bundle.open(bundle, verify_hashes=True)


HEADS = (HeadsEntry("medusa", "m", 3, 256), HeadsEntry("exit", "e", 1, 64, 1, shortlist=ShortlistEntry(16, 4)))


@pytest.mark.parametrize(("add_bos", "first"), [(True, 2), (False, None)])
def test_a_begin_token_may_be_the_chat_template_s_alone(add_bos: bool, first: int | None) -> None:
    read = Manifest.from_json(manifest(add_bos=add_bos).to_json())
    assert (read.bos_token_id, read.first_token_id) == (2, first)


def test_numbers_of_a_rotary_embedding_lie_in_one_line() -> None:
    """They become the same float32 numbers, and a large model's bundle.json stays readable."""
    frequencies = (1e6 ** -(np.arange(0, 512, 2) / 512)).astype(np.float32)
    made = manifest()
    layers = tuple(layer(head_dim=512, rotary=0) for _ in range(2))
    text = dataclasses.replace(
        made, target=dataclasses.replace(made.target, rotary=(rotary_numbers(frequencies),), layers=layers)
    ).to_json()
    np.testing.assert_array_equal(Manifest.from_json(text).target.frequencies(), [frequencies])
    assert len(text.splitlines()) < 120
    assert sum("0.9474" in line for line in text.splitlines()) == 1


def test_a_vision_tower_without_the_field_is_not_bidirectional() -> None:
    """A manifest leaves out fields with their default, which so can never change."""
    [field] = [each for each in dataclasses.fields(VisionEntry) if each.name == "bidirectional"]
    assert field.default is False


def test_heads_are_read_back() -> None:
    made = manifest(heads=HEADS)
    read = Manifest.from_json(made.to_json())
    assert read.heads == HEADS
    assert not read.altered


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([{"kind": "mystery", "graph": "m", "offsets": 3, "candidates": 64}], "kind is 'mystery'"),
        ([{"kind": "medusa", "graph": "m", "offsets": 17, "candidates": 64}], "offsets of the medusa heads is 17"),
        (
            [{"kind": "exit", "graph": "m", "offsets": 2, "candidates": 256, "layer": 1}],
            "offsets of the exit heads is 2",
        ),
        ([{"kind": "exit", "graph": "m", "offsets": 1, "candidates": 256, "layer": 4}], "layer of the exit heads is 4"),
        ([{"kind": "exit", "graph": "m", "offsets": 1, "candidates": 256}], "layer of the exit heads is None"),
        ([{"kind": "medusa", "graph": "m", "offsets": 3, "candidates": 257}], "candidates of the medusa heads is 257"),
        ([{"kind": "medusa", "graph": "m", "offsets": 3, "candidates": 256, "layer": 1}], "medusa heads have a layer"),
        ([{"kind": "medusa", "graph": "m", "offsets": 3, "candidates": 256}] * 2, "heads of the kinds medusa, medusa"),
        ([{"kind": "medusa", "graph": "m", "offsets": 3, "candidates": 8}], "candidates of the medusa heads is 8"),
        (
            [{"kind": "medusa", "graph": "m", "offsets": 3, "candidates": 64, "shortlist": {"clusters": 16, "top": 5}}],
            "do not fit 16 clusters",
        ),
        (
            [
                {
                    "kind": "medusa",
                    "graph": "m",
                    "offsets": 3,
                    "candidates": 64,
                    "shortlist": {"clusters": 16, "top": 17},
                }
            ],
            "top of the medusa heads is 17",
        ),
        ([{"kind": "blockwise", "graph": "m", "offsets": 3, "candidates": 256}], "width of the blockwise heads is 0"),
        (
            [{"kind": "medusa", "graph": "m", "offsets": 3, "candidates": 256, "width": 32}],
            "the medusa heads have a width",
        ),
        ([{"kind": "medusa"}], "heads has no graph"),
        ({"medusa": 1}, "heads is"),
    ],
)
def test_impossible_heads(heads: object, words: str, bundle: Path) -> None:
    edit(bundle, lambda data: data.update(heads=heads))
    with pytest.raises(BundleCorruptError, match=words):
        Bundle.open(bundle)


def test_a_link_that_leaves_the_directory(bundle: Path) -> None:
    (bundle.parent / "outside.bin").write_bytes(PAYLOAD)
    (bundle / "target.onnx").unlink()
    (bundle / "target.onnx").symlink_to(bundle.parent / "outside.bin")
    with pytest.raises(BundleCorruptError, match="outside the bundle"):
        Bundle.open(bundle)


def test_the_content_is_that_of_all_files(bundle: Path) -> None:
    before = Bundle.open(bundle).content
    assert before == Bundle.open(bundle.rename(bundle.parent / "other")).content
    moved = bundle.parent / "other"
    (moved / "target.onnx").write_bytes(bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:])
    edit(moved, lambda data: data["files"]["target.onnx"].update(sha256=sha256(moved / "target.onnx")))
    changed = Bundle.open(moved).content
    (moved / "tokenizer.json").write_bytes(b"{}")
    edit(moved, lambda data: data["files"].update({"tokenizer.json": {"size": 2, "sha256": "0" * 64}}))
    assert len({before, changed, Bundle.open(moved).content}) == 3


@pytest.mark.parametrize("schema", [0, 1, 2, 3, 5, 4.0, None, "4", True])
def test_another_schema(schema: object, bundle: Path) -> None:
    """Older bundles describe the layers of one family only; newer ones may have anything."""
    edit(bundle, lambda data: data.update(schema=schema))
    with pytest.raises(UnsupportedBundleError, match=r"has schema .* reads 4: export it again") as caught:
        Bundle.open(bundle)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{bundle}: ")


def test_a_field_that_stands_there_twice(bundle: Path) -> None:
    text = (bundle / MANIFEST).read_text()
    (bundle / MANIFEST).write_text(text.replace('"vocab_size"', '"vocab_size": 1, "vocab_size"', 1))
    with pytest.raises(BundleCorruptError, match="'vocab_size' stands there twice"):
        Bundle.open(bundle)


def drop(data: dict[str, Any], *keys: str) -> None:
    for key in keys[:-1]:
        data = data[key]
    del data[keys[-1]]


def drafter(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A drafter that fits the target, but for the changes."""
    layers = copy.deepcopy(data["target"]["layers"][2:])
    body(layers[1]).update(changes.pop("body", {}))
    sizes = {"graph": "d", "hidden_size": 32, "norm_eps": 1e-6, "rotary": data["target"]["rotary"]}
    return {**sizes, "candidates": 256, "shortlist": None, "layers": layers, **changes}


def body(layer: dict[str, Any], block: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = layer["blocks"][block]["body"]
    return found


def in_attention(layer: int, **changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: body(data["target"]["layers"][layer]).update(changes)


def experts(data: dict[str, Any], **changes: Any) -> None:
    body(data["target"]["layers"][0], 1)["experts"] = {"count": 8, "top": 2, "intermediate_size": 32, **changes}


def share_nothing(data: dict[str, Any]) -> None:
    experts(data)
    body(data["target"]["layers"][0], 1).update(shared=True, width=0)


def shorten(data: dict[str, Any], context: int) -> None:
    """Change the context and all windows."""
    data["target"]["context_length"] = context
    for attention in map(body, data["target"]["layers"]):
        if attention["window"] is not None:
            attention["window"] = context


def borrow_twice(data: dict[str, Any]) -> None:
    data["target"]["layers"].append(copy.deepcopy(data["target"]["layers"][2]))
    body(data["target"]["layers"][-1])["kv_source"] = 2


def convolution(data: dict[str, Any], **changes: object) -> list[dict[str, Any]]:
    """Replace the attention of the sliding layer by a convolution; returns the layers, of which none reads it."""
    del data["target"]["layers"][2:]
    made = {"channels": 64, "window": 3, "type": "short_convolution", **changes}
    data["target"]["layers"][0]["blocks"][0]["body"] = made
    data["target"]["rotary"] = data["target"]["rotary"][1:]
    layers: list[dict[str, Any]] = data["target"]["layers"]
    body(layers[1])["rotary"] = 0
    return layers


def two_attentions(data: dict[str, Any]) -> None:
    blocks = data["target"]["layers"][0]["blocks"]
    blocks[1] = blocks[0]


def in_drafter(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.update(drafter=drafter(data, body=changes))


def test_a_drafter_is_read_back(bundle: Path) -> None:
    edit(bundle, lambda data: data.update(drafter=drafter(data), sha256=None))
    found = Bundle.open(bundle).manifest.drafter
    assert found is not None
    assert (found.kv_layers(), found.num_assistant_tokens) == ([0, 1], 6)
    edit(bundle, lambda data: data.update(drafter=drafter(data, target_head=True, candidates=64), sha256=None))
    assert Bundle.open(bundle).manifest.drafter == dataclasses.replace(found, target_head=True, candidates=64)


def test_a_convolution_is_read_back(bundle: Path) -> None:
    edit(bundle, lambda data: (data.update(sha256=None), convolution(data)))
    target = Bundle.open(bundle).manifest.target
    assert target.layers[0].mixer == ShortConvolution(64, 3)
    assert (target.kinds, target.attention_kinds, target.window) == (("full", "sliding"), ("full",), 3)
    assert target_shapes(target)["layers.0.conv.conv.weight"] == (64, 3)


MALFORMED = {
    "a convolution of an odd number of channels": lambda data: convolution(data, channels=63),
    "a convolution over nothing": lambda data: convolution(data, window=0),
    "a convolution over too many positions": lambda data: convolution(data, window=17),
    "a convolution beside a longer window": lambda data: body(convolution(data)[1]).update(window=8),
    "a convolution beside a window of its width": lambda data: body(convolution(data)[1]).update(window=3),
    "a layer that borrows from a convolution": lambda data: body(convolution(data)[1]).update(
        kv_source=0, k_norm=False, v_norm=False
    ),
    "no layer with attention": lambda data: convolution(data).pop(),
    "a bias beside a softmax of all": lambda data: experts(data, selection_bias=True, scoring="softmax_of_all"),
    "a field is missing": lambda data: drop(data, "target", "vocab_size"),
    "a field is unknown": lambda data: data.update(surprise=1),
    "a layer borrows from a later one": in_attention(2, kv_source=3),
    "a layer borrows from itself": in_attention(2, kv_source=2),
    "a layer borrows from another kind": in_attention(2, kv_source=1),
    "a layer borrows from a borrower": borrow_twice,
    "a borrower with norms of keys": in_attention(2, k_norm=True),
    "a layer without a feed-forward block": lambda data: data["target"]["layers"][0]["blocks"].pop(),
    "a layer with two attentions": two_attentions,
    "a negative size": lambda data: data["target"].update(hidden_size=-64),
    "a size that is not a number": lambda data: data["target"].update(hidden_size="64"),
    "no layers": lambda data: data["target"].update(layers=[]),
    "an attention nobody knows": in_attention(0, type="linear"),
    "a block without a type": lambda data: drop(body(data["target"]["layers"][0]), "type"),
    "an activation nobody knows": lambda data: body(data["target"]["layers"][0], 1).update(activation="relu"),
    "norms over heads that are not normed": in_attention(0, whole_norms=True, q_norm=False, k_norm=False),
    "a bias of values that are keys": in_attention(0, bias=True, k_eq_v=True),
    "scores without a scale": in_attention(0, scale=0.0),
    "a drafter that reads a layer without a cache": in_drafter(kv_source=3),
    "a drafter that reads another kind": in_drafter(kv_source=0),
    "a drafter with a cache": in_drafter(kv_source=None),
    "a drafter with another window": in_drafter(window=8),
    "a drafter with wider heads": in_drafter(head_dim=96, rotary=None),
    "a drafter without rotary embeddings": lambda data: data.update(drafter=drafter(data, rotary=[])),
    "a drafter that scores more tokens than there are": lambda data: data.update(
        drafter=drafter(data, target_head=True, candidates=257)
    ),
    "a drafter with a list of tokens and clusters": lambda data: data.update(
        drafter=drafter(data, target_head=True, candidates=64, shortlist={"clusters": 16, "top": 4})
    ),
    "a norm without eps": lambda data: data["target"].update(norm_eps=0.0),
    "an eps that is not a number": lambda data: data["target"].update(norm_eps=float("nan")),
    "an endless softcap": lambda data: data["target"].update(softcap=float("inf")),
    "a softcap below zero": lambda data: data["target"].update(softcap=-30.0),
    "frequencies that are negative": lambda data: data["target"].update(rotary=[[-1.0] * 16, [0.5] * 32]),
    "frequencies beyond the head": lambda data: data["target"]["rotary"][1].append(0.5),
    "frequencies that are endless": lambda data: data["target"]["rotary"][1].__setitem__(0, float("inf")),
    "frequencies that are no numbers": lambda data: data["target"]["rotary"][1].__setitem__(0, float("nan")),
    "rotary embeddings that do not exist": in_attention(0, rotary=2),
    "a rotary embedding of no layer": lambda data: data["target"]["rotary"].append([1.0]),
    "a head that is neither": lambda data: data["target"].update(tied=1),
    "per-layer embeddings that no layer reads": lambda data: data["target"].update(
        per_layer={"width": 32, "vocab_size": 256, "context_factor": 0.1, "table_factor": 4.0, "factor": 0.7}
    ),
    "KV heads that share no query heads": in_attention(0, kv_heads=3),
    "no feed-forward width": lambda data: body(data["target"]["layers"][0], 1).update(width=0),
    "experts without number": lambda data: experts(data, count=0),
    "more experts for a token than there are": lambda data: experts(data, top=9),
    "a shared expert without others": lambda data: body(data["target"]["layers"][0], 1).update(shared=True),
    "a shared expert without rows": share_nothing,
    "experts that are a list": lambda data: body(data["target"]["layers"][0], 1).update(experts=[8, 2, 32]),
    "files is a list": lambda data: data.update(files=[]),
    "a file is a list": lambda data: data.update(files={"target.onnx": [1, "0" * 64]}),
    "a size is true": lambda data: data["files"]["target.onnx"].update(size=True),
    "a hash that is a number": lambda data: data["files"]["target.onnx"].update(sha256=5),
    "a hash that is none": lambda data: data["files"]["target.onnx"].update(sha256="0" * 63),
    "a borrower of another shape": in_attention(2, heads=32, kv_heads=32, head_dim=1, rotary=None),
    "a graph that is no name": lambda data: data["target"].update(graph=["target.onnx"]),
    "a name that is a number": lambda data: data.update(name=3),
    "a context beyond exact positions": lambda data: data["target"].update(context_length=1 << 31),
    "a context without room for a reply": lambda data: shorten(data, 1),
    "a window beyond the context": lambda data: data["target"].update(context_length=8),
    "two windows": in_attention(2, window=8),
    "an infinite eos token": lambda data: data.update(eos_token_ids=[float("inf")]),
    "an eos token outside the vocabulary": lambda data: data.update(eos_token_ids=[1, 256]),
    "a negative bos token": lambda data: data.update(bos_token_id=-1),
    "a bos token that is a word": lambda data: data.update(bos_token_id="<bos>"),
    "a pad token outside the vocabulary": lambda data: data.update(pad_token_id=1 << 40),
    "a version that is a list": lambda data: data["tools"].update(numpy=[2, 0]),
    "a source that is a word": lambda data: data["sources"].update(target="here"),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_manifest(change: object, bundle: Path) -> None:
    edit(bundle, change)
    with pytest.raises(BundleCorruptError, match=r"bundle\.json") as caught:
        Bundle.open(bundle)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b"[" * 200_000, b'{"schema": ' + b"9" * 5000])
def test_a_manifest_that_is_no_json_object(content: bytes, bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=f"^{re.escape(str(bundle))}"):
        Bundle.open(bundle)


def test_a_name_that_is_too_long_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    with pytest.raises(BundleNotFoundError, match="name too long"):
        Bundle.open("x" * 300)


def test_weights_that_may_not_be_read(reference_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporting again, the advice for a damaged file, would not help."""
    opened = Path.open

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.endswith(".data"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    bundle = Bundle.open(reference_bundle)
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(BundleError, match=r"\.data may not be read by this user \(Permission denied\)$"):
        TensorFiles(bundle)
