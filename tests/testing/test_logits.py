"""The conformance kit of logits processors: each faulty processor fails the sentence that it breaks."""

import pytest
import torch

from graftlm.contracts import LogitsProcessor
from graftlm.testing import LogitsProcessorConformance, run_conformance

FORM = "`process` returns float32 [V], on the device of its argument."
TOKEN = "At least one logit is not -inf, and none is NaN, so that a token can be sampled."
ALIKE = "The result depends only on the arguments and the creation context: a new processor gives the same logits."
APART = "Processors of two requests are independent: alternating calls give the same logits as separate calls."
KEPT = "Changes to the output and the logits after `process` returned do not change later results."
OUTPUT = "`process` changes neither the output nor the prompt."


class Correct(LogitsProcessor):
    def process(self, output_token_ids, logits):
        return logits


class ReturnsBfloat16(LogitsProcessor):
    def process(self, output_token_ids, logits):
        return logits.to(torch.bfloat16)


class AddsADimension(LogitsProcessor):
    def process(self, output_token_ids, logits):
        return logits[None]


class ForbidsEverything(LogitsProcessor):
    def process(self, output_token_ids, logits):
        return logits.fill_(float("-inf"))


class DividesByTheLength(LogitsProcessor):
    def process(self, output_token_ids, logits):
        return logits * 0 / len(output_token_ids) if len(output_token_ids) else logits * float("nan")


class CountsItsCalls(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def process(self, output_token_ids, logits):
        self.calls += 1
        return logits + self.calls


class SharesTokensBetweenRequests(LogitsProcessor):
    seen = set()  # noqa: RUF012

    def process(self, output_token_ids, logits):
        self.seen.update(output_token_ids.tolist())
        logits[list(self.seen)] -= 1
        return logits


class KeepsTheOutput(LogitsProcessor):
    """Keeps every output array that it got, without copies."""

    def __init__(self):
        self.seen = []

    def process(self, output_token_ids, logits):
        self.seen.append(output_token_ids)
        for tokens in self.seen:
            logits[tokens[-1:].tolist()] -= 1
        return logits


class KeepsTheLogits(LogitsProcessor):
    last = None

    def process(self, output_token_ids, logits):
        smoothed = logits if self.last is None else logits + self.last
        self.last = logits
        return smoothed


class SortsTheOutput(LogitsProcessor):
    def process(self, output_token_ids, logits):
        output_token_ids.sort()
        return logits


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Correct, None),
        (ReturnsBfloat16, FORM),
        (AddsADimension, FORM),
        (ForbidsEverything, TOKEN),
        (DividesByTheLength, TOKEN),
        (CountsItsCalls, ALIKE),
        (SharesTokensBetweenRequests, APART),
        (KeepsTheOutput, KEPT),
        (KeepsTheLogits, KEPT),
        (SortsTheOutput, OUTPUT),
    ],
)
def test_a_faulty_processor_fails_the_sentence_that_it_breaks(broken, sentence):
    class Kit(LogitsProcessorConformance):
        def create(self, context):
            return broken()

    broken_sentences = {result.sentence for result in run_conformance(Kit) if result.error}
    assert broken_sentences == set() if sentence is None else sentence in broken_sentences
