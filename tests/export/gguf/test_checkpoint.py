"""GGUF files as checkpoints: configuration and tensors are those of the model that was converted."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.models import TargetCheckpoint
from ondevice_export.export_options import ExportOptions
from ondevice_export.exporter import _key
from ondevice_export.families import read_target
from ondevice_export.gguf.checkpoint import GgufCheckpoint
from tests.export.gguf.files_made import CONTEXT, WINDOW, gemma4_divisors, random_model, state_of, write_gguf
from tests.fixtures.published import published
from tests.fixtures.tiny_models import save_drafter, save_target

_SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}


def _llama(**fields: Any) -> Any:
    return random_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SIZES, "num_hidden_layers": 2, **fields}))
    )


def _made(name: str) -> Any:
    sizes = {**_SIZES, "num_hidden_layers": 7}
    if name == "llama":
        return _llama(tie_word_embeddings=False)
    if name == "qwen2":
        return random_model(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES, num_hidden_layers=2)))
    if name == "qwen3":
        config = transformers.Qwen3Config(**_SIZES, num_hidden_layers=2, tie_word_embeddings=True)
        return random_model(transformers.Qwen3ForCausalLM(config))
    if name == "qwen3moe":
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return random_model(
            transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES, num_hidden_layers=2, **experts))
        )
    if name == "phi3":
        config = transformers.Phi3Config(
            **{**_SIZES, "hidden_size": 128}, num_hidden_layers=2, sliding_window=WINDOW, pad_token_id=0
        )
        return random_model(transformers.Phi3ForCausalLM(config))
    config = transformers.Gemma3TextConfig(**sizes, sliding_window=WINDOW, query_pre_attn_scalar=32)
    return random_model(transformers.Gemma3ForCausalLM(config))


def _lfm2(name: str) -> Any:
    own = {**_SIZES, "hidden_size": 128, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
    if name == "lfm2":
        return random_model(transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**own)))
    own |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return random_model(transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**own)))


def _written(path: Path, architecture: str, model: Any, **options: Any) -> GgufCheckpoint:
    return GgufCheckpoint(write_gguf(path, architecture, model.config.get_text_config(), state_of(model), **options))


def _assert_same(checkpoint: GgufCheckpoint, model: Any, offset: float = 0.0) -> None:
    state = state_of(model)
    assert set(checkpoint.names) == set(state)
    checkpoint.check({name: values.shape for name, values in state.items()})
    for name, values in state.items():
        expected = values + np.float32(offset) if name.endswith("norm.weight") else values
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma3"])
def test_tensors_and_configuration_are_those_of_the_model(tmp_path: Path, architecture: str) -> None:
    model = _made(architecture)
    with _written(tmp_path / "model.gguf", architecture, model) as checkpoint:
        _assert_same(checkpoint, model, 1.0 if architecture == "gemma3" else 0.0)
        found, expected = checkpoint.config, model.config.to_dict()
        assert found["architectures"] == [type(model).__name__]
        for name in (*_SIZES, "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings"):
            assert found[name] == expected[name], name
        for name in ("query_pre_attn_scalar", "sliding_window", "layer_types", "hidden_activation"):
            if architecture == "gemma3":
                assert found[name] == expected[name], name
        for name in ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            if architecture == "qwen3moe":
                assert found[name] == expected[name], name
        if architecture == "phi3":
            assert found["sliding_window"] == expected["sliding_window"]
        ropes = expected["rope_parameters"]
        for kind in set(found["layer_types"]):
            assert found["rope_parameters"][kind]["rope_theta"] == ropes.get(kind, ropes)["rope_theta"]


@pytest.mark.parametrize("family", ["e2b", "e4b", "26b", "31b"])
def test_gemma_4_of_every_kind(tmp_path: Path, family: str) -> None:
    model = save_target(tmp_path / "hub", family)
    config = model.config.get_text_config()
    options = {"divisors": gemma4_divisors(config)}
    with _written(tmp_path / "model.gguf", "gemma4", model, **options) as checkpoint:
        state = state_of(model)
        unused = {name for name in state if name not in checkpoint}
        assert not unused
        for name in checkpoint.names:
            np.testing.assert_array_equal(checkpoint.read(name), state[name], err_msg=name)
        found = checkpoint.config
    saved = json.loads((tmp_path / "hub/config.json").read_text())
    names = (
        "layer_types", "num_kv_shared_layers", "use_double_wide_mlp", "attention_k_eq_v", "hidden_size_per_layer_input",
        "sliding_window", "final_logit_softcapping", "intermediate_size", "max_position_embeddings",
    )  # fmt: skip
    for name in names:
        assert (found[name] or 0) == (saved[name] or 0), name
    for index in range(config.num_hidden_layers):
        own = config.per_layer_config[index]
        sizes = {"head_dim": own.head_dim, "num_key_value_heads": own.num_key_value_heads}
        assert found["per_layer_config"][str(index)] == sizes
    for kind, rope in found["rope_parameters"].items():
        for name, value in rope.items():
            assert saved["rope_parameters"][kind][name] == value
    if family == "26b":
        for name in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"):
            assert found[name] == saved[name]


def test_a_drafter_of_gemma_4(tmp_path: Path) -> None:
    model = save_drafter(tmp_path / "hub", "26b")
    config = model.config.get_text_config()

    def more(writer: Any) -> None:
        writer.add_uint32("gemma4-assistant.embedding_length_out", 64)

    options: dict[str, Any] = {"divisors": gemma4_divisors(config), "more": more, "names_of": "gemma4"}
    state = {name: values for name, values in state_of(model).items() if not name.startswith("masked_embedding")}
    path = write_gguf(tmp_path / "drafter.gguf", "gemma4-assistant", config, state, **options)
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.config["architectures"] == [type(model).__name__]
        assert checkpoint.config["backbone_hidden_size"] == 64
        assert not checkpoint.config["use_ordered_embeddings"]
        assert set(checkpoint.names) == set(state)
        for name, values in state.items():
            np.testing.assert_array_equal(checkpoint.read(name), values)


def test_rows_of_queries_and_keys_in_pieces(tmp_path: Path) -> None:
    model = _llama()
    with _written(tmp_path / "model.gguf", "llama", model, kind=Kind.Q8_0) as checkpoint:
        for name in ("q_proj", "k_proj", "v_proj"):
            full = f"model.layers.1.self_attn.{name}.weight"
            whole = checkpoint.read(full)
            expected = gguf.dequantize(gguf.quantize(state_of(model)[full], Kind.Q8_0), Kind.Q8_0)
            np.testing.assert_array_equal(whole, expected)
            for start, stop in ((0, 5), (5, 40), (31, 33), (60, 64)):
                np.testing.assert_array_equal(checkpoint.rows(full, start, stop), whole[start:stop])
                np.testing.assert_array_equal(checkpoint.blocks(full, start, stop).weights(), whole[start:stop])
            picked = np.array([63, 0, 17], np.int64)
            np.testing.assert_array_equal(checkpoint.picked_rows(full, picked), whole[picked])
        assert checkpoint.types() == {"F32": 5, "Q8_0": 16}


def test_rotary_divisors_are_longrope_and_keep_the_frequencies(tmp_path: Path) -> None:
    """Llama 3's scaling is in the file as a divisor for every frequency."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = _llama(rope_parameters=rope)
    expected = model.model.rotary_emb.inv_freq.numpy()
    plain = 1 / 500_000.0 ** (np.arange(0, 32, 2) / 32)
    with _written(
        tmp_path / "model.gguf", "llama", model, divisors=(plain / expected).astype(np.float32)
    ) as checkpoint:
        found = checkpoint.config["rope_parameters"]["full_attention"]
    assert (found["rope_type"], found["attention_factor"]) == ("longrope", 1.0)
    np.testing.assert_allclose(plain / np.array(found["short_factor"]), expected, rtol=1e-6)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    def linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    with _written(tmp_path / "gemma.gguf", "gemma3", _made("gemma3"), more=linear) as checkpoint:
        ropes = checkpoint.config["rope_parameters"]
        assert ropes["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
        assert ropes["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    with _written(tmp_path / "qwen.gguf", "qwen2", _made("qwen2"), more=yarn) as checkpoint:
        found = checkpoint.config["rope_parameters"]["full_attention"]
        assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 4.0, 64)


def test_yarn_between_bounds_of_its_own(tmp_path: Path) -> None:
    """The conversion writes them beside the fields that every architecture reads."""
    path, bounds = tmp_path / "model.gguf", {"beta_fast": 4.0, "beta_slow": 0.5}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    model = _llama(rope_parameters={**rope, **bounds})
    _written(path, "llama", model).close()
    named = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_attn_factor": 1.0}
    fields = {**named, **{f"yarn_{name}": value for name, value in bounds.items()}}
    _rewrite(path, {f"llama.rope.scaling.{name}": value for name, value in fields.items()})
    with GgufCheckpoint(path) as checkpoint:
        [found] = read_target(checkpoint.config, "model.gguf").target.frequencies()
    np.testing.assert_allclose(found, model.model.rotary_emb.inv_freq.numpy(), rtol=2e-6)


_YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 64}


