"""Videos: which frames are taken, their times in the prompt, and files that are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

import ondevice
from ondevice import Image, Model, PromptError, Video
from ondevice.cli.main import main
from ondevice.media.images import Pixels
from ondevice.media.videos import Frames, clock, evenly
from ondevice.server.apis.openai import read_chat_completion
from ondevice.server.requests import RequestError, RequestFields
from ondevice.text.messages import ChatOptions
from tests.media.pictures_made import noise, png
from tests.media.sounds_made import tone
from tests.media.test_limits import sound_file

TEXT = {"type": "text", "text": "the fox"}
NO_OPTIONS = ChatOptions()
pytestmark = pytest.mark.needs("onnxruntime")


def clip(count: int, rate: int = 10, turned: int = 0) -> bytes:
    """An MP4 file of `count` frames that differ, to be shown turned counterclockwise by so many degrees."""
    content = BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.set_display_rotation(turned)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(noise(48, 64, seed=number), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return content.getvalue()


def cut(content: bytes, skipped: int) -> bytes:
    """The file without its first frames, as trimmed without encoding it again: an edit list discards their packets."""
    made = BytesIO()
    with av.open(BytesIO(content), "r") as container, av.open(made, "w", format="mp4") as out:
        stream = container.streams.video[0]
        copied = out.add_stream_from_template(stream)
        packets = [packet for packet in container.demux(stream) if packet.size]
        first = packets[skipped].pts
        assert first is not None
        for packet in packets:
            assert packet.pts is not None
            assert packet.dts is not None
            packet.pts, packet.dts, packet.stream = packet.pts - first, packet.dts - first, copied
            out.mux(packet)
    return made.getvalue()


def frames_of(content: bytes) -> list[NDArray[np.uint8]]:
    with av.open(BytesIO(content), "r") as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(video=0)]


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, TEXT]}]


def times(model: Model, video: Video) -> list[str]:
    """The times that the prompt has before frames."""
    assert model.tokenizer is not None
    text = model.tokenizer.decode(model.encode(asked(video)), keep_special=True)
    found = re.findall(r"( ?\d\d:\d\d )<\|image>(?:<\|image\|>)+<image\|>", text)
    assert text.count("<|image>") == len(found)
    return found


def test_frames_of_a_list(chat_model: Model) -> None:
    """Soft tokens are those of the pictures at 70 tokens; times follow from the frames per second."""
    first, second = png(50, 50), png(30, 90, seed=1)
    ids, _ = chat_model._encode(asked(Video([first, Image(second, 560)], fps=0.5)), chat=NO_OPTIONS, image_tokens=280)
    pictures, _ = chat_model._encode(asked(Image(first), Image(second)), chat=NO_OPTIONS, image_tokens=70)
    assert [token for token in ids if token < 0] == [token for token in pictures if token < 0]
    assert times(chat_model, Video([first, second], fps=0.5)) == ["00:00 ", " 00:02 "]
    assert len(chat_model.encode(asked(Video([first, second], fps=0.5)))) == len(ids)


def of_transformers(total: int, fps: float, tokens: int) -> str:
    """The text that transformers' processor writes for a video of so many frames, with pictures' tokens."""
    from transformers import Gemma4Processor
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn

    metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=list(range(total)))
    if total > 32:  # the processor's own number of frames; it refuses videos of fewer
        metadata.frames_indices = default_sample_indices_fn(metadata, num_frames=32).tolist()
    names = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", video_token="<|image|>")
    inputs = {"num_soft_tokens_per_video": [tokens], "video_metadata": [metadata]}
    return str(Gemma4Processor.replace_video_token(names, inputs, 0))


@pytest.mark.needs("oracle")
@pytest.mark.parametrize(("total", "fps"), [(1, 24), (5, 2), (31, 0.4), (32, 0.1), (33, 29.97), (70, 1), (250, 0.05)])
def test_the_prompt_of_transformers(chat_model: Model, total: int, fps: float) -> None:
    """Which frames, their times, and their numbers of soft tokens; the same tokens as of the text in one piece."""
    assert chat_model.tokenizer is not None
    video = Video([noise(50, 50)] * total, fps=fps)
    ids = chat_model.encode(asked({"type": "text", "text": "a b"}, video))
    text = chat_model.tokenizer.decode(ids, keep_special=True)
    tokens = text.count("<|image|>") // min(total, 32)
    assert tokens == 64
    before, after = text.split("00:00", 1)
    assert before.endswith("a b")
    assert f"00:00{after}".startswith(of_transformers(total, fps, tokens) + "the fox")
    assert chat_model.tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("size", [(48, 64), (96, 120), (30, 90), (84, 108)])
def test_the_pixels_of_transformers(chat_model: Model, size: tuple[int, int]) -> None:
    """transformers resizes frames by torchvision, which calls this function of torch, pictures by Pillow, as we do. The
    two round differently: by 2 of 255 at most, and in 3 % of the values at most.
    """
    import torch

    vision = chat_model.manifest.vision
    assert vision is not None
    frames = np.stack([noise(*size, seed=seed) for seed in range(4)])
    video = Frames(Video([*frames]), vision, "it")
    found = np.stack([video._pictures[index].piece(0).values for index in range(4)])
    channels_first = torch.tensor(frames).permute(0, 3, 1, 2).contiguous()
    shape = found.shape[1:3]
    resized = torch.nn.functional.interpolate(
        channels_first, shape, mode="bicubic", align_corners=False, antialias=True
    )
    differences = np.abs(found.astype(int) - resized.permute(0, 2, 3, 1).numpy())
    if shape == size:
        assert not differences.any()
    assert differences.max() <= 2
    assert (differences > 0).mean() < 0.03


def test_at_most_32_frames() -> None:
    assert evenly(3) == [0, 1, 2]
    assert evenly(32) == list(range(32))
    assert evenly(100) == [index * 100 // 32 for index in range(32)]
    assert evenly(0) == []
    assert [clock(time) for time in (0, 59.9, 61, 6000)] == ["00:00", "00:59", "01:01", "100:00"]


def test_a_file(chat_model: Model, tmp_path: Path) -> None:
    content = clip(25)
    frames, path = frames_of(content), tmp_path / "clip.mp4"
    path.write_bytes(content)
    assert len(frames) == 25
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "logprobs": True}
    replies = [
        chat_model.generate(asked(part), **options)
        for part in (
            Video(frames, fps=10),
            Video(content),
            Video(path),
            {"type": "video", "video": str(path)},
            {"type": "video", "video": frames, "fps": 10},
        )
    ]
    assert {reply.token_ids for reply in replies} == {replies[0].token_ids}
    assert {reply.logprobs for reply in replies} == {replies[0].logprobs}
    assert times(chat_model, Video(path)) == ["00:00 "] + [" 00:00 "] * 9 + [" 00:01 "] * 10 + [" 00:02 "] * 5


def test_a_long_file_is_sampled(chat_model: Model) -> None:
    content = clip(70, rate=1)
    assert [time.strip() for time in times(chat_model, Video(content))] == [clock(index) for index in evenly(70)]


def test_a_conversation_about_a_video_reads_it_once(chat_model: Model) -> None:
    frames = [png(50, 50, seed=number) for number in range(3)]
    for _ in range(2):
        reply = chat_model.generate(asked(Video(frames)), max_new_tokens=2)
    assert reply.stats.cached_tokens > 150


def test_data_that_an_earlier_prompt_had_are_not_decoded_again(
    chat_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is read again, since its file may have changed, as is a list with an array of the caller's."""
    content, frames = clip(6), [png(50, 50, seed=number) for number in range(40, 44)]
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    decoded: list[int] = []
    piece = Frames.piece

    def counted(frames: Frames, index: int) -> Pixels | None:
        decoded.append(index)
        return piece(frames, index)

    monkeypatch.setattr(Frames, "piece", counted)
    for video, again in (
        (Video(content), 0),
        (Video(frames), 0),
        (Video(frames[:3]), 0),
        (Video(path), 6),
        (Video([*frames, noise(48, 64, seed=3)]), 5),
    ):
        first = chat_model._encode(asked(video), NO_OPTIONS, None)[0]
        assert decoded
        decoded.clear()
        assert chat_model._encode(asked(video), NO_OPTIONS, None)[0] == first
        assert len(decoded) == again
        decoded.clear()


