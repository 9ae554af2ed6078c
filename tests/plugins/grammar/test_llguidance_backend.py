"""The `llguidance` backend against its contract, and what its own code adds to the library."""

import graftlm_grammar
from graftlm.contracts import API_VERSION, GrammarContext, Platform
from graftlm.testing import GrammarBackendConformance

PROVIDER = next(one for one in graftlm_grammar.provide_grammar_backends() if one.name == "llguidance")


class TestLLGuidance(GrammarBackendConformance):
    def create(self, context: GrammarContext):
        return PROVIDER.create(PROVIDER.options(), context)


def test_the_provider_is_there_where_the_library_is():
    assert PROVIDER.api_version == API_VERSION
    assert PROVIDER.unavailable(Platform()) is None
