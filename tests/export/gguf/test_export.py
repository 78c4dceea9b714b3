"""Exports of GGUF files: the bundle has the file's weights, runs on both engines, and says where it came from."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

import ondevice
from ondevice.bundle import Bundle
from ondevice.bundle_format.tensor_table import Tensor
from ondevice.bundle_format.weight_format import INT4, INT4_AFFINE, INT8
from ondevice.cli.main import main
from ondevice.engines.choice import EngineName
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Rows, TokenTree
from ondevice.errors import CheckpointError, PairMismatchError, UsageError
from ondevice_export import export
from ondevice_export.checkpoint.source import default_name, locate, locate_drafter
from ondevice_export.gguf.checkpoint import GgufCheckpoint
from tests.conftest import ENGINES
from tests.export.gguf.files_made import add_vocabulary, gemma4_divisors, quantised, random_model, state_of, write_gguf
from tests.export.logits import logits_of_both
from tests.fixtures.hub import serving
from tests.fixtures.mtp_layers import TorchLayer, add_mtp_layer, random_layer
from tests.fixtures.published import published
from tests.fixtures.tiny_drafters import save_drafter as save_family_drafter
from tests.fixtures.tiny_models import save_drafter, save_target

SIZES = {"vocab_size": 384, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def _llama(**fields: Any) -> Any:
    config = transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 256, **fields}
    )
    return random_model(transformers.LlamaForCausalLM(config))


def _tokens(writer: Any) -> None:
    """A vocabulary of bytes, with control tokens and a template."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    tokens = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", *letters]
    kinds = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * len(letters)
    merges = [f"{letters[0]} {letters[1]}"]
    tokens.append(letters[0] + letters[1])
    kinds.append(gguf.TokenType.NORMAL)
    add_vocabulary(writer, tokens=tokens, kinds=kinds, model="gpt2", pre="gpt-2", merges=merges, bos=0, eos=1)
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    named = {"default": plain, "tool_use": f"{plain}!"}
    writer.add_chat_template([{"name": name, "template": template} for name, template in named.items()])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory for files of a model, and the model."""
    return tmp_path_factory.mktemp("llama"), _llama()


def _file(llama: tuple[Path, Any], kind: Kind) -> Path:
    directory, model = llama
    path = directory / f"model-{kind.name}.gguf"
    if not path.exists():
        write_gguf(path, "llama", model.config, state_of(model), kind=kind, more=_tokens)
    return path


def _stored(bundle: Bundle, name: str) -> tuple[Tensor, np.ndarray]:
    """A matrix of the target as the bundle has it."""
    table = bundle.manifest.tensors["target.onnx"]
    tensor, data = table.tensors[name], np.fromfile(bundle.path / table.file, np.uint8)
    form = tensor.weight_format
    codes = form.unpack(data[tensor.offset : tensor.offset + tensor.bytes]).reshape(*tensor.scale_shape, -1)

    def factors(part: Any) -> np.ndarray:
        return data[part.offset : part.offset + part.bytes].view(part.dtype).reshape(*tensor.scale_shape, 1)

    weights = form.levels[codes] * factors(tensor.scales)
    if tensor.minimums is not None:
        weights = weights + factors(tensor.minimums)
    return tensor, weights.reshape(tensor.shape)


@pytest.mark.parametrize(
    ("kind", "form", "affine"),
    [
        ("Q4_0", "int4", False),
        ("Q4_1", "int4", True),
        ("IQ4_NL", "int4-table", False),
        ("MXFP4", "mxfp4", False),
        ("Q5_0", "int8", False),
        ("Q8_0", "int8", False),
    ],
)
def test_the_default_keeps_every_weight(
    llama: tuple[Path, Any], tmp_path: Path, kind: str, form: str, affine: bool
) -> None:
    path = _file(llama, Kind[kind])
    bundle = Bundle.open(export(path, tmp_path / "bundle"))
    state = state_of(llama[1])
    for name in ("layers.1.self_attn.q_proj", "layers.0.mlp.down_proj", "embed_tokens"):
        tensor, weights = _stored(bundle, f"{name}.weight")
        assert (tensor.format, tensor.minimums is not None) == (form, affine)
        np.testing.assert_array_equal(weights, quantised(state[f"model.{name}.weight"], Kind[kind]))
    manifest = bundle.manifest
    assert (manifest.quantization.weights, manifest.quantization.head_bits) == ("keep", tensor.weight_format.bits)
    assert manifest.weights == f"keep ({tensor.weight_format.name})"
    source = manifest.sources["target"]
    assert (source.id, source.file) == (path.name, path.name)
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source.types == {"F32": 5, kind: 16}
    assert str(path.parent) not in (bundle.path / "bundle.json").read_text()


def test_products_of_scales_are_rounded_to_fp16(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """Scales of IQ4_XS have up to 16 bits; codes are kept."""
    bundle = Bundle.open(export(_file(llama, Kind.IQ4_XS), tmp_path / "bundle"))
    for name in ("layers.1.mlp.up_proj", "embed_tokens"):
        tensor, weights = _stored(bundle, f"{name}.weight")
        assert tensor.format == "int4-table"
        expected = quantised(state_of(llama[1])[f"model.{name}.weight"], Kind.IQ4_XS)
        assert (np.abs(weights - expected) <= np.abs(expected) * 2.0**-11).all()


@pytest.mark.parametrize("kind", ["Q5_1", "BF16", "F16", "F32"])
def test_types_without_a_format_become_int8(llama: tuple[Path, Any], tmp_path: Path, kind: str) -> None:
    bundle = Bundle.open(export(_file(llama, Kind[kind]), tmp_path / "bundle"))
    tensor, weights = _stored(bundle, "layers.1.self_attn.k_proj.weight")
    assert tensor.format == "int8"
    expected = gguf.dequantize(
        gguf.quantize(state_of(llama[1])["model.layers.1.self_attn.k_proj.weight"], Kind[kind]), Kind[kind]
    )
    assert np.square(weights - expected).sum() < 1e-4 * np.square(expected).sum()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "Q8_0"])
def test_both_engines_run_it_with_its_tokenizer(
    llama: tuple[Path, Any], tmp_path: Path, kind: str, engine: EngineName, kernels: None
) -> None:
    path = _file(llama, Kind[kind])
    bundle = export(path, tmp_path / "bundle")
    with_tools, _, without = (bundle / "chat_template.jinja").read_text().partition("!{% else %}")
    assert with_tools.startswith("{% if tools is not none %}{% for m")
    assert without.startswith("{% for m")
    with ondevice.load(bundle, engine=engine, threads=1) as model:
        prompt = [{"role": "user", "content": "abcabcabc"}]
        plain = model.generate(prompt, max_new_tokens=16, temperature=0.0, drafter="none")
        drafted = model.generate(prompt, max_new_tokens=16, temperature=0.0, drafter="ngram")
        assert plain.token_ids == drafted.token_ids
        assert plain.token_ids


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "Q8_0"])
def test_a_drafter_scores_with_the_rows_of_the_file(
    llama: tuple[Path, Any], tmp_path: Path, kind: str, engine: EngineName, kernels: None
) -> None:
    """Its logits are those of the rows of the file's head, up to the rounding of activations."""
    path = _file(llama, Kind[kind])
    llama[1].save_pretrained(tmp_path / "model")
    save_family_drafter(tmp_path / "drafter", "smollm2", tmp_path / "model")
    bundle = export(path, tmp_path / "bundle", drafter=str(tmp_path / "drafter"))
    rows = _stored(Bundle.open(bundle), "lm_head.weight")[1]
    with ondevice.load(bundle, engine=engine, threads=1) as model:
        session = model.engine.open_session()
        model.engine.forward([Rows(session, TokenTree.chain([3, 5, 7]), [])])
        session.commit(range(3))
        step = session.draft_step(9, np.linspace(-1, 1, rows.shape[1], dtype=np.float32))
        expected = rows[step.candidates] @ step.hidden
        assert len(expected) == 100
        assert np.abs(step.logits - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_of_several_types(tmp_path: Path, engine: EngineName, kernels: None) -> None:
    """As in a Q4_K_M file: queries, keys and values, or gate and up, differ in bits and minimums."""
    model = _llama()
    kinds = {"v_proj": Kind.Q8_0, "k_proj": Kind.Q5_1, "up_proj": Kind.Q4_0, "down_proj": Kind.BF16, "embed": Kind.Q4_1}

    def kind(name: str) -> Kind:
        return next((kind for part, kind in kinds.items() if part in name), Kind.Q4_1)

    path = write_gguf(tmp_path / "mixed.gguf", "llama", model.config, state_of(model), kind=kind, more=_tokens)
    forms = {}
    bundle = Bundle.open(export(path, tmp_path / "bundle"))
    for name in ("q_proj", "k_proj", "v_proj"):
        tensor = _stored(bundle, f"layers.0.self_attn.{name}.weight")[0]
        forms[name] = (tensor.format, tensor.minimums is not None)
    assert forms == {"q_proj": ("int4", True), "k_proj": ("int8", False), "v_proj": ("int8", False)}
    with GgufCheckpoint(path) as file:
        weights = {name: torch.tensor(file.read(name)) for name in file.names}
    model.load_state_dict(weights, strict=False)
    expected, own = logits_of_both(model, bundle, engine)
    np.testing.assert_allclose(own, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("others", "of_up"), [(Kind.Q4_1, Kind.Q4_1), (Kind.Q4_1, Kind.Q8_0), (Kind.MXFP4,) * 2])
def test_experts_of_quantised_files(
    tmp_path: Path, others: Kind, of_up: Kind, engine: EngineName, kernels: None
) -> None:
    """Gate and up of one type are kept; of two types, they are one matrix of the bundle's own format."""
    sizes = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
    fields = {**SIZES, **sizes, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    model = random_model(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields)))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(0.0, 1.0 if name.endswith("mlp.gate.weight") else 0.1)

    def kind(name: str) -> Kind:
        return of_up if "up_proj" in name else others

    path = write_gguf(tmp_path / "moe.gguf", "qwen3moe", model.config, state_of(model), kind=kind, more=_tokens)
    bundle = Bundle.open(export(path, tmp_path / "bundle"))
    with GgufCheckpoint(path) as file:
        weights = {name: file.read(name) for name in file.names}
        assert (file.kept_format("model.layers.0.mlp.experts.gate_up_proj") is None) == (of_up is Kind.Q8_0)
        assert file.types()[others.name] == (16 if of_up is others else 14)
    tensor, found = _stored(bundle, "layers.1.experts.gate_up_proj")
    form = {Kind.Q4_1: "int4", Kind.MXFP4: "mxfp4", Kind.Q8_0: "int8"}[of_up]
    assert (tensor.format, tensor.shape) == (form, (5, 128, 128))
    expected = weights["model.layers.1.mlp.experts.gate_up_proj"].reshape(found.shape)
    close = {"atol": 0.01} if of_up is Kind.Q8_0 else {"rtol": 0}
    np.testing.assert_allclose(found, expected, **close)
    model.load_state_dict({name: torch.tensor(values) for name, values in weights.items()}, strict=False)
    logits, own = logits_of_both(model, bundle, engine)
    near = np.abs(own - logits).max(-1) < 0.06 * np.abs(logits).max()
    assert near.mean() > 0.9, "of all rows but those where rounding chooses another expert"


