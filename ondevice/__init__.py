"""Gemma 4 on CPUs, offline, with multi-token drafts that never change the output.

    import ondevice

    with ondevice.load("bundles/reference") as model:
        for step in model.stream("def fibonacci(n):", max_new_tokens=64):
            print(step.text, end="")

`load` opens a bundle and returns a `Model`. `Model.stream` returns a `Generation`, which yields a `Step` per round;
`Model.generate` returns a `Reply`. Their keywords are the fields of `GenerationOptions`. Every error is an
`OndeviceError`. An application's own way of drafting is a `Drafter`.
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

# ONNX Runtime's packages send telemetry from 1.29 on, unless they find this when they are imported (PR 27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "AsyncGeneration",
    "AttentionType",
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
    "KVCacheType",
    "LogitsProcessor",
    "Message",
    "MissingDependencyError",
    "Model",
    "OnPrepare",
    "OndeviceError",
    "Outputs",
    "PairMismatchError",
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
    "__version__",
    "freeze_support",
    "load",
    "prepare",
    "pull",
]

if TYPE_CHECKING:
    from ondevice.async_generation import AsyncGeneration
    from ondevice.decoding.logits_processor import LogitsProcessor
    from ondevice.decoding.record import Stats, TokenLogprob
    from ondevice.decoding.sampling_options import SamplingOptions
    from ondevice.drafters.draft_model import DraftSampling
    from ondevice.drafters.protocol import Draft, Drafter, DraftRequest, Forecast
    from ondevice.engines.attention import AttentionType
    from ondevice.engines.choice import EngineName
    from ondevice.engines.protocol import KVCacheType, Outputs, Session
    from ondevice.frozen import freeze_support
    from ondevice.generation import Generation
    from ondevice.hub.pull import pull
    from ondevice.loading import load, prepare
    from ondevice.model import Model
    from ondevice.options import GenerationKeywords, GenerationOptions, ScheduleName
    from ondevice.progress import OnPrepare, Progress
    from ondevice.reply import FinishReason, Reply, Step
    from ondevice.text.chat_options import Tool
    from ondevice.text.messages import Message
    from ondevice.text.prompt import Prompt
    from ondevice.text.tool_call import ToolCall
else:
    # Imported when they are first needed: `ondevice --help` needs neither numpy nor numba. A type checker must not see
    # this `__getattr__`, or it would believe in every attribute.
    _HOMES = {
        "async_generation": ("AsyncGeneration",),
        "decoding.record": ("Stats", "TokenLogprob"),
        "decoding.logits_processor": ("LogitsProcessor",),
        "decoding.sampling_options": ("SamplingOptions",),
        "drafters.draft_model": ("DraftSampling",),
        "drafters.protocol": ("Draft", "DraftRequest", "Drafter", "Forecast"),
        "engines.attention": ("AttentionType",),
        "engines.choice": ("EngineName",),
        "engines.protocol": ("KVCacheType", "Outputs", "Session"),
        "frozen": ("freeze_support",),
        "generation": ("Generation",),
        "hub.pull": ("pull",),
        "loading": ("load", "prepare"),
        "model": ("Model",),
        "options": ("GenerationKeywords", "GenerationOptions", "ScheduleName"),
        "progress": ("OnPrepare", "Progress"),
        "reply": ("FinishReason", "Reply", "Step"),
        "text.chat_options": ("Tool",),
        "text.messages": ("Message",),
        "text.prompt": ("Prompt",),
        "text.tool_call": ("ToolCall",),
    }
    _HOME_OF = {name: f"ondevice.{module}" for module, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'ondevice' has no attribute {name!r}")
        return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    """What `dir`, `help` and completion show: the public names, whether or not they were imported yet."""
    return __all__
