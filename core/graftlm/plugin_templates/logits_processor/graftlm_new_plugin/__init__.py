"""A graftlm plugin: the logits processor `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import LogitsContext, LogitsProcessor

from graftlm_new_plugin.options import RecentPenaltyOptions

__all__ = ["provide_logits_processors"]


def _create(options: RecentPenaltyOptions, context: LogitsContext) -> LogitsProcessor:
    from graftlm_new_plugin.processor import RecentPenalty  # imports torch

    return RecentPenalty(options)


@hookimpl
def provide_logits_processors() -> list[Provider[LogitsProcessor]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Makes recently generated tokens less likely",
            api_version=1,
            create=_create,
            options=RecentPenaltyOptions,
        )
    ]
