"""The built-in drafters `radix`, `suffix`, `draft_model`, `eagle3` and `mtp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_speculation.options import DraftModelDrafterOptions, Eagle3Options, MtpOptions, SuffixOptions

if TYPE_CHECKING:
    from graftlm.contracts import Drafter, DrafterContext, DraftHead, DraftHeadContext, NoOptions

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


def _create_eagle3(options: Eagle3Options, context: DrafterContext) -> Drafter:
    from graftlm_speculation.head_drafter import HeadDrafter

    def make(head: DraftHeadContext) -> DraftHead:
        # Imported here, because only this drafter needs torch.
        from graftlm_speculation.eagle3_config import read_eagle3_config
        from graftlm_speculation.eagle3_head import Eagle3Head

        num_layers = head.served.config.raw.get("num_hidden_layers", 0)
        return Eagle3Head(read_eagle3_config(head.raw, num_layers, options.hidden_layers), head)

    return HeadDrafter(context.load_head(make, options.path), options.max_drafts)


def _create_mtp(options: MtpOptions, context: DrafterContext) -> Drafter:
    from graftlm_speculation.head_drafter import HeadDrafter

    return HeadDrafter(context.load_head(lambda head: head.model.draft_head(head), None), options.max_drafts)


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
        Provider(
            name="eagle3",
            summary="Drafts with an EAGLE-3 head, which reads hidden states of the served model; for new text",
            api_version=1,
            create=_create_eagle3,
            options=Eagle3Options,
        ),
        Provider(
            name="mtp",
            summary="Drafts with the multi-token-prediction (MTP) layer of the served model's checkpoint; for new text",
            api_version=1,
            create=_create_mtp,
            options=MtpOptions,
        ),
    ]
