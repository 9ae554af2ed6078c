"""Grammar backends for graftlm: `xgrammar`. Importing this package imports neither xgrammar nor torch."""

from collections.abc import Iterable
from importlib.util import find_spec

from graftlm.contracts import GrammarBackend, GrammarContext, Platform, Provider
from graftlm.hookspecs import hookimpl
from graftlm_grammar.options import XGrammarOptions

__all__ = ["XGrammarOptions", "provide_grammar_backends"]


def _xgrammar_unavailable(platform: Platform) -> str | None:
    return None if find_spec("xgrammar") else "the package xgrammar is missing; pip install xgrammar"


def _create_xgrammar(options: XGrammarOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(options, context)


@hookimpl
def provide_grammar_backends() -> Iterable[Provider[GrammarBackend]]:
    """Offer `xgrammar`."""
    return [
        Provider(
            name="xgrammar",
            summary="JSON schemas, regular expressions and EBNF, by the xgrammar library",
            api_version=1,
            create=_create_xgrammar,
            options=XGrammarOptions,
            unavailable=_xgrammar_unavailable,
            rank=10,
        )
    ]
