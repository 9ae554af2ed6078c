import pytest

from graftlm.cache_sim import Choice, parse_capacities, parse_choices
from graftlm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("lru", [Choice("lru")]),
        ("lru, lfu", [Choice("lru"), Choice("lfu")]),
        ("slru:protected=0.5", [Choice("slru", {"protected": 0.5})]),
        (
            "a:x=1,y=true,b,c:z=text",
            [Choice("a", {"x": 1, "y": True}), Choice("b"), Choice("c", {"z": "text"})],
        ),
        ("a:x=[1]", [Choice("a", {"x": [1]})]),
        ("a:x=", [Choice("a", {"x": None})]),
    ],
)
def test_names_with_options_are_parsed(text, choices):
    assert parse_choices(text) == choices


@pytest.mark.parametrize("text", ["", ",", "lru,", "x=1", ":x=1", "lru:x", "lru:=1", "lru:x=[1"])
def test_malformed_choices_are_refused(text):
    with pytest.raises(ConfigError):
        parse_choices(text)


def test_a_choice_is_printed_in_its_input_form():
    assert str(Choice("a", {"x": 0.5, "y": True, "z": "t"})) == "a:x=0.5,y=true,z=t"
    assert str(Choice("a")) == "a"


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("1024", 64),
        ("1k", 62),
        ("2M", 125000),
        ("0.5G", 31250000),
        ("10%", 100),
        ("100%", 1000),
        ("1", 1),
        ("0.01%", 1),
    ],
)
def test_a_capacity_is_rounded_to_whole_pages(text, pages):
    (capacity,) = parse_capacities([text])
    assert capacity.pages(footprint_pages=1000, page_size=16) == pages


def test_capacities_are_separated_by_commas_or_options():
    assert [capacity.text for capacity in parse_capacities(["1M, 2M", "5%"])] == ["1M", "2M", "5%"]


@pytest.mark.parametrize("text", ["", "0", "-1", "0%", "M", "1T", "1MM", "1e99999", "nan", "inf", "1M2", "%"])
def test_malformed_capacities_are_refused(text):
    with pytest.raises(ConfigError, match="a capacity must be a number of tokens"):
        parse_capacities([text])
