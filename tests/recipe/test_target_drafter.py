"""A drafter for any decoder with full attention: its rounds against transformers, its measure, a run that is killed."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import train_drafter
from compare_drafters import compared, error, influence
from compare_head_sizes import figures, open_drafter, row
from drafters import lessons, rounds
from drafters.frozen_target import FrozenTarget
from drafters.lessons import Lessons, Shards
from drafters.replies import Asked, held_out, write_held_out
from drafters.replies_on_device import Written, with_states
from drafters.rounds import accepted_runs, make_blocks, posterior_noise, rounds_of
from drafters.target_drafter import (
    TargetDrafter,
    drafter_config,
    save_drafter,
    start_from_drafter,
    start_from_target,
)
from safetensors.torch import load_file
from text.prompts import Prompt
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from ondevice.bundle import Bundle
from ondevice.engines.ort import OrtEngine
from ondevice.engines.protocol import Rows, TokenTree
from ondevice_export import export
from tests.export.gguf.files_made import state_of, write_gguf
from tests.fixtures import tiny_models
from tests.fixtures.tiny_families import save_family
from tests.fixtures.tiny_models import VOCAB

CPU = torch.device("cpu")
FAMILIES = pytest.mark.parametrize("family", ["smollm2", "gemma3"])  # the last layer of Gemma 3 here is a sliding one


@pytest.fixture
def family() -> str:
    """The target's; some tests take others too."""
    return "smollm2"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> Path:
    """A tiny target, and a directory with lessons of random replies."""
    if family in tiny_models.FAMILIES:
        tiny_models.save_target(tmp_path / "target", family)
    else:
        save_family(tmp_path / "target", family)
    monkeypatch.setattr(lessons, "SHARD", 4)
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        found: list[int] = random.integers(3, VOCAB, count).tolist()
        return found

    rows = [
        Written(Asked(number, float(number % 2), Prompt("chat", "")), 5 + number, ids(25 + number))
        for number in (*range(20, 42), 64, 96)
    ]
    (tmp_path / "work").mkdir()
    shards = Shards(tmp_path / "work")
    for lesson in with_states(FrozenTarget.load(tmp_path / "target", "tiny", CPU), rows):
        shards.add(lesson)
    return tmp_path / "work"


def made(work: Path) -> tuple[FrozenTarget, TargetDrafter, Lessons]:
    target = FrozenTarget.load(work.parent / "target", "tiny", CPU)
    known = Lessons(work, CPU)
    torch.manual_seed(1)
    drafter = TargetDrafter(
        drafter_config(target, width=target.form.hidden_size, layers=2, mlp=48), target.rotation()
    ).eval()
    start_from_target(drafter, target, [known[index] for index in range(6)])
    return target, drafter, known


def test_a_writer_that_was_killed_goes_on_behind_its_files(work: Path) -> None:
    known = Lessons(work, CPU)
    killed = Shards(work)
    assert (killed.files, killed.tokens, len(killed.numbers)) == (6, 24 * 20, 24)
    killed.add(replace(known[0], number=7))
    assert killed.tokens == 25 * 20
    assert killed.numbers >= {7, 20, 96}
    again = Shards(work)
    assert 7 not in again.numbers
    again.add(replace(known[1], number=8))
    again.finish()
    again.finish()  # nothing is left
    assert [fact[0] for fact in Lessons(work, CPU).facts][-2:] == [96, 8]
    assert Shards(work, rank=1).files == 0


@FAMILIES
def test_lessons_hold_what_the_target_computes(work: Path) -> None:
    target, _, known = made(work)
    assert sorted(known[index].number for index in known.split()[1]) == [32, 64, 96]
    lesson = known[3]
    with torch.no_grad():
        wanted = target.model(lesson.tokens[None].long(), output_hidden_states=True, use_cache=True)
    np.testing.assert_allclose(lesson.hidden, wanted.hidden_states[-1][0].numpy(), atol=2e-3, rtol=2e-3)
    values = wanted.past_key_values.layers[target.source].values[0].transpose(0, 1).flatten(1)
    np.testing.assert_allclose(lesson.cache[1], values.numpy(), atol=2e-3, rtol=2e-3)


