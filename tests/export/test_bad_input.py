"""A user's mistakes: one clear line each, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle import Bundle
from ondevice.errors import CheckpointError, OndeviceError, PairMismatchError, UsageError
from ondevice_export import data_file, export
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile
from tests.fixtures.tiny_models import save_drafter, save_target

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    save_target(directory / "target", "e2b")
    save_drafter(directory / "drafter", "e2b")
    return directory


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A pair that a test may damage."""
    shutil.copytree(made, tmp_path / "source")
    return tmp_path / "source"


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(path: Path, change: Callable[[dict[str, np.ndarray[Any, Any]]], None]) -> None:
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header alone, the data left as it is."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def rope(**change: Any) -> dict[str, Any]:
    return {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, **change}}


def refuse(source: Path, error: type[OndeviceError], *words: str, **options: Any) -> None:
    """Exporting fails with one line that has these words, and leaves nothing behind."""
    out = source.parent / "out"
    with pytest.raises(error) as caught:
        export(source / "target", out, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert not out.exists()
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_truncated_file(source: Path) -> None:
    path = source / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuse(source, CheckpointError, "truncated", "model.safetensors")


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, (10).to_bytes(8, "little") + b"not a json object"])
def test_no_safetensors_file(source: Path, content: bytes) -> None:
    (source / "target" / "model.safetensors").write_bytes(content)
    refuse(source, CheckpointError, "model.safetensors")


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("dtype", "F12", "F12"),
        ("dtype", ["F32"], "unknown dtype"),
        ("dtype", None, "unknown dtype"),
        ("shape", [1] * 70 + [64], "config.json asks for [64]"),
        ("shape", [63], "spans"),
        ("shape", [1 << 60] * 30_000, "spans"),
        ("shape", [0, 64], "spans"),
        ("shape", [-64], "malformed"),
        ("shape", "64", "malformed"),
        ("data_offsets", [0, 1 << 40], "spans"),
        ("data_offsets", [5], "malformed"),
        ("data_offsets", {"a": 1}, "malformed"),
        ("data_offsets", [1 << 40, (1 << 40) + 256], "truncated"),
    ],
)
def test_bad_header_entry(source: Path, field: str, value: object, word: str) -> None:
    edit_header(source / "target" / "model.safetensors", lambda header: header[NORM].update({field: value}))
    refuse(source, CheckpointError, NORM, word)


def test_overlapping_tensors(source: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        header[NORM]["data_offsets"] = header["model.norm.weight"]["data_offsets"]

    edit_header(source / "target" / "model.safetensors", overlap)
    refuse(source, CheckpointError, "overlaps")


def test_missing_tensor(source: Path) -> None:
    def without_norm(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        del tensors[NORM]

    edit_tensors(source / "target" / "model.safetensors", without_norm)
    refuse(source, CheckpointError, NORM, "missing")


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_position_embeddings", 1 << 31), ("eos_token_id", [1, 1 << 20]), ("bos_token_id", 384)],
)
def test_what_no_bundle_can_hold(source: Path, field: str, value: object) -> None:
    """It would be exported, and then not be loaded."""
    (source / "target" / "generation_config.json").unlink(missing_ok=True)
    edit_json(source / "target" / "config.json", lambda config: config.update({field: value}))
    name = {"eos_token_id": "eos_token_ids[1]"}.get(field, field)
    refuse(source, CheckpointError, name, "a whole number")


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", -1), ("temperature", "warm"), ("suppress_tokens", [384]), ("eos_token_id", "1")]
)
def test_generation_defaults_that_no_load_accepts(source: Path, field: str, value: object) -> None:
    (source / "target" / "generation_config.json").write_text(json.dumps({"do_sample": True, field: value}))
    refuse(source, CheckpointError, "generation_config.json", field, "correct it")


def test_a_window_beyond_the_context_is_the_context(source: Path, tmp_path: Path) -> None:
    edit_json(source / "target" / "config.json", lambda config: config.update(sliding_window=1 << 30))
    target = Bundle.open(export(source / "target", tmp_path / "out")).manifest.target
    assert target.window == target.context_length


def test_misshapen_tensor(source: Path) -> None:
    edit_tensors(
        source / "target" / "model.safetensors", lambda tensors: tensors.update({NORM: np.ones(63, np.float32)})
    )
    refuse(source, CheckpointError, NORM, "[63]", "[64]")


