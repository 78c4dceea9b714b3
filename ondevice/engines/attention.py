"""What layers of full attention attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ondevice.errors import UsageError

AttentionType = Literal["exact", "lookup", "lookup-drafts", "nomad"]
"""`exact`: all positions. `lookup`: those that table lookups over codes of the keys choose. `lookup-drafts`: the
drafter's layers do so, and the target is exact. `nomad`: all positions, with scores that are looked up."""

ATTENTIONS: tuple[str, ...] = get_args(AttentionType)
WIDTHS = (1, 2, 4)
UNIT = 32
"""Positions that are chosen together."""


@dataclass(frozen=True)
class AttentionOptions:
    """
    kind : see `AttentionType`
    keys : positions that are chosen, a multiple of UNIT; None takes as many as seem to matter
    width : numbers of a key that share a code of 4 bits
    """

    kind: AttentionType = "exact"
    keys: int | None = None
    width: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ATTENTIONS:
            raise UsageError(f"attention must be one of {', '.join(ATTENTIONS)}, not {self.kind!r:.99}")
        keys = self.keys
        if keys is not None and (not isinstance(keys, int) or isinstance(keys, bool) or keys < UNIT or keys % UNIT):
            raise UsageError(f"attention_keys must be a multiple of {UNIT}, or None, not {keys!r:.99}")
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width not in WIDTHS:
            raise UsageError(f"attention_width must be one of {', '.join(map(str, WIDTHS))}, not {self.width!r:.99}")

    @property
    def looks_up(self) -> bool:
        """Whether `ort` has no such attention."""
        return self.kind != "exact"
