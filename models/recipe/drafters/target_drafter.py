"""A drafter for any target with full attention: Gemma's MTP form, reading the cache of the target's last full layer.

A round starts when the newest token x[t+1] and the cache of positions <= t are known; `drafter.py` describes its steps.
The head is the target's own, over a list of frequent tokens: a step's logits are `target_head[tokens] @ state`, where
the state is the drafter's estimate of the target's next one. So nothing of the vocabulary's size is trained or stored.

The first layer starts as the target's last: see `start_from_target`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pair.target import calm
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma4AssistantConfig, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from drafters.lessons import Lesson
from drafters.states import FrozenTarget

RIDGE = 1e-3  # relative to the inputs' variance, which is one
QUIET = 0.3
HOOKED = 12  # lessons from which the sizes of a layer's parts are taken
SharedKV = dict[str, tuple[Tensor, Tensor]]


def full_layer(config: Any) -> int:
    """The last layer with full attention, whose cache a drafter reads."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return max(index for index, kind in enumerate(kinds) if kind == "full_attention")


def head_dim(config: Any) -> int:
    """The width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def drafter_config(target: Any, *, width: int, layers: int, mlp: int) -> Gemma4AssistantConfig:
    """The configuration for a target's, with `width` hidden units and `mlp` units of the feed-forward blocks."""
    width_of_head = head_dim(target)
    ropes = target.rope_parameters
    rope = ropes.get("full_attention", ropes)
    text = Gemma4TextConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_kv_shared_layers=layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=width_of_head,
        global_head_dim=width_of_head,
        hidden_activation=getattr(target, "hidden_activation", None) or target.hidden_act,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters={"full_attention": dict(rope), "sliding_attention": dict(rope)},
        max_position_embeddings=target.max_position_embeddings,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        pad_token_id=target.pad_token_id,
        eos_token_id=target.eos_token_id,
        bos_token_id=target.bos_token_id,
    )
    return Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=target.hidden_size, use_ordered_embeddings=False
    )


class TargetDrafter(nn.Module):
    """The layers and the projections around them. Inputs and outputs are divided by each channel's scale, so that all
    channels learn at one rate; a checkpoint has the scales in its projections.

    input_scale : float32[2 H], of token embeddings and states; output_scale : float32[H], of states
    """

    input_scale: Tensor
    output_scale: Tensor

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        text, target = config.text_config, config.backbone_hidden_size
        self.config = config
        self.pre_projection = nn.Linear(2 * target, text.hidden_size, bias=False)
        self.model: Any = Gemma4TextModel(text)
        del self.model.embed_tokens
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
        "target": {"name": target.name, "weights_sha256": target.weights_sha256()},
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
    layers are the target's last, whose blocks add QUIET times what they add in the target, relative to the stream.
    """
    width = target.config.hidden_size
    table, factors = target.model.get_input_embeddings(), gain(target.decoder.norm, width)
    inputs, wanted = [], []
    for lesson in lessons:
        said = slice(lesson.prompt - 1, len(lesson.tokens) - 1)
        hidden = lesson.hidden[said].to(target.projection.device).float()
        embedded = table(lesson.tokens[said].to(hidden.device)).float()
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
    copy_layers(drafter, target, lessons[:HOOKED])


def copy_layers(drafter: TargetDrafter, target: FrozenTarget, lessons: Sequence[Lesson]) -> None:
    """Start the layers as the target's last, with the sizes that their parts have in lessons."""
    last = full_layer(target.config)
    own_layers: Any = drafter.model.layers
    layers = target.decoder.layers[last + 1 - len(own_layers) : last + 1]
    seen: dict[tuple[int, str], list[Tensor]] = {}

    def keep(place: int, part: str, rows: Any) -> None:
        rows = rows[0] if isinstance(rows, tuple) else rows
        seen.setdefault((place, part), []).append(rows[0, 1:].float())  # the first token's are far larger

    hooks = []
    for place, layer in enumerate(layers):
        parts = {"q": layer.self_attn.q_proj, "attn": layer.self_attn, "mlp": layer.mlp}
        for part, module in parts.items():
            hook = partial(keep, place, part)
            hooks.append(module.register_forward_hook(lambda m, inputs, output, hook=hook: hook(output)))
        hook = partial(keep, place, "in")
        hooks.append(layer.register_forward_pre_hook(lambda m, inputs, hook=hook: hook(inputs)))
    for lesson in lessons:
        ids = lesson.tokens[None].to(target.projection.device)
        target.decoder(input_ids=ids, use_cache=False)
    for each in hooks:
        each.remove()
    for place, (own, layer) in enumerate(zip(own_layers, layers, strict=True)):
        copy_layer(own, layer, {part: torch.cat(seen[place, part]) for part in ("in", "q", "attn", "mlp")})


def copy_layer(own: Any, layer: Any, seen: dict[str, Tensor]) -> None:
    """Start a layer as a target's. seen : its input and what its parts compute, [N, width]"""
    width, head = seen["attn"].shape[1], own.self_attn.head_dim
    before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    own.input_layernorm.weight.copy_(gain(layer.input_layernorm, width))
    own.pre_feedforward_layernorm.weight.copy_(gain(before_mlp, width))
    stream = seen["in"].pow(2).mean(dim=-1).sqrt()
    for norm, part in ((own.post_attention_layernorm, "attn"), (own.post_feedforward_layernorm, "mlp")):
        added = (seen[part].pow(2).mean(dim=-1).sqrt() / stream).mean().item()
        nn.init.constant_(norm.weight, QUIET * added)
    own_norm = getattr(layer.self_attn, "q_norm", None)
    if own_norm is None:  # the norm of Gemma's form makes all queries of one size: their mean
        queries = seen["q"].view(len(seen["q"]), -1, head).pow(2).mean(dim=-1).sqrt().mean()
    else:
        queries = gain(own_norm, head)
    own.self_attn.q_norm.weight.copy_(queries * layer.self_attn.scaling * torch.ones(head, device=stream.device))
    own.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight)
    own.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
    units = own.mlp.gate_proj.weight.shape[0]  # those that add most, if not all
    kept = layer.mlp.down_proj.weight.float().norm(dim=0).topk(units).indices.sort().values
    for name in ("gate_proj", "up_proj"):
        getattr(own.mlp, name).weight.copy_(getattr(layer.mlp, name).weight[kept])
    own.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, kept])


def gain(norm: Any, width: int) -> Tensor:
    """The factors of a norm, whatever is stored: Gemma 3 stores them less one."""
    weight = next(norm.parameters())
    factors: Tensor = norm(torch.ones(1, width, dtype=weight.dtype, device=weight.device))[0].float()
    return factors
