"""Prompts of seven kinds from templates, to which a target writes the replies that its drafter learns from.

Words, sentences and templates were written for this recipe. Functions are of the standard library (Python Software
Foundation License). Passages are of its manual and docstrings, or written by the target, which is asked for them first.
Prompt `number` is the same on every machine with the same Python, but for these.
"""

import ast
import pydoc_data.topics
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from text.chats import dedent, fence, summary_of
from text.corpus import parse, path_hash, read_library

Kind = str
LENGTHS = 300, 1400  # characters of a passage
PASSAGE = "<passage>"  # stands for the target's own passage in a prompt
SENTENCES = 2  # of a passage that is translated
FUNCTION_LINES = 4, 40


def split(text: str) -> list[str]:
    """Parts separated by bars."""
    return text.split("|")


TOPICS = split(
    "photosynthesis|gravity|black holes|volcanoes|the water cycle|plate tectonics|DNA|vaccines|antibiotics|sleep|"
    "memory|nuclear energy|solar panels|batteries|electric cars|bicycles|steam engines|the printing press|the "
    "internet|machine learning|neural networks|databases|operating systems|encryption|version control|unit tests|"
    "recursion|the Roman Empire|ancient Egypt|the French Revolution|the Silk Road|the Industrial Revolution|the "
    "Cold War|the moon landing|the Renaissance|democracy|constitutions|human rights|inflation|interest rates|taxes|"
    "budgeting|the stock market|insurance|supply and demand|globalisation|small businesses|remote work|job "
    "interviews|teamwork|leadership|time management|stress|meditation|yoga|running|swimming|strength training|"
    "healthy eating|vitamins|protein|sugar|coffee|tea|bread|cheese|pasta|soup|chocolate|gardening|composting|"
    "houseplants|bees|butterflies|whales|dolphins|penguins|elephants|wolves|cats|dogs|horses|parrots|spiders|trees|"
    "rain forests|deserts|oceans|coral reefs|rivers|glaciers|climate change|recycling|clean water|air pollution|"
    "earthquakes|hurricanes|tornadoes|the solar system|Mars|Jupiter|comets|telescopes|galaxies|time zones|"
    "calendars|maps|the compass|bridges|skyscrapers|trains|aeroplanes|ships|submarines|robots|3D printing|cameras|"
    "films|jazz|classical music|the piano|the guitar|painting|sculpture|poetry|novels|fairy tales|chess|football|"
    "tennis|the Olympic Games|hiking|camping|sailing|travel in Japan|travel in Italy|travel in Kenya|learning a "
    "language|public speaking|writing essays|reading habits|mathematics anxiety|probability|geometry|algebra|prime "
    "numbers|statistics|logic|ethics|friendship|parenting|kindness|courage|honesty|education|libraries|museums|"
    "newspapers|social media|privacy|passwords|email|spreadsheets"
)
PEOPLE = split(
    "a child of eight|a teenager|a new student|a busy manager|my grandmother|a beginner|an engineer|a nurse|a "
    "tourist|a small company|a group of friends|a school class"
)
TONES = split("friendly|formal|funny|short|encouraging|serious|poetic|simple|detailed|persuasive")
NAMES = split(
    "Anna|Ben|Carla|David|Elena|Farid|Grace|Hugo|Ines|Jonas|Kofi|Lina|Marco|Nadia|Omar|Priya|Rosa|Sam|Tom|Yuki"
)
PLACES = split("Lisbon|Nairobi|Oslo|Toronto|Osaka|Lima|Cairo|Vienna|Boston|Mumbai|Sydney|Prague")
THINGS = split("apples|books|pencils|tickets|stamps|marbles|cookies|chairs|bottles|flowers|eggs|coins")
FOREIGN = {
    "German": split(
        "Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung.|Meine Schwester arbeitet seit drei Jahren in "
        "einem Krankenhaus.|Kannst du mir bitte sagen, wo der Bahnhof ist?|Im Winter schneit es in den Bergen oft "
        "mehrere Tage lang.|Die Stadt plant einen neuen Park neben dem alten Rathaus.|Wir haben gestern Abend "
        "zusammen gekocht."
    ),
    "French": split(
        "Le train pour Lyon part à huit heures du matin.|Ma mère prépare un gâteau au chocolat pour mon "
        "anniversaire.|Où se trouve la bibliothèque la plus proche ?|Il fait très froid en hiver dans cette "
        "région.|Nous avons visité un musée intéressant pendant les vacances.|Pouvez-vous m'aider à porter ces "
        "valises ?"
    ),
    "Spanish": split(
        "El tren a Sevilla sale a las nueve de la mañana.|Mi hermano estudia medicina en la universidad.|¿Dónde "
        "está la farmacia más cercana?|En verano vamos a la playa con nuestros amigos.|La ciudad va a construir un "
        "puente nuevo.|Me gusta leer novelas antes de dormir."
    ),
}
TRANSLATION = split(
    "Translate into {language}: {sentences}|Translate into {language}:\n\n{sentences}|Translate the following "
    "sentences into {language}: {sentences}|How do you say this in {language}? {sentences}"
)
ENGLISH = split(
    "Good morning, how are you today?|The library closes at six in the evening.|I would like a cup of coffee and a "
    "piece of cake.|My brother lives in a small house near the river.|Could you tell me the way to the station?|We "
    "are going to the mountains next week.|The children are playing in the garden.|This book was written a hundred "
    "years ago."
)
PROGRAMS = split(
    "reverses a string|counts the vowels in a text|checks whether a number is prime|sorts a list of numbers "
    "without sort()|finds the second largest number of a list|removes duplicates from a list and keeps the order|"
    "merges two sorted lists|computes the factorial of a number|computes Fibonacci numbers|checks whether a word "
    "is a palindrome|counts the words of a file|reads a CSV file and returns a dictionary|finds all anagrams in a "
    "list of words|converts Celsius to Fahrenheit|converts a number to binary|converts a number to Roman numerals|"
    "flattens a nested list|rotates a list by k places|finds the longest common prefix|computes the greatest "
    "common divisor|transposes a matrix|multiplies two matrices|searches a sorted list|implements a stack|"
    "implements a queue|implements a linked list|checks balanced brackets|generates a random password|rolls two "
    "dice|simulates a bank account|downloads a web page|parses a date|validates an email address|prints a "
    "multiplication table|draws a triangle of stars|computes the mean and the median|groups words by their first "
    "letter|finds the shortest path in a graph|solves a quadratic equation|encrypts a text with a Caesar cipher|"
    "finds missing numbers in a sequence|sums the digits of a number"
)
LANGUAGES = ("Python", "Python", "Python", "Python", "JavaScript", "Java", "C++", "C", "Rust", "SQL", "HTML", "Bash")
CHAT = split(
    "What is {topic}?|Tell me about {topic}.|Explain {topic} to {person}.|Why is {topic} important?|Give me five "
    "facts about {topic}.|What are the advantages and disadvantages of {topic}?|How has {topic} changed over time?|"
    "What should {person} know about {topic}?|Compare {topic} and {other}.|What do {topic} and {other} have in "
    "common?|I want to learn about {topic}. Where do I start?|What are common mistakes when dealing with {topic}?|"
    "Can you recommend ways to enjoy {topic}?|Who was important in the history of {topic}?|What is the difference "
    "between {topic} and {other}?|Hi! I'm {name} from {place}. What do you think about {topic}?|Is {topic} good or "
    "bad? Give reasons.|What questions could {person} ask about {topic}?|How does {topic} affect {other}?|Describe "
    "{topic} in one paragraph."
)
WRITING = split(
    "Write a {tone} email to {name} about {topic}.|Write a {tone} poem about {topic}.|Write a short story about "
    "{name}, who lives in {place} and loves {topic}.|Write a {tone} blog post about {topic}.|Write a dialogue "
    "between {name} and {friend} about {topic}.|Write an essay on {topic} and {other}.|Write a {tone} speech about "
    "{topic} for {person}.|Make an outline of a lesson on {topic} for {person}.|Write a {tone} product description "
    "of something for {topic}.|Write a letter from {name} to {friend} describing a day in {place}.|Write a {tone} "
    "advertisement about {topic}.|Write a list of ten ideas for a project about {topic}.|Write a {tone} review of "
    "a book about {topic}.|Plan a weekend in {place} for {person}.|Write a haiku about {topic}.|Continue this "
    "story: {name} opened the old box and found"
)
MATHS = split(
    "{name} has {a} {things} and buys {b} more. Then {name} gives {c} to {friend}. How many {things} does {name} "
    "have now?|A shop sells {things} for ${c} each. How much do {a} {things} cost?|What is {a} plus {b}?|What is "
    "{a} times {c}?|A train travels {a} miles per hour for {c} hours. How far does it go?|{name} reads {c} pages a "
    "day. How many days does a book of {b} pages take?|The sum of two numbers is {b} and one of them is {a}. What "
    "is the other?|A rectangle is {a} cm long and {c} cm wide. What are its area and its perimeter?|What is {c} "
    "percent of {b}?|{name} earns ${a} a day and spends ${c}. How much is left after {b} days?|Solve for x: {c}x + "
    "{a} = {b}|{a} {things} are shared by {c} friends. How many does each get, and how many are left?|What is the "
    "average of {a}, {b} and {c}?|If {c} {things} cost ${a}, how much do {b} {things} cost? Show your work."
)
EXTRACTION = split(
    "Extract the names, places and numbers from this text as a list: {note}|Who is mentioned in this text, and "
    "what do they do? {note}|Answer from the text. Where does {name} live?\n\n{note}|Return this as JSON with the "
    "keys name, city and items: {note}|Turn this text into a table: {note}|Is this review positive or negative? "
    '"{review}"|Classify each word as animal, plant or thing: {words}|List the key points of this '
    "text:\n\n{passage}|Find all dates, names and technical terms in this text:\n\n{passage}|Answer briefly: what "
    "is this text about?\n\n{passage}"
)
SUMMARY = split(
    "Summarize: {passage}|Summarize this text in two sentences.\n\n{passage}|Write a summary of the following "
    "text:\n\n{passage}|What are the main points?\n\n{passage}|Rewrite this text for {person}:\n\n{passage}|Make "
    "this text shorter:\n\n{passage}|Give this text a title and explain it:\n\n{passage}"
)
REVIEWS = split(
    "The food was cold and we waited an hour.|Best phone I have ever owned, the battery lasts two days.|The plot "
    "was boring, but the music was lovely.|I would stay in this hotel again: quiet rooms, kind people.|It broke "
    "after a week."
)
WORDS = split("cat|oak|table|rose|spoon|horse|fern|lamp|eagle|tulip|bicycle|frog|pine|chair|shark|daisy|window|goat")

