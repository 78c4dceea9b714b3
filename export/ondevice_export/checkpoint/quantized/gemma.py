"""`quantization_config` of a checkpoint that was trained quantised (`quant_method` gemma): bits per weight by module.

The rules go by module names and are those of transformers 5.23.0 (`quantizers/quantizer_gemma.py`,
`integrations/gemma_quant.py`); the shapes of the tensors must agree with the bits that the rules give.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ondevice.errors import CheckpointError
from ondevice_export.checkpoint.json_fields import JsonFields
from ondevice_export.checkpoint.quantized.methods import JOINED

METHOD = "gemma"
BITS = (2, 4, 8)

_MAX_PATTERNS = 10_000
_MAX_REPETITIONS = 4
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!P<]*|[(|)]|(?:[*+?]|\{\d*,?\d*\})[?+]?|.", re.DOTALL)
"""An escaped character, a class, a bracket, the bar, a repetition, or another character."""
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def _whole(name: str) -> str:
    """A regular expression for modules whose name begins with `name`, up to a dot."""
    return f"(?:{name}){_BOUNDARY}"


@dataclass(frozen=True)
class GemmaQuantization:
    """The rules for which modules are quantised, and with how many bits per weight.

    Attributes:
        bits: bits of modules that no pattern matches.
        embeddings: whether embedding tables are quantised too.
        patterns: pairs of a regular expression on module names and the bits of the modules it matches, in order.
        plain: names, or regular expressions, of modules that are not quantised (`modules_to_not_convert`).
    """

    bits: int
    embeddings: bool
    patterns: tuple[tuple[re.Pattern[str], int], ...]
    plain: tuple[str, ...]

    def converts(self, module: str) -> bool:
        """Whether a module is quantised: no name in `plain` is its suffix, or its prefix up to a dot."""
        return not any(re.match(_whole(name), module) or module.endswith(name) for name in self.plain)

    def candidates(self, module: str) -> tuple[int, ...]:
        """The bits that a module may have, likeliest first.

        transformers' documentation says that the first pattern that `re.search` finds counts; its loader joins all
        patterns into one expression, whose leftmost match counts. Where the two disagree, both values are returned and
        the caller compares them with the tensor's shape.
        """
        found = [(match.start(), bits) for pattern, bits in self.patterns if (match := pattern.search(module))]
        if not found:
            return (self.bits,)
        return tuple(dict.fromkeys([found[0][1], min(found, key=lambda each: each[0])[1]]))


def read_quantization(config: Mapping[str, Any], origin: str) -> GemmaQuantization | None:
    """Read `quantization_config` from a configuration; None for a checkpoint that is not quantised, or whose
    method is one of those in `methods.JOINED`.

    Args:
        config: `config.json`.
        origin: what error messages call it.

    Raises:
        CheckpointError: the quantisation method or one of its fields is not supported.
    """
    outer = JsonFields(config, origin)
    text = outer.mapping("text_config", {})
    given = next((one for one in (outer, text) if one.data.get("quantization_config") is not None), None)
    if given is None:
        return None
    fields = given.mapping("quantization_config", {})
    method = fields.data.get("quant_method")
    if given is outer and method in JOINED:
        return None
    if method != METHOD:
        raise CheckpointError(
            f"{fields.origin}: weights quantised by {method!r:.99} are not supported, only by "
            f"{', '.join(JOINED)} and {METHOD}: export the original checkpoint"
        )
    bits = _bits(fields, 4)
    modules = fields.mapping("module_quant_configs", {})
    if len(modules.data) > _MAX_PATTERNS:
        raise CheckpointError(f"{modules.origin}: {len(modules.data)} patterns")
    patterns = []
    for pattern in modules.data:
        options = modules.mapping(pattern, {})
        unknown = set(options.data) - {"num_bits"}
        if unknown:
            raise CheckpointError(f"{options.origin}: {', '.join(sorted(unknown))!r:.99} is not known")
        patterns.append((_pattern(pattern, modules.origin), _bits(options, bits)))
    return GemmaQuantization(bits, fields.flag("quantize_embeddings"), tuple(patterns), _plain(fields))


def _bits(fields: JsonFields, default: int) -> int:
    bits = fields.integer("num_bits", default)
    if bits not in BITS:
        raise CheckpointError(f"{fields.origin}: num_bits is {bits}, expected one of {', '.join(map(str, BITS))}")
    return bits


def _plain(fields: JsonFields) -> tuple[str, ...]:
    names: Any = fields.data.get("modules_to_not_convert")
    if names is None:
        return ("lm_head",)  # transformers' rule: output embeddings are not quantised
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{fields.origin}: modules_to_not_convert is not a list of names")
    for name in names:
        _pattern(_whole(name), fields.origin)
    return tuple(names)


def _pattern(text: str, origin: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{origin}: {text!r:.99} is not a regular expression ({error})") from error
    if not _matches_soon(text):
        raise CheckpointError(f"{origin}: {text!r:.99} is a regular expression that could take for ever")
    return compiled


def _matches_soon(pattern: str) -> bool:
    """Whether a regular expression has few repetitions, and none of a group that has repetitions or alternatives.

    Without those `re` needs at most length**_MAX_REPETITIONS steps; a name of a module has some 60 characters.
    """
    count, groups, closed = 0, [False], False
    for token in _TOKEN.findall(pattern):
        if token.startswith("("):
            groups.append(False)
        elif token == "|":
            groups[-1] = True
        elif token[0] in "*+?{":
            if closed:
                return False
            count, groups[-1] = count + 1, True
        is_varied = token == ")" and groups.pop()  # `re` has checked the brackets
        closed = is_varied
        groups[-1] |= is_varied
    return count <= _MAX_REPETITIONS
