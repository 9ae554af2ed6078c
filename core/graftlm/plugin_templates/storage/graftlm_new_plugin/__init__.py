"""A graftlm plugin: the KV storage `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import KVStorage, StorageContext

from graftlm_new_plugin.storage import SqliteStorage, SqliteStorageOptions

__all__ = ["provide_kv_storages"]


def _create(options: SqliteStorageOptions, context: StorageContext) -> KVStorage:
    return SqliteStorage(options, context)


@hookimpl
def provide_kv_storages() -> list[Provider[KVStorage]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Blocks in one SQLite file",
            api_version=1,
            create=_create,
            options=SqliteStorageOptions,
        )
    ]
