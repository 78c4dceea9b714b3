"""The architectures of GGUF files: their metadata as a `config.json`, and their tensors by the hub's names.

The configuration is in the spelling of transformers 5 and says everything that the metadata say or llama.cpp has as a
constant, so that no default of a family applies. Sources: the conversion of llama.cpp (`conversion/*.py`) and what its
models read (`src/models/*.cpp`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.config import CONVOLUTION, DELTA, FULL, SLIDING
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.families.mtp import JOINED, LAYER
from ondevice_export.gguf.file import GgufTensor

_MAX_LAYERS = 1000
_NUMBER = re.compile("0|[1-9][0-9]{0,3}")
DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight")
"""Tensors that divide rotary frequencies: of all texts, or of those up to the original length."""
LONG_DIVISORS = "rope_factors_long.weight"
"""The divisors of longer texts."""
_EXPERT_WIDTH = "expert_feed_forward_length"
"""The inner width of one expert. Files without dense blocks may have no width of these."""


class Metadata(JsonFields):
    """The metadata of one architecture, without its prefix, and what the tensors say about the configuration.

    Attributes:
        layers: the number of layers, without those that draft further tokens.
        drafting: the number of the latter, MTP layers.
        entries: the tensors.
        divisors: the numbers that divide rotary frequencies, float32[head_dim / 2]; None without such a tensor.
        long_divisors: those of texts beyond the original length; the same.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        entries: Mapping[str, GgufTensor],
        divisors: tuple[NDArray[np.float32] | None, NDArray[np.float32] | None],
        origin: str,
    ) -> None:
        start = f"{metadata['general.architecture']}."
        super().__init__({key.removeprefix(start): value for key, value in metadata.items()}, origin)
        self.entries = entries
        self.divisors, self.long_divisors = divisors
        self._blocks = self.integer("block_count", 0, maximum=_MAX_LAYERS)
        drafting = self.integer("nextn_predict_layers", 0, minimum=0, maximum=max(0, self._blocks - 1))
        self.layers, self.drafting = self._blocks - drafting, drafting

    def rows(self, tensor: str) -> int:
        """The rows of a tensor; CheckpointError if there is none."""
        if tensor not in self.entries:
            raise CheckpointError(f"{self.origin} has no tensor {tensor}: it holds no text model")
        return self.entries[tensor].rows

    def drafts(self, tensor: str) -> bool:
        """Whether a tensor is of a layer that drafts further tokens (`nextn_predict_layers`), after the others."""
        block, number, *_ = [*tensor.split("."), ""]
        return block == "blk" and _NUMBER.fullmatch(number) is not None and self.layers <= int(number) < self._blocks

    def per_layer(self, name: str, default: int | None = None, minimum: int = 1) -> list[int]:
        """A whole number for each layer; the file may have one for all of them."""
        value = self.data.get(name, default)
        if isinstance(value, np.ndarray):
            if len(value) != self.layers or value.dtype.kind not in "iub" or (value < minimum).any():
                raise CheckpointError(
                    f"{self.origin}: {name} has not a whole number from {minimum} for each of {self.layers} layers"
                )
            return [int(each) for each in value]
        return [self.integer(name, 0 if default is None else default)] * self.layers

    def decimal(self, name: str, default: float) -> float:
        """A positive number that the file has as float32, as the shortest decimal: 1e-06, not 9.999999974752427e-07."""
        return float(str(np.float32(self.number(name, default))))

    def positive(self, name: str) -> float | None:
        """A number as `decimal` reads it; None if the file has none or 0, which llama.cpp does not tell apart."""
        value = self.data.get(name)
        absent = value is None or (isinstance(value, int | float) and value == 0)
        return None if absent else self.decimal(name, 1.0)

    def sliding(self, default: int) -> list[bool]:
        """Which layers have a window: listed, or all but every n-th; `default` is n for files that do not say."""
        if not self.integer("attention.sliding_window", 0, minimum=0):
            return [False] * self.layers
        pattern = self.data.get("attention.sliding_window_pattern", default)
        if isinstance(pattern, np.ndarray):
            return [bool(each) for each in self.per_layer("attention.sliding_window_pattern", minimum=0)]
        every = self.integer("attention.sliding_window_pattern", default, minimum=0)
        return [every == 0 or (index + 1) % every != 0 for index in range(self.layers)]


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        hub: the hub's name of the class.
        configure: the fields of `config.json` beyond those that all architectures have.
        layer: names of a layer's tensors in the file, without `blk.N.`, and on the hub, without `model.layers.N.`.
        model: names of further tensors, in the file and on the hub.
        interleaved: whether the rows of queries and keys are in the order of interleaved rotation.
        convolves: whether a layer without KV heads has a convolution in place of attention.
        mtp: names of the tensors of an MTP layer that other layers do not have, in the file, without `blk.N.`, and on
            the hub; empty if these layers are left out.
    """

    hub: str
    configure: Callable[[Metadata], dict[str, Any]]
    layer: Mapping[str, str]
    model: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    convolves: bool = False
    mtp: Mapping[str, str] = field(default_factory=dict)

    def config(self, metadata: Metadata) -> dict[str, Any]:
        """The configuration as a `config.json` of the hub.

        Raises:
            CheckpointError: a field is missing, out of range, or asks for something that is not supported.
        """
        heads = metadata.per_layer("attention.head_count")
        if len(set(heads)) > 1:
            raise CheckpointError(f"{metadata.origin}: layers with different numbers of query heads are not supported")
        if not metadata.flag("attention.causal", True):
            raise CheckpointError(f"{metadata.origin}: attention.causal is false, this is not a language model")
        hidden = metadata.integer("embedding_length", 0)
        kv_heads = metadata.per_layer("attention.head_count_kv", heads[0], minimum=0 if self.convolves else 1)
        fields = {
            "architectures": [self.hub],
            "vocab_size": metadata.rows("token_embd.weight"),
            "hidden_size": hidden,
            "intermediate_size": min(metadata.per_layer("feed_forward_length", metadata.data.get(_EXPERT_WIDTH))),
            "num_hidden_layers": metadata.layers,
            "num_attention_heads": heads[0],
            "num_key_value_heads": next(filter(None, kv_heads), heads[0]),
            "head_dim": _head_dim(metadata),
            "rms_norm_eps": metadata.decimal("attention.layer_norm_rms_epsilon", 1e-6),
            "max_position_embeddings": metadata.integer("context_length", 0),
            "tie_word_embeddings": "output.weight" not in metadata.entries,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),  # the vocabulary's, if there is one
        }
        return {**fields, **self.configure(metadata)}

    def mtp_name(self, name: str) -> str | None:
        """The hub's name of a tensor of the MTP layer; None for one that is not read."""
        rest = name.split(".", 2)[-1]
        if not self.mtp:
            return None
        return self.mtp.get(rest, f"{LAYER}{self.layer[rest]}" if rest in self.layer else None)

    def hub_name(self, name: str) -> str | None:
        """The hub's name of a tensor; None for one that is not a weight of the model."""
        if name in self.model:
            return self.model[name]
        _, number, rest = [*name.split(".", 2), "", ""][:3]
        if name.startswith("blk.") and _NUMBER.fullmatch(number) and rest in self.layer:
            return f"model.layers.{number}.{self.layer[rest]}"
        return None


