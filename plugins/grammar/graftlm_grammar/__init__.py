"""Grammar backends: `xgrammar`, `llguidance`, `outlines`. Importing this package imports none of these libraries."""

from collections.abc import Iterable
from importlib.util import find_spec

from graftlm.contracts import GrammarBackend, GrammarContext, Platform, Provider
from graftlm.hookspecs import hookimpl
from graftlm_grammar.options import LLGuidanceOptions, OutlinesOptions, XGrammarOptions

__all__ = ["LLGuidanceOptions", "OutlinesOptions", "XGrammarOptions", "provide_grammar_backends"]


def _xgrammar_unavailable(platform: Platform) -> str | None:
    return None if find_spec("xgrammar") else "the package xgrammar is missing; pip install xgrammar"


def _create_xgrammar(options: XGrammarOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(options, context)


def _llguidance_unavailable(platform: Platform) -> str | None:
    return None if find_spec("llguidance") else "the package llguidance is missing; pip install llguidance"


def _create_llguidance(options: LLGuidanceOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_grammar.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend(options, context)


def _outlines_unavailable(platform: Platform) -> str | None:
    return None if find_spec("outlines_core") else "the package outlines_core is missing; pip install outlines_core"


def _create_outlines(options: OutlinesOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_grammar.outlines_backend import OutlinesBackend

    return OutlinesBackend(options, context)


@hookimpl
def provide_grammar_backends() -> Iterable[Provider[GrammarBackend]]:
    """Return the providers of `xgrammar`, `llguidance` and `outlines`."""
    return [
        Provider(
            name="xgrammar",
            summary="JSON schemas, regular expressions and EBNF, with the xgrammar library",
            api_version=1,
            create=_create_xgrammar,
            options=XGrammarOptions,
            unavailable=_xgrammar_unavailable,
            rank=10,
        ),
        Provider(
            name="llguidance",
            summary="JSON schemas, also with combined keywords such as allOf, regular expressions and EBNF, with the "
            "llguidance library",
            api_version=1,
            create=_create_llguidance,
            options=LLGuidanceOptions,
            unavailable=_llguidance_unavailable,
            rank=5,
        ),
        Provider(
            name="outlines",
            summary="JSON schemas, regular expressions and choices as automata, with the outlines_core library",
            api_version=1,
            create=_create_outlines,
            options=OutlinesOptions,
            unavailable=_outlines_unavailable,
            rank=1,
        ),
    ]
