"""E2B's vision tower as a GGUF file for llama.cpp's `--mmproj`: the same shapes, random weights in Q8_0.

    python -m benchmarks.mmproj_gguf FILE

The names are those of llama.cpp's `Gemma4VisionAudioModel`. The bounds of clipped linear layers are left out. The
`gguf` package writes the file, 0.2 GB.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind

from benchmarks.e2b_gguf import GgufTensor, noise_of, write_file
from benchmarks.e2b_shape import VISION, noise, target_model
from ondevice_export.checkpoint.vision import checkpoint_shapes

NAMES = {
    "patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "patch_embedder.position_embedding_table": "v.position_embd.weight",
    "embedding_projection.weight": "mm.input_projection.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
"""transformers' name within a layer or an embedder -> llama.cpp's."""


def write_gguf(path: Path) -> None:
    """Write the random tower; an older file there is replaced."""
    with tempfile.TemporaryDirectory() as directory:
        shapes = checkpoint_shapes(VISION, target_model(Path(directory)).config, clipped=False)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name("gemma-4-E2B-shape")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_vision_projector_type("gemma4v")
    writer.add_vision_image_size(224)
    writer.add_vision_patch_size(VISION.patch)
    writer.add_vision_embedding_length(VISION.hidden_size)
    writer.add_vision_feed_forward_length(VISION.intermediate_size)
    writer.add_vision_block_count(VISION.layers)
    writer.add_vision_head_count(VISION.query_heads)
    writer.add_vision_attention_layernorm_eps(VISION.norm_eps)
    writer.add_vision_projection_dim(shapes["model.embed_vision.embedding_projection.weight"][0])
    writer.add_vision_image_mean([0.0, 0.0, 0.0])
    writer.add_vision_image_std([1.0, 1.0, 1.0])
    writer.add_vision_use_gelu(True)
    blocks = {Kind.Q8_0: gguf.quantize(noise(), Kind.Q8_0)}
    tensors = []
    for name, shape in shapes.items():
        own = own_name(name)
        stored = (shape[0], 3, VISION.patch, VISION.patch) if own == "v.patch_embd.weight" else shape
        kind = Kind.Q8_0 if len(stored) == 2 else Kind.F32
        tensors.append(GgufTensor(own, stored, kind, partial(noise_of, stored, kind, blocks)))
    write_file(writer, tensors)


def own_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if ".layers." not in name:
        return next(own for part, own in NAMES.items() if name.endswith(part))
    layer, part = name.split(".layers.")[1].split(".", 1)
    return f"v.blk.{layer}.{NAMES[part.removesuffix('.weight').removesuffix('.linear')]}.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    write_gguf(parser.parse_args().file)


if __name__ == "__main__":
    main()
