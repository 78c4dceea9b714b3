"""The drafter: a `Gemma4AssistantForCausalLM` that reads the frozen target's hidden states and shared KV.

A round starts when the newest token x[t+1] and the KV of positions <= t are known. All of its steps have position
t+1 and see only that KV. Step 1 reads (embedding of x[t+1], target's hidden state h[t]) and predicts
x[t+2]; step j reads (embedding of x[t+j], the state that step j-1 projected back) and predicts x[t+j+1]. All rounds
of a block are trained in parallel: row t of a batch is the round that starts at t.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from text.dataset import TokenBlocks
from text.tokenizer import BOS, EOS, PAD, VOCABULARY
from torch import Tensor
from training import workers
from training.distillation import CENTROID_SHARE, Aim, aim, soft_gradients, soft_loss
from training.precision import PRODUCTS
from training.run import Run
from training.schedule import Budget
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from pair.attention import causal_masks
from pair.checkpoint import earlier, start
from pair.clusters import balanced_clusters
from pair.target import PATTERN, calm, softcapped, trained_target

LONG = 2048  # block length
STEPS = 5  # draft steps unrolled in training
STEP_DISCOUNT = 0.85  # a later step counts less: it is reached less often
Masks = dict[str, Tensor]
SharedKV = dict[str, tuple[Tensor, Tensor]]


def drafter_config(target: Gemma4TextConfig) -> Gemma4AssistantConfig:
    """Four layers without K and V, and a head of 64 clusters of 96 tokens, of which eight are scored."""
    text = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=PATTERN[1:],
        num_kv_shared_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=target.per_layer_config["sliding_attention"].head_dim,
        global_head_dim=target.per_layer_config["full_attention"].head_dim,
        sliding_window=target.sliding_window,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
    )
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=True,
        num_centroids=64,
        centroid_intermediate_top_k=8,
    )


def new_drafter(target: Gemma4ForCausalLM) -> Gemma4AssistantForCausalLM:
    """A drafter whose embedding is the target's projected on its principal axes, with clusters and centroids made from
    it.
    """
    torch.manual_seed(0)
    config = drafter_config(target.config)
    model = Gemma4AssistantForCausalLM(config)
    for layer in model.model.layers:
        calm(layer)
    table = target.model.embed_tokens.weight.detach()
    _, _, axes = torch.linalg.svd(table, full_matrices=False)
    head = model.masked_embedding
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(table @ axes[: config.text_config.hidden_size].T)
        head.token_ordering.copy_(balanced_clusters(table, config.num_centroids))
        members = model.lm_head.weight[head.token_ordering].view(config.num_centroids, -1, model.hidden_size)
        head.centroids.weight.copy_(members.mean(dim=1))
    return model


def first_drafter(work: Path, target: Gemma4ForCausalLM) -> Gemma4AssistantForCausalLM:
    """The weights that a run in `work` starts from."""
    kept = start(work, "drafter")
    return Gemma4AssistantForCausalLM.from_pretrained(kept, dtype=torch.float32) if kept else new_drafter(target)


def round_masks(length: int, window: int, device: torch.device) -> Masks:
    """Additive masks [1, 1, T, T]: round t sees positions <= t, in sliding layers from t - window on (the reference's
    bidirectional window, which is inclusive)."""
    position = torch.arange(length, device=device)
    age = position[:, None] - position[None, :]
    seen = {"full_attention": age >= 0, "sliding_attention": (age >= 0) & (age <= window)}
    return {
        kind: torch.zeros(1, 1, length, length, device=device).masked_fill(~ok, -torch.inf) for kind, ok in seen.items()
    }


@dataclass(frozen=True)
class TargetOutputs:
    """The frozen target's outputs for a block.

    embeddings, hidden : float32[B, T, H], the scaled token embeddings and post-norm states
    logits : float32[B, T, V]; shared_kv : by layer type, K and V [B, 1, T, D]
    """

    embeddings: Tensor
    hidden: Tensor
    logits: Tensor
    shared_kv: SharedKV


@torch.no_grad()
def lesson(target: Gemma4ForCausalLM, ids: Tensor, masks: Masks) -> TargetOutputs:
    """Run the target over ids : int64[B, T]."""
    outputs = target.model(input_ids=ids, attention_mask=masks, use_cache=False, return_shared_kv_states=True)
    logits = softcapped(target.lm_head(outputs.last_hidden_state), target.config.final_logit_softcapping)
    shared = {kind: (key, value) for kind, (key, value) in outputs.shared_kv_states.items()}
    return TargetOutputs(target.model.embed_tokens(ids), outputs.last_hidden_state, logits, shared)


def ahead(rows: Tensor, steps: int) -> Tensor:
    """Replace row t by row t + steps; the last rows repeat and are masked out of the loss. rows : [B, T, ...]"""
    return torch.cat([rows[:, steps:], rows[:, -1:].expand(-1, steps, *rows.shape[2:])], dim=1)


def draft_states(
    drafter: Gemma4AssistantForCausalLM, embeddings: Tensor, states: Tensor, shared_kv: SharedKV, masks: Masks
) -> tuple[Tensor, Tensor]:
    """One draft step of every round: the drafter's normed states [B, T, h] and their projection back [B, T, H]."""
    positions = torch.arange(1, embeddings.shape[1] + 1, device=embeddings.device)[None]
    outputs = drafter.model(
        inputs_embeds=drafter.pre_projection(torch.cat([embeddings, states], dim=-1)),
        position_ids=positions,
        attention_mask=masks,
        shared_kv_states=shared_kv,
        use_cache=False,
    )
    return outputs.last_hidden_state, drafter.post_projection(outputs.last_hidden_state)


