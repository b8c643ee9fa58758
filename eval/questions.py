"""The questions that are asked of a model at several context lengths, as values; `measure` answers them.

from rope_ext_hf.eval import Passkey, measure
run = measure(model, Passkey(lengths=["4k", "32k"], trials=20), methods=["yarn"])

A question is at once the arguments in Python, the options of its command, and the part of a run's settings that is not
the model. Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from rope_ext_hf.bounds import parse_length, parse_lengths
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.questions import Question, asked, several
from rope_ext_hf.reading.protocols import protocol_help
from rope_ext_hf.suites.base import suite_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rope_ext_hf.methods.base import RopeMethod
    from rope_ext_hf.runs.kinds import RunPlan

DEFAULT_METHODS = ("linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "llama3")
"""Methods that follow from a factor alone, or from nothing."""


def _most_spans(given: Any) -> int | None:
    if given is None or given == "all":
        return None
    if isinstance(given, str) and given.isdigit() and len(given) < 10:
        given = int(given)
    if type(given) is not int or given < 1:
        raise MethodError(f"max_spans must be a whole number of at least 1, or all; got {short(repr(given))}")
    return given


def _text(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class LengthsQuestion(Question):
    """What is asked at several context lengths.

    Attributes:
        planner: the module and the function that plan it, from the model without weights.
        needs_tokenizer: whether the tokenizer is loaded for it in any case.
    """

    planner: ClassVar[str]

    lengths: tuple[int, ...] | Any = asked(
        parse=lambda given: tuple(parse_lengths(given)),
        metavar="LENGTHS",
        help="Context lengths in tokens, e.g. 4k,8k,16k (4k = 4096).",
    )

    def plan(
        self,
        model: PreTrainedModel,
        methods: MethodChoice | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> RunPlan[Any]:
        """What a run reads and scores, made and checked before any weights are read.

        Args:
            model: may be on the meta device.
            methods: what is measured beside the model as loaded; None: the model as it is, alone.
            tokenizer: default: the one beside the model's weights.
            **settings: fields of `RunPlan`: chunk, offload_cache.

        Raises:
            CorpusError, MethodError: as `measure` does.
        """
        question: LengthsQuestion = self
        if methods is not None:
            question, chosen = self.fit(model, methods)
            settings |= {"methods": (None, *chosen), **methods.underneath}
        module, _, function = self.planner.rpartition(".")
        plan: RunPlan[Any] = getattr(import_module(module), function)(question, model, tokenizer, settings)
        return plan

    def fit(self, model: PreTrainedModel, methods: MethodChoice) -> tuple[LengthsQuestion, list[RopeMethod]]:
        """The question, and every method with every factor; without one, fitted to the longest length."""
        resolve = import_module("rope_ext_hf.patches.choosing").resolve_choice
        return self, resolve(methods, model, max(self.lengths))


@dataclass(frozen=True, kw_only=True)
class Perplexity(LengthsQuestion):
    """Perplexity and bits per byte by context length, on the same target tokens.

    Attributes:
        lengths: context lengths in tokens.
        data: the text, as `rope_ext_hf.reading.corpora.load` takes it.
        protocol: a name of `rope_ext_hf.reading.protocols.PROTOCOLS`.
        targets: tokens scored per span, under a protocol that uses it; default half the shortest length.
        stride: tokens between the starts of spans, under a protocol that uses it.
        max_spans: at most this many spans per length, taken evenly over the corpus; None: all.
        bos: begin every span with the tokenizer's BOS token; default: if the tokenizer itself does so, or as the code
            that the protocol is from does.
        keys_by: measure LongPPL, too: the folder or Hub id of the model that finds the key tokens, or the keys.json
            that another run left. The text must be text, not token ids.
        key_window: tokens of the short context that it compares with; default: an eighth of the longest length, at
            most 4,096.
        data_name: what the text is called in results; default: its name where it is given by one.
    """

    PANEL = "Text"
    planner = "rope_ext_hf.eval.perplexity_plans.plan_perplexity"

    data: Any = asked(
        "stdlib",
        parse=_text,
        metavar="TEXT",
        help="'stdlib' (modules of Python's library that the bundled model was not trained on), a text, "
        "JSON lines or parquet file, a folder, a pattern, or hf:OWNER/NAME. Settings follow a question mark: "
        "?column=..&min_bytes=..&max_documents=..&seed=..&join=true, or join=CHARACTERS per document.",
    )
    protocol: str = asked("matched", metavar="NAME", help=f"Which tokens are read and scored. {protocol_help()}.")
    targets: int | Any | None = asked(
        None,
        parse=parse_length,
        metavar="TOKENS",
        help="Tokens scored per span under matched. Default: half the shortest length.",
    )
    stride: int = asked(
        256, least=1, metavar="TOKENS", help="Tokens between the starts of spans, under a protocol with a stride."
    )
    max_spans: int | Any | None = asked(
        None,
        typed=64,
        parse=_most_spans,
        show=lambda most: "all" if most is None else str(most),
        metavar="N",
        help="Read at most N spans per length, spread evenly over the text; all: the whole text.",
    )
    bos: bool | None = asked(
        None, help="Begin each span with the BOS token. Default: as the tokenizer or the protocol does."
    )
    keys_by: str | Any | None = asked(
        None,
        parse=lambda given: None if given is None else str(given),
        metavar="MODEL|FILE",
        help="Measure LongPPL, too: the model that finds the key tokens, or the keys.json that such a run wrote.",
    )
    key_window: int | Any | None = asked(
        None,
        parse=parse_length,
        metavar="TOKENS",
        help="The short context that key tokens are hard to predict with. Default: an eighth of the longest length, at "
        "most 4k.",
    )
    data_name: str | None = asked(None, option=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_window is not None and self.keys_by is None:
            raise MethodError("key_window is the short context of what keys_by names; give keys_by, too")


@dataclass(frozen=True, kw_only=True)
class Sweep(Perplexity):
    """Perplexity of methods x factors that are fitted to the lengths, and of the context length."""

    def fit(self, model: PreTrainedModel, methods: MethodChoice) -> tuple[LengthsQuestion, list[RopeMethod]]:
        """The question with the context length, where it is below the longest, and every method with every factor.

        Without factor and target length, each length beyond the context length gets the factor that it needs, since a
        method costs short inputs more the larger its factor is.
        """
        fit = import_module("rope_ext_hf.eval.perplexity_plans").fit_sweep
        fitted: tuple[LengthsQuestion, list[RopeMethod]] = fit(self, model, methods)
        return fitted


@dataclass(frozen=True, kw_only=True)
class Passkey(LengthsQuestion):
    """Retrieval: a statement hidden in a long text is asked for, from several depths.

    Attributes:
        lengths: tokens of prompt and answer together. The haystack fills what the wording leaves.
        depths: shares of the haystack that stand before the statement asked for, 0 to 1.
        trials: prompts per length and depth; names and values are the same at each.
        keys: statements of the same kind in every prompt, of which one is asked for. With as many keys as depths or
            more, a statement stands at every depth, and each prompt is read once and asked about all of them: that
            takes as many times less. All others stand at random depths.
        distractors: wrong answers, of as many tokens, that the right one is ranked among.
        task: a name of `rope_ext_hf.suites.statements.TASKS`: "passkey" (instructions, repeated filler) and "needle" (a
            sentence in other text) for models of language; "key-value", "assignment", "quote" and "copy", which the
            bundled model is trained on. Default: "passkey".
        haystack: what `rope_ext_hf.reading.corpora.load` takes; default: the task's own.
        seed: of names, values and of where in the haystack a prompt's text is taken from.
    """

    planner = "rope_ext_hf.eval.retrieval_plans.plan_passkey"

    depths: tuple[float, ...] | Any = asked(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        parse=several(float),
        least=0,
        most=1,
        metavar="SHARES",
        help="Where the statement stands: 0 at the start, 1 at the end.",
    )
    trials: int = asked(10, least=1, most=10_000, help="Prompts per length and depth.")
    keys: int = asked(
        1,
        least=1,
        most=1_000,
        help="Statements in every prompt, of which one is asked for. As many as depths: each prompt is read once.",
    )
    distractors: int = asked(19, least=1, most=1_000, help="Wrong answers that the right one is ranked among.")
    task: str | None = asked(
        None,
        help="passkey, needle, key-value, assignment, quote or copy. Default: passkey; for the bundled model "
        "key-value.",
    )
    haystack: Any = asked(
        None, parse=_text, help="Text to hide it in, named as in --data of ppl. Default: the task's own."
    )
    seed: int = asked(0, help="For names, values and the text around them.")


@dataclass(frozen=True, kw_only=True)
class Tasks(LengthsQuestion):
    """A suite of tasks: scores by length, and up to which length they hold.

    Attributes:
        lengths: tokens of prompt and generation together, at most.
        suite: "ruler", "json-kv", "graphwalks", "babilong", "short", or a suite of your own.
        tasks: which of the suite's; default: all.
        samples: prompts per task and length.
        haystack: what `rope_ext_hf.reading.corpora.load` takes: the text that facts are hidden in, of tasks with one.
        score: "generate": greedy decoding, scored by the share of the right answers that it holds; "rank": whether the
            first right answer has the highest likelihood per token, among up to 19 others. Default: "generate"; of the
            suite "short" "rank".
        chat_template: "auto": applied where the tokenizer has one, its tokens counted in the length; "never".
        extra_tokens: tokens that may be generated beyond each task's own budget, for models that reason first; they are
            taken from the length.
        seed: of the prompts; default: the suite's own, 42 for RULER.
    """

    planner = "rope_ext_hf.eval.task_plans.plan_tasks"

    suite: str = asked("ruler", help=f"{', '.join(suite_names())}; short is a guard for short inputs.")
    tasks: tuple[str, ...] | Any | None = asked(
        None, parse=several(str), metavar="NAMES", help="Tasks of the suite, by commas. Default: all."
    )
    samples: int = asked(20, least=1, most=10_000, help="Prompts per task and length.")
    haystack: Any = asked(
        "stdlib",
        parse=_text,
        help="The text that facts are hidden in, named as in --data of ppl; some tasks use none.",
    )
    score: str | None = asked(
        None,
        help="generate: the share of right answers generated; rank: the right one among 19 others. Default: generate; "
        "of short rank.",
    )
    chat_template: str = asked(
        "auto", among=("auto", "never"), help="auto: the tokenizer's chat template, where it has one; never."
    )
    extra_tokens: int = asked(
        0, least=0, most=2**20, help="Tokens to generate beyond each task's budget, for models that reason first."
    )
    seed: int | None = asked(
        None, least=0, most=2**32 - 1, help="Of the prompts. Default: the suite's own, 42 for ruler."
    )


@dataclass(frozen=True, kw_only=True)
class Need(Question):
    """Whether a model needs a longer context at all, and how far it reads as it is.

    Attributes:
        target_length: tokens that are wanted: measured too, and no longer ones.
        data: the text, as `rope_ext_hf.reading.corpora.load` takes it; lengths that fewer than three of its documents
            have are left out.
    """

    target_length: int | Any | None = asked(
        None,
        parse=parse_length,
        least=1,
        metavar="TOKENS",
        help="The length that you need, e.g. 128k. Default: up to 4 context lengths.",
    )
    data: Any = asked(
        "stdlib",
        parse=_text,
        metavar="TEXT",
        help="The text that is read, as in `rope-ext ppl`, with long documents.",
    )
