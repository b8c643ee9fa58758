"""`audit`: what each serving engine computes from a config.json or a GGUF file, and where they differ.

print(serving.audit("my-model/"))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_ext_hf.downloads import mistral_format_files
from rope_ext_hf.errors import CheckpointError, RopeExtError, ServingError, UnsupportedModelError, one_line, short
from rope_ext_hf.files import read_json
from rope_ext_hf.hub import foreign_errors, model_folder
from rope_ext_hf.methods.static import Default
from rope_ext_hf.patches.class_angles import ClassAngles, softmax_multiple
from rope_ext_hf.patches.config_keys import rope_settings, text_settings, unread_settings
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import check_stated
from rope_ext_hf.patches.loading import empty_model
from rope_ext_hf.patches.patch_records import PATCH_KEY, checked_specs
from rope_ext_hf.patches.slot_finding import find_slots, rotary_modules
from rope_ext_hf.patches.slots import first_scaled
from rope_ext_hf.questions import command_line
from rope_ext_hf.terminal import Rows, ShownAsTables, text_table, wrapped
from rope_ext_hf.tools.engines.base import Engine, NotCheckedError, list_engines, reference_engine
from rope_ext_hf.tools.engines.comparison import Expected, engine_difference, expected_numbers
from rope_ext_hf.tools.engines.gguf_rules import ARCHITECTURES, OF_SLIDING_LAYERS, file_computes
from rope_ext_hf.tools.engines.keys import Computed, length_setting
from rope_ext_hf.tools.engines.vllm import HF_FORMAT, of_mistral_params
from rope_ext_hf.tools.serving.configs import refuse_adapter
from rope_ext_hf.tools.serving.gguf_files import read_file_rope


@dataclass(frozen=True)
class _EngineReport:
    """The verdict on one engine and a file."""

    engine: str
    version: str  # the version whose source the engine's rules were taken from
    computed: Computed | None  # None where the engine refuses the file, or its rules for this family are unknown
    # how it differs from transformers, or why it does not run; None: it computes the same, or is unknown
    differs: str | None = None
    unknown: str | None = None  # why nothing can be stated; None: something can
    caveat: tuple[str, ...] = ()  # that the rules were read in the engine's source, and not run
    tried: bool = True  # whether anything was run in the engine; what its source alone says does not count for `agrees`

    @property
    def verdict(self) -> str:
        if self.unknown:
            return f"not checked: {self.unknown}"
        return self.differs or "the same"


@dataclass(frozen=True, repr=False)
class Audit(ShownAsTables):
    """The numbers that serving engines compute from one config.json or GGUF file.

    Attributes:
        path: the file.
        engines: one report each.
        problems: the mistakes in the file itself.
        notes: the layers that its rope settings do not reach, in any engine; what serves it where an engine differs.
    """

    also = ("agrees",)
    path: str
    engines: tuple[_EngineReport, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all engines whose rules are known compute the same, and nothing is wrong with the file."""
        return not self.problems and not any(report.differs for report in self.engines if report.tried)

    @property
    def _rows(self) -> Rows:
        """Of each engine name, version and verdict, and its notes in rows of their own."""
        rows = []
        for report in self.engines:
            figures, notes = "", tuple[str, ...]()
            if (computed := report.computed) is not None:
                slowest = min((value for value in computed.inv_freq if value), default=0.0)
                longest = f"{2 * math.pi / slowest:.5g}" if slowest else "-"
                length = f"{computed.length:,}" if computed.length else "as asked"
                figures = f"longest wavelength {longest}, magnitude {computed.attention_factor:.5g}, length {length}; "
                notes = computed.notes
            rows.append((report.engine, report.version, figures + report.verdict))
            rows += [("", "", note) for note in (*notes, *report.caveat)]
        return rows

    def tables(self) -> Sequence[Rows]:
        remarks = [*(("note", each) for each in self.notes), *(("problem", each) for each in self.problems)]
        return [[("file", self.path), *remarks], [("engine", "version", "computes"), *self._rows]]

    def __str__(self) -> str:
        rows = [(f"  {name}" if name else "", *others) for name, *others in self._rows]
        lines = [self.path, text_table(rows), *(wrapped(note, "  note         ") for note in self.notes)]
        return "\n".join([*lines, *(wrapped(problem, "  problem      ") for problem in self.problems)])


