"""Every table and figure of the paper by one command: `bsi study NAME --scale smoke|mini|paper --out FOLDER`.

A study is a list of jobs (train a network, measure something of one) and a report made of their results: a figure,
tables, and one sentence that says whether the paper's claim held. Jobs are records; what a job has to do follows from
it alone, and so does the name of the file that its result is kept in. So studies share networks and measurements, and
an interrupted study goes on where it was.

    scale.py      how large: digits on a CPU, CIFAR-10 on one GPU, or the paper's own
    job.py        the kinds of jobs, their names and estimated times
    store.py      where networks and measurements are kept
    networks.py   train one, keep its moving average
    measure.py    bits per dimension, sample quality, errors over the levels
    runner.py     what is left to do, in which order, and until when
    report.py     tables with errors, claims, files
    registry.py   the studies, one file each
"""
