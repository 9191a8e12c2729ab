"""Importing it has MindSpeed take its patches back and apply them anew, as trainers on top of it do (verl)."""

from mindspeed import megatron_adaptor

megatron_adaptor.repatch({})
