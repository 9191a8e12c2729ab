"""A directory for PYTHONPATH (see `mindspeed_tft.names`), not a package to import from."""
