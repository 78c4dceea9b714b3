"""Which engine runs a bundle on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ondevice.bundle import Bundle
from ondevice.engines.attention import AttentionOptions
from ondevice.engines.protocol import Engine, KVCacheType
from ondevice.errors import MissingDependencyError, UsageError
from ondevice.preparation import TOKENS, Preparation

if TYPE_CHECKING:
    from ondevice.engines.ort.engine import OrtEngine
    from ondevice.engines.simd.pack.file import PackState

EngineName = Literal["auto", "simd", "ort"]
"""`auto` is `simd` where it can run the bundle's graphs, else `ort`."""

ENGINES: tuple[str, ...] = get_args(EngineName)

EXACT = AttentionOptions()

KV_CACHES: tuple[str, ...] = get_args(KVCacheType)

_log = logging.getLogger("ondevice")


def open_engine(
    name: str,
    bundle: Bundle,
    threads: int,
    context_length: int | None = None,
    *,
    kv_cache: KVCacheType = "fp16",
    attention: AttentionOptions = EXACT,
    preparation: Preparation | None = None,
) -> Engine:
    """Open the engine of that name.

    `auto` falls back to `ort` with one line on the `ondevice` logger. With a `preparation`, what the engine lacks is
    compiled before its first forward, else at that.

    Raises:
        UsageError: no engine of that name, no such cache or attention, or one that only `simd` has where `ort` would
            run.
        UnsupportedBundleError: `simd` was asked for by name and has no kernel for something in the graphs.
        BundleCorruptError: the graphs are not what they claim to be.
        MissingDependencyError: `ort` would run, and onnxruntime is not installed.
    """
    if not isinstance(name, str) or name not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    if not isinstance(kv_cache, str) or kv_cache not in KV_CACHES:
        raise UsageError(f"kv_cache must be one of {', '.join(KV_CACHES)}, not {kv_cache!r}")
    if name != "ort":
        from ondevice.engines.simd.engine import SimdEngine
        from ondevice.engines.simd.lookup_settings import LookupSettings
        from ondevice.engines.simd.unsupported import UnsupportedGraphError

        lookup = LookupSettings(attention.kind, attention.keys, attention.width) if attention.looks_up else None
        try:
            return SimdEngine(
                bundle, threads, context_length, kv_cache=kv_cache, lookup=lookup, preparation=preparation
            )
        except UnsupportedGraphError as error:
            if name == "simd":
                raise
            if kv_cache == "int8":
                raise UsageError(
                    f"an int8 KV cache needs simd kernels, and there are none for this bundle "
                    f"({error.reason}): use --kv-cache fp16"
                ) from error
            if attention.looks_up:
                raise UsageError(
                    f"lookup attention needs simd kernels, and there are none for this bundle "
                    f"({error.reason}): use --attention exact"
                ) from error
            _ort_engine(error.reason)
            _log.warning("no simd kernels for this bundle (%s): running it with onnxruntime", error.reason)
    if kv_cache == "int8":
        raise UsageError("the ort engine has no int8 KV cache: use --engine simd or --kv-cache fp16")
    if attention.looks_up:
        raise UsageError("the ort engine has no lookup attention: use --engine simd or --attention exact")
    if preparation is not None:
        preparation.compile(TOKENS)
    return _ort_engine()(bundle, threads, context_length)


def _ort_engine(reason: str | None = None) -> type[OrtEngine]:
    """The engine's class; onnxruntime has no wheels for Intel Macs and the newest Python.

    Args:
        reason: why `simd` cannot run instead; None where `ort` was asked for by name.
    """
    try:
        from ondevice.engines.ort.engine import OrtEngine
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        what, instead = "the ort engine", "use --engine simd"
        if reason is not None:
            what, instead = f"this bundle ({reason})", "export it again with the defaults, which the simd engine runs"
        raise MissingDependencyError("onnxruntime", what=what, instead=instead) from error
    return OrtEngine


@dataclass(frozen=True)
class Preview:
    """What `auto` would open.

    reason : why it is not `simd`
    pack : of `simd`'s weights
    weights : by what they are for, then by format
    """

    engine: Literal["simd", "ort"]
    reason: str | None = None
    pack: PackState | None = None
    weights: Mapping[str, Mapping[str, int]] | None = None


def preview(bundle: Bundle) -> Preview:
    """Read a bundle's graphs as `auto` would, and neither pack nor run anything.

    Raises:
        BundleCorruptError: the graphs are not what they claim to be.
        MissingDependencyError: it would be `ort`, and onnxruntime is not installed.
    """
    from ondevice.engines.simd.program import pack_state, read_models
    from ondevice.engines.simd.unsupported import UnsupportedGraphError
    from ondevice.engines.simd.weight_classes import weight_classes

    try:
        return Preview("simd", pack=pack_state(bundle), weights=weight_classes(*read_models(bundle)))
    except UnsupportedGraphError as error:
        _ort_engine(error.reason)
        return Preview("ort", error.reason)