def _phi(short_factor: list[float], long_factor: float) -> Any:
    """A model with `longrope` from 64 tokens on, of whose heads three quarters turn."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": short_factor, "long_factor": [long_factor] * 12}
    fields = {**SIZES, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256, "pad_token_id": 0}
    config = transformers.Phi3Config(**fields, original_max_position_embeddings=64, rope_parameters=rope)
    model = random_model(transformers.Phi3ForCausalLM(config))
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0.0, 0.15)
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_rows_of_joined_matrices_are_kept_in_another_order(
    tmp_path: Path, kind: str, engine: EngineName, kernels: None
) -> None:
    """Three quarters of a head turn, as in Phi-4-mini; the factor of cosines does not reach the rest of it."""
    model = _phi([1 + pair / 8 for pair in range(12)], 4.0)
    path = write_gguf(tmp_path / "phi.gguf", "phi3", model.config, state_of(model), kind=Kind[kind], more=_tokens)
    bundle = Bundle.open(export(path, tmp_path / "bundle"))
    with GgufCheckpoint(path) as file:
        weights = {name: torch.tensor(file.read(name)) for name in file.names}
    model.load_state_dict(weights, strict=False)
    tensor, found = _stored(bundle, "layers.1.self_attn.q_proj.weight")
    joined = weights["model.layers.1.self_attn.qkv_proj.weight"].numpy()
    assert (tensor.format, tensor.shape) == ("int4" if kind == "Q4_1" else "int8", (128, 128))
    squared = 1 + np.log(256 / 64) / np.log(64)
    np.testing.assert_array_equal(found[32:44], joined[32:44])
    np.testing.assert_allclose(found[44:48], joined[56:60] / squared, atol=1e-3)
    np.testing.assert_array_equal(found[48:60], joined[44:56])
    expected, own = logits_of_both(model, bundle, engine)
    np.testing.assert_allclose(own, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("engine", ENGINES)
def test_neighbours_are_kept_in_another_order(tmp_path: Path, engine: EngineName, kernels: None) -> None:
    """Half of a head turns, as in GLM-4; the biases of queries and keys follow the rows."""
    fields = {**SIZES, "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 256}
    model = random_model(transformers.Glm4ForCausalLM(transformers.Glm4Config(**fields, pad_token_id=0)))
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0.0, 0.15)
    path = write_gguf(tmp_path / "glm.gguf", "glm4", model.config, state_of(model), kind=Kind.Q4_1, more=_tokens)
    bundle = Bundle.open(export(path, tmp_path / "bundle"))
    with GgufCheckpoint(path) as file:
        weights = {name: torch.tensor(file.read(name)) for name in file.names}
    model.load_state_dict(weights, strict=False)
    tensor, found = _stored(bundle, "layers.1.self_attn.k_proj.weight")
    order = [*range(0, 16, 2), *range(16, 24), *range(1, 16, 2), *range(24, 32)]
    assert (tensor.format, tensor.shape) == ("int4", (64, 128))
    np.testing.assert_array_equal(found[32:], weights["model.layers.1.self_attn.k_proj.weight"][32:][order])
    expected, own = logits_of_both(model, bundle, engine)
    np.testing.assert_allclose(own, expected, atol=0.05 * np.abs(expected).max())


_DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


_SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("engine", ENGINES)
def test_value_heads_in_the_order_of_files(
    tmp_path: Path, engine: EngineName, architecture: str, kernels: None
) -> None:
    """Three value heads share a key head; layers that draft are left out."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 4, "max_position_embeddings": 256}
    config: Any = transformers.Qwen3_5TextConfig(**sizes, **_DELTA, linear_num_value_heads=6)
    model = transformers.Qwen3_5ForCausalLM(config)
    if architecture == "qwen35moe":
        config = transformers.Qwen3_5MoeTextConfig(**sizes, **_DELTA, **_SHARED, linear_num_value_heads=6)
        model = transformers.Qwen3_5MoeForCausalLM(config)
        for layer in model.model.layers:  # spread scores of experts are no near-ties
            torch.nn.init.normal_(layer.mlp.gate.weight, 0.0, 0.5)
            torch.nn.init.normal_(layer.mlp.shared_expert_gate.weight, 0.0, 0.3)
    model = random_model(model)

    def more(writer: Any) -> None:
        _tokens(writer)
        writer.add_block_count(5)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((128, 256), np.float32))
        writer.add_tensor("blk.4.attn_q.weight", np.zeros((512, 128), np.float32))

    path = write_gguf(tmp_path / "qwen.gguf", architecture, config, state_of(model), more=more)
    weights, share = ("none", 1e-5) if engine == "ort" else ("int8", 0.05)
    bundle = Bundle.open(export(path, tmp_path / "bundle", quantize=weights, drafter="none", heads="none"))
    expected, own = logits_of_both(model, bundle, engine)
    np.testing.assert_allclose(own, expected, atol=share * np.abs(expected).max())


