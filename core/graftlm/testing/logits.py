"""The conformance kit for logits processors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from graftlm.contracts import LogitsContext, LogitsProcessor
from graftlm.testing.conformance import Conformance
from graftlm.types import TokenIds

__all__ = ["LogitsProcessorConformance"]

_VOCAB_SIZE: Final = 300


class LogitsProcessorConformance(Conformance, ABC):
    """The kit for the contract `LogitsProcessor`, on a CPU.

        class TestMyProcessor(LogitsProcessorConformance):
            def create(self, context):
                return MyProcessor()

    Attributes:
        parameters: `seed` is the seed of the random prompt, the output and each step's logits.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"seed": (0, 1, 2)}

    @abstractmethod
    def create(self, context: LogitsContext) -> LogitsProcessor:
        """Return a new processor. The engine creates a processor each time it admits a request."""

    def test_logits_keep_their_form(self, seed: int) -> None:
        """`process` returns float32 [V], on the device of its argument."""
        run = _Run(seed)
        processor = self.create(run.context)
        for length in range(len(run.output) + 1):
            logits = processor.process(run.output[:length], run.logits(length))
            assert logits.shape == (_VOCAB_SIZE,), f"expected [{_VOCAB_SIZE}], got {list(logits.shape)}"
            assert logits.dtype is torch.float32, f"expected float32, got {logits.dtype}"
            assert logits.device.type == "cpu", f"logits moved to {logits.device}"

    def test_a_token_remains(self, seed: int) -> None:
        """At least one logit is not -inf, and none is NaN, so that a token can be sampled."""
        run = _Run(seed)
        processor = self.create(run.context)
        for length in range(len(run.output) + 1):
            logits = processor.process(run.output[:length], run.logits(length))
            assert not bool(logits.isnan().any()), f"a logit is NaN after {length} tokens"
            assert bool((logits > float("-inf")).any()), f"all logits are -inf after {length} tokens"

    def test_a_retracted_request_gets_the_same_logits(self, seed: int) -> None:
        """The result depends only on the arguments and the creation context: a new processor gives the same logits."""
        run = _Run(seed)
        processor = self.create(run.context)
        for length in range(len(run.output) + 1):
            expected = processor.process(run.output[:length], run.logits(length)).clone()
            anew = self.create(run.context).process(run.output[:length], run.logits(length))
            assert torch.equal(anew, expected), f"logits differ after a retraction at {length} tokens"

    def test_requests_know_nothing_of_each_other(self, seed: int) -> None:
        """Processors of two requests are independent: alternating calls give the same logits as separate calls."""
        runs = (_Run(seed), _Run(seed + 100))
        alone = [run.all_logits(self.create(run.context)) for run in runs]
        processors = [self.create(run.context) for run in runs]
        for length in range(len(runs[0].output) + 1):
            for run, processor, expected in zip(runs, processors, alone, strict=True):
                got = processor.process(run.output[:length], run.logits(length))
                assert torch.equal(got, expected[length]), f"logits depend on another request, at {length} tokens"

    def test_arrays_belong_to_the_caller(self, seed: int) -> None:
        """Changes to the output and the logits after `process` returned do not change later results."""
        run = _Run(seed)
        expected, processor = run.all_logits(self.create(run.context)), self.create(run.context)
        for length in range(len(run.output) + 1):
            output, logits = run.output[:length].copy(), run.logits(length)
            got = processor.process(output, logits)
            assert torch.equal(got, expected[length]), f"logits depend on arrays of earlier steps, at {length} tokens"
            output.fill(0)
            logits.zero_()
            got.zero_()

    def test_the_output_is_not_changed(self, seed: int) -> None:
        """`process` changes neither the output nor the prompt."""
        run = _Run(seed)
        prompt, output = run.context.prompt_token_ids.copy(), run.output.copy()
        run.all_logits(self.create(run.context))
        assert np.array_equal(run.output, output), "the output was changed"
        assert np.array_equal(run.context.prompt_token_ids, prompt), "the prompt was changed"


class _Run:
    """One random request: a prompt, an output, and the logits of each step, float32 [V]."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        prompt = draw.integers(0, _VOCAB_SIZE, 12, dtype=np.int32)
        self.context = LogitsContext(_VOCAB_SIZE, prompt)
        self.output: TokenIds = draw.integers(0, _VOCAB_SIZE, 8, dtype=np.int32)
        self._seed = seed

    def logits(self, step: int) -> Tensor:
        return torch.randn(_VOCAB_SIZE, generator=torch.Generator().manual_seed(1000 * self._seed + step))

    def all_logits(self, processor: LogitsProcessor) -> list[Tensor]:
        lengths = range(len(self.output) + 1)
        return [processor.process(self.output[:length], self.logits(length)).clone() for length in lengths]
