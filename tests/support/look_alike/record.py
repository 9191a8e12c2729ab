"""What the torch beside this module was asked for."""

ASKED: list[str] = []  # names of its attributes, and modules below it, in the order of the questions
