"""The texts of a folder: which of its files are read, and one line about those that are not.

A folder may be the clone of a data set repository of the Hub, or lie in the Hub's cache; then it has the texts that
hf:OWNER/NAME would have: one split, without the repository's card.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rope_ext_hf.errors import CorpusError, did_you_mean, printable, short

_Kind = Callable[[Path], str | None]
"""A function that returns "table", "prose" or None: how the content of a file is read, by its suffix."""

_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words that name a split in the name of a file or folder; those of the `datasets` library."""
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b")
_CARD = "README.md"
_CARD_KEYS = {"configs", "dataset_info", "task_categories", "size_categories", "annotations_creators"}
"""Keys that distinguish the card of a data set from another README.md with a YAML block."""
_NOT_DATA = {_CARD, "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json", "state.json"}
"""Files of a data set repository that hold none of its data."""
_NAMED = 3  # files left out that a message names


class TextFiles(NamedTuple):
    """The files of a corpus.

    Attributes:
        root: the folder that the names of documents are relative to.
        files: the files, in reading order.
        left_out: a sentence about what is left out; empty if nothing is.
    """

    root: Path
    files: list[Path]
    left_out: str = ""


def texts_of_folder(folder: Path, kind: _Kind, *, config: str | None = None, split: str | None = None) -> TextFiles:
    """Return the files of text in a folder and below, sorted; hidden files are no text.

    Args:
        folder: the folder.
        kind: see `_Kind`.
        config, split: those of a data set repository; default: as for hf:OWNER/NAME.

    Raises:
        CorpusError: a choice is missing or wrong.
    """
    folder = _snapshot(folder)
    files, links = _walk(folder, kind)
    chosen, chosen_split = _data_files(folder, files, kind, config, split)
    sentences = []
    name = folder.resolve().name  # without its parents, because the sentence stands in reports
    if len(chosen) < len(files):
        rest = [file.relative_to(folder).as_posix() for file in files if file not in {*chosen}]
        part = f"split {chosen_split!r}" if chosen_split else "data"
        sentences.append(f"is a data set repository, of which only the {part} is read, not {_listed(rest)}")
    if links:
        first = Path(name) / links[0].relative_to(folder)
        pattern = first / "*" if links[0].is_dir() else first.with_name(f"*{first.suffix}")
        names = _listed([link.relative_to(folder).as_posix() for link in links])
        sentences.append(
            f"has links that lead out of it or nowhere, which are not read: {names}; a pattern such as "
            f"{short(str(pattern))!r} reads them"
        )
    return TextFiles(folder, chosen, f"{short(printable(name))!r} {', and '.join(sentences)}" if sentences else "")


def _walk(folder: Path, kind: _Kind) -> tuple[list[Path], list[Path]]:
    """Return the files of text in a folder and below, and the links that are left out, both sorted.

    A link is followed if it stays in the folder, or leads from a snapshot in the Hub's cache to the files of the same
    repository there. Other links are left out, because a folder from elsewhere could name any file by them.
    """
    files, links = [], []
    own = [folder.resolve(), *_blobs(folder)]
    for file in folder.rglob("*"):
        is_text = kind(file) is not None
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        target = Path(os.path.realpath(file))
        if file.is_file() and any(target.is_relative_to(place) for place in own):
            if is_text:
                files.append(file)
        elif file.is_symlink() and (is_text or (file.is_dir() and not target.is_relative_to(own[0]))):
            links.append(file)

    def parts(file: Path) -> tuple[str, ...]:
        return file.relative_to(folder).parts

    return sorted(files, key=parts), sorted(links, key=parts)


# --- the Hub's cache --------------------------------------------------------------------------------------------------


def _snapshot(folder: Path) -> Path:
    """Return the newest revision of a repository in the Hub's cache if a folder is that repository, else the folder.

    Raises:
        CorpusError: there are several revisions, and none is known as the newest.
    """
    repository = folder.parent if folder.name == "snapshots" else folder
    snapshots = repository / "snapshots"
    if not (snapshots.is_dir() and (repository / "blobs").is_dir()):
        return folder
    main = repository / "refs" / "main"
    revisions = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if main.is_file() and (newest := snapshots / main.read_text(encoding="utf-8").strip()) in revisions:
        return newest
    if len(revisions) == 1:
        return revisions[0]
    raise CorpusError(
        f"the folder {str(folder)!r} holds {len(revisions)} revisions of a data set; give one of the folders in "
        f"{str(snapshots)!r}: {_listed([path.name for path in revisions])}"
    )


def _blobs(folder: Path) -> list[Path]:
    """Return the folder to which the links of a snapshot in the Hub's cache lead, if the folder is in a snapshot."""
    inner = folder.resolve()
    return [
        parent.parent / "blobs"
        for parent in inner.parents
        if parent.name == "snapshots" and (parent.parent / "blobs").is_dir()
    ]


# --- data set repositories --------------------------------------------------------------------------------------------


