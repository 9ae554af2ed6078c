"""Implements `graftlm serve`: starts and stops the processes and the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from graftlm.assembly.machine_check import check_files, check_machine, must_download
from graftlm.checkpoint import download_model
from graftlm.config import EngineConfig
from graftlm.errors import ConfigError, PluginLoadError
from graftlm.logs import configure_logging
from graftlm.processes.launcher import Launcher
from graftlm.processes.routing import make_router
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.processes.trace_lines import trace_block_tokens
from graftlm.processes.trace_recorder import TraceRecorder
from graftlm.registry import Registry, check, probe_platform
from graftlm.routing import Router
from graftlm.server import openai
from graftlm.server.app import create_app, create_local_app
from graftlm.server.batches import make_batch_router, make_batch_service
from graftlm.server.connections import ConnectionLimits, ConnectionTable
from graftlm.server.dashboard import History
from graftlm.server.dashboard import make_router as make_dashboard_router
from graftlm.server.file_limit import connections_under, num_open_files, raise_file_limit
from graftlm.server.http_protocol import HttpProtocol
from graftlm.server.load_log import LoadLog
from graftlm.server.metrics import ServerMetrics
from graftlm.server.metrics import make_router as make_metrics_router
from graftlm.server.metrics_aliases import AliasSource, add_aliases
from graftlm.server.traces import open_traces, tracing_layers

if TYPE_CHECKING:
    from graftlm.server.traces.exporter import TraceExporter

__all__ = ["dry_run", "serve"]

logger = logging.getLogger(__name__)

#: Number of seconds for which clients can read the rest of their answers after the last request has ended.
_LAST_BYTES_S = 5.0
#: Seconds for which /health reports the death of a process before the server exits, so that a load balancer notices.
_REPORT_DEATH_S = 5.0
#: Maximum time in seconds for the export of the last traces.
_LAST_TRACES_S = 5.0


def serve(
    config: EngineConfig,
    *,
    plugins: Sequence[object] = (),
    on_ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Run the server until SIGTERM or SIGINT. A second signal stops it immediately.

    Args:
        config: the configuration.
        plugins: modules with hooks, or their import names, in addition to the installed plugins. Other objects are
            not accepted, because every process imports the plugins.
        on_ready: called with the server's URL when it accepts requests.

    Returns: the exit status: 0, or 1 if a process died and was not restarted.

    Raises:
        GraftlmError: the configuration, a plugin or the checkpoint is invalid. The server has not begun to listen.
    """
    if sys.platform == "win32":
        raise ConfigError(
            "graftlm serve needs Linux or macOS: its processes use Unix sockets and signals. On Windows, run it in "
            "WSL, or use `graftlm generate`, `graftlm chat` or graftlm.Engine."
        )
    config = _with_plugins(config, plugins)
    configure_logging(config.server.log_format, config.server.log_level, "main")
    registry = Registry.load(config.plugins, platform=probe_platform(config.model.device))
    findings = check(config, registry)
    for warning in findings.warnings:
        logger.warning("%s", warning)
    if config.model.download and not findings.errors:
        download_model(config.model.path, with_code=config.model.trust_remote_code)
    # Without this check, another process would find these errors later, and the messages would lack the line number in
    # the configuration.
    errors = findings.errors + check_files(config, registry)
    if errors:
        raise ConfigError("\n".join(errors))
    raise_file_limit()
    _bind(config).close()  # raises an error for a port in use before the weights are loaded
    with _trace_recorder(config) as recorder, asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_Service(config, registry, on_ready, recorder).run())


def dry_run(config: EngineConfig) -> list[str]:
    """Run all steps of a start before the loading of weights, and return the plan of the start as lines.

    Raises:
        GraftlmError: the server would not start. The message of a ConfigError has one line for each problem.
    """
    from graftlm.assembly.start_plan import plan_start
    from graftlm.assembly.target import detect_platform

    registry = Registry.load(config.plugins, platform=probe_platform(config.model.device))
    findings = check(config, registry)
    errors = findings.errors + check_machine(config, registry)
    if errors:
        raise ConfigError("\n".join(errors))
    listener = _bind(config)
    url = _url(listener)
    listener.close()
    if must_download(config):
        plan = f"model: {config.model.path} is not in the local cache; the start downloads it"
        return [plan, f"address: {url} is free"]
    platform = detect_platform(config)
    lines = plan_start(config, Registry.load(config.plugins, (), platform), platform)
    return [*lines, f"address: {url} is free", *(f"warning: {warning}" for warning in findings.warnings)]