SOURCES = split(
    "Write a paragraph about {topic}.|Write four sentences about {topic} and {other}.|Describe an ordinary day of "
    "{name} in {place}.|Write a short message from {name} to {friend} about {topic}.|Write a short news item about "
    "{topic} in {place}.|Explain {topic} to {person} in five sentences.|Tell a short story about {name} and {friend} "
    "in {place}."
)

Writer = Callable[[Random], str]


@dataclass(frozen=True)
class Prompt:
    """A user's message. source : what the target is asked first if `text` has PASSAGE, which the answer replaces"""

    kind: Kind
    text: str
    source: str = ""

    def completed(self, answer: str) -> str:
        """The text with the target's answer to `source`: the beginning of it, or some sentences to translate."""
        sentences = re.findall(r"[^.!?]+[.!?]*", answer)
        part = "".join(sentences[:SENTENCES]) if self.kind == "translation" else answer
        return self.text.replace(PASSAGE, part[: LENGTHS[1]].strip())


def prompt(number: int) -> Prompt:
    """Prompt `number`."""
    random = Random(f"prompt {number}")
    passages(), functions()
    kind = random.choice(sorted(WRITERS))
    text = WRITERS[kind](random)
    return Prompt(kind, text, filled(SOURCES)(random) if PASSAGE in text else "")


