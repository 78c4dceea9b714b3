"""Health, models, properties, metrics and tokens; loading and unloading the model."""

import threading
from contextlib import ExitStack

import pytest

import ondevice
from ondevice.errors import BundleCorruptError
from ondevice.generate.stats import DraftCounts
from ondevice.server.metrics import Metrics
from ondevice.server.requests import RequestFields
from tests.fixtures.model_made import load_toy
from tests.server.served import PATIENCE_S, serving, wait_until


def test_health(served):
    assert served.get("/health").body == served.get("/v1/health").body == {"status": "ok"}


def test_models(served, served_model):
    [card] = served.get("/v1/models").body["data"]
    assert (card["id"], card["object"]) == ("reference", "model")
    tokenizer = served_model.tokenizer
    assert (card["meta"]["n_vocab"], card["meta"]["n_ctx"]) == (tokenizer.vocab_size, served_model.context_length)
    assert served.get("/v1/models/reference").body == card
    assert served.get("/v1/models/other/one").status == 404


def test_properties(served, served_model, reference_bundle):
    props = served.get("/props").body
    assert props["default_generation_settings"]["n_ctx"] == served_model.context_length
    assert props["default_generation_settings"]["params"]["top_k"] == 64
    assert props["total_slots"] == 4
    assert {"ngram", "auto", "none"} <= set(props["drafters"])
    assert props["chat_template"] == (reference_bundle / "chat_template.jinja").read_text("utf-8")
    assert props["build_info"] == f"ondevice {ondevice.__version__}"


def test_tokenize_and_detokenize(served, served_model):
    tokenizer = served_model.tokenizer
    text = "def f(x):\n    return 'é'<turn|>"
    ids = served.post("/tokenize", content=text).body["tokens"]
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert served.post("/tokenize", content=text, add_special=True).body["tokens"] == tokenizer.encode(text)
    plain = served.post("/tokenize", content=text, parse_special=False, with_pieces=True).body["tokens"]
    assert [each["id"] for each in plain] == tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert plain[0]["piece"] == "def"
    mixed = "é a b\n🎉"
    pieces = [each["piece"] for each in served.post("/tokenize", content=mixed, with_pieces=True).body["tokens"]]
    assert b"".join(bytes(each) if isinstance(each, list) else each.encode() for each in pieces).decode() == mixed
    assert any(isinstance(each, list) for each in pieces)  # no token of this vocabulary is a whole 🎉
    assert " a" in pieces
    assert served.post("/detokenize", tokens=ids).body == {"content": text}


@pytest.mark.parametrize("tokens", ["a", [-1], [6144], [True], [1.5]])
def test_detokenize_refuses_bad_ids(served, tokens):
    assert served.post("/detokenize", tokens=tokens).body["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "fields", "reader"),
    [("/tokenize", {"content": "abc"}, "flag"), ("/v1/chat/completions", {"messages": []}, "objects")],
)
def test_a_request_that_takes_long_to_read_stops_no_other(served, monkeypatch, path, fields, reader):
    """As one of 15 MB does, whose objects are walked one by one."""
    reading, answered = threading.Event(), threading.Event()
    method = getattr(RequestFields, reader)

    def slow(self, name):
        reading.set()
        assert answered.wait(PATIENCE_S)
        return method(self, name)

    monkeypatch.setattr(RequestFields, reader, slow)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(served.post(path, **fields).status))
    thread.start()
    assert reading.wait(PATIENCE_S)
    assert served.get("/health").status == 200
    answered.set()
    thread.join()
    assert statuses[0] in (200, 400)


def test_unknown_path_and_wrong_method(served):
    answer = served.get("/v2/models")
    assert (answer.status, answer.body["error"]["type"]) == (404, "not_found_error")
    assert served.get("/v1/completions").status == 405


