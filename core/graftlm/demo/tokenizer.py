"""The tokenizer of the demo model: byte-level BPE with one token for each digit, and a chat template."""

from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
PAD: Final = "<|pad|>"
END: Final = "<|end|>"
ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS: Final = (BOS, EOS, PAD, *ROLES, END)

_PIECES: Final = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Regular expression that splits text before BPE, similar to GPT-2's, but with each digit as a separate piece."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] | trim + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_len: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with merges learned from texts. It can encode any text, because every byte is a token.

    With `add_special_tokens`, the tokenizer adds `<|bos|>` before a plain text. A rendered chat already starts with
    `<|bos|>`, which is part of the chat template.

    Args:
        texts: the training texts of the tokenizer.
        vocab_size: maximum number of tokens in the vocabulary.
        max_len: the tokenizer's `model_max_length`, in tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A $B",
                special_tokens=[(BOS, core.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[*ROLES, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    )
