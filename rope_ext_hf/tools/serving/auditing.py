"""`audit`: a comparison of the RoPE that serving engines compute from a config.json or a GGUF file.

print(serving.audit("my-model/"))
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import (
    CheckpointError,
    RopeExtError,
    ServingError,
    UnknownMethodError,
    entry,
    listed,
    one_line,
    short,
)
from rope_ext_hf.files.model_folders import model_folder
from rope_ext_hf.files.whole import foreign_errors, mistral_format_files, read_json
from rope_ext_hf.models.config_keys import PATCH_KEY, rope_settings, text_settings, unread_settings
from rope_ext_hf.models.patch_records import checked_patches
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.terminal import Rows, ShownAsTables, text_table, wrapped
from rope_ext_hf.tools.engines.base import Engine, NotCheckedError, list_engines, reference_engine
from rope_ext_hf.tools.engines.comparison import Expected, engine_difference, expected_numbers
from rope_ext_hf.tools.engines.gguf_rules import ARCHITECTURES, OF_SLIDING_LAYERS, file_computes
from rope_ext_hf.tools.engines.keys import STILL, Computed, length_setting
from rope_ext_hf.tools.engines.other_programs import OtherProgram, other_programs
from rope_ext_hf.tools.engines.programs.vllm import HF_FORMAT, of_mistral_params
from rope_ext_hf.tools.gguf.headers import read_file_rope
from rope_ext_hf.tools.serving.class_rotary import ClassRotary, check_described
from rope_ext_hf.tools.serving.configs import refuse_adapter


@dataclass(frozen=True)
class _EngineReport:
    """The verdict of an audit on one engine, or other program: does it compute the same RoPE as transformers?

    Attributes:
        engine: the name of the engine.
        version: the version whose source its rules were taken from.
        computed: the numbers that the engine computes; None: it refuses the file, or its rules for this family are
            unknown.
        differs: a clause on the difference from transformers, or on why it does not run; None: there is no difference.
        unknown: the reason why it is not known if the engine agrees; None: it is known.
        caveat: a sentence if the rules for this family were read in the engine's source, and nothing was run.
        was_run: whether its rules were checked by running anything; if not, it does not count for `Audit.agrees`.
        label: its title with its version.
        stops: whether it refuses the file.
        advice: a sentence on what to do where it differs.
    """

    engine: str
    version: str
    computed: Computed | None
    differs: str | None = None
    unknown: str | None = None
    caveat: tuple[str, ...] = ()
    was_run: bool = True
    label: str = ""
    stops: bool = False
    advice: str = ""

    @property
    def verdict(self) -> str:
        """The difference between the engine and transformers, in a clause."""
        if self.unknown:
            return f"not checked: {self.unknown}"
        return self.differs or "the same"

    @property
    def numbers(self) -> str:
        """The RoPE numbers that the engine computes, in a clause; empty if there are none."""
        if self.computed is None:
            return ""
        slowest = min((value for value in self.computed.inv_freq if value > STILL), default=0.0)
        wavelength = "none"
        if slowest:
            tokens = float(f"{2 * math.pi / slowest:.5g}")
            wavelength = f"{tokens:,.0f} tokens" if tokens >= 1e4 else f"{tokens:g} tokens"
        return f"longest wavelength {wavelength}, magnitude {self.computed.attention_factor:.5g}, {self.length}"

    @property
    def length(self) -> str:
        """The length, in tokens, that the engine serves by default, as a phrase."""
        if self.computed is None or not self.computed.length:
            return "any length that it is started for"
        return f"length {self.computed.length:,} tokens"


@dataclass(frozen=True, repr=False)
class Audit(ShownAsTables):
    """Result of an audit: the RoPE that serving engines compute from one config.json or GGUF file.

    Attributes:
        path: the file.
        engines: a report on each engine; for a config.json transformers is the first.
        problems: the mistakes in the file itself, in sentences.
        notes: sentences on layers that the rope settings do not reach, in any engine, and on other ways to serve it.
        others: a report on each converter, exporter and other program; they do not count for `agrees`.
        only: the name of the engine or program that is shown; None: all engines, and a summary of the others.
    """

    also = ("agrees",)
    path: str
    engines: tuple[_EngineReport, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    others: tuple[_EngineReport, ...] = ()
    only: str | None = None

    @property
    def agrees(self) -> bool:
        """True if all engines whose rules are known compute the same RoPE, and the file has no problems."""
        return not self.problems and not any(report.differs for report in self.engines if report.was_run)

    @property
    def _rows(self) -> Rows:
        """The name, version and verdict of each engine, with its notes in rows of their own."""
        rows, shown = [], self.engines
        if self.only is not None:
            named = [report for report in (*self.engines[1:], *self.others) if report.engine == self.only]
            shown = (self.engines[0], *named)
        for report in shown:
            rows.append((report.engine, report.version, self._verdict(report)))
            notes = () if report.computed is None else report.computed.notes
            advice = (report.advice,) if report.differs and report.advice else ()
            rows += [("", "", note) for note in (*notes, *report.caveat, *advice)]
        return rows

    @property
    def _silent(self) -> str:
        """A sentence on the other programs that compute something else without a word; empty: none is known to."""
        by_clause: dict[str, list[str]] = {}
        for report in self.others:
            if report.differs and not report.stops:
                by_clause.setdefault(report.differs, []).append(report.label)
        if not by_clause or self.only is not None:
            return ""
        said = "; ".join(f"{listed(labels)} ({clause})" for clause, labels in by_clause.items())
        command = command_line("audit", "PATH", engine="NAME")
        return f"Some programs compute something else in silence: {said}. Details: {command}"

    def _verdict(self, report: _EngineReport) -> str:
        """Return the verdict on an engine; its numbers are added if they differ from those of transformers."""
        numbers, reference = report.numbers, reference_engine().name
        if not numbers or report.unknown:
            return report.verdict
        if report.differs:
            return f"{report.differs}; {numbers}"
        if report.engine == reference or self.engines[0].engine != reference:  # a GGUF file is compared with nothing
            return numbers
        return "the same" if report.length == self.engines[0].length else f"the same, {report.length}"

    def tables(self) -> Sequence[Rows]:
        remarks = [
            *(("note", note) for note in self.notes),
            *(("problem", problem) for problem in self.problems),
            *([("other", self._silent)] if self._silent else []),
        ]
        return [[("file", self.path), *remarks], [("engine", "version", "computes"), *self._rows]]

    def __str__(self) -> str:
        rows = [(f"  {name}" if name else "", *others) for name, *others in self._rows]
        lines = [self.path, text_table(rows)]
        lines += [wrapped(note, "  note         ") for note in self.notes]
        lines += [wrapped(problem, "  problem      ") for problem in self.problems]
        if self._silent:
            lines.append(wrapped(self._silent, "  other        "))
        return "\n".join(lines)


def audit(path: str | Path, *, revision: str | None = None, engine: str | None = None) -> Audit:
    """Compute RoPE from a model's config or GGUF file as each serving engine does, and compare with transformers.

    Converters, exporters and other programs are compared too; those that silently compute something else are named.

    Args:
        path: a folder, a config.json, a GGUF file, or a Hub id (whose config alone is downloaded).
        revision: branch, tag or commit on the Hub.
        engine: the name of the engine or program to show, with what to do; None: all engines.

    Raises:
        UnknownMethodError: no engine or program has the name.
        CheckpointError, FileError: the file does not exist, is damaged, or belongs to an adapter.
        ServingError: the model has its angles as a table in its weights.
    """
    if engine is not None:
        entry("engine", engine, {**list_engines(), **other_programs()}, UnknownMethodError)
    file = Path(path)
    if file.suffix == ".gguf":
        return _audit_gguf(file)
    if file.suffix != ".json":
        folder = model_folder(path, revision=revision, weights=False)
        refuse_adapter(path, folder)
        file = folder / "config.json"
    return _with_mistral_format(replace(audit_config(read_json(file), str(file)), only=engine), file.parent)


def _with_mistral_format(report: Audit, folder: Path) -> Audit:
    """Return the audit with a note if the folder also has a config in Mistral's own format, params.json.

    If the two configs differ, that is a problem instead.
    """
    reference, names = report.engines[0].computed, mistral_format_files(folder)
    if "params.json" not in names or reference is None:
        return report
    options = " ".join(HF_FORMAT)
    try:
        theirs = of_mistral_params(read_json(folder / "params.json"), reference)
        difference = theirs.difference(reference.inv_freq, reference.attention_factor, 1.0, within=1e-5)
    except (RopeExtError, ArithmeticError) as error:
        difference = one_line(error)
    text = f"{', '.join(names)}: vLLM runs the model from these files, and not from config.json"
    if difference is None:
        note = f"{text}; they have the same frequencies. With {options} it reads config.json"
        return replace(report, notes=(*report.notes, note))
    problem = (
        f"{text}, and {difference}. Start it with {options}, or delete these files (rope-ext patch leaves them out)"
    )
    return replace(report, problems=(*report.problems, problem))


@foreign_errors("this config cannot be audited")
def audit_config(config: Mapping[str, Any], name: str = "config.json") -> Audit:
    """Return the audit of a config that is in memory already; arguments and errors are those of `audit`."""
    check_described(config)
    reference = _reference(config)
    reports, notes = [reference.report], [reference.note] if reference.note else []
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    records = [part.get(PATCH_KEY) for part in parts]
    for_chosen_layers = any(isinstance(record, Mapping) and record.get("layers") for record in records)
    for cls in list_engines().values():
        if cls.reference or cls.rules_of:
            continue
        engine = cls()
        read = reference.config if engine.loads_config else config
        report = _report(engine, read, reference.expected, reference.context_length)
        reports.append(report)
        if report.differs and engine.has_plugin() and not for_chosen_layers:
            command = command_line("serve-config", "MODEL", engine=engine.name, plugin=True)
            notes.append(f"With the plug-in of this package {engine.label} takes static frequencies: {command}")
    others = [_other_report(program, config, reference) for program in other_programs().values()]
    return Audit(name, tuple(reports), tuple(_problems(config, reference.config)), tuple(notes), tuple(others))


@dataclass(frozen=True)
class _Reference:
    """The RoPE numbers that transformers computes from a config, with which those of the engines are compared."""

    report: _EngineReport
    expected: Expected | None  # None: transformers refuses the config
    config: Mapping[str, Any]  # the config, with the theta of its class where it states none
    context_length: int | None = None  # the length in tokens that the model is for; None: it is not known
    note: str | None = None  # a sentence on layers that its scaling does not reach


def _reference(config: Mapping[str, Any]) -> _Reference:
    """Compute RoPE with the model's own class in transformers, or by the rules here if the class cannot be run."""
    from transformers import AutoConfig, __version__

    values = {key: copy.deepcopy(value) for key, value in config.items() if key != "model_type"}
    try:
        with foreign_errors("its class cannot be run"):
            rotary = ClassRotary(AutoConfig.for_model(str(config.get("model_type")), **values))
            length = length_setting(rotary.config.to_dict())
            numbers = [rotary.at(tokens) for tokens in (length, 1, 2 * length)]
    except RopeExtError as error:
        engine = reference_engine()
        report = _report(engine, config)
        if report.computed is None:
            return _Reference(report, None, config)
        note = f"Computed from the config alone, because {one_line(error)}."
        report = replace(report, computed=replace(report.computed, notes=(*report.computed.notes, note)))
        return _Reference(report, expected_numbers(engine, config), config)
    long, short, longer = [
        Computed(inv_freq, magnitude, length, softmax_scale=rotary.softmax_scale) for inv_freq, magnitude in numbers
    ]
    depends_on_total_length = short.inv_freq != long.inv_freq or short.attention_factor != long.attention_factor
    if depends_on_total_length or longer.inv_freq != long.inv_freq:
        note = f"The frequencies depend on the longest input; these are for {length:,} tokens."
        long = replace(long, depends_on_total_length=depends_on_total_length, notes=(note,))
    report = _EngineReport(reference_engine().name, __version__, long)
    expected = ((length, long), *(((1, short),) if depends_on_total_length else ()))
    return _Reference(report, expected, _with_theta(config, rotary.config), rotary.context_length, rotary.note)


