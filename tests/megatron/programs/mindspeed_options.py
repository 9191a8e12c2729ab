"""Print all options that MindSpeed's features add to a command line, as JSON: flag to {attribute, default}."""

from __future__ import annotations

import argparse
import json
import sys

sys.argv[1:] = []

import mindspeed.megatron_adaptor  # noqa: E402, F401
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager  # noqa: E402

parser = argparse.ArgumentParser(allow_abbrev=False)
MindSpeedFeaturesManager.register_features_args(parser)
found = {
    option: {"attribute": action.dest, "default": action.default}
    for action in parser._actions
    for option in action.option_strings
    if not isinstance(action, argparse._HelpAction)
}
print("OPTIONS", json.dumps(found, default=str))
