"""The page of `bsi view`: watch a belief sharpen, denoise and inpaint, in a browser on this machine.

workbench.py    the model, its test images, requests and their frames
server.py       access control, the addresses, the streaming and the server
page/           HTML, CSS and JavaScript, served as they are
"""
