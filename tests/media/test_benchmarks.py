"""The benchmarks of towers run on tiny bundles and print their tables; what times they find is no test's business."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bundles import gemma4, shape
from benchmarks.bundles.gemma4 import E2B_VISION as VISION
from benchmarks.bundles.shape import target_model, with_towers
from benchmarks.memory import footprint
from benchmarks.peers.llama_programs import LlamaMtmd
from benchmarks.quality import media as media_quality
from benchmarks.speed import media
from ondevice.bundle import Bundle
from ondevice.bundle_format.audio import check_audio
from ondevice.bundle_format.decoder import Attention
from ondevice.bundle_format.tensor_table import target_shapes
from ondevice.bundle_format.vision import check_vision
from ondevice_export.checkpoint.towers import PREFIX


def test_time_and_memory(seeing: dict[tuple[str, str], Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = seeing["seeing", "int8"]
    media.main([str(bundle.path), "--tokens", "70", "--seconds", "2", "--rounds", "1", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert "GOPS of 8-bit dot products" in lines[0]
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")] == [
        "soft tokens", "----------:", "70", "prompt with 70 soft tokens", "-" * 37, "text alone", "a new picture",
        "a picture of another conversation", "a picture earlier in the conversation",
        "a picture of 70 soft tokens, and another generation", "-" * 51, "each alone", "at the same time",
        "seconds of sound", "---------------:", "2",
    ]  # fmt: skip


def test_towers_without_their_language_model(
    seeing: dict[tuple[str, str], Bundle], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The last layers of a published model are enough for a bundle with its whole towers."""
    bundle = seeing["seeing-31b", "int8"]
    media.main([str(bundle.path), "--tokens", "70", "--rounds", "1", "--threads", "1", "--towers-only"])
    lines = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines == ["soft tokens", "----------:", "70"]
    for size in ("26B-A4B", "31B"):
        (tmp_path / size).mkdir()
        config = shape.target_model(size, tmp_path / size, layers=2).config
        assert [own.kind for own in config.attention] == ["sliding", "full"]


def test_the_last_layers_of_lfm2_are_those_of_its_end(tmp_path: Path) -> None:
    """None of the last layers is dense, as the first two of 8B-A1B are."""
    for size, attends, experts in (("LFM2-1.2B", [False, True, False], 0), ("LFM2-8B-A1B", [True, False, False], 3)):
        (tmp_path / size).mkdir()
        layers = shape.target_model(size, tmp_path / size, layers=3).config.layers
        assert [isinstance(layer.mixer, Attention) for layer in layers] == attends
        assert sum(layer.feed_forward.experts is not None for layer in layers) == experts


