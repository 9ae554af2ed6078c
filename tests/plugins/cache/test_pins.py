import pytest

from graftlm.contracts import NodeStats
from graftlm.testing import CacheRig
from graftlm_cache.node import RadixNode
from graftlm_cache.pins import MAX_PINS, Pins
from graftlm_cache.radix import RadixCache


def leaf() -> RadixNode:
    return RadixNode(1, "", RadixNode.root(0, ""), bytes(4), bytes(4), NodeStats(created=0.0, last_access=0.0))


@pytest.mark.parametrize("unpins", [False, True])
def test_renewed_pins_leave_no_stale_entries(unpins):
    pins, node, other = Pins(), leaf(), leaf()
    pins.add("", b"other", other, 0.5)  # this pin ends first, so it hides the stale entries after it
    for round_idx in range(2000):
        pins.add("", b"same", node, 1.0 + round_idx)
        if unpins:
            pins.remove("", b"same")
    assert pins.num_ends < 100
    assert (node.num_pins, other.num_pins) == (0 if unpins else 1, 1)


def test_after_a_sweep_pins_still_end_in_order():
    pins, nodes = Pins(), [leaf() for _ in range(50)]
    for round_idx in range(5):
        for number, node in enumerate(nodes):
            pins.add("", bytes([number]), node, (number * 7) % 50 + round_idx)
    order = [pins.pop_first() for _ in nodes]
    assert order == [nodes[number] for number in sorted(range(50), key=lambda number: (number * 7) % 50)]
    assert pins.pop_first() is None


def test_namespaces_have_separate_pins():
    pins, one, other = Pins(), leaf(), leaf()
    pins.add("a", b"bc", one, 1.0)
    pins.add("ab", b"c", other, 1.0)
    assert pins.remove("a", b"bc") is one
    assert len(pins) == 1


def test_too_many_pins_are_refused_but_a_renewal_is_accepted():
    pins = Pins(max_pins=2)
    for name in (b"a", b"b"):
        pins.add("", name, leaf(), 1.0)
    assert not pins.has_room("", b"c")
    assert pins.has_room("", b"a")
    pins.pop_first()
    assert pins.has_room("", b"c")


def test_expired_pins_are_not_reported_by_walk_or_unpin():
    rig = CacheRig(RadixCache, 1)
    rig.insert(rig.key(1, 2))
    rig.cache.pin(rig.key(1, 2), 10.0)
    assert [view.num_pins for view in rig.cache.walk()] == [1]
    rig.clock.now += 1000.0
    assert [view.num_pins for view in rig.cache.walk()] == [0]
    assert not rig.cache.unpin(rig.key(1, 2))


def test_a_pin_beyond_the_limit_is_refused_until_another_ends():
    rig = CacheRig(RadixCache, 1)
    rig.insert(rig.key(1))
    for letter in range(MAX_PINS):
        assert rig.cache.pin(rig.key(1, letter), 1e6 if letter else 1e5) == 1
    assert rig.cache.pin(rig.key(1, MAX_PINS), 1e6) == 0
    assert rig.cache.pin(rig.key(1, 7), 1e6) == 1
    rig.clock.now += 2e5
    assert rig.cache.pin(rig.key(1, MAX_PINS), 1e6) == 1
