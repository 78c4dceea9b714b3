"""Where checkpoints and drafters are found, and what of the text side goes along."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from ondevice.bundle import Bundle
from ondevice.errors import CheckpointError, HubError
from ondevice_export import export
from ondevice_export.checkpoint import source
from ondevice_export.checkpoint.source import Checkout, default_name, locate, locate_drafter
from ondevice_export.response_templates import GEMMA_4
from ondevice_export.text_files import copy_text_files
from tests.export.conftest import Pair
from tests.text.templates import GRANITE_30, GRANITE_33
from tests.text.tokenizers_made import GRANITE_3, gemma_chat, gemma_like, of_bytes

COMMIT = "0123456789abcdef"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that has `google/tiny` and `google/tiny-assistant`, and nothing else."""
    for name in ("google/tiny", "google/tiny-assistant"):
        _snapshot(tmp_path / name)

    def download(repo_id: str, **_: object) -> str:
        if not (tmp_path / repo_id).is_dir():
            raise errors.LocalEntryNotFoundError("offline")
        return str(tmp_path / repo_id / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path


def _snapshot(repository: Path) -> None:
    """A downloaded repository with a configuration."""
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    (repository / "snapshots" / COMMIT / "config.json").touch()


def test_hub_ids(hub: Path) -> None:
    notes: list[str] = []
    target = locate("google/tiny")
    assert (target.id, target.revision, default_name(target)) == ("google/tiny", COMMIT, "tiny")
    drafter = locate_drafter("auto", target, notes.append)
    assert drafter is not None
    assert drafter.id == "google/tiny-assistant"
    shutil.rmtree(hub / "google/tiny-assistant")
    assert locate_drafter("auto", target, notes.append) is None
    assert len(notes) == 1
    assert "google/tiny-assistant" in notes[0]
    assert locate_drafter("none", target, notes.append) is None


def test_a_variant_that_was_trained_quantised_has_the_plain_model_s_drafter(hub: Path) -> None:
    _snapshot(hub / "google/tiny-qat-mobile")
    notes: list[str] = []
    drafter = locate_drafter("auto", locate("google/tiny-qat-mobile"), notes.append)
    assert drafter is not None
    assert drafter.id == "google/tiny-assistant"
    assert notes == ["no drafter: google/tiny-qat-mobile-assistant was not found"]


@pytest.mark.parametrize("name", ["google/absent", "./absent", "/absent/directory", "a/b/c", "has space"])
def test_nothing_there(hub: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hub id"):
        locate(str(tmp_path), "main")


@pytest.mark.parametrize("place", ["pair/drafter", "pair/target/drafter", "pair/target-assistant"])
def test_drafter_beside_a_directory(tmp_path: Path, place: str) -> None:
    (tmp_path / "pair/target").mkdir(parents=True)
    target = locate(str(tmp_path / "pair/target"))
    assert default_name(target) == "pair"
    notes: list[str] = []
    assert locate_drafter("auto", target, notes.append) is None
    assert len(notes) == 1
    (tmp_path / place).mkdir()
    (tmp_path / place / "config.json").write_text("{}")
    assert locate_drafter("auto", target, notes.append) == Checkout((tmp_path / place).resolve(), Path(place).name)


def test_download_asks_for_text_models_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, **options: asked.update(options) or tmp_path)
    source.locate("google/tiny", "v1")
    assert asked["revision"] == "v1"
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    others = ["pytorch_model.bin", "onnx/config.json", "onnx/model.safetensors", "mlx/model.safetensors.index.json"]
    others += ["consolidated.safetensors"]  # Mistral's, all weights once more

    def matches(name: str, patterns: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in asked[patterns])

    taken = [name for name in [*wanted, *others] if matches(name, "allow_patterns")]
    assert [name for name in taken if not matches(name, "ignore_patterns")] == wanted


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HF_ENDPOINT", "hf-mirror.com", "HF_ENDPOINT must begin with https://"),
        ("HF_TOKEN", "hf_ü", "HF_TOKEN is not an access token"),
        ("HF_TOKEN", "hf_\x7f", "HF_TOKEN is not an access token"),
        ("HTTPS_PROXY", "socks5://127.0.0.1:9", "google/tiny could not be downloaded: Using SOCKS proxy"),
    ],
)
def test_an_environment_without_a_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, words: str
) -> None:
    def download(*arguments: object, **options: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.\nInstall it.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv(name, value)
    with pytest.raises((CheckpointError, HubError), match=words) as caught:
        locate("google/tiny")
    assert "\n" not in str(caught.value)


def test_a_repository_without_a_configuration_may_have_gguf_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda _, **options: tmp_path)
    with pytest.raises(CheckpointError, match=r"has no config\.json: if it has GGUF files, name one with --gguf"):
        locate("google/tiny")


def test_text_side_and_defaults(e2b: Pair, tmp_path: Path) -> None:
    shutil.copytree(e2b.directory / "target", tmp_path / "target")
    (tmp_path / "target/tokenizer.json").write_text("{}")
    (tmp_path / "target/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "target/generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106], "temperature": 1.0}))
    bundle = Bundle.open(export(tmp_path / "target", tmp_path / "bundle"))
    assert bundle.manifest.drafter is None
    assert bundle.manifest.eos_token_ids == (1, 106)
    assert (bundle.manifest.bos_token_id, bundle.manifest.pad_token_id) == (2, 0)
    assert (bundle.path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert set(bundle.manifest.files) >= {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
    assert str(tmp_path) not in (bundle.path / "bundle.json").read_text()


def test_the_response_template_is_the_checkpoint_s_own_or_gemma_s(tmp_path: Path) -> None:
    checkpoint, bundle, notes = tmp_path / "checkpoint", tmp_path / "bundle", list[str]()

    def written(config: dict[str, Any], tokenizer: str) -> Any:
        for directory in (checkpoint, bundle):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
        (checkpoint / "tokenizer.json").write_text(tokenizer)
        copy_text_files(checkpoint, bundle, notes.append)
        path = bundle / "response_template.json"
        return json.loads(path.read_text()) if path.exists() else None

    gemma, other, granite = (each._backend.to_str() for each in (gemma_chat(), gemma_like(), of_bytes(GRANITE_3)))
    own = {"start_anchor": "<|turn>", "fields": {"content": {}}}
    assert written({}, gemma) == GEMMA_4
    assert written({}, other) is None
    assert written({"response_template": own}, gemma) == own
    assert written({"response_template": own}, other) == own
    assert notes == []
    assert written({"chat_template": GRANITE_33}, granite)["fields"]["reasoning_content"]["open"] == "<think>"
    assert "reasoning_content" not in written({"chat_template": GRANITE_30}, granite)["fields"]
    assert notes == []
    assert written({"response_template": {**own, "version": 2}}, gemma) is None
    assert "the response template is unknown" in notes[0]


def test_manifest_describes_the_model(pair: Pair) -> None:
    manifest = Bundle.open(pair.bundle).manifest
    text = pair.target.config.get_text_config()
    kinds = [f"{layer.kind}_attention" for layer in manifest.target.attention]
    assert kinds == text.layer_types
    for index, attention in enumerate(manifest.target.attention):
        own = text.per_layer_config[index]
        assert (attention.kv_heads, attention.head_dim) == (own.num_key_value_heads, own.head_dim)
    assert len(manifest.target.kv_layers()) == text.num_hidden_layers - text.num_kv_shared_layers
    assert manifest.quantization.weights == "none"
    assert manifest.sources["target"].id == "target"