@FAMILIES
def test_a_step_is_that_of_transformers_on_the_saved_checkpoint(work: Path, tmp_path: Path) -> None:
    target, drafter, known = made(work)
    head_tokens = torch.arange(5, VOCAB, 3)
    save_drafter(drafter, target, head_tokens, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors.pop("masked_embedding.head_tokens").long(), head_tokens)
    reference = Gemma4AssistantForCausalLM(Gemma4AssistantConfig.from_pretrained(tmp_path / "out")).eval()
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) == {"model.embed_tokens.weight", "lm_head.weight"}
    with torch.no_grad():
        reference.lm_head.weight.copy_(target.projection.float() @ reference.post_projection.weight)

    lesson = known[2]
    chosen = torch.from_numpy(rounds_of([lesson], 3))
    block = make_blocks([[lesson]], target, chosen[None], torch.float32, len(lesson.tokens))
    embedded = target.embed(block.tokens_after(1))
    with torch.no_grad():
        state = drafter(embedded, block.hidden_after(0), block.cache, block.mask(torch.float32), block.positions)
        for place, t in enumerate(chosen.tolist()):
            seen = tuple(x[:, :, : t + 1] for x in block.cache)
            found = reference(
                inputs_embeds=torch.cat([embedded[:, place], block.hidden[:, t]], dim=-1)[None],
                position_ids=torch.tensor([[t + 1]]),
                shared_kv_states={"full_attention": seen, "sliding_attention": seen},
            )
            logits = state[0, place] @ target.projection[head_tokens].float().T
            torch.testing.assert_close(
                found.logits[0, 0, head_tokens], logits, atol=3e-2, rtol=3e-2
            )  # saved in bfloat16
            torch.testing.assert_close(found.last_hidden_state[0, 0], state[0, place], atol=3e-2, rtol=3e-2)


TARGETS = [
    *("e2b", "12b", "26b", "31b"),
    *("llama3", "smollm3", "mistral-full", "ministral3", "gemma", "gemma2", "gemma3", "qwen2", "qwen3", "phi4-mini"),
    *("granite", "granite4", "granite4-nope", "granite-swash", "hyperclova-x", "exaone4", "exaone4-full", "seed-oss"),
    *("olmo2", "olmo3"),
    *("glm", "glm4", "glm4-without-biases", "ernie4.5", "helium", "lfm2"),
    *("qwen3-moe", "qwen2-moe", "olmoe", "mixtral", "gpt-oss", "granite-moe", "granite-swash-moe", "lfm2-moe"),
]


@pytest.mark.parametrize("family", TARGETS)
def test_the_engine_drafts_what_is_trained(family: str, work: Path, tmp_path: Path) -> None:
    """A step of a drafter on lessons of PyTorch is that of its bundle, whose attention sees as much as its input."""
    target = FrozenTarget.read(tmp_path / "target", CPU)
    known, size = Lessons(work, CPU), target.form.hidden_size
    layers = 2 if family in tiny_models.FAMILIES else 1  # the layer before has heads of another size
    drafter = TargetDrafter(drafter_config(target, width=size, layers=layers, mlp=48), target.rotation()).eval()
    start_from_target(drafter, target, [known[index] for index in range(6)])
    with torch.no_grad():
        for layer in drafter.model.layers:
            layer.self_attn.q_norm.weight.mul_(3)
            layer.post_attention_layernorm.weight.fill_(1)
    save_drafter(drafter, target, torch.arange(5, VOCAB, 3), tmp_path / "drafter")
    bundle = export(tmp_path / "target", tmp_path / "bundle", quantize="none", drafter=str(tmp_path / "drafter"))
    lesson = known[23]
    places = rounds_of([lesson], 1)
    block = make_blocks([[lesson]], target, torch.from_numpy(places)[None], torch.float32, len(lesson.tokens))
    embedded, states = target.embed(block.tokens_after(1)), block.hidden_after(0)
    with torch.no_grad():
        wanted = drafter(embedded, states, block.cache, block.mask(torch.float32), block.positions)[0].numpy()
        # without the keys and values the step would be another
        blind = drafter(
            embedded, states, [0 * each for each in block.cache], block.mask(torch.float32), block.positions
        )
    engine = OrtEngine(Bundle.open(bundle), threads=1)
    session, tokens = engine.open_session(), lesson.tokens.tolist()
    for place, expected in zip(places.tolist(), wanted, strict=True):
        rows = Rows(session, TokenTree.chain(tokens[session.length : place + 1]), [place - session.length])
        [outputs] = engine.forward([rows])
        session.commit(range(place + 1 - session.length))
        hidden = outputs.hidden[0].copy()
        np.testing.assert_allclose(hidden, block.hidden[0, place].numpy(), atol=2e-3 * np.abs(hidden).max())
        found = session.draft_step(tokens[place + 1], hidden).hidden
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    assert np.abs(blind[0].numpy() - wanted).max() > 0.1 * np.abs(wanted).max()
    engine.close()


