"""Starting a server from a Python program."""

import types

import pytest

from graftlm import EngineConfig
from graftlm.errors import PluginLoadError
from graftlm.server.serve import serve


@pytest.mark.parametrize("plugin", [object(), type("Plugin", (), {})(), types.ModuleType("made_up")])
def test_a_plugin_that_other_processes_cannot_import_is_refused(plugin):
    with pytest.raises(PluginLoadError, match="the server's other processes cannot import it"):
        serve(EngineConfig(), plugins=[plugin])
