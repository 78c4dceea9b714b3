"""Energy that the processor has used, from counters of Linux: RAPL (Intel and AMD), or a sensor of hwmon.

Both count the whole package: other programs, and idle cores, are in it. Most systems let only root read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ondevice.machine import read_text


@dataclass(frozen=True)
class EnergyCounter:
    """A file with the microjoules used since some time in the past, and the number at which it starts again, or 0."""

    path: Path
    limit: int


def energy_counters(root: Path = Path("/")) -> list[EnergyCounter]:
    """A counter for each processor package that can be read; none where there are none."""
    found = []
    for zone in sorted(root.glob("sys/class/powercap/intel-rapl:*")):
        if read_text(zone / "name").startswith("package"):
            found.append(EnergyCounter(zone / "energy_uj", int(read_text(zone / "max_energy_range_uj") or 0)))
    if not found:  # the driver amd_energy: a sensor for each core, and one for each socket
        for label in sorted(root.glob("sys/class/hwmon/hwmon*/energy*_label")):
            if "socket" in read_text(label):
                found.append(EnergyCounter(label.with_name(label.name.replace("_label", "_input")), 0))
    return found if None not in read_counters(found) else []


def read_counters(counters: list[EnergyCounter]) -> list[int | None]:
    """The microjoules of each counter; None for one that cannot be read."""
    words = [read_text(counter.path).strip() for counter in counters]
    return [int(word) if word.isdecimal() else None for word in words]


def joules_between(counters: list[EnergyCounter], before: list[int | None], after: list[int | None]) -> float | None:
    """Energy used between two readings, each counter having started again at most once; None if it is not known."""
    total = 0
    for counter, first, last in zip(counters, before, after, strict=True):
        if first is None or last is None or (last < first and not counter.limit):
            return None
        total += last - first + (counter.limit if last < first else 0)
    return total / 1e6 if counters else None
