"""GGUF files for tests, written by the `gguf` package from models of transformers, as llama.cpp's conversion does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

State = Mapping[str, NDArray[np.float32]]
CONTEXT, WINDOW = 256, 16

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen35": gguf.MODEL_ARCH.QWEN35,
    "qwen35moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3next": gguf.MODEL_ARCH.QWEN3NEXT,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2moe": gguf.MODEL_ARCH.LFM2MOE,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "chatglm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "ernie4_5-moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gemma4": gguf.MODEL_ARCH.GEMMA4,
}
_UNMAPPED = {
    "router.scale": "ffn_gate_inp.scale",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    **{f"block_sparse_moe.experts.{name}_proj": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}
"""Names that the gguf package does not map: of a layer, or of a drafter."""
STILL = 1e30
"""Divisor of the frequencies without rotation."""


def random_model(model: Any) -> Any:
    """The model with norms and biases away from 0 and 1."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.3, 0.2)
    return model.eval()


def state_of(model: Any) -> dict[str, NDArray[np.float32]]:
    """A model's tensors, without a tied head."""
    tied = model.config.get_text_config().tie_word_embeddings
    return {
        name.replace("model.language_model.", "model."): tensor.float().numpy()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def write_gguf(
    path: Path,
    architecture: str,
    config: Any,
    state: State,
    *,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    divisors: NDArray[np.float32] | None = None,
    more: Callable[[Any], None] = lambda writer: None,
    names_of: str | None = None,
) -> Path:
    """Write a model.

    Args:
        config: the text model's configuration.
        state: its tensors by the hub's names.
        kind: type of the matrices, or a function of a matrix's name.
        divisors: of rotary frequencies.
        more: adds further metadata.
        names_of: the architecture whose tensor names are used, if gguf does not know `architecture`.
    """
    writer = gguf.GGUFWriter(path, architecture)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[names_of or architecture], config.num_hidden_layers)
    _describe(writer, architecture, config)
    more(writer)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, values in _separate(architecture, state).items():
        own, data = _own_name(name, names), _converted(architecture, name, values, config)
        stored = kind if isinstance(kind, Kind) else kind(name)
        plain: tuple[str, ...] = ("router.proj.weight", "mlp.gate.weight", "mlp.router.weight", "bias")
        plain += ("feed_forward.gate.weight", "conv.conv.weight", "conv1d.weight", "moe.router.weight")
        if data.ndim > 1 and stored is not Kind.F32 and not name.endswith(plain):
            writer.add_tensor(own, _blocks(data, stored), raw_dtype=stored)
        else:
            writer.add_tensor(own, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_SEPARATE = (
    *("olmoe", "qwen2moe", "qwen3moe", "qwen35moe", "qwen3next", "gpt-oss", "lfm2moe", "granitemoe", "ernie4_5-moe"),
    "llama",  # with experts, Mixtral
)


def _separate(architecture: str, state: State) -> State:
    """Gate and up of experts apart from each other, as the conversions of most mixtures leave them.

    Experts of gpt-oss are transposed, and gate and up alternate; the conversion names biases `gate_proj.bias`.
    """
    found: dict[str, NDArray[np.float32]] = {}
    alternate = architecture == "gpt-oss"
    for full, tensor in state.items():
        turned = alternate and "experts." in full and tensor.ndim == 3
        name, values = full.replace("_proj_bias", "_proj.bias"), tensor.swapaxes(1, 2) if turned else tensor
        if architecture in _SEPARATE and "gate_up_proj" in name:
            halves = (values[:, ::2], values[:, 1::2]) if alternate else np.split(values, 2, axis=1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                found[name.replace("gate_up", part)] = half
        else:
            found[name] = values
    return found


def _blocks(data: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    """The blocks of a matrix, uint8[rows, bytes]."""
    if kind in (Kind.IQ4_NL, Kind.IQ4_XS):
        return _in_a_table(data, kind)
    blocks: NDArray[np.uint8] = gguf.quantize(data, kind)
    return blocks


def _in_a_table(data: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    """Blocks IQ4_NL or IQ4_XS, which the gguf package reads but does not write: a group's largest weight has code 0."""
    groups = data.reshape(len(data), -1, 32)
    levels = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    peaks = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    scales = (peaks / levels[0]).astype(np.float16).astype(np.float32)
    head = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind is Kind.IQ4_XS:
        scales = scales.reshape(len(data), -1, 8)
        units = (np.abs(scales).max(-1, keepdims=True) / 31).astype(np.float16)
        whole = np.clip(np.rint(scales / units.astype(np.float32)) + 32, 0, 63).astype(np.uint16)
        upper = (whole >> 4 << 2 * np.arange(8, dtype=np.uint16)).sum(-1, keepdims=True, dtype=np.uint16)
        lower = (whole[..., ::2] & 15 | (whole[..., 1::2] & 15) << 4).astype(np.uint8)
        head = np.concatenate([units.view(np.uint8), upper.view(np.uint8), lower], axis=-1)
        scales = (units.astype(np.float32) * (whole.astype(np.float32) - 32)).reshape(len(data), -1)
    steps = np.divide(groups, scales[..., None], out=np.zeros_like(groups), where=scales[..., None] != 0)
    codes = np.abs(steps[..., None] - levels).argmin(-1).astype(np.uint8)
    packed = (codes[..., :16] | codes[..., 16:] << 4).reshape(*head.shape[:2], -1)
    blocks: NDArray[np.uint8] = np.concatenate([head, packed], axis=-1).reshape(len(data), -1)
    return blocks


def quantised(data: NDArray[np.float32], kind: Kind) -> NDArray[np.float32]:
    """The weights that `write_gguf` leaves of a matrix, as the gguf package reads them."""
    weights: NDArray[np.float32] = gguf.dequantize(_blocks(data, kind), kind)
    return weights


def _own_name(name: str, names: Any) -> str:
    rest = name.split(".", 3)[-1] if name.startswith("model.layers.") else name
    if rest in _UNMAPPED:
        return f"blk.{name.split('.')[2]}.{_UNMAPPED[rest]}" if rest != name else _UNMAPPED[rest]
    suffix = "." + name.rsplit(".", 1)[1] if name.endswith((".weight", ".bias")) else ".weight"
    if name.endswith("A_log"):
        suffix = ""
    if name.endswith("dt_bias"):
        suffix, name = ".bias", name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("expert_bias"):
        suffix, name = ".bias", f"{name}.bias"
    if name.endswith("e_score_correction_bias"):
        suffix, name = ".bias", name.replace("gate.", "").replace("_bias", ".bias")
    own = names.get_name(name.removesuffix(suffix))
    assert own is not None, name
    return f"{own}{suffix}"


_WITH_STATES = ("qwen35", "qwen35moe", "qwen3next")


def _converted(architecture: str, name: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    if architecture in _WITH_STATES and "linear_attn" in name:
        return _delta_converted(name, values, config, tiled=architecture != "qwen3next")
    if architecture in {"gemma", "gemma2", "gemma3", *_WITH_STATES} and name.endswith("norm.weight"):
        return values + np.float32(1)
    if architecture in {"llama", "mistral3", "granite", "granitemoe"} and name.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
        return values.squeeze(0)
    return values.squeeze(1) if name.endswith("conv.conv.weight") else values


def _delta_converted(name: str, values: NDArray[np.float32], config: Any, *, tiled: bool) -> NDArray[np.float32]:
    """As `_LinearAttentionVReorderBase` of llama.cpp: value heads of all key heads one after the other, if `tiled`."""
    keys, own, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    values = -np.exp(values) if name.endswith("A_log") else values.squeeze(1) if "conv1d" in name else values

    def reordered(of_heads: NDArray[np.float32], numbers: int) -> NDArray[np.float32]:
        heads = of_heads.reshape(keys, own // keys, numbers, *of_heads.shape[1:])
        return heads.swapaxes(0, 1).reshape(of_heads.shape)

    if name.endswith("norm.weight") or not tiled:
        return values
    if name.endswith("out_proj.weight"):
        return reordered(values.T, size).T
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate([values[:first], reordered(values[first:], size)])
    return reordered(values, size if name.endswith("in_proj_z.weight") else 1)


def _describe(writer: Any, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if architecture.startswith("lfm2") else config.rms_norm_eps)
    if architecture.startswith("gemma4"):
        _describe_gemma4(writer, config)
        return
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    if architecture.startswith("lfm2"):
        _describe_lfm2(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in _DESCRIBED:
        _DESCRIBED[architecture](writer, config)
    if architecture in {"exaone4", "olmo2"} and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        _describe_yarn(writer, ropes)
    if architecture in {"granite", "granitemoe"}:
        _describe_granite(writer, config)
    if architecture == "mistral3":
        _describe_yarn(writer, ropes)
        writer.add_rope_scaling_yarn_beta_fast(ropes["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(ropes["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(ropes["mscale_all_dim"])
        writer.add_attn_temperature_scale(ropes["llama_4_scaling_beta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)


def _describe_yarn(writer: Any, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _describe_olmo(writer: Any, config: Any) -> None:
    """As `Olmo2Model` of llama.cpp."""
    rope = config.rope_parameters["full_attention"]
    _describe_yarn(writer, rope)
    writer.add_rope_scaling_attn_factors(0.1 * math.log(rope["factor"]) + 1)


def _describe_qwen35(writer: Any, config: Any) -> None:
    """As `Qwen3_5TextModel` and `Qwen3NextModel` of llama.cpp."""
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * config.head_dim))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _describe_granite(writer: Any, config: Any) -> None:
    """As `GraniteModel` and `GraniteMoeModel` of llama.cpp."""
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _describe_lfm2(writer: Any, config: Any) -> None:
    """As `LFM2Model` and `LFM2MoeModel` of llama.cpp."""
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _describe_longrope(writer: Any, config: Any) -> None:
    """As `Phi3MiniModel` of llama.cpp."""
    rope, size = config.rope_parameters, config.hidden_size // config.num_attention_heads
    original, longest = config.original_max_position_embeddings, config.max_position_embeddings
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * size))
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / original) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _describe_mixture(writer: Any, config: Any) -> None:
    """As `OlmoeModel`, `Qwen2MoeModel` and, of Mixtral, `LlamaModel` of llama.cpp; dense models have no more."""
    count = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _describe_ernie_mixture(writer: Any, config: Any) -> None:
    """As `Ernie4_5MoeModel` of llama.cpp."""
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)


def _describe_glm(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * config.head_dim))


def _describe_gemma2(writer: Any, config: Any) -> None:
    """As `Gemma2Model` of llama.cpp."""
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


_DESCRIBED = {
    "phi3": _describe_longrope,
    **dict.fromkeys(("chatglm", "glm4"), _describe_glm),
    **dict.fromkeys(_WITH_STATES, _describe_qwen35),
    **dict.fromkeys(("llama", "olmoe", "qwen2moe"), _describe_mixture),
    "ernie4_5-moe": _describe_ernie_mixture,
    "olmo2": _describe_olmo,
    "gemma2": _describe_gemma2,
}
"""Functions that add the metadata of one architecture."""


def _describe_gemma4(writer: Any, config: Any) -> None:
    """As `Gemma4Model.set_gguf_parameters` of llama.cpp."""
    count, shared = config.num_hidden_layers, config.num_kv_shared_layers
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    widths = [config.intermediate_size] * count
    if config.use_double_wide_mlp:
        widths[count - shared :] = [2 * config.intermediate_size] * shared
    layers = [config.per_layer_config[index] for index in range(count)]
    writer.add_feed_forward_length(widths)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    full, own = layers[sliding.index(False)].head_dim, layers[sliding.index(True)].head_dim
    for add, size in ((writer.add_key_length, full), (writer.add_value_length, full)):
        add(size)
    for add, size in ((writer.add_key_length_swa, own), (writer.add_value_length_swa, own)):
        add(size)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(own)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def gemma4_divisors(config: Any) -> NDArray[np.float32]:
    """1 for the pairs of a full layer's head that turn."""
    index = config.layer_types.index("full_attention")
    half = config.per_layer_config[index].head_dim // 2
    turning = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return np.repeat(np.array([1, STILL], np.float32), [turning, half - turning])


def write_vocabulary(
    path: Path,
    *,
    tokens: Sequence[str],
    kinds: Sequence[int],
    model: str,
    pre: str | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    bos: int | None = None,
    eos: int | None = None,
    unknown: int | None = None,
    add_bos: bool | None = None,
    space_prefix: bool | None = None,
) -> Path:
    """Write a file that has a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add_vocabulary(
        writer, tokens=tokens, kinds=kinds, model=model, pre=pre, merges=merges, scores=scores, bos=bos, eos=eos,
        unknown=unknown, add_bos=add_bos, space_prefix=space_prefix,
    )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: Any, *, tokens: Sequence[str], kinds: Sequence[int], model: str, **fields: Any) -> None:
    """Add a vocabulary to a file; `fields` as for `write_vocabulary`, of which None is left out."""
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types([int(kind) for kind in kinds])
    adding = {
        "pre": writer.add_tokenizer_pre,
        "merges": writer.add_token_merges,
        "scores": writer.add_token_scores,
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unknown": writer.add_unk_token_id,
        "add_bos": writer.add_add_bos_token,
        "space_prefix": writer.add_add_space_prefix,
    }
    for name, value in fields.items():
        if value is not None:
            adding[name](value)
