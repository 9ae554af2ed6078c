"""The in-process engine: the class that library users create."""

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
from graftlm.checkpoint import download_model
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
from graftlm.prompts import Prompt, Prompts, split_prompts, with_images
from graftlm.records import EngineStats
from graftlm.registry import Registry
from graftlm.request_options import RequestOptions
from graftlm.tokenization import Tokenizer
from graftlm.types import ClassificationOutput, EmbeddingOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Engine"]


class Engine:
    """A loaded model. All methods may be called from several threads and event loops at the same time.

        engine = Engine(model="demo")
        engine.generate("The capital of France is")[0].text

    Args:
        source: a YAML file, a mapping with the same structure, an EngineConfig, or None for the defaults.
        plugins: modules with hooks, their import names, or objects with hooks, in addition to the installed plugins.
        overrides: settings such as "cache.page_size=16".
        fields: sections of the configuration, which override `source`: model="path", cache={"page_size": 16}.

    Raises:
        GraftlmError: the configuration, a plugin or the checkpoint is wrong, depending on the subclass.
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
        if config.model.download:
            download_model(config.model.path, with_code=config.model.trust_remote_code)
        platform = detect_platform(config)
        registry = Registry.load(config.plugins, plugins, platform)
        self._parts: EngineParts = assemble(config, registry, platform)
        self._thread = EngineThread(self._parts.loop)
        self._finalizer = weakref.finalize(self, self._thread.stop)
        self._maker = JobMaker(
            self._parts.tokenizer, self._parts.intake, self._parts.text_stream, self._parts.local_media_prompts()
        )
        self._runner = JobRunner(self._thread, config.scheduling.max_queued_requests)
        self._weight_version = "default"

    @property
    def config(self) -> EngineConfig:
        """The effective configuration."""
        return self._parts.config

    @property
    def model_config(self) -> ModelConfig:
        """The checkpoint's configuration."""
        return self._parts.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._parts.tokenizer

    @property
    def image_marker(self) -> str | None:
        """The text that stands for a picture in a prompt, such as "<image>"; None if the model cannot use pictures."""
        return None if self._parts.media is None else self._parts.media.processor.marker

    @property
    def weight_version(self) -> str:
        """The version that `update_weights` set last; "default" if none was set."""
        return self._weight_version

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params] = None,
        *,
        image_data: Any = None,
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
            sampling_params: one object for all prompts, or one for each.
            image_data: pictures for prompts of text or token ids: one or a list of them for one prompt, and a list with
                one entry per prompt for several. A picture is a path, the bytes of a file, a data URL, a PIL image or
                an array uint8 [H, W, 3]. A prompt has one marker of the model, such as "<image>", for each picture, or
                none, and then the pictures precede its text. The pictures of a chat are content parts of its messages.
            priority: requests with a higher priority are admitted first.
            timeout_s: seconds after which a request is aborted; None: no limit.
            cache_salt: prompts share cached prefixes only if they have the same salt and the same adapter.
            adapter: name of a loaded low-rank adapter, one for all prompts or one for each; None: no adapter.
            request_ids: one id for each prompt, for `abort`; None: random ids.
            progress: whether to show a progress bar on standard error; None: only for 16 or more prompts on a terminal.

        Returns: one output per prompt, in order. A request that failed while it ran has finish_reason "error".

        Raises:
            RequestError: a prompt or its parameters are not valid; no prompt is started.
            EngineClosedError: the engine is closed.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        jobs = self._maker.jobs(_prompts(prompts, image_data), sampling_params, options, adapter, request_ids)
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
        """Compute a vector for each prompt and wait for all of them.

        Args:
            pooling: "mean": the mean of the model's final hidden states over the prompt; "last": the hidden state of
                the prompt's last token; None: the checkpoint's setting, or the mean without one. The mean needs the
                hidden states of all tokens, so it does not use the prefix cache.
            normalize: whether each vector is scaled to unit length; None: the checkpoint's setting, or True without
                one.
            dimensions: number of elements to keep at the start of each vector, for models that are trained for this
                (Matryoshka); None: all.

        The other arguments and the errors are those of `generate`.

        Raises:
            RequestFailedError: a request failed or was aborted while it ran.
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
        """Compute the scores of the model's score head for prompts: a classifier's logits, or a reward model's reward.

        Arguments and errors are those of `embed`.

        Raises:
            UnsupportedFeatureError: the model has no score head.
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
        """Score each item for a query, with one prefill per item; a common prefix is computed once.

        Args:
            query, items: either texts or lists of token ids. One text, or one flat list of ids, is one item.
            label_token_ids: tokens whose probabilities as the next token after the prompt are the scores. None: the
                model's score head computes the scores, and the checkpoint's tokenizer joins query and item.
            apply_softmax: whether softmax is applied, so that the scores of an item add up to 1.
            item_first: whether the item is put before the query.
            adapter: name of a loaded low-rank adapter, one for all items or one for each; None: no adapter.

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
        image_data: Any = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        request_id: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; return an iterator of outputs, each with the whole text and all token ids so far.

        Closing the iterator early aborts the request. Arguments and errors are those of `generate`. The prompt is
        checked and queued before this method returns.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        ids = None if request_id is None else [request_id]
        prompts = with_images([prompt], image_data, is_one=True)
        (job,) = self._maker.jobs(prompts, sampling_params, options, adapter, ids)
        return self._runner.stream(job)

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params] = None,
        *,
        image_data: Any = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: Adapters = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts like `generate`, without blocking the event loop. Cancelling the call aborts the requests.

        Raises:
            QueueFullError: more than `scheduling.max_queued_requests` requests would wait, including those of this
                call.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        jobs = await asyncio.to_thread(
            self._maker.jobs, _prompts(prompts, image_data), sampling_params, options, adapter, request_ids
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
        """Compute vectors like `embed`, without blocking the event loop; see `agenerate`."""
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
        image_data: Any = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yield outputs, each with the text so far. Closing the generator aborts the request.

        Arguments and errors are those of `generate`. The prompt is checked and queued when the first output is
        requested.
        """
        options = RequestOptions(priority=priority, timeout_s=timeout_s, cache_salt=cache_salt)
        ids = None if request_id is None else [request_id]
        prompts = with_images([prompt], image_data, is_one=True)
        (job,) = await asyncio.to_thread(self._maker.jobs, prompts, sampling_params, options, adapter, ids)
        async with aclosing(self._runner.astream(job)) as outputs:
            async for output in outputs:
                yield output

    async def acache_prefix(self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None) -> None:
        """Queue a request that computes a prompt and caches it for later prompts. Return when the request is queued.

        Errors of the running request are ignored.

        Raises:
            RequestError: the prompt is not valid.
            QueueFullError: `scheduling.max_queued_requests` requests are waiting.
        """
        params, options = SamplingParams(max_tokens=1, temperature=0.0), RequestOptions(cache_salt=cache_salt)
        (job,) = await asyncio.to_thread(self._maker.jobs, [prompt], params, options, adapter)
        await self._runner.start(job)

    def abort(self, request_id: str) -> None:
        """Abort a request; its finish_reason is then "abort". Unknown ids are ignored."""
        self._runner.abort(request_id)

    def flush_cache(self) -> int:
        """Remove every cached prefix that no running request uses. Return the number of removed tokens."""
        return self._thread.call(self._parts.loop.flush_cache).result()

    def update_weights(
        self,
        weights: "str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]",
        *,
        flush_cache: bool = True,
        abort_requests: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Replace the model's weights in place, and wait until this is done.

        Current requests first end with the old weights. New requests wait for the new weights. All weights are checked
        before the first one is copied. If they do not fit, the model is not changed.

        Args:
            weights: the folder or the GGUF file of a checkpoint of the same model; or tensors by their names in the
                checkpoint, as a mapping or as pairs. Tensors may replace all weights or some of them; they are all in
                memory at the same time.
            flush_cache: whether all cached keys and values, which the old weights computed, are discarded.
            abort_requests: whether current requests are aborted; False: the update waits for them.
            weight_version: new value of `weight_version`; None keeps the old one.

        Raises:
            ModelError: a file is missing, or names, shapes or dtypes do not fit the model.
            RequestError: a tensor is passed twice, no tensor is passed, or the model cannot replace only some weights.
            EngineError: copying failed halfway; the message says which weights the model has now.
        """
        parts = self._parts
        new = parts.weights.checked(weights)
        if abort_requests:
            self._thread.abort_all("the weights are replaced").result()
        self._thread.call_exclusive(lambda: parts.replace_weights(new, flush_cache=flush_cache)).result()
        self._weight_version = weight_version or self._weight_version

    def get_weight(self, name: str) -> "Tensor":
        """Return a copy of one weight on the CPU, with the shape that it has in the checkpoint.

        Args:
            name: the weight's name in the checkpoint.

        Raises:
            RequestError: there is no weight with this name, or the weights are quantized.
        """
        return self._thread.call(lambda: self._parts.read_weight(name)).result()

    def pin_prefix(self, prompt: Prompt, ttl_s: float, *, cache_salt: str = "", adapter: str | None = None) -> int:
        """Pin the cached part of a prompt for `ttl_s` seconds, so that it is evicted last.

        Returns: number of pinned tokens; 0 if no part of the prompt is cached. A prompt that ran before is cached
            except for its last token and its last partial page.

        Raises:
            RequestError: the prompt is not valid, or `ttl_s` is not above 0.
        """
        check_ttl(ttl_s)
        key = self._prefix_key(prompt, cache_salt, adapter)
        return self._thread.call(lambda: self._parts.loop.pin(key, ttl_s)).result()

    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str = "", adapter: str | None = None) -> bool:
        """Remove the pin of a prompt before it expires. Return whether there was a pin of exactly this prompt."""
        key = self._prefix_key(prompt, cache_salt, adapter)
        return self._thread.call(lambda: self._parts.loop.unpin(key)).result()

    def cache_snapshot(self) -> dict[str, Any]:
        """Return the prefix cache's nodes as plain data for JSON; see `graftlm.memory.cache_snapshot`."""
        return self._thread.call(self._parts.loop.cache_snapshot).result()

    def _prefix_key(self, prompt: Prompt, cache_salt: str, adapter: str | None) -> PrefixKey:
        options = RequestOptions(cache_salt=cache_salt)
        namespace = self._parts.intake.namespace(options.cache_salt, adapter)
        token_ids, _ = self._maker.checked_prompt(prompt, options)
        return PrefixKey(token_ids, namespace)

    @property
    def adapters(self) -> dict[str, str]:
        """The loaded LoRA adapters: name -> folder from which the adapter was read."""
        loader = self._parts.adapters
        return {} if loader is None else {name: adapter.path for name, adapter in loader.loaded.items()}

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a low-rank adapter in the format of `peft`, while requests run.

        Raises:
            AdapterError: the adapter does not fit the model, its name is in use, or all adapter slots are in use.
        """
        loader = self._adapter_loader()
        weights = loader.read(name, str(path))  # in the caller's thread: only the copy to the device delays steps
        self._thread.call(lambda: loader.install(name, str(path), weights)).result()

    def unload_adapter(self, name: str) -> int:
        """Refuse new requests for an adapter. Waiting and running requests use it until they end.

        If a call with many prompts is running, its prompts that are not queued yet are refused too.

        Returns: number of waiting and running requests with the adapter.

        Raises:
            AdapterNotFoundError: no adapter has that name.
        """
        loader = self._adapter_loader()
        return self._thread.call(lambda: loader.unload(name)).result()

    def _adapter_loader(self) -> AdapterLoader:
        loader = self._parts.adapters
        if loader is None:
            raise AdapterError("this engine does not support adapters. Set lora.enabled: true, or lora.adapters.")
        return loader

    def stats(self) -> EngineStats:
        """Return the engine's current state, and counters since the start."""
        return self._thread.call(self._parts.loop.stats).result()

    def close(self) -> None:
        """Abort every request and free the device's memory. May be called repeatedly."""
        self._finalizer.detach()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _prompts(prompts: Prompts, image_data: Any) -> list[Prompt]:
    split = split_prompts(prompts)
    is_one = len(split) == 1 and (not isinstance(prompts, list | tuple) or split[0] is not prompts[0])
    return with_images(split, image_data, is_one=is_one)


def _embedding(job: Job, form: EmbeddingForm) -> EmbeddingOutput:
    output = job.output()
    vector = form.finish(pooled_vector(output, job.builder.embedding))
    return EmbeddingOutput(output.request_id, vector, output.usage)
