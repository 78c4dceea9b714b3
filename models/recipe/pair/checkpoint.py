"""The pair on disk in the hub's layout: bfloat16 safetensors and the configuration."""

import json
import shutil
from pathlib import Path

import torch
from text.tokenizer import BOS, EOS, PAD, TOOL_RESPONSE_START, TURN_END
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, GenerationConfig, PreTrainedModel

DRAFT_TOKENS = 6
START = "start"  # the directory of a pair whose training is continued


def save_target(model: Gemma4ForCausalLM, directory: Path) -> None:
    """Write the target with Gemma's sampling defaults."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=0.95,
        top_k=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=[EOS, TURN_END, TOOL_RESPONSE_START],
    )
    save(model, directory)


def save_drafter(model: Gemma4AssistantForCausalLM, directory: Path) -> None:
    """Write the drafter with the draft length it was trained for."""
    model.generation_config = GenerationConfig(
        is_assistant=True,
        num_assistant_tokens=DRAFT_TOKENS,
        num_assistant_tokens_schedule="constant",
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=[EOS, TURN_END, TOOL_RESPONSE_START],
    )
    save(model, directory)


def save(model: PreTrainedModel, directory: Path) -> None:
    """Write weights and configuration; the width of full-attention heads as `global_head_dim`, as on the hub."""
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    (text["global_head_dim"],) = {layer["head_dim"] for layer in text.pop("per_layer_config").values()}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def keep_start(pair: Path, work: Path) -> None:
    """Copy a pair to `work`, from which its runs start, with its tokenizer. A second call changes nothing."""
    kept = work / START
    if kept.exists():
        return
    partial = work / f"{START}.tmp"
    for name in ("target", "drafter"):
        shutil.copytree(pair / name, partial / name, dirs_exist_ok=True)
    shutil.copyfile(pair / "figures.json", partial / "figures.json")
    shutil.copyfile(pair / "target" / "tokenizer.json", work / "tokenizer.json")
    partial.rename(kept)


def start(work: Path, name: str) -> Path | None:
    """A part of the pair that runs start from; None if they start with new weights."""
    kept = work / START / name
    return kept if kept.exists() else None


def earlier(work: Path, stage: str) -> dict[str, float]:
    """`tokens` and `core_hours` of a stage before it was continued in `work`."""
    figures = start(work, "figures.json")
    spent = json.loads(figures.read_text())["training"].get(stage, {}) if figures else {}
    return {key: spent.get(key, 0) for key in ("tokens", "core_hours")}
