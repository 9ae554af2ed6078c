"""Numbers in config.json are read, or refused by name."""

import math
from typing import Any

import pytest

from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError
from graftlm.layers import DecoderShape
from graftlm.layers.decoder_shape import read_number

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
BEYOND = [math.nan, math.inf, -math.inf, 1e39, pytest.param(10**400, id="1e400"), -1, True, "1"]


def shape(**entries: Any) -> DecoderShape:
    return DecoderShape.from_config(ModelConfig(("A",), 100, 64, raw=SIZES | entries))


@pytest.mark.parametrize(("entries", "eps"), [({}, 1e-6), ({"rms_norm_eps": 0}, 0.0), ({"rms_norm_eps": 1}, 1.0)])
def test_eps_is_read(entries: dict[str, Any], eps: float) -> None:
    assert shape(**entries).eps == eps


@pytest.mark.parametrize("value", [*BEYOND, None, False])
def test_an_impossible_eps_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="rms_norm_eps as a number of 0 or more"):
        shape(rms_norm_eps=value)


@pytest.mark.parametrize("value", [*BEYOND, None, 0])
def test_numbers_outside_the_range_of_float32_are_refused(value: Any) -> None:
    assert read_number({"cap": 30}, "cap") == 30.0
    with pytest.raises(CheckpointError, match="cap as a number above 0"):
        read_number({"cap": value}, "cap")
