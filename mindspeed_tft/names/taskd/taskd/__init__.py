"""The import names of TaskD, served by `mindspeed_tft.taskd`."""

from mindspeed_tft import names

names.claim("taskd")
