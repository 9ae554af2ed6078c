"""A graftlm plugin: the model `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import Model, ModelCapabilities, ModelContext, NoOptions

__all__ = ["provide_models"]


def _create(options: NoOptions, context: ModelContext) -> Model:
    from graftlm_new_plugin.model import Decoder  # imports torch

    return Decoder(context)


@hookimpl
def provide_models() -> list[Provider[Model]]:
    """Offer `new-plugin`, for checkpoints whose config.json has one of its architectures."""
    return [
        Provider(
            name="new-plugin",
            summary="A pre-norm decoder with rotary positions and grouped-query attention",
            api_version=1,
            create=_create,
            options=NoOptions,
            capabilities=ModelCapabilities(
                architectures=("graftlm_new_plugin",),  # as in config.json
                tensor_parallel=True,
            ),
        )
    ]
