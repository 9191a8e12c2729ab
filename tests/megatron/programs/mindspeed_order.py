"""Import MindSpeed and the plugin in the order of the arguments ("mindspeed", "ours", "repatch"), then Megatron, and
turn all patches on that high availability needs. Print as JSON which of them are in place, and which targets MindSpeed
has patched too."""

from __future__ import annotations

import importlib
import json
import sys

orders, sys.argv[1:] = sys.argv[1:], ["--enable-high-availability", "--optimization-level", "2"]

import torch  # noqa: E402, F401

MODULES = {"mindspeed": "mindspeed.megatron_adaptor", "ours": "mindspeed_tft.adaptor", "repatch": "mindspeed_repatched"}
for word in orders:
    importlib.import_module(MODULES[word])
importlib.import_module("megatron.training")

from mindspeed_tft.patches import high_availability  # noqa: E402
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY, PARSER  # noqa: E402
from mindspeed_tft.registry import REGISTRY  # noqa: E402

high_availability.declare()
REGISTRY.activate(HIGH_AVAILABILITY)
for again in (False, True):
    if again:  # as verl does, once everything stands
        importlib.import_module("mindspeed.megatron_adaptor").repatch({})
    shared = [row.target for group in (PARSER, HIGH_AVAILABILITY) for row in REGISTRY.verify(group)]
    rows = [row for row in REGISTRY.list() if row.group in (PARSER, HIGH_AVAILABILITY)]
    found = {
        "applied": [row.target for row in rows if row.state == "applied"],
        "others": [f"{row.state} {row.target}: {row.detail}" for row in rows if row.state != "applied"],
        "shared": sorted(set(shared)),
    }
    print("FOUND", json.dumps(found))
