import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graftlm.contracts import LogitsProcessor
from graftlm.execution.native_sampling import NativeSampling
from graftlm.execution.sampler import Sampler
from graftlm.plan import RowSetup, TokenMask
from graftlm.types import SamplingParams

VOCAB = 300
CPU = torch.device("cpu")
NATIVE = None  # the compiled kernels that samplers get


@pytest.fixture(autouse=True, params=["torch", "native"])
def kernels(request, kernel_cache, monkeypatch):
    if request.param == "native":
        monkeypatch.setitem(globals(), "NATIVE", NativeSampling.load("g++", kernel_cache))
        assert NATIVE is not None


class Force(LogitsProcessor):
    """Allows one token: `start` plus the number of output tokens."""

    def __init__(self, start):
        self.start = start

    def process(self, output_token_ids, logits):
        assert output_token_ids.dtype == np.int32
        forced = torch.full_like(logits, -torch.inf)
        forced[self.start + len(output_token_ids)] = 0.0
        return forced


class Answer(LogitsProcessor):
    """Returns or raises the configured answer."""

    def __init__(self, answer):
        self.answer = answer

    def process(self, output_token_ids, logits):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def make_processor(name, options, context):
    assert context.vocab_size == VOCAB
    if name == "uncreatable":
        raise KeyError("no such option")
    return {"force": Force, "answer": Answer}[name](**options)


def make_sampler(*setups, num_rows=8):
    sampler = Sampler(num_rows, VOCAB, CPU, make_processor, native_sampling=NATIVE)
    for setup in setups:
        sampler.set_row(setup)
    return sampler


def setup(row, prompt=(1, 2, 3), output=(), stop=(), seed=0, **params):
    return RowSetup(
        row=row,
        request_id=f"r{row}",
        params=SamplingParams(**params),
        seed=seed,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        output_token_ids=np.array(output, dtype=np.int32),
        stop_token_ids=tuple(stop),
    )


def make_logits(rows, seed=0, scale=3.0, dtype=torch.float32):
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def sample(sampler, logits, rows, positions=None):
    positions = [3] * len(rows) if positions is None else positions
    return sampler.sample(logits, np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int64))


def draw_many(logits_row, num_draws, **params):
    """Sample one row's logits at many positions, as rows of one batch."""
    sampler = make_sampler(*[setup(row, seed=row, **params) for row in range(64)], num_rows=64)
    logits = logits_row.expand(64, -1).contiguous()
    steps = range(3, 3 + num_draws // 64)
    return torch.cat([sample(sampler, logits, list(range(64)), [step] * 64).token_ids for step in steps])


# -- Greedy rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_most_likely_token(dtype):
    sampler = make_sampler(*[setup(row, temperature=0.0) for row in range(4)])
    logits = make_logits(4, dtype=dtype)
    sampled = sample(sampler, logits, [0, 1, 2, 3])
    assert torch.equal(logits.gather(1, sampled.token_ids[:, None]).squeeze(1), logits.max(dim=1).values)
    assert sampled.token_ids.dtype == torch.int64
    assert not sampled.failed.any()
    assert sampled.logprobs is None
    assert sampled.processor_errors == {}


def test_no_rows_give_no_tokens():
    assert sample(make_sampler(), make_logits(0), []).token_ids.shape == (0,)


def test_the_models_logits_are_not_changed():
    everything = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 1.0}
    sampler = make_sampler(setup(0, logit_bias={5: 3.0}, min_tokens=3, stop=[7], **everything), setup(1, **everything))
    logits = make_logits(2)
    before = logits.clone()
    sample(sampler, logits, [0, 1])
    assert torch.equal(logits, before)


# -- Distributions

DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
]


def hf_probabilities(logits, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits[None])[0].softmax(dim=0)


@pytest.mark.covering(strength=1)  # test_native_sampling.py compares the draws of both
@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_tokens_have_the_distribution_of_hugging_faces_warpers(params):
    num_draws = 64 * 300
    logits = make_logits(1, seed=4, scale=2.0)[0]
    expected = hf_probabilities(logits, **params).double()
    counts = torch.bincount(draw_many(logits, num_draws, **params), minlength=VOCAB).double()
    assert (counts[expected == 0] == 0).all()
    likely = expected * num_draws >= 5
    bins = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * num_draws
    bins, wanted = bins[wanted > 0], wanted[wanted > 0]
    chi_square = ((bins - wanted) ** 2 / wanted).sum().item()
    freedom = len(bins) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [1e-50, 1e-6, 1e-3])
