"""Which tensors an export reads, and their shapes: what a checkpoint is checked against before any work starts."""

from __future__ import annotations

from collections.abc import Iterable

from ondevice.errors import CheckpointError
from ondevice_export.config import DrafterConfig, LayerConfig, TextConfig

Shapes = dict[str, tuple[int, ...]]

HEAD = "lm_head.weight"
"""The head, where it is not the token embedding."""

_TABLES = ("embed_tokens.weight", "embed_tokens_per_layer.weight")

_PREFIXES = ("model.language_model.", "model.")
"""Multimodal checkpoints first: both start with `model.`."""


def is_table(name: str) -> bool:
    """Whether a matrix is an embedding."""
    return name.endswith(_TABLES)


def text_prefix(names: Iterable[str]) -> str:
    """The prefix of the text model's tensors."""
    present = set(names)
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in present:
            return prefix
    raise CheckpointError("the checkpoint has no embed_tokens.weight: it holds no Gemma 4 text model")


def target_shapes(config: TextConfig, prefix: str) -> Shapes:
    """Every tensor of the target that is read."""
    shapes = _decoder_shapes(config)
    if config.ple_size:
        packed = len(config.layers) * config.ple_size
        shapes["embed_tokens_per_layer.weight"] = (config.ple_vocab_size, packed)
        shapes["per_layer_model_projection.weight"] = (packed, config.hidden_size)
        shapes["per_layer_projection_norm.weight"] = (config.ple_size,)
    shapes = {prefix + name: shape for name, shape in shapes.items()}
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def drafter_shapes(config: DrafterConfig) -> Shapes:
    """Every tensor of the drafter that is read."""
    hidden, backbone = config.text.hidden_size, config.backbone_hidden_size
    shapes: Shapes = {f"model.{name}": shape for name, shape in _decoder_shapes(config.text).items()}
    shapes["pre_projection.weight"] = (hidden, 2 * backbone)
    shapes["post_projection.weight"] = (backbone, hidden)
    if config.centroids is not None:
        shapes["masked_embedding.centroids.weight"] = (config.centroids, hidden)
        shapes["masked_embedding.token_ordering"] = (config.text.vocab_size,)
    return shapes


def unread(names: Iterable[str], shapes: Shapes, config: TextConfig, prefix: str) -> list[str]:
    """Tensors that belong to other modalities; what a text model cannot explain is an error.

    Raises:
        CheckpointError: a tensor of the text model that this architecture has no use for, so the result would be wrong.
    """
    expected = set(shapes) | {HEAD} | {prefix + name for name in _unused_kv(config)}
    rest = [name for name in names if name not in expected]
    own = [name for name in rest if name.startswith(prefix) and not _other_modality(name)]
    if own:
        raise CheckpointError(f"tensor {own[0]} has no place in the model that config.json describes ({len(own)} such)")
    return rest


def _other_modality(name: str) -> bool:
    return any(word in name for word in ("vision", "audio", "image", "multi_modal"))


def _unused_kv(config: TextConfig) -> Iterable[str]:
    """K/V tensors that checkpoints carry for layers that read another layer's cache."""
    for index, layer in enumerate(config.layers):
        if layer.kv_source != index:
            for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
                yield f"layers.{index}.self_attn.{name}.weight"


def _decoder_shapes(config: TextConfig) -> Shapes:
    shapes: Shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    for index, layer in enumerate(config.layers):
        own = _layer_shapes(config, layer, owns_kv=layer.kv_source == index)
        shapes.update({f"layers.{index}.{name}": shape for name, shape in own.items()})
    return shapes


def _layer_shapes(config: TextConfig, layer: LayerConfig, *, owns_kv: bool) -> Shapes:
    hidden, wide = config.hidden_size, layer.intermediate_size
    queries, keys = config.query_heads * layer.head_dim, layer.kv_heads * layer.head_dim
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "post_feedforward_layernorm.weight": (hidden,),
        "layer_scalar": (1,),
    }
    if owns_kv:
        shapes["self_attn.k_proj.weight"] = (keys, hidden)
        shapes["self_attn.k_norm.weight"] = (layer.head_dim,)
        if not layer.k_eq_v:
            shapes["self_attn.v_proj.weight"] = (keys, hidden)
    if layer.experts is not None:
        count, inner = layer.experts.count, layer.experts.intermediate_size
        shapes["router.proj.weight"] = (count, hidden)
        shapes["router.scale"] = (hidden,)
        shapes["router.per_expert_scale"] = (count,)
        shapes["pre_feedforward_layernorm_2.weight"] = (hidden,)
        shapes["experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes["experts.down_proj"] = (count, hidden, inner)
        shapes["post_feedforward_layernorm_1.weight"] = (hidden,)
        shapes["post_feedforward_layernorm_2.weight"] = (hidden,)
    if config.ple_size:
        shapes["per_layer_input_gate.weight"] = (config.ple_size, hidden)
        shapes["per_layer_projection.weight"] = (hidden, config.ple_size)
        shapes["post_per_layer_input_norm.weight"] = (hidden,)
    return shapes
