"""The names of `mindio_ttp`, served by mindspeed_tft. `mindspeed_tft.facade.mindio` makes this importable."""
