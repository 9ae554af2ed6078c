import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from graftlm.execution.runner import ModelRunner
from graftlm.execution.sampler import Sampler
from graftlm.plan import PoolSpan, PromptLogprobSpan, RowSetup, StepPlan
from graftlm.pooling.pooling import LAST, MEAN
from graftlm.types import SamplingParams

CPU = torch.device("cpu")


class NoAttention:
    """A backend for models without attention."""

    def prepare(self, batch):
        pass


class TokenItself:
    """A model whose hidden state of a token is (1, its id); a call of `logits` is an error."""

    selects_tokens = False

    def __init__(self, dtype):
        self._dtype = dtype

    def forward(self, batch):
        return torch.stack([torch.ones_like(batch.input_ids), batch.input_ids], dim=1).to(self._dtype)


class NextToken(TokenItself):
    """A model that predicts each token's successor, and counts the positions whose logits are computed."""

    def __init__(self, vocab_size):
        super().__init__(torch.float32)
        self._vocab_size = vocab_size
        self.asked = []

    def logits(self, hidden):
        self.asked.append(hidden[:, 1].to(torch.int64).tolist())
        return torch.nn.functional.one_hot(hidden[:, 1].to(torch.int64) + 1, self._vocab_size).float()


def plan_of(prompts, spans, prompt_spans=()):
    """Return the plan of a first step with some prompts, none of which samples."""
    lens = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    num_tokens = int(lens.sum())
    return StepPlan(
        step_id=0,
        rows=np.arange(len(prompts), dtype=np.int32),
        query_lens=lens,
        seq_lens=lens,
        page_table=np.zeros((len(prompts), num_tokens), dtype=np.int32),
        input_ids=np.concatenate([np.array(prompt, dtype=np.int64) for prompt in prompts]),
        device_idx=np.empty(0, dtype=np.int64),
        positions=np.concatenate([np.arange(n) for n in lens]),
        out_slots=np.arange(num_tokens),
        num_decodes=0,
        sample_idx=np.empty(0, dtype=np.int64),
        sample_positions=np.empty(0, dtype=np.int64),
        pool_spans=spans,
        prompt_spans=prompt_spans,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_summed_in_float32_and_nothing_is_sampled(dtype):
    spans = (PoolSpan(1, MEAN, 3, 1001, is_last=False), PoolSpan(0, LAST, 2, 1, is_last=True))
    runner = ModelRunner(TokenItself(dtype), NoAttention(), Sampler(4, 300, CPU, None), 4, CPU)
    result = runner.run(plan_of([[5, 6, 7], [3] * 1001], spans))
    assert [vector.tolist() for vector in result.pooled] == [[1001, 3003], [1, 7]]
    assert {vector.dtype for vector in result.pooled} == {np.dtype(np.float32)}
    assert len(result.token_ids) == 0


def test_a_step_without_pooling_returns_no_vectors():
    runner = ModelRunner(TokenItself(torch.float32), NoAttention(), Sampler(4, 300, CPU, None), 4, CPU)
    assert runner.run(plan_of([[5, 6]], ())).pooled == ()


def test_logits_of_all_prompts_are_computed_in_one_call():
    model = NextToken(vocab_size=10)
    runner = ModelRunner(model, NoAttention(), Sampler(4, 10, CPU, None), 4, CPU)
    spans = (
        PromptLogprobSpan(0, 1, np.array([3, 9]), num_top=0),
        PromptLogprobSpan(2, 6, np.array([8]), num_top=2),
    )
    result = runner.run(plan_of([[1, 2, 3], [4, 5], [6, 7]], (), spans))
    assert model.asked == [[2, 3, 7]]
    log_sum = np.log(np.e + 9)
    first, second = result.prompt_logprobs
    np.testing.assert_allclose(first.token_logprobs, [1 - log_sum, -log_sum], rtol=1e-5)
    np.testing.assert_allclose(second.token_logprobs, [1 - log_sum], rtol=1e-5)
    assert second.top_ids.shape == (1, 2)
    assert second.top_ids[0, 0] == 8


class Selecting(NextToken):
    """Returns the hidden states of only the wanted tokens, and counts them."""

    selects_tokens = True

    def forward(self, batch):
        hidden = super().forward(batch)
        self.num_wanted = None if batch.wanted_idx is None else len(batch.wanted_idx)
        return hidden if batch.wanted_idx is None else hidden[batch.wanted_idx]


@pytest.mark.parametrize(
    ("prompts", "sampled", "num_wanted"),
    [
        ([[7], [5, 6, 7]], [0, 1], 2),
        ([[5, 6], [3] * 9], [1], 1),
        ([[5, 6], [3] * 9], [], 1),
        ([[7], [8]], [0, 1], None),
    ],
)
def test_only_hidden_states_of_sampled_tokens_are_computed(prompts, sampled, num_wanted):
    model = Selecting(300)
    plan = replace(
        plan_of(prompts, ()),
        sample_idx=np.array(sampled, dtype=np.int64),
        sample_positions=np.array([len(prompts[i]) for i in sampled], dtype=np.int64),
    )
    sampler = Sampler(4, 300, CPU, None)
    none = np.empty(0, dtype=np.int32)
    for row in range(len(prompts)):
        sampler.set_row(RowSetup(row, f"r{row}", SamplingParams(temperature=0), 0, none, none, ()))
    result = ModelRunner(model, NoAttention(), sampler, 4, CPU).run(plan)
    assert model.num_wanted == num_wanted
    assert result.token_ids.tolist() == [prompts[i][-1] + 1 for i in sampled]
    assert list(itertools.chain(*model.asked)) == [prompts[i][-1] for i in sampled]


def test_with_prompt_logprobs_all_hidden_states_are_computed():
    model = Selecting(300)
    spans = (PromptLogprobSpan(0, 0, np.array([6]), num_top=0),)
    ModelRunner(model, NoAttention(), Sampler(4, 300, CPU, None), 4, CPU).run(plan_of([[5, 6, 7]], (), spans))
    assert model.num_wanted is None