@pytest.mark.parametrize(("family", "units"), [("smollm2", 160), ("e2b", 96), ("qwen3-moe", 2 * 64)])
def test_a_drafter_has_as_many_units_as_the_block_that_it_begins_with(family: str, units: int, work: Path) -> None:
    """The last layers of E2B have twice as many."""
    assert train_drafter.mlp_units(FrozenTarget.read(work.parent / "target", CPU)) == units


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "qwen2"), ("granite", "granite"), ("glm", "chatglm")])
def test_a_gguf_file_is_the_model_that_it_was_made_of(family: str, architecture: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "target", family)
    path = write_gguf(tmp_path / "model.gguf", architecture, model.config, state_of(model))
    whole, read = FrozenTarget.load_gguf(path, CPU), FrozenTarget.read(path, CPU)
    hub = FrozenTarget.read(tmp_path / "target", CPU)
    tokens = torch.arange(3, 40)
    for each in (whole, read):
        torch.testing.assert_close(each.embed(tokens), hub.embed(tokens))
        torch.testing.assert_close(each.projection, hub.projection)
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
        found = hub.logits(whole.states(whole.decoder(tokens[None]).last_hidden_state[0]))
    assert (found - wanted).norm() < 0.06 * wanted.norm()  # in bfloat16


def test_a_gguf_file_with_other_tensors_than_transformers_is_refused(tmp_path: Path) -> None:
    model = save_family(tmp_path / "target", "lfm2")
    path = write_gguf(tmp_path / "model.gguf", "lfm2", model.config, state_of(model))
    with pytest.raises(SystemExit, match="transformers has other tensors for it: name the checkpoint of the hub"):
        FrozenTarget.load_gguf(path, CPU)


def test_training_starts_with_a_saved_drafter_as_it_is(work: Path, tmp_path: Path) -> None:
    target, drafter, _ = made(work)
    save_drafter(drafter, target, torch.arange(5), tmp_path / "out")
    other = TargetDrafter(drafter.config, target.rotation())
    other.input_scale.fill_(0.25)
    other.output_scale.fill_(4.0)
    start_from_drafter(other, tmp_path / "out")
    before, after = drafter.tensors(), other.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert other.pre_projection.weight.std() != drafter.pre_projection.weight.std()
    narrow = TargetDrafter(drafter_config(target, width=32, layers=1, mlp=48), target.rotation())
    with pytest.raises(ValueError, match="--width"):
        start_from_drafter(narrow, tmp_path / "out")