@pytest.mark.parametrize("kind", ["file", "list"])
def test_a_video_that_is_decoded_again_is_the_same(chat_bundle: Path, kind: str) -> None:
    """In another conversation, where its rows are not kept."""
    video = Video(clip(5) if kind == "file" else [png(50, 50, seed=number) for number in range(4)])
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0, "logprobs": True}
    with ondevice.load(chat_bundle, media_cache_bytes=0, threads=1) as model:
        model.generate(asked(video), **options)
        again = model.generate(asked(TEXT, video), **options)
        model.forget()
        assert model.generate(asked(TEXT, video), **options).logprobs == again.logprobs


def test_a_file_that_was_cut(chat_model: Model) -> None:
    """The chosen frames are of those that are shown, and counted."""
    content = cut(clip(40), 8)
    with av.open(BytesIO(content), "r") as container:
        assert any(packet.is_discard for packet in container.demux(video=0))
    frames = frames_of(content)
    assert len(frames) == 32
    ids, expected = (
        chat_model._encode(asked(video), NO_OPTIONS, None)[0] for video in (Video(content), Video(frames, fps=10))
    )
    assert ids == expected
    assert len(chat_model.encode(asked(Video(content)))) == len(ids)


SESSION = (
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)
"""A description of a session, for which FFmpeg opens a socket and waits for ten seconds."""


