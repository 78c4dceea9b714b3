"""Random JSON schemas of what llguidance holds to."""

from __future__ import annotations

import random
from typing import Any

LIMITS: dict[str, list[dict[str, Any]]] = {
    "string": [{"maxLength": 6}, {"minLength": 2, "maxLength": 4}, {"pattern": "^[a-c]{1,4}$"}],
    "integer": [{"minimum": -7, "maximum": 12}, {"maximum": 100}, {}],
}
KEYS = ["a", "Zoo", "name", "last_name", "b2", "é"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample(["x", "long words", 'qu"ote', 3, -1.5, True, None], rng.randint(1, 4))}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample(KEYS, rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind, **rng.choice(LIMITS.get(kind, [{}]))}
