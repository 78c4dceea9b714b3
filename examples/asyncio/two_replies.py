"""Generates two replies concurrently in one event loop and cancels one of them after a while.

python examples/asyncio/two_replies.py BUNDLE
"""

from __future__ import annotations

import asyncio
import sys

import ondevice


async def answer(model: ondevice.Model, prompt: str) -> str:
    """Generate a reply; cancelling this task ends the computation within one forward."""
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
        print(await short)  # both replies were computed in the same forwards
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