def _trace_recorder(config: EngineConfig) -> contextlib.AbstractContextManager[TraceRecorder | None]:
    """Open the file `server.record_trace` for finished requests, if it is set. The end of the context closes it.

    Raises:
        ConfigError: the file cannot be opened.
    """
    path = config.server.record_trace
    if path is None:
        return contextlib.nullcontext()
    return TraceRecorder(Path(path), trace_block_tokens(config.cache.page_size))


def _with_plugins(config: EngineConfig, plugins: Sequence[object]) -> EngineConfig:
    """Return a configuration with further plugins, which every process imports.

    Raises:
        PluginLoadError: a plugin is not an importable module, so other processes cannot import it by its name.
    """
    names = list(config.plugins.modules)
    for plugin in plugins:
        if isinstance(plugin, str):
            names.append(plugin)
            continue
        if not isinstance(plugin, ModuleType) or plugin.__spec__ is None:
            raise PluginLoadError(
                f"plugin {plugin!r} is not an importable module, so the server's other processes cannot import it. Put "
                "its hooks into a module, and pass the module."
            )
        names.append(plugin.__name__)
    return EngineConfig.load(config, plugins={"modules": names}) if plugins else config


class _Service:
    """One run of the server."""

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        on_ready: Callable[[str], None],
        recorder: TraceRecorder | None,
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._registry = registry
        self._on_ready = on_ready
        self._start_s = time.monotonic()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        traces = open_traces(self._config.server.traces, os.environ)
        router = make_router(self._config, self._registry)
        launcher = Launcher(self._config, block_tokens=router.event_block_tokens)
        try:
            metrics = ServerMetrics()
            manager = await self._unless_stopped(self._assemble(launcher, metrics, router))
            return 0 if manager is None else await self._serve(launcher, manager, metrics, traces)
        finally:
            if traces is not None:
                await self._close_traces(traces)
            await launcher.close()
            logger.info("stopped")

    async def _close_traces(self, traces: TraceExporter) -> None:
        """Export the last traces, until a second signal."""
        closing = asyncio.ensure_future(traces.close(_LAST_TRACES_S))
        stop_now = asyncio.ensure_future(self._stop_now.wait())
        either: set[asyncio.Future[Any]] = {closing, stop_now}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        stop_now.cancel()

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning("%s again: stopping at once", number.name)
            self._stop_now.set()
        else:
            limit_s = self._config.server.drain_timeout_s
            logger.info(
                "%s: no new requests are accepted; current ones have %.0f s to end; another signal aborts them",
                number.name,
                limit_s,
            )
            self._stop.set()

    async def _unless_stopped(self, work: Any) -> Any:
        """Wait for `work` or for the stop signal. Return the result of `work`; None if the signal came first."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def _assemble(self, launcher: Launcher, metrics: ServerMetrics, router: Router) -> TokenizerManager:
        await launcher.start()
        assembly = await asyncio.to_thread(
            import_module, "graftlm.processes.assembly"
        )  # in a thread, since the import of torch takes about a second
        manager: TokenizerManager = await assembly.assemble_manager(
            self._config, self._registry, launcher, metrics, self._recorder, router
        )
        return manager

    async def _serve(
        self, launcher: Launcher, manager: TokenizerManager, metrics: ServerMetrics, traces: TraceExporter | None
    ) -> int:
        metrics.watch(manager.replicas)
        history = History(manager.replicas.replicas, time.monotonic)
        metrics.forward([history.latencies])
        metrics.forward(
            add_aliases(self._config.server.metrics_aliases, _alias_source(manager, history), metrics.registry)
        )
        listener = _bind(self._config)
        api = openai.make_router(manager)
        batches = make_batch_service(
            manager, create_local_app(api, tracing_layers(traces, manager.model.name, is_local=True))
        )
        routers = [
            make_metrics_router(metrics),
            make_dashboard_router(manager, history),
            make_batch_router(batches, self._config),
        ]
        table = ConnectionTable(_connection_limits(self._config))
        server = _Server(_uvicorn_config(create_app(manager, api=api, extra_routers=routers, traces=traces), table))
        tasks = [asyncio.create_task(table.run())]
        if self._config.server.log_interval_s > 0:
            log = LoadLog(manager.replicas.replicas, time.monotonic, self._config.server.log_interval_s)
            tasks.append(asyncio.create_task(log.run()))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        url = _url(listener)
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        logger.info("ready after %.1f s on %s", time.monotonic() - self._start_s, url)
        self._on_ready(url)
        if batches is not None:
            batches.start()
        status = await self._wait_for_end(launcher)
        if batches is not None:
            await batches.stop()
        await self._drain(manager)
        manager.close()
        server.should_exit = True
        server.force_exit = self._stop_now.is_set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(serving), _LAST_BYTES_S)
        server.force_exit = True
        await serving
        if not server.lifespan.shutdown_event.is_set():  # uvicorn skips this at a forced exit
            await server.lifespan.shutdown()
        for task in tasks:
            task.cancel()
        return status

    async def _wait_for_end(self, launcher: Launcher) -> int:
        """Wait for the stop signal or for the death of a process, and return the exit status."""
        stopped = asyncio.ensure_future(self._stop.wait())
        either: set[asyncio.Future[Any]] = {stopped, launcher.fatal}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not launcher.fatal.done():
            return 0
        logger.error(
            "%s, and server.restart is false or the restart failed: exiting in %.0f s; /health reports the failure "
            "until then",
            launcher.fatal.result(),
            _REPORT_DEATH_S,
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), _REPORT_DEATH_S)
        return 1

    async def _drain(self, manager: TokenizerManager) -> None:
        """Wait until the current requests have ended, for `server.drain_timeout_s` or until a second signal."""
        logger.info("waiting for %d request(s) to end", manager.num_requests)
        drained = asyncio.ensure_future(manager.drain())
        stop_now = asyncio.ensure_future(self._stop_now.wait())
        timeout_s = self._config.server.drain_timeout_s
        either: set[asyncio.Future[Any]] = {drained, stop_now}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stop_now.cancel()
        if not drained.done():
            logger.warning("%d request(s) are aborted", manager.num_requests)
            drained.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its handling of signals, since `_Service` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Install no signal handlers."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Do nothing. This method is never called, because no signal handlers are installed."""


