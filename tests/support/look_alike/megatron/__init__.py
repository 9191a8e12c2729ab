"""As much of Megatron as reads a command line."""
