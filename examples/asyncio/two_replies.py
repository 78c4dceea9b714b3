"""Two replies at once in one event loop, one of which is given up after a while.

python examples/asyncio/two_replies.py BUNDLE
"""

from __future__ import annotations

import asyncio
import sys

import ondevice


async def answer(model: ondevice.Model, prompt: str) -> str:
    """A reply; where this task is cancelled, so is what it computes, within one forward."""
    text = ""
    async with model.astream(prompt, max_new_tokens=200, temperature=0.0) as steps:
        async for step in steps:
            text += step.text
    return text


async def main() -> None:
    model = await asyncio.to_thread(ondevice.load, sys.argv[1])
    with model:
        short = asyncio.create_task(answer(model, "def is_even(n):"))
        long = asyncio.create_task(answer(model, "class Stack:"))
        print(await short)  # its rows shared forwards with those of the other
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
