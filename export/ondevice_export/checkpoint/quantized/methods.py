"""The `quant_method`s of checkpoints whose matrices become one tensor each, and their entries.

Gemma's own method (`gemma`) is another case: its codes have scales of inputs and outputs beside them, which a graph
applies, so that they cannot be read as weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.quantized import columns, compressed, mxfp4
from ondevice_export.checkpoint.quantized.grouped import GroupedEntry
from ondevice_export.checkpoint.safetensors_file import SafetensorsFile, Stored, TensorEntry

QuantizedEntry = mxfp4.Mxfp4Entry | GroupedEntry
"""A matrix, or the matrices of experts, whose codes a bundle can keep."""

_Joined = Mapping[str, tuple[SafetensorsFile, TensorEntry | QuantizedEntry]]
_Join = Callable[[Mapping[str, Stored], JsonFields, str], _Joined]
_JOIN: dict[str, _Join] = {
    compressed.METHOD: compressed.join_packed,
    columns.GPTQ: columns.join_gptq,
    columns.AWQ: columns.join_awq,
    mxfp4.METHOD: mxfp4.join_blocks,
}
JOINED = tuple(_JOIN)
"""The methods whose matrices are joined."""
KEPT = tuple(method for method in JOINED if method != mxfp4.METHOD)
"""The methods whose checkpoints are exported with `--quantize keep` by default. MXFP4 is not one of them: only
experts have it, and the default of the other matrices is as of a checkpoint that is not quantised."""


def quant_method(config: Mapping[str, Any]) -> object:
    """The `quant_method` of the `quantization_config` of a `config.json`; None if there is none."""
    quantization = config.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, dict) else None


def join_quantized(tensors: Mapping[str, Stored], config: Mapping[str, Any], origin: str) -> _Joined:
    """The tensors of files by name, with one in place of those that hold a matrix's codes, scales and zeros.

    Args:
        tensors: the tensors of a checkpoint's files.
        config: `config.json`; without one of the methods in `JOINED`, the tensors are returned as they are.
        origin: what error messages call the checkpoint.

    Raises:
        CheckpointError: the method's format is not supported, or a tensor is missing or does not fit the others.
    """
    method = quant_method(config)
    join = _JOIN.get(method) if isinstance(method, str) else None
    if join is None:
        return tensors
    return join(tensors, JsonFields(config, origin).mapping("quantization_config", {}), origin)
