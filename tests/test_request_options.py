"""Options of a request are checked when they are made."""

import pytest

from graftlm.errors import RequestError
from graftlm.request_options import RequestOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number"),
        ({"timeout_s": 10**400}, "timeout_s must be a number"),
        ({"timeout_s": "5"}, "timeout_s must be a number"),
        ({"cache_salt": None}, "cache_salt must be a string"),
        ({"cache_salt": "\ud800"}, "cache_salt must be valid Unicode"),
    ],
)
def test_a_wrong_option_is_refused_by_name(fields, message):
    with pytest.raises(RequestError, match=message):
        RequestOptions(**fields)


@pytest.mark.parametrize(
    ("own", "limit", "shorter"),
    [(None, None, None), (3.0, None, 3.0), (None, 5.0, 5.0), (3.0, 5.0, 3.0), (7, 5, 5)],
)
def test_the_shorter_timeout_applies(own, limit, shorter):
    options = RequestOptions(timeout_s=own, adapter="a").limited_to(limit)
    assert options == RequestOptions(timeout_s=shorter, adapter="a")
