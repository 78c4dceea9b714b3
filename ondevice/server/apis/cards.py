"""How each API describes a model: from its bundle, without loading it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from ondevice.server.model_manager import ModelManager


def openai_card(manager: ModelManager, created: int) -> dict[str, Any]:
    """OpenAI's `model` object, with llama.cpp's `meta` and `status`, and what it can do.

    Args:
        created: Unix time of the server's start.
    """
    manifest, model = manager.bundle.manifest, manager.model
    return {
        "id": manager.name,
        "object": "model",
        "created": created,
        "owned_by": "ondevice",
        "capabilities": manager.capabilities,
        "status": _status(manager),
        "meta": {
            "n_vocab": manifest.target.vocab_size,
            "n_ctx_train": manifest.target.context_length,
            "n_ctx": None if model is None else model.context_length,
            "size": sum(entry.size for entry in manifest.files.values()),
        },
    }


def anthropic_card(manager: ModelManager, created: int) -> dict[str, Any]:
    """Anthropic's `model` object; the arguments are those of `openai_card`."""
    written = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": manager.name, "display_name": manager.name, "created_at": written}


def anthropic_list(managers: Iterable[ModelManager], created: int) -> dict[str, Any]:
    """Anthropic's list of models, all on one page."""
    cards = [anthropic_card(each, created) for each in managers]
    return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}


def _status(manager: ModelManager) -> dict[str, Any]:
    """Whether a model is in memory, and how far its load is."""
    if manager.loading is not None:
        stage, share = manager.loading
        return {"value": "loading", "stage": stage, "progress": round(share, 3)}
    return {"value": "unloaded" if manager.model is None else "loaded"}