def test_no_file_opens_a_socket(chat_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by what FFmpeg says: it refuses the protocol."""
    (tmp_path / "session.sdp").write_bytes(SESSION)
    refused = []
    opened = av.open

    def watched(*arguments: Any, **options: Any) -> Any:
        refused.append(options["container_options"]["protocol_whitelist"])
        return opened(*arguments, **options)

    monkeypatch.setattr(av, "open", watched)
    for source in (SESSION, tmp_path / "session.sdp"):
        with pytest.raises(PromptError, match="no video that PyAV reads"):
            chat_model.encode(asked(Video(source)))
    assert refused == ["none", "file"]


@pytest.mark.parametrize(
    ("video", "complaint"),
    [
        (Video([]), "video 1 is []: pass a path"),
        (Video(7), "video 1 is 7: pass a path"),
        (Video([b"x"]), "frame 1 of video 1 is damaged"),
        (Video([png()], fps=0), "video 1 has 0 frames per second"),
        (Video([png()] * 2, fps=1e-320), "frames per second: use a positive number, from 1e-06 to 1e+06"),
        (Video([png()] * 2, fps=10**400), "frames per second: use a positive number"),
        (Video(b"never a video"), "video 1 is damaged, or no video that PyAV reads"),
        (Video(clip(2).replace(b"mp4v", b"xyzw").replace(b"esds", b"free")), "it has an encoding without a decoder"),
        (Video(SESSION), "is damaged, or no video"),
        (Video(sound_file(tone(1.0))), "it has no pictures"),
        (Video("gone.mp4"), "video 1 cannot be read: gone.mp4: no such file"),
        (Video("http://127.0.0.1:9/a.mp4"), "no such file"),
        ({"type": "video"}, "without a field 'video'"),
    ],
)
def test_videos_that_are_refused(chat_model: Model, video: Any, complaint: str) -> None:
    with pytest.raises(PromptError) as raised:
        chat_model.encode(asked(video))
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_too_large(chat_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    content = clip(2)
    monkeypatch.setattr("ondevice.media.videos.MAX_BYTES", len(content) - 1)
    with pytest.raises(PromptError, match="video 1 has more than"):
        chat_model.encode(asked(Video(content)))


def test_clients_cannot_name_files() -> None:
    fields = RequestFields({"messages": asked({"type": "video", "video": "clip.mp4"})})
    with pytest.raises(RequestError, match="send some frames of a video"):
        read_chat_completion(fields)


def test_generate(chat_bundle: Path, chat_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip(3))
    words = ["the fox", "--video", str(path), "-n", "4", "--temperature", "0", "--threads", "1", "--json"]
    assert main(["generate", str(chat_bundle), *words]) == 0
    reply = json.loads(capsys.readouterr().out)
    expected = chat_model.generate(asked(Video(path)), max_new_tokens=4, temperature=0.0)
    assert tuple(reply["token_ids"]) == expected.token_ids
    assert reply["stats"]["prompt_tokens"] == expected.stats.prompt_tokens > 180


def test_without_pyav(chat_bundle: Path) -> None:
    code = f"""
import sys, ondevice
sys.modules["av"] = None
with ondevice.load({str(chat_bundle)!r}, engine="simd", threads=1) as model:
    try:
        model.encode([{{"role": "user", "content": [ondevice.Video(b"x")]}}])
    except ondevice.MissingDependencyError as error:
        print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "a video file needs av: pip install 'ondevice-runtime[video]'"


def test_a_turned_video_is_shown_upright(chat_model: Model) -> None:
    """A rotation in the file's header is applied to its frames, as to a camera's pictures."""
    content = clip(2, turned=90)
    frames = [np.rot90(frame) for frame in frames_of(content)]
    assert frames[0].shape == (64, 48, 3)
    ids, expected = (
        chat_model._encode(asked(video), NO_OPTIONS, None)[0] for video in (Video(content), Video(frames, fps=10))
    )
    assert ids == expected


def test_the_header_of_a_file_is_read_without_decoding(chat_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    content, vision = clip(70), chat_model.manifest.vision
    assert vision is not None
    expected = chat_model._encode(asked(Video(content)), NO_OPTIONS, None)[0]
    monkeypatch.setattr(Frames, "_decoded", lambda self, stream: pytest.fail("decoded"))
    video = Frames(Video(content), vision, "it")
    assert (len(video.counts), video.size, video.file_bytes) == (32, 32 * 48 * 64, None)
    assert len(chat_model.encode(asked(Video(content)))) == len(expected)


def test_frames_of_a_file_that_are_too_large(chat_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the header, and if it is wrong by the decoder itself, before it has memory for a frame."""
    content, vision = clip(3), chat_model.manifest.vision
    assert vision is not None
    monkeypatch.setattr("ondevice.media.images.MAX_PIXELS", 48 * 64 - 1)
    with pytest.raises(PromptError, match="it has 64 x 48 pixels"):
        Frames(Video(content), vision, "it")
    monkeypatch.undo()
    monkeypatch.setattr("ondevice.media.videos.MAX_PIXELS", 48 * 64 - 1)
    with pytest.raises(PromptError, match="it is damaged, or no video"):
        Frames(Video(content), vision, "it").piece(0)


def test_a_file_with_fewer_frames_than_packets(chat_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames that are there are seen."""
    content, decoded = clip(5), Frames._decoded
    whole = chat_model._encode(asked(Video(content)), NO_OPTIONS, None)[0]
    monkeypatch.setattr(Frames, "_decoded", lambda self, stream: list(decoded(self, stream))[:3])
    chat_model.forget()
    fewer = chat_model._encode(asked(Video(content)), NO_OPTIONS, None)[0]
    assert sum(token < 0 for token in fewer) * 5 == sum(token < 0 for token in whole) * 3
