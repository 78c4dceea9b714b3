"""How lookup attention chooses what a row attends to."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.engines.attention import UNIT, AttentionType


@dataclass(frozen=True)
class LookupSettings:
    """
    mode : who looks up what: see `AttentionType`
    keys : that a row attends to besides the first and the newest; None takes as many as `left` asks for
    width : numbers of a key that share a code of 4 bits: 1, 2 or 4
    left : share of a row's weights that may be left out, as far as the codes tell, where `keys` is None
    least, most : keys, where `keys` is None
    window : newest positions that are always attended to; as many as a sequence's rows in a forward at least, so that
        what is looked up was committed, and coded, before it
    learn : positions from whose keys the codebooks are learnt; before they are committed, and while a row sees no more
        than `window` further ones, rows attend to all positions
    """

    mode: AttentionType = "lookup"
    keys: int | None = None
    width: int = 4
    left: float = 0.02
    least: int = 256
    most: int = 2048
    window: int = 512
    learn: int = 2048

    @property
    def name(self) -> str:
        """For what depends on the target's outputs: one for all settings that leave them alone."""
        if self.mode == "lookup-drafts":
            return "exact"
        keys = f", {self.keys or 'auto'} keys" if self.mode == "lookup" else ""
        return f"{self.mode}{keys}, width {self.width}"

    @property
    def begin(self) -> int:
        """Positions that a row must see to look up: a function of nothing else, so drafts and chunks do not matter."""
        return self.learn + self.window + 1

    @property
    def least_units(self) -> int:
        return max(1, (self.least if self.keys is None else self.keys) // UNIT)

    @property
    def most_units(self) -> int:
        return max(1, (self.most if self.keys is None else self.keys) // UNIT)
