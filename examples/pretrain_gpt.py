"""GPT pre-training with the plugin. The one line is the whole change to the program; flags turn features on.

torchrun --nproc-per-node 4 examples/pretrain_gpt.py --enable-high-availability ... (see pretrain_gpt_cpu.sh)
"""

# isort: off
import torch  # noqa: F401
import mindspeed_tft.adaptor  # noqa: F401  # before megatron; after mindspeed.megatron_adaptor, where MindSpeed is used

import gpt_program

if __name__ == "__main__":
    gpt_program.main()
