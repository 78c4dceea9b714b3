"""`load`: from a bundle on disk to a `Model`, ready to generate."""

from __future__ import annotations

import hashlib
import logging
from os import PathLike, fspath
from pathlib import Path
from time import perf_counter

from ondevice import __version__, machine
from ondevice.bundle import Bundle
from ondevice.decoding.costs_file import CostsFile
from ondevice.draft_bundles import find
from ondevice.drafters import registry
from ondevice.engines.attention import AttentionOptions, AttentionType
from ondevice.engines.choice import EngineName, open_engine
from ondevice.engines.protocol import Engine, KVCacheType
from ondevice.errors import UsageError
from ondevice.model import CACHE_BYTES, MAX_SEQUENCES, Model
from ondevice.preparation import Preparation
from ondevice.progress import OnPrepare

MOST_THREADS = 256
"""More would only wait for one another, where there are not as many processors."""

_log = logging.getLogger("ondevice")


def load(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    context_length: int | None = None,
    kv_cache: KVCacheType = "fp16",
    attention: AttentionType = "exact",
    attention_keys: int | None = None,
    attention_width: int = 4,
    max_sequences: int = MAX_SEQUENCES,
    cache_bytes: int = CACHE_BYTES,
    drafter: str | PathLike[str] | None = None,
    verify_hashes: bool = False,
    on_prepare: OnPrepare | None = None,
) -> Model:
    """Open a bundle and make it ready to generate.

    Args:
        bundle: a directory, or a name under the model home (`$ONDEVICE_HOME`, else `~/.ondevice`).
        engine: `auto` takes the fastest that runs here.
        threads: most compute threads; None takes the physical cores that this process may use.
        context_length: most tokens of a sequence; None takes the model's own.
        kv_cache: `int8` halves the memory of a long context, on the `simd` engine; `fp16` there is float32 on `ort`.
        attention: `lookup` makes long contexts faster, on the `simd` engine: beyond 2,560 tokens, layers of full
            attention attend to the first 32 positions, the newest 512, and those between that table lookups choose.
            The text may be another, and drafts still change nothing. With `lookup-drafts` the drafter does so and the
            target is exact: the text is what it was. `nomad` has scores of all positions looked up, for comparison.
        attention_keys: how many positions are chosen, a multiple of 32; None takes 256 to 2,048, as many as leave 2 %
            of a row's weights out, as far as the lookups tell.
        attention_width: numbers of a key that share a code of 4 bits: 1, 2 or 4. At 4 codes take 1/16 of what int8 keys
            do; at 1 they are four times as large, and truer, which `nomad` needs.
        max_sequences: generations at the same time, 1 to 16; more wait for their turn.
        cache_bytes: keys and values of finished sequences that are kept for prompts that begin like them; the newest
            stays even where it alone is larger. 0 keeps none. A draft model may keep as much of its own.
        drafter: who drafts where a generation does not say; None is `auto`. A draft bundle's path, or `auto+` and that,
            is opened now, with the same engine and as many threads.
        verify_hashes: compare every file's sha256 first.
        on_prepare: called while kernels are compiled and weights packed, which happens once and takes seconds, with
            what is going on and the share of all that is done, 0 to 1. An exception from it ends the loading.

    Raises:
        BundleError: nothing there, or nothing to trust.
        UsageError: an engine, thread count, context, cache or drafter that does not exist, or a draft bundle with
            another vocabulary.
    """
    started = perf_counter()
    if threads is not None:
        _check_number("threads", threads, 1, max(MOST_THREADS, machine.processors()))
    if context_length is not None:
        _check_number("context_length", context_length, 2)
    _check_number("max_sequences", max_sequences, 1)
    _check_number("cache_bytes", cache_bytes, 0)
    if on_prepare is not None and not callable(on_prepare):
        raise UsageError(f"on_prepare must be a function, not {on_prepare!r:.99}")
    if drafter is not None and not isinstance(drafter, (str, PathLike)):
        raise UsageError(f"drafter must be a name or a path, not {drafter!r:.99}: give your own to a generation")
    attends = AttentionOptions(attention, attention_keys, attention_width)
    opened = Bundle.open(bundle, verify_hashes=verify_hashes)
    if drafter is not None and (location := registry.draft_bundle(fspath(drafter))) is not None:
        find(location, opened)  # before minutes are spent on the model
    count = threads or machine.default_threads()
    if count > (most := machine.processors()):
        _log.warning("more threads (%d) than processors (%d): they will wait for one another", count, most)

    if (warning := machine.memory_warning(opened.manifest.weight_bytes)) is not None:
        _log.warning("%s: %s", opened.manifest.name, warning)

    def open_one(which: Bundle, tell: OnPrepare | None, context: int | None) -> Engine:
        with Preparation(tell) as preparation:
            running = open_engine(
                engine, which, count, context, kv_cache=kv_cache, attention=attends, preparation=preparation
            )
            try:
                preparation.finish()
            except BaseException:
                running.close()
                raise
        return running

    def open_draft(which: Bundle, tell: OnPrepare | None) -> Engine:
        return open_one(which, tell, min(running.context_length, which.manifest.target.context_length))

    running = open_one(opened, on_prepare, context_length)
    model = Model(
        opened,
        running,
        count,
        perf_counter() - started,
        max_sequences=max_sequences,
        cache_bytes=cache_bytes,
        costs_file=_costs_file(opened, running, attention, count),
        open_draft=open_draft,
    )
    try:
        if drafter is not None:
            model.draft_with(drafter, on_prepare)
    except BaseException:
        model.close()
        raise
    model.load_s = perf_counter() - started
    return model


def _costs_file(bundle: Bundle, engine: Engine, attention: str, threads: int) -> CostsFile:
    """Where the costs of this bundle stay, on this machine, with this engine, attention and so many threads."""
    weights = hashlib.sha256(repr(sorted(bundle.manifest.files.items())).encode()).hexdigest()
    key = [__version__, machine.processor_name(), weights, engine.name, engine.kv_cache, attention, str(threads)]
    return CostsFile(machine.cache_directory() / "costs", key)


def prepare(
    bundle: str | Path,
    *,
    engine: EngineName = "auto",
    threads: int | None = None,
    on_prepare: OnPrepare | None = None,
) -> None:
    """Do now what the first `load` of a bundle on this machine would: compile kernels, pack weights.

    Takes and raises what `load` does.
    """
    load(bundle, engine=engine, threads=threads, on_prepare=on_prepare).close()


def _check_number(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        upper = "on" if most is None else f"to {most}"
        raise UsageError(f"{name} must be a whole number from {least} {upper}, not {value!r:.99}")
