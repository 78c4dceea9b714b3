import math
import xml.etree.ElementTree as ET

import pytest

from benchmarks.publish.pages import FORWARDS, PICTURE, REAL_TEXT, all_results, read_interval, read_tables
from benchmarks.publish.picture import draw

SETTINGS = """\
| setting         | prompts |          tokens/s |
| --------------- | ------: | ----------------: |
| auto            |       4 | {0} |
| mtp             |       4 | {0} |
| ngram           |       4 | {0} |
| plain           |       4 | 25.0 [20.0, 30.0] |
| llama.cpp mtp 3 |       4 | 25.0 [20.0, 30.0] |
| llama.cpp ngram |       4 | 25.0 [20.0, 30.0] |
| llama.cpp plain |       4 | 25.0 [20.0, 30.0] |
"""
SMALL = f"""
{FORWARDS}

Words.

| rows | simd ms | ort ms |
| ---: | ------: | -----: |
|    1 |    10.0 |   10.0 |
|    8 |    20.0 |   20.0 |
|  512 |   900.0 |  900.0 |

{REAL_TEXT}

Temperature 0:

{SETTINGS.format("100.0 [80.0, 120.0]")}
Temperature 1:

{SETTINGS.format("50.0 [40.0, 60.0]")}

## Another heading

| setting | tokens/s |
| ------- | -------: |
| auto    |    900.0 |
"""
SVG = "{http://www.w3.org/2000/svg}"


def test_it_is_drawn_from_the_results():
    """`python -m benchmarks.publish.picture` draws it anew."""
    assert PICTURE.read_text("utf-8") == draw(all_results())


def test_lines_bars_and_labels():
    drawn = ET.fromstring(draw(SMALL))
    lines = [path for path in drawn.iter(f"{SVG}path") if "line" in path.attrib["class"]]
    assert [path.attrib["class"] for path in lines] == ["line ort", "line simd"]
    assert all(path.attrib["d"].count("L") == 1 for path in lines)  # 512 rows are beyond it
    ends = [float(text.attrib["y"]) for text in drawn.iter(f"{SVG}text") if text.attrib["class"] in ("ort", "simd")]
    assert abs(ends[0] - ends[1]) >= 15  # the lines end at the same height
    labels = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"4 prompts", "100"} <= {label.partition(",")[0] for label in labels if label}
    assert "900" not in labels


def test_bars_are_as_long_as_their_figures_and_intervals():
    drawn = ET.fromstring(draw(SMALL))
    bars = [(bar.attrib["class"], float(bar.attrib["width"])) for bar in drawn.iter(f"{SVG}rect")]
    assert [kind for kind, _ in bars] == 4 * ["simd", "simd sampled"] + 3 * ["llamacpp", "llamacpp sampled"]
    greedy, sampled = bars[0][1], bars[1][1]
    assert greedy == pytest.approx(2 * sampled, abs=0.2)
    interval = next(path for path in drawn.iter(f"{SVG}path") if path.attrib["class"] == "interval")
    low, _, high = interval.attrib["d"].removeprefix("M").partition(" ")
    assert float(high.partition("H")[2]) - float(low) == pytest.approx(greedy * 0.4, abs=0.2)


def test_tables_and_cells():
    assert [len(table) for table in read_tables(SMALL, REAL_TEXT)] == [7, 7]
    assert read_interval("1.52 [1.31, 1.75]") == (1.52, 1.31, 1.75)
    assert read_interval("1.52") == (1.52, 1.52, 1.52)
    assert all(map(math.isnan, read_interval("-")))
    with pytest.raises(SystemExit, match="has a table below '## Nothing'"):
        read_tables(SMALL, "## Nothing")
