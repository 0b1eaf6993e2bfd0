"""Which recipe is active, in this thread and in what runs again."""
