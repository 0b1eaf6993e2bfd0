"""Recipes: the user's choice of formats and rules."""
