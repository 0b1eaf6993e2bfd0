"""The public functions, one file a verb."""
