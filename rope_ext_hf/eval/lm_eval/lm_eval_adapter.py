"""A patched model in the form in which lm-evaluation-harness takes models, at the length it was extended to.

    from rope_ext_hf.eval.lm_eval.lm_eval_adapter import RopeHFLM
    lm = RopeHFLM("meta-llama/Llama-3.2-1B", method="yarn", factor=8)

`lm_eval_tasks.evaluate` runs tasks on it. lm-eval's own class `HFLM` does four things that are wrong for such a model:

- It takes its length limit from `max_position_embeddings`, which does not describe a length-dependent method.
- It sums log-probabilities in bfloat16.
- It pads batches, so that a length-dependent method does not see how long each row is.
- It begins texts in another way than the tokenizer does: with a second BOS token, which it scores, or with EOS in place
  of GLM's two tokens.

`RopeHFLM` corrects these, and leaves everything else to lm-eval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from rope_ext_hf.bounds import Length, check_int
from rope_ext_hf.errors import MethodError
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.hub import leading_tokens
from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import split_parameters
from rope_ext_hf.models.temporary import set_to
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.loading import from_pretrained
from rope_ext_hf.patches.model_rope import check_pairing
from rope_ext_hf.patches.patching import fixed_length, patch
from rope_ext_hf.patches.saved.adapters import tokenizer_source
from rope_ext_hf.reading.protocols import ProtocolOptions, blocks
from rope_ext_hf.reading.scorer import check_numbers
from rope_ext_hf.rotary.embedding import RotaryEmbedding

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise ImportError(f"lm-eval is needed here ({error}): {install_command('eval')}") from error

_EXPECTED_WARNINGS = ("`pretrained` model kwarg is not of type `str`", "Passed an already-initialized model")
"""Warnings of `HFLM` about being given a loaded model in place of a name, which is what happens here."""
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "trust_remote_code")
"""The arguments of `from_pretrained` that apply to a tokenizer, too."""
_PATCH_ARGUMENTS = ("over", "context_length", "layers", "native")
"""Arguments of `patch`, besides those that `RopeHFLM` names."""


@register_model("rope-ext")
class RopeHFLM(HFLM):  # type: ignore[misc]
    """lm-eval's `HFLM` over a patched model, whose `max_length` is the extended length.

        RopeHFLM("meta-llama/Llama-3.2-1B", method="yarn", factor=8)
        RopeHFLM(patched_model, tokenizer=tokenizer, batch_size=4)
        lm_eval run --model rope-ext --model_args pretrained=meta-llama/Llama-3.2-1B,method=yarn,factor=8 ...

    A length-dependent method has different frequencies for each length, so each forward runs at a fixed length:

    - Log-likelihoods: the number of tokens of the request's own input. That is the purpose of such a method: a short
      question is answered as by the trained model, whatever `max_length` is and whatever else is in the batch. (With
      everything held at `max_length`, a static method would be measured.) A batch is made of inputs of one length, so
      that it needs no padding and results do not depend on `batch_size`, which is an upper bound then.
    - Generation: the length of the prompt plus the tokens that may follow, from the first token to the last, because
      keys in the cache keep the frequencies that they were rotated with. Prompts are read one at a time, whatever
      `batch_size` is.
    - Rolling log-likelihoods: `max_length` for every span, in the spans of `perplexity(..., protocol="blocks")`, so
      that perplexities of all documents are at the same context length.

    Inside `fixed_length(model, n)`, the length n holds for all three, and lm-eval pads batches.

    Every text begins with the tokens that the tokenizer puts before a text, which are not scored. It does not end with
    the tokens that the tokenizer puts after a text.

    Args:
        pretrained: a model, patched or not, or a folder or Hub id. With `method`, the model is patched in place.
        tokenizer: default: the one beside the weights.
        method, factor, target_length: as in `patch`; None leaves the model as it is.
        max_length: default: the extended length, or the trained one where that follows the input.
        batch_size, max_batch_size: a number or "auto", and the largest that "auto" may choose.
        device: where a path is loaded to; default: the GPU if there is one. Without a GPU, "cuda" is the CPU, because
            lm-eval's command line names a GPU even if its user has not asked for one.
        add_bos_token: False: texts have no tokens before them; None and True: they begin as the tokenizer begins them.
        softmax_dtype: dtype of the log-softmax; float32 also where the model runs in bfloat16.
        loading: arguments of `from_pretrained` for a path: dtype, device_map, revision, trust_remote_code, ...
        harness: further arguments of HFLM that apply to a loaded model: truncation, logits_cache, prefix_token_id, ...
        **more: further arguments of `patch`, parameters of the method, and arguments of `from_pretrained`, as
            `--model_args` of lm-eval holds them side by side.

    Attributes:
        cut: number of inputs so far that did not fit into `max_length`, so that lm-eval cut off their beginning.

    Raises:
        MethodError: a max_length above the extended length, an unknown method or parameter, or parameters without a
            method.
        UnsupportedModelError: a model without rotary embeddings, or one whose own method follows the input inside
            transformers. There, results would depend on earlier calls: patch the model first.
        CheckpointError: the folder does not exist.
    """

    def __init__(
        self,
        pretrained: PreTrainedModel | str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | RopeMethod | None = None,
        factor: float | None = None,
        target_length: Length | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        add_bos_token: bool | None = None,
        softmax_dtype: str | torch.dtype = "float32",
        device: str | None = None,
        max_batch_size: int | None = None,
        loading: Mapping[str, Any] | None = None,
        harness: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        params, more = split_parameters(method, more)
        params |= {key: more.pop(key) for key in _PATCH_ARGUMENTS if key in more}
        if method is None and (params or factor is not None or target_length is not None):
            arguments = {"factor": factor, "target_length": target_length} | params
            names = ", ".join(key for key, value in arguments.items() if value is not None)
            raise MethodError(f"{names} given without a method; add method=...")
        loading = {**more, **(loading or {})}
        if device is not None and (torch.cuda.is_available() or torch.device(device).type != "cuda"):
            loading.setdefault("device_map", device)
        patching: dict[str, Any] = {"method": method, "factor": factor, "target_length": target_length, **params}
        model = _loaded_and_patched(pretrained, patching, loading)
        check_pairing(model)
        length = _max_length(model, max_length)
        with fixed_length(model, length):  # raises an error where a method follows the input and cannot be held
            pass
        if tokenizer is None:
            source = pretrained if isinstance(pretrained, (str, Path)) else pretrained.name_or_path
            tokenizer = _tokenizer_of(source, loading)
        self._leading = [] if add_bos_token is False else list(leading_tokens(tokenizer))
        with left_out_of_log(HFLM.__module__, *_EXPECTED_WARNINGS):
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                max_length=length,
                batch_size=batch_size,
                add_bos_token=add_bos_token,
                softmax_dtype=softmax_dtype,
                **({} if max_batch_size is None else {"max_batch_size": max_batch_size}),
                **(harness or {}),
            )
        self.cut = 0
        self.pretrained = model.name_or_path  # the name whose commit lm-eval asks the Hub for

    @property
    def follows_the_input(self) -> bool:
        """True if frequencies depend on the length of each forward, which `fixed_length` would prevent."""
        modules = self.model.modules()
        return any(module.length_dependent for module in modules if isinstance(module, RotaryEmbedding))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihoods of continuations after their contexts, both given as token ids."""
        self.cut += sum(_input_length(request) > self.max_length for request in requests)
        with set_to(self, logits_cache=False) if self._cache_would_mix_up(requests) else nullcontext():
            answers = self._by_length(requests, disable_tqdm, override_bs)
        for request, (log_likelihood, _) in zip(requests, answers, strict=True):
            check_numbers(torch.tensor(log_likelihood), min(_input_length(request), self.max_length))
        return answers

    def _cache_would_mix_up(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> bool:
        """Return whether lm-eval's cache of logits would confuse two of these requests.

        The cache is meant for requests with the same context and continuations of one token. But it also mixes up
        requests with the same tokens that are split into context and continuation at different places.
        """
        if not self.logits_cache:
            return False
        continuation_lengths: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for _, context, continuation in requests:
            continuation_lengths[*context, *continuation[:-1]].add(len(continuation))
        return any(len(lengths) > 1 for lengths in continuation_lengths.values())

    def _by_length(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool, override_bs: int | None
    ) -> list[tuple[float, bool]]:
        """Score requests; if the method depends on the length, inputs of equal length form a batch."""
        score: Callable[..., list[tuple[float, bool]]] = super()._loglikelihood_tokens
        if not self.follows_the_input:
            return score(requests, disable_tqdm, override_bs)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_length[min(_input_length(request), self.max_length)].append(index)
        by_index: dict[int, tuple[float, bool]] = {}
        # The longest inputs come first, so that a model that has too little memory for them fails at once.
        for length, group in sorted(by_length.items(), reverse=True):
            with fixed_length(self.model, length):
                # A batch size of 1 in place of "auto", which would try out the memory again for every length.
                answers = score([requests[index] for index in group], True, override_bs or 1)
            by_index.update(zip(group, answers, strict=True))
        return [by_index[index] for index in range(len(requests))]

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of a text, with the tokens, such as BOS, that the tokenizer puts first, but once."""
        ids: list[int] = super().tok_encode(string, add_special_tokens=False, **options)
        if add_special_tokens is not False:
            ids = [*self._leading, *_without(self._leading, ids)]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the padded token ids of texts, (texts, longest), and their attention mask of the same shape."""
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        if truncation:
            rows = [row[: self.tokenizer.model_max_length] for row in rows]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood after its context, and whether greedy decoding would produce it.

        Raises:
            MethodError: a continuation has no token, or more than `max_length`.
        """
        encoded = []
        for request in requests:
            context, continuation = request.args
            encode = self._encode_pair if context else self._after_first
            encoded.append(((context, continuation), *encode(context, continuation)))
        for request, (_, _, continuation) in zip(requests, encoded, strict=True):
            if not 0 < len(continuation) <= self.max_length:
                raise MethodError(
                    f"task {request.task_name!r} asks for the likelihood of an answer of {len(continuation):,} tokens "
                    f"(document {request.doc_id}), but an answer must have 1 to {self.max_length:,} tokens: correct "
                    "the task, or extend the model further for a longer answer"
                )
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, read in disjoint spans of `max_length` tokens."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            first, ids = self._after_first("", request.args[0])
            for span in blocks(len(ids), [self.max_length], ProtocolOptions(1, prefix=len(first))):
                before = first if span.start < 0 else ids[span.start : span.score_from]
                windows.append((None, before, ids[span.score_from : span.score_to]))
                owners.append(index)
        with fixed_length(self.model, self.max_length) if self.follows_the_input else nullcontext():
            answers = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        totals = [0.0] * len(requests)
        for index, (log_likelihood, _) in zip(owners, answers, strict=True):
            totals[index] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _after_first(self, _context: str, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens to put before a text without context, such as BOS, and the tokens of the text.

        The tokens before it are those that the tokenizer puts first, or else BOS, or else EOS.
        """
        first = [self.prefix_token_id]
        if self._leading and self.custom_prefix_token_id is None:
            first = self._leading
        return first, _without(first, self.tok_encode(text, add_special_tokens=False))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after each prompt; MethodError if there is no room for it."""
        for request in requests:
            room = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if room >= self.max_length:
                raise MethodError(
                    f"task {request.task_name!r} generates up to {room} tokens, which leaves no room for a prompt in "
                    f"max_length={self.max_length}; extend the model further, or set max_gen_toks for the task"
                )
            self.cut += len(self.tok_encode(request.args[0])) > self.max_length - room
        return list(super().generate_until(requests, disable_tqdm))

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Return token ids: left-padded prompts, each followed by the tokens that the model generates.

        `context`: (batch, longest) int64, the prompts.
        """
        generate: Callable[..., Tensor] = super()._model_generate
        options["logits_processor"] = LogitsProcessorList([*options.get("logits_processor", ()), _checked])
        if not self.follows_the_input:
            return generate(context, max_length, stop, **options)
        room = max_length - context.shape[1]
        masks = options.pop("attention_mask").bool()
        new: list[Tensor] = []
        for row, mask in zip(context, masks, strict=True):
            prompt = row[mask][None]
            length = prompt.shape[1] + room
            with fixed_length(self.model, length):
                out = generate(prompt, length, stop, attention_mask=torch.ones_like(prompt), **options)
            new.append(out[0, prompt.shape[1] :])
        padding = self.tokenizer.pad_token_id
        return torch.cat([context, nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=padding)], dim=1)