def audit(path: str | Path, *, revision: str | None = None) -> Audit:
    """Compute a model's config or GGUF file by the rules of each serving engine, and compare with transformers.

    Args:
        path: a folder, a config.json, a GGUF file, or a Hub id (whose config alone is downloaded).
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError, FileError: no such file, a damaged one, or an adapter.
        ServingError: a model whose angles are a table in its weights.
    """
    file = Path(path)
    if file.suffix == ".gguf":
        return _audit_gguf(file)
    if file.suffix != ".json":
        folder = model_folder(path, revision=revision, weights=False)
        refuse_adapter(path, folder)
        file = folder / "config.json"
    return _with_mistral_format(audit_config(read_json(file), str(file)), file.parent)


def _with_mistral_format(report: Audit, folder: Path) -> Audit:
    """The audit with what files in Mistral's own format beside config.json do: a problem where they say otherwise."""
    reference, names = report.engines[0].computed, mistral_format_files(folder)
    if "params.json" not in names or reference is None:
        return report
    options = " ".join(HF_FORMAT)
    try:
        theirs = of_mistral_params(read_json(folder / "params.json"), reference)
        differs = theirs.difference(reference.inv_freq, reference.attention_factor, 1.0, within=1e-5)
    except (RopeExtError, ArithmeticError) as error:
        differs = one_line(error)
    text = f"{', '.join(names)}: vLLM runs the model from these, and not from config.json"
    if differs is None:
        note = f"{text}; they have the same frequencies. {options} has it read config.json"
        return replace(report, notes=(*report.notes, note))
    problem = f"{text}; by them {differs}. Start it with {options}, or delete them (rope-ext patch leaves them out)"
    return replace(report, problems=(*report.problems, problem))


@foreign_errors("this config cannot be audited")
def audit_config(config: Mapping[str, Any], name: str = "config.json") -> Audit:
    """`audit` of a config that has been read."""
    check_stated(config)
    model_type = str(config.get("model_type"))
    if family(model_type).angle_table:
        raise ServingError(
            f"the angles of {short(model_type)!r} are a table in its weights, which its config does not describe: "
            "there is nothing to audit"
        )
    problems = _problems(config)
    engines = [engine() for engine in list_engines().values() if not (engine.reference or engine.rules_of)]
    reference, expected, most, note = _reference(config)
    reports = [_report(engine, config, expected, most) for engine in engines]
    differing = [engine for engine, report in zip(engines, reports, strict=True) if report.differs]
    plugins = [engine.name for engine in differing if engine.has_plugin()]
    commands = [command_line("serve-config", "MODEL", engine=each, plugin=True) for each in plugins]
    notes = [f"The plug-in hands static frequencies over: {command}" for command in commands]
    return Audit(name, (reference, *reports), tuple(problems), (*filter(None, [note]), *notes))


def _reference(config: Mapping[str, Any]) -> tuple[_EngineReport, Expected | None, int | None, str | None]:
    """The report on transformers, by the model's own class; what others are compared with; and of the model, if known,
    the length in tokens that it is for and what its scaling does not reach.
    """
    from transformers import AutoConfig, __version__

    values = {key: copy.deepcopy(value) for key, value in config.items() if key != "model_type"}
    try:
        with foreign_errors("its class cannot be run"):
            model = empty_model(AutoConfig.for_model(str(config.get("model_type")), **values))
            slot, layer_type = None, None
            try:
                slot = first_scaled(find_slots(model))
                layer_type = (*slot.scaled_layers, *slot.as_loaded)[0]
                angles, own = ClassAngles(model, slot.module, slot.layout), slot.config
            except UnsupportedModelError:  # it arranges its angles in a way that no patch could
                [(_, _, module, own)] = rotary_modules(model)
                angles = ClassAngles(model, module, None)
            length, scale = length_setting(own.to_dict()), softmax_multiple(model)
            numbers = [angles.at(layer_type, tokens) for tokens in (length, 1, 2 * length)]
    except RopeExtError as error:
        engine = reference_engine()
        report = _report(engine, config)
        if report.computed is None:
            return report, None, None, None
        why = f"Computed from the config alone, since {one_line(error)}."
        report = replace(report, computed=replace(report.computed, notes=(*report.computed.notes, why)))
        return report, expected_numbers(engine, config), None, None
    long, short, longer = [Computed(*each, length, softmax_scale=scale) for each in numbers]
    by_length = short.inv_freq != long.inv_freq or short.attention_factor != long.attention_factor
    if by_length or longer.inv_freq != long.inv_freq:
        note = f"The frequencies follow the longest input; these are for {length:,} tokens."
        long = replace(long, by_length=by_length, notes=(note,))
    report = _EngineReport(reference_engine().name, __version__, long)
    expected = ((length, long), *(((1, short),) if by_length else ()))
    if slot is None:
        return report, expected, None, None
    described = slot.as_loaded[layer_type]
    unrotated = None if isinstance(described.method, Default) else slot.layers.unrotated_note(described.method)
    return report, expected, described.context_length, unrotated


