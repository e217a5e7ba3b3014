"""The page of `bsi view`: watch a belief sharpen, denoise and inpaint, in a browser on this machine.

requests.py     what the page can request, and the limits
workbench.py    the model, its test images and the frames of a request
guard.py        access control: this machine, this page, this token
server.py       the addresses, the streaming and the server
page/           HTML, CSS and JavaScript, served as they are
"""
