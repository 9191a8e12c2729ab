"""Importing it makes CUDA's names mean NPUs; here they mean the CPU already (`torch_npu`)."""
