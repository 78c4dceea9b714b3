"""`Model.astream`: what `Model.stream` gives, awaited."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from ondevice import UsageError
from tests.fixtures.model_made import model_over, write_bundle
from tests.fixtures.toy_engine import ToyEngine

ENDLESS = 5000
"""New tokens of a generation that is still running when it is left, however late a busy machine does that."""


@pytest.fixture
def toy(tmp_path):
    with model_over(ToyEngine(), write_bundle(tmp_path / "toy")) as model:
        yield model


@pytest.fixture
def slow(tmp_path):
    """Two milliseconds a forward."""
    with model_over(ToyEngine(before=lambda _: time.sleep(0.002)), write_bundle(tmp_path / "slow")) as model:
        yield model


def readers():
    """Threads that still read, each given the time to end: its last step is there a moment before."""
    threads = [thread for thread in threading.enumerate() if thread.name == "ondevice-generation"]
    for thread in threads:
        thread.join(300)
    return [thread for thread in threads if thread.is_alive()]


def test_its_steps_are_those_of_stream(toy):
    async def collect():
        return [step async for step in toy.astream("abc", max_new_tokens=20, seed=1, drafter="none")]

    steps = asyncio.run(collect())
    plain = list(toy.stream("abc", max_new_tokens=20, seed=1, drafter="none"))
    assert [step.text for step in steps] == [step.text for step in plain]
    assert steps[-1].finish_reason == "length"
    assert readers() == []


def test_several_at_once_in_one_loop(toy):
    async def text(prompt):
        return "".join([step.text async for step in toy.astream(prompt, max_new_tokens=30, temperature=0.0)])

    async def several():
        return await asyncio.gather(*(text(prompt) for prompt in ("abc", "bca", "cab", "aab")))

    alone = [toy.generate(prompt, max_new_tokens=30, temperature=0.0).text for prompt in ("abc", "bca", "cab", "aab")]
    assert asyncio.run(several()) == alone


def test_leaving_the_context_ends_it(slow):
    async def begin():
        async with slow.astream("abc", max_new_tokens=ENDLESS) as steps:
            async for step in steps:
                assert step.token_ids
                break
        return steps.stats

    stats = asyncio.run(begin())
    assert 1 <= stats.new_tokens < ENDLESS
    assert readers() == []


def test_a_cancelled_task_ends_it(slow):
    async def read(begun):
        async with slow.astream("abc", max_new_tokens=ENDLESS) as steps:
            async for _ in steps:
                begun.set()

    async def cancelled():
        begun = asyncio.Event()
        task = asyncio.create_task(read(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return readers()

    assert asyncio.run(cancelled()) == []


def test_cancel_gives_a_last_step(slow):
    async def read():
        steps = slow.astream("abc", max_new_tokens=ENDLESS)
        reasons = []
        async for step in steps:
            reasons.append(step.finish_reason)
            steps.cancel()
        return reasons

    assert asyncio.run(read())[-1] == "cancelled"


def test_what_goes_wrong_is_raised_where_it_is_awaited(tmp_path):
    def fail(batch):
        raise RuntimeError("broken")

    async def read(model):
        async for _ in model.astream("abc"):
            pass

    with model_over(ToyEngine(before=fail), write_bundle(tmp_path / "toy")) as model:
        with pytest.raises(RuntimeError, match="broken"):
            asyncio.run(read(model))
        with pytest.raises(UsageError, match="temperature"):
            model.astream("abc", temperature=-1)


def test_the_end_of_another_iterator_is_no_end_of_the_steps(toy):
    """A logits processor may raise it by mistake; it would look like the end of the reply."""

    def fail(logits, context):
        raise StopAsyncIteration

    async def read():
        return [step async for step in toy.astream("abc", logits_processors=[fail])]

    with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
        asyncio.run(read())
    assert readers() == []


def test_tasks_that_share_one_all_end(slow):
    """Tasks that wait for a step when another one closes it, or reads the last step."""

    async def read(steps):
        return [step.token_ids async for step in steps]

    async def shared():
        steps = slow.astream("abc", max_new_tokens=20, drafter="none")
        found = await asyncio.gather(read(steps), read(steps))
        closed = slow.astream("abc", max_new_tokens=ENDLESS)
        tasks = [asyncio.create_task(read(closed)) for _ in range(2)]
        while not closed.stats.new_tokens:
            await asyncio.sleep(0.001)
        await asyncio.gather(closed.aclose(), closed.aclose())
        await asyncio.gather(*tasks)
        return sum(map(len, found)), closed.stats.new_tokens

    count, closed = asyncio.run(asyncio.wait_for(shared(), 300))
    assert count == 20
    assert closed < ENDLESS
    assert readers() == []


def test_another_event_loop_can_close_it_only(slow):
    async def begin():
        steps = slow.astream("abc", max_new_tokens=ENDLESS)
        await anext(steps)
        return steps

    async def close(steps):
        with pytest.raises(UsageError, match="began in another event loop"):
            await anext(steps)
        await steps.aclose()
        return readers(), [step async for step in steps]

    steps = asyncio.run(begin())
    assert asyncio.run(asyncio.wait_for(close(steps), 300)) == ([], [])


def test_a_dropped_one_ends_and_so_does_one_whose_loop_ended(slow):
    async def begin():
        steps = slow.astream("abc", max_new_tokens=ENDLESS)
        return (await anext(aiter(steps))).token_ids, steps

    _, steps = asyncio.run(begin())
    assert readers() == []
    del steps
    asyncio.run(begin())
    assert readers() == []


def test_one_that_is_open_when_the_interpreter_exits_ends_in_silence(reference_bundle):
    script = f"""
import asyncio, ondevice
model = ondevice.load({str(reference_bundle)!r}, threads=2)
async def begin():
    global steps
    steps = model.astream("def f(", max_new_tokens={ENDLESS}, ignore_eos=True)
    await anext(steps)
asyncio.run(begin())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert (run.stdout, run.stderr) == ("", "")
