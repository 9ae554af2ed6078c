"""A tokenizer whose tokens are bytes, so that tests can use texts."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from graftlm.contracts import GrammarContext, GrammarKind, GrammarSpec
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.xgrammar_backend import XGrammarBackend

END = 256


def byte_tokenizer():
    """Return a tokenizer whose token ids are bytes, and END."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    vocab = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


class Texts:
    """Returns the texts that a specification accepts."""

    def __init__(self, backend):
        self.backend = backend

    def matcher(self, kind, text):
        return self.backend.compile(GrammarSpec(GrammarKind(kind), text)).matcher()

    def accepted(self, kind, text, texts):
        return self.accepted_by_spec(GrammarSpec(GrammarKind(kind), text), texts)

    def accepted_by_spec(self, spec, texts):
        compiled = self.backend.compile(spec)
        return [one for one in texts if self._accepts(compiled.matcher(), one)]

    def accepted_by_schema(self, schema, texts):
        return self.accepted("json_schema", json.dumps(schema), texts)

    def _accepts(self, matcher, text):
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(END)


@pytest.fixture(scope="session")
def byte_context():
    """A grammar context with a vocabulary of bytes and END."""
    return GrammarContext(byte_tokenizer().to_str(), 257, (END,))


@pytest.fixture(scope="session")
def texts_of():
    """Return a function from a backend to its `Texts`."""
    return Texts


@pytest.fixture(scope="session")
def texts_with(byte_context):
    """Return a function from options to `Texts`."""
    return lambda options: Texts(XGrammarBackend(options, byte_context))


@pytest.fixture(scope="session")
def texts(texts_with):
    return texts_with(XGrammarOptions())


@pytest.fixture(scope="session")
def byte_backend(texts):
    return texts.backend
