"""Hidden states of a frozen target over text, computed once and kept on disk to train its heads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from pair.owntext import PROMPT, written_by_engine, written_on_device
from text.corpus import read_library
from text.dataset import Blocks
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from training.precision import PRODUCTS
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ondevice_export.checkpoint.json_fields import read_json
from ondevice_export.gguf.checkpoint import GgufCheckpoint

LENGTH = 512  # tokens of a block; training does not look across its end
TOGETHER = 8  # blocks of one forward
OWN_SHARE = 0.75  # share of generated tokens; the rest is the text itself


@dataclass(frozen=True)
class FrozenTarget:
    """A target with the parts that heads and drafters read: for heads of any Gemma 4 layout, for an MTP drafter any
    decoder with full attention.

    model : generates text; decoder : its text model; projection : float[V, H]; cap : soft cap of its logits, or None
    """

    name: str
    model: Any
    decoder: Any
    projection: Tensor
    cap: float | None
    digest: str = ""  # of its weights, if they were rounded after they were read

    @classmethod
    def load(cls, directory: Path, name: str, device: torch.device) -> FrozenTarget:
        """Load from a checkpoint's directory, in float32 on a CPU, else in bfloat16.

        Raises:
            CheckpointError: the directory holds none: transformers would look for its name on the hub.
        """
        read_json(directory / "config.json")
        config = AutoConfig.from_pretrained(directory)
        text = config.get_text_config()
        kind = AutoModelForCausalLM if config is text else AutoModelForImageTextToText
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = kind.from_pretrained(directory, dtype=dtype).to(device).requires_grad_(False).eval()
        decoder = getattr(model.model, "language_model", model.model)
        cap = getattr(text, "final_logit_softcapping", None)
        return cls(name, model, decoder, model.get_output_embeddings().weight, cap)

    @classmethod
    def load_gguf(cls, file: Path, device: torch.device) -> FrozenTarget:
        """Load the dequantised weights of a GGUF file, in the type of this machine's products."""
        with GgufCheckpoint(file) as checkpoint:
            kind = getattr(transformers, checkpoint.config["architectures"][0])
            fields = dict(checkpoint.config)
            if "sliding_attention" not in fields.get("layer_types", ()):  # such classes know one rotation
                fields["rope_parameters"] = fields["rope_parameters"]["full_attention"]
            config = kind.config_class(**fields)
            model = AutoModelForCausalLM.from_config(config, dtype=PRODUCTS)
            tensors = {name: torch.from_numpy(checkpoint.read(name).copy()) for name in checkpoint.names}
        last = f"model.layers.{config.num_hidden_layers - 1}.mlp.down_proj.weight"
        digest = digest_of(tensors["model.norm.weight"], tensors[last])
        if fields.get("norm_offset") == 0:  # the file has Gemma 3's factors themselves, the class stores them less one
            tensors = {name: value - 1 if "norm" in name else value for name, value in tensors.items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"{file}: missing tensors {missing}, unexpected ones {unexpected}")
        model = model.to(device).requires_grad_(False).eval()
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(file.stem, model, model.model, model.get_output_embeddings().weight, cap, digest)

    @property
    def config(self) -> Any:
        return self.decoder.config

    @property
    def exit_layer(self) -> int:
        """The last layer with its own keys and values if others share them, because the layers above it do not write
        the cache; else the middle layer.
        """
        layers, shared = self.config.num_hidden_layers, self.config.num_kv_shared_layers
        return int((layers - shared if shared else layers // 2) - 1)

    def weights_sha256(self) -> str:
        """Hash of the final norm and the last layer's down projection as float32, which identifies the training."""
        return self.digest or digest_of(self.decoder.norm.weight, self.decoder.layers[-1].mlp.down_proj.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[N, V] from states [N, H] before the projection."""
        logits = functional_linear(hidden, self.projection)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def digest_of(*weights: Tensor) -> str:
    """SHA-256 of weights as float32."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def functional_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` as float32."""
    return nn.functional.linear(x.to(PRODUCTS), weight.to(PRODUCTS)).float()


def text_stream(target: FrozenTarget, directory: Path, files: Iterable[Path]) -> npt.NDArray[np.uint32]:
    """Files of text, or else Python's standard library, as one stream of the target's tokens."""
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    texts = texts or [module.text for module in read_library() if not module.held_out]
    eos = target.model.generation_config.eos_token_id
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return read_text(tokenizer, texts, eos[0] if isinstance(eos, list) else eos)


def read_text(tokenizer: Tokenizer, texts: Iterable[str], eos: int) -> npt.NDArray[np.uint32]:
    """All texts as one stream of token ids, each preceded by <bos> and followed by `eos`."""
    rows = (encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=True))
    return np.concatenate([np.array([*ids, eos], np.uint32) for ids in rows])


def write_own(target: FrozenTarget, checkpoint: Path, stream: npt.NDArray[np.uint32], count: int, file: Path) -> None:
    """Generate `count` blocks of LENGTH tokens with the target after short pieces of the text; resumes after a stop."""
    rows = np.lib.format.open_memmap(file, "r+" if file.exists() else "w+", np.uint32, (count, LENGTH))
    missing = range(int(rows.any(axis=1).sum()), count)
    if not missing:
        return
    prompts = Blocks(stream, PROMPT, seed=2)
    if target.projection.device.type == "cpu":
        written = written_by_engine(checkpoint, file.with_suffix(".bundle"), prompts, missing, LENGTH)
    else:
        written = written_on_device(target.model, prompts, missing, LENGTH)
    for number, row in zip(missing, tqdm(written, desc="own text", total=len(missing)), strict=True):
        rows[number] = row
    rows.flush()


@torch.no_grad()
def write_states(target: FrozenTarget, tokens: npt.NDArray[Any], layer: int, file: Path) -> None:
    """float16[2, blocks, LENGTH, H] of tokens [blocks, LENGTH]: after the final norm, and after a layer.

    The second at unit scale, because the residual stream of a large model exceeds float16's range, and a norm reads it.
    A second file counts the written blocks, from which a stopped run resumes.
    """
    shape = (2, len(tokens), LENGTH, target.config.hidden_size)
    states = np.lib.format.open_memmap(file, "r+" if file.exists() else "w+", np.float16, shape)
    done = file.with_suffix(".done")
    start = int(done.read_text()) if done.exists() else 0
    behind: list[Tensor] = []
    hook = target.decoder.layers[layer].register_forward_hook(lambda module, inputs, output: behind.append(output))
    for first in tqdm(range(start, len(tokens), TOGETHER), desc="states"):
        behind.clear()
        ids = torch.from_numpy(tokens[first : first + TOGETHER].astype(np.int64)).to(target.projection.device)
        last = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
        lower = behind[0][0] if isinstance(behind[0], tuple) else behind[0]
        lower = lower.float() * torch.rsqrt(lower.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        for place, value in enumerate((last, lower)):
            states[place, first : first + TOGETHER] = value.half().cpu().numpy()
        done.write_text(str(first + TOGETHER))
    hook.remove()
    states.flush()
