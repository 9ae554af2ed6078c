import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from graftlm.execution.penalties import Penalties
from graftlm.plan import RowSetup
from graftlm.types import SamplingParams

VOCAB = 40
CPU = torch.device("cpu")


def _setup(row, prompt, output=(), **params):
    return RowSetup(
        row=row,
        request_id=f"r{row}",
        params=SamplingParams(**params),
        seed=0,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        output_token_ids=np.array(output, dtype=np.int32),
        stop_token_ids=(),
    )


def _logits(rows):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def _penalised(penalties, rows, logits, positions, drafts=None):
    """Return penalised logits; `positions` are numbers of tokens before each."""
    logits = logits.clone()
    penalties.apply(logits, np.array(rows), np.array(positions), drafts)
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 3.0])
@pytest.mark.parametrize(("prompt", "output"), [([1, 1, 5], []), ([1, 2], [3, 3, 2]), ([9], [9])])
def test_repetition_penalty_equals_hugging_faces_for_prompt_and_output(penalty, prompt, output):
    penalties = Penalties(4, VOCAB, CPU)
    penalties.set_row(_setup(2, prompt, output, repetition_penalty=penalty))
    logits = _logits(1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    torch.testing.assert_close(_penalised(penalties, [2], logits, [len(prompt + output)]), expected)


@pytest.mark.parametrize(
    ("frequency", "presence", "lowered_by"),
    [(0.5, 0.0, {3: 1.0, 4: 0.5}), (0.0, -1.5, {3: -1.5, 4: -1.5}), (1, 1, {3: 3, 4: 2})],
)
def test_frequency_and_presence_penalties_count_only_output_tokens(frequency, presence, lowered_by):
    penalties = Penalties(1, VOCAB, CPU)
    penalties.set_row(_setup(0, [1, 1, 3], [3, 4, 3], frequency_penalty=frequency, presence_penalty=presence))
    logits = _logits(1)
    expected = logits.clone()
    for token, amount in lowered_by.items():
        expected[0, token] -= amount
    torch.testing.assert_close(_penalised(penalties, [0], logits, [6]), expected)


def test_repetition_penalty_is_applied_before_frequency_and_presence():
    penalties = Penalties(1, VOCAB, CPU)
    penalties.set_row(_setup(0, [1], [2], repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5))
    logits = torch.full((1, VOCAB), 4.0)
    assert _penalised(penalties, [0], logits, [2])[0, :4].tolist() == [4.0, 2.0, 0.5, 4.0]


def test_sampled_tokens_count_as_those_of_a_resumed_request():
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    going_on = Penalties(3, VOCAB, CPU)
    for row in (0, 2):
        going_on.set_row(_setup(row, [1, 2], **params))
    going_on.set_row(_setup(1, [1, 2]))
    for position, tokens in enumerate(([5, 6, 7], [5, 6, 8], [9, 6, 7]), start=2):
        going_on.count(np.array([0, 1, 2]), np.full(3, position), torch.tensor(tokens))
    resumed = Penalties(3, VOCAB, CPU)
    resumed.set_row(_setup(0, [1, 2], [5, 5, 9], **params))
    resumed.set_row(_setup(2, [1, 2], [7, 8, 7], **params))
    logits = _logits(3)
    after = _penalised(going_on, [0, 1, 2], logits, [5, 5, 5])
    assert torch.equal(after[1], logits[1])
    assert torch.equal(after[[0, 2]], _penalised(resumed, [0, 2], logits[[0, 2]], [5, 5]))


def test_a_new_request_does_not_inherit_the_counts_of_its_row():
    penalties = Penalties(1, VOCAB, CPU)
    penalties.set_row(_setup(0, [1, 2], [3], frequency_penalty=1.0))
    penalties.set_row(_setup(0, [], [], frequency_penalty=1.0))
    logits = _logits(1)
    assert torch.equal(_penalised(penalties, [0], logits, [0]), logits)
    penalties.set_row(_setup(0, [], []))
    assert not penalties.active(np.array([0])).any()


def test_prompt_ids_outside_the_vocabulary_are_ignored():
    penalties = Penalties(1, VOCAB, CPU)
    penalties.set_row(_setup(0, [VOCAB, 3, VOCAB + 7], repetition_penalty=2.0))
    logits = torch.ones(1, VOCAB)
    assert _penalised(penalties, [0], logits, [3])[0].eq(0.5).nonzero().flatten().tolist() == [3]


def test_drafts_are_penalised_as_output_and_count_only_if_they_were_sampled():
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    drafted = Penalties(2, VOCAB, CPU)
    drafted.set_row(_setup(0, [1, 2], [5], **params))
    drafted.set_row(_setup(1, [1, 2], **params))
    rows, positions = np.array([0, 0, 0, 1]), np.array([3, 4, 5, 2])
    drafts = np.array([[-1, -1], [7, -1], [7, 5], [-1, -1]])
    logits = _logits(4)
    after = _penalised(drafted, rows, logits, positions, drafts)
    for sample, (prompt, output) in enumerate([([1, 2], [5]), ([1, 2], [5, 7]), ([1, 2], [5, 7, 5]), ([1, 2], [])]):
        plain = Penalties(1, VOCAB, CPU)
        plain.set_row(_setup(0, prompt, output, **params))
        expected = _penalised(plain, [0], logits[[sample]], [len(prompt + output)])
        assert torch.equal(after[[sample]], expected)
    # The first draft was sampled, the second was not.
    drafted.count(rows, positions, torch.tensor([7, 9, 30, 4]), torch.tensor([True, True, False, True]))
    plain = Penalties(2, VOCAB, CPU)
    plain.set_row(_setup(0, [1, 2], [5, 7, 9], **params))
    plain.set_row(_setup(1, [1, 2], [4], **params))
    expected = _penalised(plain, [0, 1], logits[:2], [5, 3])
    assert torch.equal(_penalised(drafted, [0, 1], logits[:2], [5, 3]), expected)