@pytest.mark.parametrize(
    "named",
    [
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
        {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
    ],
)
def test_a_factor_without_a_type_or_by_its_older_name_is_linear(tmp_path: Path, named: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "llama", _llama()).close()
    _rewrite(path, {f"llama.{name}": value for name, value in named.items()})
    with GgufCheckpoint(path) as checkpoint:
        found = checkpoint.config["rope_parameters"]["full_attention"]
    assert (found["rope_type"], found["factor"]) == ("linear", 4.0)


def test_linear_scaling_divides_beside_divisors(tmp_path: Path) -> None:
    path, divisors = tmp_path / "model.gguf", np.linspace(1, 8, 16, dtype=np.float32)
    _written(path, "llama", _llama(), divisors=divisors).close()
    _rewrite(path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    with GgufCheckpoint(path) as checkpoint:
        found = checkpoint.config["rope_parameters"]["full_attention"]
    assert found["short_factor"] == (4 * divisors).tolist()


def test_a_window_that_llama_cpp_does_not_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "llama", _llama()).close()
    _rewrite(path, {"llama.attention.sliding_window": 16})
    with GgufCheckpoint(path) as checkpoint:
        assert set(checkpoint.config["layer_types"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("attn_factor is not supported", {"llama.rope.scaling.attn_factor": 0.5}),
        ("yarn_attn_factor 0.5 is not supported: export", {**_YARN, "llama.rope.scaling.yarn_attn_factor": 0.5}),
        ("yarn_ext_factor 0.5 is not supported: export", {**_YARN, "llama.rope.scaling.yarn_ext_factor": 0.5}),
        ("yarn_log_multiplier .* is not supported", {**_YARN, "llama.rope.scaling.yarn_log_multiplier": [1, 2]}),
        ("architecture 'gemma3n'", {"general.architecture": "gemma3n"}),
        ("different numbers of query heads", {"llama.attention.head_count": [4, 2]}),
        ("causal is false, this is not a language model", {"llama.attention.causal": False}),
        ("rotation of a part", {"llama.rope.dimension_count": 16}),
        ("scaling 'dynamic'", {"llama.rope.scaling.type": "dynamic"}),
        ("head_count is", {"llama.attention.head_count": "many"}),
        ("head_count has not a whole number from 1", {"llama.attention.head_count": [0, 0]}),
        ("scaling.type is", {"llama.rope.scaling.type": [1, 2]}),
        ("scaling.factor is", {"llama.rope.scaling.factor": [1, 2]}),
        ("another size than keys", {"llama.attention.value_length": 16}),
        ("split.count is", {"split.count": [2, 2]}),
    ],
)
def test_what_is_not_supported_is_said_in_one_line(tmp_path: Path, said: str, change: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "llama", _llama()).close()
    _rewrite(path, change)
    with pytest.raises(CheckpointError, match=said) as caught:
        GgufCheckpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("scaling 'linear' by 4.0 is not supported", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("scaling 'longrope' by 4.0 is not supported", {"rope.scaling.factor": 4.0}),
        ("scaling 'yarn' by 1 is not supported", {"rope.scaling.type": "yarn"}),
        ("attn_factor without rope_factors_short.weight", {"rope.scaling.attn_factor": 1.2}),
        ("rope.dimension_count is 33", {"rope.dimension_count": 33}),
    ],
)
def test_rotation_of_phi_3_that_is_not_supported(tmp_path: Path, said: str, change: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "phi3", _made("phi3")).close()
    _rewrite(path, {f"phi3.{name}": value for name, value in change.items()})
    with pytest.raises(CheckpointError, match=said) as caught:
        GgufCheckpoint(path)
    assert "\n" not in str(caught.value)


