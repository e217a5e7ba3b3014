"""A run as one HTML file that opens offline: no script, no network, everything inside.

write_report(Path("runs/digits"))                # runs/digits/report.html

folder.py     what the run folder says: recipe, journal, samples, evaluations, environment, hashes
measured.py   what the model says when asked: a belief that sharpens, its bound, where its bits are
charts.py     curves as SVG
page.py       the document
"""

from bsi.report.page import write_report

__all__ = ["write_report"]
