"""Two configurations describe the same model if the entries that the model reads are equal in meaning."""

from pathlib import Path

import pytest

from graftlm.checkpoint import check_same_model
from graftlm.contracts import ModelConfig
from graftlm.errors import CheckpointError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"model_type": "mistral"}
OWN = LLAMA | {"model_type": "own", "width": 3}


def check(before, after, path="new"):
    own, other = (ModelConfig(("X",), 320, 256, (2,), raw) for raw in (before, after))
    check_same_model(own, Path("old"), other, Path(path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LLAMA, LLAMA | {"attention_dropout": 0.1, "initializer_range": 0.5, "pad_token_id": 7}),
        (LLAMA, LLAMA | {"head_dim": 16, "mlp_bias": False, "hidden_act": "silu"}),
        (LLAMA, LLAMA | {"eos_token_id": [2]}),
        ({k: v for k, v in LLAMA.items() if k != "rope_parameters"} | {"rope_theta": 10000.0}, LLAMA),
        (MISTRAL, MISTRAL | {"sliding_window": 4096}),
        (OWN, OWN | {"depth": None}),
    ],
)
def test_configurations_with_equal_meaning_are_the_same_model(before, after):
    check(before, after)
    check(after, before)


@pytest.mark.parametrize(
    ("before", "after", "entry"),
    [
        (LLAMA, LLAMA | {"head_dim": 32}, "head_dim is 32, expected 16"),
        (LLAMA, LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters is"),
        (LLAMA, LLAMA | {"eos_token_id": 3}, r"eos_token_id is \[3\], expected"),
        (MISTRAL, MISTRAL | {"sliding_window": None}, "sliding_window is None, expected 4096"),
        (OWN, OWN | {"width": 4}, "width is 4, expected 3"),
    ],
)
def test_the_first_entry_that_differs_is_named(before, after, entry):
    with pytest.raises(CheckpointError, match=rf"new/config\.json is not of the served model.*{entry}"):
        check(before, after)
