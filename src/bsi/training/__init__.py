"""Training: a recipe (what a run is) and everything that carries it to its last step, whatever happens on the way.

recipe.py, plain.py, resume.py      what a run is, as JSON, and what may change when it goes on; no torch
stream.py                           what a step sees, as a function of seed and count
step.py, audit.py, ema.py, loop.py  one step; the fixed order of sums; the average; the loop
checkpoint.py, saver.py, files.py   folders that are whole or not there, written in the background
folder.py, journal.py, lease.py     a run's folder, its journal, and who may write in it
distributed.py, rendezvous.py       ranks, and how they meet
stop.py, watchdog.py                signals, and ranks that hang
room.py, host.py                    the option that makes it fit, where memory runs out
dataset.py, evaluate.py             what is trained on; the bound and samples along the way
train.py, export.py                 `bsi.train`; `bsi.load` and `bsi export`
"""
