"""The entry points that every release has."""
