"""Publish a measurement of real text: `python -m benchmarks.published FILE...`, JSON files of `benchmarks.real_text`.

Its tables go into RESULTS.md. From these the figures that README.md and docs/drafting.md quote are written, and the
README's picture is drawn; without a file, only this second step is done. In each page, the text between the lines
`<!-- measured -->` and `<!-- /measured -->` is replaced.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.picture import PICTURE, REAL_TEXT, RESULTS, draw, read_interval, read_tables
from benchmarks.real_text import TEMPERATURES, merge, report

ROOT = RESULTS.parent.parent
README, DRAFTING = ROOT / "README.md", ROOT / "docs" / "drafting.md"

WIDTH = 124
"""Of a line in the pages."""

BLOCK = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """A setting's line in a table of RESULTS.md: means over prompts.

    speed_up : relative to plain decoding of ondevice
    varied : the same, over the prompts whose greedy reply does not repeat itself
    prompts : number of them
    """

    tokens_per_s: float
    speed_up: float
    varied: float
    prompts: int


Found = Mapping[float, Mapping[str, Setting]]
"""Settings by temperature and name."""


def read_settings(results: str) -> Found:
    """The settings in the tables of real text of a RESULTS.md."""
    tables = read_tables(results, REAL_TEXT)
    return {
        temperature: {
            row["setting"]: Setting(
                read_interval(row["tokens/s"])[0],
                read_interval(row["speed-up"])[0],
                read_interval(row["where the greedy reply does not repeat itself"])[0],
                int(row["prompts"]),
            )
            for row in table
        }
        for temperature, table in zip(TEMPERATURES, tables, strict=False)
    }


def results_text(files: list[Path]) -> str:
    """The command, the tables and the conditions of JSON files, for RESULTS.md."""
    records, facts = merge(files)
    most = max(record.prompt for record in records) + 1
    [drafts] = {record.setting.rpartition(" ")[2] for record in records if record.setting.startswith("llama.cpp mtp")}
    commands = [
        "python -m benchmarks.widened DIR --head-bits 4",
        "python -m benchmarks.widened_gguf target.gguf --drafter drafter.gguf --head-bits 4",
        f"python -m benchmarks.real_text DIR --human-eval humaneval.jsonl --limit {most} --turns {facts['turns']} "
        f"--tokens {facts['tokens']} \\",
        "    --llama-server llama-server --gguf target.gguf --mtp-gguf drafter.gguf "
        f"--mtp-drafts {drafts} --json found.json",
        "python -m benchmarks.published found.json",
    ]
    block = "\n".join(["```", *commands, "```"])
    return f"{block}\n\n{report(records, facts)}\n"


def readme_text(found: Found) -> str:
    """What the README says below its picture."""
    greedy, sampled = (found[temperature] for temperature in TEMPERATURES)
    auto, other = greedy["auto"], sampled["auto"]
    lead, other_lead = auto.speed_up / llama_best(greedy), other.speed_up / llama_best(sampled)
    text = (
        f"Over {auto.prompts} prompts, `ondevice` with drafts decodes {auto.speed_up:.1f} times as fast as without "
        f"them at temperature 0 ({auto.varied:.1f} times where the text does not repeat itself) and "
        f"{other.speed_up:.1f} times at temperature 1. That is {lead:.1f} and {other_lead:.1f} times the fastest "
        "setting of llama.cpp, on the same weights and cores. The weights are not Gemma's, whose own MTP drafter may "
        "be accepted more or less often."
    )
    return textwrap.fill(text, WIDTH) + "\n"


def llama_best(settings: Mapping[str, Setting]) -> float:
    """Speed-up of llama.cpp's fastest setting over plain decoding of ondevice."""
    return max(setting.speed_up for name, setting in settings.items() if name.startswith("llama.cpp"))


def drafting_text(found: Found) -> str:
    """What docs/drafting.md says about lengths, draft models and heads."""
    greedy, sampled = (found[temperature] for temperature in TEMPERATURES)
    lengths = [name for name in sampled if re.fullmatch(r"mtp \d+", name)]
    listed = " / ".join(f"{sampled[name].speed_up:.2f}" for name in lengths)
    names = " / ".join(name.removeprefix("mtp ") for name in lengths)
    sentences = [
        f"At temperature 1, MTP drafts of constantly {names} tokens give {listed} times plain decoding; with lengths "
        f"and trees that the drafter chooses by itself it gives {sampled['mtp'].speed_up:.2f}, and `auto` "
        f"{sampled['auto'].speed_up:.2f}.",
        "A draft model was not measured there: only the reference pair and its heads have a copy of E2B's cost.",
        f"Medusa's heads give {greedy['medusa'].speed_up:.2f} at temperature 0 and {sampled['medusa'].speed_up:.2f} "
        f"at 1, where MTP gives {greedy['mtp'].speed_up:.2f} and {sampled['mtp'].speed_up:.2f}.",
    ]
    return "".join(textwrap.fill(each, WIDTH, initial_indent="- ", subsequent_indent="  ") + "\n" for each in sentences)


def filled(page: str, text: str) -> str:
    """A page with another text in its measured block.

    Raises:
        SystemExit: it has no such block, or several.
    """
    found, count = BLOCK.subn(lambda _: text, page)
    if count != 1:
        raise SystemExit(f"expected one block <!-- measured -->, found {count}")
    return found


def publish() -> None:
    """Write what README.md and docs/drafting.md quote from RESULTS.md, and draw the picture."""
    results = RESULTS.read_text("utf-8")
    found = read_settings(results)
    for path, text in ((README, readme_text(found)), (DRAFTING, drafting_text(found))):
        path.write_text(filled(path.read_text("utf-8"), text), "utf-8")
    PICTURE.write_text(draw(results), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="written by benchmarks.real_text --json")
    files = parser.parse_args().files
    if files:
        RESULTS.write_text(filled(RESULTS.read_text("utf-8"), results_text(files)), "utf-8")
    publish()


if __name__ == "__main__":
    main()
