"""Publish a measurement of real text: JSON files of `benchmarks.drafts.real_text`.

    python -m benchmarks.publish.real_text FILE... [--other-cpu | --llama-lengths | --trained-drafter]

Its tables go into `results/real-text.md`, with `--other-cpu` below the heading of a second machine, with
`--llama-lengths` below that of a comparison with all lengths of llama.cpp's drafts (`--mtp-drafts 1 2 3 ...`), and with
`--trained-drafter` (`benchmarks.drafts.real_text --instructions`) into `results/published-models.md`. From these the
figures that README.md, docs/drafting.md and the first page of the results quote are written, and the README's picture
is drawn; without a file, only this second step is done. In each page, the text between the lines `<!-- measured -->`
and `<!-- /measured -->` is replaced.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, run_command
from benchmarks.drafts.real_text import HUMAN_EVAL
from benchmarks.drafts.real_text_tables import DRAFT_MODEL, LLAMA, TEMPERATURES, Record, merge, report
from benchmarks.publish import pages
from benchmarks.publish.pages import (
    LLAMA_LENGTHS,
    OTHER_CPU,
    REAL_TEXT,
    TRAINED,
    all_results,
    fill,
    read_interval,
    read_tables,
)
from benchmarks.publish.picture import draw
from ondevice.cli.bench.measure import SCENARIOS
from ondevice.cli.bench.tables import table

WIDTH = 124
"""Characters of a line in the pages, at most."""


@dataclass(frozen=True)
class Setting:
    """A setting's line in a table of results: means over prompts.

    speed_up : relative to plain decoding of ondevice
    varied : the same, over the prompts whose greedy reply does not repeat itself; NaN if there are none
    prompts : number of them
    """

    tokens_per_s: float
    speed_up: float
    varied: float
    prompts: int


Found = Mapping[float, Mapping[str, Setting]]
"""Settings by temperature and name."""


def read_settings(results: str, heading: str = REAL_TEXT) -> Found:
    """The settings in the tables of real text below a heading of a page of results."""
    tables = read_tables(results, heading)
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
    """The command, the tables and the conditions of JSON files, for the page on real text."""
    records, facts = merge(files)
    names = (re.fullmatch(rf"{LLAMA}mtp (\d+)", record.setting) for record in records)
    drafts = " ".join(dict.fromkeys(name[1] for name in names if name))
    has_draft_model = any(record.setting == DRAFT_MODEL for record in records)
    draft_model = "--draft-model DRAFT " if has_draft_model else ""
    human_eval = "--human-eval humaneval.jsonl " if any(record.kind == HUMAN_EVAL for record in records) else ""
    kinds = list(dict.fromkeys(record.kind for record in records))
    chosen = "" if set(SCENARIOS) <= set(kinds) else f"--kinds {shlex.join(kinds)} "
    commands = [
        f"python -m benchmarks.bundles.widened DIR --head-bits 4 {draft_model}".rstrip(),
        "python -m benchmarks.bundles.gguf_files widened target.gguf --drafter drafter.gguf --head-bits 4",
        f"python -m benchmarks.drafts.real_text DIR {human_eval}{chosen}{_options(records, facts)} \\",
        f"    {draft_model}--gguf target.gguf --mtp-gguf drafter.gguf --mtp-drafts {drafts} --json found.json",
        "python -m benchmarks.publish.real_text found.json",
    ]
    block = "\n".join(["```", *commands, "```"])
    return f"{block}\n\n{report(records, facts)}\n"


def trained_text(files: list[Path]) -> str:
    """The same of a published model with a trained drafter."""
    records, facts = merge(files)
    commands = [
        "ondevice export FILE.gguf --drafter models/smollm2-drafter --out DIR",
        "python -m benchmarks.drafts.real_text DIR --instructions --gguf FILE.gguf \\",
        f"    {_options(records, facts)} --json found.json",
        "python -m benchmarks.publish.real_text found.json --trained-drafter",
    ]
    block = "\n".join(["```", *commands, "```"])
    return f"{block}\n\n{report(records, facts)}\n"


def _options(records: Sequence[Record], facts: Mapping[str, Any]) -> str:
    """The options of a run that say what was measured, and how much."""
    most = max(record.prompt for record in records) + 1
    settings = f" --settings {shlex.join(facts['settings'])}" if facts.get("settings") else ""
    return f"--limit {most} --turns {facts['turns']} --tokens {facts['tokens']}{settings}"


def trained_sentences(results: str) -> str:
    """The README's item on a published model with a trained drafter; empty if it was not measured."""
    if f"\n{TRAINED}\n" not in results:
        return ""
    found = read_settings(results, TRAINED)
    greedy, sampled = (found[temperature] for temperature in TEMPERATURES)
    cpu = re.search(r"engine simd, \d+ threads, (.+?), (?:Linux|Darwin|Windows)", results.split(f"\n{TRAINED}\n")[1])
    assert cpu, TRAINED
    return (
        "On a published model of 135 M weights, SmolLM2-135M-Instruct, `auto` with the drafter that this repository "
        f"trained for it gives {greedy['auto'].speed_up:.2f} times plain decoding at temperature 0 and "
        f"{sampled['auto'].speed_up:.2f} times at 1, over {greedy['auto'].prompts} prompts of seven kinds, on an "
        f"{cpu[1]}. That is {over_llama(greedy):.1f} and {over_llama(sampled):.1f} times the fastest setting of "
        "llama.cpp on the same file."
    )


