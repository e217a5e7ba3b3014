"""The page of `bsi view`: a belief sharpens before one's eyes, on this machine alone.

finishing.py    what the page can ask of a model: draw, denoise, inpaint, as trajectories
workbench.py    a trained model and its test images, and the frames of one request
jobs.py         a few requests at a time, each canceled when its client leaves
guard.py        who may ask: this machine, this page, this token
server.py       the addresses, put together
page/           HTML, CSS and JavaScript as they are served
"""
