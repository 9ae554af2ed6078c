"""Structural tags: refusals, and the rule that structures are always valid and the text between them is free."""

import json
import random
import re

import numpy as np
import pytest

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError

END = 256
NUMBER = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
WORD = {"begin": "[w]", "regex": "[a-c]{1,3}", "end": "[/w]"}
VALID = re.compile(r"<n>[ \n\r\t]*-?(0|[1-9][0-9]*)[ \n\r\t]*</n>|\[w\][a-c]{1,3}\[/w\]")


def tag(**changes):
    return {"triggers": ["<n>", "[w]"], "structures": [NUMBER, WORD], **changes}


def structure(**changes):
    changed = {**NUMBER, **changes}
    return tag(structures=[WORD, {key: value for key, value in changed.items() if value is not None}])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON: "),
        ("[]", "$: expected an object, got []"),
        (tag(type="json"), '$.type: expected structural_tag, got "json"'),
        (tag(also=1), "$.also: unknown key, expected one of at_least_one, "),
        (tag(triggers=[]), "$.triggers: expected a list of 1 to 256 texts, got []"),
        (tag(triggers="<n>"), '$.triggers: expected a list of 1 to 256 texts, got "<n>"'),
        (tag(triggers=["<n>", ""]), '$.triggers[1]: expected a non-empty string, got ""'),
        (tag(triggers=["<n>", 1]), "$.triggers[1]: expected a non-empty string, got 1"),
        (tag(triggers=["<n>", "\ud800"]), "$.triggers[1]: null characters and unpaired surrogates are not allowed"),
        (tag(triggers=["<n>", "[w]", "a<n>"]), "$.triggers: 'a<n>' contains '<n>'"),
        (tag(triggers=["<n>"]), "$.structures[1].begin: expected a text that starts with one of the triggers"),
        (tag(structures=[]), "$.structures: expected a list of 1 to 256 structures, got []"),
        (tag(structures=[NUMBER] * 257), "$.structures: expected a list of 1 to 256 structures"),
        (tag(structures=[NUMBER, 1]), "$.structures[1]: expected an object with begin, "),
        (structure(begin=None), "$.structures[1].begin is missing; write the text before it"),
        (structure(end=None), '$.structures[1].end is missing; write "" for none'),
        (structure(end=1), "$.structures[1].end: expected a non-empty string, got 1"),
        (structure(schema=None), "$.structures[1]: expected one of schema and regex"),
        (structure(regex="a"), "$.structures[1]: expected one of schema and regex"),
        (structure(schema=None, regex=1), "$.structures[1].regex: expected a regular expression, got 1"),
        (structure(schema=None, regex="(?=a)"), "$.structures[1].regex: regular expression '(?=a)', position 1: "),
        (structure(schema={"items": {"not": {}}}), "$.structures[1].schema.items.not: "),
        (structure(schema={"type": "text"}), "$.structures[1].schema.type: expected one or more of "),
        (structure(other=1), "$.structures[1].other: unknown key, expected one of begin, end, regex, schema"),
        (tag(at_least_one="yes"), '$.at_least_one: expected true or false, got "yes"'),
        (tag(stop_after_first=1), "$.stop_after_first: expected true or false, got 1"),
    ],
)
def test_malformed_tags_are_refused_with_their_path(byte_backend, text, said):
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, text if isinstance(text, str) else json.dumps(text))
    for method in (byte_backend.check, byte_backend.compile):
        with pytest.raises(GrammarError) as caught:
            method(spec)
        assert str(caught.value).startswith(f"structural_tag: {said}")


def test_null_means_the_same_as_a_missing_key(texts):
    nulls = {"type": None, "at_least_one": None, "stop_after_first": None}
    text = json.dumps(tag(structures=[{**NUMBER, "regex": None}, {**WORD, "schema": None}], **nulls))
    assert texts.accepted("structural_tag", text, ["", "<n>1</n>a[w]a[/w]", "<n>a"]) == ["", "<n>1</n>a[w]a[/w]"]


def test_ignored_keywords_are_reported_with_their_structure(byte_backend):
    text = json.dumps(structure(schema={"type": "integer", "not": {"const": 1}}))
    spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, text, strict=False)
    assert byte_backend.check(spec) == ("$.structures[1].schema.not",)


def walk(matcher, seed, num_bytes=120):
    """Return the text of a random walk under the masks, which often writes a trigger or ends."""
    rng = random.Random(seed)
    mask = np.zeros((1, 9), dtype=np.int32)
    text, planned = b"", b""
    while True:
        matcher.fill_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not planned and rng.random() < 0.3:
            planned = rng.choice([b"<n>", b"[w]", b"</n>", b"[/w]"])
        if allowed == [END] or (END in allowed and (len(text) >= num_bytes or rng.random() < 0.05)):
            assert matcher.accept(END)
            return text.decode(errors="replace")
        if planned and planned[0] in allowed:
            token_id, planned = planned[0], planned[1:]
        elif len(text) >= num_bytes and (ends := [one for one in allowed if one in b"0abc<[/n>w]"]):
            token_id, planned = rng.choice(ends), b""
        else:
            token_id, planned = rng.choice([one for one in allowed if one != END]), b""
        assert matcher.accept(token_id)
        text += bytes([token_id])


def parts(text):
    """Return the free texts and the structures of a text, and assert that no trigger is left over."""
    free = VALID.split(text)[:: VALID.groups + 1]
    assert not [one for one in free if "<n>" in one or "[w]" in one], text
    return free, [found.group() for found in VALID.finditer(text)]


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
def test_structures_are_valid_for_any_sampling(byte_backend, at_least_one, stop_after_first):
    text = json.dumps(tag(at_least_one=at_least_one, stop_after_first=stop_after_first))
    compiled = byte_backend.compile(GrammarSpec(GrammarKind.STRUCTURAL_TAG, text))
    counts = []
    for seed in range(60):
        free, structures = parts(walk(compiled.matcher(), seed))
        counts.append(len(structures))
        if at_least_one:
            assert structures
            assert free[0] == ""
        if stop_after_first:
            assert len(structures) <= 1
            assert not structures or free[-1] == ""
    assert max(counts) >= (1 if stop_after_first else 2)


def test_text_between_structures_is_free(texts):
    free = ["", "a < b", "<", "<n", "[w", "</n>", "[/w]", "é\n日本 \U0001f600", '{"a": [1]}', "<<nn>>", "n><w]"]
    assert texts.accepted("structural_tag", json.dumps(tag()), free) == free
    around = [f"{one}<n>1</n>{one}[w]ab[/w]{one}" for one in free]
    assert texts.accepted("structural_tag", json.dumps(tag()), around) == around


def test_a_trigger_continues_as_one_of_its_structures(texts):
    two = tag(triggers=["<t:"], structures=[{**NUMBER, "begin": "<t:n>"}, {**WORD, "begin": "<t:w>"}])
    good = ["<t:n>1</n>", "a <t:w>ab[/w] b<t:n>-2</n>"]
    bad = ["<t:", "<t:x>1</n>", "<t:n>ab</n>", "<t:w>1[/w]", "<t:n>1[/w]", "a<t:n>1"]
    assert texts.accepted("structural_tag", json.dumps(two), good + bad) == good