def lengths_sentence(results: str) -> str:
    """The README's item on all lengths of llama.cpp's drafts; empty if they were not measured."""
    if f"\n{LLAMA_LENGTHS}\n" not in results:
        return ""
    found = read_settings(results, LLAMA_LENGTHS)
    greedy, sampled = (f"{over_llama(found[temperature]):.1f}" for temperature in TEMPERATURES)
    return (
        f"On a third CPU, with AVX2 alone, `ondevice` was {greedy} and {sampled} times as fast as the best of all of "
        "llama.cpp's settings, among them MTP drafts of 1 to 8 tokens, fixed, ended by probability, and sampled, over "
        f"{found[TEMPERATURES[0]]['auto'].prompts} prompts."
    )


def readme_text(found: Found, other_cpu: Found, *more: str) -> str:
    """The README's list below its picture; `more` are `lengths_sentence` and `trained_sentences`, left out if empty."""
    greedy, sampled = (found[temperature]["auto"] for temperature in TEMPERATURES)
    lead, sampled_lead = (over_llama(found[temperature]) for temperature in TEMPERATURES)
    slower, slower_sampled = (other_cpu[temperature]["auto"] for temperature in TEMPERATURES)
    slower_lead, slower_sampled_lead = (over_llama(other_cpu[temperature]) for temperature in TEMPERATURES)
    first = (
        f"Over {greedy.prompts} prompts, `ondevice` with drafts decodes {greedy.speed_up:.1f} times as fast as without "
        f"them at temperature 0 ({greedy.varied:.1f} times where the text does not repeat itself) and "
        f"{sampled.speed_up:.1f} times at temperature 1. That is {lead:.1f} and {sampled_lead:.1f} times the fastest "
        "setting of llama.cpp (no drafts, n-grams, MTP drafts of its default length), on the same weights and cores."
    )
    second = (
        f"On a CPU with less arithmetic per byte of memory, drafts give {slower.speed_up:.1f} and "
        f"{slower_sampled.speed_up:.1f} times, which is {slower_lead:.1f} and {slower_sampled_lead:.1f} times "
        "llama.cpp's best."
    )
    return _items(filter(None, (first, second, *more)))


def over_llama(settings: Mapping[str, Setting]) -> float:
    """Speed of `auto` over that of llama.cpp's fastest setting, from the tokens/s that the tables print: of a speed-up
    such as 0.70 they print only two digits.
    """
    return settings["auto"].tokens_per_s / best_of_llama(settings)


def best_of_llama(settings: Mapping[str, Setting]) -> float:
    """Tokens per second of llama.cpp's fastest setting."""
    return max(each.tokens_per_s for name, each in settings.items() if name.startswith(LLAMA))


