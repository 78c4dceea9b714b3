"""Runs language models on CPUs, offline, with speculative decoding that never changes the output.

    import ondevice

    with ondevice.load("bundles/reference") as model:
        for step in model.stream("def fibonacci(n):", max_new_tokens=64):
            print(step.text, end="")

`load` opens a bundle and returns a `Model`. `Model.stream` returns a `Generation`, which yields a `Step` per round;
`Model.generate` returns a `Reply`. Their keywords are the fields of `GenerationOptions`. Every error is an
`OndeviceError`. An application can pass a `Drafter` of its own.

To read the code, begin with model.py; ARCHITECTURE.md in the repository shows the layers.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ondevice.errors import (
    BundleCorruptError,
    BundleError,
    BundleNotFoundError,
    CheckpointError,
    ContextOverflowError,
    GrammarError,
    HubError,
    MissingDependencyError,
    OndeviceError,
    PairMismatchError,
    PromptError,
    SessionFileError,
    UnsupportedBundleError,
    UsageError,
)

__version__ = "0.1.0"

# ONNX Runtime sends telemetry from version 1.29 on, unless this is set when it is imported (its PR 27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "AsyncGeneration",
    "AttentionType",
    "Audio",
    "BundleCorruptError",
    "BundleError",
    "BundleNotFoundError",
    "CheckpointError",
    "ContextOverflowError",
    "Draft",
    "DraftRequest",
    "DraftSampling",
    "Drafter",
    "EngineName",
    "FinishReason",
    "Forecast",
    "Generation",
    "GenerationKeywords",
    "GenerationOptions",
    "GrammarError",
    "HubError",
    "Image",
    "KVCacheType",
    "LogitsProcessor",
    "Message",
    "MissingDependencyError",
    "Model",
    "OnPrepare",
    "OndeviceError",
    "Origin",
    "Outputs",
    "PairMismatchError",
    "Piece",
    "Progress",
    "Prompt",
    "PromptError",
    "Reply",
    "SamplingOptions",
    "ScheduleName",
    "Session",
    "SessionFileError",
    "Stats",
    "Step",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "UnsupportedBundleError",
    "UsageError",
    "Video",
    "__version__",
    "freeze_support",
    "load",
    "prepare",
    "pull",
]

if TYPE_CHECKING:
    from ondevice.engines.choice import EngineName
    from ondevice.engines.protocol import AttentionType, KVCacheType, Outputs, Session
    from ondevice.generate.drafters.draft_model import DraftSampling
    from ondevice.generate.drafters.protocol import Draft, Drafter, DraftRequest, Forecast
    from ondevice.generate.request import LogitsProcessor, SamplingOptions
    from ondevice.generate.stats import Origin, Stats, TokenLogprob
    from ondevice.generation import AsyncGeneration, FinishReason, Generation, Piece, Reply, Step
    from ondevice.hub import pull
    from ondevice.model import Model, load, prepare
    from ondevice.native.building import freeze_support
    from ondevice.options import GenerationKeywords, GenerationOptions, ScheduleName
    from ondevice.progress import OnPrepare, Progress
    from ondevice.text.codec import Prompt
    from ondevice.text.media_parts import Audio, Image, Video
    from ondevice.text.messages import Message, Tool, ToolCall
else:
    # Names are imported when they are first used: `ondevice --help` needs neither numpy nor numba. A type checker must
    # not see this `__getattr__`, or it would accept every attribute.
    _NAMES = {
        "engines.choice": ("EngineName",),
        "engines.protocol": ("AttentionType", "KVCacheType", "Outputs", "Session"),
        "generate.drafters.draft_model": ("DraftSampling",),
        "generate.drafters.protocol": ("Draft", "DraftRequest", "Drafter", "Forecast"),
        "generate.request": ("LogitsProcessor", "SamplingOptions"),
        "generate.stats": ("Origin", "Stats", "TokenLogprob"),
        "generation": ("AsyncGeneration", "FinishReason", "Generation", "Piece", "Reply", "Step"),
        "hub": ("pull",),
        "model": ("Model", "load", "prepare"),
        "options": ("GenerationKeywords", "GenerationOptions", "ScheduleName"),
        "native.building": ("freeze_support",),
        "progress": ("OnPrepare", "Progress"),
        "text.codec": ("Prompt",),
        "text.messages": ("Message", "Tool", "ToolCall"),
        "text.media_parts": ("Audio", "Image", "Video"),
    }
    _MODULE_OF = {name: f"ondevice.{module}" for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'ondevice' has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """The public names, imported or not, for `dir`, `help` and completion."""
    return __all__
