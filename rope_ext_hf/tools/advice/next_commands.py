"""The commands that an advice shows, ready to type: for the recommended method, and for every goal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rope_ext_hf.errors import CheckpointError, duration
from rope_ext_hf.eval.measurement_options import Passkey
from rope_ext_hf.hub import find_device, loaded_dtype
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.reading.cost.operations import MINUTES, measure_speed
from rope_ext_hf.tools.advice.guidance import SERVING
from rope_ext_hf.tools.engines.base import find_engine, reference_engine, usual_server
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.serving.configs import Model
from rope_ext_hf.tools.serving.gpu_memory import GPUMemory
from rope_ext_hf.tools.serving.serving_options import GPUServer

_MOST_SPANS = 8  # spans of every length in the commands that measure: enough to compare methods
_PASSKEY = Passkey(lengths=[4096])  # the lengths do not matter here
_ANSWERS = 1 + _PASSKEY.distractors


class _Amount(NamedTuple):
    """The amount of text that a command measures on, so that it takes minutes on this device where that is possible."""

    spans: int  # of text, or prompts, per length
    seconds: float
    device: str
    dtype: str | None  # the option --dtype, where the CPU is much faster in another one than the model's


@dataclass(frozen=True)
class NextCommands:
    """The commands to type for extending one model to one length."""

    model: Model
    target_length: int
    options: Mapping[str, Any]  # over and context_length, if they were given

    def next_steps(
        self, purpose: str, method: str, lengths: Sequence[int], served: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Return the lines to type for the recommended method: measure it, then use it for the purpose.

        Args:
            purpose: "serve", "python" or "train".
            method: the recommended method; "": none is needed, or none helps.
            lengths: the lengths to measure, in tokens.
            served: the method that is advised for each engine; "": the model as it is.
        """
        name = self.model.given_name
        engines = [engine for engine in (usual_server(), *served) if served.get(engine) == method]
        engine = engines[0] if engines else usual_server()
        if not method:
            served_as_it_is = served and set(served.values()) <= {"", "default"}
            if purpose != "serve" or not served_as_it_is:
                return ()
            return (command_line("serve-config", name, **self.options, engine=engine),)
        patch = {"method": method, "target_length": self.target_length, **self.options}
        amount = self._amount([*lengths] * 2, _MOST_SPANS)
        reading = {"max_spans": amount.spans, "dtype": amount.dtype} if amount else {"max_spans": _MOST_SPANS}
        measure = command_line("ppl", name, **patch, lengths=lengths, data="texts/*.txt", **reading)
        folder = f"{Path(name).name}-{self.target_length}"
        if purpose == "train":
            return (measure, command_line("finetune", name, **patch, data="texts/*.txt", minutes=60, out=folder))
        if purpose == "python":
            arguments = "".join(f", {key}={value!r}" for key, value in patch.items() if key != "method")
            return (measure, f"rope.patch(model, {method!r}{arguments})  # import rope_ext_hf as rope")
        return (
            measure,
            command_line("patch", name, **patch, out=folder),
            command_line("serve-config", folder, engine=engine),
        )

    def by_goal(
        self,
        served: Mapping[str, str],
        configs: Mapping[str, ServingConfig],
        choices: Mapping[str, Sequence[str]],
        context_length: int,
        server: GPUServer | None,
        on_gpus: GPUMemory | None,
    ) -> dict[str, tuple[str, ...]]:
        """Return the commands for every goal that a user may have, by the goal in words.

        Args:
            served, choices, context_length, on_gpus: as in `Advice`.
            configs: the serving config of each engine in `served`.
            server: the GPUs that `on_gpus` is for.
        """
        commands: dict[str, tuple[str, ...]] = {}
        lengths = tuple(dict.fromkeys((min(context_length, self.target_length), self.target_length)))
        candidates = list(dict.fromkeys([name for names in choices.values() for name in names]))
        if candidates:
            commands |= self._measuring(candidates, lengths)
        if choices.get(SERVING):
            commands |= self._patching(choices[SERVING][0])
        commands |= self._as_published()
        programs: set[str] = set()
        for engine, method in served.items():
            config = configs[engine]
            program = next((word for word in config.command if word not in ("python", "-m")), engine)
            if engine == reference_engine().name or program in programs:  # this process, or the same program again
                continue
            programs.add(program)
            commands[f"serve with {engine}"] = self._serving(engine, method, config, server, on_gpus)
        return commands

    def _measuring(self, methods: Sequence[str], lengths: Sequence[int]) -> dict[str, tuple[str, ...]]:
        name = self.model.given_name
        options = {"method": methods, "target_length": self.target_length, **self.options, "lengths": lengths}
        passes = [*lengths] * (len(methods) + 1)
        spans = self._amount(passes, _MOST_SPANS)
        trials = self._amount(passes * len(_PASSKEY.depths), _PASSKEY.trials, answers=_ANSWERS)
        count = spans.spans if spans else _MOST_SPANS
        goal = f"measure on your own text: {sum(passes) * count:,} tokens are read"
        if spans is None or trials is None:
            ppl: dict[str, Any] = {"max_spans": count}
            passkey: dict[str, Any] = {}
        else:
            goal += f", about {duration(spans.seconds)} on {spans.device}; retrieval: about {duration(trials.seconds)}"
            ppl = {"max_spans": count, "dtype": spans.dtype}
            passkey = {"trials": trials.spans, "dtype": trials.dtype}
        return {
            goal: (
                command_line("ppl", name, **options, data="texts/*.txt", **ppl),
                command_line("passkey", name, **options, **passkey),
            )
        }

    def _patching(self, method: str) -> dict[str, tuple[str, ...]]:
        name = self.model.given_name
        options = {"method": method, "target_length": self.target_length, **self.options}
        return {
            "see what it changes, and keep it in a folder": (
                command_line("describe", name, **options),
                command_line("patch", name, **options, out=f"{Path(name).name}-{self.target_length}"),
            )
        }

    def _as_published(self) -> dict[str, tuple[str, ...]]:
        """Return the commands for the extension that the model's publisher names, if the target length needs it."""
        recipe = self.model.recipe
        if recipe is None or not (recipe.extended_length or 0) >= self.target_length > recipe.context_length:
            return {}
        name, arguments = self.model.given_name, recipe.arguments(self.model.config.max_position_embeddings)
        return {
            f"as published for {recipe.name}": (
                command_line("describe", name, **arguments),
                command_line("serve-config", name, **arguments, engine=usual_server()),
            )
        }

    def _serving(
        self,
        engine: str,
        method: str,
        config: ServingConfig,
        server: GPUServer | None,
        on_gpus: GPUMemory | None,
    ) -> tuple[str, ...]:
        """Return the command that prints how an engine serves the model, followed by the commands of that engine."""
        name, rules = self.model.given_name, find_engine(engine)
        options: dict[str, Any] = dict(self.options)
        if method not in ("", "default"):
            options = {"method": method, "target_length": self.target_length, **options}
        elif method:
            options = {"method": method, **options}
        if server is not None and on_gpus is not None and rules.on_gpus:
            fits = on_gpus.kv_bits is not None
            words = (*config.command, *rules.gpu_options(on_gpus.options)) if fits else ()
            config = replace(config, command=words)
            options |= server.options
        lines = [command_line("serve-config", name, **options, engine=engine)]
        if config.gguf_keys:
            lines.append(command_line("gguf", "IN.gguf", "OUT.gguf", model=name, **options))
        if config.command and (config.overrides is not None or not config.config_keys):
            lines.append(shlex.join(config.command))
        return tuple(lines)

    def _amount(self, passes: Sequence[int], most: int, answers: int = 0) -> _Amount | None:
        """Return how many spans or prompts per length are measured in minutes on this device, from 1 to `most`.

        `passes` are the numbers of tokens of the passes for one of them, each with this number of answers. None: the
        model has no class that loads alone, so that its time is not known.
        """
        try:
            model = self.model.empty_model()
        except CheckpointError:  # the text half of a composite model
            return None
        device, dtype = find_device("auto"), loaded_dtype(model, "auto")
        seconds = {
            each: measure_speed(model, device, each).seconds(model, passes, 0, answers * len(passes))
            for each in ({dtype, torch.float32} if device.type == "cpu" else {dtype})
        }
        fastest = min(seconds, key=lambda each: seconds[each])
        faster = fastest != dtype and seconds[fastest] < seconds[dtype] / 2
        one = seconds[fastest if faster else dtype]
        count = min(most, max(1, int(MINUTES / one)))
        return _Amount(count, count * one, str(device), str(fastest).removeprefix("torch.") if faster else None)