def test_a_temperature_near_zero_selects_the_most_likely_token(temperature):
    logits = make_logits(1)
    sampled = sample(make_sampler(setup(0, temperature=temperature)), logits, [0])
    assert sampled.token_ids.item() == logits.argmax()


# -- Reproducibility

MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: 4.0}},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "min_tokens": 4},
]


def run_alone(i, num_steps, logits, retract_at=None):
    sampler = make_sampler(setup(3, seed=i, stop=[11], **MIXED[i]))
    tokens = []
    for step in range(num_steps):
        if step == retract_at:
            sampler = make_sampler(setup(5, seed=i, stop=[11], output=tokens, **MIXED[i]))
        row = 3 if retract_at is None or step < retract_at else 5
        tokens.append(sample(sampler, logits[step][i : i + 1], [row], [3 + step]).token_ids.item())
    return tokens


def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_after_a_retraction():
    num_steps = 12
    logits = [make_logits(len(MIXED), seed=step) for step in range(num_steps)]
    sampler = make_sampler(*[setup(row, seed=row, stop=[11], **params) for row, params in enumerate(MIXED)])
    rows = list(range(len(MIXED)))
    steps = [sample(sampler, logits[step], rows, [3 + step] * len(rows)).token_ids for step in range(num_steps)]
    together = torch.stack(steps, dim=1).tolist()
    for i in rows:
        assert run_alone(i, num_steps, logits) == together[i]
        assert run_alone(i, num_steps, logits, retract_at=5) == together[i]


def test_other_seeds_and_positions_give_other_tokens():
    logits = torch.zeros(1, VOCAB)
    draws = {
        (seed, position): sample(make_sampler(setup(0, seed=seed)), logits, [0], [position]).token_ids.item()
        for seed in range(4)
        for position in range(4)
    }
    assert len(set(draws.values())) > 12


# -- Changes to the logits


def test_logit_bias_is_applied_first():
    sampler = make_sampler(
        setup(0, temperature=0.0, logit_bias={7: 100.0}),
        setup(1, temperature=1.0, top_k=1, logit_bias={8: 100.0, 9: 50.0}),
        setup(2, temperature=0.0),
    )
    logits = make_logits(3)
    assert sample(sampler, logits, [0, 1, 2]).token_ids.tolist() == [7, 8, logits[2].argmax()]


@pytest.mark.parametrize("beside", [{}, {"logit_bias": {9: 1.0}}, {"presence_penalty": 1.0}, {"logprobs": 1}])
@pytest.mark.parametrize(("num_outputs", "may_stop"), [(0, False), (1, False), (2, True), (3, True)])
def test_stop_tokens_are_not_sampled_before_min_tokens(num_outputs, may_stop, beside):
    sampler = make_sampler(setup(0, temperature=0.0, min_tokens=2, stop=[4, VOCAB + 5], **beside))
    logits = make_logits(1)
    logits[0, 4] = 50.0
    position = 3 + num_outputs
    assert (sample(sampler, logits, [0], [position]).token_ids.item() == 4) is may_stop
    everything = mask([0], range(VOCAB))
    assert (sample_masked(sampler, logits, [0], everything, position).token_ids.item() == 4) is may_stop


def test_penalties_include_the_tokens_just_sampled():
    sampler = make_sampler(setup(0, temperature=0.0, presence_penalty=2.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([1.0, 0.9, 0.8])
    tokens = [sample(sampler, logits, [0], [3 + step]).token_ids.item() for step in range(3)]
    assert tokens == [0, 1, 2]


def test_a_bias_outside_the_vocabulary_fails_only_its_request():
    sampler = make_sampler(setup(0, temperature=0.0, logit_bias={VOCAB: 1.0}), setup(1, temperature=0.0))
    sampled = sample(sampler, make_logits(2), [1, 0])
    assert list(sampled.processor_errors) == [1]
    assert f"token {VOCAB}" in sampled.processor_errors[1]


# -- Logits processors


def test_a_processor_gets_the_output_so_far_even_after_a_retraction():
    sampler = make_sampler(
        setup(0, temperature=0.0, logits_processors={"force": {"start": 20}}),
        setup(1, temperature=1.0, output=[50, 51], logits_processors={"force": {"start": 50}}),
        setup(2, temperature=0.0),
    )
    logits = make_logits(3)
    steps = [sample(sampler, logits, [0, 1, 2], [3 + i, 5 + i, 3 + i]).token_ids.tolist() for i in range(3)]
    best = logits[2].argmax().item()
    assert steps == [[20, 52, best], [21, 53, best], [22, 54, best]]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("uncreatable", {}, "'uncreatable' could not be created: KeyError"),
        ("answer", {"answer": RuntimeError("out of ideas")}, "'answer' failed: RuntimeError: out of ideas"),
        ("answer", {"answer": None}, "returned NoneType"),
        ("answer", {"answer": torch.zeros(VOCAB - 1)}, "[299]"),
        ("answer", {"answer": torch.zeros(VOCAB, dtype=torch.float16)}, "torch.float16"),
    ],
)
def test_a_faulty_processor_fails_only_its_request_at_each_step(name, options, said):
    sampler = make_sampler(
        setup(0, temperature=0.0),
        setup(1, logits_processors={name: options}),
        setup(2, temperature=0.0, logits_processors={"force": {"start": 9}}),
    )
    logits = make_logits(3)
    for step in range(2):
        sampled = sample(sampler, logits, [0, 1, 2])
        assert list(sampled.processor_errors) == [1]
        assert said in sampled.processor_errors[1]
        assert sampled.token_ids[[0, 2]].tolist() == [logits[0].argmax(), 9 + step]
        assert 0 <= sampled.token_ids[1] < VOCAB


