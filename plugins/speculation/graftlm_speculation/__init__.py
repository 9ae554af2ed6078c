"""The built-in drafters `radix`, `suffix` and `draft_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_speculation.options import DraftModelDrafterOptions, SuffixOptions

if TYPE_CHECKING:
    from graftlm.contracts import Drafter, DrafterContext, NoOptions

__all__ = ["provide_drafters"]


def _create_radix(options: NoOptions, context: DrafterContext) -> Drafter:
    from graftlm_speculation.radix import RadixDrafter

    return RadixDrafter(context.continuation)


def _create_suffix(options: SuffixOptions, context: DrafterContext) -> Drafter:
    from graftlm_speculation.suffix import SuffixDrafter

    return SuffixDrafter(options)


def _create_draft_model(options: DraftModelDrafterOptions, context: DrafterContext) -> Drafter:
    from graftlm_speculation.draft_model import DraftModelDrafter

    return DraftModelDrafter(options, context.load_model(options.path, options.kv_tokens))


@hookimpl
def provide_drafters() -> list[Provider[Drafter]]:
    """Return the providers of the built-in drafters."""
    return [
        Provider(
            name="radix",
            summary="Drafts the tokens that follow the request's tokens in the prefix cache; for regenerated and "
            "replayed output",
            api_version=1,
            create=_create_radix,
            rank=20,
        ),
        Provider(
            name="suffix",
            summary="Drafts the tokens after an earlier occurrence of the request's latest tokens, in the request or "
            "in the prefix cache; for copied text",
            api_version=1,
            create=_create_suffix,
            options=SuffixOptions,
            rank=10,
        ),
        Provider(
            name="draft_model",
            summary="Drafts the greedy output of a smaller model of the same vocabulary; for new text",
            api_version=1,
            create=_create_draft_model,
            options=DraftModelDrafterOptions,
        ),
    ]
