"""Evaluation of trained models: from a run folder to records with standard errors."""
