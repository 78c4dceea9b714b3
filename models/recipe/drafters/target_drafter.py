"""A drafter for any target with full attention: Gemma's MTP form, reading the cache of the target's last full layer.

A round starts when the newest token x[t+1] and the cache of positions <= t are known; `drafter.py` describes its steps.
The head is the target's own, over a list of frequent tokens: a step's logits are `target_head[tokens] @ state`, where
the state is the drafter's estimate of the target's next one. So nothing of the vocabulary's size is trained or stored.

The first layer starts as the target's last: see `start_from_target`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pair.target import calm
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma4AssistantConfig, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lesson
from ondevice.bundle_format.decoder import Attention
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import FINAL_NORM, NORMS, layer_shapes
from ondevice_export.checkpoint.models import open_target
from ondevice_export.checkpoint.named_tensors import NamedTensors
from ondevice_export.checkpoint.source import locate

RIDGE = 1e-3  # relative to the inputs' variance, which is one
QUIET = 0.03
"""What a block adds at first, relative to the stream. After 60,000 rounds on a CPU SmolLM2's drafter had 1.492 tokens a
round at temperature 0 and 1.448 at 1, with 0.1 1.488 and 1.447, and with 0.3 1.449 and 1.420."""
SEEN = 4096  # inputs of a layer from which the size of its queries is taken
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPE_TYPES = ("default", "linear", "llama3", "proportional")  # without a factor of cosines and sines


def drafter_config(target: FrozenTarget, *, width: int, layers: int, mlp: int) -> Gemma4AssistantConfig:
    """The configuration for a target's, with `width` hidden units and `mlp` units of the feed-forward blocks.

    The drafter rotates as the target does, by `Rotation` here and by the target's configuration in a bundle. So its own
    rotary embedding is for transformers, and plain where Gemma's form has none like it.
    """
    own, form, config = target.attention, target.form, target.described.config
    rope = dict(config.rope("full_attention").data)
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0 and rope.get("rope_type") != "proportional"
    if partial or rope.get("rope_type") not in ROPE_TYPES:
        rope = PLAIN_ROPE
    gelu = form.layers[target.source].feed_forward.activation == "gelu_tanh"
    text = Gemma4TextConfig(
        vocab_size=form.vocab_size,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_kv_shared_layers=layers,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        head_dim=own.head_dim,
        global_head_dim=own.head_dim,
        hidden_activation="gelu_pytorch_tanh" if gelu else "silu",
        rms_norm_eps=form.norm_eps,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
        max_position_embeddings=config.integer("max_position_embeddings"),
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        **{name: config.token_ids.get(name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")},
    )
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=form.hidden_size, use_ordered_embeddings=False)


class Rotation(nn.Module):
    """The cosines and sines of the target's rotary embedding, in the place of transformers' class.

    frequencies : float32[D / 2], see `FrozenTarget.rotation`
    """

    frequencies: Tensor

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
        """[..., R, D] each, for positions [..., R]."""
        angles = positions[..., None].float() * self.frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class TargetDrafter(nn.Module):
    """The layers and the projections around them. Inputs and outputs are divided by each channel's scale, so that all
    channels learn at one rate; a checkpoint has the scales in its projections.

    Two rejected alternatives, after 400,000 rounds on 350,000 tokens of SmolLM2-135M's replies, which bring one layer
    1.55 and 1.50 tokens a round at temperatures 0 and 1. With the states after a third and two thirds of the target's
    layers as further inputs of a round's first step, as in EAGLE-3, it has 1.60 and 1.53: 3 and 1.5 % for a tenth more
    to read in a first step, and for states that every forward must keep. Two layers with half as many MLP units
    each have 1.55 and 1.50 too, and take longer.

    input_scale : float32[2 H], of token embeddings and states; output_scale : float32[H], of states
    """

    input_scale: Tensor
    output_scale: Tensor

    def __init__(self, config: Gemma4AssistantConfig, rotation: Tensor) -> None:
        """rotation : see `FrozenTarget.rotation`"""
        super().__init__()
        text, target = config.text_config, config.backbone_hidden_size
        self.config = config
        self.pre_projection = nn.Linear(2 * target, text.hidden_size, bias=False)
        self.model: Any = Gemma4TextModel(text)
        del self.model.embed_tokens
        self.model.rotary_emb = Rotation(rotation)
        self.model.set_attn_implementation("sdpa")
        self.post_projection = nn.Linear(text.hidden_size, target, bias=False)
        self.register_buffer("input_scale", torch.ones(2 * target))
        self.register_buffer("output_scale", torch.ones(target))
        for layer in self.model.layers:
            calm(layer)

    def forward(
        self, embeddings: Tensor, states: Tensor, cache: tuple[Tensor, Tensor], mask: Tensor, positions: Tensor
    ) -> Tensor:
        """One step of R rounds in each of B blocks.

        embeddings, states : [B, R, H]; cache : K and V [B, heads, T, D]; mask : [B, 1, R, T], added to scores
        positions : int64[B, R], of the rounds' newest tokens
        returns the next states [B, R, H]
        """
        inputs = torch.cat([embeddings, states], dim=-1) / self.input_scale
        hidden = self.model(
            inputs_embeds=self.pre_projection(inputs),
            position_ids=positions,
            attention_mask={"full_attention": mask},
            shared_kv_states={"full_attention": cache},
            use_cache=False,
        ).last_hidden_state
        following: Tensor = self.post_projection(hidden) * self.output_scale
        return following

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by transformers' names."""
        found = {
            name: value for name, value in self.state_dict().items() if "scale" not in name or "layer_scalar" in name
        }
        found["pre_projection.weight"] = found["pre_projection.weight"] / self.input_scale
        found["post_projection.weight"] = found["post_projection.weight"] * self.output_scale[:, None]
        return {name: value.detach().to("cpu", torch.bfloat16).contiguous().clone() for name, value in found.items()}


