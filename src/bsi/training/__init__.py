"""Training, from a recipe to a finished run folder.

train.py      `bsi.train`: everything is opened, checked and restored, then the loop runs
loop.py       the training loop: steps, journal, evaluation, checkpoints and signals
step.py       batches, gradients and update, on any number of ranks; replay.py records a step as a CUDA graph
optimizers.py AdamW and Muon
dataset.py    the training data
resume.py     which checkpoint a run resumes from, and which settings may differ
lock.py       one run per folder
"""
