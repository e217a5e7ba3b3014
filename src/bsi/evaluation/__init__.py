"""Evaluation of trained models: from a run folder to records with standard errors.

runs.py          run folders, splits, records and where they are stored
samples.py       many samples, in parts that survive an interruption, and their quality
likelihoods.py   all likelihoods of a model side by side, and rate-distortion
speed.py         how fast a network trains, samples and evaluates the bound
"""
