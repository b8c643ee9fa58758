"""The arguments of measurements at several context lengths, as dataclasses; `measure` takes them.

    from rope_ext_hf.eval import Passkey, measure
    run = measure(model, Passkey(lengths=["4k", "32k"], trials=20), methods=["yarn"])

They are at once the arguments in Python, the options of a command, and the part of a run's settings that is not
the model. Nothing here imports torch, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rope_ext_hf.bounds import parse_length, parse_lengths
from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.options.arguments import Options, anything, argument, several
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.plug_ins import needed_plug_in
from rope_ext_hf.reading.protocols import protocol_help, resolve_protocol
from rope_ext_hf.reading.text.load import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rope_ext_hf.runs.measurement import RunPlan
    from rope_ext_hf.runs.run import Run

__all__ = ["MeasureWith", "MeasurementOptions", "Passkey", "Perplexity", "PplOptions", "Sweep", "some_lengths"]


class MeasureWith(Protocol):
    """A function that loads a model, makes a plan for it, and measures with it.

    Args:
        source: folder or Hub id of the model.
        make: makes the plan for that model and its tokenizer.

    Returns:
        The run; None where nothing is measured, as in a dry run.
    """

    def __call__(
        self, source: str, make: Callable[[PreTrainedModel, PreTrainedTokenizerBase], RunPlan[Any]]
    ) -> Run[Any] | None: ...


DEFAULT_METHODS = ("linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "llama3")
"""The methods that a sweep measures by default: those that need no parameter but a factor."""


LOSS_UNITS = ("perplexity", "nats", "bits")
"""The units in which losses are shown; results.csv and results.json have all of them."""


_STATE_DTYPES = ("model", "float16", "float32")
"""The dtypes in which last hidden states are stored; "model" is the dtype of the model."""


def _loss_unit(value: Any) -> str:
    """Return the value if it is the name of a unit for losses; MethodError if it is not."""
    if value not in LOSS_UNITS:
        raise MethodError(f"unit must be one of {', '.join(LOSS_UNITS)}; got {short(repr(value))}")
    return str(value)


def _most_spans(value: Any) -> int | None:
    """Return the largest number of spans of text to read, from an option or an argument.

    None, which "all" stands for as well, means that the whole text is read.
    """
    if value is None or value == "all":
        return None
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value
    if type(number) is not int or number < 1:
        raise MethodError(f"max_spans must be a whole number of at least 1, or 'all'; got {short(repr(value))}")
    return number


def some_lengths(lengths: Any) -> tuple[int, ...] | None:
    """Return context lengths from an option or an argument; None stays None."""
    return None if lengths is None else tuple(parse_lengths(lengths))


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions(Options):
    """Base class for the arguments of a measurement at several context lengths.

    Attributes:
        kind: the name of the kind of run that takes these arguments, see `rope_ext_hf.runs.kinds.RunKind`.
    """

    kind: ClassVar[str]

    lengths: tuple[int, ...] | Any = argument(
        MISSING,
        "Context lengths in tokens, e.g. 4k,8k,16k (4k = 4096).",
        parse=lambda lengths: tuple(parse_lengths(lengths)),
        metavar="LENGTHS",
    )

    def plan(
        self,
        model: PreTrainedModel,
        methods: MethodChoice | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> RunPlan[Any]:
        """Return the plan for a run: what it reads and scores, checked before any weights are read.

        Args:
            model: the model, which may be on the meta device; errors are those of `measure`.
            methods: the methods that are measured beside the model as loaded; None: the model as it is, alone.
            tokenizer: default: the one beside the model's weights.
            **settings: fields of `RunPlan`: chunk, offload_cache.
        """
        from rope_ext_hf.runs.kinds import run_kind

        kind = run_kind(self.kind)
        if methods is None:
            return kind.plan(self, model, tokenizer, **settings)
        options, resolved = kind.fit(self, model, methods)
        settings |= {"methods": (None, *resolved), **methods.base_arguments}
        return kind.plan(options, model, tokenizer, **settings)


@dataclass(frozen=True, kw_only=True)
class Perplexity(MeasurementOptions):
    """Arguments for measuring perplexity and bits per byte by context length, on the same target tokens."""

    PANEL: ClassVar[str | None] = "Text"
    kind = "perplexity"
    command = "ppl"

    data: Any = argument(
        "stdlib",
        "The text that is read. 'stdlib' (modules of Python's library that the bundled model was not trained on), a "
        "text, JSON lines, CSV or parquet file, a folder, a pattern, or hf:OWNER/NAME. Options follow a question mark, "
        "with & between them: column=NAME of the text, join=CHARACTERS (documents are joined until each has so many), "
        "max_documents=N, and for a data set config=NAME and split=NAME.",
        parse=anything,
        metavar="TEXT",
    )
    protocol: str = argument("matched", f"Which tokens are read and scored. {protocol_help()}.", metavar="NAME")
    targets: int | Any | None = argument(
        None,
        "Tokens scored per span under matched and same-start. Default: half the shortest length.",
        parse=parse_length,
        metavar="TOKENS",
    )
    stride: int = argument(
        256, "Tokens between the starts of spans, under a protocol with a stride.", least=1, metavar="TOKENS"
    )
    max_spans: int | Any | None = argument(
        None,
        "Read at most N spans per length, spread evenly over the text; all: the whole text.",
        typed=64,
        parse=_most_spans,
        show=lambda most: str(most or "all"),
        metavar="N",
    )
    bos: bool | None = argument(
        None, "Begin each span with the BOS token. Default: as the tokenizer or the protocol does."
    )
    keys_by: str | Any | None = argument(
        None,
        "Also measure LongPPL: a model that chooses the key tokens, or the keys.json of an earlier run.",
        parse=lambda name: None if name is None else str(name),
        metavar="MODEL|FILE",
    )
    key_window: int | Any | None = argument(
        None,
        "Length of the short context by which key tokens are chosen. Default: an eighth of the longest length, at most "
        "4k.",
        parse=parse_length,
        metavar="TOKENS",
    )
    store_states: str | None = argument(
        None,
        "Store the last hidden state of each scored token, with which --against compares other models: in the dtype "
        "of the model (model, which loses nothing), float16 or float32.",
        among=_STATE_DTYPES,
        metavar="DTYPE",
    )
    unit: str = argument(
        LOSS_UNITS[0],
        "Losses in tables, pictures and sentences: as perplexity, in nats (per token) or in bits (per byte).",
        parse=_loss_unit,
        metavar="UNIT",
    )
    data_name: str | None = argument(
        None, "The name of the text in results. Default: the name by which it is given.", option=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_window is not None and self.keys_by is None:
            raise MethodError("key_window is for the model that keys_by names; give keys_by, too")

    def with_key_tokens(self, plan: RunPlan[Any], measure_with: MeasureWith) -> RunPlan[Any]:
        """Return a plan that also scores key tokens, which need the long context, if `keys_by` says what chooses them.

        Args:
            plan: the plan without key tokens; it is returned as it is if `keys_by` is not given.
            measure_with: loads the model that chooses the key tokens, and measures with it.

        Raises:
            MethodError: `keys_by` is given, and `rope_ext_hf.tools`, which chooses key tokens, is not installed.
        """
        if self.keys_by is None:
            return plan
        with_keys: RunPlan[Any] = needed_plug_in("parts", "keys_by")(plan, self, measure_with)
        return with_keys

    def check_early(self) -> None:
        """Raise an error for an unknown protocol or text, before anything heavy is imported."""
        resolve_protocol(self.protocol)
        check_name(self.data)


@dataclass(frozen=True, kw_only=True)
class PplOptions(Perplexity):
    """The options of `ppl`: those of `Perplexity`, and the stored run to compare with (a tool, `Divergence`)."""

    PANEL = None

    lengths: tuple[int, ...] | Any | None = argument(
        None,
        "Context lengths in tokens, e.g. 4k,8k,16k (4k = 4096). Required without --against.",
        parse=some_lengths,
        metavar="LENGTHS",
    )
    against: str | Any | None = argument(
        None,
        "The folder of a run with --store-states. MODEL reads the same tokens, and each distribution is compared with "
        "the stored one: KL divergence, and the share of tokens for which both have the same likeliest token. Text, "
        "lengths and protocol are those of the run.",
        parse=lambda folder: None if folder is None else str(folder),
        metavar="FOLDER",
    )
    against_method: str | None = argument(
        None,
        "The method of that run to compare with, by its label, e.g. 'yarn x4'. Default: the first, unpatched.",
        metavar="LABEL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.against is not None:
            return
        if self.against_method is not None:
            raise MethodError("--against-method is for the run that --against names; give --against, too")
        if self.lengths is None:
            raise MethodError(
                "--lengths is missing: give the context lengths in tokens, e.g. --lengths 4k,8k; or compare with a "
                "stored run: --against FOLDER"
            )

    def chosen(self, stated: Collection[str]) -> MeasurementOptions:
        """Return the arguments of the measurement that the options ask for.

        Args:
            stated: the names of the options that were given, also those with the value of their default.

        Raises:
            MethodError: an option is given that the run named by `against` decides, or the tool box is not installed.
        """
        if self.against is None:
            return Perplexity(**Perplexity.split_kwargs(self.arguments)[0])
        divergence: type[MeasurementOptions] = needed_plug_in("parts", "Divergence", by="--against")
        arguments, others = divergence.split_kwargs(self.arguments)
        decided = sorted(others.keys() & {*stated})
        if decided:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in decided)
            raise MethodError(
                f"{options}: text, protocol and targets are those of the run that --against names; leave out {options}"
            )
        return divergence(**arguments)


@dataclass(frozen=True, kw_only=True)
class Sweep(Perplexity):
    """Arguments for measuring perplexity by method, factor and context length.

    The model's own context length is measured as well, if it is below the longest length. Without a factor or a target
    length, each method is measured with the factor that each length beyond the context length needs, because a larger
    factor costs short inputs more.
    """

    command = "sweep"


@dataclass(frozen=True, kw_only=True)
class Passkey(MeasurementOptions):
    """Arguments for measuring retrieval: a question about a statement hidden in a long text, at several depths.

    A length is that of prompt and answer together; the haystack, the text around the statements, fills the prompt up.
    With at least as many keys as depths, a statement stands at every depth; then each prompt is read once and asked
    about all of them, which divides the time by the number of depths. All other statements stand at random depths.
    Names and values are the same at each length.
    """

    kind = "passkey"
    command = "passkey"

    depths: tuple[float, ...] | Any = argument(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        "Where the statement stands: 0 at the start, 1 at the end.",
        parse=several(float),
        least=0,
        most=1,
        metavar="SHARES",
    )
    trials: int = argument(10, "Prompts per length and depth.", least=1, most=10_000)
    keys: int = argument(
        1,
        "Statements in every prompt, of which one is asked for. With as many as depths, each prompt is read once.",
        least=1,
        most=1_000,
    )
    distractors: int = argument(19, "Wrong answers that the right one is ranked among.", least=1, most=1_000)
    task: str | None = argument(
        None,
        "passkey, needle, key-value, assignment, quote or copy. Default: passkey; for the bundled model key-value.",
    )
    haystack: Any = argument(
        None, "Text to hide it in, named as in --data of ppl. Default: the task's own.", parse=anything
    )
    seed: int = argument(0, "Seed of the random names and values, and of the place where the haystack begins.")

    def check_early(self) -> None:
        """Raise an error for an unknown haystack, before anything heavy is imported."""
        check_name(self.haystack)
