"""The import that image builds put into torch's launcher: see `mindspeed_tft.taskd.torchrun`."""

from mindspeed_tft.taskd import torchrun

torchrun.install()