def test_unexplained_tensor(source: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(
        source / "target" / "model.safetensors", lambda tensors: tensors.update({name: np.ones(8, np.float32)})
    )
    refuse(source, CheckpointError, name)


def test_integer_weights(source: Path) -> None:
    edit_tensors(source / "target" / "model.safetensors", lambda tensors: tensors.update({NORM: np.ones(64, np.int64)}))
    refuse(source, CheckpointError, NORM, "I64")


@pytest.mark.parametrize("quantize", ["int4", "int8", "none"])
def test_weights_that_are_not_finite(source: Path, quantize: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def poison(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][3, 5] = np.nan

    edit_tensors(source / "target" / "model.safetensors", poison)
    refuse(source, CheckpointError, name, "NaN", quantize=quantize)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_norms_that_are_not_finite(source: Path, number: float) -> None:
    """A bundle with such numbers cannot be loaded."""

    def damage(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors[NORM] = tensors[NORM].copy()
        tensors[NORM][3] = number

    edit_tensors(source / "target" / "model.safetensors", damage)
    refuse(source, CheckpointError, NORM, "NaN or infinite")


def test_pickled_checkpoint(source: Path) -> None:
    (source / "target" / "model.safetensors").rename(source / "target" / "pytorch_model.bin")
    refuse(source, CheckpointError, "pickled")


def test_a_checkpoint_on_a_disk_that_fails(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle's own disk is not at fault."""
    read = SafetensorsFile.read

    def failing(file: SafetensorsFile, *given: Any) -> bytearray:
        file._file.close()
        file._file = cast(Any, FailingFile())
        return read(file, *given)

    monkeypatch.setattr(SafetensorsFile, "read", failing)
    refuse(source, CheckpointError, "model.safetensors cannot be read: [Errno 5] Input/output error")


class FailingFile:
    def seek(self, offset: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("shard", ["../drafter/model.safetensors", "/etc/passwd", "weights.bin"])
def test_index_that_leaves_the_directory(source: Path, shard: str) -> None:
    (source / "target" / "model.safetensors").rename(source / "target" / "part.safetensors")
    index = {"weight_map": {NORM: shard}}
    (source / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(source, CheckpointError, shard)


def test_shards_are_read_together(source: Path, tmp_path: Path) -> None:
    path = source / "target" / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    path.unlink()
    weight_map = {}
    for number, chosen in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{number}.safetensors"
        save_file({name: tensors[name] for name in chosen}, source / "target" / shard)
        weight_map.update(dict.fromkeys(chosen, shard))
    (source / "target" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert (export(source / "target", tmp_path / "out") / "bundle.json").is_file()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size"),
        ({"enable_moe_block": True, "num_experts": 1 << 20}, "num_experts"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "none"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"num_kv_shared_layers": 6}, "KV-shared"),
        ({"layer_types": [["full_attention"]] * 6}, "layer_types"),
        ({"layer_types": [{}] * 6}, "layer_types"),
        ({"num_hidden_layers": 1 << 40, "layer_types": None}, "num_hidden_layers"),
        ({"vocab_size": 10**400}, "config.json"),
        ({"hidden_size": True}, "hidden_size"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": rope(partial_rotary_factor=1.5)}, "partial_rotary_factor"),
        ({"rope_parameters": rope(partial_rotary_factor=1 << 31)}, "partial_rotary_factor"),
        ({"rope_parameters": rope(rope_type=["proportional"])}, "rope_type"),
        ({"rope_parameters": rope(rope_theta=0)}, "rope_theta"),
        ({"per_layer_config": {"9" * 5000: {}}}, "number of a layer"),
        ({"architectures": [["Gemma4ForCausalLM"]]}, "architecture"),
    ],
)
def test_configuration(source: Path, change: dict[str, Any], word: str) -> None:
    edit_json(source / "target" / "config.json", lambda config: config.update(change))
    refuse(source, CheckpointError, "config.json", word)


def test_configuration_missing_or_broken(source: Path) -> None:
    (source / "target" / "config.json").write_text("{")
    refuse(source, CheckpointError, "config.json")
    (source / "target" / "config.json").unlink()
    refuse(source, CheckpointError, "config.json", "missing")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "5", "\ufeff{}", '{"a": 1' + "0" * 5000 + "}"])
def test_configuration_that_is_no_object(source: Path, content: str) -> None:
    (source / "target" / "config.json").write_text(content, "utf-8")
    refuse(source, CheckpointError, "config.json")


def test_a_header_that_is_nested(source: Path) -> None:
    text = b"[" * 100_000
    (source / "target" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    refuse(source, CheckpointError, "model.safetensors", "damaged safetensors header")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes in directories")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_named_pipe_is_not_waited_for(source: Path, name: str) -> None:
    if name.endswith("index.json"):
        (source / "target" / "model.safetensors").unlink()
    (source / "target" / name).unlink(missing_ok=True)
    os.mkfifo(source / "target" / name)
    refuse(source, CheckpointError, str(source / "target"))


@pytest.mark.parametrize("shard", ["a\0b.safetensors", "\ud800.safetensors", "absent.safetensors"])
def test_a_shard_of_an_impossible_name(source: Path, shard: str) -> None:
    (source / "target" / "model.safetensors").unlink()
    index = {"weight_map": {NORM: shard}}
    (source / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(source, CheckpointError, "safetensors")


@pytest.mark.parametrize("template", ["\ud800", [{"name": ["default"], "template": "x"}, 5], 5, [{"name": "default"}]])
def test_a_template_of_any_kind(source: Path, template: object) -> None:
    (source / "target" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if template == "\ud800":
        refuse(source, CheckpointError, "surrogate")
    else:
        assert not (export(source / "target", source.parent / "out") / "chat_template.jinja").exists()


@pytest.mark.parametrize("out", ["a\0b", "loop/bundle"])
def test_out_that_can_be_no_path(source: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OndeviceError, match=r"cannot be written|could not be written"):
        export(source / "target", tmp_path / out)


def test_vocabularies_differ(source: Path) -> None:
    def shrink(config: dict[str, Any]) -> None:
        config["text_config"]["vocab_size"] = 336
        config["num_centroids"] = 42

    edit_json(source / "drafter" / "config.json", shrink)
    refuse(source, PairMismatchError, "336", "384")


def test_a_drafter_with_experts(source: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    edit_json(source / "drafter" / "config.json", lambda config: config["text_config"].update(experts))
    refuse(source, CheckpointError, "a drafter with experts")


def test_backbone_differs(source: Path) -> None:
    edit_json(source / "drafter" / "config.json", lambda config: config.update(backbone_hidden_size=128))
    refuse(source, PairMismatchError, "128", "64", "--drafter none")


def test_shared_heads_differ(source: Path) -> None:
    edit_json(source / "drafter" / "config.json", lambda config: config["text_config"].update(head_dim=64))
    refuse(source, PairMismatchError, "drafter layer 0")


def test_token_ordering_that_is_no_permutation(source: Path) -> None:
    def repeat(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["masked_embedding.token_ordering"] = np.zeros(384, np.int64)

    edit_tensors(source / "drafter" / "model.safetensors", repeat)
    refuse(source, CheckpointError, "token_ordering")


@pytest.mark.parametrize("acceptance", [0, 1.5, "0.4", True])
def test_acceptance_of_a_drafter(source: Path, acceptance: object) -> None:
    edit_json(source / "drafter" / "config.json", lambda config: config.update(acceptance=acceptance))
    refuse(source, CheckpointError, "acceptance")


@pytest.mark.parametrize("ids", [[3, 5, 3], [3, 5, 384], [-1, 3, 5], [3, 5]])
def test_head_tokens_of_a_drafter(source: Path, ids: list[int]) -> None:
    """A repeated token, one beyond the vocabulary, a negative one, and too few."""
    path = source / "drafter" / "config.json"
    edit_json(path, lambda config: config.update(num_head_tokens=3))
    refuse(source, CheckpointError, "num_head_tokens and use_ordered_embeddings")
    edit_json(path, lambda config: config.update(use_ordered_embeddings=False))

    def listed(tensors: dict[str, Any]) -> None:
        del tensors["model.embed_tokens.weight"]
        tensors["masked_embedding.head_tokens"] = np.array(ids, np.int32)

    edit_tensors(source / "drafter" / "model.safetensors", listed)
    refuse(source, CheckpointError, "masked_embedding.head_tokens")


def test_drafter_passed_as_target(source: Path) -> None:
    shutil.rmtree(source / "target")
    (source / "drafter").rename(source / "target")
    refuse(source, CheckpointError, "--drafter")


def test_width_that_is_no_multiple_of_the_block(source: Path) -> None:
    save_target(source / "target", "e2b", intermediate_size=72)
    refuse(source, CheckpointError, "down_proj", "72", "32")


@pytest.mark.parametrize("options", [{"quantize": "int3"}, {"head_bits": 6}])
def test_options(source: Path, options: dict[str, Any]) -> None:
    refuse(source, UsageError, str(next(iter(options.values()))), **options)


def test_disk_full(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data_file.DataFile, "write", full)
    refuse(source, OndeviceError, "disk is full")


def test_too_little_room_is_seen_before_the_work(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    refuse(source, OndeviceError, "has 0.00 GB free")


def test_interrupt_leaves_the_old_bundle(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = export(source / "target", tmp_path / "bundles" / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_file.DataFile, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export(source / "target", out, quantize="int8")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]
    export(source / "target", out, quantize="int8")
    assert json.loads((out / "bundle.json").read_text())["quantization"]["weights"] == "int8"
    assert list(out.parent.iterdir()) == [out]


def test_out_that_is_no_bundle(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("do not lose this")
    with pytest.raises(UsageError, match="neither a bundle nor empty"):
        export(source / "target", out)
    assert (out / "thesis.txt").read_text() == "do not lose this"
    with pytest.raises(UsageError, match="not a directory"):
        export(source / "target", out / "thesis.txt")


@pytest.mark.parametrize("place", ["source/target", "source/target/bundle", "source/drafter", "source"])
def test_out_and_source_in_each_other(source: Path, tmp_path: Path, place: str) -> None:
    before = sorted(path.relative_to(source) for path in source.rglob("*"))
    with pytest.raises(UsageError, match="choose another --out"):
        export(source / "target", tmp_path / place)
    assert sorted(path.relative_to(source) for path in source.rglob("*")) == before
