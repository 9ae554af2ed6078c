import json

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from graftlm.tokenization import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not known') }}{% endif %}"
    "<{{ message.role }}>{{ message.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)
TEXTS = [
    "hello world, the quick brown fox",
    "你好 é 😀 stop here",
    "a b c  double  spaces\n\ttabs",
    "\ufffd is a character too",
]


def byte_level_core():
    """A byte-level BPE over all 256 bytes that adds <s> at the beginning."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return core


def byte_fallback_core():
    """A BPE like sentencepiece: spaces are part of words, and unknown characters become byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"abcdefgh"]
    words = ["▁a", "▁b", "ab", "▁ab"]
    vocab = {piece: i for i, piece in enumerate(pieces + words)}
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "b")]
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>", "</s>"])
    return core


def byte_pieces_core():
    """All single bytes, and pieces that begin or end within a character, which also occur in byte-level
    vocabularies.
    """
    characters = bytes_to_unicode()
    spans = ["98 80 f0 9f", "80 e4", "bd a0 e4", "9f 98", "80 ff", "ef bf bd", "bf bd ef", "f0 9f 98", "61 62"]
    pieces = [bytes([byte]) for byte in range(256)] + [bytes.fromhex(span) for span in spans]
    vocab = {"".join(characters[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    core = Core(models.BPE(vocab, []))
    core.decoder = decoders.ByteLevel()
    return core


def save(core, folder, **config):
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory):
    return save(byte_level_core(), tmp_path_factory.mktemp("byte_level"), chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def byte_level(byte_level_folder):
    return Tokenizer.load(byte_level_folder)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory):
    return Tokenizer.load(save(byte_fallback_core(), tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="session")
def byte_pieces():
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_pieces_core()))
