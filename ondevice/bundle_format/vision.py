"""The vision tower: its configuration in `bundle.json`, the names and shapes of its tensors, and their checks.

The tower turns the patches of a picture into soft tokens: rows that take the place of token embeddings in a forward of
the target. Inputs and outputs of its graph: `graph_io`. Source: Gemma4VisionModel and Gemma4MultimodalEmbedder.

A layer's matrices are float32[rows, width], or codes int8[width, rows], -91 to 91 and transposed, with a scale per row.

The tower of 12B has no layers (Gemma4UnifiedVisionEmbedder): a patch, as large as a soft token, is normed, multiplied
with one matrix, and gets its position.
"""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.bundle_format.checks import check_number, check_positive, require
from ondevice.bundle_format.decoder import MAX_LAYERS
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import Shapes

BUDGETS = (70, 140, 280, 560, 1120)
"""The most soft tokens that a picture may become: one of these. More tokens show more detail."""

MAX_PATCH = 64
"""Largest side of a patch, and largest pooled block; real ones have 16 and 3."""

PROJECTION = "embed_vision.embedding_projection.weight"
PATCHES, POSITIONS = (
    "vision_tower.patch_embedder.input_proj.weight",
    "vision_tower.patch_embedder.position_embedding_table",
)
EMBEDDER = "vision_embedder."
"""Prefix of the names of a tower without layers."""
STANDARDIZE = ("vision_tower.std_bias", "vision_tower.std_scale")

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""The linear layers of a layer. The input and the output of each may be limited to a range."""


@dataclass(frozen=True)
class VisionEntry:
    """The vision tower of a bundle."""

    graph: str
    """File name of the ONNX graph."""
    layers: int
    """0 for a tower without layers, whose `intermediate_size`, `query_heads` and `head_dim` are 0 too."""
    hidden_size: int
    intermediate_size: int
    query_heads: int
    head_dim: int
    norm_eps: float
    theta: float
    """Base of the rotary frequencies; half of a head turns by x, the other half by y."""
    patch: int
    """Side of a patch in pixels."""
    pool: int
    """Side of the square of patches whose mean is a soft token."""
    positions: int
    """Number of positions along each side, in patches."""
    standardize: bool
    """Whether the pooled rows are shifted and scaled before the projection."""
    tokens: int
    """Soft tokens of a picture at most, where the user does not choose: one of BUDGETS."""
    begin_token_id: int
    image_token_id: int
    """The token that a chat template writes for a picture; the soft tokens take its place."""
    end_token_id: int
    bidirectional: bool = False
    """Whether the soft tokens of a picture see each other in the target's sliding layers."""

    @property
    def side(self) -> int:
        """Pixels of a soft token's side; both sides of a resized picture are multiples."""
        return self.patch * self.pool


def check_vision(vision: VisionEntry, target: Target) -> None:
    """Check every number of the tower's configuration.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another.
    """
    check_number("layers of the vision tower", vision.layers, MAX_LAYERS, least=0)
    for name in ("hidden_size", "positions"):
        check_number(f"{name} of the vision tower", getattr(vision, name), 1 << 20)
    for name in ("intermediate_size", "query_heads", "head_dim"):
        check_number(f"{name} of the vision tower", getattr(vision, name), 1 << 20, least=int(vision.layers > 0))
    require(vision.head_dim % 4 == 0, f"head_dim of the vision tower is {vision.head_dim}, no multiple of 4")
    require(vision.layers > 0 or vision.pool == 1, "a vision tower without layers pools patches")
    check_positive("norm_eps of the vision tower", vision.norm_eps, 1.0)
    check_positive("theta of the vision tower", vision.theta, 1e30, 1.0)
    check_number("patch of the vision tower", vision.patch, MAX_PATCH)
    check_number("pool of the vision tower", vision.pool, MAX_PATCH)
    require(vision.tokens in BUDGETS, f"tokens of the vision tower is {vision.tokens}, not one of {BUDGETS}")
    tokens = vision.begin_token_id, vision.image_token_id, vision.end_token_id
    for token in tokens:
        check_number("a token of the vision tower", token, target.vocab_size - 1, least=0)
    require(len(set(tokens)) == len(tokens), f"the tokens of the vision tower are {tokens}")


def vision_shapes(vision: VisionEntry, target: Target) -> Shapes:
    """Names and shapes of the tower's tensors."""
    if not vision.layers:
        return _embedder_shapes(vision, target)
    hidden, wide, heads = vision.hidden_size, vision.intermediate_size, vision.query_heads * vision.head_dim
    shapes: Shapes = {
        PATCHES: (hidden, 3 * vision.patch**2),
        POSITIONS: (2, vision.positions, hidden),
        PROJECTION: (target.hidden_size, hidden),
    }
    if vision.standardize:
        shapes |= dict.fromkeys(STANDARDIZE, (hidden,))
    sizes = ((heads, hidden),) * 3 + ((hidden, heads), (wide, hidden), (wide, hidden), (hidden, wide))
    for index in range(vision.layers):
        prefix = layer_prefix(index)
        shapes |= {f"{prefix}{name}.linear.weight": size for name, size in zip(LINEARS, sizes, strict=True)}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (vision.head_dim,) for name in "qk"}
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in norms}
    return shapes


def _embedder_shapes(vision: VisionEntry, target: Target) -> Shapes:
    hidden, width = vision.hidden_size, 3 * vision.patch**2
    shapes: Shapes = {
        f"{EMBEDDER}patch_dense.weight": (hidden, width),
        f"{EMBEDDER}patch_dense.bias": (hidden,),
        f"{EMBEDDER}pos_embedding": (vision.positions, 2, hidden),
        PROJECTION: (target.hidden_size, hidden),
    }
    for name, size in (("patch_ln1", width), ("patch_ln2", hidden), ("pos_norm", hidden)):
        shapes |= dict.fromkeys((f"{EMBEDDER}{name}.weight", f"{EMBEDDER}{name}.bias"), (size,))
    return shapes


def layer_prefix(index: int) -> str:
    """Prefix of the names of a layer's tensors."""
    return f"vision_tower.encoder.layers.{index}."
