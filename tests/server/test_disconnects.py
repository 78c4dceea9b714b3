"""Two hundred requests, of which many leave at any moment: nothing is left behind, and no text is touched."""

import gc
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from ondevice import machine
from tests.server.served import wait_until

TEXT = "/v1/completions"
REQUESTS = 200
PROMPTS = ["def f(", "class Tree:\n", "import os\n", "for i in range(", 'print("', "x = [" * 40, "# a comment\n" * 30]
MEGABYTE = 1 << 20


def options_of(number):
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 8 + number % 17,
        "temperature": (0.0, 0.7, 1.0)[number % 3],
        "seed": number % 5,
        "n": 1 + (number % 11 == 0),
    }


def ask(served, number):
    """The texts of a request, or None where the client left: before, in or after the prompt."""
    chance = random.Random(number)
    options, leaves = options_of(number), chance.random() < 0.5
    if not leaves:
        return [choice["text"] for choice in served.post(TEXT, **options).body["choices"]]
    stay = chance.randrange(4)
    if chance.random() < 0.3:
        connection = served.connect()
        connection.request("POST", TEXT, b"{}" if stay == 3 else json.dumps(options).encode())
        connection.sock.close()
        return None
    with served.stream(TEXT, **{**options, "max_tokens": 1500}) as lines:
        for _ in zip(range(stay), lines, strict=False):
            pass
    return None


def test_nothing_is_left_of_them(served, served_model):
    def alone(number):
        options = options_of(number)
        seeds = range(options["seed"], options["seed"] + options["n"])
        named = {"max_new_tokens": options["max_tokens"], "temperature": options["temperature"], "drafter": "none"}
        return [served_model.generate(options["prompt"], seed=seed, **named).text for seed in seeds]

    def threads():
        return sum(thread.name.startswith("ondevice") for thread in threading.enumerate())

    before = served.gauge("tokens_predicted_total")
    with ThreadPoolExecutor(12) as clients:
        first = list(clients.map(lambda number: ask(served, number), range(REQUESTS // 2)))
        served.wait_until_idle()
        gc.collect()
        peak, kept = machine.peak_rss_bytes(), threads()
        second = list(clients.map(lambda number: ask(served, number), range(REQUESTS // 2, REQUESTS)))
        served.wait_until_idle()
    wait_until(lambda: threads() <= kept)
    gc.collect()
    assert machine.peak_rss_bytes() - peak < 64 * MEGABYTE
    answered = {number: texts for number, texts in enumerate([*first, *second]) if texts is not None}
    assert 60 < len(answered) < 140
    wanted = sum(options_of(number)["n"] * options_of(number)["max_tokens"] for number in answered)
    left = REQUESTS - len(answered)
    assert served.gauge("tokens_predicted_total") - before - wanted < 100 * left  # each asked for up to 1500
    for number, texts in answered.items():
        assert texts == alone(number), options_of(number)
    assert len(served_model._runner.batch) == 0
