"""The tasks of lm-evaluation-harness on a patched model, at the length it was extended to.

    from rope_ext_hf.eval.lm_eval_adapter import RopeHFLM, evaluate
    results = evaluate(patch(model, "yarn", factor=8), tokenizer, tasks=["niah_single_1"], limit=50)

lm-eval reads its length limit off `max_position_embeddings`, which does not describe a length-dependent method;
sums bfloat16 log-probabilities; pads batches, which hides from such a method how long each row is; and begins texts in
other ways than the tokenizer does (a second BOS, which it scores; EOS in place of GLM's two tokens). `RopeHFLM` puts
these right and leaves everything else to lm-eval.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from transformers import AutoTokenizer, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from rope_ext_hf.bounds import Length, whole
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.lm_eval_suites import babilong_length, long_suite
from rope_ext_hf.foreign_logs import left_out_of_log
from rope_ext_hf.hub import leading_tokens
from rope_ext_hf.installing import install_command
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import split_parameters
from rope_ext_hf.patches.adapters import tokenizer_source
from rope_ext_hf.patches.describing import describe
from rope_ext_hf.patches.geometry import check_pairing
from rope_ext_hf.patches.loading import from_pretrained
from rope_ext_hf.patches.patching import fixed_length, patch, patched_method
from rope_ext_hf.plug_ins import plug_ins
from rope_ext_hf.reading.protocols import ProtocolOptions, blocks
from rope_ext_hf.reading.scorer import check_numbers
from rope_ext_hf.reading.temporary_attributes import set_to
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.runs.identity import provenance

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    raise ImportError(f"lm-eval is needed here ({error}): {install_command('eval')}") from error

_LOADED_ALREADY = ("`pretrained` model kwarg is not of type `str`", "Passed an already-initialized model")
"""Warnings of `HFLM` where it gets a model and not a name, as it is meant to here."""
_OF_THE_HUB = ("revision", "token", "cache_dir", "trust_remote_code")
_OF_PATCH = ("over", "context_length", "layers", "native")  # further arguments of `patch` that `--model_args` may hold


@register_model("rope-ext")
class RopeHFLM(HFLM):  # type: ignore[misc]
    """lm-eval's `HFLM` over a patched model, whose `max_length` is the extended length.

        RopeHFLM("meta-llama/Llama-3.2-1B", method="yarn", factor=8)
        RopeHFLM(patched_model, tokenizer=tokenizer, batch_size=4)
        lm_eval run --model rope-ext --model_args pretrained=meta-llama/Llama-3.2-1B,method=yarn,factor=8 ...

    A length-dependent method has one set of frequencies per length, so each forward runs at a fixed one:

    - Log-likelihoods: the number of tokens of the request's own input. That is what the method means: a short question
      is answered as the trained model would, whatever `max_length` is and whatever else is in the batch. (Holding
      everything at `max_length` would measure a static method.) A batch is made of inputs of one length, so it needs
      no padding, and results do not depend on `batch_size`, which is then an upper bound.
    - Generation: the prompt's length plus the tokens that may follow, from the first token to the last, because keys
      in the cache keep the frequencies they were made with. One prompt at a time, whatever `batch_size` says.
    - Rolling log-likelihoods: `max_length` for every span, in the spans of `perplexity(..., protocol="blocks")`, so
      that perplexities at one context length are comparable across documents.

    Every text begins with the tokens that the tokenizer puts before it, which are not scored, and does not end with
    those that it puts after it.

    Inside `fixed_length(model, n)` that length holds for all of them, and batches are padded as lm-eval likes.

    Args:
        pretrained: a model, patched before or not, or a folder or Hub id. A model given `method` is patched in place.
        tokenizer: default: the one beside the weights.
        method, factor, target_length, **params: as in `patch`; None leaves the model as it is.
        max_length: default: the extended length, or the trained one where that follows the input.
        batch_size: a number or "auto".
        add_bos_token: False reads the text alone; None and True begin it as the tokenizer does by itself.
        softmax_dtype: of the log-softmax; float32 also where the model runs in bfloat16.
        loading: arguments of `from_pretrained` for a path: dtype, device_map, revision, trust_remote_code, ...
            Without a device_map the model goes to the GPU if there is one.
        harness: further arguments of HFLM that apply to a loaded model: truncation, logits_cache, prefix_token_id, ...

    Attributes:
        cut: inputs so far that were longer than `max_length` leaves room for, whose beginning lm-eval cut off.

    Raises:
        MethodError: a max_length above the extended length, an unknown method or parameter, or parameters without a
            method.
        UnsupportedModelError: a model without rotary embeddings, or one whose own method follows the input inside
            transformers, where results would depend on earlier calls: patch it first.
        CheckpointError: no such folder.
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
        loading: Mapping[str, Any] | None = None,
        harness: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> None:
        if method is None and (params or factor is not None or target_length is not None):
            given = {"factor": factor, "target_length": target_length} | params
            names = ", ".join(key for key, value in given.items() if value is not None)
            raise MethodError(f"{names} given without a method; add method=...")
        loading = dict(loading or {})
        of_method: dict[str, Any] = {"method": method, "factor": factor, "target_length": target_length, **params}
        if isinstance(pretrained, (str, Path)):
            source, model = pretrained, from_pretrained(pretrained, **({"dtype": "auto"} | loading | of_method)).eval()
            if "device_map" not in loading and torch.cuda.is_available():
                model.to("cuda")
        elif loading:
            raise MethodError(f"{', '.join(loading)}: only for a path, this model is loaded already")
        else:
            source, model = pretrained.name_or_path, pretrained
            if method is not None:
                patch(model, **of_method)
        check_pairing(model)
        length = _max_length(model, max_length)
        with fixed_length(model, length):  # raises where a method follows the input and cannot be held
            pass
        if tokenizer is None:
            if not str(source):
                raise MethodError(
                    "this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=..."
                )
            of_hub = {key: value for key, value in loading.items() if key in _OF_THE_HUB}
            folder, options = tokenizer_source(source, **of_hub)
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        self._leading = [] if add_bos_token is False else list(leading_tokens(tokenizer))
        with left_out_of_log(HFLM.__module__, *_LOADED_ALREADY):
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                max_length=length,
                batch_size=batch_size,
                add_bos_token=add_bos_token,
                softmax_dtype=softmax_dtype,
                **(harness or {}),
            )
        self.cut = 0
        self.pretrained = model.name_or_path  # lm-eval asks the Hub for the commit of this name

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> RopeHFLM:
        """The model of `--model_args`: arguments of this class, of `patch` and of `from_pretrained`.

        `additional_config` holds lm-eval's own options: device, batch_size, max_batch_size.
        """
        given = arg_dict | {key: value for key, value in (additional_config or {}).items() if value is not None}
        device, most = given.pop("device", None), given.pop("max_batch_size", None)
        own = inspect.signature(cls).parameters
        stated = {key: given.pop(key) for key in list(given) if key in own or key in _OF_PATCH}
        params, loading = split_parameters(stated.get("method"), given)
        if device is not None:
            loading.setdefault("device_map", device)
        return cls(**stated, **params, loading=loading, harness={} if most is None else {"max_batch_size": most})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> RopeHFLM:
        """As `create_from_arg_obj`, from text: "pretrained=DIR,method=yarn,factor=8"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def follows_the_input(self) -> bool:
        """Whether a forward's frequencies depend on its length: the method does, and nothing holds it."""
        return any(m.length_dependent for m in self.model.modules() if isinstance(m, RotaryEmbedding))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        # the last token is only predicted
        self.cut += sum(len(context) + len(continuation) - 1 > self.max_length for _, context, continuation in requests)
        # lm-eval reads an input once for all that continue it by a token, and takes others of the same input for such.
        scored: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for _, context, continuation in requests:
            scored[*context, *continuation[:-1]].add(len(continuation))
        shared = self.logits_cache and any(len(counts) > 1 for counts in scored.values())
        with set_to(self, logits_cache=False) if shared else nullcontext():
            answers = self._by_length(requests, disable_tqdm, override_bs)
        for (_, context, continuation), (of_answer, _) in zip(requests, answers, strict=True):
            check_numbers(torch.tensor(of_answer), min(len(context) + len(continuation) - 1, self.max_length))
        return answers

    def _by_length(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool, override_bs: int | None
    ) -> list[tuple[float, bool]]:
        """Score requests, those of one length together where the method follows it."""
        score: Callable[..., list[tuple[float, bool]]] = super()._loglikelihood_tokens
        if not self.follows_the_input:
            return score(requests, disable_tqdm, override_bs)
        by_length: dict[int, list[int]] = defaultdict(list)
        for i, (_, context, continuation) in enumerate(requests):
            by_length[min(len(context) + len(continuation) - 1, self.max_length)].append(i)
        by_index: dict[int, tuple[float, bool]] = {}
        for length, group in sorted(by_length.items(), reverse=True):  # what does not fit fails at once
            with fixed_length(self.model, length):
                # "auto" would try out the memory anew for every length
                answers = score([requests[i] for i in group], True, override_bs or 1)
            by_index.update(zip(group, answers, strict=True))
        return [by_index[i] for i in range(len(requests))]

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **options: Any,
    ) -> list[int]:
        """The token ids of a text after those that the tokenizer begins with, unless it has them itself."""
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
        """The token ids of texts and their mask, each (texts, longest)."""
        rows = [self.tok_encode(string, left_truncate_len=left_truncate_len) for string in strings]
        if truncation:
            rows = [row[: self.tokenizer.model_max_length] for row in rows]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation of its context, and whether it is the likeliest one."""
        encoded = [
            ((context, continuation), *(self._encode_pair if context else self._after_first)(context, continuation))
            for context, continuation in (request.args for request in requests)
        ]
        for request, (_, _, continuation) in zip(requests, encoded, strict=True):
            if not 0 < len(continuation) <= self.max_length:
                raise MethodError(
                    f"task {request.task_name!r} asks for the likelihood of an answer of {len(continuation):,} tokens "
                    f"(document {request.doc_id}), and an answer has 1 to {self.max_length:,} tokens here: mend the "
                    "task, or extend the model further for a longer answer"
                )
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, read in disjoint spans of `max_length` tokens."""
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
        for index, (of_window, _) in zip(owners, answers, strict=True):
            totals[index] += of_window
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _after_first(self, _context: str, text: str) -> tuple[list[int], list[int]]:
        """A text without a context, and the tokens before it: the tokenizer's own, else BOS, else EOS."""
        own = self._leading if self.custom_prefix_token_id is None else []
        first = own or [self.prefix_token_id]
        return first, _without(first, self.tok_encode(text, add_special_tokens=False))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that the model writes after each prompt; MethodError: a task asks for more than `max_length`."""
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
        """The prompts, (batch, longest), left-padded, with what follows each of them."""
        generate: Callable[..., Tensor] = super()._model_generate
        options["logits_processor"] = LogitsProcessorList([*options.get("logits_processor", ()), _checked])
        if not self.follows_the_input:
            return generate(context, max_length, stop, **options)
        room = max_length - context.shape[1]
        kept = options.pop("attention_mask").bool()
        new: list[Tensor] = []
        for row, mask in zip(context, kept, strict=True):
            prompt = row[mask][None]
            length = prompt.shape[1] + room
            with fixed_length(self.model, length):
                out = generate(prompt, length, stop, attention_mask=torch.ones_like(prompt), **options)
            new.append(out[0, prompt.shape[1] :])
        padding = self.tokenizer.pad_token_id
        return torch.cat([context, nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=padding)], dim=1)


def _checked(ids: Tensor, scores: Tensor) -> Tensor:
    """The scores of next tokens, of which generation would take NaN for the largest."""
    check_numbers(scores, ids.shape[1])
    return scores


def _max_length(model: PreTrainedModel, asked: int | None) -> int:
    description = describe(model)
    extended = description.extended_length  # None: it follows the input, as far as anyone asks
    if asked is None:
        return extended or description.trained_length
    whole("max_length", asked, least=2)
    if extended is not None and asked > extended:
        raise MethodError(
            f"max_length={asked} is above the {extended} tokens this model reaches with {description.method}; extend "
            f"it that far, or, to see it fail there as a baseline, patch it with 'default' and target_length={asked}"
        )
    return asked


def _without(first: list[int], ids: list[int]) -> list[int]:
    """Leave out the first tokens of a text that has them in so many letters, as chat templates do."""
    return ids[len(first) :] if ids[: len(first)] == first else ids


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    limit: int | float | None = None,
    num_fewshot: int | None = None,
    batch_size: int | str = 1,
    max_length: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    apply_chat_template: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run tasks of lm-eval on a model, patched or not, at its extended length.

    Args:
        tasks: names of tasks, groups or tags, with wildcards, or YAML files. The suites of this package are
            rope_ruler, rope_json_kv, rope_graphwalks and rope_babilong, which fetch nothing.
        include_path: a folder with task definitions of one's own.
        limit: this many documents per task, or this share of them if below 1.
        num_fewshot: worked examples in each prompt; default: as the task has it.
        batch_size, max_length: see `RopeHFLM`.
        metadata: for tasks that make their own data (RULER), over the default: `max_seq_lengths` is [max_length],
            tokenizer and model those given here. RULER loads that tokenizer with trust_remote_code=True.
        apply_chat_template: default: where the tokenizer has one and all tasks are of suites of long inputs, which are
            for models that follow instructions.
        **options: further arguments of `lm_eval.simple_evaluate`; log_samples is off unless given.

    Returns:
        lm-eval's results (for `lm_eval.utils.make_table`), and beside them `provenance`, `method` (None: as loaded),
        `max_length` and `cut`, of `RopeHFLM`; a warning where anything was cut. Empty on processes other than
        the first.

    Raises:
        MethodError: an unknown task (with the nearest name), one that cannot be built, max_seq_lengths above
            max_length, or what `RopeHFLM` refuses.
        CorpusError: a task whose data cannot be reached, such as one on the Hugging Face Hub without a network.
    """
    from lm_eval import simple_evaluate

    lm = RopeHFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
    names = {"tokenizer": lm.tokenizer.name_or_path or model.name_or_path, "pretrained": model.name_or_path}
    own_names = {key: name for key, name in names.items() if name}
    known: dict[str, Any] = {"max_seq_lengths": [lm.max_length], **own_names, **(metadata or {})}
    longest = max(known["max_seq_lengths"], default=0)
    if longest > lm.max_length:
        raise MethodError(f"max_seq_lengths go up to {longest} tokens, above max_length={lm.max_length}")
    if include_path is not None and not Path(include_path).is_dir():
        raise MethodError(f"no such folder of tasks: {str(include_path)!r}")
    with TemporaryDirectory() as own, left_out_of_log("lm_eval.api.task", "Custom kwargs can be passed"):
        finder = _TaskFinder(own, include_path, known, lm.max_length)
        if apply_chat_template is None:
            of_long = all(name.startswith("rope_") or long_suite(name) for name in finder.names(tasks))
            apply_chat_template = of_long and bool(getattr(lm.tokenizer, "chat_template", None))
        results = simple_evaluate(
            model=lm,
            tasks=finder.build(tasks),
            task_manager=finder.manager,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            limit=limit,
            apply_chat_template=apply_chat_template,
            **({"log_samples": False} | options),
        )
    if results is None:
        return {}
    if lm.cut:
        warnings.warn(
            f"{lm.cut} inputs were longer than max_length={lm.max_length} leaves room for, and lost their beginning; "
            "extend the model further for a fair result",
            stacklevel=2,
        )
    method = patched_method(model)
    return dict(results) | {
        "provenance": provenance(model, ", ".join(tasks)),
        "method": method.to_dict() if method else None,
        "max_length": lm.max_length,
        "cut": lm.cut,
    }


