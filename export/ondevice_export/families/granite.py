"""Granite: as Llama, with factors of embeddings, scores, residuals and logits; dense models and mixtures.

A bundle has no factors of residuals and logits: the rows of the projections that are added to the residual stream have
the former, and the weight of the last norm has the latter. Mixtures of Granite 3 have experts in place of the dense
block. Granite 4's class is that of its hybrids of attention and Mamba layers, which are not supported; its dense models
have attention in all layers, and gate and up in one matrix. Granite Swash has sinks and windows, and every layer a
rotation of its own, or none. HyperCLOVA X has the same factors, that of logits as a factor and not as a divisor, and
norms after the blocks too, whose weights have the factor of residuals then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.decoder import MAX_EXPERTS, Block, Layer
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import Config, Family, RowsOf, attention, experts, feed_forward, pre_normed
from ondevice_export.families.llama import NAMES
from ondevice_export.families.rows import gate_and_up

_OUTPUT, _DOWN = "self_attn.o_proj.weight", "mlp.down_proj.weight"
_OF_SHARED = {_DOWN: "shared_mlp.output_linear.weight"}
_CLOVA_NORMS = ("post_norm1.weight", "post_norm2.weight")
_EXPERTS = "block_sparse_moe.experts"
_OF_MIXTURES = {
    **NAMES,
    "router.proj.weight": "block_sparse_moe.router.weight",
    "experts.gate_up_proj": f"{_EXPERTS}.gate_up_proj",
    "experts.down_proj": f"{_EXPERTS}.down_proj",
}


def layer(config: Config, index: int) -> Layer:
    own = attention(config, index, scale=config.number("attention_multiplier"))
    return pre_normed(own, feed_forward(config))


def dense_layer(config: Config, index: int) -> Layer:
    if config.data.get("num_local_experts"):
        raise CheckpointError(f"{config.origin}: num_local_experts is not 0: experts beside a dense block")
    return layer(config, index)


def mixture_layer(config: Config, index: int) -> Layer:
    own = attention(config, index, scale=config.number("attention_multiplier"))
    return pre_normed(own, experts(config, "intermediate_size"))


def swash_layer(config: Config, index: int) -> Layer:
    own = attention(config, index, scale=config.number("attention_multiplier"), sinks=True)
    return pre_normed(own, feed_forward(config))


def swash_mixture_layer(config: Config, index: int) -> Layer:
    if config.data.get("shared_intermediate_size"):
        raise CheckpointError(f"{config.origin}: shared_intermediate_size is not 0: experts beside a dense block")
    own = attention(config, index, scale=config.number("attention_multiplier"), sinks=True)
    return pre_normed(own, experts(config, "intermediate_size"))


def clova_layer(config: Config, index: int) -> Layer:
    scale = config.number("attention_multiplier", config.head_dim**-0.5)
    own, behind = attention(config, index, scale=scale), config.flag("use_post_norm")
    return Layer(
        (Block(own, norm_in=True, norm_out=behind), Block(feed_forward(config), norm_in=True, norm_out=behind))
    )


def rows_of_clova(config: Config, index: int) -> Mapping[str, RowsOf]:
    return _times_residual_factor(config, *(_CLOVA_NORMS if config.flag("use_post_norm") else (_OUTPUT, _DOWN)))


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    return _times_residual_factor(config, _OUTPUT, _DOWN)


def rows_of_shared(config: Config, index: int) -> Mapping[str, RowsOf]:
    return {
        **_times_residual_factor(config, _OUTPUT, _OF_SHARED[_DOWN]),
        **gate_and_up(config, "shared_mlp.input_linear.weight"),
    }


def rows_of_mixture(config: Config, index: int) -> Mapping[str, RowsOf]:
    return {**_times_residual_factor(config, _OUTPUT), **_rows_of_experts(config, f"{_EXPERTS}.down_proj")}


def rows_of_granite_3_mixture(config: Config, index: int) -> Mapping[str, RowsOf]:
    """Checkpoints of the hub have other names than files, and than newer classes."""
    if not config.flag("linear_experts"):
        return rows_of_mixture(config, index)
    count, width = config.integer("num_local_experts", maximum=MAX_EXPERTS), config.integer("intermediate_size")
    return {
        **_times_residual_factor(config, _OUTPUT),
        **_rows_of_experts(config, "block_sparse_moe.output_linear.weight"),
        f"{_EXPERTS}.gate_up_proj": ("block_sparse_moe.input_linear.weight", [Taken(0, count * 2 * width)]),
        "block_sparse_moe.router.weight": ("block_sparse_moe.router.layer.weight", [Taken(0, count)]),
    }


def _rows_of_experts(config: Config, name: str) -> Mapping[str, RowsOf]:
    rows = config.integer("num_local_experts", maximum=MAX_EXPERTS) * config.integer("hidden_size")
    return {f"{_EXPERTS}.down_proj": (name, [Taken(0, rows, config.number("residual_multiplier"))])}


def _times_residual_factor(config: Config, *names: str) -> Mapping[str, RowsOf]:
    taken = Taken(0, config.integer("hidden_size"), config.number("residual_multiplier"))
    return {name: (name, [taken]) for name in names}


def _spelling(data: dict[str, Any]) -> dict[str, Any]:
    """Layers of Granite 3 rotate but in GGUF files that say otherwise: its class has no such field."""
    return _rotating(data, data.get("position_embedding_type") != "nope")


def _spelling_of_clova(data: dict[str, Any]) -> dict[str, Any]:
    """The factor of logits as the divisor that others have."""
    factor = data.get("logits_scaling")
    return {**data, "logits_scaling": 1 / factor} if isinstance(factor, int | float) and factor > 0 else data


def _spelling_of_hybrids(data: dict[str, Any]) -> dict[str, Any]:
    own = {**data, "intermediate_size": data.get("shared_intermediate_size")}
    return _rotating(own, data.get("position_embedding_type") == "rope")


def _rotating(data: dict[str, Any], rotates: bool) -> dict[str, Any]:
    """Whether layers rotate, in the spelling of families in which some do not."""
    return {**data, "no_rope_layers": [int(rotates)] * len(data["layer_types"])}


_GRANITE = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_HYBRID = {
    **_GRANITE,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
}

_MIXTURE = {
    **_GRANITE,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "linear_experts": True,
}
_WINDOWS = {"sliding_window": 128, "full_attention_interval": 4, "layer_rope_theta": None}
_SWASH = {
    **_GRANITE,
    **_WINDOWS,
    "vocab_size": 100_352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 100_257,
    "eos_token_id": 100_257,
}
_SWASH_MIXTURE = {
    **_GRANITE,
    **_WINDOWS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}

_CLOVA = {**_GRANITE, "attention_multiplier": None, "use_post_norm": True}

FAMILIES = (
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        defaults=_GRANITE,
        layer=layer,
        names=NAMES,
        rows_of=rows_of,
        spelling=_spelling,
    ),
    Family(
        name="granite-4",
        architectures=("GraniteMoeHybridForCausalLM",),
        defaults=_HYBRID,
        layer=dense_layer,
        names={**NAMES, **_OF_SHARED},
        rows_of=rows_of_shared,
        spelling=_spelling_of_hybrids,
    ),
    Family(
        name="granite-moe",
        architectures=("GraniteMoeForCausalLM",),
        defaults=_MIXTURE,
        layer=mixture_layer,
        names=_OF_MIXTURES,
        rows_of=rows_of_granite_3_mixture,
        spelling=_spelling,
    ),
    Family(
        name="granite-swash",
        architectures=("GraniteSWAForCausalLM",),
        defaults=_SWASH,
        layer=swash_layer,
        names=NAMES,
        rows_of=rows_of,
    ),
    Family(
        name="granite-swash-moe",
        architectures=("GraniteMoeSWAForCausalLM",),
        defaults=_SWASH_MIXTURE,
        layer=swash_mixture_layer,
        names=_OF_MIXTURES,
        rows_of=rows_of_mixture,
    ),
    Family(
        name="hyperclova-x",
        architectures=("HyperCLOVAXForCausalLM",),
        defaults=_CLOVA,
        layer=clova_layer,
        names={
            **NAMES,
            **dict(
                zip(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"), _CLOVA_NORMS, strict=True)
            ),
        },
        rows_of=rows_of_clova,
        spelling=_spelling_of_clova,
    ),
)