def save_drafter(drafter: TargetDrafter, target: FrozenTarget, head_tokens: Tensor, directory: Path) -> None:
    """Write `config.json` and `model.safetensors`; the width of heads as `global_head_dim`, as on the hub."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = drafter.tensors() | {"masked_embedding.head_tokens": head_tokens.to("cpu", torch.int32)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "model.safetensors").chmod(0o644)
    config = json.loads(drafter.config.to_json_string(use_diff=False))
    config["text_config"].pop("per_layer_config", None)
    config["text_config"]["global_head_dim"] = config["text_config"]["head_dim"]
    config |= {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "dtype": "bfloat16",
        "num_head_tokens": len(head_tokens),
        "target": {"name": target.name},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def start_from_drafter(drafter: TargetDrafter, directory: Path) -> None:
    """The weights of a saved drafter of the same shape, for another target or other replies.

    Raises:
        ValueError: its shape is another.
    """
    tensors = {name: value.float() for name, value in load_file(directory / "model.safetensors").items()}
    del tensors["masked_embedding.head_tokens"]
    expected = {name: value.shape for name, value in drafter.tensors().items()}
    if {name: value.shape for name, value in tensors.items()} != expected:
        raise ValueError(f"{directory}: the drafter's shape is not that of this training: see --width, --layers, --mlp")
    scales = {"input_scale": drafter.input_scale.cpu(), "output_scale": drafter.output_scale.cpu()}
    tensors["pre_projection.weight"] *= scales["input_scale"]
    tensors["post_projection.weight"] /= scales["output_scale"][:, None]
    drafter.load_state_dict(tensors | scales)


@torch.no_grad()
def start_from_target(drafter: TargetDrafter, target: FrozenTarget, lessons: Sequence[Lesson]) -> None:
    """Scales of all channels; and if the widths are equal, a linear start with the target's layers.

    The projection before the layers becomes the least squares estimate of the target's next state before its norm's
    factors, of size one, from the next token's embedding and the state; the projection after them the identity. The
    layers are the target's last up to `source`, whose blocks add little at first. Of these, what Gemma's form has no
    place for, such as experts, biases and sinks, is left out.
    """
    width, device = target.form.hidden_size, target.projection.device
    with open_target(locate(str(target.path)), lambda _: None, text_only=True) as opened:
        factors = torch.tensor(opened.tensors.read(FINAL_NORM)).to(device)
        inputs, wanted = [], []
        for lesson in lessons:
            said = slice(lesson.prompt - 1, len(lesson.tokens) - 1)
            hidden = lesson.hidden[said].to(device).float()
            embedded = target.embed(lesson.tokens[said].to(device)).float()
            inputs.append(torch.cat([embedded[1:], hidden[:-1]], dim=-1))
            wanted.append(hidden[1:] / factors)
        rows = torch.cat(inputs)
        drafter.input_scale.copy_(rows.pow(2).mean(dim=0).sqrt().clamp(min=1e-4))
        drafter.output_scale.copy_(drafter.input_scale[width:])
        if drafter.config.text_config.hidden_size != width:
            return
        rows = rows / drafter.input_scale
        gram = rows.T @ rows + RIDGE * len(rows) * torch.eye(2 * width, device=rows.device)
        drafter.pre_projection.weight.copy_(torch.linalg.solve(gram, rows.T @ torch.cat(wanted)).T)
        drafter.post_projection.weight.copy_(torch.diag(1 / drafter.output_scale))
        drafter.model.norm.weight.copy_(factors)
        x, layers = rows[:SEEN] @ drafter.pre_projection.weight.T, list(drafter.model.layers)
        heads = target.attention.heads, target.attention.head_dim
        for number, own in enumerate(layers, target.source + 1 - len(layers)):
            mixer = target.form.layers[number].mixer if number >= 0 else None
            if isinstance(mixer, Attention) and (mixer.heads, mixer.head_dim) == heads:
                start_layer(own, target.form, number, opened.tensors, x)


def start_layer(own: Any, form: Target, number: int, known: NamedTensors, x: Tensor) -> None:
    """Start a layer as the target's layer `number`, whose tensors `known` has. x : float32[N, H], inputs of it"""
    layer = form.layers[number]
    shapes, (attention, feed) = layer_shapes(layer, form.hidden_size), (layer.mixer, layer.feed_forward)

    def read(name: str) -> Tensor | None:
        return torch.tensor(known.read(f"layers.{number}.{name}")).to(x.device) if name in shapes else None

    for norm, body in ((own.input_layernorm, attention), (own.pre_feedforward_layernorm, feed)):
        if (factors := read(f"{NORMS[body.type][0]}.weight")) is not None:
            norm.weight.copy_(factors)
    for norm in (own.post_attention_layernorm, own.post_feedforward_layernorm):
        nn.init.constant_(norm.weight, QUIET)
    assert isinstance(attention, Attention)
    projection, output = read("self_attn.q_proj.weight"), read("self_attn.o_proj.weight")
    assert projection is not None
    assert output is not None
    own.self_attn.q_proj.weight.copy_(projection)
    own.self_attn.o_proj.weight.copy_(output)
    normed = read("self_attn.q_norm.weight")
    if normed is None:  # the norm of Gemma's form makes all queries of one size: their mean
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + form.norm_eps) * own.input_layernorm.weight
        queries = nn.functional.linear(x, projection, read("self_attn.q_proj.bias"))
        queries = queries.unflatten(-1, (attention.heads, -1))
        normed = queries.pow(2).mean(dim=-1).sqrt().mean().expand(attention.head_dim)
    elif attention.whole_norms:  # a weight for each head's numbers, where Gemma's form has one for all heads
        normed = normed.unflatten(0, (attention.heads, -1)).mean(dim=0)
    own.self_attn.q_norm.weight.copy_(normed * attention.scale)
    down = read("mlp.down_proj.weight") if feed.experts is None else None
    units = own.mlp.gate_proj.weight.shape[0]
    if down is None or down.shape[1] < units:
        return
    kept = down.norm(dim=0).topk(units).indices.sort().values  # those that add most, if not all
    own.mlp.down_proj.weight.copy_(down[:, kept])
    for name in ("gate_proj", "up_proj"):
        weights = read(f"mlp.{name}.weight")
        assert weights is not None
        getattr(own.mlp, name).weight.copy_(weights[kept])
