"""The names of `mindio_ttp` in a MindSpore job. See `mindspeed_tft.mindspore.mindio`, which makes this importable."""
