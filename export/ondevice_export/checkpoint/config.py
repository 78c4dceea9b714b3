"""`config.json` of the hub, old or new, brought to one spelling: that of transformers 5.

Every reader of a configuration then knows one spelling only. A checkpoint that is not a directory of the hub (a GGUF
file) presents its metadata as such a mapping.

    layer_types          one of `full_attention` and `sliding_attention` for every layer, or `conv`, or
                         `linear_attention`
    rope_parameters      for each kind of attention, its `rope_type`, `rope_theta` and what the type needs
    no_rope_layers       for every layer 1, or 0 if it does not rotate; only of classes that have such layers
    layer_rope_theta     for every layer its `rope_theta`, or 0 if it does not rotate; only of classes that have it
    hidden_activation    the activation, with its older names
    alternating_experts  whether rows of gate and up alternate in experts, whose matrices are then stored transposed
                         unless they are quantised; false for a file that has all of gate first
    log_decay            whether the decay of the gated delta rule is stored as log(-decay); false for a file that has
                         it itself
    tiled_value_heads    whether value head i of the gated delta rule has key head i modulo their number, as in a file,
                         not those of a key head next to each other
    joined_qkvz          whether one matrix of Qwen3-Next has the rows of queries, keys, values and z; false for a file
                         that has two
    linear_experts       whether experts of Granite are named `input_linear` and `output_linear`; false for a file
    norm_offset          added to the weights of norms, where a family stores them without; 0 for a file that has it
                         added already
    window_period        of so many layers the last has no window; of classes that do not read `sliding_window_pattern`
    alternating_windows  whether of the first `max_window_layers` layers every other one has a window, the first one
                         too; otherwise all others have it. Only of classes that read this number
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ondevice.bundle_format.decoder import MAX_LAYERS
from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields

SLIDING, FULL, CONVOLUTION, DELTA = "sliding_attention", "full_attention", "conv", "linear_attention"
_OTHER_MIXERS = {"conv_L_cache": CONVOLUTION, "linear_conv_kernel_dim": DELTA}
"""Fields of the classes that have other layers than attention -> the kind of these."""
_PERIODS = {"window_period": 1, "sliding_window_pattern": 1, "full_attention_interval": 0}
"""Fields with the number of layers of which one has no window: the last one, or of Granite the first."""
_ORIGINAL = "original_max_position_embeddings"

_UNSUPPORTED = (
    "attention_bias",
    "mlp_bias",
    "attn_logit_softcapping",
    "clip_qkv",
    "num_local_experts",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
"""Fields that change what a model computes, in ways that bundles do not have, wherever they are set; but for classes
that have them among their defaults."""

_OF_SOME_CLASSES = (
    "final_logit_softcapping",
    "full_attention_interval",
    "hidden_activation",
    "layer_rope_theta",
    "max_window_layers",
    "no_rope_layer_interval",
    "rope_local_base_freq",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "window_period",
    "alternating_windows",
)
"""Fields that are read only where the defaults name them. A configuration may still have those of the model that it was
made from, which transformers ignores."""


def architecture(data: Mapping[str, Any]) -> str:
    """The class of a model, by which families are told apart."""
    names = data.get("architectures")
    return str(names[0])[:99] if isinstance(names, list) and names else "none"


def newer_spelling(data: Mapping[str, Any], defaults: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The configuration of the text model in transformers 5's spelling, without fields that are null.

    Args:
        data: `config.json`, with the text model's part at the top or in `text_config`.
        defaults: values of absent fields, in either spelling, of the checkpoint's family; None for no value.
        origin: what error messages call `data`.

    Raises:
        CheckpointError: a field is damaged or asks for something that is not supported.
    """
    outer = JsonFields(data, origin)
    text = outer if outer.data.get("text_config") is None else outer.mapping("text_config", {})
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    found = {**defaults, **{name: data[name] for name in shared if name in data}, **text.data}
    if not text.flag("tie_word_embeddings", True) or not outer.flag("tie_word_embeddings", True):
        found["tie_word_embeddings"] = False
    if found.get("rope_parameters") is None:  # elsewhere null has a meaning of its own, as no window
        found["rope_parameters"] = defaults.get("rope_parameters")
    if text.data.get("rope_parameters") is None and text.data.get("rope_scaling"):  # the older name
        found["rope_parameters"] = None
    ignored = set(_OF_SOME_CLASSES).difference(defaults)
    found = {name: value for name, value in found.items() if value is not None and name not in ignored}
    for name in _UNSUPPORTED:
        if name not in defaults and found.get(name):
            raise CheckpointError(f"{text.origin}: {name} is not supported")
    if found.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise CheckpointError(f"{text.origin}: bidirectional attention is not supported, this is not a language model")
    found["hidden_activation"] = found.get("hidden_activation", found.get("hidden_act"))
    fields = JsonFields(found, text.origin)
    if "no_rope_layers" in found or "no_rope_layer_interval" in found:
        found["no_rope_layers"] = _no_rope_layers(fields)
    if "no_rope_layer_interval" not in defaults:  # classes without the one ignore the other too
        found.pop("no_rope_layers", None)
    found["layer_types"] = _layer_types(fields)
    thetas, count = found.get("layer_rope_theta", [0] * MAX_LAYERS), len(found["layer_types"])
    if not isinstance(thetas, list) or len(thetas) < count or not all(isinstance(each, int | float) for each in thetas):
        raise CheckpointError(f"{text.origin}: layer_rope_theta has not one number for each layer")
    found["rope_parameters"] = _rope_parameters(fields)
    return found


