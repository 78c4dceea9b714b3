"""What transformers computes of a checkpoint that was trained quantised, in float64.

Up to 5.22 its Gemma 4 model with linear layers and tables that follow the documented arithmetic, written down here once
more in torch. From 5.23 on its own loader. The suite runs the first; to run the second beside it:

    pip install --no-deps --target DIR transformers==5.23.0
    ONDEVICE_TRANSFORMERS=DIR python -m pytest tests/export/test_trained.py

`python -m tests.trained_oracle CHECKPOINT OUT [--half]` saves logits [T, V] of the token ids IDS in a .npy file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IDS = [5, 9, 200, 33, 7, 300, 41, 2, 77, 120, 13, 8, 9, 10, 11, 12, 99, 3, 4, 250]


def logits(directory: Path, *, half: bool = False, ids: list[int] = IDS) -> npt.NDArray[np.float64]:
    """Logits [T, V]; with `half`, keys and values are rounded to fp16 on their way into the cache."""
    import torch
    import transformers

    class HalfCache(transformers.DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.half().double(), value_states.half().double(), layer_idx, *args, **kwargs)

    model = load(directory)
    with torch.inference_mode():
        output = model(torch.tensor([ids]), use_cache=half, past_key_values=HalfCache() if half else None)
    return output.logits[0].numpy()


def load(directory: Path) -> Any:
    """The model, in float64."""
    import torch
    import transformers
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    tensors = load_file(directory / "model.safetensors")
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
        # the loader expects one scale for a row of a table, and its arithmetic has blocks
        model = kind.from_pretrained(directory, dtype=torch.float64, ignore_mismatched_sizes=True)
        for name, parameter in model.named_parameters():
            if name.endswith("embedding_scale"):
                parameter.data = tensors[name]
        return model.eval()
    quantization = config.pop("quantization_config")
    model = kind(kind.config_class.from_dict(config)).double()
    found = {
        name: tensor.double() for name, tensor in tensors.items() if tensor.dtype in (torch.float32, torch.bfloat16)
    }
    model.load_state_dict(found, strict=False)
    for name, module in list(model.named_modules()):
        table = isinstance(module, torch.nn.Embedding)
        codes = tensors.get(f"{name}.embedding_quantized" if table else f"{name}.weight")
        if codes is not None and codes.dtype in (torch.uint8, torch.int8):
            own = {
                key.removeprefix(name + "."): tensor for key, tensor in tensors.items() if key.startswith(name + ".")
            }
            scale = getattr(module, "scalar_embed_scale", None)
            model.set_submodule(name, _module(codes, own, bits_of(quantization, name), scale))
    return model.eval()


def bits_of(quantization: dict[str, Any], name: str) -> int:
    for pattern, options in (quantization.get("module_quant_configs") or {}).items():
        if re.search(pattern, name):
            return options.get("num_bits", quantization["num_bits"])
    return quantization["num_bits"]


def _module(codes: Any, tensors: dict[str, Any], bits: int, embed_scale: float | None) -> Any:
    import torch

    if bits == 8:
        weights = codes.double()
    else:
        places = [(codes >> place & ((1 << bits) - 1)).double() - (1 << (bits - 1)) for place in range(0, 8, bits)]
        weights = torch.stack(places, dim=-1).flatten(1)

    def on_grid(x: Any, side: str) -> Any:
        step = tensors[f"{side}_activation_scale"].double()
        return torch.clamp(torch.round(x / step), -128, 127) * step if step else x

    class Linear(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return on_grid(on_grid(x, "input") @ (weights * tensors["weight_scale"].double()).T, "output")

    class Table(torch.nn.Module):
        def forward(self, ids: Any) -> Any:
            scales = tensors["embedding_scale"].double()
            blocks = weights.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
            return blocks.flatten(1)[ids] * embed_scale

    return Linear() if embed_scale is None else Table()


if __name__ == "__main__":
    np.save(sys.argv[2], logits(Path(sys.argv[1]), half="--half" in sys.argv))