def _mtp_layer(writer: Any, layer: TorchLayer, block: int, kind: Kind = Kind.F32) -> None:
    """Write an MTP layer of Qwen3.5 as `_QwenMtpMixin` of llama.cpp's conversion names and changes its tensors."""
    own = {"fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm"}
    own |= {"norm": "nextn.shared_head_norm", "layers.0.input_layernorm": "attn_norm"}
    own |= {"layers.0.post_attention_layernorm": "post_attention_norm"}
    own |= {f"layers.0.self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    own |= {f"layers.0.self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
    for prefix, ending in (("", ""), ("shared_expert.", "_shexp"), ("experts.", "_exps")):
        own |= {f"layers.0.mlp.{prefix}{part}_proj": f"ffn_{part}{ending}" for part in ("gate", "up", "down")}
    own |= {"layers.0.mlp.gate": "ffn_gate_inp", "layers.0.mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
    own["layers.0.self_attn.o_proj"] = "attn_output"
    writer.add_block_count(block + 1)
    writer.add_nextn_predict_layers(1)
    tensors = {name.removesuffix(".weight"): value.numpy() for name, value in layer.state_dict().items()}
    if (joined := tensors.pop("layers.0.mlp.experts.gate_up_proj", None)) is not None:
        for part, half in zip(("gate", "up"), np.split(joined, 2, axis=1), strict=True):
            tensors[f"layers.0.mlp.experts.{part}_proj"] = half
    for name, data in tensors.items():
        file_name = f"blk.{block}.{own[name]}.weight"
        if data.ndim == 1:
            writer.add_tensor(file_name, data + np.float32(1))
        elif "_inp" in file_name:
            writer.add_tensor(file_name, data.squeeze())
        elif kind is Kind.F32:
            writer.add_tensor(file_name, data)
        else:
            writer.add_tensor(file_name, gguf.quantize(data, kind), raw_dtype=kind)


_CLASSES = {
    "qwen35": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen35moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
}


def _with_mtp_layer(architecture: str) -> tuple[Any, TorchLayer]:
    fields = {**SIZES, **_DELTA, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 4}
    fields |= {} if architecture == "qwen35" else _SHARED
    configuration, kind = _CLASSES[architecture]
    config: Any = configuration(**fields, linear_num_value_heads=2, max_position_embeddings=256)
    model = random_model(kind(config))
    return model, random_layer(model)


@pytest.mark.parametrize("architecture", _CLASSES)
def test_the_mtp_layer_of_a_float_file_is_that_of_its_safetensors(architecture: str, tmp_path: Path) -> None:
    model, layer = _with_mtp_layer(architecture)
    model.save_pretrained(tmp_path / "hub")
    add_mtp_layer(tmp_path / "hub", model)
    more = partial(_mtp_layer, layer=layer, block=4)
    path = write_gguf(tmp_path / "model.gguf", architecture, model.config, state_of(model), more=more)
    own, hub = (
        export(source, tmp_path / f"{source.stem}-bundle", quantize="none") for source in (path, tmp_path / "hub")
    )
    for name in ("target.onnx", "target.onnx.data", "drafter.onnx", "drafter.onnx.data"):
        assert (own / name).read_bytes() == (hub / name).read_bytes(), name
    found, expected = (Bundle.open(bundle).manifest for bundle in (own, hub))
    assert (found.target, found.drafter) == (expected.target, expected.drafter)
    assert found.drafter is not None


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("qwen35", Kind.Q8_0), ("qwen35", Kind.Q4_0), ("qwen35", Kind.Q4_1), ("qwen35moe", Kind.Q4_0)],
)
def test_the_mtp_layer_of_a_quantised_file_keeps_its_blocks(
    architecture: str, kind: Kind, tmp_path: Path, kernels: None
) -> None:
    """Both halves of its joined matrix have the file's codes, and drafts change no token."""
    model, layer = _with_mtp_layer(architecture)

    def more(writer: Any) -> None:
        _tokens(writer)
        _mtp_layer(writer, layer, 4, kind)

    path = write_gguf(tmp_path / "model.gguf", architecture, model.config, state_of(model), kind=kind, more=more)
    kept, floats = (Bundle.open(export(path, tmp_path / way, quantize=way)) for way in ("keep", "none"))
    whole = gguf.dequantize(gguf.quantize(layer.fc.weight.detach().numpy(), kind), kind)
    for name, half in zip(("embedding", "hidden"), np.split(whole, 2, axis=1), strict=True):
        table = floats.manifest.tensors["target.onnx"].tensors[f"mtp.{name}_projection.weight"]
        with (floats.path / "target.onnx.data").open("rb") as file:
            file.seek(table.offset)
            np.testing.assert_array_equal(np.frombuffer(file.read(table.bytes), np.float32).reshape(half.shape), half)
        form = kept.manifest.tensors["target.onnx"].tensors[f"mtp.{name}_projection.weight"].weight_format
        assert form == {Kind.Q8_0: INT8, Kind.Q4_0: INT4, Kind.Q4_1: INT4_AFFINE}[kind]
    steps = []
    for bundle in (kept, floats):
        engine = OrtEngine(bundle, threads=1)
        session = engine.open_session()
        engine.forward([Rows(session, TokenTree.chain([3, 5, 7, 9]), [3])])
        session.commit(range(4))
        steps.append(session.draft_step(11, np.linspace(-1, 1, 64, dtype=np.float32)).hidden.copy())
        engine.close()
    assert np.abs(steps[0] - steps[1]).max() < 0.05 * np.abs(steps[1]).max()
    with ondevice.load(kept.path, engine="simd", threads=1) as loaded:
        own: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.7, "seed": 5, "logit_bias": {7: 90.0, 9: 90.0}}
        plain = loaded.generate([3, 5, 7, 9], drafter="none", **own)
        drafted = loaded.generate([3, 5, 7, 9], drafter="mtp", num_assistant_tokens_schedule="constant", **own)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_tokens > 0


