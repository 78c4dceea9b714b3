"""Runs the original target and drafter in float32 on torch; only a verification needs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ondevice.errors import MissingDependencyError, UsageError
from ondevice_export.checkpoint.quantized import mxfp4
from ondevice_export.checkpoint.quantized.methods import KEPT, quant_method

LOADS_TRAINED_QUANTISED = (5, 23)
"""The first version of transformers that loads checkpoints that were trained quantised."""


@dataclass(frozen=True)
class Reference:
    """The target's outputs for one prompt: logits [T, V], post-norm hidden states [1, T, H], and the caches that a
    drafter reads; none without one.
    """

    logits: npt.NDArray[np.float32]
    hidden: Any
    caches: dict[str, tuple[Any, Any]]


class Original:
    """A target and its drafter, run by transformers."""

    def __init__(self, target: Path, drafter: Path | None, context: int = 0) -> None:
        """
        Args:
            target: the directory of the target's checkpoint.
            drafter: that of its drafter; None without one.
            context: the longest text of the bundle that is compared, by which a model with `longrope` has its
                frequencies; here it would have them by the text.

        Raises:
            UsageError: the installed version of transformers cannot load the checkpoints.
        """
        _check_version(target)
        self._target = _load(target)
        _choose_frequencies(self._target, context)
        self._drafter = None if drafter is None else _load(drafter)

    @property
    def has_drafter(self) -> bool:
        return self._drafter is not None

    def run(self, prompt: list[int]) -> Reference:
        import torch

        shared = {"return_shared_kv_states": True} if self.has_drafter else {}
        with torch.inference_mode():
            output = self._target(torch.tensor([prompt]), output_hidden_states=True, use_cache=False, **shared)
        caches = dict(output.shared_kv_states) if self.has_drafter else {}
        return Reference(output.logits[0].numpy(), output.hidden_states[-1], caches)

    def draft(self, reference: Reference, length: int, token: int) -> int:
        """The first drafted token after the prompt's first `length` tokens and `token`.

        Source: SinglePositionMultiTokenCandidateGenerator.
        """
        import torch

        assert self._drafter is not None
        with torch.inference_mode():
            embedded = self._target.get_input_embeddings()(torch.tensor([[token]]))
            output = self._drafter(
                inputs_embeds=torch.cat([embedded, reference.hidden[:, length - 1 : length]], dim=-1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states={
                    kind: (key[:, :, :length], value[:, :, :length]) for kind, (key, value) in reference.caches.items()
                },
            )
        return int(output.logits[0, -1].argmax())


def check_installed() -> None:
    """Check that the packages a verification imports are installed; called before a long export.

    Raises:
        MissingDependencyError: a package is missing; the message names the first one.
    """
    # optimum 2.3 always imports requests; the bundle is run on ONNX Runtime, which has every operator
    for package in ("torch", "transformers", "optimum.exporters", "requests", "onnxruntime"):
        name = package.partition(".")[0]
        if find_spec(name) is None or find_spec(package) is None:
            raise MissingDependencyError(name, "verify")


def _check_version(directory: Path) -> None:
    from transformers import __version__

    config = _config(directory)
    method = quant_method(config)
    if method in KEPT:
        raise UsageError(f"weights quantised by {method} are not loaded to compare with: leave --verify out")
    trained_quantised = config.get("quantization_config") and method != mxfp4.METHOD
    if trained_quantised and tuple(map(int, __version__.split(".")[:2])) < LOADS_TRAINED_QUANTISED:
        raise UsageError(
            f"transformers {__version__} cannot load a checkpoint that was trained quantised, to compare with: "
            "5.23 or newer can"
        )


def _choose_frequencies(model: Any, context: int) -> None:
    """Give a model with `longrope` the frequencies of long texts for all of them, if the longest one is long."""
    config = model.config.get_text_config()
    parameters = config.rope_parameters
    if parameters.get("rope_type") == "longrope" and context > parameters["original_max_position_embeddings"]:
        parameters["short_factor"] = parameters["long_factor"]
        decoder = model.get_decoder()
        decoder.rotary_emb = type(decoder.rotary_emb)(config)


def _load(directory: Path) -> Any:
    """Load a checkpoint's model in the class that its `architectures` field names, in float32.

    Weights in MXFP4 become bfloat16 first, which has all of their numbers; by default a GPU would keep them.
    """
    import torch
    from optimum.exporters.tasks import TasksManager
    from transformers import Mxfp4Config

    in_mxfp4 = quant_method(_config(directory)) == mxfp4.METHOD
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if in_mxfp4 else {}
    model = TasksManager.get_model_from_task(
        "text-generation", directory, framework="pt", torch_dtype=torch.float32, library_name="transformers", **options
    )
    return (model.float() if in_mxfp4 else model).eval()


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config
