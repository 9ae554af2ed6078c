"""How fused operations are chosen and passed to layers."""

import logging
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graftlm.errors import ProviderUnavailableError
from graftlm.layers import GatedMLP, GemmaQKNorm, GemmaRMSNorm, QKNorm, RMSNorm, RotaryEmbedding
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import NativeOps, TorchOps, bind_ops, choose_ops, fused_ops
from graftlm.layers.rotary import Frequencies

CPU = torch.device("cpu")


class RecordingOps(TorchOps):
    """Records which operations are called."""

    def __init__(self):
        self.calls = []

    def add_rms_norm(self, x, residual, weight, eps):
        self.calls.append("add_rms_norm")
        return super().add_rms_norm(x, residual, weight, eps)

    def head_norm(self, heads, weight, eps):
        self.calls.append("head_norm")
        return super().head_norm(heads, weight, eps)

    def rotate(self, heads, cos, sin):
        self.calls.append("rotate")
        return super().rotate(heads, cos, sin)

    def act_and_mul(self, gate_up, hidden_act):
        self.calls.append(hidden_act)
        return super().act_and_mul(gate_up, hidden_act)


class Unrelated(nn.Module):
    """A third-party module with an attribute of the same name."""

    ops = "its own"


def test_every_layer_calls_the_operations_that_it_got():
    kind = {"device": CPU, "dtype": torch.float32}
    model = nn.ModuleDict(
        {
            "norm": RMSNorm(8, 1e-5, **kind),
            "gemma_norm": GemmaRMSNorm(8, 1e-5, device=CPU),
            "heads": QKNorm(2, 1, 4, 1e-5, **kind),
            "gemma_heads": GemmaQKNorm(2, 1, 4, 1e-5, device=CPU),
            "rotary": RotaryEmbedding(Frequencies(torch.ones(2)), **kind),
            "mlp": GatedMLP(8, 16, "gelu", **kind),
            "unrelated": Unrelated(),
        }
    )
    ops = RecordingOps()
    bind_ops(model, ops)
    x, heads = torch.randn(3, 8), torch.randn(3, 3, 4)
    model["norm"](x)
    model["gemma_norm"](x)
    model["heads"](heads)
    model["gemma_heads"](heads)
    model["rotary"](torch.arange(3))(heads)
    model["mlp"](x)
    assert ops.calls == ["add_rms_norm", "add_rms_norm", "head_norm", "head_norm", "rotate", "gelu"]
    assert model["unrelated"].ops == "its own"


def test_a_model_that_is_not_a_module_is_unchanged():
    model = SimpleNamespace(ops="its own", norm=RMSNorm(8, 1e-5, device=CPU, dtype=torch.float32))
    before = model.norm.ops
    bind_ops(model, RecordingOps())
    assert model.ops == "its own"
    assert model.norm.ops is before


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_gets_the_compiled_kernels(dtype):
    assert isinstance(choose_ops(CPU, dtype, user_cache_dir(os.environ)), NativeOps)


@pytest.mark.parametrize(
    ("device", "dtype", "compiler", "reason"),
    [
        ("cpu", torch.float16, "g++", "no fused operations in torch.float16 on a cpu"),
        ("meta", torch.float32, "g++", "no fused operations in torch.float32 on a meta"),
        ("cpu", torch.float32, "no-such-compiler", "no C\\+\\+ compiler 'no-such-compiler'"),
    ],
)
def test_otherwise_pytorchs_operations_are_used_and_the_log_has_the_reason(
    tmp_path, caplog, device, dtype, compiler, reason
):
    caplog.set_level(logging.INFO, logger="graftlm.layers.ops")
    assert isinstance(choose_ops(torch.device(device), dtype, tmp_path, compiler), TorchOps)
    assert len(caplog.records) == 1
    with pytest.raises(ProviderUnavailableError, match=reason):
        fused_ops(torch.device(device), dtype, tmp_path, compiler)