def _report(
    engine: Engine, config: Mapping[str, Any], expected: Expected | None = None, most: int | None = None
) -> _EngineReport:
    """The numbers of an engine, and how they differ from those expected; the model is for at most so many tokens."""
    report = _EngineReport(engine.name, engine.version, None, tried=engine.was_run)
    try:
        computed = engine.computes(config, expected[0][0] if expected else None)
        differs = engine_difference(engine, expected, config) if expected else None
        length = computed.length
        if not differs and length is not None and most is not None and length > most:
            twice = length == round(most * rope_settings(text_settings(config)).get("factor", 1.0))
            differs = f"it would serve {length:,} tokens, and the model is for {most:,}"
            differs += ": the factor is applied twice" if twice else ""
        caveat = engine.caveat(str(text_settings(config).get("model_type")))
        return replace(report, computed=computed, differs=differs, caveat=caveat)
    except NotCheckedError as error:
        return replace(report, unknown=one_line(error))
    except ServingError as error:
        return replace(report, differs=f"does not run: {one_line(error)}")
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # values of any type
        return replace(report, differs=f"does not run: {type(error).__name__}: {error}")


def _problems(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if isinstance(config.get("text_config"), Mapping):
        stray = [key for key in ("rope_scaling", "rope_parameters", "rope_theta") if config.get(key) is not None]
        if stray:
            problems.append(f"{', '.join(stray)} beside text_config: engines read those inside text_config alone")
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and PATCH_KEY in part:
            try:
                checked_specs(part[PATCH_KEY], "this config")
            except CheckpointError as error:
                problems.append(one_line(error))
    try:
        text = text_settings(config)
        settings = rope_settings(text)
    except ServingError as error:
        return [*problems, one_line(error)]
    if unread := unread_settings(text):
        problems.append(unread)
    kind, original = settings["rope_type"], settings.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope", "llama3") and original is None:
        problems.append(f"{kind} without original_max_position_embeddings: engines put different lengths in its place")
    parameters = text.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        return [*problems, f"rope_parameters must be an object, and is {short(repr(parameters))}"]
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    if any(value.get("truncate") is False for value in nested) and parameters.get("truncate", True):
        problems.append("truncate: false for one layer type: transformers reads it from the top level only")
    return problems


def _audit_gguf(path: Path) -> Audit:
    if not path.is_file():
        raise CheckpointError(f"no such file: {str(path)!r}")
    file = read_file_rope(path)
    engine = next(each() for each in list_engines().values() if each.file_suffix == path.suffix)
    computed, differs, unknown = None, None, None
    try:
        computed = file_computes(file)
    except NotCheckedError as error:
        unknown = one_line(error)
    except (RopeExtError, ArithmeticError) as error:  # numbers of any size
        differs = f"cannot be served: {one_line(error)}"
    families = [name for name, (architecture, _) in ARCHITECTURES.items() if architecture == file.architecture]
    caveats = [engine.caveat(name) for name in families]
    report = _EngineReport(engine.name, engine.version, computed, differs, unknown, min(caveats, default=()))
    sliding = [key for key in OF_SLIDING_LAYERS if key in file.keys]
    notes = [f"{key} is {file.keys[key]:g}: it changes sliding-window layers, which are not shown." for key in sliding]
    return Audit(str(path), (report,), computed.notes if computed else (), tuple(notes))
