import pytest
import torch

from graftlm.assembly.graphs import wants_graphs
from graftlm.assembly.state_memory import check_states_supported, size_states
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionCapabilities, StateLayer, StateTensor
from graftlm.errors import ConfigError
from graftlm.registry import Registry

REGISTRY = Registry.load()
#: 40 bytes and 64 bytes per slot.
LAYERS = (
    StateLayer(0, (StateTensor("conv", (2, 5), torch.float32),)),
    StateLayer(1, (StateTensor("conv", (2, 8), torch.bfloat16), StateTensor("recurrent", (8,), torch.float32))),
)


def size(budget_bytes, layers=LAYERS, **settings):
    return size_states(EngineConfig(**settings), REGISTRY, layers, budget_bytes)


@pytest.mark.parametrize(
    ("budget_bytes", "settings", "num_snapshots"),
    [
        (1 << 20, {}, 8 * 64),
        (1 << 20, {"scheduling": {"max_running_requests": 3}}, 24),
        (65 * 104 + 4 * 7 * 104, {}, 7),  # a quarter of the rest
        (65 * 104, {}, 0),
        (65 * 104, {"memory": {"state_snapshots": 1000}}, 1000),
        (1 << 20, {"memory": {"state_snapshots": 0}}, 0),
        (1 << 20, {"cache": {"name": "chunk"}}, 0),
    ],
)
def test_the_number_of_snapshots(budget_bytes, settings, num_snapshots):
    memory = size(budget_bytes, **settings)
    assert memory.slot_bytes == 104
    assert memory.num_snapshots == num_snapshots
    assert memory.num_bytes == (1 + memory.num_rows + num_snapshots) * 104


def test_models_without_states_need_no_memory():
    assert size(0, ()) is None


def test_states_of_too_many_running_requests_are_refused():
    with pytest.raises(ConfigError, match=r"max_running_requests is 64: .* The largest value that fits is 9"):
        size(10 * 104)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": {"name": "hicache"}}, "cache.name is hicache, .* Set cache.name: radix"),
        ({"cache": {"name": "swa_radix"}}, "cache.name is swa_radix"),
        ({"speculation": {"drafter": {"name": "radix"}}}, "speculation.drafter selects radix, .* recurrent state"),
        ({"grammar": {"jump_forward": "exact"}}, "grammar.jump_forward is exact, .* recurrent state"),
    ],
)
def test_settings_that_do_not_support_states_are_refused(settings, message):
    config = EngineConfig(**settings)
    check_states_supported(config, REGISTRY, ())
    with pytest.raises(ConfigError, match=message):
        check_states_supported(config, REGISTRY, LAYERS)


def test_steps_with_states_are_not_captured():
    can, device = AttentionCapabilities(graph=True), torch.device("cuda")
    assert not wants_graphs(EngineConfig(), can, device, has_states=True)
    with pytest.raises(ConfigError, match=r"execution.graphs is true, but steps of a model with a recurrent state"):
        wants_graphs(EngineConfig(execution={"graphs": True}), can, device, has_states=True)
