"""Names and slots of adapters, and the cache namespaces that belong to them."""

import pytest

from graftlm.errors import AdapterError, AdapterNotFoundError
from graftlm.lora.adapters import AdapterCatalog, LoadedAdapter, check_adapter_name, prefix_namespace


def loaded(catalog, name, used=()):
    adapter = LoadedAdapter(name, f"/adapters/{name}", catalog.free_slot(used), digest=name)
    catalog.add(adapter)
    return adapter


def test_an_unloaded_adapter_keeps_its_slot_while_requests_use_it():
    catalog = AdapterCatalog(2)
    first = loaded(catalog, "sql")
    assert catalog.remove("sql") is first
    assert first.is_unloaded
    second = loaded(catalog, "sql", used={first.slot})
    assert (first.slot, second.slot, catalog.find("sql")) == (1, 2, second)
    with pytest.raises(AdapterError, match=r"all 2 adapter slots .* sql; 1 were unloaded but have unfinished requests"):
        catalog.free_slot({first.slot})
    assert catalog.free_slot(()) == 1


def test_the_error_for_an_unknown_name_lists_the_loaded_adapters():
    catalog = AdapterCatalog(2)
    with pytest.raises(AdapterNotFoundError, match=r"no adapter 'x' is loaded\. Loaded: none\."):
        catalog.find("x")
    loaded(catalog, "sql")
    loaded(catalog, "chat")
    for ask in (catalog.find, catalog.remove):
        with pytest.raises(AdapterNotFoundError, match=r"Loaded: chat, sql\."):
            ask("x")


def test_a_name_in_use_is_refused():
    catalog = AdapterCatalog(2)
    loaded(catalog, "sql")
    with pytest.raises(AdapterError, match=r"'sql' is already loaded from /adapters/sql\. Unload it first"):
        catalog.check_new("sql")


@pytest.mark.parametrize("name", ["", "a:b", "a b", "a\n", "x" * 129, None, 3])
def test_names_that_cannot_be_part_of_a_model_id_are_refused(name):
    with pytest.raises(AdapterError, match="an adapter's name"):
        check_adapter_name(name)


@pytest.mark.parametrize("name", ["sql", "org/name-v1.2_b", "日本"])
def test_other_names_are_accepted(name):
    check_adapter_name(name)


def test_each_pair_of_salt_and_adapter_has_its_own_namespace():
    parts = ["", "a", "lora:", "salt:", "lora:a:", "lora:a:b", "salt:lora:a:", ":", "a:b"]
    pairs = [(salt, adapter) for salt in parts for adapter in (None, "a", "b")]
    assert len({prefix_namespace(*pair) for pair in pairs}) == len(pairs)
    assert prefix_namespace("tenant", None) == "tenant"
