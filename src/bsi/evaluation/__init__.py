"""Evaluation of trained models: from a run folder to records with standard errors.

runs.py       run folders, splits, records and where they are stored
samples.py    many samples, in parts that survive an interruption
quality.py    sample quality: samples of a run against its dataset
speed.py      how fast a network trains, samples and evaluates the bound
"""
