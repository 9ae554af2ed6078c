"""Jump-forward with a real tokenizer and a real grammar backend, on a device that samples at random.

The device samples at random, and its tokens depend on its pages: if a token is computed twice, not at all, or after a
token that has been replaced, all later tokens change.
"""

import itertools
import json
import re
from concurrent.futures import Future
from functools import cache

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from graftlm.contracts import GrammarContext, GrammarKind, GrammarSpec
from graftlm.demo import demo_checkpoint
from graftlm.outputs import CompletionText
from graftlm.scheduling import JumpForward, RequestGrammar
from graftlm.testing.fake_device import expected_token
from graftlm.tokenization import TextStream, Tokenizer
from graftlm.types import FinishReason, SamplingParams
from graftlm_grammar.options import XGrammarOptions
from graftlm_grammar.xgrammar_backend import XGrammarBackend

PARAMS = SamplingParams()
SUMMARY = r'\{"summary": "[a-z ]{1,12}", "grade": "[ABCD][+\-]?"\}'
REGEXES = (
    SUMMARY,
    r"yes|yesterday|no",
    r"é{2}ü(日本|日曜)[a-c]{2}🎉🎉",
    r"(name|names|named): [0-9]{1,3}(, (name|names|named): [0-9]{1,3}){3}",
    r" {3}x {2}y|   xz",
    r"The quick brown fox jumps over the lazy dog, [a-z]{3}\.",
    r"[ab]{20}",
)


@cache
def demo_tokenizer():
    return Tokenizer.load(demo_checkpoint())


@cache
def sentencepiece_tokenizer():
    """A tokenizer that writes a blank before a text and encodes unknown characters as bytes, like Llama 2's."""
    pieces = set("abcdefghijklmnopqrstuvwxyz0123456789" + '{}":,.+-ABCDT_' + "▁")
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(sorted(pieces))}
    merges = _merges('ye yes ▁yes te ter da day terday yester yesterday ▁yesterday {" ": na nam name ▁name su', vocab)
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>"))


