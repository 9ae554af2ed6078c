"""Adapter slots are filled and emptied at the right time, with a step loop whose requests the test counts."""

from collections import Counter
from types import SimpleNamespace

import pytest

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.errors import AdapterError
from graftlm.lora.adapters import AdapterCatalog
from graftlm.lora.peft_adapter import AdapterWeights


class Layers:
    """Records the operations on slots."""

    def __init__(self):
        self.done = []

    def set(self, slot, factors):
        self.done.append(("set", slot))
        if factors is None:
            raise AdapterError("not finite")

    def clear(self, slots):
        self.done.append(("clear", *sorted(slots)))


class Rig:
    """A loader with two slots; `used` counts unfinished requests by slot."""

    def __init__(self):
        self.used = Counter()
        self.layers = Layers()
        loop = SimpleNamespace(
            scheduler=SimpleNamespace(used_adapter_slots=self.used), run_on_device=lambda function: function()
        )
        self.loader = AdapterLoader(loop, AdapterCatalog(2), self.layers, lambda path: AdapterWeights({}, "digest"))

    def install(self, name, factors=()):
        return self.loader.install(name, f"/{name}", AdapterWeights(factors, f"digest of {name}"))


def test_a_slot_is_emptied_when_its_adapter_is_unloaded():
    rig = Rig()
    rig.install("a")
    assert rig.loader.unload("a") == 0
    assert rig.layers.done == [("set", 1), ("clear", 1)]


def test_a_slot_in_use_is_emptied_at_the_next_change_after_its_requests():
    rig = Rig()
    rig.install("a")
    rig.used[1] = 3
    assert rig.loader.unload("a") == 3
    rig.install("b")
    assert rig.layers.done == [("set", 1), ("set", 2)]
    del rig.used[1]
    rig.install("c")
    assert rig.layers.done == [("set", 1), ("set", 2), ("clear", 1), ("set", 1)]


def test_a_refused_adapter_gets_no_name_and_no_slot():
    rig = Rig()
    with pytest.raises(AdapterError, match="not finite"):
        rig.install("a", None)
    assert not rig.loader.loaded
    assert rig.install("b").slot == 1
