"""GLM-4, GLM-Z1, GLM-Edge, ERNIE 4.5 and Helium, whose rotation turns neighbouring numbers of a head.

GLM-4-0414 and GLM-Z1 (`Glm4ForCausalLM`) have norms before and after both blocks, the models before them and GLM-Edge
(`GlmForCausalLM`) before them alone; both have biases of queries, keys and values, turn half of each head, and have
gate and up in one matrix. ERNIE 4.5's dense models and Helium are as Llama but for the neighbours; ERNIE's mixtures,
such as 21B-A3B, have experts beside shared ones in all layers but the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from ondevice.bundle_format.decoder import MAX_EXPERTS, Attention, Block, ExpertsConfig, FeedForward, Layer
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families import qwen3
from ondevice_export.families.family import Config, Family, RowsOf, attention, feed_forward, pre_normed
from ondevice_export.families.llama import NAMES
from ondevice_export.families.llama import layer as llama_layer
from ondevice_export.families.rows import gate_and_up, queries_and_keys, turned_numbers


def glm_layer(config: Config, index: int) -> Layer:
    return pre_normed(_attention(config, index), feed_forward(config))


def glm4_layer(config: Config, index: int) -> Layer:
    own = _attention(config, index)
    return Layer((Block(own, norm_in=True, norm_out=True), Block(feed_forward(config), norm_in=True, norm_out=True)))


def _attention(config: Config, index: int) -> Attention:
    turned = turned_numbers(config, index)
    return attention(config, index, turned=turned, bias=config.flag("attention_bias"))


def ernie_layer(config: Config, index: int) -> Layer:
    if config.flag("use_bias"):
        raise CheckpointError(f"{config.origin}: use_bias is true: biases of all projections are not supported")
    return llama_layer(config, index)


def ernie_mixture_layer(config: Config, index: int) -> Layer:
    own = ernie_layer(config, index)
    if not _has_experts(config, index):
        return own
    width = config.integer("moe_intermediate_size")
    routed = ExpertsConfig(
        count := config.integer("moe_num_experts", maximum=MAX_EXPERTS),
        config.integer("moe_k", maximum=count),
        width,
        selection_bias=True,
    )
    shared = _shared_width(config)
    feed = FeedForward(shared, config.activation, routed, shared=shared > 0, shared_gate=False)
    return pre_normed(own.mixer, feed)


def _has_experts(config: Config, index: int) -> bool:
    """Whether a layer has experts (`Ernie4_5_MoeDecoderLayer`)."""
    first, last = (config.integer(f"moe_layer_{end}_index", minimum=-1) for end in ("start", "end"))
    is_between = first <= index and (last == -1 or index <= last)
    return is_between and (index + 1) % config.integer("moe_layer_interval") == 0


def _shared_width(config: Config) -> int:
    """Rows of gate and up of the experts that every token uses, which are one block; 0 for none."""
    return config.integer("moe_intermediate_size") * config.integer("moe_num_shared_experts", minimum=0)


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    """Queries and keys, with their biases, in a bundle's order."""
    queries, keys = queries_and_keys(config, index, neighbours=True)
    kinds = ("weight", "bias") if config.flag("attention_bias") else ("weight",)
    names = {
        f"self_attn.{name}.{kind}": rows for name, rows in (("q_proj", queries), ("k_proj", keys)) for kind in kinds
    }
    return {name: (name, rows) for name, rows in names.items()}


def rows_of_ernie_mixture(config: Config, index: int) -> Mapping[str, RowsOf]:
    """As `rows_of`; the shared experts have another name than the dense block of layers without experts."""
    found, shared = dict(rows_of(config, index)), _shared_width(config)
    if shared and _has_experts(config, index):
        counts = {"gate": shared, "up": shared, "down": config.integer("hidden_size")}
        for name, count in counts.items():
            found[f"mlp.{name}_proj.weight"] = f"mlp.shared_experts.{name}_proj.weight", [Taken(0, count)]
    return found


def rows_of_glm(config: Config, index: int) -> Mapping[str, RowsOf]:
    return {**rows_of(config, index), **gate_and_up(config)}


_GLM = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "pad_token_id": 151_329,
}
_ERNIE = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ERNIE_MIXTURE = {
    **_ERNIE,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}

_HELIUM = {
    "vocab_size": 48_000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}

FAMILIES = (
    Family(
        name="glm",
        architectures=("GlmForCausalLM",),
        defaults=_GLM,
        layer=glm_layer,
        names=NAMES,
        rows_of=rows_of_glm,
    ),
    Family(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        defaults=_GLM,
        layer=glm4_layer,
        names={
            **NAMES,
            "post_attention_layernorm.weight": "post_self_attn_layernorm.weight",
            "post_feedforward_layernorm.weight": "post_mlp_layernorm.weight",
        },
        rows_of=rows_of_glm,
    ),
    Family(
        name="ernie4.5",
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        defaults=_ERNIE,
        layer=ernie_layer,
        names=NAMES,
        rows_of=rows_of,
    ),
    Family(
        name="ernie4.5-moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        defaults=_ERNIE_MIXTURE,
        layer=ernie_mixture_layer,
        names={
            **qwen3.NAMES_OF_MIXTURES,
            "router.selection_bias": "mlp.moe_statics.e_score_correction_bias",
        },
        rows_of=rows_of_ernie_mixture,
    ),
    Family(
        name="helium",
        architectures=("HeliumForCausalLM",),
        defaults=_HELIUM,
        layer=llama_layer,
        names=NAMES,
        rows_of=rows_of,
    ),
)