@cache
def byte_level_tokenizer():
    """A tokenizer of bytes, with merges across the border between forced and free text."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = _merges('{" ": na me name names named Ġ" es ye yes te ter da day terday yesterday ĠĠ Ġx Ã© Ã©Ã©', vocab)
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["</s>"])
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"))


def _merges(pieces, vocab):
    """Add pieces, each the concatenation of two existing ones, and return the merges."""
    merges = []
    for piece in pieces.split():
        cut = max(n for n in range(1, len(piece)) if piece[:n] in vocab and piece[n:] in vocab)
        merges.append((piece[:cut], piece[cut:]))
        vocab[piece] = len(vocab)
    return merges


TOKENIZERS = {
    "demo": demo_tokenizer,
    "byte-level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}


@cache
def backend(name):
    tokenizer = TOKENIZERS[name]()
    context = GrammarContext(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.eos_token_ids)
    return XGrammarBackend(XGrammarOptions(), context)


@cache
def compiled(name, regex):
    return backend(name).compile(GrammarSpec(GrammarKind.REGEX, regex))


def grammar(name, regex):
    future = Future()
    future.set_result(compiled(name, regex))
    return RequestGrammar(future, lambda: 1e9, TOKENIZERS[name]().vocab_size, backend(name).fill_bitmasks)


class JumpRig:
    """A rig with a tokenizer; it counts sampled and forced tokens."""

    def __init__(self, make_rig, name, jump=True, **fields):
        self.name, self.tokenizer = name, TOKENIZERS[name]()
        jump_forward = JumpForward(self.tokenizer) if jump else None
        self.rig = make_rig(vocab_size=self.tokenizer.vocab_size, jump_forward=jump_forward, **fields)
        self.regexes = {}

    def add(self, request_id, prompt, regex, max_new_tokens=200, params=PARAMS, **fields):
        watch = TextStream(self.tokenizer, params) if params.stop_strings else None
        self.regexes[request_id] = regex
        stop = self.tokenizer.eos_token_ids
        self.rig.add(
            request_id, prompt, max_new_tokens, grammar=grammar(self.name, regex), params=params, stop=stop,
            stop_watch=watch, **fields,
        )  # fmt: skip

    def text(self, request_id):
        """Return the text that the user gets, piece by piece."""
        params = self.rig.requests[request_id].params
        text = CompletionText(TextStream(self.tokenizer, params), params.include_stop)
        return "".join([text.push(update) for update in self.rig.updates[request_id]])

    def sampled(self, request_id):
        """Return the indices of the final tokens that were sampled."""
        kinds = []
        for update in self.rig.updates[request_id]:
            del kinds[len(kinds) - update.num_dropped :]
            kinds += [not update.forced_text] * len(update.token_ids)
        return [i for i, is_sampled in enumerate(kinds) if is_sampled]

    def assert_right(self, request_id):
        request, tokens = self.rig.requests[request_id], self.rig.tokens[request_id]
        finish, text = self.rig.finish(request_id), self.text(request_id)
        assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH), finish
        is_stop_string = isinstance(finish.matched_stop, str)
        if finish.reason is FinishReason.STOP and not is_stop_string:
            assert re.fullmatch(self.regexes[request_id], text), text
        if finish.reason is FinishReason.LENGTH:
            assert len(tokens) == request.max_new_tokens
        visible = [token_id for token_id in tokens if token_id not in self.tokenizer.eos_token_ids]
        if not is_stop_string:
            stream = TextStream(self.tokenizer, SamplingParams())
            decoded = stream.push(visible).text + stream.finish()
            # a decoder may drop a blank that the grammar requires first
            assert decoded in (text, text.removeprefix(" "))
        self.assert_sampled_right(request_id)
        assert finish.reason is not None
        last = self.rig.updates[request_id][-1]
        assert last.usage.completion_tokens == len(tokens)
        assert last.usage.jump_forward_tokens == request.jump_forward_tokens

    def assert_sampled_right(self, request_id):
        """Assert that sampled tokens equal those of a run without jump-forward after the same tokens."""
        request, tokens = self.rig.requests[request_id], self.rig.tokens[request_id]
        matcher = compiled(self.name, self.regexes[request_id]).matcher()
        bits = np.zeros((1, -(-self.tokenizer.vocab_size // 32)), dtype=np.int32)
        prompt = request.prompt_token_ids.tolist()
        sampled = set(self.sampled(request_id))
        for i, token_id in enumerate(tokens):
            if i in sampled:
                matcher.fill_bitmask(bits, 0)
                assert token_id == expected_token(prompt + tokens[:i], self.tokenizer.vocab_size, bits[0]), i
            assert matcher.accept(token_id)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("page_size", "chunk", "overlap"), [(1, 7, False), (1, 64, True), (4, 64, False), (4, 3, True), (16, 7, True)]
)
def test_outputs_are_valid_and_free_choices_equal_the_devices(make_rig, name, page_size, chunk, overlap):
    rig = JumpRig(
        make_rig, name, num_pages=4096 // page_size, page_size=page_size, prefill_tokens=chunk, overlap=overlap
    )
    for i, regex in enumerate(REGEXES * 3):
        rig.add(f"r{i}", [1 + i, *range(3, 12)], regex)
        rig.rig.step()
    rig.rig.run()
    for request_id in rig.rig.requests:
        rig.assert_right(request_id)
    assert rig.rig.scheduler.counters.jump_forward_tokens > 100
    assert rig.rig.scheduler.kv.usage.owned == rig.rig.scheduler.kv.usage.locked == 0


@pytest.mark.covering
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("page_size", "overlap"), list(itertools.product([1, 4], [False, True])))
def test_retractions_do_not_change_the_output(make_rig, name, page_size, overlap):
    rig = JumpRig(make_rig, name, num_pages=144 // page_size, page_size=page_size, overlap=overlap)
    for i in range(20):
        rig.add(f"r{i}", [1 + i, *range(3, 20)], r"([ab]{4}, and then ){6}name(s|d)?!", max_new_tokens=120)
    rig.rig.run()
    for request_id in rig.rig.requests:
        rig.assert_right(request_id)
    assert rig.rig.scheduler.counters.retractions > 0
    assert rig.rig.scheduler.kv.usage.owned == rig.rig.scheduler.kv.usage.locked == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_jump_forward_takes_fewer_steps(make_rig, overlap):
    steps = {}
    for jump in (False, True):
        rig = JumpRig(make_rig, "demo", jump, overlap=overlap)
        for i in range(20):
            rig.add(f"r{i}", [i, 5, 6], SUMMARY)
            rig.rig.run()
        steps[jump] = rig.rig.scheduler.counters.steps
    assert steps[False] > 1.6 * steps[True], steps


@pytest.mark.parametrize("name", ["demo", "byte-level"])
def test_forced_text_is_encoded_as_by_the_tokenizer(make_rig, name):
    rig = JumpRig(make_rig, name)
    sentence = "The quick brown fox jumps over the lazy dog"
    rig.add("r", [1, 2, 3], f"{sentence}[.!]")
    rig.rig.run()
    tokens = rig.tokenizer.encode_inside(sentence)
    assert rig.rig.tokens["r"][: len(tokens)] == tokens
    assert len(rig.sampled("r")) <= 3


def test_a_token_that_merges_with_forced_text_is_replaced(make_rig):
    """If the device samples the start of a word with only one possible continuation, the word's own token replaces
    it.
    """
    replaced = 0
    for i in range(30):
        rig = JumpRig(make_rig, "byte-level")
        rig.add("r", [i, 9], r"[xy]?(names)[xy]")
        rig.rig.run()
        rig.assert_right("r")
        replaced += any(update.num_dropped for update in rig.rig.updates["r"])
        assert rig.tokenizer.encode_inside("names")[0] in rig.rig.tokens["r"]
    assert replaced > 5


def test_a_token_that_may_become_longer_is_left_to_the_device(make_rig):
    """After "yes" follows an end or "terday": the device chooses between the tokens "yes" and "yesterday"."""
    ends = set()
    for i in range(40):
        rig = JumpRig(make_rig, "byte-level")
        rig.add("r", [i, 9], "(yes|yesterday)!")
        rig.rig.run()
        rig.assert_right("r")
        ends.add(tuple(rig.rig.tokens["r"]))
    encode = rig.tokenizer.encode_inside
    assert tuple(encode("yesterday!")) in {tokens[:-1] for tokens in ends}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limit", range(1, 25))
def test_max_tokens_within_forced_text_is_kept(make_rig, overlap, limit):
    rig = JumpRig(make_rig, "demo", overlap=overlap)
    rig.add("r", [1, 2], SUMMARY, max_new_tokens=limit)
    rig.rig.run()
    rig.assert_right("r")
    assert len(rig.rig.tokens["r"]) <= limit


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop", ["grade", 'y": "', '", "g', '"}', "mar"])
def test_stop_strings_within_forced_text_end_the_output(make_rig, overlap, stop):
    rig = JumpRig(make_rig, "demo", overlap=overlap)
    for i in range(5):
        rig.add(f"r{i}", [i, 2], SUMMARY, params=SamplingParams(stop=stop))
    rig.rig.run()
    for i in range(5):
        text, finish = rig.text(f"r{i}"), rig.rig.finish(f"r{i}")
        assert finish.matched_stop == stop
        assert stop not in text
        assert re.fullmatch(SUMMARY, text + stop + _rest(text + stop))


def _rest(text):
    """Return an ending that completes a truncated summary."""
    head, grade = '{"summary": "', re.search(r'[ABCD][+\-]?(?="?\}?$)', text)
    tail = f'", "grade": "{grade[0] if grade else "A"}"}}'
    if len(text) <= len(head):
        return (head + "a" + tail)[len(text) :]
    return next(tail[n:] for n in range(len(tail), -1, -1) if text.endswith(tail[:n]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_at_any_step_frees_everything(make_rig, overlap, num_steps):
    rig = JumpRig(make_rig, "demo", overlap=overlap, prefill_tokens=8)
    rig.add("victim", range(12), SUMMARY)
    rig.add("other", range(12), SUMMARY)
    for _ in range(num_steps):
        rig.rig.step()
    rig.rig.loop.abort("victim", "gone")
    rig.rig.run()
    rig.assert_right("other")
    rig.assert_sampled_right("victim")
    assert rig.rig.scheduler.kv.usage.owned == rig.rig.scheduler.kv.usage.locked == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad_step", range(4))
def test_a_failed_step_fails_only_its_requests(make_rig, overlap, bad_step):
    rig = JumpRig(make_rig, "demo", overlap=overlap, num_rows=2)
    rig.rig.device.fail_steps = {bad_step}
    for i in range(6):
        rig.add(f"r{i}", [*range(9), i], SUMMARY)
    rig.rig.run()
    failed = [r for r in rig.rig.requests if rig.rig.finish(r).reason is FinishReason.ERROR]
    assert 1 <= len(failed) <= 2
    for request_id in rig.rig.requests:
        if request_id not in failed:
            rig.assert_right(request_id)


def test_requests_with_logprobs_sample_every_token(make_rig):
    rig = JumpRig(make_rig, "demo")
    rig.add("r", [1, 2], SUMMARY, params=SamplingParams(logprobs=0))
    rig.rig.run()
    rig.assert_right("r")
    assert rig.sampled("r") == list(range(len(rig.rig.tokens["r"])))


def test_a_record_of_twenty_keys_needs_fewer_steps(make_rig):
    keys = [f"field_{i:02}" for i in range(20)]
    regex = r"\{" + ", ".join(f'"{key}": [1-9]{{2}}' for key in keys) + r"\}"
    steps = {}
    for jump in (False, True):
        rig = JumpRig(make_rig, "demo", jump, num_pages=1024)
        rig.add("r", [1, 2, 3], regex, max_new_tokens=600)
        rig.rig.run()
        rig.assert_right("r")
        steps[jump] = rig.rig.scheduler.counters.steps
        assert list(json.loads(rig.text("r"))) == keys
    assert steps[False] > 1.6 * steps[True], steps


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("limit", [1, 2, 3, 9, 57])
def test_forced_text_is_appended_up_to_the_limit_of_the_output(make_rig, name, limit):
    rig = JumpRig(make_rig, name)
    text = "Paris is the capital of France and " * 12
    rig.add("a", [1, 2, 3], text, max_new_tokens=limit)
    rig.rig.run()
    assert text.startswith(rig.text("a").rstrip("\ufffd"))
    assert len(rig.rig.tokens["a"]) == limit
    assert rig.rig.finish("a").reason is FinishReason.LENGTH
    assert len(rig.sampled("a")) <= max(2, limit // 3)
