"""What a trained model is worth: bits per dimension and sample quality, from a run folder to a record with its errors.

bound.py        the bound of a set of samples, its Monte Carlo error and its data error; differences of two
points.py       at which levels, and how the error of stratified estimates is known: independent replicates
integral.py     L_M^inf and L_M^k as one integral over ln(level)
plan.py         proposals over levels; what is learned from a pilot
control.py      the control variate, and the proposal that suits it
basis.py        what is known of an evaluation without the network
references.py   denoisers whose expected error is known; valuewise.py those that see each value by itself
subject.py      a model on a set of samples, of which each rank evaluates a part
runs.py         run folders, records, provenance
quality.py      samples of a run against its dataset
speed.py        how fast a network trains, samples and measures; start.py: what the first step waits for
agreement.py    how far its fast form is from float32
"""
