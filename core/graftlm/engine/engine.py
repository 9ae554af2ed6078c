"""The in-process engine: prompts in, outputs out."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.assembly.assemble import assemble
from graftlm.assembly.engine_parts import EngineParts
from graftlm.assembly.target import detect_platform
from graftlm.config import EngineConfig
from graftlm.contracts import ModelConfig, PrefixKey
from graftlm.engine.engine_thread import EngineThread
from graftlm.engine.job_maker import Adapters, JobMaker, Params
from graftlm.engine.job_runner import JobRunner
from graftlm.engine.jobs import Job
from graftlm.errors import AdapterError
from graftlm.intake import check_ttl
from graftlm.pooling.embeddings import POOLED, EmbeddingForm, embedding_form, pooled_vector
from graftlm.pooling.pooling import SCORES, Pooling
from graftlm.pooling.scoring import Items, Piece, joined, listed, scores_of, scoring_pooling
from graftlm.prompts import Prompt, Prompts, split_prompts
from graftlm.records import EngineStats
from graftlm.registry import Registry
from graftlm.request_options import RequestOptions
from graftlm.tokenization import Tokenizer
from graftlm.types import ClassificationOutput, EmbeddingOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Engine"]


class Engine:
    """A model, ready to generate. Safe to use from several threads and event loops at once.

        engine = Engine(model="demo")
        engine.generate("The capital of France is")[0].text

    Args:
        source: a YAML file, a mapping shaped like one, an EngineConfig, or None for the defaults.
        plugins: modules, their import names, or objects whose hooks take part, besides the installed ones.
        overrides: "cache.page_size=16" and the like.
        fields: sections of the configuration, laid over `source`: model="path", cache={"page_size": 16}.

    Raises:
        GraftlmError: the configuration, a plugin or the checkpoint is wrong; the leaf says which.
    """

    def __init__(
        self,
        source: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        plugins: Sequence[object] = (),
        overrides: Sequence[str] = (),
        **fields: Any,
    ) -> None:
        config = EngineConfig.load(source, overrides, **fields)
        platform = detect_platform(config)
        registry = Registry.load(config.plugins, plugins, platform)
        self._parts: EngineParts = assemble(config, registry, platform)
        self._thread = EngineThread(self._parts.loop)
        self._finalizer = weakref.finalize(self, self._thread.stop)
        self._maker = JobMaker(self._parts.tokenizer, self._parts.intake, self._parts.text_stream)
        self._runner = JobRunner(self._thread, config.scheduling.max_queued_requests)
        self._weight_version = "default"

    @property
    def config(self) -> EngineConfig:
        """The effective configuration."""
        return self._parts.config

    @property
    def model_config(self) -> ModelConfig:
        """What the checkpoint says of itself."""
        return self._parts.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._parts.tokenizer

    @property
    def weight_version(self) -> str:
        """What `update_weights` called the present weights; "default" until it called any."""
        return self._weight_version

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params] = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
        request_ids: Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts and wait for all of them.

        Args:
            prompts: one prompt or a list; a prompt is text, a list of token ids, or a list of chat messages.
            sampling_params: for all prompts, or one for each.
            priority: higher goes first.
            timeout_s: seconds after which a request ends as aborted.
            cache_salt: prompts share cached prefixes only with prompts of the same salt, and the same adapter.
            adapter: the name of a loaded low-rank adapter, for all prompts or one for each; None: the model alone.
            request_ids: one for each prompt, for `abort`; drawn when left out.
            progress: show a bar on standard error; by default for long lists on a terminal.

        Returns: one output per prompt, in order. A request that failed while it ran has finish_reason "error".

        Raises:
            RequestError: a prompt or its parameters are wrong; then none of the prompts has been started.
            EngineClosedError: the engine is closed.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        jobs = self._maker.jobs(split_prompts(prompts), sampling_params, options, adapter, request_ids)
        self._runner.run(jobs, progress)
        return [job.output() for job in jobs]

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["mean", "last"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
        progress: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """Turn prompts into vectors and wait for all of them.

        Args:
            pooling: the mean of the model's final hidden states over the prompt, or those of its last token; None: as
                the checkpoint says, or the mean. The mean needs every token computed, without prefix reuse.
            normalize: scale each vector to unit length; None: as the checkpoint says, or yes.
            dimensions: keep so many of the vector's first numbers; for models trained for it (Matryoshka).

        The other arguments and the errors are those of `generate`.

        Raises:
            RequestFailedError: a request failed, or was given up, while it ran.
        """
        form = embedding_form(self._parts.embedding, pooling, normalize, dimensions)
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt, pooling=form.pooling)
        jobs = self._maker.jobs(split_prompts(prompts), POOLED, options, adapter)
        self._runner.run(jobs, progress)
        return [_embedding(job, form) for job in jobs]

    def classify(
        self,
        prompts: Prompts,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
        progress: bool | None = None,
    ) -> list[ClassificationOutput]:
        """Have the model's score head judge prompts: a classifier's logits, a reward model's reward.

        Arguments and errors as of `embed`.

        Raises:
            UnsupportedFeatureError: the model has no such head.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt, pooling=SCORES)
        jobs = self._maker.jobs(split_prompts(prompts), POOLED, options, adapter)
        self._runner.run(jobs, progress)
        labels = self.model_config.labels if jobs else ()
        vectors = [(job.output(), job.builder.embedding) for job in jobs]
        return [
            ClassificationOutput(output.request_id, pooled_vector(output, vector), labels, output.usage)
            for output, vector in vectors
        ]

    def score(
        self,
        query: Piece,
        items: Items,
        *,
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
    ) -> list[list[float]]:
        """Score each item beside a query, in one forward pass each; what they begin with alike is computed once.

        Args:
            query, items: text, or token ids all of them; one text, or one flat list of ids, is one item.
            label_token_ids: the scores are the probabilities of these tokens right after the item. None: they are the
                numbers of the model's score head, over query and item as the checkpoint's tokenizer joins a pair.
            apply_softmax: have the scores of an item add up to 1.
            item_first: put the item before the query.
            adapter: the name of a loaded low-rank adapter, for all items or one for each; None: the model alone.

        Returns: for each item, one score for each label.

        The other arguments and the errors are those of `embed`.
        """
        pooling = scoring_pooling(label_token_ids)
        prompts = [self._pair(query, item, item_first, pooling) for item in listed(items)]
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt, pooling=pooling)
        jobs = self._maker.jobs(prompts, POOLED, options, adapter)
        self._runner.run(jobs, None)
        vectors = [pooled_vector(job.output(), job.builder.embedding) for job in jobs]
        return [scores_of(vector, pooling, apply_softmax=apply_softmax) for vector in vectors]

    def _pair(self, query: Piece, item: Piece, item_first: bool, pooling: Pooling) -> Prompt:
        if pooling == SCORES and isinstance(query, str) and isinstance(item, str):
            return self.tokenizer.encode_pair(*((item, query) if item_first else (query, item)))
        return joined(query, item, item_first=item_first)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        request_id: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding outputs whose text and token_ids grow. Leaving the loop aborts the request.

        Arguments and errors as of `generate`; the prompt is checked, and queued, before this returns.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        ids = None if request_id is None else [request_id]
        (job,) = self._maker.jobs([prompt], sampling_params, options, adapter, ids)
        return self._runner.stream(job)

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params] = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts without blocking the event loop; as `generate`. Cancelling it aborts the requests.

        Raises:
            QueueFullError: max_queued_requests are waiting; also when this call alone brings more than that.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        jobs = await asyncio.to_thread(
            self._maker.jobs, split_prompts(prompts), sampling_params, options, adapter, request_ids
        )
        await self._runner.arun(jobs)
        return [job.output() for job in jobs]

    async def aembed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["mean", "last"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
    ) -> list[EmbeddingOutput]:
        """Turn prompts into vectors without blocking the event loop; as `embed` and `agenerate`."""
        form = embedding_form(self._parts.embedding, pooling, normalize, dimensions)
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt, pooling=form.pooling)
        jobs = await asyncio.to_thread(self._maker.jobs, split_prompts(prompts), POOLED, options, adapter)
        await self._runner.arun(jobs)
        return [_embedding(job, form) for job in jobs]

    async def astream(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, yielding growing outputs; leaving the loop aborts the request.

        Arguments and errors as of `generate`; the prompt is checked, and queued, when the first output is asked for.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        ids = None if request_id is None else [request_id]
        (job,) = await asyncio.to_thread(self._maker.jobs, [prompt], sampling_params, options, adapter, ids)
        async with aclosing(self._runner.astream(job)) as outputs:
            async for output in outputs:
                yield output

    async def acache_prefix(self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None) -> None:
        """Have a prompt computed and cached; prompts that come later share what it computes. Returns when it is queued.

        Raises:
            RequestError, QueueFullError: as of `generate`. What fails later is not told: it is a hint.
        """
        params, options = SamplingParams(max_tokens=1, temperature=0.0), RequestOptions(cache_salt=cache_salt)
        (job,) = await asyncio.to_thread(self._maker.jobs, [prompt], params, options, adapter)
        await self._runner.start(job)

    def abort(self, request_id: str) -> None:
        """End a request of `generate`, `stream` or their twins; its output says "abort". Unknown ids are ignored."""
        self._runner.abort(request_id)

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request uses; returns the tokens forgotten."""
        return self._thread.call(self._parts.loop.flush_cache).result()

    def update_weights(
        self,
        weights: "str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]",
        *,
        flush_cache: bool = True,
        abort_requests: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Replace the model's weights in place, and wait for it.

        Requests under way end first, with the weights they began with; those that come later wait for the new ones.
        Weights are checked before any is copied: what does not fit leaves the model as it was.

        Args:
            weights: the folder or the GGUF file of a checkpoint of the same model; or tensors by their names in the
                checkpoint, as a mapping or as pairs, all weights or some of them, which are all held at once.
            flush_cache: forget every key and value that the former weights made. False keeps cached prefixes in use.
            abort_requests: end requests under way as aborted instead of waiting for them.
            weight_version: what `weight_version` calls them from then on; None leaves the name.

        Raises:
            ModelError: a file is missing, or names, shapes or kinds do not fit the model.
            RequestError: a tensor comes twice, or none; or the model cannot take some without the others.
            EngineError: copying failed halfway; the message says what the weights are now.
        """
        parts = self._parts
        new = parts.weights.checked(weights)
        if abort_requests:
            self._thread.abort_all("the weights are replaced").result()
        self._thread.call_alone(lambda: parts.replace_weights(new, flush_cache=flush_cache)).result()
        self._weight_version = weight_version or self._weight_version

    def get_weight(self, name: str) -> "Tensor":
        """Return a copy of one weight, on the CPU, by its name and in its shape in the checkpoint.

        Raises:
            RequestError: there is none of this name, or the weights are quantized.
        """
        return self._thread.call(lambda: self._parts.read_weight(name)).result()

    def pin_prefix(self, prompt: Prompt, ttl_s: float, *, cache_salt: str = "", adapter: str | None = None) -> int:
        """Keep what is cached of a prompt, for `ttl_s` seconds, while anything else can be evicted.

        Returns: tokens kept; 0 when nothing of it is cached yet. A prompt that ran before is cached but for its last
            token and its last partial page.

        Raises:
            RequestError: the prompt is wrong, or `ttl_s` not above 0.
        """
        check_ttl(ttl_s)
        key = self._prefix_key(prompt, cache_salt, adapter)
        return self._thread.call(lambda: self._parts.loop.pin(key, ttl_s)).result()

    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None) -> bool:
        """End a pin before its time; returns whether this very prompt was pinned."""
        key = self._prefix_key(prompt, cache_salt, adapter)
        return self._thread.call(lambda: self._parts.loop.unpin(key)).result()

    def cache_snapshot(self) -> dict[str, Any]:
        """Return the prefix cache's nodes as plain data, ready for JSON; see `graftlm.memory.cache_snapshot`."""
        return self._thread.call(self._parts.loop.cache_snapshot).result()

    def _prefix_key(self, prompt: Prompt, cache_salt: str, adapter: str | None) -> PrefixKey:
        options = RequestOptions(cache_salt=cache_salt)
        namespace = self._parts.intake.namespace(options.cache_salt, adapter)
        (token_ids,) = self._maker.encode([prompt])
        return PrefixKey(self._parts.intake.check_prompt(token_ids), namespace)

    @property
    def adapters(self) -> dict[str, str]:
        """The low-rank adapters that requests may ask for: name -> the folder that each was read from."""
        loader = self._parts.adapters
        return {} if loader is None else {name: adapter.path for name, adapter in loader.loaded.items()}

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a low-rank adapter in the format of `peft`, while requests go on.

        Raises:
            AdapterError: it does not fit, the name is taken, or there is no room for it.
        """
        loader = self._adapter_loader()
        weights = loader.read(name, str(path))  # in this thread: only the copy to the device is between two steps
        self._thread.call(lambda: loader.install(name, str(path), weights)).result()

    def unload_adapter(self, name: str) -> int:
        """Take no more requests for an adapter. Those that wait or run end with it as if nothing had happened.

        Prompts of a long list that are not queued yet are refused from now on.

        Returns: how many wait or run.

        Raises:
            AdapterNotFoundError: no adapter has that name.
        """
        loader = self._adapter_loader()
        return self._thread.call(lambda: loader.unload(name)).result()

    def _adapter_loader(self) -> AdapterLoader:
        loader = self._parts.adapters
        if loader is None:
            raise AdapterError("this engine has no room for adapters. Set lora.enabled: true, or lora.adapters.")
        return loader

    def stats(self) -> EngineStats:
        """Return the engine's state and its sums since the start."""
        return self._thread.call(self._parts.loop.stats).result()

    def close(self) -> None:
        """End every request as aborted and free the device. May be called twice."""
        self._finalizer.detach()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _embedding(job: Job, form: EmbeddingForm) -> EmbeddingOutput:
    output = job.output()
    vector = form.finish(pooled_vector(output, job.builder.embedding))
    return EmbeddingOutput(output.request_id, vector, output.usage)