def round_step(
    drafter: Gemma4AssistantForCausalLM,
    embeddings: Tensor,
    states: Tensor,
    shared_kv: SharedKV,
    masks: Masks,
    *,
    clusters: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One draft step and its centroid loss: the cross-entropy to the target's probability of each cluster.

    clusters : float32[N, C], for the first N rounds, which enter the loss
    returns their states [N, h], all states projected back [1, T, H], and the loss
    """
    hidden, states = draft_states(drafter, embeddings, states, shared_kv, masks)
    counted = hidden[0, : len(clusters)]
    scored = drafter.masked_embedding.centroids(counted).float().log_softmax(dim=-1)
    return counted, states, -(clusters * scored).sum(dim=-1).mean()


class PairDrafterRun(Run):
    """Distillation from the frozen target, alternately on blocks of the corpus and of the target's own text."""

    step_tokens = 4 * LONG

    def __init__(self, work: Path, device: torch.device, budget: Budget) -> None:
        target = trained_target(work)
        model = first_drafter(work, target).to(device)
        super().__init__(model, work / "drafter.pt", budget)
        self.device = device
        self.target = target.to(device)
        for part in (model, self.target):
            part.set_attn_implementation("chunked")
        seen = int(earlier(work, "drafter")["tokens"])
        self.streams = [TokenBlocks(np.load(work / file), LONG, seed=1 + seen) for file in ("train.npy", "own.npy")]
        self.target_masks = causal_masks(LONG, target.config.sliding_window, device)
        self.round_masks = round_masks(LONG, target.config.sliding_window, device)
        self.lesson = torch.compile(lesson, dynamic=False)
        self.aim = torch.compile(aim, dynamic=False)
        self.round_step = torch.compile(round_step, dynamic=False)
        self.gradients = torch.compile(soft_gradients, dynamic=False)

    def accumulate(self) -> float:
        """Gradients of one step: half of its blocks from each stream."""
        parts = self.step_tokens // LONG
        total = 0.0
        for part in range(workers.rank(), parts, workers.count()):
            index, stream = divmod(self.step * parts + part, len(self.streams))
            ids, _ = self.streams[stream].batch(index, 1)
            with torch.autocast(self.device.type, PRODUCTS, enabled=torch.float32 != PRODUCTS):
                loss = self.unrolled_loss(ids.to(self.device))
            (loss / parts).backward()
            total += loss.item() / parts
        return total

    def unrolled_loss(self, ids: Tensor) -> Tensor:
        """Weighted mean loss over STEPS draft steps of the rounds that lie completely in ids : int64[1, LONG]."""
        taught = self.lesson(self.target, ids, self.target_masks)
        head = self.model.masked_embedding
        aims = Aim(*self.aim(taught.logits[0], head.token_ordering, head.num_centroids))
        states, total, weights = taught.hidden, torch.zeros((), device=self.device), 0.0
        for step in range(1, STEPS + 1):
            aimed = aims.rows(step, LONG - STEPS)
            hidden, states, clusters = self.round_step(
                self.model,
                ahead(taught.embeddings, step),
                states,
                taught.shared_kv,
                self.round_masks,
                clusters=aimed.clusters,
            )
            tokens = soft_loss(self.gradients, hidden, self.model.lm_head.weight, aimed.tokens)
            total = total + STEP_DISCOUNT ** (step - 1) * (tokens + CENTROID_SHARE * clusters)
            weights += STEP_DISCOUNT ** (step - 1)
        return total / weights
