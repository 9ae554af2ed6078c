"""The built-in drafters `radix` and `suffix`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_speculation.options import SuffixOptions

if TYPE_CHECKING:
    from graftlm.contracts import Drafter, DrafterContext, NoOptions

__all__ = ["provide_drafters"]


def _create_radix(options: NoOptions, context: DrafterContext) -> Drafter:
    from graftlm_speculation.radix import RadixDrafter

    return RadixDrafter(context.continuation)


def _create_suffix(options: SuffixOptions, context: DrafterContext) -> Drafter:
    from graftlm_speculation.suffix import SuffixDrafter

    return SuffixDrafter(options)


@hookimpl
def provide_drafters() -> list[Provider[Drafter]]:
    """Return the built-in drafters."""
    return [
        Provider(
            name="radix",
            summary="What follows the request's tokens in the prefix cache: regenerated and replayed output",
            api_version=1,
            create=_create_radix,
            rank=20,
        ),
        Provider(
            name="suffix",
            summary="What followed the latest tokens where they occurred before in the request: copied text",
            api_version=1,
            create=_create_suffix,
            options=SuffixOptions,
            rank=10,
        ),
    ]
