"""A wrong setting is refused with the reason."""

import math

import pytest

from graftlm.bench import BenchSettings
from graftlm.errors import ConfigError

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:30000"}, "--url must begin with http:// or https://, got 'localhost:30000'"),
        ({"num_prompts": 0}, "--num-prompts must be at least 1, got 0"),
        ({"request_rate": 0.0}, "--request-rate must be above 0, got 0.0"),
        ({"request_rate": math.nan}, "--request-rate must be above 0, got nan"),
        ({"burstiness": -1.0}, "--burstiness must be above 0"),
        ({"concurrency": 0}, "--concurrency must be at least 1"),
        ({"timeout_s": math.inf}, "--timeout-s must be above 0"),
        ({"temperature": -0.1}, "--temperature must be between 0 and 100"),
        ({"warmup": -1}, "--warmup must be at least 0"),
        ({"percentiles": ()}, "--percentiles must be"),
        ({"percentiles": (50.0, 101.0)}, "--percentiles must be between 0 and 100"),
        ({"prompt_tokens": 8, "shared_prefix_tokens": 8}, "--shared-prefix-tokens must be less than --prompt-tokens"),
        ({"vocab_size": 1}, "--vocab-size must be at least 2"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_option(fields, message):
    with pytest.raises(ConfigError) as caught:
        BenchSettings(**({"url": URL} | fields))
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_url_of_an_openai_client_is_accepted(url):
    assert BenchSettings(url=url).url == "http://h:1"


@pytest.mark.parametrize(
    ("rate", "concurrency", "mode"),
    [(None, None, "burst"), (None, 4, "closed"), (2.0, None, "open"), (2.0, 4, "bounded")],
)
def test_request_rate_and_concurrency_set_the_mode(rate, concurrency, mode):
    assert BenchSettings(url=URL, request_rate=rate, concurrency=concurrency).mode == mode
