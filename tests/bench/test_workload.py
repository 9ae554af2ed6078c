"""Random requests have the configured lengths and shared prefixes."""

from collections import Counter

import pytest

from graftlm.bench.apis import API_TYPES
from graftlm.bench.prompts import TextPrompt
from graftlm.bench.settings import BenchSettings
from graftlm.bench.workload import make_workload, ordinary_token_ids
from graftlm.errors import ConfigError


def settings(**fields):
    shape = {"num_prompts": 12, "prompt_tokens": 40, "output_tokens": 7, "shared_prefix_tokens": 30, "num_prefixes": 3}
    return BenchSettings(url="http://x", **(shape | fields))


def make(api="native", vocab_size=5000, **fields):
    return make_workload(settings(api=api, **fields), API_TYPES[api].accepts, vocab_size)


def pieces(item):
    return item.prompt.text.split() if isinstance(item.prompt, TextPrompt) else list(item.prompt.token_ids)


@pytest.mark.parametrize("api", API_TYPES)
def test_prompts_have_the_length_and_use_all_prefixes_equally(api):
    work = make(api)
    assert {len(pieces(item)) for item in work.items} == {40}
    assert {item.output_tokens for item in work.items} == {7}
    assert sorted(Counter(tuple(pieces(item)[:30]) for item in work.items).values()) == [4, 4, 4]
    assert len({tuple(pieces(item)) for item in work.items}) == 12
    assert len({tuple(pieces(item)[:31]) for item in work.items}) > 3
    assert work.shared_share == pytest.approx(9 / 12 * 30 / 40)


@pytest.mark.parametrize(("vocab_size", "low", "high"), [(128_256, 300, 120_240), (512, 256, 480), (2, 1, 2)])
def test_token_ids_avoid_the_ranges_of_special_tokens(vocab_size, low, high):
    assert ordinary_token_ids(vocab_size) == range(low, high)


def test_drawn_ids_cover_exactly_that_range():
    ids = [i for item in make(vocab_size=400, num_prompts=100).items for i in pieces(item)]
    assert (min(ids), max(ids)) == (200, 374)


def test_a_seed_fixes_the_prompts():
    assert make(seed=5).items == make(seed=5).items
    assert make(seed=5).items != make(seed=6).items


def test_warm_up_requests_share_no_prefix_with_measured_ones():
    work = make(warmup=2, num_prompts=4)
    assert len(work.warmup) == 2
    assert not {tuple(pieces(i)[:30]) for i in work.warmup} & {tuple(pieces(i)[:30]) for i in work.items}


def test_an_unknown_vocabulary_size_is_an_error_only_if_ids_are_sent():
    with pytest.raises(ConfigError, match="set --vocab-size"):
        make(vocab_size=None)
    assert make("openai-chat", vocab_size=None).items


@pytest.mark.parametrize(("num_prompts", "sent", "repeated"), [(None, 3, 0), (2, 2, 0), (7, 7, 4)])
def test_a_dataset_is_sent_in_order_and_repeated(tmp_path, num_prompts, sent, repeated):
    file = tmp_path / "set.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(3)))
    work = make(dataset=str(file), num_prompts=num_prompts)
    assert [item.prompt.text for item in work.items] == ["0", "1", "2", "0", "1", "2", "0"][:sent]
    assert work.num_repeated == repeated
