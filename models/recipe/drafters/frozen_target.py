"""The target of heads and drafters: a model that is trained already, as they see it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from training.precision import PRODUCTS
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ondevice.bundle_format.decoder import Attention
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import EMBEDDING, HEAD
from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.checkpoint.models import open_target
from ondevice_export.checkpoint.source import locate
from ondevice_export.families import Described, read_target
from ondevice_export.gguf.checkpoint import GgufCheckpoint


@dataclass(frozen=True)
class FrozenTarget:
    """A target that is not trained: its token embedding, its head, and the decoder that the engine runs.

    Heads and drafters are trained for the engine's states, keys and embeddings, which are not those of every class of
    transformers: `states`, `keys` and `embed` make the former of the latter.

    path : of the checkpoint; table, projection : [V, H], of the token embedding and of the head
    described : the family, the configuration, and the decoder that the exporter makes of both
    model : transformers' model; None after `read`
    """

    name: str
    path: Path
    described: Described
    table: Tensor
    projection: Tensor
    model: Any = None

    @classmethod
    def read(cls, path: Path, device: torch.device) -> FrozenTarget:
        """Read a checkpoint's directory or a GGUF file without its layers, in the type of this machine's products."""
        with open_target(locate(str(path)), lambda _: None, text_only=True) as opened:
            described = read_target(opened.checkpoint.config, opened.checkpoint.origin)
            names = (EMBEDDING,) if opened.config.tied else (EMBEDDING, HEAD)
            found = [torch.tensor(opened.tensors.read(name)).to(device, PRODUCTS) for name in names]
        return cls(path.stem if path.is_file() else path.name, path, described, found[0], found[-1])

    @classmethod
    def load(cls, directory: Path, name: str, device: torch.device) -> FrozenTarget:
        """Load a checkpoint's directory as transformers' model, in float32 on a CPU, else in bfloat16.

        Raises:
            CheckpointError: the directory holds none, where transformers would look for its name on the hub; or its
                architecture is not supported.
        """
        described = read_target(read_json(directory / "config.json"), str(directory))
        config = AutoConfig.from_pretrained(directory)
        kind = AutoModelForCausalLM if config is config.get_text_config() else AutoModelForImageTextToText
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = kind.from_pretrained(directory, dtype=dtype).to(device).requires_grad_(False).eval()
        return cls(name, directory, described, *_tables(model), model)

    @classmethod
    def load_gguf(cls, file: Path, device: torch.device) -> FrozenTarget:
        """Load the dequantised weights of a GGUF file, in the type of this machine's products.

        Raises:
            SystemExit: transformers' class has other tensors than the file.
        """
        with GgufCheckpoint(file) as checkpoint:
            described = read_target(checkpoint.config, checkpoint.origin)
            kind = getattr(transformers, checkpoint.config["architectures"][0])
            fields = dict(checkpoint.config)
            if "full_attention" not in kind.config_class().rope_parameters:  # such classes know one rotation
                fields["rope_parameters"] = fields["rope_parameters"]["full_attention"]
            config = kind.config_class(**fields)
            model = AutoModelForCausalLM.from_config(config, dtype=PRODUCTS)
            tensors = {name: torch.from_numpy(checkpoint.read(name).copy()) for name in checkpoint.names}
        if fields.get("norm_offset") == 0:  # the file has Gemma 3's factors themselves, the class stores them less one
            tensors = {name: value - 1 if "norm" in name else value for name, value in tensors.items()}
        found, expected = (
            {name: value.shape for name, value in each.items() if name != "lm_head.weight"}
            for each in (tensors, model.state_dict())
        )
        if found != expected:
            raise SystemExit(f"{file}: transformers has other tensors for it: name the checkpoint of the hub")
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        model = model.to(device).requires_grad_(False).eval()
        return cls(file.stem, file, described, *_tables(model), model)

    @property
    def decoder(self) -> Any:
        """transformers' text model."""
        return getattr(self.model.model, "language_model", self.model.model)

    @property
    def config(self) -> Any:
        """transformers' configuration of the text model."""
        return self.decoder.config

    @property
    def form(self) -> Target:
        """The engine's decoder."""
        return self.described.target

    @property
    def cap(self) -> float | None:
        """The soft cap of the logits, or None."""
        return self.form.softcap

    @property
    def exit_layer(self) -> int:
        """The last layer with its own keys and values if others share them, because the layers above it do not write
        the cache; else the middle layer.
        """
        layers, shared = self.config.num_hidden_layers, self.config.num_kv_shared_layers
        return int((layers - shared if shared else layers // 2) - 1)

    @property
    def source(self) -> int:
        """The last layer with full attention and keys of its own, whose cache a drafter reads."""
        found = self.form.last_kv_layer("full")
        assert found is not None  # as `train_drafter` has checked
        return found

    @property
    def attention(self) -> Attention:
        """The attention of the layer `source`."""
        own = self.form.layers[self.source].mixer
        assert isinstance(own, Attention)
        return own

    def rotation(self) -> Tensor:
        """float32[D / 2]: the angle per position of each pair of numbers of that layer's heads, zeros without any."""
        rotary = self.attention.rotary
        pairs = [0.0] * (self.attention.head_dim // 2) if rotary is None else self.form.rotary[rotary]
        return torch.tensor(pairs, dtype=torch.float32)

    def embed(self, tokens: Tensor) -> Tensor:
        """The token embeddings [..., H] of tokens, as the drafter gets them."""
        return functional.embedding(tokens, self.table) * self.form.embedding_factor

    def states(self, hidden: Tensor) -> Tensor:
        """The decoder's outputs as the engine has them: the divisor of the logits is in the weight of the norm."""
        return hidden / self.described.config.number("logits_scaling", 1.0)

    def keys(self, keys: Tensor) -> Tensor:
        """The keys [..., KV heads * D] of the layer `source` as the engine has them: number i of a head is rotated with
        number i + D / 2, and the factor of cosines and sines is in the scale of the scores.
        """
        family, config, _ = self.described
        turns, turned = self.rotation().to(keys.device) != 0, None
        if (found := family.rows_of(config, self.source).get("self_attn.k_proj.weight")) is not None:
            order = torch.tensor([row for taken in found[1] for row in taken.rows], device=keys.device)
            keys, turned = keys[..., order - order.min()], 2 * int(turns.sum())
        if self.attention.rotary is None:
            return keys
        factor = config.rotary(self.source, self.attention.head_dim, turned)[1]
        return torch.where(turns.repeat(2 * self.attention.kv_heads), keys / factor, keys)

    def weights_sha256(self) -> str:
        """Hash of the final norm and the last layer's down projection as float32, which identifies the training."""
        return digest_of(self.decoder.norm.weight, self.decoder.layers[-1].mlp.down_proj.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[N, V] from states [N, H] before the projection."""
        logits = functional_linear(hidden, self.projection)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _tables(model: Any) -> tuple[Tensor, Tensor]:
    """Token embedding and head of transformers' model."""
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def digest_of(*weights: Tensor) -> str:
    """SHA-256 of weights as float32."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def functional_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` as float32."""
    return functional.linear(x.to(PRODUCTS), weight.to(PRODUCTS)).float()
