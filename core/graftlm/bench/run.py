"""A run of the load generator, from its settings to its report."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import aiohttp
import numpy as np

from graftlm.bench.apis import API_TYPES, RequestOptions
from graftlm.bench.arrivals import arrival_times
from graftlm.bench.caveats import caveats
from graftlm.bench.client import Client, open_session
from graftlm.bench.lag import LagMonitor
from graftlm.bench.load import LoadObserver, LoadPlan, run_load
from graftlm.bench.report import Environment, Report
from graftlm.bench.settings import BenchSettings
from graftlm.bench.summary import summarize
from graftlm.bench.target import BenchError, Target, flush_cache, probe
from graftlm.bench.workload import Workload, make_workload
from graftlm.errors import ConfigError

__all__ = ["Watch", "run_benchmark"]

#: Function from the number of requests to a context, whose value is the observer of the requests.
Watch = Callable[[int], AbstractContextManager[LoadObserver]]

_ARRIVALS_STREAM = 2  # index of the random number stream for arrivals; the workload uses streams 0 and 1


def _no_watch(num_requests: int) -> AbstractContextManager[LoadObserver]:
    return nullcontext(LoadObserver())


async def run_benchmark(
    settings: BenchSettings, *, api_key: str | None = None, allow_failures: bool = False, watch: Watch = _no_watch
) -> Report:
    """Measure a server.

    Args:
        settings: settings of the run.
        api_key: key that is sent as a bearer token and never saved; None: no key.
        allow_failures: whether to continue if a warm-up request fails.
        watch: shows the progress of the measured requests.

    Raises:
        ConfigError: the settings or the dataset are wrong, or do not fit the server.
        BenchError: the server cannot be measured, because it does not answer or a warm-up request fails.
    """
    environment = Environment.now()
    async with open_session(api_key, settings.timeout_s) as session:
        target = await probe(session, settings)
        _check_context(settings, target)
        workload = make_workload(settings, API_TYPES[settings.api].accepts, target.vocab_size)
        client = _client(session, settings, target)
        await _warm_up(client, workload, allow_failures)
        if settings.flush_cache:
            await flush_cache(session, settings.url)
        plan = _plan(settings, workload, client)
        with watch(len(plan.requests)) as observer:
            async with LagMonitor() as lag:
                records = await run_load(client, plan, observer)
    summary = summarize(records, settings, lag)
    return Report(
        label=settings.label,
        settings=settings,
        environment=environment,
        server=target,
        warnings=caveats(settings, workload, summary),
        summary=summary,
        requests=records,
    )


def _client(session: aiohttp.ClientSession, settings: BenchSettings, target: Target) -> Client:
    options = RequestOptions(target.model or "", settings.temperature, settings.ignore_eos)
    return Client(session, settings.url, API_TYPES[settings.api](options))


def _check_context(settings: BenchSettings, target: Target) -> None:
    """Check that random prompts and their outputs fit into the model's context.

    Raises:
        ConfigError: the prompts do not fit, so the server would refuse all of them.
    """
    longest = settings.prompt_tokens + settings.output_tokens
    if settings.dataset is None and target.context_len is not None and longest > target.context_len:
        raise ConfigError(
            f"--prompt-tokens {settings.prompt_tokens} plus --output-tokens {settings.output_tokens} is {longest}, but "
            f"the model's context has only {target.context_len} tokens"
        )


async def _warm_up(client: Client, workload: Workload, allow_failures: bool) -> None:
    requests = [client.prepare(i, item) for i, item in enumerate(workload.warmup)]
    records = await run_load(client, LoadPlan(requests, concurrency=1))
    failure = next((record.failure for record in records if record.failure is not None), None)
    if failure is not None and not allow_failures:
        raise BenchError(f"a warm-up request failed ({failure.kind}): {failure.message}")


def _plan(settings: BenchSettings, workload: Workload, client: Client) -> LoadPlan:
    requests = [client.prepare(i, item) for i, item in enumerate(workload.items)]
    arrivals_s = None
    if settings.request_rate is not None:
        rng = np.random.default_rng([settings.seed, _ARRIVALS_STREAM])
        arrivals_s = arrival_times(len(requests), settings.request_rate, settings.burstiness, rng)
    return LoadPlan(requests, arrivals_s, settings.concurrency)
