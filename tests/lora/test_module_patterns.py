"""Patterns of module names match as in peft; patterns that would take too long are refused."""

import pytest
from peft.utils.other import get_pattern_key

from graftlm.errors import AdapterError
from graftlm.lora.module_patterns import ModulePatterns

MODULES = ["model.layers.1.self_attn.q_proj", "model.layers.12.mlp.up_proj", "model.layers.1.mlp.up_proj", "q_proj"]


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj", "up_proj"],
        ["proj", "roj", "layers"],
        ["layers.1.self_attn.q_proj", "q_proj"],
        ["q_proj", "layers.1.self_attn.q_proj"],
        [r"layers\.\d+\.mlp\..*", "up_proj"],
        ["up_proj", r"layers\.\d+\.mlp\..*"],
        [r"layers\.[\d]\.\w+\.(q|up)_proj", ".*up_proj"],
        [r"model\.layers\.(?:1|2)\.[^.]+\.\w+", "^model.*$"],
        [r"layers.1\.(mlp|self_attn).+", "q_proj|up_proj"],
    ],
)
def test_the_first_matching_pattern_is_the_same_as_in_peft(patterns):
    found = ModulePatterns({pattern: pattern for pattern in patterns}, "rank_pattern")
    for module in MODULES:
        assert (found.find(module) or module) == get_pattern_key(patterns, module)


@pytest.mark.parametrize("pattern", ["(([a-z_.0-9])+)+X", "(.*)*" * 90 + "X", "(a|a|[a-z._]+)*(.?)*Y"])
def test_an_expression_with_exponential_backtracking_is_matched_at_once(pattern):
    assert ModulePatterns({pattern: 4}, "rank_pattern").find("model.layers.0." + "self_attn_" * 20) is None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"rank_pattern: '\(' is not a regular expression: error: unclosed group"),
        ("(?=q)q_proj", "is not supported.* Use the names of modules instead"),
        (r"\w{900}", "is not supported"),
        (r"(q)_proj\1", "is not supported"),
        (r"\pL+", "is not supported"),
        ("", "is not supported"),
        ("(a)" * 200, "up to 500 characters"),
    ],
)
def test_a_pattern_without_bounded_matching_time_is_refused(pattern, message):
    with pytest.raises(AdapterError, match=message):
        ModulePatterns({pattern: 4}, "rank_pattern")


def test_many_names_and_few_expressions_are_accepted():
    many = ModulePatterns({f"layers.{i}.q_proj": i for i in range(5000)}, "rank_pattern")
    assert many.find("model.layers.4321.q_proj") == 4321
    with pytest.raises(AdapterError, match="rank_pattern has more than 100 regular expressions"):
        ModulePatterns({f"layers.{i}.*": i for i in range(101)}, "rank_pattern")
