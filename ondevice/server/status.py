"""What the server tells about itself: `/v1/models`, `/props`."""

from __future__ import annotations

from typing import Any

from ondevice import __version__
from ondevice.bundle import CHAT_TEMPLATE
from ondevice.model import Model
from ondevice.server.service import Service


def model_card(service: Service, created: int) -> dict[str, Any]:
    """OpenAI's `model` object, with llama.cpp's `meta`."""
    target = service.bundle.manifest.target
    model = service.residence.model
    return {
        "id": service.name,
        "object": "model",
        "created": created,
        "owned_by": "ondevice",
        "meta": {
            "n_vocab": target.vocab_size,
            "n_ctx_train": target.context_length,
            "n_ctx": None if model is None else model.context_length,
            "size": sum(entry.size for entry in service.bundle.manifest.files.values()),
        },
    }


def props(service: Service, model: Model) -> dict[str, Any]:
    """llama.cpp's names, as far as they fit, and what is this server's own."""
    defaults, template = model.defaults, service.bundle.file(CHAT_TEMPLATE)
    return {
        "model_alias": service.name,
        "build_info": f"ondevice {__version__}",
        "total_slots": service.places.places,
        "chat_template": "" if template is None else template.read_text("utf-8"),
        "default_generation_settings": {
            "n_ctx": model.context_length,
            "params": {
                "temperature": defaults.temperature,
                "top_k": defaults.top_k,
                "top_p": defaults.top_p,
                "min_p": defaults.min_p,
                "repeat_penalty": defaults.repetition_penalty,
                "n_predict": -1,
            },
        },
        "engine": model.engine.name,
        "kv_cache": model.engine.kv_cache,
        "threads": model.threads,
        "load_s": model.load_s,
    }
