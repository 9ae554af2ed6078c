"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

from graftlm.testing import AttentionBackendConformance

from graftlm_new_plugin import provide_attention_backends

(PROVIDER,) = provide_attention_backends()


class TestContract(AttentionBackendConformance):
    capabilities = PROVIDER.capabilities

    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)


class TestFewQueriesAtOnce(AttentionBackendConformance):
    capabilities = PROVIDER.capabilities
    parameters = {  # noqa: RUF012
        "page_size": (4,),
        "dtype": ("float32",),
        "head_dim": (16,),
        "group": (2,),
        "window": (7,),
        "seed": (0,),
    }

    def create(self, context):
        return PROVIDER.create(PROVIDER.options(queries_at_once=3), context)
