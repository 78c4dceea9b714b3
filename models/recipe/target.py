"""The target: a small `Gemma4ForCausalLM` with every feature of E2B's text model."""

from pathlib import Path

import numpy as np
import torch
import workers
from attention import causal_masks
from dataset import Blocks
from run import Run
from schedule import Budget
from tokenizer import BOS, EOS, PAD, VOCABULARY
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

PATTERN = ["sliding_attention"] * 4 + ["full_attention"]
SHORT, LONG = 512, 2048  # block lengths: the first is trained on up to LONG_FROM of the run
LONG_FROM = 0.87
ROWS = 2048  # tokens of one forward; more fall out of a laptop's cache


def target_config() -> Gemma4TextConfig:
    """The architecture; every matrix width is a multiple of 32."""
    return Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=10,
        layer_types=PATTERN * 2,
        num_kv_shared_layers=5,
        use_double_wide_mlp=True,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        sliding_window=256,
        max_position_embeddings=LONG,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
        final_logit_softcapping=30.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )


def new_target() -> Gemma4ForCausalLM:
    """A target with starting weights that suit sandwich norms and an attention scale of one."""
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(target_config())
    nn.init.normal_(model.model.embed_tokens.weight, std=model.config.hidden_size**-0.5)
    for layer in model.model.layers:
        calm(layer)
        nn.init.constant_(layer.post_per_layer_input_norm.weight, 0.3)
    return model


def calm(layer: nn.Module) -> None:
    """Start a layer with attention logits of about one and small steps on the residual stream."""
    nn.init.constant_(layer.self_attn.q_norm.weight, layer.self_attn.head_dim**-0.5)
    nn.init.constant_(layer.post_attention_layernorm.weight, 0.3)
    nn.init.constant_(layer.post_feedforward_layernorm.weight, 0.3)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """`cap * tanh(logits / cap)` in float32."""
    return cap * torch.tanh(logits.float() / cap)


def next_token_loss(model: Gemma4ForCausalLM, ids: Tensor, labels: Tensor, masks: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the soft-capped logits; ids, labels : int64[B, T]."""
    hidden = model.model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
    logits = softcapped(model.lm_head(hidden), model.config.final_logit_softcapping)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TargetRun(Run):
    """Next-token training on the corpus, the last part of it with long blocks."""

    step_tokens = 8192

    def __init__(self, work: Path, device: torch.device, budget: Budget) -> None:
        model = new_target().to(device)
        model.set_attn_implementation("chunked")
        super().__init__(model, work / "target.pt", budget)
        self.device = device
        stream = np.load(work / "train.npy")
        self.blocks = {length: Blocks(stream, length) for length in (SHORT, LONG)}
        self.masks = {n: causal_masks(n, model.config.sliding_window, device) for n in (SHORT, LONG)}
        self.loss = torch.compile(next_token_loss, dynamic=False)

    def accumulate(self) -> float:
        """Gradients of one step, a cache-sized forward at a time."""
        length = SHORT if self.budget.progress < LONG_FROM else LONG
        parts = self.step_tokens // ROWS
        total = 0.0
        for part in range(workers.rank(), parts, workers.count()):
            ids, labels = self.blocks[length].batch(self.step * parts + part, ROWS // length)
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss(self.model, ids.to(self.device), labels.to(self.device), self.masks[length])
            (loss / parts).backward()
            total += loss.item() / parts
        return total


def trained_target(work: Path) -> Gemma4ForCausalLM:
    """The target with its latest weights, frozen, in float32."""
    model = new_target()
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True, map_location="cpu")["model"])
    return model.requires_grad_(False).eval()
