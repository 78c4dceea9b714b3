# ruff: noqa: RUF001
"""2,000 texts of many scripts, with digits, white space, emoji and control tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

_SCRIPTS = {
    "latin": "the quick brown fox jumps over naïve café Straße Œuvre ĳsselmeer don't we'll I'VE it'S",
    "greek": "Το γρήγορο καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί",
    "cyrillic": "Съешь же ещё этих мягких французских булок да выпей чаю",
    "arabic": "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "chinese": "天地玄黄 宇宙洪荒 日月盈昃 辰宿列张 寒来暑往 秋收冬藏",
    "japanese": "いろはにほへと ちりぬるを カタカナ 漢字かな交じり文",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다",
    "code": "def f(x): return {k: v+1 for k, v in x.items() if v != 0x1F} # <html></div> a->b && c||d;",
}
_DIGITS = ["0", "7", "42", "123", "1234", "2026", "12345678", "3.14159", "1,000,000", "٣٤٥", "४२", "Ⅷ", "½", "²"]
_SPACES = [" ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", " \n", "\n ", "\r\n", "\u00a0", "\u3000", "      "]
_EMOJI = ["😀", "👩‍👩‍👧", "🇪🇺", "❤️", "🏳️‍🌈", "🤷🏽‍♀️", "☃", "𝔘𝔫𝔦", "𠮷", "\u200d", "▁", "\ufeff", "Å", "e\u0301"]
_MARKS = [
    "'s",
    "'LL",
    "...",
    "!?",
    "(",
    ")",
    "[[",
    "}}",
    '"',
    "“",
    "—",
    "/",
    "\\",
    "#",
    "@",
    "$",
    "%",
    "^",
    "&",
    "*",
    "<",
    ">",
]


def texts(control: Sequence[str] = (), count: int = 2000) -> list[str]:
    """Texts of one to 24 pieces: a part of a script's text, digits, white space, emoji, marks or a control token."""
    rng = random.Random(0)
    kinds = [_DIGITS, _SPACES, _SPACES, _EMOJI, _MARKS, *([list(control)] if control else [])]
    made = ["", " ", "a", "\n", *_DIGITS, *_SPACES, *_EMOJI, *_MARKS, *_SCRIPTS.values(), *control]
    while len(made) < count:
        pieces = []
        for _ in range(rng.randrange(1, 25)):
            script = rng.choice(list(_SCRIPTS.values()))
            start = rng.randrange(len(script))
            words = script[start : start + rng.randrange(1, 30)]
            pieces.append(words if rng.random() < 0.4 else rng.choice(rng.choice(kinds)))
        made.append(rng.choice(["", "", " "]).join(pieces))
    return made[:count]