def _data_files(
    folder: Path, files: Sequence[Path], kind: _Kind, config: str | None, split: str | None
) -> tuple[list[Path], str | None]:
    """Return the files that hold the data of a folder, and the split that they are; None if there are no splits.

    In a folder that is not a data set repository, these are all files.
    """
    tables = [file for file in files if kind(file) == "table" and file.name not in _NOT_DATA]
    card = _card(folder)
    configs = _configs(folder, files, card)
    if config is not None and config not in configs:
        known = f" Its configurations: {', '.join(configs)}" if configs else ""
        raise CorpusError(f"the folder {str(folder)!r} has no configuration {config!r}.{known}")
    if configs:
        splits = configs[config or _default_config(folder, configs, card)]
    else:
        # without tables only .txt files are data, because the names of code and pages have such words, too
        splits = _splits(folder, tables or [file for file in files if ".txt" in file.suffixes], strictly=not tables)
    if split is not None and split not in splits:
        known = f"{did_you_mean(split, splits)} Its splits: {', '.join(splits)}" if splits else ""
        raise CorpusError(f"the folder {str(folder)!r} has no split {split!r}.{known}")
    if configs or split is not None or len(splits) > 1:
        chosen = split or default_split(splits, f"the folder {str(folder)!r}")
        if not splits[chosen]:
            raise CorpusError(
                f"the files of the split {chosen!r} in {str(folder)!r} are missing, or of a kind that is not read"
            )
        return splits[chosen], chosen
    if card and tables:
        return tables, None
    about = {folder / _CARD} if card else {file for file in files if tables and file.name in _NOT_DATA}
    return [file for file in files if file not in about], None


def _card(folder: Path) -> dict[str, Any]:
    """Return the values in the card of a data set, the YAML block at the beginning of README.md; {}: there is none."""
    try:
        text = (folder / _CARD).read_text(encoding="utf-8")
        match = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
        values = yaml.safe_load(match[1]) if match else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) and _CARD_KEYS & set(values) else {}


def _configs(folder: Path, files: Sequence[Path], card: Mapping[str, Any]) -> dict[str, dict[str, list[Path]]]:
    """Return the files of each split of each configuration that the card of a data set lists."""
    configs: dict[str, dict[str, list[Path]]] = {}
    listed = card.get("configs")
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or "data_files" not in entry:
            continue
        splits: dict[str, list[Path]] = {}
        for split, patterns in _patterns(entry["data_files"]):
            splits.setdefault(split, []).extend(_matching(folder, files, patterns))
        configs[str(entry.get("config_name", "default"))] = splits
    return configs


def _patterns(data_files: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the splits that `data_files` in a card names, each with its patterns of files; without a split: train."""
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    for part in data_files if isinstance(data_files, list) else [data_files]:
        split, path = (part.get("split", "train"), part.get("path")) if isinstance(part, dict) else ("train", part)
        yield str(split), path if isinstance(path, list) else [path]


def _matching(folder: Path, files: Sequence[Path], patterns: Iterable[str]) -> list[Path]:
    """Return those files that a pattern of a card matches, or that lie in a folder that it matches."""
    try:
        matches = {match for pattern in patterns for match in folder.glob(str(pattern))}
    except (ValueError, NotImplementedError):  # such as an absolute path, or the address of another repository
        return []
    return [file for file in files if file in matches or not matches.isdisjoint(file.parents)]


def _default_config(folder: Path, configs: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Return the only configuration of a data set, or the one that its card calls the default."""
    if len(configs) == 1:
        return next(iter(configs))
    for entry in card["configs"]:
        if isinstance(entry, dict) and entry.get("default") is True and entry.get("config_name") in configs:
            return str(entry["config_name"])
    if "default" in configs:
        return "default"
    raise CorpusError(
        f"the folder {str(folder)!r} has several configurations; choose one with ?config=NAME: {', '.join(configs)}"
    )


def _splits(folder: Path, files: Sequence[Path], *, strictly: bool) -> dict[str, list[Path]]:
    """Return the files of each split, as the names of files and folders state it.

    Args:
        folder: the folder that the files lie in.
        files: the files.
        strictly: whether only a file or folder that has the name of a split and no more belongs to that split, because
            the titles of texts have such words, too.
    """
    splits: dict[str, list[Path]] = {}
    for file in files:
        *folders, name = file.relative_to(folder).parts
        shard = _SHARD.match(name)
        if shard is not None and (not strictly or _split_in(shard[1], strictly=True)):
            split: str | None = _split_in(shard[1], strictly=True) or (shard[1] if "data" in folders else None)
        else:
            split = None
        for part in () if split else (name.partition(".")[0] if strictly else name, *reversed(folders)):
            split = split or _split_in(part, strictly=strictly)
        if split is not None:
            splits.setdefault(split, []).append(file)
    return splits


def _split_in(name: str, *, strictly: bool) -> str | None:
    """Return the split that a name states; `strictly`: the name must be that of a split and nothing more."""
    for split, words in _KEYWORDS.items():
        either = "|".join(words)
        pattern = f"({either})" if strictly else f".*(?<![a-z])({either})(?![a-z]).*"
        if re.fullmatch(pattern, name.lower(), re.DOTALL):
            return split
    return None


def default_split(splits: Collection[str], where: str) -> str:
    """Return "test" if a data set has this split, else its only split; `where` names the data set in the message."""
    if "test" in splits:
        return "test"
    if len(splits) != 1:
        raise CorpusError(f"{where} has no split 'test'; choose one with ?split=NAME: {', '.join(splits)}")
    return next(iter(splits))


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    shown = ", ".join(short(printable(name)) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
