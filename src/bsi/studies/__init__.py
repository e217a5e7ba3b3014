"""The paper's tables and figures, each by one command: `bsi study NAME --scale smoke|mini|medium|paper --out FOLDER`.

A study is a list of measurements of trained networks, and an outcome made from their results: tables, a figure, and a
verdict on each claim. Jobs are plain records; the file that keeps a job's result is named by a hash of the record. So
studies share networks and measurements, and an interrupted study resumes when the same command is run again.

    scale.py      the settings of each scale: digits on a CPU, CIFAR-10 on one GPU, or the paper's own
    measure.py    jobs: trainings, and measurements of bounds, errors and samples; the store of their results
    outcome.py    estimates with errors, claims, tables, figures, the registry of studies
    runner.py     the plan, training, resuming, and time limits; docs/results.md

The studies are in illustration, comparison, bounds and ablations.
"""
