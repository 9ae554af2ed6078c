"""Runs graftlm's conformance kit on `new-plugin`, and tests the plugin's own behaviour."""

import pytest
import torch
from graftlm.contracts import LinearLayer
from graftlm.testing import QuantizationConformance

from graftlm_new_plugin import provide_quantizations
from graftlm_new_plugin.options import RowInt8Options
from graftlm_new_plugin.row_int8 import RowInt8


class TestContract(QuantizationConformance):
    largest_error = 0.01

    def create(self, context):
        (provider,) = provide_quantizations()
        return provider.create(provider.options(), context)


@pytest.mark.parametrize(("in_features", "is_converted"), [(127, False), (128, True)])
def test_small_layers_stay_as_they_are(in_features, is_converted):
    quantization = RowInt8(RowInt8Options(min_in_features=128))
    layer = LinearLayer("layers.0.mlp.down", ("down_proj",), in_features, 8)
    assert (quantization.obstacle(layer) is None) is is_converted


def test_whole_numbers_up_to_127_are_kept_exactly():
    weight = torch.tensor([[127.0, -3.0, 64.0, 0.0], [-127.0, 1.0, 2.0, 3.0]])
    assert torch.equal(RowInt8(RowInt8Options()).convert(weight, None).decoded(), weight)
