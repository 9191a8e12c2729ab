"""The scripts of a TaskD job, in our words: a manager, and torchrun as image builds edit it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

MANAGER = """
import os
from taskd.api import init_taskd_manager, start_taskd_manager

job_id = os.getenv("MINDX_TASK_ID")
init_taskd_manager({{"job_id": job_id, "node_nums": 1, "proc_per_node": {ranks}}})
print("over:", start_taskd_manager())
"""


def edited_launcher(directory: Path) -> Path:
    """torchrun's file with the line that image builds put before its imports."""
    spec = importlib.util.find_spec("torch.distributed.run")
    assert spec is not None and spec.origin is not None
    text = re.sub(r"^(?=import os$)", "import taskd.python.adaptor.patch\n", Path(spec.origin).read_text(), flags=re.M)
    assert text.count("taskd") == 1
    path = directory / "run.py"
    path.write_text(text)
    return path
