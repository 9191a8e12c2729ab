"""The drill's job on the recording device where it is broken, and on plain CPUs where it is not: what a recovery on
that device ends in is compared with runs that know nothing of it."""

from __future__ import annotations

import sys

from mindspeed_tft.faults import gpt_job

if __name__ == "__main__":
    if sys.argv[1:2] == [gpt_job.WITH_PLUGIN]:
        sys.argv = ["nccl" if word == "gloo" else word for word in sys.argv]
    else:
        sys.path = [place for place in sys.path if not place.endswith("fake_torch_npu")]
    gpt_job.main()