def test_all_layers_of_a_mixture_of_qwen_have_a_shared_expert(tmp_path: Path) -> None:
    """35 billion weights, of which a token uses 3, without the token embedding."""
    target = shape.target_model("Qwen3.5-35B-A3B", tmp_path).config
    assert [isinstance(layer.mixer, Attention) for layer in target.layers] == [False, False, False, True] * 10
    assert all(layer.feed_forward.shared for layer in target.layers)
    sizes = {name: math.prod(shape) for name, shape in target_shapes(target).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert round(sum(sizes.values()) / 1e9) == 35
    assert 2.9 < (sum(sizes.values()) - experts * (1 - 8 / 256) - sizes["embed_tokens.weight"]) / 1e9 < 3.1


@pytest.mark.parametrize("tokens", [70, 140, 280, 560, 1120])
def test_pictures_fill_their_tokens(tokens: int) -> None:
    pixels = media.picture(VISION, tokens)
    assert 0.95 * tokens <= pixels.tokens <= tokens
    assert pixels.values.shape[0] % VISION.side == pixels.values.shape[1] % VISION.side == 0


def test_multiplications_of_the_published_tower() -> None:
    layers, others = media.multiplications(VISION, 1536, 280)
    assert layers == 2520 * 16 * (4 * 768 * 768 + 3 * 768 * 3072)
    assert others == 16 * 2 * 2520 * 2520 * 768 + 2520 * 768 * 768 + 280 * 768 * 1536


@pytest.mark.parametrize("size", gemma4.TARGETS)
def test_the_sizes_of_published_towers(size: str) -> None:
    """Numbers of weights, of which those of linear layers have one byte and a scale per row as int8."""
    target, *_ = gemma4.read_shapes(size)
    width, vision = target.hidden_size, gemma4.VISION[size]
    check_vision(vision, target)
    if size == "12B":
        side, hidden = 48 * 48 * 3, 3840
        linears, rows, others = 0, 0, side * hidden + 2 * 1120 * hidden + hidden * width + 2 * side + 5 * hidden
    else:
        layers, hidden, wide, head = (16, 768, 3072, 64) if size in ("E2B", "E4B") else (27, 1152, 4304, 72)
        linears, rows = layers * (4 * hidden**2 + 3 * hidden * wide), layers * (5 * hidden + 2 * wide)
        others = layers * (4 * hidden + 2 * head) + 768 * hidden + 2 * 10240 * hidden + hidden * width
        others += 2 * hidden if layers == 27 else 0
    assert footprint.tower_bytes(size, "none")["vision.onnx"] == 4 * (linears + others)
    assert footprint.tower_bytes(size, "int4")["vision.onnx"] == linears + 4 * (rows + others)
    assert ("audio.onnx" in footprint.tower_bytes(size, "none")) == (size in ("E2B", "E4B", "12B"))
    if size in gemma4.AUDIO:
        check_audio(gemma4.AUDIO[size], target)


def test_the_table_of_towers() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in footprint.towers_report().splitlines()[2:]]
    assert [row[0] for row in rows] == list(gemma4.TARGETS)
    assert [row[3:] == ["none", "none"] for row in rows] == [False, False, False, True, True]
    assert all(0 < int(row[2]) <= int(row[1]) for row in rows)


def test_quality(seeing: dict[tuple[str, str], Bundle]) -> None:
    exact, found = seeing["seeing", "none"].path / "vision.onnx", seeing["seeing", "int8"]
    same = media_quality.compared(found, found.path / "vision.onnx", 70, 1, 1)["int8"]
    np.testing.assert_allclose(same.cosines, 1, atol=1e-6)
    assert all(same.same)
    assert not any(same.divergences)
    other = media_quality.compared(found, exact, 70, 1, 1)
    assert list(other) == ["int8", "other pixels"]
    for each in other.values():
        assert 0.98 < min(each.cosines) < 1
        assert 0 < max(each.divergences) < 0.1


def test_the_peak_of_float32() -> None:
    assert media.float_peak(1, 1) > 0


def test_the_random_tower_has_no_equal_matrices(tmp_path: Path) -> None:
    tower = with_towers(target_model("E2B", tmp_path)).checkpoint
    names = [f"{PREFIX}vision_tower.encoder.layers.{layer}.mlp.up_proj.linear.weight" for layer in range(16)]
    firsts = [tower.rows(name, 0, 1) for name in names]
    assert not any(np.array_equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])
    np.testing.assert_array_equal(tower.rows(names[0], 0, 9)[7:], tower.rows(names[0], 7, 9))
    picked = tower.picked_rows(names[0], np.array([8, 2]))
    np.testing.assert_array_equal(picked, tower.rows(names[0], 0, 9)[[8, 2]])


@pytest.mark.skipif(os.name != "posix", reason="a shell script takes llama.cpp's place")
def test_the_time_of_llama_cpp_s_tower(tmp_path: Path) -> None:
    program = tmp_path / "llama-mtmd-cli"
    program.write_text('#!/bin/sh\necho "0.1 I mtmd batch encoding done in 12 ms" >&2\n', "utf-8")
    program.chmod(0o755)
    other = LlamaMtmd(program, tmp_path / "text.gguf", tmp_path / "tower.gguf", threads=2)
    assert other.seconds(tmp_path / "picture.png") == 0.012
    program.write_text("#!/bin/sh\nexit 3\n", "utf-8")
    with pytest.raises(SystemExit, match="failed with exit code 3: it gives no reason"):
        other.seconds(tmp_path / "picture.png")
    program.write_text("#!/bin/sh\n", "utf-8")
    with pytest.raises(SystemExit, match="encoded no picture"):
        other.seconds(tmp_path / "picture.png")
