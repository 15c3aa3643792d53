"""The local cache of the Hugging Face hub: where the config.json of a model lies, by its id.

The layout is that of huggingface_hub (its guide "Understand caching"):
`models--ORG--NAME/refs/main` holds the commit of the newest download, `snapshots/COMMIT` its files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from stagewright.errors import UserError
from stagewright.files import read_text

_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")


def is_id(name: str) -> bool:
    """True if a name may be an id of the hub, `ORG/NAME`.

    >>> is_id("Qwen/Qwen3-8B"), is_id("gpt2"), is_id("a/config.json"), is_id("../x")
    (True, False, False, False)
    """
    is_path = ".." in name or "--" in name or name.endswith((".json", ".yaml", ".yml", ".stg"))
    return "/" in name and bool(_ID.fullmatch(name)) and not is_path


def cache_folder() -> Path:
    """The folder of the cache, as huggingface_hub finds it (`huggingface_hub.constants`)."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.path.expandvars(os.environ[name])).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(os.environ["HF_HOME"])).expanduser() / "hub"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "huggingface" / "hub"


def config_of(name: str) -> Path | None:
    """The config.json of a model of the hub in the local cache; None: it is not there."""
    if not _ID.fullmatch(name) or ".." in name:
        return None
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        snapshots = _snapshots(folder)
        return next((file for at in snapshots if (file := at / "config.json").is_file()), None)
    except (OSError, ValueError, UserError):
        return None


def name_of(file: Path) -> str:
    """The name of a model from where its config.json lies: the model's in the cache of the hub, or
    that of the folder.

    >>> name_of(Path("hub/models--Qwen--Qwen3-8B/snapshots/0f3c/config.json"))
    'Qwen3-8B'
    """
    folder = file.parent.resolve()
    if folder.parent.name == "snapshots" and "--" in folder.parent.parent.name:
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name


def _snapshots(folder: Path) -> list[Path]:
    """The snapshot that refs/main names; without that, one that is alone."""
    main = folder / "refs" / "main"
    if main.is_file():
        commit = read_text(main, "a commit", 1000).strip()
        return [folder / "snapshots" / commit] if re.fullmatch(r"[0-9a-zA-Z]{1,64}", commit) else []
    there = sorted(at for at in (folder / "snapshots").iterdir() if at.is_dir())
    return there if len(there) == 1 else []
