"""The target: a small `Gemma4ForCausalLM` with every feature of E2B's text model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text.dataset import TokenBlocks, Tokens
from text.tokenizer import BOS, CONTEXT, EOS, PAD, VOCABULARY
from torch import Tensor, nn
from training import workers
from training.run import Run
from training.schedule import Budget
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from pair.checkpoint import earlier, start
from pair.forward import Places, head_gradients, hidden_states, places

PATTERN = ["sliding_attention"] * 4 + ["full_attention"]
SHORT = 1024  # block length up to LONG_FROM of the run, CONTEXT after it
LONG_FROM = 0.9
ROWS = 2048  # tokens of one forward, or a block's length if that is more


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
        max_position_embeddings=CONTEXT,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=32,
        final_logit_softcapping=30.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )


def new_target() -> Gemma4ForCausalLM:
    """An untrained target."""
    return new_model(target_config())


def first_target(work: Path) -> Gemma4ForCausalLM:
    """The weights that a run in `work` starts from."""
    kept = start(work, "target")
    return Gemma4ForCausalLM.from_pretrained(kept, dtype=torch.float32) if kept else new_target()


def new_model(config: Gemma4TextConfig) -> Gemma4ForCausalLM:
    """A model with starting weights that suit sandwich norms and an attention scale of one."""
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=model.config.hidden_size**-0.5)
    for layer in model.model.layers:
        calm(layer)
        nn.init.constant_(layer.post_per_layer_input_norm.weight, 0.3)
    return model


def calm(layer: Any) -> None:
    """Initialise a layer with attention logits of about one and small contributions to the residual stream."""
    nn.init.constant_(layer.self_attn.q_norm.weight, layer.self_attn.head_dim**-0.5)
    nn.init.constant_(layer.post_attention_layernorm.weight, 0.3)
    nn.init.constant_(layer.post_feedforward_layernorm.weight, 0.3)


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """`cap * tanh(logits / cap)` in float32."""
    return cap * torch.tanh(logits.float() / cap)


class NextTokenRun(Run):
    """Next-token training on streams of tokens; the last part uses blocks of the whole context.

    streams : used in turn, one per step
    lengths : of a block, at first and in the last part of the run
    seed : of the blocks' order
    """

    step_tokens = 16384

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        streams: Sequence[Tokens],
        *,
        file: Path,
        device: torch.device,
        budget: Budget,
        lengths: tuple[int, int] = (SHORT, CONTEXT),
        seed: int = 0,
    ) -> None:
        super().__init__(model.to(device), file, budget)
        self.device = device
        self.lengths = lengths
        self.blocks = {length: [TokenBlocks(stream, length, seed) for stream in streams] for length in lengths}
        self.places: dict[int, Places] = {}
        self.forward = torch.compile(hidden_states, dynamic=False)
        self.head = torch.compile(head_gradients, dynamic=False)

    def accumulate(self) -> float:
        """Gradients of one step, in forwards that fit into the cache."""
        length = self.lengths[self.budget.progress >= LONG_FROM]
        if length not in self.places:
            self.places[length] = places(self.model, length)
        rows = max(1, ROWS // length)
        parts = self.step_tokens // (rows * length)
        return sum(self.part(length, rows, parts, part) for part in range(workers.rank(), parts, workers.count()))

    def part(self, length: int, rows: int, parts: int, part: int) -> float:
        """Add the gradients of one forward; returns its share of the mean loss."""
        turn, stream = divmod(self.step, len(self.blocks[length]))
        ids, labels = (x.to(self.device) for x in self.blocks[length][stream].batch(turn * parts + part, rows))
        hidden = self.forward(self.model, ids, self.places[length])
        head = self.model.lm_head.weight
        flat = hidden.detach().flatten(0, 1)
        loss, to_hidden, to_head = self.head(flat, head, labels.flatten(), self.model.config.final_logit_softcapping)
        hidden.backward((to_hidden / parts).view_as(hidden))
        head.grad.add_(to_head, alpha=1 / parts)  # the embedding's gradient exists already: they are one table
        return loss.item() / parts


def target_run(work: Path, device: torch.device, budget: Budget) -> NextTokenRun:
    """The target's training on the corpus."""
    streams = [np.load(work / "train.npy", mmap_mode="r")]
    seen = int(earlier(work, "target")["tokens"])  # continues with another order than before
    file = work / "target.pt"
    return NextTokenRun(first_target(work), streams, file=file, device=device, budget=budget, seed=seen)


def target_after_corpus(work: Path) -> Gemma4ForCausalLM:
    """The target with its latest weights of the corpus's run, frozen, in float32."""
    return frozen(work / "target.pt")


def trained_target(work: Path) -> Gemma4ForCausalLM:
    """The target with its last weights, frozen, in float32."""
    return frozen(work / "unlikelihood.pt")


def frozen(run: Path) -> Gemma4ForCausalLM:
    """The target of a run's saved state."""
    model = new_target()
    model.load_state_dict(torch.load(run, weights_only=True, map_location="cpu")["model"])
    return model.requires_grad_(False).eval()