def drafting_text(found: Found) -> str:
    """The paragraph of docs/drafting.md about trees, draft models and heads."""
    greedy, sampled = (found[temperature] for temperature in TEMPERATURES)
    lengths = [name.removeprefix("mtp ") for name in sampled if re.fullmatch(r"mtp \d+", name)]
    trees, chains = (_listed(sampled[f"{way} {length}"] for length in lengths) for way in ("mtp", "mtp chain"))

    def both(setting: str) -> tuple[str, str]:
        return f"{greedy[setting].speed_up:.2f}", f"{sampled[setting].speed_up:.2f}"

    (mtp, mtp_1), (model, model_1), (heads, heads_1) = both("mtp"), both(DRAFT_MODEL), both("medusa")
    (auto, auto_1), (more, more_1) = both("auto"), both(f"auto+ {DRAFT_MODEL}")
    sentences = [
        f"At temperature 1, MTP drafts of constantly {' / '.join(lengths)} tokens give {trees} times plain decoding as "
        f"trees, and {chains} as chains; with lengths that the drafter chooses by itself it gives {mtp_1}, and `auto` "
        f"{auto_1}.",
        f"The reference pair's draft model, with E2B's vocabulary, gives {model} at temperature 0 and {model_1} at 1, "
        f"where MTP gives {mtp} and {mtp_1}; `auto` gives {more} and {more_1} with it, and {auto} and {auto_1} "
        "without.",
        f"Medusa's heads give {heads} at temperature 0 and {heads_1} at 1.",
    ]
    return _items(sentences)


def _items(texts: Iterable[str]) -> str:
    """A list in Markdown."""
    return "".join(textwrap.fill(each, WIDTH, initial_indent="- ", subsequent_indent="  ") + "\n" for each in texts)


def _listed(settings: Iterable[Setting]) -> str:
    return " / ".join(f"{setting.speed_up:.2f}" for setting in settings)


def first_page_text(found: Found, other_cpu: Found) -> str:
    """The table of the first page of results."""
    lines = []
    for name, settings_of in (("more arithmetic", found), ("less arithmetic", other_cpu)):
        for temperature in TEMPERATURES:
            settings = settings_of[temperature]
            plain, auto = settings["plain"], settings["auto"]
            speeds = [f"{each:.1f}" for each in (plain.tokens_per_s, auto.tokens_per_s, best_of_llama(settings))]
            ratios = [f"{auto.speed_up:.2f}", f"{over_llama(settings):.2f}"]
            lines.append([name, f"{temperature:g}", str(auto.prompts), *speeds, *ratios])
    titles = ["a CPU with", "T", "prompts", "no drafts, tokens/s", "auto, tokens/s", "llama.cpp's best, tokens/s"]
    return table([*titles, "auto / no drafts", "auto / llama.cpp"], lines, left={"a CPU with"}) + "\n"


def publish() -> None:
    """Write what README.md, docs/drafting.md and the first page quote from the pages of results; draw the picture."""
    results = all_results()
    found, other_cpu = read_settings(results), read_settings(results, OTHER_CPU)
    fill(pages.README, readme_text(found, other_cpu, lengths_sentence(results), trained_sentences(results)))
    fill(pages.DRAFTING, drafting_text(other_cpu))
    fill(pages.FIRST_PAGE, first_page_text(found, other_cpu), pages.FIRST_REAL_TEXT)
    pages.PICTURE.write_text(draw(results), "utf-8")


def _fill_section(page: Path, text: str, heading: str) -> None:
    """Replace the measured block below a heading, which is added to the page if it is not there yet."""
    if f"\n{heading}\n" not in (written := page.read_text("utf-8")):
        page.write_text(f"{written}\n{heading}\n\n<!-- measured -->\n<!-- /measured -->\n", "utf-8")
    fill(page, text, heading)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of benchmarks.drafts.real_text --json")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--other-cpu", action="store_true", help="they were measured on the second machine")
    group.add_argument("--llama-lengths", action="store_true", help="they have all lengths of llama.cpp's drafts")
    group.add_argument("--trained-drafter", action="store_true", help="they are of a published model")
    arguments = parser.parse_args()
    if (files := arguments.files) and arguments.trained_drafter:
        _fill_section(pages.RESULTS / "published-models.md", trained_text(files), TRAINED)
    elif files and arguments.llama_lengths:
        _fill_section(pages.RESULTS / "real-text.md", results_text(files), LLAMA_LENGTHS)
    elif files:
        fill(pages.RESULTS / "real-text.md", results_text(files), OTHER_CPU if arguments.other_cpu else REAL_TEXT)
    publish()


if __name__ == "__main__":
    run_command(main)