def _alias_source(manager: TokenizerManager, history: History) -> AliasSource:
    return AliasSource(
        model_name=manager.model.name,
        context_len=manager.model.context_len,
        page_size=manager.config.cache.page_size,
        replicas=manager.replicas.replicas,
        latest=lambda: history.latest,
    )


def _connection_limits(config: EngineConfig) -> ConnectionLimits:
    """Return the limits of connections. They depend on the configuration and on the limit of open files."""
    server, scheduling = config.server, config.scheduling
    num_requests = config.parallel.data * (scheduling.max_running_requests + scheduling.max_queued_requests)
    file_limit, num_open = raise_file_limit(), num_open_files()
    room = connections_under(file_limit, num_open, num_requests)
    if server.max_connections is not None and server.max_connections + num_open > file_limit:
        logger.warning(
            "server.max_connections is %d, but the process may open only %d files, and %d are open already. Raise the "
            "limit (ulimit -n)",
            server.max_connections,
            file_limit,
            num_open,
        )
    limits = ConnectionLimits(
        server.max_connections or room, server.max_header_bytes, server.header_timeout_s, server.stall_timeout_s
    )
    logger.info("at most %d connections; the process may open %d files", limits.max_connections, file_limit)
    return limits


def _uvicorn_config(app: FastAPI, table: ConnectionTable) -> uvicorn.Config:
    protocol: Any = partial(HttpProtocol, table=table)
    return uvicorn.Config(
        app,
        loop="none",  # the event loop runs already
        http=protocol,
        ws="none",
        log_config=None,  # uvicorn's messages are written to graftlm's log
        access_log=False,  # `RequestLog` logs requests, with their ids
        server_header=False,
        # Longer than the usual idle timeout of load balancers. If the server closed an idle connection first, the load
        # balancer might send a request on this connection at the same moment.
        timeout_keep_alive=75,
    )


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop does not support this platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _bind(config: EngineConfig) -> socket.socket:
    """Return a socket that is bound to the configured address.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, port = config.server.host, config.server.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            on_error.pop_all()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Set server.host or server.port."
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