def test_experts_of_a_dense_architecture_are_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "qwen2", _made("qwen2")).close()
    _rewrite(path, {"qwen2.expert_count": 8})
    with pytest.raises(CheckpointError, match="experts are not supported in models of this architecture"):
        GgufCheckpoint(path)


def test_a_list_of_experts_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "qwen2", _made("qwen2")).close()
    _rewrite(path, {"qwen2.expert_count": [8, 8]})
    with pytest.raises(CheckpointError, match="expert_count is"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("architecture", "said", "change"),
    [
        ("lfm2", "different numbers of KV heads", {"attention.head_count_kv": [0, 4, 2]}),
        ("lfm2", "or none, are not", {"attention.head_count_kv": [0, 0, 0]}),
        ("lfm2", "sliding_window beside convolutions", {"attention.sliding_window": 16}),
        ("lfm2moe", "gating function 1", {"expert_gating_func": 1}),
        ("lfm2moe", "or scaled", {"expert_weights_scale": 2.0}),
    ],
)
def test_what_is_not_supported_of_lfm2(tmp_path: Path, architecture: str, said: str, change: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    _written(path, architecture, _lfm2(architecture)).close()
    _rewrite(path, {f"{architecture}.{name}": value for name, value in change.items()})
    with pytest.raises(CheckpointError, match=said) as caught:
        GgufCheckpoint(path)
    assert "\n" not in str(caught.value)


def test_a_dense_block_beside_experts_of_granite_is_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    sizes = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    config = transformers.GraniteMoeConfig(**sizes, num_hidden_layers=1, num_local_experts=4)
    _written(path, "granitemoe", random_model(transformers.GraniteMoeForCausalLM(config))).close()
    _rewrite(path, {"granitemoe.expert_shared_feed_forward_length": 64})
    with pytest.raises(CheckpointError, match="experts beside a dense block are not supported"):
        GgufCheckpoint(path)


def test_glm_as_conversions_of_multimodal_or_older_models_is_not_supported(tmp_path: Path) -> None:
    """Rows of multimodal models are in another order; older ones have queries, keys and values in one matrix."""
    path = tmp_path / "model.gguf"
    config = transformers.GlmConfig(**_SIZES, num_hidden_layers=1, pad_token_id=0)
    model = random_model(transformers.GlmForCausalLM(config))
    _written(path, "chatglm", model).close()
    joined = path.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_qkv.weig")
    _rewrite(path, {"chatglm.rope.dimension_sections": [4, 4, 4, 4]})
    with pytest.raises(CheckpointError, match=r"rope\.dimension_sections is not supported: this is not a text model"):
        GgufCheckpoint(path)
    path.write_bytes(joined)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_qkv\.weig has no place in a chatglm model"):
        GgufCheckpoint(path)


def test_the_rotated_part_of_a_head_is_whole(tmp_path: Path) -> None:
    """88 * (60 / 88) is below 60 in float64: 58 numbers were rotated."""
    sizes = {**_SIZES, "hidden_size": 176, "num_attention_heads": 2, "head_dim": 88}
    config = transformers.Phi3Config(**sizes, num_hidden_layers=1, pad_token_id=0)
    model = random_model(transformers.Phi3ForCausalLM(config))
    _written(tmp_path / "model.gguf", "phi3", model).close()
    _rewrite(tmp_path / "model.gguf", {"phi3.rope.dimension_count": 60, "phi3.rope.scaling.type": "none"})
    with GgufCheckpoint(tmp_path / "model.gguf") as checkpoint:
        [frequencies] = read_target(checkpoint.config, "model.gguf").target.frequencies()
    assert np.count_nonzero(frequencies) == 30


def test_the_number_of_a_layer_is_written_in_one_way(tmp_path: Path) -> None:
    """A tensor of layer 00 took the place of layer 0's without a word."""
    path = tmp_path / "model.gguf"
    _written(path, "llama", _llama()).close()
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.01.ffn_norm.weight"))
    with pytest.raises(CheckpointError, match=r"blk\.01\.ffn_norm\.weight has no place"):
        GgufCheckpoint(path)


def test_a_template_that_is_no_text_is_none(tmp_path: Path) -> None:
    """As of a `tokenizer_config.json`."""
    path = tmp_path / "model.gguf"
    _written(path, "llama", _llama()).close()
    _rewrite(path, {"tokenizer.chat_template": [1, 2], "tokenizer.chat_template.tool_use": "{{ tools }}"})
    with GgufCheckpoint(path) as checkpoint:
        checkpoint.write_text_files(tmp_path, tokenizer=False)
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    assert found == [{"name": "tool_use", "template": "{{ tools }}"}]


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    model = _llama()
    state = state_of(model)
    writer_state = {**state, "model.layers.0.self_attn.q_proj.bias": np.zeros(128, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", "llama", model.config, writer_state)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias has no place in a llama model"):
        GgufCheckpoint(path)


def test_a_model_in_parts(tmp_path: Path) -> None:
    """Metadata and tensors may be spread over files; each part names the whole."""
    model = _llama()
    state = state_of(model)
    names = list(state)

    def more(writer: Any) -> None:
        writer.add_uint16("split.count", 2)

    first, second = (tmp_path / f"model-0000{part}-of-00002.gguf" for part in (1, 2))
    write_gguf(first, "llama", model.config, {name: state[name] for name in names[:9]}, more=more)
    write_gguf(second, "llama", model.config, {name: state[name] for name in names[9:]}, more=more)
    for path in (first, second):
        with GgufCheckpoint(path) as checkpoint:
            _assert_same(checkpoint, model)
            assert len(checkpoint.sha256()) == 64
    config = SimpleNamespace(context_length=256)
    target = cast(TargetCheckpoint, SimpleNamespace(checkout=SimpleNamespace(path=first), config=config))
    keys = [_key(target, ExportOptions(), "text")]
    os.utime(second, (0, 0))
    keys.append(_key(target, ExportOptions(), "text"))
    assert len({*keys}) == 2  # another second part is another model: an export does not go on
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf is missing: a model of 2 files needs all"):
        GgufCheckpoint(first)
    with pytest.raises(CheckpointError, match="is one of 2 parts"):
        GgufCheckpoint(tmp_path / "elsewhere.gguf")


def test_a_disk_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _written(path, "llama", _llama()).close()
    with GgufCheckpoint(path) as checkpoint:
        file = checkpoint._files[0]
        file._file.close()
        file._file = cast(Any, SimpleNamespace(seek=_failing, close=lambda: None))
        with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read: .* Input/output error"):
            checkpoint.read("model.norm.weight")


def _failing(offset: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_published_files_are_as_transformers_reads_them(name: str, in_transformers: Callable[[str], Any]) -> None:
    model = in_transformers(name)
    with GgufCheckpoint(published(name)) as checkpoint:
        _assert_same(checkpoint, model, 1.0 if name == "gemma3" else 0.0)
        found, expected = checkpoint.config, model.config.to_dict()
    for field in set(found) & set(expected) - {"architectures", "eos_token_id", "layer_types", "rope_parameters"}:
        value = pytest.approx(expected[field], rel=1e-6) if isinstance(expected[field], float) else expected[field]
        assert found[field] == value, field
    assert found["eos_token_id"][0] == expected["eos_token_id"]
    if name == "gemma3":
        assert found["layer_types"] == expected["layer_types"]
        assert found["rope_parameters"] == expected["rope_parameters"]


def _rewrite(path: Path, change: dict[str, Any]) -> None:
    """Write a file again with other metadata."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    fields |= change
    writer = gguf.GGUFWriter(path.with_suffix(".new"), fields.pop("general.architecture"))
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)