def test_metrics(served):
    served.wait_until_idle()  # replies of other tests, whose clients have left, count until they end
    before = served.gauge("tokens_predicted_total")
    served.post("/v1/completions", prompt="import os\n", max_tokens=24, temperature=0)
    assert served.gauge("tokens_predicted_total") == before + 24
    text = served.get("/metrics").body
    assert "# TYPE ondevice:spec_decode_num_accepted_tokens_per_pos_total counter\n" in text


def test_a_prompt_that_is_only_read_counts(served):
    served.wait_until_idle()
    before = served.gauge("prompt_tokens_total")
    body = served.post("/v1/completions", prompt="import math\nimport re\n", max_tokens=0, echo=True, logprobs=0).body
    assert served.gauge("prompt_tokens_total") == before + body["usage"]["prompt_tokens"]


def test_metrics_format():
    metrics = Metrics()
    drafts = DraftCounts(3, 8, 4, [3, 2], [3, 1])
    metrics.count(
        ondevice.Stats(**vars(drafts), prompt_read=True, prompt_tokens=5, cached_tokens=2, fallbacks={"no_room": 2})
    )
    text = metrics.text(0, 0)
    assert "ondevice:spec_decode_num_drafts_total 3\n" in text
    assert "ondevice:spec_decode_num_draft_tokens_total 8\n" in text
    assert "ondevice:spec_decode_num_accepted_tokens_total 4\n" in text
    for position, accepted in (("0", 3), ("1", 1)):
        assert f'ondevice:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {accepted}\n' in text
    assert 'ondevice:fallback_total{reason="no_room"} 2\n' in text
    assert "ondevice:prompt_tokens_total 3\n" in text


def test_requests_during_the_first_load_get_503(toy_bundle):
    may_load = threading.Event()

    def load():
        assert may_load.wait(PATIENCE_S)
        return load_toy(toy_bundle)

    with serving(toy_bundle, load, wait=False) as served, ExitStack() as last:
        last.callback(may_load.set)
        answer = served.get("/health")
        assert answer.status == 503
        assert answer.body["error"]["message"] == "Loading model"
        assert answer.body["error"]["type"] == "unavailable_error"
        assert answer.headers["retry-after"] == "1"
        assert served.post("/v1/completions", prompt="abc").status == 503
        assert served.get("/v1/models").status == 200
        assert served.get("/props").status == 503
        may_load.set()
        wait_until(lambda: served.get("/health").status == 200)


def test_a_failing_load_ends_the_server(toy_bundle):
    def load():
        raise BundleCorruptError("torn")

    with pytest.raises(BundleCorruptError, match="torn"), serving(toy_bundle, load, wait=False):
        pass


def test_an_idle_model_is_unloaded_and_loaded_again(toy_bundle):
    loaded = []

    def load():
        loaded.append(load_toy(toy_bundle))
        return loaded[-1]

    with serving(toy_bundle, load, idle_s=0.05) as served:
        first = served.post("/v1/completions", prompt="abc", max_tokens=5, temperature=0).body
        wait_until(lambda: not served.get("/v1/models").body["data"][0]["meta"]["n_ctx"])
        with pytest.raises(ondevice.UsageError, match="closed"):
            loaded[0].generate("abc")
        assert served.get("/health").status == 200
        before = len(loaded)  # more than one where the first request came so late that the model was unloaded already
        again = served.post("/v1/completions", prompt="abc", max_tokens=5, temperature=0).body
        assert again["choices"] == first["choices"]
        assert len(loaded) == before + 1


def test_a_model_in_use_is_not_unloaded(serve_toy, gate):
    with serve_toy(idle_s=0.01) as served:
        gate.close()
        answers = []
        asking = threading.Thread(
            target=lambda: answers.append(served.post("/v1/completions", prompt="abc", max_tokens=3))
        )
        asking.start()
        wait_until(lambda: gate.arrived == 1)
        threading.Event().wait(0.05)
        gate.open()
        asking.join()
        assert answers[0].status == 200
