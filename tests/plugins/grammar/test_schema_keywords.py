"""The vocabulary of JSON schemas: misspelt keywords are distinguished from unenforceable ones."""

import re

import pytest

from graftlm.errors import GrammarError
from graftlm_grammar.enforcement import Enforcement, NotEnforcedError
from graftlm_grammar.json_schema import translate_schema
from graftlm_grammar.llguidance_schema import prepare_schema
from graftlm_grammar.options import JsonOptions
from graftlm_grammar.schema_keywords import asserted, leave_out_unknown


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("minLenght", "unknown keyword; did you mean 'minLength'?"),
        ("maxlength", "unknown keyword; did you mean 'maxLength'?"),
        ("proprties", "unknown keyword; did you mean 'properties'?"),
        ("$def", "unknown keyword; did you mean '$defs'?"),
        ("enums", "unknown keyword; did you mean 'enum'?"),
        ("nullable", "this keyword is not enforced; leave it out, or set strict to false"),
        ("$dynamicRef", "this keyword is not enforced; leave it out, or set strict to false"),
        ("if", "this keyword is not enforced; leave it out, or set strict to false"),
    ],
)
def test_a_misspelt_keyword_is_refused_with_the_nearest_name(key, said):
    with pytest.raises(NotEnforcedError) as caught:
        leave_out_unknown(Enforcement(strict=True), {key: {}}, key, "$.a")
    assert str(caught.value) == f"$.a.{key}: {said}"


@pytest.mark.parametrize("read", [translate_schema, prepare_schema])
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ('{"type": "object", "properties": {"a": {"type": "string", "minLenght": 3}}}', "$.properties.a.minLenght"),
        ('{"anyOf": [{}], "minLenght": 3}', "$.minLenght"),
    ],
)
def test_every_backend_reports_the_nearest_keyword(read, schema, path):
    with pytest.raises(
        GrammarError, match=re.escape(f"json_schema: {path}: unknown keyword; did you mean 'minLength'?")
    ):
        read(schema, JsonOptions())
    assert read(schema, JsonOptions(), strict=False).unenforced == (path,)


@pytest.mark.parametrize("read", [translate_schema, prepare_schema])
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"items": [{}]}', "$.items: expected one schema, got a list; write prefixItems for a schema of each item"),
        ('{"properties": {"a": {"type": "array", "items": []}}}', "$.properties.a.items: expected one schema"),
        ('{"exclusiveMinimum": true}', "got true; write the bound itself, as in exclusiveMinimum: 5"),
        ('{"type": "integer", "exclusiveMaximum": false}', "got false; write the bound itself"),
    ],
)
def test_keywords_of_older_drafts_are_refused_with_their_replacement(read, schema, said):
    for strict in (True, False):
        with pytest.raises(GrammarError, match=re.escape(said)):
            read(schema, JsonOptions(), strict=strict)


def test_annotations_are_distinguished_from_assertions():
    assert asserted({"title": "t", "x-mine": 1, "uniqueItems": False, "type": "array"}) == ["type"]