def test_a_new_request_does_not_inherit_the_failure_of_its_row():
    sampler = make_sampler(setup(0, logits_processors={"uncreatable": {}}))
    sampler.set_row(setup(0, temperature=0.0))
    assert sample(sampler, make_logits(1), [0]).processor_errors == {}


def test_a_processor_that_forbids_every_token_fails_its_request():
    sampler = make_sampler(setup(0, logits_processors={"answer": {"answer": torch.full((VOCAB,), -torch.inf)}}))
    assert sample(sampler, make_logits(1), [0]).failed.tolist() == [True]


# -- Bad logits


@pytest.mark.parametrize("params", MIXED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [slice(None), slice(140, 141)])
def test_bad_logits_fail_only_their_row(params, value, where):
    logits = make_logits(3)
    expected = sample(make_sampler(*[setup(row, **params) for row in range(3)]), logits, [0, 1, 2]).token_ids
    logits[1, where] = value
    sampled = sample(make_sampler(*[setup(row, **params) for row in range(3)]), logits, [0, 1, 2])
    assert sampled.failed.tolist() == [False, True, False]
    assert sampled.token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= sampled.token_ids[1] < VOCAB


@pytest.mark.parametrize(("finite", "failed"), [(1, False), (0, True)])
def test_logits_of_minus_infinity_fail_a_row_only_if_all_are(finite, failed):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 17 : 17 + finite] = 0.0
    sampled = sample(make_sampler(setup(0)), logits, [0])
    assert sampled.failed.tolist() == [failed]
    assert failed or sampled.token_ids.item() == 17


# -- Log-probabilities