_FURTHER_FIELDS: dict[str, dict[str, Any]] = {
    "ernie4_5-moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 2},
    "qwen35": {**_DELTA, "num_hidden_layers": 8, "linear_num_value_heads": 2},
    "qwen35moe": {**_DELTA, **_SHARED, "num_hidden_layers": 8, "linear_num_value_heads": 2},
    "qwen3next": {**_DELTA, **_SHARED, "num_hidden_layers": 4, "linear_num_value_heads": 6},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "exaone4": {"sliding_window": 16},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "olmoe": {"hidden_size": 128, "num_experts": 6, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": 2},
    "qwen2moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "olmo2": {
        "sliding_window": 16,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "chatglm": {"eos_token_id": 2, "pad_token_id": None, "rms_norm_eps": 1e-6},
    "glm4": {"eos_token_id": 2, "pad_token_id": None, "rms_norm_eps": 1e-6},
}


@pytest.mark.parametrize(
    ("architecture", "context"),
    [
        *((each, None) for each in ("llama", "granite", "mistral3", "qwen2", "qwen3", "qwen3moe", "gpt-oss")),
        *((each, None) for each in ("phi3", "gemma3", "lfm2", "lfm2moe", "exaone4", "seed_oss", "chatglm")),
        *((each, None) for each in ("glm4", "olmoe", "olmo2", "gemma2", "qwen2moe")),
        *(
            (each, None)
            for each in ("ernie4_5", "ernie4_5-moe", "granitemoe", "gemma", "qwen35", "qwen35moe", "qwen3next")
        ),
        ("phi3", 200),
    ],
)
def test_a_float_file_gives_the_bundle_of_its_safetensors(
    tmp_path: Path, architecture: str, context: int | None
) -> None:
    """Weights and graph are the same bytes; the norms of Gemma have their 1 added before or after."""
    classes = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig),
        "granitemoe": (transformers.GraniteMoeForCausalLM, transformers.GraniteMoeConfig),
        "gpt-oss": (transformers.GptOssForCausalLM, transformers.GptOssConfig),
        "mistral3": (transformers.Ministral3ForCausalLM, transformers.Ministral3Config),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "qwen3moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig),
        "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config),
        "gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig),
        "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config),
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
        "lfm2": (transformers.Lfm2ForCausalLM, transformers.Lfm2Config),
        "lfm2moe": (transformers.Lfm2MoeForCausalLM, transformers.Lfm2MoeConfig),
        "qwen35": (transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig),
        "qwen35moe": (transformers.Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeTextConfig),
        "qwen3next": (transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig),
        "exaone4": (transformers.Exaone4ForCausalLM, transformers.Exaone4Config),
        "olmoe": (transformers.OlmoeForCausalLM, transformers.OlmoeConfig),
        "qwen2moe": (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig),
        "olmo2": (transformers.Olmo3ForCausalLM, transformers.Olmo3Config),
        "seed_oss": (transformers.SeedOssForCausalLM, transformers.SeedOssConfig),
        "chatglm": (transformers.GlmForCausalLM, transformers.GlmConfig),
        "glm4": (transformers.Glm4ForCausalLM, transformers.Glm4Config),
        "ernie4_5": (transformers.Ernie4_5ForCausalLM, transformers.Ernie4_5Config),
        "ernie4_5-moe": (transformers.Ernie4_5_MoeForCausalLM, transformers.Ernie4_5_MoeConfig),
    }
    made, configured = classes[architecture]
    fields: dict[str, Any] = {**SIZES, "hidden_size": 64, "num_hidden_layers": 7, "max_position_embeddings": 256}
    if architecture == "mistral3":
        rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64}
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        fields |= {"rope_parameters": rope, "rms_norm_eps": 1e-6}
    if architecture == "phi3":
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
        fields |= {
            "hidden_size": 128,
            "original_max_position_embeddings": 4,  # the factor of cosines is 2, exact in a file's float32
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            "rope_parameters": {
                **rope,
                "short_factor": [1 + pair / 8 for pair in range(12)],
                "long_factor": [4.0] * 12,
            },
        }
    if architecture != "qwen2":
        fields["head_dim"] = 32
    if architecture.startswith("granite"):
        fields |= {"hidden_size": 128, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        fields |= {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
    if architecture == "gpt-oss":
        rope = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
        fields |= {"rope_parameters": {**rope, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}
        fields |= {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16}
    if architecture == "qwen3moe":
        sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        fields |= {**sizes, "norm_topk_prob": True, "bos_token_id": None, "eos_token_id": None}
    if architecture.startswith("lfm2"):
        kinds = ["conv", "conv", "full_attention", "conv", "full_attention", "conv", "conv"]
        fields |= {"hidden_size": 128, "layer_types": kinds, "block_auto_adjust_ff_dim": False}
    if architecture == "lfm2moe":
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    fields |= _FURTHER_FIELDS.get(architecture, {})
    if architecture == "gemma3":
        fields |= {"sliding_window": 16, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-6}
    model = random_model(made(configured(**fields)))
    model.save_pretrained(tmp_path / "hub")
    path = write_gguf(tmp_path / "model.gguf", architecture, model.config, state_of(model))
    options: dict[str, Any] = {"quantize": "none", "drafter": "none", "heads": "none", "context": context}
    own = export(path, tmp_path / "own", **options)
    hub = export(tmp_path / "hub", tmp_path / "hub-bundle", **options)
    for name in ("target.onnx", "target.onnx.data"):
        assert (own / name).read_bytes() == (hub / name).read_bytes(), name
    found, expected = (Bundle.open(bundle).manifest for bundle in (own, hub))
    assert found.target == expected.target
    assert found.family == expected.family
    if context is not None:  # long texts have frequencies of their own
        assert found.target.context_length == context
        logits, of_bundle = logits_of_both(model, Bundle.open(own), "ort")
        np.testing.assert_allclose(of_bundle, logits, atol=1e-4)


def test_a_llama_file_with_experts_is_mixtral(tmp_path: Path) -> None:
    fields = {**SIZES, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = transformers.MixtralConfig(**fields, num_local_experts=6, rms_norm_eps=1e-6)
    model = random_model(transformers.MixtralForCausalLM(config))
    model.save_pretrained(tmp_path / "hub")
    path = write_gguf(tmp_path / "model.gguf", "llama", model.config, state_of(model))
    own, hub = (export(each, tmp_path / f"of-{each.name}", quantize="none") for each in (path, tmp_path / "hub"))
    assert (own / "target.onnx.data").read_bytes() == (hub / "target.onnx.data").read_bytes()
    found, expected = (Bundle.open(bundle).manifest for bundle in (own, hub))
    assert found.target == expected.target
    assert found.family == "mixtral"


def test_projections_of_qwen3_next_that_conversions_have_separated(tmp_path: Path) -> None:
    """Newer conversions have queries, keys and values of all heads in one matrix, and z in another."""
    fields = {**SIZES, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 256}
    config = transformers.Qwen3NextConfig(**fields, **_FURTHER_FIELDS["qwen3next"])
    model = random_model(transformers.Qwen3NextForCausalLM(config))
    state = state_of(model)
    parts = np.cumsum([32, 32, 3 * 32])
    separated: dict[str, Any] = {}
    for name, values in state.items():
        if name.endswith("in_proj_qkvz.weight"):
            *qkv, z = (each.reshape(-1, 64) for each in np.split(values.reshape(2, -1, 64), parts, axis=1))
            separated[name.replace("qkvz", "qkv")] = np.concatenate(qkv)
            separated[name.replace("qkvz", "z")] = z
        else:
            separated[name] = values
    options: dict[str, Any] = {"quantize": "none", "drafter": "none", "heads": "none"}
    bundles = [
        export(write_gguf(tmp_path / f"{number}.gguf", "qwen3next", config, each), tmp_path / f"{number}", **options)
        for number, each in enumerate((state, separated))
    ]
    one, other = ((bundle / "target.onnx.data").read_bytes() for bundle in bundles)
    assert one == other
    expected, own = logits_of_both(model, Bundle.open(bundles[1]), "ort")
    np.testing.assert_allclose(own, expected, atol=1e-4)


def test_a_bundle_of_long_texts_is_compared_with_those_of_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference has the frequencies of the bundle; with those of short texts it would be another model."""
    model = _phi([1.0] * 12, 8.0)
    path = write_gguf(tmp_path / "phi.gguf", "phi3", model.config, state_of(model), more=_tokens)
    (tmp_path / "text").write_text("a text of some words, " * 20)
    for context in (32, 200):
        bundle = export(path, tmp_path / "bundle", quantize="none", context=context)
        words = ["check", bundle, "--against", path, "--text", tmp_path / "text", "--json"]
        assert main([str(word) for word in words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kl"]["value"] < 1e-7
        assert found["same_top"]["value"] == 1


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_a_gemma_4_pair(tmp_path: Path, family: str) -> None:
    """Target and drafter are those of the safetensors; token clusters are not in a GGUF file."""
    target, drafter = save_target(tmp_path / "target", family), save_drafter(tmp_path / "drafter", family)
    files = []
    for name, model in (("gemma4", target), ("gemma4-assistant", drafter)):
        config = model.config.get_text_config()
        state = {key: values for key, values in state_of(model).items() if not key.startswith("masked_embedding")}

        def more(writer: Any) -> None:
            writer.add_uint32("gemma4-assistant.embedding_length_out", 64)

        options: dict[str, Any] = {"divisors": gemma4_divisors(config), "more": more, "names_of": "gemma4"}
        files.append(write_gguf(tmp_path / f"{name}.gguf", name, config, state, **options))
    own = export(files[0], tmp_path / "own", drafter=str(files[1]), quantize="none")
    hub = export(tmp_path / "target", tmp_path / "hub", heads="none", quantize="none")
    for name in (
        "target.onnx",
        "target.onnx.data",
        *(["drafter.onnx", "drafter.onnx.data"] if family == "26b" else []),
    ):
        assert (own / name).read_bytes() == (hub / name).read_bytes(), name
    found = Bundle.open(own).manifest.drafter
    assert found is not None
    assert found.shortlist is None
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(files[1].read_bytes().replace(b"_length_out\x04\0\0\0\x40", b"_length_out\x04\0\0\0\x20"))
    with pytest.raises(PairMismatchError, match="hidden size"):
        export(files[0], tmp_path / "pair", drafter=str(wrong))


def test_rounding_a_file_to_fewer_bits_says_what_it_costs(llama: tuple[Path, Any], tmp_path: Path) -> None:
    notes: list[str] = []

    def noted(kind: Kind, quantize: str) -> list[str]:
        notes.clear()
        export(_file(llama, kind), tmp_path / "bundle", drafter="none", quantize=quantize, note=notes.append)
        return [note for note in notes if "second time" in note]

    assert "16 of 16 matrices are rounded to 4 bits a second time" in noted(Kind.Q8_0, "int4")[0]
    assert noted(Kind.Q4_0, "int4") == noted(Kind.MXFP4, "int4") == []
    assert noted(Kind.Q8_0, "int8") == []
    assert noted(Kind.F32, "int4") == noted(Kind.BF16, "int4") == []


def test_options_that_contradict_a_file(llama: tuple[Path, Any], tmp_path: Path) -> None:
    path = _file(llama, Kind.Q8_0)
    with pytest.raises(UsageError, match="--head-bits needs --quantize"):
        export(path, tmp_path / "bundle", head_bits=4)
    with pytest.raises(UsageError, match="contradict"):
        export(path, tmp_path / "bundle", quantize="keep", head_bits=4)
    save_target(tmp_path / "target", "31b")
    with pytest.raises(UsageError, match="keep is for weights that are quantised already"):
        export(tmp_path / "target", tmp_path / "bundle", quantize="keep")
    command = [sys.executable, "-m", "ondevice", "export", str(path), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "leave it out for a GGUF file" in done.stderr


def test_local_files(llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(llama, Kind.Q8_0)
    found = locate(str(path))
    assert (found.file, found.id, default_name(found)) == (path, path.name, "model-Q8_0")
    (tmp_path / "linked.gguf").symlink_to(path)
    assert default_name(locate(str(tmp_path / "linked.gguf"))) == "linked"
    (tmp_path / "linked.gguf").unlink()
    part = tmp_path / "large-Q8_0-00001-of-00002.gguf"
    part.touch()
    assert default_name(locate(str(part))) == "large-Q8_0"
    assert locate(str(path.parent), gguf=path.name) == found
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").touch()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.gguf").touch()
    notes: list[str] = []
    assert locate_drafter("auto", locate(str(tmp_path / "files" / "model.gguf")), notes.append) is None
    assert notes == ["no drafter beside model.gguf: name one with --drafter"]
    monkeypatch.chdir(tmp_path)
    cases = {
        "model.gguf": "model.gguf does not exist: name a GGUF file",
        str(tmp_path): "holds GGUF files: name one of them, such as .*large",
        str(path.parent / "absent.gguf"): "does not exist",
    }
    for source, said in cases.items():
        with pytest.raises(CheckpointError, match=said):
            locate(source)
    with pytest.raises(CheckpointError, match="a revision belongs to a hub id"):
        locate(str(path), revision="main")
    for name in ("*.gguf", "../a.gguf", "model.bin"):
        with pytest.raises(CheckpointError, match="--gguf names one file"):
            locate("org/repo", gguf=name)


def test_the_hub_is_asked_for_one_file(llama: tuple[Path, Any], tmp_path: Path) -> None:
    path = _file(llama, Kind.Q8_0)
    with serving() as hub:
        repository = tmp_path / "repository"
        repository.mkdir()
        for name in (path.name, "model-F16.gguf", "README.md"):
            (repository / name).write_bytes(path.read_bytes() if name == path.name else b"large")
        hub.commit = "c0ffee" * 6 + "beef"
        hub.offer("org/repo", repository)
        hub.describe("org/repo", repository)
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }

        def run(name: str) -> subprocess.CompletedProcess[str]:
            out = ["--out", str(tmp_path / "bundle"), "--drafter", "none", "--no-prepare"]
            command = [sys.executable, "-m", "ondevice", "export", "org/repo", "--gguf", name, *out]
            return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

        done = run(path.name)
        assert done.returncode == 0, done.stderr
        fetched = {request.rsplit("/", 1)[1] for request, _, _ in hub.seen if "/resolve/" in request}
        assert fetched == {path.name}
        source = Bundle.open(tmp_path / "bundle").manifest.sources["target"]
        assert (source.id, source.revision, source.file) == ("org/repo", hub.commit, path.name)
        done = run("model-Q2_K.gguf")
        assert done.returncode == 2
        assert "org/repo has no file model-Q2_K.gguf, only" in done.stderr
        assert "model-F16.gguf" in done.stderr


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_published_files_in_float32_write_what_transformers_writes(
    name: str, tmp_path: Path, in_transformers: Callable[[str], Any]
) -> None:
    model = in_transformers(name)
    bundle = export(published(name), tmp_path / "bundle", quantize="none")
    with ondevice.load(bundle, engine="ort", threads=1) as loaded:
        ids = loaded.encode("The capital of France is Paris, and 2 + 2 = 4.\n")
        found = loaded.generate(ids, max_new_tokens=8, temperature=0.0, drafter="none").token_ids
    assert ids[0] == 2 or name == "smollm2"
    with torch.no_grad():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    assert list(found) == expected[: len(found)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_default_keeps_the_matrices_of_published_files(name: str, tmp_path: Path) -> None:
    """Q4_1, Q5_0 and Q8_0 exactly; Q4_K within the rounding of its scales and minimums to fp16; the rest as int8."""
    path = published(name)
    bundle = Bundle.open(export(path, tmp_path / "bundle"))
    kinds = set()
    with GgufCheckpoint(path) as checkpoint:
        for stored in bundle.manifest.tensors["target.onnx"].tensors:
            full = f"model.{stored}"
            if full not in checkpoint or checkpoint.kind(full).unpack is None:
                continue
            kind = checkpoint.kind(full).name
            (_, found), expected = _stored(bundle, stored), checkpoint.read(full)
            if kind == "Q4_K":
                blocks = checkpoint.blocks(full, 0, len(expected))
                assert blocks.minimums is not None
                terms = blocks.codes * np.abs(blocks.scales)[..., None] + np.abs(blocks.minimums)[..., None]
                assert (np.abs(found - expected) <= terms.reshape(found.shape) / 2**11).all(), stored
            elif kind == "Q6_K":
                assert np.square(found - expected).sum() < 3e-5 * np.square(expected).sum(), stored
            else:
                np.testing.assert_array_equal(found, expected, err_msg=stored)
            kinds.add(kind)
    assert kinds == {"smollm2": {"Q4_1", "Q8_0"}, "gemma3": {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}}[name]