def filled(templates: Sequence[str]) -> Writer:
    """A writer that fills one of the templates with random words."""

    def write(random: Random) -> str:
        topic, other = random.sample(TOPICS, 2)
        name, friend = random.sample(NAMES, 2)
        place, things = random.choice(PLACES), random.choice(THINGS)
        a, c = random.randint(12, 99), random.randint(2, 12)
        note = (
            f"{name} lives in {place} and has {a} {things}. {friend} works in a shop for {topic} and sold {c} of them."
        )
        return random.choice(templates).format(
            topic=topic,
            other=other,
            name=name,
            friend=friend,
            place=place,
            things=things,
            person=random.choice(PEOPLE),
            tone=random.choice(TONES),
            a=a,
            b=random.randint(100, 400),
            c=c,
            note=note,
            review=random.choice(REVIEWS),
            words=", ".join(random.sample(WORDS, 6)),
            passage=random.choice((PASSAGE, random.choice(passages()))),
        )

    return write


def translation(random: Random) -> str:
    """A sentence or two to translate, from English or into it."""
    language = random.choice(sorted(FOREIGN))
    if random.random() < 0.4:
        return f"Translate {language} to English: {' '.join(random.sample(FOREIGN[language], 2))}"
    sentences = random.choice((PASSAGE, PASSAGE, " ".join(random.sample(ENGLISH, 2))))
    return random.choice(TRANSLATION).format(language=language, sentences=sentences)


