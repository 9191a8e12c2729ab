"""Only for the names below it."""
