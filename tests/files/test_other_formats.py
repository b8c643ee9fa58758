"""Folders in other formats than Hugging Face's: every command names the format, and what it advises works."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.other_formats import check_format, check_packed, format_on_hub, without_config
from rope_ext_hf.reference import path
from tests.support.commands import run
from tests.support.models import build

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*does not run")

ATTENTION = "layers.0.attn.q_proj.weight"  # as torchtune names it


def message(folder: Path) -> str:
    """Return what is said of a folder without weights for transformers; empty if its format is unknown."""
    try:
        check_format(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def beside(folder: Path) -> Path:
    """Make a folder with everything of the bundled model but its weights."""
    return Path(shutil.copytree(path(), folder, ignore=shutil.ignore_patterns("*.safetensors")))


def weights() -> dict[str, torch.Tensor]:
    return load_file(path() / "model.safetensors")


def save_distributed(folder: Path, content: dict[str, Any]) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(content, checkpoint_id=str(folder))
    return folder


def commands(folder: Path, tmp_path: Path) -> dict[str, tuple[object, ...]]:
    (tmp_path / "text.txt").write_text("words and words " * 20)
    return {
        "convert": ("convert", folder, tmp_path / "out", "--to", "hf"),
        "detect": ("detect", folder),
        "patch": ("patch", folder, tmp_path / "out", "--method", "yarn", "--factor", "2"),
        "ppl": ("ppl", folder, "--lengths", "16", "--data", tmp_path / "text.txt", "--out", tmp_path / "results"),
        "extend": ("extend", folder, "--target-length", "512", "--no-measure", "--yes", "--out", tmp_path / "out"),
    }


# --- what real programs write -------------------------------------------------------------------------------------


def test_every_command_names_a_checkpoint_of_fsdp_and_the_advice_works(tmp_path: Path) -> None:
    from accelerate.commands.merge import merge_command, merge_command_parser

    folder = beside(tmp_path / "trained")
    save_distributed(folder / "pytorch_model_fsdp_0", {"model": weights()})
    save_distributed(folder / "optimizer_0", {"optimizer": {"state": torch.zeros(3)}})
    for arguments in commands(folder, tmp_path).values():
        code, _, err = run(*arguments)
        assert code == 2
        assert "It holds a sharded checkpoint of FSDP in 'pytorch_model_fsdp_0'" in err, arguments
    assert run("describe", folder)[0] == 0  # reads no weights
    [line] = re.findall(r"`accelerate merge-weights (.*?)`", err)
    merge_command(merge_command_parser().parse_args(shlex.split(line.replace("NEW", str(folder)))))
    assert load_file(folder / "model.safetensors").keys() == weights().keys()
    assert message(folder) == ""
    assert rope.detect_pairing(folder).pairing == "half"
    assert not (tmp_path / "out").exists()


def test_a_distributed_checkpoint_of_torch_and_its_tool(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = save_distributed(tmp_path / "step", {"model": weights(), "step": torch.tensor(3)})
    code, _, err = run("describe", folder)
    assert (code, f"dcp_to_torch {folder} FILE`" in err) == (2, True), err
    assert "has no config.json. It holds a distributed checkpoint of torch" in err
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path())
    model.save_pretrained(tmp_path / "new", state_dict=saved["model"])
    assert rope.detect_pairing(tmp_path / "new").pairing == "half"


def test_the_output_folder_of_a_trainer_names_its_newest_checkpoint(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=11, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True
    )
    ids = torch.arange(8)
    data: Any = [{"input_ids": ids, "labels": ids}] * 4
    transformers.Trainer(build("llama"), arguments, train_dataset=data).train()
    for arguments_ in (*commands(tmp_path / "run", tmp_path).values(), ("describe", tmp_path / "run")):
        code, _, err = run(*arguments_)
        assert (code, f": give {tmp_path / 'run' / 'checkpoint-11'}" in err) == (2, True), (arguments_, err)
    assert run("describe", tmp_path / "run" / "checkpoint-11")[0] == 0


def test_a_folder_that_a_trainer_left_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    torch.save({"state": {"model.layers.0.self_attn.q_proj.weight": 0}}, tmp_path / "run/checkpoint-3/optimizer.bin")
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    assert "the state of a training without its weights" in message(tmp_path / "run")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "pickle"])
def test_a_state_dict_under_the_names_of_transformers_needs_another_name(old: bool, tmp_path: Path) -> None:
    folder = beside(tmp_path / "model")
    torch.save(weights(), folder / "model.pth", _use_new_zipfile_serialization=not old)
    assert f"if {folder / 'model.pth'} holds nothing else, rename it to pytorch_model.bin" in message(folder)
    (folder / "model.pth").rename(folder / "pytorch_model.bin")
    assert rope.detect_pairing(folder).pairing == "half"


def test_parts_without_their_index(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "parts of a model without the index that lists them: get model.safetensors.index.json" in message(tmp_path)


# --- names of files, as the programs document them ----------------------------------------------------------------

NAMED: dict[str, tuple[str, str]] = {
    "lit_model.pth": ("a model of LitGPT", "`litgpt convert_from_litgpt FOLDER NEW`"),
    "final/lit_model.pth": ("a model of LitGPT in 'final'", "`litgpt convert_from_litgpt FOLDER/final NEW`"),
    "lit_model.pth.lora": ("an adapter of LitGPT", "`litgpt merge_lora FOLDER`"),
    "original/consolidated.00.pth": ("Meta's own format", "`rope-ext convert FOLDER/original NEW --to hf`"),
    "consolidated.safetensors": ("Mistral's own format", "`rope-ext convert FOLDER NEW --to hf`"),
    "iter_0000100/common.pt": ("a distributed checkpoint of Megatron", "export_ckpt(FOLDER/iter_0000100, NEW)"),
    "iter_0000100/mp_rank_00/model_optim_rng.pt": ("Megatron-LM in its older format", "--ckpt-convert-format"),
    "context/io.json": ("NeMo 2", "export_ckpt(path=FOLDER, target='hf', output_path=NEW)"),
    "llama.nemo": ("a checkpoint of NeMo", "checkpoint_converters"),
    "global_step500/mp_rank_00_model_states.pt": (
        "DeepSpeed in 'global_step500'",
        "`python -m deepspeed.utils.zero_to_fp32 FOLDER FOLDER --safe_serialization`",
    ),
    "pytorch_model_fsdp_rank0.bin": ("parts of FSDP", "FULL_STATE_DICT"),
    "adapters.safetensors": ("an adapter of MLX", "`mlx_lm.fuse --model MODEL --adapter-path FOLDER"),
    "weights.npz": ("weights of MLX", "made from"),
    "model-Q4_K_M.gguf": ("a GGUF file", "`rope-ext convert FOLDER/model-Q4_K_M.gguf NEW --to hf --dequantize"),
    "output-00001-of-00002.safetensors": ("quantised by ExLlama", "made from"),
    "onnx/model.onnx": ("an ONNX model in 'onnx'", "exported from"),
    "openvino_model.xml": ("an OpenVINO model", "exported from"),
    "rank0.engine": ("TensorRT-LLM or MLC", "built from"),
    "tf_model.h5": ("weights of TensorFlow", "from_pretrained(FOLDER, from_tf=True)"),
    "flax_model.msgpack": ("weights of Flax", "from_pretrained(FOLDER, from_flax=True)"),
    "default/_CHECKPOINT_METADATA": ("a checkpoint of Orbax", "MaxText"),
    "weights.safetensors": ("safetensors under another name", "rename it to model.safetensors"),
}


@pytest.mark.parametrize("name", NAMED)
def test_formats_by_the_names_of_their_files(name: str, tmp_path: Path) -> None:
    form, advice = NAMED[name]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    assert form in message(tmp_path)
    assert advice.replace("FOLDER", str(tmp_path)) in message(tmp_path)
    on_hub = format_on_hub("some/model", ["config.json", name])
    assert form in on_hub
    assert "hf download some/model --local-dir FOLDER" in on_hub


BY_TENSORS: dict[str, tuple[str, str, str]] = {
    "gpt-fast": ("model.pth", "layers.0.attention.wqkv.weight", "a model of gpt-fast"),
    "torchtune": ("model-00001-of-00001.bin", ATTENTION, "a model under torchtune's names"),
}


@pytest.mark.parametrize("program", BY_TENSORS)
def test_formats_by_the_names_of_their_tensors(program: str, tmp_path: Path) -> None:
    file, tensor, form = BY_TENSORS[program]
    torch.save({tensor: torch.zeros(2)}, tmp_path / file)
    assert form in message(tmp_path)
    torch.save({"another": torch.zeros(2)}, tmp_path / file)
    assert form not in message(tmp_path)


def test_a_distributed_checkpoint_of_torchtune_has_names_of_its_own(tmp_path: Path) -> None:
    save_distributed(tmp_path / "dist_epoch_0", {ATTENTION: torch.zeros(2)})
    assert "a distributed checkpoint of torchtune in 'dist_epoch_0'" in message(tmp_path)


# --- subfolders, layers, hostile files ----------------------------------------------------------------------------


def test_numbers_in_names_count_by_their_value(tmp_path: Path) -> None:
    for step in (500, 1000, 90):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").touch()
    text = message(tmp_path)
    assert "in 3 subfolders, the last of which is 'checkpoint-1000'" in text
    assert text.endswith(f"give {tmp_path / 'checkpoint-1000'}")


def test_a_layer_on_top_of_a_model_is_not_taken_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "model.safetensors").touch()
    (tmp_path / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}]))
    assert message(tmp_path) == ""


def test_weights_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "copy config.json" in without_config(tmp_path)
    code, _, err = run("describe", tmp_path)
    assert (code, "It holds model.safetensors without config.json" in err) == (2, True)


def outside(folder: Path) -> None:
    torch.save({ATTENTION: torch.zeros(2)}, folder.parent / "outside.pt")
    (folder / "model.pt").symlink_to(folder.parent / "outside.pt")


def cut_off(folder: Path) -> None:
    torch.save({ATTENTION: torch.zeros(2)}, folder / "model.pt")
    whole = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(whole[-100:])


def without_a_list(folder: Path) -> None:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("other", ATTENTION)


def a_folder(folder: Path) -> None:
    (folder / "model.pt").mkdir()


def a_circle(folder: Path) -> None:
    (folder / "more").symlink_to(folder)
    (folder / "model.pt").symlink_to("model.pt")


@pytest.mark.parametrize("make", [outside, cut_off, without_a_list, a_folder, a_circle])
def test_files_that_say_nothing_leave_the_format_unknown(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    assert message(folder) == ""


def test_deep_and_very_many_files_are_not_listed(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "lit_model.pth").touch()
    assert message(tmp_path) == ""
    (deep.parent / "lit_model.pth").touch()
    assert "LitGPT" in message(tmp_path)


def test_paths_are_quoted_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    (folder / "model.gguf").touch()
    (folder / "config.json").touch()
    assert f"`rope-ext convert {shlex.quote(str(folder / 'model.gguf'))} NEW" in message(folder)


# --- weights that are packed --------------------------------------------------------------------------------------


def packed_by_mlx(folder: Path) -> Path:
    """Write a folder as mlx_lm.convert --quantize does: 8 numbers of 4 bits in each uint32, scales and biases."""
    beside(folder)
    tensors = {}
    for name, tensor in weights().items():
        tensors[name] = tensor
        if "proj" in name:
            module = name.removesuffix(".weight")
            groups = torch.ones(len(tensor), tensor.shape[1] // 64)
            tensors[name] = torch.zeros(len(tensor), tensor.shape[1] // 8, dtype=torch.uint32)
            tensors |= {f"{module}.scales": groups, f"{module}.biases": groups.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    (folder / "config.json").write_text(
        json.dumps(config | dict.fromkeys(("quantization", "quantization_config"), settings))
    )
    return folder


def test_weights_that_mlx_has_quantised(tmp_path: Path) -> None:
    folder = packed_by_mlx(tmp_path / "mlx")
    line = f"`mlx_lm.convert --hf-path {folder} --mlx-path NEW --dequantize`"
    typed = commands(folder, tmp_path)
    for name in ("convert", "ppl"):
        code, _, err = run(*(word if word != "hf" else "interleaved" for word in typed[name]))
        assert (code, line in err) == (2, True), err
    assert run(*typed["patch"])[0] == 0  # for mlx-lm; the bytes are copied


def test_weights_of_mlx_that_are_not_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    folder = beside(tmp_path / "mlx")
    save_file(weights(), folder / "model.safetensors", {"format": "mlx"})
    assert rope.detect_pairing(folder).pairing == "half"
    rope.convert_checkpoint(folder, tmp_path / "new", "interleaved", verify=True)
    assert rope.from_pretrained(folder, "yarn", factor=2) is not None


def test_an_adapter_of_mlx_is_not_one_of_peft(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "adapters.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "model": "some/model"}))
    code, _, err = run("describe", tmp_path)
    assert (code, "`mlx_lm.fuse --model MODEL --adapter-path" in err) == (2, True), err


@pytest.mark.parametrize(
    "settings", [None, {"quant_method": "gptq", "bits": 4, "group_size": 128}, {"quant_method": "fp8"}, []]
)
def test_quantisations_of_transformers_are_left_alone(settings: Any) -> None:
    check_packed({"quantization_config": settings}, "some/model")


def test_exllama_packs_in_its_own_way() -> None:
    with pytest.raises(CheckpointError, match="quantised by ExLlama"):
        check_packed({"quantization_config": {"quant_method": "exl3", "bits": 4.0}}, "some/model")