def _no_rope_layers(fields: JsonFields) -> list[Any]:
    """The list for every layer; the given one may be longer."""
    count = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    given = fields.data.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval")
        return [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(given, list) or len(given) < count:
        raise CheckpointError(f"{fields.origin}: no_rope_layers has not one number for each layer")
    return given[:count]


def _layer_types(fields: JsonFields) -> list[str]:
    data, count = fields.data, fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if (given := data.get("layer_types")) is not None:
        if isinstance(given, list):  # a name of full attention beside Mamba layers
            given = [FULL if name == "attention" else name for name in given]
        others = [kind for name, kind in _OTHER_MIXERS.items() if name in data]
        known = (FULL, *(others or (SLIDING,)))
        if not isinstance(given, list) or len(given) != count or not all(name in known for name in given):
            raise CheckpointError(f"{fields.origin}: layer_types does not name {count} layers of {' or '.join(known)}")
        return list(given)
    if "linear_conv_kernel_dim" in data:
        every = fields.integer("full_attention_interval")
        return [DELTA if (index + 1) % every else FULL for index in range(count)]
    if "conv_L_cache" in data:
        attending = data.get("full_attn_idxs", list(range(count)))
        if not isinstance(attending, list):
            raise CheckpointError(f"{fields.origin}: full_attn_idxs is {attending!r:.99}, expected numbers of layers")
        return [FULL if index in attending else CONVOLUTION for index in range(count)]
    return _windows(fields)


def _windows(fields: JsonFields) -> list[str]:
    """The kinds of layers that all have attention."""
    data, count = fields.data, fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if not fields.flag("use_sliding_window", True) or "sliding_window" not in data:
        return [FULL] * count
    if "no_rope_layers" in data:  # SmolLM3: layers without rotation have the window
        return [FULL if rotates else SLIDING for rotates in data["no_rope_layers"]]
    for name, before in _PERIODS.items():
        if name in data:
            every = fields.integer(name)
            return [SLIDING if (index + before) % every else FULL for index in range(count)]
    first = fields.integer("max_window_layers", 0, minimum=0)
    if fields.flag("alternating_windows"):
        return [SLIDING if index < first and index % 2 == 0 else FULL for index in range(count)]
    return [SLIDING if index >= first else FULL for index in range(count)]


def _rope_parameters(fields: JsonFields) -> dict[str, Any]:
    """The rotary embedding of each kind of layer; the older spelling is flat, with a theta of sliding layers beside.

    Of `rope_parameters` and a `rope_scaling` that says something else transformers takes the latter, and forgets the
    theta of the former: this is refused.
    """
    given = fields.mapping("rope_parameters", {}).data
    scaling = dict(fields.mapping("rope_scaling", {}).data)
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    newer = given.get(FULL, given)
    if newer and isinstance(newer, Mapping) and any(newer.get(name) != value for name, value in scaling.items()):
        raise CheckpointError(f"{fields.origin}: rope_scaling differs from rope_parameters, where its fields belong")
    if FULL in given or SLIDING in given:
        own = {kind: dict(fields.mapping("rope_parameters", {}).mapping(kind, {}).data) for kind in (FULL, SLIDING)}
    elif given and "rope_local_base_freq" in fields.data:  # transformers takes its own defaults then
        raise CheckpointError(
            f"{fields.origin}: rope_parameters names neither {FULL} nor {SLIDING}: move its fields there"
        )
    else:
        flat = {**scaling, **given}
        if _ORIGINAL in fields.data:  # this one counts for transformers, whatever is inside
            flat[_ORIGINAL] = fields.data[_ORIGINAL]
        own = {FULL: flat, SLIDING: {} if "rope_local_base_freq" in fields.data else dict(flat)}
    thetas = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    for kind, parameters in own.items():
        if "truncate" in parameters:  # the one field of which null is not its default
            parameters["truncate"] = parameters["truncate"] or False
        for name in [name for name, value in parameters.items() if value is None]:
            del parameters[name]
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        theta = fields.data.get(thetas[kind], fields.data.get("rope_theta"))
        if theta is not None:
            parameters.setdefault("rope_theta", theta)
        if "partial_rotary_factor" in fields.data:
            parameters.setdefault("partial_rotary_factor", fields.data["partial_rotary_factor"])
    return own
