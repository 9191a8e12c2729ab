"""Every dtype goes to host memory, into a file and back with its bytes. The argument is the path of the file."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np

from mindspeed_tft.mindspore.framework import MindSpore
from mindspeed_tft.recovery.files import DumpError

PATH = Path(sys.argv[1])
DTYPES = (ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int8, ms.int32, ms.int64, ms.bool_)
numbers = np.random.default_rng(1).standard_normal((3, 5))
values = {str(dtype): ms.Tensor(numbers, ms.float32).astype(dtype) for dtype in DTYPES}
values["scalar"] = ms.Tensor(1.5, ms.float32)
framework = MindSpore(values, 1, lambda: {"epoch_num": 3})
framework.keep(7)
framework.keep(8)
framework.keep(9)
assert framework.agree([4, -4]) == [4, -4]
framework.write(9, PATH)
found = ms.load_checkpoint(str(PATH))
for name, value in values.items():
    assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
    assert found[name].get_bytes() == value.get_bytes(), name
assert (int(found["tft_step"].asnumpy()), int(found["epoch_num"].asnumpy())) == (9, 3)
framework.write(8, PATH)
try:
    framework.write(7, PATH)
except DumpError as exc:
    print(f"as it should be: {exc}")
