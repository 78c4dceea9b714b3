import xml.etree.ElementTree as ET

import pytest

from benchmarks.picture import FORWARDS, PICTURE, RESULTS, SPEED_UPS, draw

SMALL = f"""
{FORWARDS}

Words.

| rows | simd ms | ort ms |
| ---: | ------: | -----: |
|    1 |    10.0 |   10.0 |
|    8 |    20.0 |   20.0 |
|  512 |   900.0 |  900.0 |

{SPEED_UPS}

| acceptance | auto |
| ---------: | ---: |
|          0 | 1.00 |
|        0.9 | 4.00 |

| acceptance | auto |
| ---------: | ---: |
|          0 | 9.00 |
"""


def test_it_is_drawn_from_the_results():
    """`python -m benchmarks.picture` draws it anew."""
    assert PICTURE.read_text("utf-8") == draw(RESULTS.read_text("utf-8"))


def test_lines_bars_and_labels():
    drawn = ET.fromstring(draw(SMALL))
    name = "{http://www.w3.org/2000/svg}"
    lines = [path for path in drawn.iter(f"{name}path") if "line" in path.attrib["class"]]
    assert [path.attrib["class"] for path in lines] == ["line ort", "line simd"]
    assert all(path.attrib["d"].count("L") == 1 for path in lines)  # 512 rows are beyond it
    bars = [float(bar.attrib["height"]) for bar in drawn.iter(f"{name}rect")]
    assert bars[1] == pytest.approx(4 * bars[0], abs=0.3)
    labels = {text.text: float(text.attrib["y"]) for text in drawn.iter(f"{name}text")}
    assert abs(labels["ondevice"] - labels["ONNX Runtime"]) >= 15  # the lines end at the same height
    assert "4.00" in labels
