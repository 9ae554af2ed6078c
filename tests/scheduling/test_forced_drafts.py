"""Drafts of forced text: where they come from, and what switches them off."""

from concurrent.futures import Future

import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.scheduling import ForcedDrafts, RequestGrammar
from graftlm.scheduling.drafting import Drafting
from graftlm.speculation import Speculator
from graftlm.testing import FakeGrammarBackend
from graftlm.testing.drafter import AllDrafts
from graftlm.types import SamplingParams

VOCAB = 50
LETTERS = [chr(ord("A") + i) for i in range(VOCAB - 1)]
BACKEND = FakeGrammarBackend([*LETTERS, ""], VOCAB, [VOCAB - 1])


class Encoder:
    """Encodes each letter as a token, and notes the texts. It raises an error instead, if it has one."""

    def __init__(self, error=None):
        self.error = error
        self.texts = []

    def encode_inside(self, text):
        self.texts.append(text)
        if self.error is not None:
            raise self.error
        return [LETTERS.index(letter) for letter in text]


class Panic(BaseException):
    """An exception like those that Rust libraries raise for a panic."""


def constrained(rig, words="A B C", max_new_tokens=4, **params):
    compiling = Future()
    compiling.set_result(BACKEND.compile(GrammarSpec(GrammarKind.EBNF, words)))
    grammar = RequestGrammar(compiling, lambda: 1000.0, VOCAB, BACKEND.fill_bitmasks)
    grammar.start(0.0)
    return rig.make_request("r", [1, 2], max_new_tokens, grammar=grammar, params=SamplingParams(**params))


def test_the_tokens_of_forced_text_are_drafted(make_rig):
    encoder = Encoder()
    forced = ForcedDrafts(encoder)
    for _ in range(2):
        draft = forced.of(constrained(make_rig()))
        assert (draft.drafter, draft.token_ids.tolist()) == ("grammar", [0, 1, 2])
    assert encoder.texts == ["ABC"]
    assert forced.of(constrained(make_rig(), "AB C")) is None
    assert forced.of(make_rig().make_request("free", [1, 2])) is None


@pytest.mark.parametrize("name", ["jump_forward", "speculation"])
@pytest.mark.parametrize("value", [None, True, False])
def test_a_request_may_decline_drafts_of_forced_text(make_rig, name, value):
    draft = ForcedDrafts(Encoder()).of(constrained(make_rig(), **{name: value}))
    assert (draft is None) == (value is False)


@pytest.mark.parametrize("max_drafts", [1, 2, 4])
def test_at_most_max_drafts_tokens_of_forced_text_are_drafted(make_rig, max_drafts):
    request = constrained(make_rig(), "A B C D E F", max_new_tokens=20)
    request.row = 0
    drafting = Drafting(Speculator({}, max_drafts, VOCAB, AllDrafts(max_drafts)), ForcedDrafts(Encoder()))
    (draft,) = drafting.draft([request]).values()
    assert draft.token_ids.tolist() == list(range(max_drafts))
    assert drafting.is_worth_waiting([request])  # the step in flight samples the first drafted token


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), Panic("oops")])
def test_a_tokenizer_that_fails_drafts_nothing_and_is_not_asked_again(make_rig, caplog, error):
    encoder = Encoder(error)
    forced = ForcedDrafts(encoder)
    assert [forced.of(constrained(make_rig())) for _ in range(3)] == [None] * 3
    assert encoder.texts == ["ABC"]
    assert f"the tokenizer failed: {type(error).__name__}: oops" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_of_the_tokenizer_is_raised(make_rig, error):
    with pytest.raises(type(error)):
        ForcedDrafts(Encoder(error)).of(constrained(make_rig()))
