"""Conditions under which an engine runs one-token steps as graphs."""

import logging

import pytest
import torch

from graftlm import EngineConfig
from graftlm.assembly.graphs import capture_graphs, wants_graphs
from graftlm.contracts import AttentionCapabilities
from graftlm.errors import ConfigError, GraphCaptureError
from graftlm.execution.kv_store import KVStore

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("setting", "can_capture", "device", "expected"),
    [
        ("auto", True, "cuda", True),
        ("auto", False, "cuda", False),
        ("auto", True, "cpu", False),
        (False, True, "cuda", False),
        (True, True, "cuda", True),
        (True, False, "cpu", True),
    ],
)
def test_auto_captures_graphs_if_device_and_backend_support_it(setting, can_capture, device, expected):
    config = EngineConfig(execution={"graphs": setting})
    assert wants_graphs(config, AttentionCapabilities(graph=can_capture), torch.device(device)) is expected


def test_a_backend_without_capture_is_refused_if_graphs_are_required():
    with pytest.raises(
        ConfigError, match=r"execution\.graphs is true, but the attention backend does not support CUDA graphs"
    ):
        wants_graphs(EngineConfig(execution={"graphs": True}), AttentionCapabilities(), torch.device("cuda"))


class Uncapturable:
    """A model and backend that a graph cannot capture."""

    def prepare(self, batch):
        pass

    def forward(self, batch):
        raise GraphCaptureError("it looks at numbers")


@pytest.mark.parametrize("setting", ["auto", True])
def test_a_model_that_cannot_be_captured_runs_without_graphs_unless_they_are_required(setting, caplog):
    config = EngineConfig(execution={"graphs": setting})
    arguments = (
        config,
        Uncapturable().forward,
        Uncapturable(),
        KVStore([], 8, 1, torch.float32, CPU),
        8,
        lambda _: None,
    )
    if setting is True:
        with pytest.raises(GraphCaptureError, match="it looks at numbers"):
            capture_graphs(*arguments)
        return
    with caplog.at_level(logging.WARNING):
        assert capture_graphs(*arguments) is None
    assert "decode steps run without CUDA graphs" in caplog.text
    assert "it looks at numbers" in caplog.text


def test_each_batch_size_is_reported_during_capture():
    class Model(Uncapturable):
        def forward(self, batch):
            return torch.zeros(batch.num_tokens, 3)

    stages = []
    config = EngineConfig(execution={"graphs": True, "graph_batch_sizes": [1, 4]})
    capture_graphs(config, Model().forward, Model(), KVStore([], 8, 1, torch.float32, CPU), 8, stages.append)
    assert stages == ["capturing graphs, batch size 4", "capturing graphs, batch size 1"]