def _with_theta(config: Mapping[str, Any], loaded: Any) -> Mapping[str, Any]:
    """Return a config with the theta that transformers takes for it, where it states none; `loaded`: its text config.

    A `rope_scaling` without a theta replaces `rope_parameters` with one (convert_rope_params_to_dict in
    modeling_rope_utils.py of transformers 5).
    """
    text = text_settings(config)
    stated = text.get("rope_scaling") or text.get("rope_parameters") or {}
    theta = (getattr(loaded, "rope_parameters", None) or {}).get("rope_theta")
    if theta is None or text.get("rope_theta") is not None or not isinstance(stated, Mapping) or "rope_theta" in stated:
        return config
    text = text | {"rope_theta": theta}
    return {**config, "text_config": text} if "text_config" in config else text


def _report(
    engine: Engine, config: Mapping[str, Any], expected: Expected | None = None, context_length: int | None = None
) -> _EngineReport:
    """Return the report on one engine: the RoPE that it computes, and how it differs from the expected one.

    `context_length` is the length in tokens that the model is for; None: it is not known.
    """
    report = _EngineReport(engine.name, engine.version, None, was_run=engine.was_run)
    try:
        computed = engine.computes(config, expected[0][0] if expected else None)
        differs = engine_difference(engine, expected, config) if expected else None
        length = computed.length
        if not differs and length is not None and context_length is not None and length > context_length:
            differs = f"it would serve {length:,} tokens, but the model is for {context_length:,}"
            factor = rope_settings(text_settings(config)).get("factor", 1.0)
            if length == round(context_length * factor):
                differs += ": the factor is applied twice"
        caveat = engine.caveat(str(text_settings(config).get("model_type")))
        return replace(report, computed=computed, differs=differs, caveat=caveat)
    except NotCheckedError as error:
        return replace(report, unknown=one_line(error))
    except ServingError as error:
        return replace(report, differs=f"does not run: {one_line(error)}")
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # values of any type
        return replace(report, differs=f"does not run: {type(error).__name__}: {error}")