def _head_dim(metadata: Metadata) -> int:
    """Numbers of a head, of a layer without a window where there are both kinds."""
    heads = metadata.per_layer("attention.head_count")[0]
    size = metadata.integer("attention.key_length", metadata.integer("embedding_length", 0) // heads)
    if metadata.integer("attention.value_length", size) != size:
        raise CheckpointError(f"{metadata.origin}: values of another size than keys are not supported")
    return size


_OTHER_YARN = {"yarn_attn_factor": (1.0,), "yarn_ext_factor": (1.0, -1.0), "yarn_log_multiplier": (0.0,)}
"""Fields of yarn that are not computed with, and their values that change nothing."""


def _rope(
    metadata: Metadata, other_yarn: Mapping[str, tuple[float, ...]] = _OTHER_YARN, *, part: bool = False
) -> dict[str, Any]:
    """The rotary embedding of the layers without a window, as an entry of `rope_parameters`.

    other_yarn : those of `_OTHER_YARN` that are not computed with
    part : whether a part of every head may be rotated

    As llama.cpp reads it, a factor without a type is linear, and has an older name too. The divisors are those of
    `llama3`; llama.cpp divides the frequencies by them beside any scaling.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base", 10_000.0)}
    if part:
        rope["partial_rotary_factor"] = _turned_share(metadata)
    elif metadata.integer("rope.dimension_count", size := _head_dim(metadata)) != size:
        raise CheckpointError(f"{metadata.origin}: rotation of a part of every head is not supported")
    kind = metadata.text("rope.scaling.type", "linear")
    factor = metadata.positive("rope.scaling.factor") or metadata.positive("rope.scale_linear") or 1.0
    grown = metadata.positive("rope.scaling.attn_factor") or 1.0
    of_yarn = kind == "yarn" and math.isclose(grown, 0.1 * math.log(factor) + 1, rel_tol=1e-6)  # which yarn has anyway
    if grown != 1 and not of_yarn:
        raise CheckpointError(f"{metadata.origin}: rope.scaling.attn_factor is not supported")
    if kind in ("none", ""):
        kind, factor = "linear", 1.0
    if metadata.divisors is not None and kind == "linear":  # `longrope` is the type that lists divisors
        divisors = (metadata.divisors * np.float32(factor)).tolist()
        own = {"short_factor": divisors, "long_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
        return {**rope, "rope_type": "longrope", **own}
    if metadata.divisors is not None:
        raise CheckpointError(f"{metadata.origin}: rotary scaling {kind!r:.99} beside {DIVISORS[0]} is not supported")
    if kind == "linear":
        return rope if factor == 1 else {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        context = metadata.integer("rope.scaling.original_context_length", 0)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        return {**rope, **yarn, **_yarn_bounds(metadata, other_yarn)}
    raise CheckpointError(f"{metadata.origin}: rotary scaling {kind!r:.99} is not supported")


def _turned_share(metadata: Metadata) -> float:
    """The rotated share of a head's numbers; just above a share that is not a float: 88 * (60 / 88) is below 60."""
    size = _head_dim(metadata)
    turned = metadata.integer("rope.dimension_count", size, maximum=size)
    return min(1.0, math.nextafter(turned / size, 2.0))


def _yarn_bounds(metadata: Metadata, other: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """The two numbers of turns between which yarn interpolates, where the file has them.

    llama.cpp's Llama, Qwen2 and Qwen3 read none of yarn's further fields, though its conversion writes them: the model
    was trained with them.
    """
    for name, plain in other.items():
        value = metadata.data.get(f"rope.scaling.{name}", plain[0])
        if not isinstance(value, int | float) or value not in plain:
            raise CheckpointError(
                f"{metadata.origin}: rope.scaling.{name} {value!r:.99} is not supported: export the original checkpoint"
            )
    found = {name: metadata.positive(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return {name: value for name, value in found.items() if value is not None}


def _dense(metadata: Metadata) -> dict[str, Any]:
    """Llama, Qwen2 and Qwen3: one kind of layer, without a window: llama.cpp reads none for them."""
    return _without_experts(metadata, _rope(metadata))


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Ministral 3 and Mistral Small 3. Where a file has `yarn_log_multiplier`, the factor of cosines is 1: of the
    checkpoint's equal `mscale` and `mscale_all_dim` it is the quotient.
    """
    own = {name: plain for name, plain in _OTHER_YARN.items() if name != "yarn_log_multiplier"}
    rope = _rope(metadata, own)
    if "rope.scaling.yarn_log_multiplier" in metadata.data:
        rope["attention_factor"] = 1.0
    if (beta := metadata.positive("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = beta
    return _without_experts(metadata, rope)


def _exaone4(metadata: Metadata) -> dict[str, Any]:
    """The listed layers have a window; llama.cpp gives one to those of models of 64 layers alone, 32B."""
    return {**_dense(metadata), **_listed_windows(metadata)}


def _olmo(metadata: Metadata) -> dict[str, Any]:
    """OLMo 2 and 3: the listed layers have a window and a rotation that is not scaled; OLMo 2 has none of them."""
    rope = _rope(metadata)
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        **_without_experts(metadata, rope),
        **_listed_windows(metadata),
        "rope_parameters": {FULL: rope, SLIDING: plain},
    }


def _listed_windows(metadata: Metadata) -> dict[str, Any]:
    """The window, and the layers that have it: the listed ones, or three of four."""
    return {
        "layer_types": [SLIDING if each else FULL for each in metadata.sliding(4)],
        "sliding_window": metadata.integer("attention.sliding_window", 0, minimum=0) or None,
    }


def _seed_oss(metadata: Metadata) -> dict[str, Any]:
    return {**_dense(metadata), "attention_bias": "blk.0.attn_q.bias" in metadata.entries, "attention_out_bias": False}


def _glm(metadata: Metadata) -> dict[str, Any]:
    """GLM-4 and GLM-Edge; conversions of multimodal models, whose rotation has sections, have rows in another order."""
    if "rope.dimension_sections" in metadata.data:
        raise CheckpointError(f"{metadata.origin}: rope.dimension_sections is not supported: this is not a text model")
    biased = "blk.0.attn_q.bias" in metadata.entries
    return {**_without_experts(metadata, _rope(metadata, part=True)), "attention_bias": biased}


def _ernie(metadata: Metadata) -> dict[str, Any]:
    return {**_dense(metadata), "use_bias": False}


def _ernie_mixture(metadata: Metadata) -> dict[str, Any]:
    """As llama.cpp computes it, the weights of a token's experts are normalised, and the choice has a bias."""
    return {
        **_without_window(metadata, _rope(metadata)),
        "use_bias": False,
        "moe_num_experts": metadata.integer("expert_count", 0),
        "moe_k": metadata.integer("expert_used_count", 0),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0, minimum=0),
        "moe_intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, minimum=0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    """Granite 3 and the dense models of Granite 4."""
    return {**_dense(metadata), **_granite_factors(metadata)}


def _granite_mixture(metadata: Metadata) -> dict[str, Any]:
    """The mixtures of Granite 3; the conversion of those with a dense block beside the experts says its width."""
    if metadata.integer("expert_shared_feed_forward_length", 0, minimum=0):
        raise CheckpointError(f"{metadata.origin}: experts beside a dense block are not supported")
    return {
        **_without_window(metadata, _rope(metadata)),
        **_granite_factors(metadata),
        **_experts(metadata, "num_local_experts"),
        "linear_experts": False,
    }


def _granite_factors(metadata: Metadata) -> dict[str, Any]:
    """The factors of Granite; the file also says if its layers do not rotate."""
    return {
        "embedding_multiplier": metadata.positive("embedding_scale") or 1.0,
        "residual_multiplier": metadata.positive("residual_scale") or 1.0,
        "attention_multiplier": metadata.positive("attention.scale") or _head_dim(metadata) ** -0.5,
        "logits_scaling": metadata.positive("logit_scale") or 1.0,
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", True) else "nope",
    }


def _experts(metadata: Metadata, count: str = "num_experts") -> dict[str, Any]:
    """How many experts there are, a field of the name `count`, and how many of them a token uses."""
    used = metadata.integer("expert_used_count", 0)
    return {count: metadata.integer("expert_count", 0), "num_experts_per_tok": used}


def _without_experts(metadata: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    if metadata.integer("expert_count", 0, minimum=0):
        raise CheckpointError(f"{metadata.origin}: experts are not supported in models of this architecture")
    return _without_window(metadata, rope)


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    """As llama.cpp computes it, the weights of a token's experts are not normalised."""
    return {
        **_without_window(metadata, _rope(metadata)),
        "attention_bias": False,
        **_experts(metadata),
        "norm_topk_prob": False,
    }


def _qwen2_mixture(metadata: Metadata) -> dict[str, Any]:
    """The same, with an expert that every token uses."""
    return {
        **_olmoe(metadata),
        "moe_intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0),
        "qkv_bias": "blk.0.attn_q.bias" in metadata.entries,
        "decoder_sparse_step": 1,
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return {
        **_without_window(metadata, _rope(metadata)),
        **_experts(metadata, "num_local_experts"),
    }


def _qwen3_mixture(metadata: Metadata) -> dict[str, Any]:
    """As llama.cpp computes it, all layers have experts, and the weights of a token's experts are normalised."""
    return {
        **_without_window(metadata, _rope(metadata)),
        **_experts(metadata, "num_local_experts"),
        "moe_intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        "norm_topk_prob": True,
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Yarn's bounds are not rounded to whole pairs, as the model was trained; llama.cpp rounds them."""
    rope = {**_rope(metadata), "truncate": False}
    return {
        "hidden_act": "silu",
        "sliding_window": metadata.integer("attention.sliding_window", 1, minimum=0) or 1,
        "layer_types": [SLIDING if each else FULL for each in metadata.sliding(2)],
        "rope_parameters": {FULL: rope, SLIDING: rope},
        **_experts(metadata, "num_local_experts"),
        "intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        "alternating_experts": False,
    }


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    """The dense models of LFM2; layers without KV heads have a convolution."""
    kv_heads = metadata.per_layer("attention.head_count_kv", minimum=0)
    if len(set(kv_heads) - {0}) != 1:
        raise CheckpointError(
            f"{metadata.origin}: layers with different numbers of KV heads, or none, are not supported"
        )
    if metadata.integer("attention.sliding_window", 0, minimum=0):
        raise CheckpointError(f"{metadata.origin}: attention.sliding_window beside convolutions is not supported")
    return {
        **_without_window(metadata, _rope(metadata)),
        "layer_types": [FULL if each else CONVOLUTION for each in kv_heads],
        "norm_eps": metadata.decimal("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": metadata.integer("shortconv.l_cache", 0),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


_OWN = re.compile("embed_tokens|shared_head_head")
"""Tensors of an MTP layer that has a token embedding or a head of its own."""


def _qwen_3_5(metadata: Metadata) -> dict[str, Any]:
    """The dense models of Qwen3.5."""
    return {
        **_without_experts(metadata, _rope(metadata, part=True)),
        **_delta_layers(metadata),
        **_mtp_layers(metadata),
    }


def _mtp_layers(metadata: Metadata) -> dict[str, Any]:
    """The number of MTP layers, and whether they have a token embedding or a head of their own."""
    return {
        "mtp_num_hidden_layers": metadata.drafting,
        "mtp_use_dedicated_embeddings": any(".nextn." in name and _OWN.search(name) for name in metadata.entries),
    }


def _qwen_3_5_mixture(metadata: Metadata) -> dict[str, Any]:
    return {
        **_without_window(metadata, _rope(metadata, part=True)),
        **_delta_layers(metadata),
        **_experts(metadata),
        "moe_intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length", 0),
        **_mtp_layers(metadata),
    }


def _qwen_3_next(metadata: Metadata) -> dict[str, Any]:
    """Value heads are in the order of the hub. Older conversions have left one more matrix joined."""
    return {
        **_qwen_3_5_mixture(metadata),
        "tiled_value_heads": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "joined_qkvz": "blk.0.ssm_in.weight" in metadata.entries,
    }


def _delta_layers(metadata: Metadata) -> dict[str, Any]:
    """Layers with the gated delta rule. Value heads are in another order than on the hub, and so are all their rows."""
    key_heads, value_heads = metadata.integer("ssm.group_count", 0), metadata.integer("ssm.time_step_rank", 0)
    every, inner = metadata.integer("full_attention_interval", 4), metadata.integer("ssm.inner_size", 0)
    if inner % value_heads:
        raise CheckpointError(
            f"{metadata.origin}: ssm.inner_size {inner} is not a multiple of {value_heads} value heads"
        )
    return {
        "layer_types": [DELTA if (index + 1) % every else FULL for index in range(metadata.layers)],
        "norm_offset": 0,
        "log_decay": False,
        "tiled_value_heads": value_heads != key_heads,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel", 0),
        "linear_key_head_dim": metadata.integer("ssm.state_size", 0),
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }


_SIGMOID = 2
"""The gating function of `expert_gating_func` (`enum llama_expert_gating_func_type`)."""


def _lfm2_mixture(metadata: Metadata) -> dict[str, Any]:
    """As llama.cpp computes it, the weights of a token's experts are normalised."""
    gating = metadata.integer("expert_gating_func", 0)
    if gating != _SIGMOID or metadata.positive("expert_weights_scale") not in (None, 1.0):
        raise CheckpointError(
            f"{metadata.origin}: experts of the gating function {gating}, or scaled, are not supported"
        )
    return {
        **_lfm2(metadata),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0, minimum=0),
        **_experts(metadata),
        "moe_intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _without_window(metadata: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "layer_types": [FULL] * metadata.layers,
        "rope_parameters": {FULL: rope, SLIDING: rope},
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    """A file has the same two lists of divisors as a checkpoint of the hub."""
    context = metadata.integer("context_length", 0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base", 10_000.0)}
    kind, factor = metadata.text("rope.scaling.type", "longrope"), metadata.positive("rope.scaling.factor")
    if kind not in ("longrope", "linear", "none", "") or factor not in (None, 1.0):
        raise CheckpointError(f"{metadata.origin}: rotary scaling {kind!r:.99} by {factor or 1} is not supported")
    grown = metadata.positive("rope.scaling.attn_factor") or 1.0
    if metadata.divisors is None and grown != 1:
        raise CheckpointError(f"{metadata.origin}: rope.scaling.attn_factor without {DIVISORS[1]} is not supported")
    if metadata.divisors is not None:
        rope |= {
            "rope_type": "longrope",
            "short_factor": metadata.divisors.tolist(),
            "long_factor": None if metadata.long_divisors is None else metadata.long_divisors.tolist(),
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length", context),
            "attention_factor": grown,
        }
    window = metadata.integer("attention.sliding_window", 0, minimum=0)
    rope["partial_rotary_factor"] = _turned_share(metadata)
    return {
        "hidden_act": "silu",
        "sliding_window": window or None,
        "layer_types": [SLIDING if window else FULL] * metadata.layers,
        "rope_parameters": {FULL: rope, SLIDING: rope},
    }


def _gemma(metadata: Metadata) -> dict[str, Any]:
    return {**_dense(metadata), "hidden_act": "gelu_pytorch_tanh", "norm_offset": 0}


_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _pre_attn_scalar(metadata: Metadata, name: str) -> int:
    """The scale of attention is a constant of llama.cpp, and another one for the largest model."""
    if metadata.layers == _LAYERS_OF_27B[name]:
        return metadata.integer("embedding_length", 0) // metadata.per_layer("attention.head_count")[0]
    return _head_dim(metadata)


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    """Every other layer has a window, as llama.cpp has it without reading a pattern."""
    return {
        **_gemma(metadata),
        "query_pre_attn_scalar": _pre_attn_scalar(metadata, "gemma2"),
        "layer_types": [FULL if index % 2 else SLIDING for index in range(metadata.layers)],
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.decimal("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """The base of sliding layers and their pattern are constants of llama.cpp too."""
    sliding = metadata.sliding(6)
    own_base = metadata.decimal("rope.freq_base_swa", 10_000.0)
    return {
        "head_dim": _head_dim(metadata),
        "hidden_activation": "gelu_pytorch_tanh",
        "norm_offset": 0,
        "query_pre_attn_scalar": _pre_attn_scalar(metadata, "gemma3"),
        "layer_types": [SLIDING if each else FULL for each in sliding],
        "sliding_window": metadata.integer("attention.sliding_window", 1, minimum=0) or 1,
        "rope_parameters": {
            FULL: _rope(metadata),
            SLIDING: {"rope_type": "default", "rope_theta": own_base},
        },
        "final_logit_softcapping": metadata.positive("final_logit_softcapping"),
    }


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    sliding = metadata.sliding(6)
    full = _head_dim(metadata)
    own = metadata.integer("attention.key_length_swa", 256)
    shared = metadata.integer("attention.shared_kv_layers", 0, minimum=0)
    kv_heads = metadata.per_layer("attention.head_count_kv")
    widths = metadata.per_layer("feed_forward_length")
    first_shared = metadata.layers - shared
    double = shared > 0 and widths[-1] == 2 * widths[0]
    if any(width != widths[0] * (1 + (double and index >= first_shared)) for index, width in enumerate(widths)):
        raise CheckpointError(f"{metadata.origin}: feed-forward blocks of these widths are not supported")
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": own,
        "global_head_dim": full,
        "layer_types": [SLIDING if each else FULL for each in sliding],
        "per_layer_config": {
            str(index): {"head_dim": own if sliding[index] else full, "num_key_value_heads": kv_heads[index]}
            for index in range(metadata.layers)
        },
        "attention_k_eq_v": any(
            f"blk.{index}.attn_k.weight" in metadata.entries and f"blk.{index}.attn_v.weight" not in metadata.entries
            for index in range(min(first_shared, metadata.layers))
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": double,
        "sliding_window": metadata.integer("attention.sliding_window", 0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0, minimum=0),
        "final_logit_softcapping": metadata.positive("final_logit_softcapping"),
        "rope_parameters": {
            FULL: _proportional(metadata),
            SLIDING: {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base_swa", 10_000.0)},
        },
    }
    if fields["hidden_size_per_layer_input"]:
        fields["vocab_size_per_layer_input"] = metadata.rows("per_layer_token_embd.weight")
    if metadata.integer("expert_count", 0, minimum=0):
        fields |= {
            "enable_moe_block": True,
            "num_experts": metadata.integer("expert_count", 0),
            "top_k_experts": metadata.integer("expert_used_count", 0),
            "moe_intermediate_size": metadata.integer(_EXPERT_WIDTH, 0),
        }
    return fields


def _proportional(metadata: Metadata) -> dict[str, Any]:
    """The full layers turn a share of a head's pairs: those whose frequencies `rope_freqs` divides by 1."""
    if metadata.divisors is None:
        raise CheckpointError(f"{metadata.origin} has no tensor {DIVISORS[0]}: it is damaged")
    turning = int(np.count_nonzero(metadata.divisors == 1))
    if not turning or (metadata.divisors[:turning] != 1).any() or (metadata.divisors[turning:] < 1e20).any():
        raise CheckpointError(f"{metadata.origin}: rope_freqs.weight is not 1 for some pairs and infinite for the rest")
    share, theta = turning / len(metadata.divisors), metadata.decimal("rope.freq_base", 1_000_000.0)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta}


def _gemma4_assistant(metadata: Metadata) -> dict[str, Any]:
    """An MTP drafter; the conversion leaves out its token clusters, so that it scores the whole vocabulary."""
    backbone = metadata.integer("embedding_length_out", 0)
    return {**_gemma4(metadata), "backbone_hidden_size": backbone, "use_ordered_embeddings": False}


_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTIONS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LLAMA = {**_PROJECTIONS, "ffn_norm.weight": "post_attention_layernorm.weight"}
_BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_PHI_3 = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_up.weight": "mlp.gate_up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_GEMMA_2 = {
    **_PROJECTIONS,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GEMMA = {**_GEMMA_2, **_HEAD_NORMS}
_GEMMA_4 = {
    **_GEMMA,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
_SEED_OSS = {**_PROJECTIONS, **_BIASES, "post_attention_norm.weight": "post_attention_layernorm.weight"}
_GLM = {
    **{name: hub for name, hub in _LLAMA.items() if name != "ffn_gate.weight"},
    **_BIASES,
    "ffn_up.weight": "mlp.gate_up_proj.weight",
}
_GLM_4 = {
    **_GLM,
    "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
}
_QWEN_3 = {**_LLAMA, **_HEAD_NORMS}
_QWEN_3_5 = {
    **_PROJECTIONS,
    **_HEAD_NORMS,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_QWEN_3_MIXTURE = {
    **_QWEN_3,
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    **{f"ffn_{name}_shexp.weight": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
}
_QWEN_2_MIXTURE = {**_QWEN_3_MIXTURE, **_BIASES, **_SHARED_EXPERT}
_ERNIE_MIXTURE = {
    **_LLAMA,
    **{name: hub for name, hub in _QWEN_3_MIXTURE.items() if name not in _QWEN_3},
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    **{f"ffn_{name}_shexp.weight": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
}
_QWEN_3_5_MIXTURE = {
    **{name: hub for name, hub in _QWEN_3_5.items() if not name.startswith("ffn_")},
    **{name: hub for name, hub in _QWEN_3_MIXTURE.items() if name.endswith("_exps.weight")},
    "ffn_gate_inp.weight": "mlp.gate.weight",
    **_SHARED_EXPERT,
}
_QWEN_3_NEXT = {
    **{name: hub for name, hub in _QWEN_3_5_MIXTURE.items() if name not in {"ssm_alpha.weight", "ssm_beta.weight"}},
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
}
_GPT_OSS = {
    **_PROJECTIONS,
    **_BIASES,
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    **{f"ffn_{name}_exps.weight": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_exps.bias": f"mlp.experts.{name}_proj_bias" for name in ("gate", "up", "down")},
}
_GRANITE_MIXTURE = {
    **_LLAMA,
    "ffn_gate_inp.weight": "block_sparse_moe.router.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps.weight": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
}
_MIXTRAL = {**_GRANITE_MIXTURE, "ffn_gate_inp.weight": "block_sparse_moe.gate.weight"}
_LFM_2 = {
    "attn_norm.weight": "operator_norm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "shortconv.conv.weight": "conv.conv.weight",
    "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
}
_LFM_2_MIXTURE = {
    **_LFM_2,
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps.weight": "feed_forward.experts.gate_proj",
    "ffn_up_exps.weight": "feed_forward.experts.up_proj",
    "ffn_down_exps.weight": "feed_forward.experts.down_proj",
}
_MIXTURES = (_QWEN_3_MIXTURE, _QWEN_3_5_MIXTURE, _ERNIE_MIXTURE, _LFM_2_MIXTURE, _GRANITE_MIXTURE)
MATRICES = {hub: file for names in (_GEMMA_4, _QWEN_3_5, *_MIXTURES) for file, hub in names.items()}
"""The names of a layer's matrices in files, by those on the hub; of all architectures, which name them alike."""
for _block in ("mlp", "feed_forward", "block_sparse_moe"):  # gate and up have the same inputs
    MATRICES[f"{_block}.experts.gate_up_proj"] = "ffn_gate_exps.weight"

_PER_LAYER = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_MODEL_OF_LFM_2 = {
    **_MODEL,
    **dict.fromkeys(("token_embd_norm.weight", "output_norm.weight"), "model.embedding_norm.weight"),
}
"""Conversions have named the last norm after the embedding, as the hub does."""
_NEXTN = {
    "nextn.pre_projection.weight": "pre_projection.weight",
    "nextn.post_projection.weight": "post_projection.weight",
}

_MTP = {
    "nextn.eh_proj.weight": JOINED,
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _dense, _LLAMA, _MODEL, interleaved=True),
    "granite": Architecture("GraniteForCausalLM", _granite, _LLAMA, _MODEL, interleaved=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", _granite_mixture, _GRANITE_MIXTURE, _MODEL, interleaved=True),
    "mistral3": Architecture("Ministral3ForCausalLM", _mistral3, _LLAMA, _MODEL, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", _dense, {**_LLAMA, **_BIASES}, _MODEL),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2_mixture, _QWEN_2_MIXTURE, _MODEL),
    "qwen3": Architecture("Qwen3ForCausalLM", _dense, _QWEN_3, _MODEL),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3_mixture, _QWEN_3_MIXTURE, _MODEL),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _qwen_3_5, _QWEN_3_5, _MODEL, mtp=_MTP),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _qwen_3_5_mixture, _QWEN_3_5_MIXTURE, _MODEL, mtp=_MTP),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _qwen_3_next, _QWEN_3_NEXT, _MODEL, mtp=_MTP),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss, _GPT_OSS, _MODEL),
    "lfm2": Architecture("Lfm2ForCausalLM", _lfm2, _LFM_2, _MODEL_OF_LFM_2, convolves=True),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", _lfm2_mixture, _LFM_2_MIXTURE, _MODEL_OF_LFM_2, convolves=True),
    "exaone4": Architecture("Exaone4ForCausalLM", _exaone4, _GEMMA, _MODEL),
    "olmoe": Architecture("OlmoeForCausalLM", _olmoe, _QWEN_3_MIXTURE, _MODEL),
    "olmo2": Architecture("Olmo3ForCausalLM", _olmo, _GEMMA, _MODEL),
    "seed_oss": Architecture("SeedOssForCausalLM", _seed_oss, _SEED_OSS, _MODEL),
    "chatglm": Architecture("GlmForCausalLM", _glm, _GLM, _MODEL),
    "glm4": Architecture("Glm4ForCausalLM", _glm, _GLM_4, _MODEL),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _ernie, _LLAMA, _MODEL),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", _ernie_mixture, _ERNIE_MIXTURE, _MODEL),
    "phi3": Architecture("Phi3ForCausalLM", _phi3, _PHI_3, _MODEL),
    "gemma": Architecture("GemmaForCausalLM", _gemma, _LLAMA, _MODEL),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, _GEMMA_2, _MODEL),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, _GEMMA, _MODEL),
    "gemma4": Architecture("Gemma4ForCausalLM", _gemma4, _GEMMA_4, {**_MODEL, **_PER_LAYER}),
    "gemma4-assistant": Architecture("Gemma4AssistantForCausalLM", _gemma4_assistant, _GEMMA_4, {**_MODEL, **_NEXTN}),
}
"""By `general.architecture`."""

_WITH_EXPERTS = {"llama": Architecture("MixtralForCausalLM", _mixtral, _MIXTRAL, _MODEL, interleaved=True)}
"""Architectures that are others if there are experts."""


def find_architecture(metadata: Mapping[str, Any], origin: str) -> Architecture:
    """The architecture that a file's metadata name.

    Raises:
        CheckpointError: it is not read.
    """
    name = metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    experts = metadata.get(f"{name}.expert_count")
    if isinstance(experts, int) and experts:
        found = _WITH_EXPERTS.get(str(name), found)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{origin} has a model of the architecture {name!r:.99}, which is not read (only {known})"
        )
    return found