class _TaskFinder:
    """The tasks of lm-eval, those that plug-ins write into the folder `own`, and those of a folder of the user's.

    `metadata` is for tasks that make their own data.
    """

    def __init__(
        self, own: str | Path, include_path: str | Path | None, metadata: Mapping[str, Any], max_length: int
    ) -> None:
        from lm_eval.tasks import TaskManager

        for write in plug_ins("lm_eval_tasks").values():
            write(own)
        paths = [own, *([] if include_path is None else [include_path])]
        self.manager = TaskManager(include_path=paths, metadata=dict(metadata))
        of_babilong = {**metadata, "max_seq_lengths": babilong_length(max_length)}  # by thousands of tokens, as text
        self._babilong = cache(lambda: TaskManager(include_path=paths, metadata=of_babilong))

    def names(self, tasks: Sequence[str]) -> list[str]:
        """Names of tasks and groups, and paths of YAML files; MethodError: none, or an unknown one."""
        if isinstance(tasks, str) or not tasks:
            raise MethodError(f"tasks must be a list of at least one name, got {tasks!r}")
        found: list[str] = []
        for given in tasks:
            names = [given] if Path(given).is_file() else self.manager.match_tasks([given])
            if not names:
                near = difflib.get_close_matches(given, self.manager.all_tasks, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise MethodError(
                    f"unknown task {given!r}.{hint} `lm-eval ls tasks` lists all; include_path adds your own"
                )
            found += names
        return found

    def build(self, tasks: Sequence[str]) -> list[Any]:
        built: list[Any] = []
        for name in self.names(tasks):
            with _task_errors(name):
                loaded = (self._babilong() if name.startswith("babilong") else self.manager).load([name])
                group = loaded.get("groups", {}).get(name)
                built += [group] if group is not None else loaded["tasks"].values()
        with _task_errors(", ".join(tasks)):
            self.manager.load(built)  # refuses a task that comes twice, alone and in a group
        return built


@contextmanager
def _task_errors(name: str) -> Iterator[None]:
    """Whatever stops a task from being built, as one error with its name."""
    try:
        yield
    except (ConnectionError, HfHubHTTPError) as error:
        raise CorpusError(
            f"task {name!r} needs data from the Hugging Face Hub, which cannot be reached: {_first_line(error)}"
        ) from error
    except OSError as error:
        raise CorpusError(f"the data of task {name!r} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # a task is code of its own: its YAML, what that imports, and what it asserts
        raise MethodError(f"task {name!r} cannot be built: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


if __name__ == "__main__":  # lm-eval's own command line, for releases that read no entry points
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