def test_conversations_of_a_block_do_not_see_each_other(work: Path) -> None:
    target, drafter, known = made(work)

    def states(rows: list[list[Any]], places: list[npt.NDArray[np.int64]]) -> torch.Tensor:
        chosen = torch.from_numpy(np.stack(places))
        block = make_blocks(rows, target, chosen, torch.float32, 128)
        embedded, hidden, mask = target.embed(block.tokens_after(1)), block.hidden_after(0), block.mask(torch.float32)
        with torch.no_grad():
            found: torch.Tensor = drafter(embedded, hidden, block.cache, mask, block.positions)
        return found

    first, second = known[0], known[1]
    together = states([[first, second]], [rounds_of([first, second], 3)])[0]
    each = [rounds_of([lesson], 3) for lesson in (first, second)]
    alone = [states([[lesson]], [places])[0] for lesson, places in zip((first, second), each, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    count = min(map(len, each))
    side_by_side = states([[first], [second]], [places[:count] for places in each])
    torch.testing.assert_close(side_by_side, torch.stack([rows[:count] for rows in alone]), atol=1e-5, rtol=1e-5)


def test_noise_given_a_token_is_gumbel_noise_that_chooses_it() -> None:
    generator = torch.Generator().manual_seed(0)
    likely = torch.tensor([0.5, 0.3, 0.2]).log().repeat(20_000, 1)
    chosen = torch.multinomial(likely.exp(), 1, generator=generator)[:, 0]
    noise = posterior_noise(likely, chosen, generator)
    assert torch.equal((likely + noise).argmax(dim=-1), chosen)
    assert noise.mean(dim=0) == pytest.approx([0.5772] * 3, abs=0.04)  # that of all Gumbel noise
    assert noise.std(dim=0) == pytest.approx([1.2825] * 3, abs=0.04)


class Knowing:
    """Has the target's own states as its estimates."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states, self.step = states, 0

    def __call__(self, embedded: Any, states: Any, cache: Any, mask: Any, positions: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.states[positions[0] + self.step - 1][None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafts_of_a_drafter_that_knows_the_target_are_accepted(work: Path, temperature: float) -> None:
    """Where the head lacks a token, the run of accepted drafts ends before it."""
    target, _, known = made(work)
    head, everything = target.projection.float(), torch.arange(VOCAB)
    lesson = replace(known[4], temperature=temperature)
    states = lesson.hidden.float()
    if temperature == 0:  # states whose likeliest tokens are those of the reply
        states = torch.nn.functional.normalize(head, dim=-1)[[*lesson.tokens[1:], 3]]
        head = torch.nn.functional.normalize(head, dim=-1)
    lesson = replace(lesson, hidden=states)

    runs = accepted_runs(Knowing(states), target, lesson, head, everything)  # type: ignore[arg-type]
    assert (runs == rounds.MEASURED_STEPS).all()
    fewer = everything[everything != int(lesson.tokens[-1])]
    runs = accepted_runs(Knowing(states), target, lesson, head[fewer], fewer)  # type: ignore[arg-type]
    assert runs[-1] == rounds.MEASURED_STEPS - 1


@pytest.mark.parametrize("family", ["smollm2", "gemma3", "lfm2-moe"])
def test_a_run_that_was_killed_ends_with_the_same_bits(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "LENGTH", 96)
    monkeypatch.setattr("training.run.SAVE_SECONDS", 0)
    paces = {"cpu": train_drafter.Pace(2, 1, 3, 64, 0.15, 0.03)}
    for name, value in {"ROUNDS": 16, "PACES": paces, "ALWAYS": 8, "SAMPLE": 4}.items():
        monkeypatch.setattr(train_drafter, name, value)
    options = {"target": work.parent / "target", "work": work, "tokens": 32 * 9, "head_tokens": 128, "loss": "both"}
    shape = {"width": None, "layers": 1, "mlp": 48, "licence": "apache-2.0", "device": CPU, "start": None}
    update = train_drafter.DrafterRun.update

    def killed(run: Any) -> float:
        if run.step == 5:
            raise KeyboardInterrupt
        return update(run)

    args = [Namespace(**options, **shape, run=name, out=work / name) for name in ("whole", "parts")]
    train_drafter.train(args[0])
    monkeypatch.setattr(train_drafter.DrafterRun, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        train_drafter.train(args[1])
    monkeypatch.setattr(train_drafter.DrafterRun, "update", update)
    train_drafter.train(args[1])

    whole, parts = (load_file(each.out / "model.safetensors") for each in args)
    assert json.loads((work / "parts.json").read_text()) == train_drafter.begun_with(args[1])
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    start = load_file(work / "whole" / "model.safetensors")["post_projection.weight"]
    assert not torch.equal(start, made(work)[1].tensors()["post_projection.weight"])
    config = json.loads((work / "whole" / "config.json").read_text())
    assert 0 < config["acceptance"] <= 1
    assert "license: apache-2.0" in (work / "whole" / "README.md").read_text()
    assert "Replies that it was trained on" in (work / "whole" / "README.md").read_text()
    rows = compared([work / "whole", work / "parts"]).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| T = 0, held-out replies, `{x}`" for x in ("whole", "parts")]
    assert "| 3 |" in rows[1]
    assert "| +0.000 ± 0.000 |" in rows[1]
    file = work / "parts" / "figures.json"
    figures = json.loads(file.read_text())
    figures["replies"]["0"]["all"]["positions"] += 1
    file.write_text(json.dumps(figures))
    assert "| other replies |" in compared([work / "whole", work / "parts"])


@pytest.mark.parametrize(("device", "processes"), [("cpu", 4), ("cuda", 1)])
def test_no_process_is_without_a_forward(monkeypatch: pytest.MonkeyPatch, device: str, processes: int) -> None:
    launched: list[int] = []
    monkeypatch.setattr(train_drafter, "parse_args", lambda: Namespace(device=torch.device(device), work=Path()))
    monkeypatch.setattr(train_drafter, "prepare", lambda _: None)
    monkeypatch.setattr("training.workers.launch", lambda work, count, *_: launched.append(count))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    train_drafter.main()
    assert launched == [processes]


def test_a_drafter_that_is_trained_on_keeps_its_shape(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter, _ = made(work)
    save_drafter(drafter, target, torch.arange(5), tmp_path)
    shape = drafter.config.text_config
    options = ["train_drafter.py", "--target", "T", "--out", "O", "--start", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*options, "--mlp", str(shape.intermediate_size)])
    args = train_drafter.parse_args()
    assert (args.width, args.layers, args.mlp) == (shape.hidden_size, shape.num_hidden_layers, shape.intermediate_size)
    monkeypatch.setattr("sys.argv", [*options, "--layers", "7"])
    with pytest.raises(SystemExit):
        train_drafter.parse_args()
    assert f"--layers 7: --start {tmp_path} has {shape.num_hidden_layers}" in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_options_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train_drafter.py", "--target", "T", "--out", "O", "--work", str(tmp_path), "--head-tokens", "64"]
    monkeypatch.setattr("sys.argv", options)
    (tmp_path / "drafter.json").write_text(json.dumps(train_drafter.begun_with(train_drafter.parse_args())))
    monkeypatch.setattr("sys.argv", [*options, "--tokens", "9", "--replies", "8", "--licence", "mit"])
    train_drafter.parse_args()
    monkeypatch.setattr("sys.argv", [*options, "--head-tokens", "32", "--width", "96"])
    with pytest.raises(SystemExit):
        train_drafter.parse_args()
    said = "began with --width default, not 96, --head-tokens 64, not 32: give another --run and another --out"
    assert said in capsys.readouterr().err


def test_replies_to_other_given_prompts_are_not_taken_for_those_to_these(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_drafter, "write_replies", lambda *_: None)
    for name in ("first", "second"):
        (work / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    options = {"target": work.parent / "target", "work": work, "device": CPU, "replies": 1, "first": 0}
    write_held_out([], held_out([work / "first.jsonl"]), work / "held-out")
    for files in ([work / "first.jsonl"], []):
        train_drafter.prepare(Namespace(**options, held_out=files))
    with pytest.raises(SystemExit, match="has replies to other prompts than those of --held-out: name another --work"):
        train_drafter.prepare(Namespace(**options, held_out=[work / "second.jsonl"]))


def test_replies_of_which_none_is_held_out_are_too_few(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_drafter, "write_replies", lambda *_: None)
    args = Namespace(target=work.parent / "target", work=work, held_out=[], device=CPU, replies=1, first=0)
    train_drafter.prepare(args)
    monkeypatch.setattr(lessons, "HELD_OUT_EVERY", 1000)
    with pytest.raises(SystemExit, match="too few replies"):
        train_drafter.prepare(args)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("phi3", "has no layer with full attention, whose keys and values a drafter reads"),
        ("qwen3.5", "has states in place of attention: such models have an MTP layer of their own"),
        ("qwen3-next", "has states in place of attention: such models have an MTP layer of their own"),
    ],
)
def test_targets_of_other_layers_are_refused_before_replies_are_written(tmp_path: Path, name: str, said: str) -> None:
    save_family(tmp_path / "target", name)
    args = Namespace(target=tmp_path / "target", work=tmp_path / "work", held_out=[], device=CPU, replies=1, first=0)
    with pytest.raises(SystemExit) as caught:
        train_drafter.prepare(args)
    assert str(caught.value) == f"{tmp_path / 'target'} {said}"
    assert not (tmp_path / "work").exists()


def test_replies_of_another_target_are_not_learnt_from(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_drafter, "write_replies", lambda *_: None)
    args = Namespace(target=work.parent / "target", work=work, held_out=[], device=CPU, replies=1, first=0)
    train_drafter.prepare(args)
    moved, other = work.parent / "moved", work.parent / "other" / "target"
    shutil.copytree(args.target, moved)
    train_drafter.prepare(Namespace(**{**vars(args), "target": moved}))
    save_family(other, "smollm2", seed=1)
    with pytest.raises(SystemExit, match="has the replies of another target: name another --work"):
        train_drafter.prepare(Namespace(**{**vars(args), "target": other}))


def test_the_error_of_tokens_a_round_is_that_of_a_mean_where_all_replies_have_as_many_rounds() -> None:
    tokens = np.array([5, 9, 6, 12])
    moved = influence([[int(count), 4] for count in tokens])
    assert error(moved) == pytest.approx((tokens / 4).std(ddof=1) / 2)
    assert np.isnan(error(influence([[5, 4]])))


def test_a_longer_head_covers_more_and_nothing_outside_is_accepted(work: Path, tmp_path: Path) -> None:
    target, drafter, known = made(work)
    save_drafter(drafter, target, torch.arange(5), tmp_path / "out")
    opened = open_drafter(tmp_path / "out", target)
    ranked = train_drafter.count_tokens(known, VOCAB)
    replies = [known[index] for index in range(len(known))]
    found = [figures(opened, target, replies, ranked[:size].sort().values) for size in (1, 40, VOCAB)]
    assert found[0]["covered"] < found[1]["covered"] < found[2]["covered"] == 1.0
    assert found[0]["0"]["accepted"][0] <= 2 * found[0]["covered"]
    assert row(40, found[1], {"0": 1.25, "1": 1.0})[:2] == ["40", f"{found[1]['covered']:.3f}"]
