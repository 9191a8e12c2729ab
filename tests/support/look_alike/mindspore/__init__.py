"""Its presence says over which framework the torch beside it stands."""
