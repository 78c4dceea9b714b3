"""gpt-oss: experts in every layer, biases everywhere, a sink in every head's softmax, a window in every other layer.

Checkpoints of the hub have gate and up of an expert as one matrix in which their rows alternate.
"""

from __future__ import annotations

from collections.abc import Mapping

from ondevice.bundle_format.decoder import MAX_EXPERTS, ExpertsConfig, FeedForward, Layer
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.stacks import Taken
from ondevice_export.families.family import Config, Family, RowsOf, attention, pre_normed
from ondevice_export.families.llama import NAMES

_ALPHA, _LIMIT = 1.702, 7.0
"""The numbers of `clamped_swiglu`, as `swiglu_alpha` and `swiglu_limit` of a configuration."""
_GATE_UP = "mlp.experts.gate_up_proj"


def layer(config: Config, index: int) -> Layer:
    biased = config.flag("attention_bias")
    return pre_normed(attention(config, index, bias=biased, output_bias=biased, sinks=True), _experts(config))


def _experts(config: Config) -> FeedForward:
    for name, value in {"swiglu_alpha": _ALPHA, "swiglu_limit": _LIMIT}.items():
        if config.number(name) != value:
            raise CheckpointError(f"{config.origin}: {name} {config.number(name):g} is not supported, {value:g} is")
    count = config.integer("num_local_experts", maximum=MAX_EXPERTS)
    top = config.integer("num_experts_per_tok", maximum=count)
    return FeedForward(0, "clamped_swiglu", ExpertsConfig(count, top, config.integer("intermediate_size"), bias=True))


def rows_of(config: Config, index: int) -> Mapping[str, RowsOf]:
    """Every expert's rows of gate, then those of up."""
    if not config.flag("alternating_experts"):
        return {}
    count, rows = config.integer("num_local_experts", maximum=MAX_EXPERTS), 2 * config.integer("intermediate_size")
    starts = range(0, count * rows, rows)
    taken = [Taken(start + half, start + rows, step=2) for start in starts for half in (0, 1)]
    return {_GATE_UP: (_GATE_UP, taken)}


_DEFAULTS = {
    "num_local_experts": 128,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "window_period": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "swiglu_alpha": _ALPHA,
    "swiglu_limit": _LIMIT,
    "alternating_experts": True,
}

FAMILIES = (
    Family(
        name="gpt-oss",
        architectures=("GptOssForCausalLM",),
        defaults=_DEFAULTS,
        layer=layer,
        rows_of=rows_of,
        names={
            **NAMES,
            "router.proj.weight": "mlp.router.weight",
            "router.proj.bias": "mlp.router.bias",
            **{name: f"mlp.{name}" for name in ("experts.gate_up_proj", "experts.down_proj")},
            **{f"{name}_bias": f"mlp.{name}_bias" for name in ("experts.gate_up_proj", "experts.down_proj")},
        },
    ),
)