def test_logprobs_are_those_of_the_unmodified_logits():
    sampler = make_sampler(
        setup(0, temperature=0.0),
        setup(1, temperature=0.3, top_k=2, frequency_penalty=2.0, output=[4], logit_bias={4: -9.0}, logprobs=3),
        setup(2, temperature=0.0, logprobs=0),
    )
    logits = make_logits(3, dtype=torch.bfloat16)
    sampled = sample(sampler, logits, [0, 1, 2])
    expected = logits.float().log_softmax(dim=1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids.shape == (3, 3)
    for i in (1, 2):
        torch.testing.assert_close(sampled.logprobs.token_logprobs[i], expected[i, sampled.token_ids[i]])
        torch.testing.assert_close(sampled.logprobs.top_logprobs[i], expected[i].topk(3).values)
        torch.testing.assert_close(expected[i, sampled.logprobs.top_ids[i]], sampled.logprobs.top_logprobs[i])


# -- Token masks


def mask(idx, *rows):
    bits = np.zeros((len(rows), -(-VOCAB // 32) * 32), dtype=np.uint8)
    for row, tokens in enumerate(rows):
        bits[row, list(tokens)] = 1
    return TokenMask(np.array(idx, dtype=np.int64), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def sample_masked(sampler, logits, rows, token_mask, position=3):
    return sampler.sample(
        logits, np.array(rows, dtype=np.int32), np.full(len(rows), position, dtype=np.int64), token_mask
    )


EVERYTHING = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 5.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 1.0, "logit_bias": {9: 1000.0, 250: -1000.0}},
    {"temperature": 0.0, "logit_bias": {9: 1000.0}},
    {"temperature": 1.0, "repetition_penalty": 50.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "logits_processors": {"force": {"start": 9}}},
    {"temperature": 0.0, "min_tokens": 9, "stop": [250]},
]


@pytest.mark.parametrize("params", EVERYTHING)
def test_a_masked_row_samples_only_allowed_tokens(params):
    params = dict(params)
    stop = params.pop("stop", ())
    sampler = make_sampler(*[setup(row, seed=row, stop=stop, **params) for row in range(8)])
    for step in range(3, 12):
        sampled = sample_masked(sampler, make_logits(8, step), list(range(8)), mask(range(8), *[[250, 299]] * 8), step)
        assert set(sampled.token_ids.tolist()) <= {250, 299}
        assert not sampled.failed.any()
        assert sampled.processor_errors == {}


@pytest.mark.parametrize("params", EVERYTHING)
def test_unmasked_rows_sample_as_without_any_mask(params):
    params = dict(params)
    stop = params.pop("stop", ())
    setups = [setup(row, seed=row, stop=stop, **params) for row in range(6)]
    logits = make_logits(6)
    plain = sample_masked(make_sampler(*setups), logits, list(range(6)), None)
    masked = sample_masked(make_sampler(*setups), logits, list(range(6)), mask([1, 4], [7], [8, 9]))
    free = [0, 2, 3, 5]
    assert torch.equal(masked.token_ids[free], plain.token_ids[free])


def test_a_mask_of_stop_tokens_overrides_min_tokens():
    sampler = make_sampler(setup(0, stop=[7], min_tokens=50), setup(1, stop=[7], min_tokens=50, temperature=0.0))
    sampled = sample_masked(sampler, make_logits(2), [0, 1], mask([0, 1], [7], [7]))
    assert sampled.token_ids.tolist() == [7, 7]
    assert not sampled.failed.any()


def test_min_tokens_applies_if_the_mask_allows_other_tokens():
    sampler = make_sampler(setup(0, stop=[7], min_tokens=50, temperature=0.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 100.0
    assert sample_masked(sampler, logits, [0], mask([0], [7, 8])).token_ids.tolist() == [8]


@pytest.mark.parametrize(
    ("penalty", "tokens"),
    [
        ({}, [7, 7, 7, 7, 7]),
        ({"presence_penalty": 0.15}, [7, 7, 7, 7, 7]),
        ({"presence_penalty": 0.7}, [7, 8, 7, 7, 7]),
        ({"frequency_penalty": 0.7}, [7, 8, 7, 8, 7]),
        ({"repetition_penalty": 3.0}, [7, 8, 7, 7, 7]),
    ],
)
# A processor that forbids all tokens that the mask allows is overruled; penalties are not.
@pytest.mark.parametrize("processors", [{}, {"force": {"start": 20}}])
def test_penalties_apply_among_the_allowed_tokens(penalty, tokens, processors):
    sampler = make_sampler(
        setup(0, temperature=0.0),
        setup(1, temperature=0.0, logits_processors=processors, **penalty),
        setup(2, temperature=0.0),
    )
    logits = torch.zeros(3, VOCAB)
    logits[:, 9], logits[:, 7], logits[:, 8] = 5.0, 1.0, 0.8
    sampled = [sample_masked(sampler, logits, [0, 1, 2], mask([1], [7, 8]), 3 + i).token_ids for i in range(5)]
    assert [ids.tolist() for ids in sampled] == [[9, token, 9] for token in tokens]


def test_a_masked_row_is_sampled_from_the_probabilities_of_allowed_tokens():
    logits = make_logits(1, scale=1.0)
    sampler = make_sampler(*[setup(row, seed=row) for row in range(64)], num_rows=64)
    allowed = mask(range(64), *[[5, 100, 290]] * 64)
    batch = logits.expand(64, -1).contiguous()
    drawn = torch.cat([sample_masked(sampler, batch, range(64), allowed, step).token_ids for step in range(3, 103)])
    expected = torch.softmax(logits[0, [5, 100, 290]], dim=0)
    shares = torch.stack([(drawn == token).float().mean() for token in (5, 100, 290)])
    assert torch.allclose(shares, expected, atol=0.02)


def test_logprobs_of_a_masked_row_are_those_of_the_unmodified_logits():
    sampler = make_sampler(setup(0, temperature=0.0, logprobs=2))
    logits = make_logits(1)
    sampled = sample_masked(sampler, logits, [0], mask([0], [11]))
    assert sampled.token_ids.tolist() == [11]
    own = torch.log_softmax(logits, dim=1)
    assert sampled.logprobs.token_logprobs.tolist() == pytest.approx([own[0, 11].item()])
    assert sampled.logprobs.top_ids[0].tolist() == own[0].topk(2).indices.tolist()


def test_bad_logits_fail_a_masked_row():
    sampler = make_sampler(setup(0), setup(1))
    logits = make_logits(2)
    logits[0, 200] = torch.nan
    assert sample_masked(sampler, logits, [0, 1], mask([0, 1], [7], [7])).failed.tolist() == [True, False]
