"""`new-plugin` under graftlm's conformance kit, and what is particular to it."""

import torch
from graftlm.testing import AttentionBackendConformance

from graftlm_new_plugin import provide_attention_backends

(PROVIDER,) = provide_attention_backends()


class TestContract(AttentionBackendConformance):
    capabilities = PROVIDER.capabilities

    def create(self, context):
        return PROVIDER.create(PROVIDER.options(), context)


class TestFewQueriesAtOnce(AttentionBackendConformance):
    capabilities = PROVIDER.capabilities

    def create(self, context):
        return PROVIDER.create(PROVIDER.options(queries_at_once=3), context)


def test_it_may_run_anywhere():
    assert PROVIDER.capabilities.devices == ("cpu", "cuda")
    assert torch.device(PROVIDER.capabilities.devices[0]).type == "cpu"
