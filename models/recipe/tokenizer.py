"""The tokenizer: byte-level BPE of 4096 tokens with Gemma's special tokens and chat template."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
PAD, EOS, BOS, UNK, TURN_START, TURN_END = range(len(SPECIALS))

# A line break takes the indentation after it along; words take one leading space; digits stand in groups of three.
SPLIT = r"\n[\n ]*| {2,}(?=\S)|'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\p{N}{1,3}| ?_+| ?[^\s\p{L}\p{N}_]+|\s+"

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<|turn>' + role + '\\n' + (message['content'] | trim) + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn>model\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE over `texts` that round-trips any UTF-8 and puts `<bos>` in front."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=2,
            max_token_length=24,
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(directory)
