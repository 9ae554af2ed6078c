from typing import ClassVar

import pytest
import torch

from graftlm.contracts import AttentionCapabilities, AttentionLayer
from graftlm.errors import InvariantError
from graftlm.testing.attention import AttentionBackendConformance
from graftlm.testing.attention_scene import AttentionScene
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm_attention.torch_paged import TorchPagedAttention


@pytest.mark.covering
class TestTorchPagedAttention(AttentionBackendConformance):
    capabilities = AttentionCapabilities(value_prefix=True, sinks=True, kv_dtypes=("int8", "fp8"))
    parameters: ClassVar = {
        **AttentionBackendConformance.parameters,
        "dtype": ("float32", "bfloat16", "float16"),
        "head_dim": (16, 20, 64, 80, 128),
    }

    def create(self, context):
        return TorchPagedAttention(context)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestTorchPagedAttentionOnCuda(TestTorchPagedAttention):
    device = "cuda"


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_chunks_longer_than_a_block_match_the_oracle(window, soft_cap):
    layer = AttentionLayer(0, 2, 1, head_dim=16, scale=0.25, sliding_window=window, soft_cap=soft_cap)
    scene = AttentionScene.draw(
        [(0, 300), (70, 530)], [layer], page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    out = scene.run(TorchPagedAttention).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


def test_contexts_of_very_different_lengths_match_the_oracle():
    layer = AttentionLayer(0, 2, 1, head_dim=16, scale=0.25)
    requests = [(length - 1, 1) for length in (9000, 8000, 700, 650, 500, 30, 29, 2, 1)]
    scene = AttentionScene.draw(requests, [layer], page_size=16, dtype=torch.float32, device=torch.device("cpu"))
    out = scene.run(TorchPagedAttention).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


def test_forward_before_prepare_is_refused():
    layer = AttentionLayer(0, 2, 1, head_dim=16, scale=0.25)
    scene = AttentionScene.draw([(0, 1)], [layer], page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(InvariantError, match="before prepare"):
        TorchPagedAttention(scene.context).forward(*scene.inputs[0], layer)
