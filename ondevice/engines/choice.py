"""Opens the engine for a bundle: `simd` if it has kernels for the bundle, else `ort`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ondevice.bundle import Bundle
from ondevice.engines.protocol import AttentionOptions, Engine, KVCacheType, context_within
from ondevice.errors import MissingDependencyError, UsageError
from ondevice.native.sets import parts_of
from ondevice.preparation import Preparation

if TYPE_CHECKING:
    from ondevice.engines.ort import OrtEngine
    from ondevice.engines.simd.pack_file import PackState

EngineName = Literal["auto", "simd", "ort"]
"""`auto` is `simd` if it has kernels for the bundle's weights, else `ort`."""

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
    """Open an engine for a bundle.

    Args:
        name: an `EngineName`. `auto` logs one line on the `ondevice` logger if it falls back to `ort`.
        bundle: the bundle to run.
        threads: number of threads that compute.
        context_length: most tokens of a sequence; None takes the value in the target's configuration.
        kv_cache: number format of cached keys and values.
        attention: how layers with full attention choose positions: all of them, or by lookup.
        preparation: compiles missing kernels before the first forward, and reports progress; None compiles them during
            the first forward.

    Returns:
        The opened engine.

    Raises:
        UsageError: the name of the engine, cache or attention is unknown, or the cache or attention exists on `simd`
            only and `ort` would run.
        UnsupportedBundleError: `simd` was requested by name and has no kernel for some weights.
        BundleCorruptError: the graphs or weights do not match the manifest.
        MissingDependencyError: `ort` would run, and onnxruntime is not installed.
    """
    if not isinstance(name, str) or name not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    if not isinstance(kv_cache, str) or kv_cache not in KV_CACHES:
        raise UsageError(f"kv_cache must be one of {', '.join(KV_CACHES)}, not {kv_cache!r}")
    if name != "ort":
        from ondevice.engines.simd.caches import LookupSettings
        from ondevice.engines.simd.engine import SimdEngine
        from ondevice.engines.simd.tensor_files import UnsupportedGraphError

        context = context_within(context_length, bundle.manifest.target.context_length)
        lookup = LookupSettings.of(attention, context) if attention.looks_up else None
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
        preparation.compile(parts_of("ort"))
    return _ort_engine()(bundle, threads, context_length)


def _ort_engine(reason: str | None = None) -> type[OrtEngine]:
    """Import `OrtEngine`. onnxruntime may be missing: it has no wheels for Intel Macs and the newest Python.

    Args:
        reason: why `simd` cannot run the bundle; None if `ort` was requested by name.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    try:
        from ondevice.engines.ort import OrtEngine
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
    """The engine that `auto` would open for a bundle.

    parts : names of the parts of the kernel library that it needs
    reason : why `simd` cannot run the bundle; None if it can
    pack : state of the packed weights of `simd`; None for `ort`
    weights : number of weights by purpose, then by format; None for `ort`
    """

    engine: Literal["simd", "ort"]
    parts: tuple[str, ...]
    reason: str | None = None
    pack: PackState | None = None
    weights: Mapping[str, Mapping[str, int]] | None = None


def preview(bundle: Bundle) -> Preview:
    """Choose the engine as `auto` would, without packing weights or running anything.

    Raises:
        BundleCorruptError: the weights do not match the manifest.
        MissingDependencyError: `ort` would run, and onnxruntime is not installed.
    """
    from ondevice.engines.simd.pack_file import find_pack
    from ondevice.engines.simd.program import BundleModels
    from ondevice.engines.simd.tensor_files import UnsupportedGraphError

    try:
        models = BundleModels(bundle)
        pack = find_pack(models.layout, models.files.content())
        return Preview("simd", parts_of("simd"), pack=pack, weights=models.weight_classes())
    except UnsupportedGraphError as error:
        _ort_engine(error.reason)
        return Preview("ort", parts_of("ort"), error.reason)
