"""Facts as text: labels on the left, values aligned and wrapped on the right."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

LEAST_COLUMNS = 20
"""For values, however narrow the terminal is."""

KEPT = "\0"
"""A space at which no line is broken."""


def lines(facts: Mapping[str, Any], columns: int) -> list[str]:
    """What is not there, such as an engine that is unavailable, has no line."""
    rows = {_label(name): _paragraphs(name, value) for name, value in facts.items()}
    width = max(map(len, rows)) + 2
    return [
        f"{'' if index else label:{width}}{line}"
        for label, paragraphs in rows.items()
        for index, line in enumerate(_wrapped(paragraphs, columns - width))
    ]


def size(count: int) -> str:
    """A count of bytes for a reader: 1000-based, as file managers and hubs count."""
    shown = float(count)
    for unit in ("B", "kB", "MB"):
        if shown < 1000:
            return f"{shown:.0f} {unit}" if unit == "B" else f"{shown:.1f} {unit}"
        shown /= 1000
    return f"{shown:.2f} GB"


def _wrapped(paragraphs: list[str], columns: int) -> list[str]:
    """A path stays in one piece, to be copied, and so does an item of a list."""
    width = max(columns, LEAST_COLUMNS)
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False).wrap
    return [line.replace(KEPT, " ") for paragraph in paragraphs for line in wrap(paragraph)]


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def _paragraphs(name: str, value: Any) -> list[str]:
    if name in LISTS and value is not None:
        return [f"{_label(key) if name == 'weights' else key} {LISTS[name](item)}" for key, item in value.items()]
    return ["none" if value is None else TEXTS[name](value) if name in TEXTS else _text(value)]


def _kept(value: Any) -> str:
    return str(value).replace(" ", KEPT)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key.replace('_', ' ')} {item}" for key, item in value.items()]
    if isinstance(value, list):
        return ", ".join(_kept(item) for item in value) or "none"
    return str(value)


def _cache(cache: Mapping[str, Any]) -> str:
    count = cache["packs"]
    packs = "no packs" if not count else f"{count} pack{'s' if count > 1 else ''}, {size(cache['bytes'])}"
    return f"{packs} in {_kept(cache['directory'])}"


def _engine(engine: Mapping[str, Any]) -> str:
    name, reason = engine["name"] or "none", engine["reason"]
    return name if reason is None else f"{name}: {reason}"


def _formats(counts: Mapping[str, int]) -> str:
    """Millions of weights by format."""
    return ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in counts.items())


def _pack(pack: Mapping[str, Any]) -> str:
    bytes_, path = size(pack["bytes"]), _kept(pack["path"])
    return {
        "packed": f"packed: {bytes_} at {path}",
        "missing": f"not yet: {bytes_} will be written to {path} at the first load",
        "damaged": f"damaged: {bytes_} will be written anew to {path} at the next load",
        "small": f"in memory: {bytes_}, packed at every start",
        "unwritable": f"in memory: {bytes_}, packed at every start, because {pack['obstacle']}",
    }[pack["status"]]


def _skipped(found: Mapping[str, Any]) -> str:
    if found["blocks"] is None:
        return "not known: `ondevice tune` finds out"
    if not found["blocks"]:
        return f"nothing that pays ({found['predicted_speed_up']:.2f} times plain at best on {found['processor']})"
    return f"{', '.join(map(_kept, found['blocks']))}: {found['predicted_speed_up']:.2f} times plain, as predicted"


def _heads(heads: list[Mapping[str, Any]]) -> str:
    kinds = []
    for each in heads:
        where = f"behind layer {each['layer']}" if each["layer"] is not None else f"for {each['offsets']} tokens"
        kinds.append(_kept(f"{each['kind']} {where}"))
    return ", ".join(kinds)


LABELS = {"memory_bytes_per_s": "memory bandwidth", "dot_product_ops_per_s": "dot products"}

LISTS: dict[str, Callable[[Any], str]] = {"files": size, "unavailable": str, "weights": _formats}
"""Facts with a line for each entry."""

TEXTS: dict[str, Callable[[Any], str]] = {
    "memory_bytes_per_s": lambda rate: f"{rate / 1e9:.1f} GB/s",
    "dot_product_ops_per_s": lambda rate: f"{rate / 1e9:.0f} GOPS",
    "bytes": size,
    "cache": _cache,
    "drafts_without": _skipped,
    "engine": _engine,
    "heads": _heads,
    "pack": _pack,
    "threads": "at most {}".format,
    "prepared": lambda done: "yes" if done else "no: `ondevice prepare` compiles kernels and packs weights",
}