def _checked(ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of next tokens unchanged, as a step of generation.

    Raises:
        UnsupportedModelError: a score is NaN, which generation would take for the best.
    """
    check_numbers(scores, ids.shape[1])
    return scores


def _input_length(request: tuple[Any, list[int], list[int]]) -> int:
    """Return the number of tokens that the model reads for a request: all but the last one, which it predicts."""
    _, context, continuation = request
    return len(context) + len(continuation) - 1


def _loaded_and_patched(
    pretrained: PreTrainedModel | str | Path, patching: dict[str, Any], loading: dict[str, Any]
) -> PreTrainedModel:
    """Return a model, loaded where a folder or Hub id is given, and patched where a method is given.

    Args:
        pretrained: a model, or a folder or Hub id.
        patching: arguments of `patch`; its method may be None.
        loading: arguments of `from_pretrained`; MethodError where a model is given with any.
    """
    if isinstance(pretrained, (str, Path)):
        model: PreTrainedModel = from_pretrained(pretrained, **({"dtype": "auto"} | loading | patching)).eval()
        if "device_map" not in loading and torch.cuda.is_available():
            model.to("cuda")
        return model
    if loading:
        names = ", ".join(loading)
        raise MethodError(f"{names}: only for a folder or Hub id, and this model is loaded already")
    if patching["method"] is not None:
        patch(pretrained, **patching)
    return pretrained


def _tokenizer_of(source: str | Path, loading: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that is stored with a model's weights; MethodError if `source` is empty.

    `source`: the folder or Hub id of the model.
    """
    if not str(source):
        raise MethodError("this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=...")
    hub_arguments = {key: value for key, value in loading.items() if key in _HUB_ARGUMENTS}
    folder, options = tokenizer_source(source, **hub_arguments)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **options)
    return tokenizer


def _max_length(model: PreTrainedModel, max_length: int | None) -> int:
    """Return the longest length of inputs: `max_length` if it is given, else the length the model is extended to.

    Raises:
        MethodError: the length is above the extended length.
    """
    description = describe(model)
    extended = description.extended_length  # None: the method works at any length
    if max_length is None:
        return extended or description.trained_length
    check_int("max_length", max_length, least=2)
    if extended is not None and max_length > extended:
        raise MethodError(
            f"max_length={max_length} is above the {extended} tokens this model reaches with {description.method}; "
            "extend it that far, or, to see it fail there as a baseline, patch it with 'default' and "
            f"target_length={max_length}"
        )
    return max_length


def _without(first: list[int], ids: list[int]) -> list[int]:
    """Return a text's token ids without the tokens `first`, such as BOS, if it begins with them.

    Texts made by a chat template contain these tokens themselves.
    """
    return ids[len(first) :] if ids[: len(first)] == first else ids


if __name__ == "__main__":  # lm-eval's own command line, for releases that read no entry points
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
