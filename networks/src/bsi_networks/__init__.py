"""Trained networks for bsi: a folder for each, with its weights, its description and its model card."""