def code(random: Random) -> str:
    """A program to write, or a function of the standard library to complete, explain or test."""
    if random.random() < 0.4:
        return f"Write a {random.choice(LANGUAGES)} program that {random.choice(PROGRAMS)}."
    signature, body = random.choice(functions())
    form = random.choice(
        ("Complete this function:\n{0}", "{0}", "What does this function do?\n{1}", "Write tests for:\n{1}")
    )
    return form.format(signature if form == "{0}" else fence(signature.split("\n")), fence(body.split("\n")))


@cache
def library() -> list[tuple[list[str], ast.Module]]:
    """Lines and syntax trees of a quarter of the library's modules, which is enough and read in seconds."""
    modules = [module for module in read_library() if path_hash(module.path) % 4 == 1 and "<|" not in module.text]
    parsed = [(module.text.split("\n"), parse(module.text)) for module in modules if not module.is_test]
    return [(lines, tree) for lines, tree in parsed if tree is not None]


@cache
def passages() -> tuple[str, ...]:
    """Paragraphs of Python's manual and of the docstrings of its library."""
    texts = [part for text in pydoc_data.topics.topics.values() for part in text.split("\n\n\n")]
    for _, tree in library():
        documented = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        texts += [ast.get_docstring(node) or "" for node in documented]
    return tuple(text.strip() for text in texts if LENGTHS[0] <= len(text.strip()) <= LENGTHS[1] and "<|" not in text)


@cache
def functions() -> tuple[tuple[str, str], ...]:
    """Functions of the library with a docstring: what stands before the body, and the whole."""
    found = []
    for lines, tree in library():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and summary_of(node) and len(node.body) > 1:
                whole = dedent(lines[node.lineno - 1 : node.end_lineno], node.col_offset)
                if FUNCTION_LINES[0] <= len(whole) <= FUNCTION_LINES[1]:
                    opening = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
                    found.append(("\n".join(whole[:opening]) + "\n", "\n".join(whole)))
    return tuple(found)


WRITERS: dict[Kind, Writer] = {
    "chat": filled(CHAT),
    "code": code,
    "extraction": filled(EXTRACTION),
    "maths": filled(MATHS),
    "summary": filled(SUMMARY),
    "translation": translation,
    "writing": filled(WRITING),
}
