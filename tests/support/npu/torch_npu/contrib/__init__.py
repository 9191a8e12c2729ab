from torch_npu.contrib import transfer_to_npu  # noqa: F401
