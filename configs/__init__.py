"""YAML presets for `--tft-config`; installed as `mindspeed_tft.configs`."""
