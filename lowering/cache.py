"""Where compiled kernels are kept on disk."""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Where compiled kernels are kept: beside Inductor's own cache.

    Inductor says where that is, if it is loaded. Its import takes seconds (four with cold files
    on an H200's machine), which a process that calls the op without compiling needn't spend: then
    its rule is applied here.
    """
    module: Any = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if module is not None:
        folder = str(module.cache_dir())
    else:
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _inductors_default()
    return Path(folder).absolute() / "fx_fusion"


def _inductors_default() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):  # no name for this user id
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), name)
