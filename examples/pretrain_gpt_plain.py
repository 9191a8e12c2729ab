"""The same GPT pre-training as pretrain_gpt.py, on stock Megatron: the plugin is not imported.

What a checkpoint of the plugin is resumed with to show that it needs no plugin, and what bytes are compared with.
"""

import torch

if not torch.cuda.is_available():  # on a GPU Megatron needs no help
    from mindspeed_tft import on_cpu

    on_cpu.install_before_megatron()

import gpt_program

if __name__ == "__main__":
    gpt_program.main()
