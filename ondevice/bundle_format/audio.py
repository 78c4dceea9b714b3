"""The audio tower: its configuration in `bundle.json`, the names and shapes of its tensors, and their checks.

The tower turns the mel spectrogram of a sound into soft tokens, one for 40 ms. Inputs and outputs of its graph:
`graph_io`. Source: Gemma4AudioModel, a conformer, and Gemma4MultimodalEmbedder.

The tower of 12B has no layers: 40 ms of samples are normed and multiplied with one matrix
(Gemma4UnifiedAudioFeatureExtractor, Gemma4UnifiedMultimodalEmbedder).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ondevice.bundle_format.checks import check_number, check_positive, require
from ondevice.bundle_format.decoder import MAX_LAYERS
from ondevice.bundle_format.model_config import Target
from ondevice.bundle_format.tensor_table import Shapes

RATE = 16_000
"""Sampling rate of the tower's input, in Hz."""

MAX_SAMPLES = 30 * RATE
"""Samples of a sound that the tower encodes at once: it was trained with no longer ones."""

HOP, FRAME, FFT = 160, 320, 512
"""Samples from one frame of the spectrogram to the next, of a frame, and of its Fourier transform."""

LINEARS = (
    "feed_forward1.ffw_layer_1", "feed_forward1.ffw_layer_2", "feed_forward2.ffw_layer_1", "feed_forward2.ffw_layer_2",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.post",
    "lconv1d.linear_start", "lconv1d.linear_end",
)  # fmt: skip
"""The linear layers of a layer. The input and the output of each may be limited to a range."""

NORMS = (
    "feed_forward1.pre_layer_norm", "feed_forward1.post_layer_norm", "feed_forward2.pre_layer_norm",
    "feed_forward2.post_layer_norm", "lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn",
    "norm_out",
)  # fmt: skip

DEPTHWISE = "lconv1d.depthwise_conv1d.weight"
RELATIVE_KEYS, QUERY_SCALE = "self_attn.relative_keys", "self_attn.query_scale"
"""The exporter's products of `relative_k_proj` and `per_dim_scale`: a key for each distance, and a factor of each
element of the queries."""
SUBSAMPLED = "audio_tower.subsample_conv_projection.input_proj_linear.weight"
OUTPUT = "audio_tower.output_proj.weight"
OUTPUT_BIAS = "audio_tower.output_proj.bias"
PROJECTION = "embed_audio.embedding_projection.weight"


@dataclass(frozen=True)
class AudioEntry:
    """The audio tower of a bundle."""

    graph: str
    """File name of the ONNX graph."""
    layers: int
    """0 for a tower without layers, whose fields up to `residual_weight` are 0 but for `output_size`."""
    hidden_size: int
    query_heads: int
    output_size: int
    """Width of the tower's rows before the projection to the target's; without layers, the samples of a row."""
    mel_bins: int
    """Bands of the spectrogram, and channels of the first convolution."""
    channels: int
    """Channels of the second convolution."""
    kernel: int
    """Frames that the convolution of a layer covers."""
    keys: int
    """Rows that a row attends to: itself and those just before it."""
    logit_cap: float
    residual_weight: float
    """Factor of the feed-forward layers before they are added."""
    norm_eps: float
    begin_token_id: int
    audio_token_id: int
    """The token that a chat template writes for a sound; the soft tokens take its place."""
    end_token_id: int

    @property
    def frame_width(self) -> int:
        """Numbers of a frame that the tower reads: bands of the spectrogram, or samples."""
        return self.mel_bins if self.layers else self.output_size

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query, key or value."""
        return self.hidden_size // self.query_heads


def audio_tokens(audio: AudioEntry, samples: int) -> int:
    """The number of soft tokens of a sound of at most MAX_SAMPLES; 0 for one that is shorter than a frame."""
    return -(-spectrogram_frames(samples) // 4) if audio.layers else -(-samples // audio.output_size)


def spectrogram_frames(samples: int) -> int:
    """The number of frames of a sound's spectrogram: half a frame of silence goes before it."""
    return max((samples - 1) // HOP, 0)


def check_audio(audio: AudioEntry, target: Target) -> None:
    """Check every number of the tower's configuration.

    Raises:
        InvalidFieldError: a number is out of range, or contradicts another.
    """
    check_number("layers of the audio tower", audio.layers, MAX_LAYERS, least=0)
    check_number("output_size of the audio tower", audio.output_size, 1 << 20)
    check_positive("norm_eps of the audio tower", audio.norm_eps, 1.0)
    if audio.layers:
        _check_conformer(audio)
    tokens = audio.begin_token_id, audio.audio_token_id, audio.end_token_id
    for token in tokens:
        check_number("a token of the audio tower", token, target.vocab_size - 1, least=0)
    require(len(set(tokens)) == len(tokens), f"the tokens of the audio tower are {tokens}")


def _check_conformer(audio: AudioEntry) -> None:
    for name in ("hidden_size", "query_heads"):
        check_number(f"{name} of the audio tower", getattr(audio, name), 1 << 20)
    for name in ("mel_bins", "channels", "kernel", "keys"):
        check_number(f"{name} of the audio tower", getattr(audio, name), 1 << 10)
    for size, divisor in (("hidden_size", audio.query_heads), ("hidden_size", 2), ("mel_bins", 4)):
        value = getattr(audio, size)
        require(value % divisor == 0, f"{size} of the audio tower is {value}, no multiple of {divisor}")
    for name in ("logit_cap", "residual_weight"):
        check_positive(f"{name} of the audio tower", getattr(audio, name), 1e6)


def audio_shapes(audio: AudioEntry, target: Target) -> Shapes:
    """Names and shapes of the tower's tensors in a bundle."""
    hidden, wide, output = audio.hidden_size, 4 * audio.hidden_size, audio.output_size
    if not audio.layers:
        return {PROJECTION: (target.hidden_size, output)}
    shapes: Shapes = {
        SUBSAMPLED: (hidden, audio.mel_bins // 4 * audio.channels),
        OUTPUT: (output, hidden),
        OUTPUT_BIAS: (output,),
        PROJECTION: (target.hidden_size, output),
    }
    channels = (1, audio.mel_bins, audio.channels)
    for index, (before, after) in enumerate(pairwise(channels)):
        shapes[f"{convolution_prefix(index)}conv.weight"] = (after, before, 3, 3)
        shapes[f"{convolution_prefix(index)}norm.weight"] = (after,)
    sizes = ((wide, hidden), (hidden, wide)) * 2 + ((hidden, hidden),) * 4 + ((2 * hidden, hidden), (hidden, hidden))
    for index in range(audio.layers):
        prefix = layer_prefix(index)
        shapes |= {f"{prefix}{name}.linear.weight": size for name, size in zip(LINEARS, sizes, strict=True)}
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in NORMS}
        shapes[prefix + RELATIVE_KEYS] = (audio.query_heads, audio.head_dim, audio.keys + 1)
        shapes[prefix + QUERY_SCALE] = (hidden,)
        shapes[prefix + DEPTHWISE] = (audio.kernel, hidden)
    return shapes


def layer_prefix(index: int) -> str:
    """Prefix of the names of a layer's tensors."""
    return f"audio_tower.layers.{index}."


def convolution_prefix(index: int) -> str:
    """Prefix of the names of the tensors of one of the two convolutions that shorten the spectrogram."""
    return f"audio_tower.subsample_conv_projection.layer{index}."