def _other_report(program: OtherProgram, config: Mapping[str, Any], reference: _Reference) -> _EngineReport:
    """Return the report on a converter, exporter or other program."""
    label = f"{program.title} {program.version}"
    report = _EngineReport(program.name, program.version, None, label=label, advice=program.advice)
    if reference.expected is None:
        return replace(report, unknown="transformers does not run this config")
    try:
        computed, differs = program.computes(config, reference.expected)
        return replace(report, computed=computed, differs=differs)
    except NotCheckedError as error:
        return replace(report, unknown=one_line(error))
    except (RopeExtError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        return replace(report, differs=f"does not run: {one_line(error)}", stops=True)


def _problems(config: Mapping[str, Any], with_theta: Mapping[str, Any]) -> list[str]:
    """Return sentences on mistakes in a config that do not depend on the engine that reads it.

    `with_theta` is the config with the theta of its class where it states none.
    """
    problems = []
    if isinstance(config.get("text_config"), Mapping):
        stray = [key for key in ("rope_scaling", "rope_parameters", "rope_theta") if config.get(key) is not None]
        if stray:
            problems.append(f"{', '.join(stray)} beside text_config: engines read only those inside text_config")
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and PATCH_KEY in part:
            try:
                checked_patches(part[PATCH_KEY], "this config")
            except CheckpointError as error:
                problems.append(one_line(error))
    try:
        text = text_settings(config)
        if unread := unread_settings(text):
            problems.append(unread)
        settings = rope_settings(text_settings(with_theta))
    except ServingError as error:
        return [*problems, one_line(error)]
    kind, original = settings["rope_type"], settings.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope", "llama3") and original is None:
        problems.append(f"{kind} without original_max_position_embeddings: engines take different lengths for it")
    parameters = text.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        return [*problems, f"rope_parameters must be an object, got {short(repr(parameters))}"]
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    if any(value.get("truncate") is False for value in nested) and parameters.get("truncate", True):
        problems.append("truncate: false for one layer type: transformers reads it only at the top level")
    return problems


def _audit_gguf(path: Path) -> Audit:
    if not path.is_file():
        raise CheckpointError(f"no such file: {str(path)!r}")
    file = read_file_rope(path)
    engine = next(cls() for cls in list_engines().values() if cls.file_suffix == path.suffix)
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
