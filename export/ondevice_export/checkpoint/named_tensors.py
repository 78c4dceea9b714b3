"""A checkpoint's tensors under the names of the bundle's tensor table, with what their family leaves to be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.bundle_format.tensor_table import EMBEDDING, FINAL_NORM, HEAD, MTP
from ondevice_export.checkpoint.directory import Checkpoint


@dataclass(frozen=True)
class TensorNames:
    """The names of a model's tensors in a checkpoint."""

    prefix: str = ""
    """Prefix of all names but the head's."""
    head: str = HEAD
    """The head's name."""
    embedding: str | None = None
    """The token embedding's name if it has no such prefix: a tied one may be saved as the head alone."""
    own_prefix: str = ""
    """Prefix of the bundle's names that those of the checkpoint do not have."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are named otherwise in the checkpoint: the bundle's name -> the checkpoint's, both of a layer's
    tensor without the layer's prefix."""

    def of(self, own: str) -> str:
        """The checkpoint's name of the tensor that has the name `own` in a bundle."""
        if own == HEAD:
            return self.head
        if own == EMBEDDING and self.embedding is not None:
            return self.embedding
        if own.startswith(MTP):
            return self.others.get(own, own)
        own = own.removeprefix(self.own_prefix)
        first, number, rest = [*own.split(".", 2), "", ""][:3]
        if first == "layers" and rest in self.others:
            own = f"layers.{number}.{self.others[rest]}"
        return self.prefix + self.others.get(own, own)


@dataclass(frozen=True)
class NamedTensors:
    """An open checkpoint, the names of a model's tensors in it, and what their values lack there.

    It is computed when a tensor is read, so that neither graphs nor kernels know of it.

    Attributes:
        norm_offset: added to the weights of norms; some families store them without the 1 that their code adds.
        logits_divisor: of the logits; the weight of the last norm is divided by it, because a tied head cannot be.
        alternating: whether the biases of an expert's gate and up alternate; those of gate come first in a bundle.
        log_decay: whether the checkpoint has log(-decay) in the place of a `GatedDelta`'s decay.
    """

    checkpoint: Checkpoint
    names: TensorNames = TensorNames()
    norm_offset: float = 0.0
    logits_divisor: float = 1.0
    alternating: bool = False
    log_decay: bool = False

    def read(self, own: str) -> Float32Array:
        """A small tensor by its name in a bundle, as float32."""
        values = self.checkpoint.read(self.names.of(own))
        if self.norm_offset and own.endswith("norm.weight"):
            values = values + np.float32(self.norm_offset)
        if self.logits_divisor != 1 and own == FINAL_NORM:
            values = values / np.float32(self.logits_divisor)
        if self.alternating and own.endswith("experts.gate_up_proj_bias"):
            values = values.reshape(len(values), -1, 2).swapaxes(1, 2).reshape(values.shape)
        if self.log_decay and own.endswith("delta.decay"):
            values = -np.exp(values)
        return values
