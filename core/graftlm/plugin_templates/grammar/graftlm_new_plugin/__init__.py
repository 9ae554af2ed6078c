"""A graftlm plugin: the grammar backend `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import GrammarBackend, GrammarContext

from graftlm_new_plugin.options import ChoiceOptions

__all__ = ["provide_grammar_backends"]


def _create(options: ChoiceOptions, context: GrammarContext) -> GrammarBackend:
    from graftlm_new_plugin.choice import ChoiceBackend  # reads the vocabulary

    return ChoiceBackend(options, context)


@hookimpl
def provide_grammar_backends() -> list[Provider[GrammarBackend]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Supports only choices, that is, one of a list of texts",
            api_version=1,
            create=_create,
            options=ChoiceOptions,
            rank=-10,  # low, so that `auto` prefers the backends that support all kinds
        )
    ]
